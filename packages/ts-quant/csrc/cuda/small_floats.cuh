// e4m3 on the GPU: the card's own conversions, with the bits of small_floats.h and fp_values.h.
#pragma once

#include <cuda_fp8.h>

#include "../fp_values.h"
#include "../small_floats.h"
#include "blocks.cuh"

namespace ts::quant {

// Eight codes in two words.
__device__ __forceinline__ uint2 e4m3_codes(const float* v) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2(make_float2(v[4 * i], v[4 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[4 * i + 2], v[4 * i + 3]),
                                                   __NV_SATFINITE, __NV_E4M3);
    words[i] = low | high << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Value of the e2m1 code in bits 4 i to 4 i + 3, exact: its exponent and mantissa, in the place of
// a float's, are 2^-126 of it, for 0.5 as a subnormal.
__device__ __forceinline__ float e2m1_at(uint32_t word, int i) {
  const int32_t top = static_cast<int32_t>(word << (28 - 4 * i));  // the sign in bit 31
  return __fmul_rn(__uint_as_float(static_cast<uint32_t>(top >> 6) & 0x81C00000u), 0x1p126f);
}

// Four values of a word, exact.
__device__ __forceinline__ void e4m3_values(uint32_t word, float* v) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
        static_cast<__nv_fp8x2_storage_t>(word >> (16 * i) & 0xFFFFu), __NV_E4M3);
    const float2 both = __half22float2(__half2(pair));
    v[2 * i] = both.x;
    v[2 * i + 1] = both.y;
  }
}

}  // namespace ts::quant
