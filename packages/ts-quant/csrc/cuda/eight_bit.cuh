// Decoding 8-bit codes on the GPU. `Rule` says how a code becomes a value: Rule(stored scale), then
// operator()(code as a float).
#pragma once

#include <type_traits>

#include "blocks.cuh"
#include "scales.cuh"

namespace ts::quant {

__device__ __forceinline__ float int8_scale(float absmax) { return __fdiv_rn(absmax, 127.0f); }

struct Int8 {
  using Code = int8_t;
  static constexpr bool kPacked = false;
  struct Scale {
    float value;  // 0: the whole block gets code 0
  };
  __device__ static __forceinline__ Scale scale(float absmax, bool, float* stored) {
    *stored = int8_absmax(absmax);
    return Scale{magnitude_bits(absmax) < 0x7F800000u ? int8_scale(*stored) : 0.0f};
  }
  __device__ static __forceinline__ unsigned code(float x, Scale s) {
    if (s.value == 0.0f) return 0;
    const int r = __float2int_rn(__fdiv_rn(x, s.value));
    return static_cast<unsigned>(max(-127, min(127, r)));
  }
};

struct TimesScale {
  float factor;
  __device__ __forceinline__ explicit TimesScale(float absmax) : factor(int8_scale(absmax)) {}
  __device__ __forceinline__ float operator()(float code) const { return __fmul_rn(code, factor); }
};

__device__ __forceinline__ float code_in(uint32_t word, int byte) {
  return static_cast<float>(static_cast<int8_t>(word >> (8 * byte)));
}

// One 16-byte word of outputs a step; block_size is a multiple of the word's elements.
template <typename Rule, typename T, typename Scales>
__global__ void decode_eight_bit_kernel(const int8_t* __restrict__ codes, Scales scales,
                                        T* __restrict__ out, int64_t words, BlockOf block_of_word) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint2, uint1>;
  __shared__ float table[Scales::kSize];
  const Span span(words, block_of_word);
  const Packed* from = reinterpret_cast<const Packed*>(codes) + span.first;
  uint4* to = reinterpret_cast<uint4*>(out) + span.first;
  Packed packed[kUnroll];
  typename Scales::Raw raw[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) packed[u] = from[span.clamped(u)];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) raw[u] = scales.load(span.block(u, block_of_word));
  if constexpr (Scales::kSize > 1) {
    scales.fill(table);
    __syncthreads();
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (span.local(u) < span.count) {
      const Rule rule(scales.value(raw[u], table));
      float v[kElements];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = rule(code_in(packed[u].x, i));
        if constexpr (kElements == 8) v[4 + i] = rule(code_in(packed[u].y, i));
      }
      to[span.local(u)] = Word<T>::make(v);
    }
  }
}

// Any block size and alignment, from element `begin` on: one element a thread.
template <typename Rule, typename T, typename Scales>
__global__ void decode_eight_bit_each_kernel(const int8_t* __restrict__ codes, Scales scales,
                                             T* __restrict__ out, int64_t begin, int64_t n,
                                             BlockOf block_of_element) {
  __shared__ float table[Scales::kSize];
  if constexpr (Scales::kSize > 1) {
    scales.fill(table);
    __syncthreads();
  }
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const Rule rule(scales.value(scales.load(block_of_element(i)), table));
    out[i] = narrow<T>(rule(static_cast<float>(codes[i])));
  }
}

template <typename Rule, typename Scales>
void launch_decode_eight_bit(const int8_t* codes, Scales scales, void* data, DType dtype, int64_t n,
                             int64_t block_size, void* stream_pointer, const char* op) {
  if (n == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    const bool wide = block_size % kElements == 0 && block_size / kElements <= kLargestBlock &&
                      aligned(out, 16) && aligned(codes, kElements);
    const int64_t words = wide ? n / kElements : 0;
    if (words > 0) {
      decode_eight_bit_kernel<Rule><<<grid_for(words, kWordsOf), kThreads, 0, stream>>>(
          codes, scales, out, words, block_of(block_size / kElements));
      cuda_check_launch(op);
    }
    const int64_t rest = n - words * kElements;
    if (rest > 0) {
      decode_eight_bit_each_kernel<Rule><<<grid_for(rest, kThreads), kThreads, 0, stream>>>(
          codes, scales, out, words * kElements, n, block_of(block_size));
      cuda_check_launch(op);
    }
  });
}

}  // namespace ts::quant
