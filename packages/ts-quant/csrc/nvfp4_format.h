// NVFP4: e2m1 codes, an e4m3 scale per 16 columns, and a float for the tensor. One source for CPU
// and GPU; includes C headers only.
//
// tensor scale t = absmax / (6 * 448), 1 where that is 0. A group's scale is s = e4m3(absmax / 6 /
// t) and its values are code * (s * t). Where s comes out more than a tenth too large, which only
// happens below 2^-6, it is the next smaller one: no value grows by more than that.
#pragma once

#include <stdint.h>

#include "fp_values.h"
#include "small_floats.h"
#include "ts/numeric.h"

namespace ts::quant {

static constexpr int64_t kNvfp4Group = 16;

#if defined(__CUDA_ARCH__)
#define TS_QUANT_DIVIDE(a, b) __fdiv_rn(a, b)
#define TS_QUANT_MULTIPLY(a, b) __fmul_rn(a, b)
#else
#define TS_QUANT_DIVIDE(a, b) ((a) / (b))
#define TS_QUANT_MULTIPLY(a, b) ((a) * (b))
#endif

// `bits` are those of the largest magnitude of the tensor; not finite, they stay so.
TS_HOST_DEVICE static inline float nvfp4_tensor_scale(uint32_t bits) {
  const float scale = TS_QUANT_DIVIDE(bits_float(bits), 2688.0f);
  return scale == 0.0f ? 1.0f : scale;
}

// The code of a group's scale.
TS_HOST_DEVICE static inline uint32_t nvfp4_scale_code(float absmax, float tensor_scale) {
  const float wanted = TS_QUANT_DIVIDE(TS_QUANT_DIVIDE(absmax, 6.0f), tensor_scale);
  const uint32_t code = e4m3_code(wanted);
  return e4m3(code) > TS_QUANT_MULTIPLY(1.1f, wanted) ? code - 1u : code;
}

TS_HOST_DEVICE static inline float nvfp4_factor(uint32_t code, float tensor_scale) {
  return TS_QUANT_MULTIPLY(e4m3(code), tensor_scale);
}

#undef TS_QUANT_DIVIDE
#undef TS_QUANT_MULTIPLY

}  // namespace ts::quant
