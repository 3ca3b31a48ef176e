// Encoding kernels, shared by the codecs. A codec gives:
//   struct C { using Code = ...; static constexpr bool kPacked;     // two codes a byte, or one
//              struct Scale; __device__ static Scale scale(float absmax, bool whole, float*
//              stored);
//              __device__ static unsigned code(float x, Scale); };
#pragma once

#include "blocks.cuh"

namespace ts::quant {

// Writes the codes of eight consecutive elements of which `count` exist. `first` is a multiple
// of 8.
template <typename C>
__device__ __forceinline__ void store8(typename C::Code* codes, int64_t first, const unsigned* c,
                                       int64_t count) {
  if constexpr (C::kPacked) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= c[i] << (8 * (i / 2) + (i & 1 ? 0 : 4));
    if (count >= 8) {
      *reinterpret_cast<uint32_t*>(codes + first / 2) = word;
    } else {
      for (int64_t i = 0; i < (count + 1) / 2; ++i)
        codes[first / 2 + i] = static_cast<typename C::Code>(word >> (8 * i));
    }
  } else {
    uint2 words = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words.x |= (c[i] & 0xFFu) << (8 * i);
      words.y |= (c[4 + i] & 0xFFu) << (8 * i);
    }
    if (count >= 8) {
      *reinterpret_cast<uint2*>(codes + first) = words;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)  // counted: the codes stay in registers
        if (i < count) codes[first + i] = static_cast<typename C::Code>(c[i]);
    }
  }
}

// Block sizes 16 to 256, powers of two: eight elements a thread, block_size / 8 threads a block.
template <typename C, typename T>
__global__ void encode_small_kernel(const T* __restrict__ x, typename C::Code* __restrict__ codes,
                                    float* __restrict__ absmax, int64_t n, int64_t block_size) {
  const int lanes = static_cast<int>(block_size / 8);
  // The stride is a multiple of 32, so the threads of a block stay in one warp; all 32 go round.
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t groups = (n + 7) / 8;
  const int64_t rounds = (groups + step - 1) / step;
  int64_t group = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t round = 0; round < rounds; ++round, group += step) {
    const int64_t first = group * 8;
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (first + 8 <= n) {
      load8(x + first, v);
    } else {
      for (int i = 0; i < 8; ++i)
        if (first + i < n) v[i] = widen(x[first + i]);
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, magnitude_bits(v[i]));
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
    if (first >= n) continue;
    const int64_t block = group / lanes;
    float stored;
    const auto scale = C::scale(__uint_as_float(largest), (block + 1) * block_size <= n, &stored);
    if (group % lanes == 0) absmax[block] = stored;
    unsigned c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = C::code(v[i], scale);
    store8<C>(codes, first, c, n - first);
  }
}

// Any block size, any alignment: one CUDA block a block, read twice.
template <typename C, typename T>
__global__ void encode_any_kernel(const T* __restrict__ x, typename C::Code* __restrict__ codes,
                                  float* __restrict__ absmax, int64_t n, int64_t block_size) {
  __shared__ uint32_t shared[32];
  const int64_t blocks = n / block_size + (n % block_size != 0);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t begin = block * block_size;
    const bool whole = n - begin >= block_size;
    const int64_t end = whole ? begin + block_size : n;
    uint32_t largest = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
      largest = max(largest, magnitude_bits(widen(x[i])));
    float stored;
    const auto scale = C::scale(__uint_as_float(block_max(largest, shared)), whole, &stored);
    if (threadIdx.x == 0) absmax[block] = stored;
    for (int64_t i = begin + 2 * int64_t{threadIdx.x}; i < end; i += 2 * int64_t{blockDim.x}) {
      const unsigned a = C::code(widen(x[i]), scale);
      const unsigned b = C::code(i + 1 < end ? widen(x[i + 1]) : 0.0f, scale);
      if constexpr (C::kPacked) {
        codes[i / 2] = static_cast<typename C::Code>(a << 4 | b);
      } else {
        codes[i] = static_cast<typename C::Code>(a);
        if (i + 1 < end) codes[i + 1] = static_cast<typename C::Code>(b);
      }
    }
  }
}

template <typename C>
void launch_encode(const void* data, DType dtype, typename C::Code* codes, float* absmax, int64_t n,
                   int64_t block_size, cudaStream_t stream, const char* op) {
  if (n == 0) return;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = static_cast<const T*>(data);
    const bool power_of_two = (block_size & (block_size - 1)) == 0;
    if (power_of_two && block_size >= 16 && block_size <= 256 && aligned(x, 16) &&
        aligned(codes, 8)) {
      encode_small_kernel<C>
          <<<grid_for(n, 8 * kThreads), kThreads, 0, stream>>>(x, codes, absmax, n, block_size);
    } else {
      const int threads = block_size <= 256 ? 32 : kThreads;
      encode_any_kernel<C>
          <<<grid_for(n, block_size), threads, 0, stream>>>(x, codes, absmax, n, block_size);
    }
  });
  cuda_check_launch(op);
}

}  // namespace ts::quant
