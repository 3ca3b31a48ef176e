// Rounding to the small floats of FP8 and NVFP4, to nearest even and saturating, one source for CPU
// and GPU. Includes C headers only. Decoding is in fp_values.h.
#pragma once

#include <stdint.h>

#include "ts/numeric.h"

namespace ts::quant {

static constexpr uint32_t kFp8Largest = 0x7Eu;  // 448
static constexpr float kFp8Max = 448.0f;

// e4m3 code of a number that is not NaN: what is beyond the largest code's value gets that code.
TS_HOST_DEVICE static inline uint32_t e4m3_code(float x, uint32_t largest = kFp8Largest) {
  const uint32_t bits = float_bits(x), a = bits & 0x7FFFFFFFu;
  // A step of the format is 2^20 in the bits of a normal number, and 2^-9 below 2^-6: the last bit
  // of a float between 2^14 and 2^15.
  const uint32_t normal = ((a + 0x7FFFFu + ((a >> 20) & 1u)) >> 20) - 960u;
  const uint32_t small = float_bits(bits_float(a) + 16384.0f) - 0x46800000u;
  const uint32_t code = a < 0x3C800000u ? small : normal;
  return (code < largest ? code : largest) | ((bits >> 24) & 0x80u);
}

// e2m1 code of a number that is not NaN: 6 and beyond give 6.
TS_HOST_DEVICE static inline uint32_t e2m1_code(float x) {
  const uint32_t bits = float_bits(x);
  const float a = bits_float(bits & 0x7FFFFFFFu);
  const uint32_t code = static_cast<uint32_t>(a > 0.25f) + (a >= 0.75f) + (a > 1.25f) +
                        (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | ((bits >> 28) & 8u);
}

// The smallest power of two with absmax / scale <= 448 = 1.75 * 2^8: nothing saturates, but for the
// last octave, where a value could round up to infinity. 255: the absmax is not finite.
TS_HOST_DEVICE static inline uint32_t e8m0_code(float absmax) {
  const uint32_t bits = float_bits(absmax) & 0x7FFFFFFFu, exponent = bits >> 23;
  if (exponent == 255u) return 255u;
  const uint32_t code = exponent + (exponent < 254u && (bits & 0x7FFFFFu) > 0x600000u);
  return code > 8u ? code - 8u : 0u;
}

// The largest code in a tile of fp16 values: under the scale 2^8, which they need from 57,376 on,
// 256 would be 65,536, which fp16 does not have. 240 then stands for 61,440 and all beyond it.
TS_HOST_DEVICE static inline uint32_t e8m0_largest_fp16(uint32_t code) {
  return code < 135u ? kFp8Largest : 0x77u;
}

// What values are multiplied with before they are rounded: one over the scale. `code` is not 255.
TS_HOST_DEVICE static inline float e8m0_inverse(uint32_t code) {
  return bits_float((254u - code) << 23);
}

}  // namespace ts::quant
