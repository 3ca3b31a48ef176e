// NF4 on the GPU, bit for bit the results of csrc/cpu/nf4.cpp.
#include <type_traits>

#include "blocks.cuh"
#include "encode.cuh"
#include "kernels.h"
#include "nf4.h"

namespace ts::quant {
namespace {

// Device code cannot index the host's constexpr arrays.
struct Tables {
  float levels[16], thresholds[15];
};
constexpr Tables make_tables() {
  Tables t{};
  for (int i = 0; i < 16; ++i) t.levels[i] = kNf4Levels[i];
  for (int i = 0; i < 15; ++i) t.thresholds[i] = kNf4Thresholds[i];
  return t;
}
__constant__ const Tables kTables = make_tables();

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
    for (int i = 0; i < 15; ++i) count += v > kTables.thresholds[i];
    return count;
  }
};

// The 16 levels lie in 16 different banks, so 32 lanes read any of them without a conflict.
__device__ __forceinline__ void fill_levels(float* levels) {
  if (threadIdx.x < 16) levels[threadIdx.x] = kTables.levels[threadIdx.x];
  __syncthreads();
}

// One 16-byte word of outputs a step; block_size is a multiple of the word's elements.
template <typename T>
__global__ void decode_kernel(const uint8_t* __restrict__ codes, const float* __restrict__ absmax,
                              T* __restrict__ out, int64_t words, BlockOf block_of_word) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint32_t, uint16_t>;
  __shared__ float levels[16];
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  Packed packed[kUnroll];
  float scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      packed[u] = __ldg(reinterpret_cast<const Packed*>(codes) + word);
      scale[u] = __ldg(absmax + block_of_word(word));
    }
  }
  fill_levels(levels);  // while the loads are on their way
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      float v[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        // Byte i / 2 holds elements i (high nibble) and i + 1 (low nibble).
        const unsigned nibble = (packed[u] >> (8 * (i / 2) + (i & 1 ? 0 : 4))) & 15u;
        v[i] = __fmul_rn(levels[nibble], scale[u]);
      }
      reinterpret_cast<uint4*>(out)[word] = Word<T>::make(v);
    }
  }
}

// Any block size and alignment, from element `begin` (even) on: one byte, two elements a thread.
template <typename T>
__global__ void decode_bytes_kernel(const uint8_t* __restrict__ codes,
                                    const float* __restrict__ absmax, T* __restrict__ out,
                                    int64_t begin, int64_t n, BlockOf block_of_byte) {
  __shared__ float levels[16];
  fill_levels(levels);
  const int64_t bytes = (n + 1) / 2;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t b = begin / 2 + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; b < bytes;
       b += step) {
    const unsigned packed = codes[b];
    const float scale = absmax[block_of_byte(b)];
    out[2 * b] = narrow<T>(__fmul_rn(levels[packed >> 4], scale));
    if (2 * b + 1 < n) out[2 * b + 1] = narrow<T>(__fmul_rn(levels[packed & 15u], scale));
  }
}

}  // namespace

void launch_quantize_nf4(const void* x, DType dtype, uint8_t* codes, float* absmax, int64_t n,
                         int64_t block_size, void* stream) {
  launch_encode<Nf4>(x, dtype, codes, absmax, n, block_size, static_cast<cudaStream_t>(stream),
                     "quantize_nf4");
}

void launch_dequantize_nf4(const uint8_t* codes, const float* absmax, void* data, DType dtype,
                           int64_t n, int64_t block_size, void* stream_pointer) {
  if (n == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    const bool wide =
        block_size % kElements == 0 && aligned(out, 16) && aligned(codes, kElements / 2);
    const int64_t words = wide ? n / kElements : 0;
    if (words > 0) {
      decode_kernel<<<grid_for(words, kThreads * kUnroll), kThreads, 0, stream>>>(
          codes, absmax, out, words, block_of(block_size / kElements));
      cuda_check_launch("dequantize_nf4");
    }
    const int64_t rest = n - words * kElements;
    if (rest > 0) {
      decode_bytes_kernel<<<grid_for((rest + 1) / 2, kThreads), kThreads, 0, stream>>>(
          codes, absmax, out, words * kElements, n, block_of(block_size / 2));
      cuda_check_launch("dequantize_nf4");
    }
  });
}

}  // namespace ts::quant
