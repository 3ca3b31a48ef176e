// NF4 on the GPU, bit for bit the results of csrc/cpu/nf4.cpp.
#include "blocks.cuh"
#include "encode.cuh"
#include "four_bit.cuh"
#include "kernels.h"
#include "nf4.cuh"

namespace ts::quant {
namespace {

struct Nf4 {
  using Code = uint8_t;
  static constexpr bool kPacked = true;
  struct Scale {
    float factor;
    bool divides;
  };
  // Complete blocks multiply by the reciprocal; the last, incomplete one divides.
  __device__ static __forceinline__ Scale scale(float absmax, bool whole, float* stored) {
    const float divisor = absmax < kNf4SmallestDivisor ? kNf4SmallestDivisor : absmax;
    *stored = whole ? absmax : divisor;
    return whole ? Scale{__fdiv_rn(1.0f, divisor), false} : Scale{divisor, true};
  }
  __device__ static __forceinline__ unsigned code(float x, Scale s) {
    const float v = s.divides ? __fdiv_rn(x, s.factor) : __fmul_rn(x, s.factor);
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < 15; ++i) count += v > kNf4Tables.thresholds[i];
    return count;
  }
};

}  // namespace

void launch_quantize_nf4(const void* x, DType dtype, uint8_t* codes, float* absmax, int64_t n,
                         int64_t block_size, void* stream) {
  launch_encode<Nf4>(x, dtype, codes, absmax, n, block_size, static_cast<cudaStream_t>(stream),
                     "quantize_nf4");
}

void launch_dequantize_nf4(const uint8_t* codes, const float* absmax, void* out, DType dtype,
                           int64_t n, int64_t block_size, void* stream) {
  launch_decode_four_bit<Nf4Levels>(codes, PlainScales{absmax}, out, dtype, n, block_size, stream,
                                    "dequantize_nf4");
}

}  // namespace ts::quant
