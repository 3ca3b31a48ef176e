// Decoding 4-bit codes on the GPU: two codes a byte, the first in the high nibble, 16 levels times
// the scale of the block. `Levels` gives one level: __device__ static float level(int).
#pragma once

#include <type_traits>

#include "blocks.cuh"
#include "scales.cuh"

namespace ts::quant {

// The 16 levels lie in 16 different banks, so 32 lanes read any of them without a conflict.
template <typename Levels, typename Scales>
__device__ __forceinline__ void fill_tables(float* levels, float* table, Scales scales) {
  if (threadIdx.x < 16) levels[threadIdx.x] = Levels::level(threadIdx.x);
  scales.fill(table);
  __syncthreads();
}

// One 16-byte word of outputs a step; block_size is a multiple of the word's elements.
template <typename Levels, typename T, typename Scales>
__global__ void decode_four_bit_kernel(const uint8_t* __restrict__ codes, Scales scales,
                                       T* __restrict__ out, int64_t words, BlockOf block_of_word) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint32_t, uint16_t>;
  __shared__ float levels[16];
  __shared__ float table[Scales::kSize];
  const Span span(words, block_of_word);
  const Packed* from = reinterpret_cast<const Packed*>(codes) + span.first;
  uint4* to = reinterpret_cast<uint4*>(out) + span.first;
  Packed packed[kUnroll];
  typename Scales::Raw raw[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) packed[u] = __ldg(from + span.clamped(u));
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) raw[u] = scales.load(span.block(u, block_of_word));
  fill_tables<Levels>(levels, table, scales);  // while the loads are on their way
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (span.local(u) < span.count) {
      const float scale = scales.value(raw[u], table);
      float v[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        // Byte i / 2 holds elements i (high nibble) and i + 1 (low nibble).
        const unsigned nibble = (packed[u] >> (8 * (i / 2) + (i & 1 ? 0 : 4))) & 15u;
        v[i] = __fmul_rn(levels[nibble], scale);
      }
      to[span.local(u)] = Word<T>::make(v);
    }
  }
}

// Any block size and alignment, from element `begin` (even) on: one byte, two elements a thread.
template <typename Levels, typename T, typename Scales>
__global__ void decode_four_bit_bytes_kernel(const uint8_t* __restrict__ codes, Scales scales,
                                             T* __restrict__ out, int64_t begin, int64_t n,
                                             BlockOf block_of_byte) {
  __shared__ float levels[16];
  __shared__ float table[Scales::kSize];
  fill_tables<Levels>(levels, table, scales);
  const int64_t bytes = (n + 1) / 2;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t b = begin / 2 + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; b < bytes;
       b += step) {
    const unsigned packed = codes[b];
    const float scale = scales.value(scales.load(block_of_byte(b)), table);
    out[2 * b] = narrow<T>(__fmul_rn(levels[packed >> 4], scale));
    if (2 * b + 1 < n) out[2 * b + 1] = narrow<T>(__fmul_rn(levels[packed & 15u], scale));
  }
}

template <typename Levels, typename Scales>
void launch_decode_four_bit(const uint8_t* codes, Scales scales, void* data, DType dtype, int64_t n,
                            int64_t block_size, void* stream_pointer, const char* op) {
  if (n == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    const bool wide = block_size % kElements == 0 && block_size / kElements <= kLargestBlock &&
                      aligned(out, 16) && aligned(codes, kElements / 2);
    const int64_t words = wide ? n / kElements : 0;
    if (words > 0) {
      decode_four_bit_kernel<Levels><<<grid_for(words, kWordsOf), kThreads, 0, stream>>>(
          codes, scales, out, words, block_of(block_size / kElements));
      cuda_check_launch(op);
    }
    const int64_t rest = n - words * kElements;
    if (rest > 0) {
      decode_four_bit_bytes_kernel<Levels>
          <<<grid_for((rest + 1) / 2, kThreads), kThreads, 0, stream>>>(
              codes, scales, out, words * kElements, n, block_of(block_size / 2));
      cuda_check_launch(op);
    }
  });
}

}  // namespace ts::quant
