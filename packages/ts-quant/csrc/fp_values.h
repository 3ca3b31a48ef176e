// The small floats of MXFP4 and NVFP4, one source for CPU and GPU. Includes C headers only.
#pragma once

#include <stdint.h>

#include "ts/numeric.h"

namespace ts::quant {

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, the sign in bit 3.
TS_HOST_DEVICE static inline float e2m1(uint32_t code) {
  const uint32_t m = code & 7u;
  const uint32_t bits = m >= 2 ? (m + 252u) << 22 : m * 0x3F000000u;
  return bits_float(bits | (code & 8u) << 28);
}

// e4m3 without infinities: 448 is the largest, 0x7F and 0xFF are NaN.
TS_HOST_DEVICE static inline float e4m3(uint32_t code) {
  const uint32_t m = code & 127u, sign = (code & 128u) << 24;
  const float small = static_cast<float>(static_cast<int>(m)) * 0.001953125f;  // 2^-9
  const uint32_t normal = (m << 20) + (120u << 23);
  const uint32_t bits = m == 127u ? 0x7FC00000u : m < 8u ? float_bits(small) : normal;
  return bits_float(bits | sign);
}

// e8m0: 2^(code - 127); 255 is NaN.
TS_HOST_DEVICE static inline float e8m0(uint32_t code) {
  return bits_float(code == 255u ? 0x7FC00000u : code == 0u ? 0x00400000u : code << 23);
}

// What a tensor's scale does to the scales of its groups.
enum class Fp4Scale : int {
  kE8M0 = 0,        // MXFP4: groups of 32, no scale of the tensor
  kMultiplied = 1,  // NVFP4: groups of 16, e4m3 * tensor scale
  kDivided = 2,     // NVFP4 of compressed-tensors: e4m3 / tensor scale
};

TS_HOST_DEVICE static inline float fp4_scale(uint32_t code, Fp4Scale kind, float tensor_scale) {
  if (kind == Fp4Scale::kE8M0) return e8m0(code);
#if defined(__CUDA_ARCH__)
  return kind == Fp4Scale::kDivided ? __fdiv_rn(e4m3(code), tensor_scale)
                                    : __fmul_rn(e4m3(code), tensor_scale);
#else
  return kind == Fp4Scale::kDivided ? e4m3(code) / tensor_scale : e4m3(code) * tensor_scale;
#endif
}

}  // namespace ts::quant
