// int8 on the GPU, bit for bit the results of csrc/cpu/int8.cpp.
#include <type_traits>

#include "blocks.cuh"
#include "encode.cuh"
#include "kernels.h"

namespace ts::quant {
namespace {

__device__ __forceinline__ float int8_scale(float absmax) { return __fdiv_rn(absmax, 127.0f); }

struct Int8 {
  using Code = int8_t;
  static constexpr bool kPacked = false;
  struct Scale {
    float value;  // 0: the whole block gets code 0
  };
  __device__ static __forceinline__ Scale scale(float absmax, bool, float* stored) {
    *stored = absmax;
    return Scale{magnitude_bits(absmax) < 0x7F800000u ? int8_scale(absmax) : 0.0f};
  }
  __device__ static __forceinline__ unsigned code(float x, Scale s) {
    if (s.value == 0.0f) return 0;
    const int r = __float2int_rn(__fdiv_rn(x, s.value));
    return static_cast<unsigned>(max(-127, min(127, r)));
  }
};

__device__ __forceinline__ float value_of(uint32_t word, int byte) {
  return static_cast<float>(static_cast<int8_t>(word >> (8 * byte)));
}

// One 16-byte word of outputs a step; block_size is a multiple of the word's elements.
template <typename T>
__global__ void decode_kernel(const int8_t* __restrict__ codes, const float* __restrict__ absmax,
                              T* __restrict__ out, int64_t words, BlockOf block_of_word) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint2, uint1>;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  Packed packed[kUnroll];
  float scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      packed[u] = reinterpret_cast<const Packed*>(codes)[word];
      scale[u] = __ldg(absmax + block_of_word(word));
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      const float factor = int8_scale(scale[u]);
      float v[kElements];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = __fmul_rn(value_of(packed[u].x, i), factor);
        if constexpr (kElements == 8) v[4 + i] = __fmul_rn(value_of(packed[u].y, i), factor);
      }
      reinterpret_cast<uint4*>(out)[word] = Word<T>::make(v);
    }
  }
}

// Any block size and alignment, from element `begin` (even) on: two elements a thread.
template <typename T>
__global__ void decode_pairs_kernel(const int8_t* __restrict__ codes,
                                    const float* __restrict__ absmax, T* __restrict__ out,
                                    int64_t begin, int64_t n, BlockOf block_of_pair) {
  const int64_t pairs = (n + 1) / 2;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t p = begin / 2 + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; p < pairs;
       p += step) {
    const float factor = int8_scale(absmax[block_of_pair(p)]);
    out[2 * p] = narrow<T>(__fmul_rn(static_cast<float>(codes[2 * p]), factor));
    if (2 * p + 1 < n)
      out[2 * p + 1] = narrow<T>(__fmul_rn(static_cast<float>(codes[2 * p + 1]), factor));
  }
}

}  // namespace

void launch_quantize_int8(const void* x, DType dtype, int8_t* codes, float* absmax, int64_t n,
                          int64_t block_size, void* stream) {
  launch_encode<Int8>(x, dtype, codes, absmax, n, block_size, static_cast<cudaStream_t>(stream),
                      "quantize_int8");
}

void launch_dequantize_int8(const int8_t* codes, const float* absmax, void* data, DType dtype,
                            int64_t n, int64_t block_size, void* stream_pointer) {
  if (n == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    const bool wide = block_size % kElements == 0 && aligned(out, 16) && aligned(codes, kElements);
    const int64_t words = wide ? n / kElements : 0;
    if (words > 0) {
      decode_kernel<<<grid_for(words, kThreads * kUnroll), kThreads, 0, stream>>>(
          codes, absmax, out, words, block_of(block_size / kElements));
      cuda_check_launch("dequantize_int8");
    }
    const int64_t rest = n - words * kElements;
    if (rest > 0) {
      decode_pairs_kernel<<<grid_for((rest + 1) / 2, kThreads), kThreads, 0, stream>>>(
          codes, absmax, out, words * kElements, n, block_of(block_size / 2));
      cuda_check_launch("dequantize_int8");
    }
  });
}

}  // namespace ts::quant
