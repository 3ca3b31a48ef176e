// Scalar 16-bit floats for host and CUDA code: storage types with exact, branch-light conversions.
// Rounding is to nearest even; NaN stays NaN (quiet), infinities stay infinite.
// Functions are static on purpose: the header is compiled for several instruction sets into one
// module, and an inline function shared by the linker could be the AVX-512 one on an older machine.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define TS_HOST_DEVICE __host__ __device__
#else
#define TS_HOST_DEVICE
#endif

// For what cannot be static, members of class templates: no copy is left for the linker to share.
#if defined(__GNUC__)
#define TS_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define TS_ALWAYS_INLINE inline
#endif

namespace ts {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

TS_HOST_DEVICE static inline uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

TS_HOST_DEVICE static inline float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

TS_HOST_DEVICE static inline float to_float(float x) { return x; }

TS_HOST_DEVICE static inline float to_float(bf16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

TS_HOST_DEVICE static inline float to_float(fp16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t exponent = (h.bits >> 10) & 0x1Fu;
  const uint32_t mantissa = h.bits & 0x3FFu;
  if (exponent == 0x1Fu) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // A subnormal half is mantissa * 2^-24, exact in fp32.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return sign ? -magnitude : magnitude;
}

TS_HOST_DEVICE static inline bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}

TS_HOST_DEVICE static inline fp16 to_fp16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return fp16{static_cast<uint16_t>(sign | 0x7E00u | ((a >> 13) & 0x3FFu))};
  if (a >= 0x477FF000u) return fp16{static_cast<uint16_t>(sign | 0x7C00u)};  // >= 65520
  if (a < 0x38800000u) {  // below 2^-14: round to a multiple of 2^-24 by adding 0.5
    const uint32_t r = float_bits(bits_float(a) + 0.5f) - 0x3F000000u;
    return fp16{static_cast<uint16_t>(sign | r)};
  }
  const uint32_t r = a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u);
  return fp16{static_cast<uint16_t>(sign | (r >> 13))};
}

template <typename T>
struct Convert;
template <>
struct Convert<float> {
  TS_HOST_DEVICE static TS_ALWAYS_INLINE float from(float x) { return x; }
};
template <>
struct Convert<bf16> {
  TS_HOST_DEVICE static TS_ALWAYS_INLINE bf16 from(float x) { return to_bf16(x); }
};
template <>
struct Convert<fp16> {
  TS_HOST_DEVICE static TS_ALWAYS_INLINE fp16 from(float x) { return to_fp16(x); }
};

}  // namespace ts
