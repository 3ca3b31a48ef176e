// NVFP4 on the GPU, bit for bit the results of csrc/cpu/nvfp4.cpp.
#include <type_traits>

#include "../nvfp4_format.h"
#include "blocks.cuh"
#include "nvfp4.h"
#include "small_floats.cuh"

namespace ts::quant {
namespace {

// The largest magnitude of all, as bits. `wide`: 16-byte loads.
template <typename T>
__global__ void peak_kernel(const T* __restrict__ x, int64_t n, bool wide,
                            uint32_t* __restrict__ peak) {
  __shared__ uint32_t shared[32];
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t groups = wide ? n / 8 : 0;
  uint32_t largest = 0;
  for (int64_t i = first; i < groups; i += step) {
    float v[8];
    load8(x + i * 8, v);
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = max(largest, magnitude_bits(v[k]));
  }
  for (int64_t i = groups * 8 + first; i < n; i += step)
    largest = max(largest, magnitude_bits(widen(x[i])));
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) atomicMax(peak, largest);
}

struct Group {
  float factor;
  uint32_t code;
};

__device__ __forceinline__ Group group_of(uint32_t bits, float tensor_scale) {
  const uint32_t code = nvfp4_scale_code(__uint_as_float(bits), tensor_scale);
  return Group{nvfp4_factor(code, tensor_scale), code};
}

__device__ __forceinline__ uint32_t encode8(const float* v, float factor) {
  uint32_t word = 0;
  if (factor == 0.0f) return word;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= e2m1_code(__fdiv_rn(v[i], factor)) << (4 * i);
  return word;
}

// Columns are a multiple of 16: eight elements a thread, two threads a group.
template <typename T>
__global__ void encode_kernel(const T* __restrict__ x, uint32_t* __restrict__ codes,
                              uint8_t* __restrict__ scales, const uint32_t* __restrict__ peak,
                              int64_t eights) {
  const uint32_t most = __ldg(peak);
  if (most >= 0x7F800000u) return;  // the caller refuses it
  const float tensor_scale = nvfp4_tensor_scale(most);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t rounds = (eights + step - 1) / step;  // all 32 lanes go round
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t round = 0; round < rounds; ++round, i += step) {
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (i < eights) load8(x + i * 8, v);
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = max(largest, magnitude_bits(v[k]));
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    if (i >= eights) continue;
    const Group g = group_of(largest, tensor_scale);
    if (i % 2 == 0) scales[i / 2] = static_cast<uint8_t>(g.code);
    codes[i] = encode8(v, g.factor);
  }
}

// Any number of columns and any alignment: a group a thread.
template <typename T>
__global__ void encode_any_kernel(const T* __restrict__ x, uint8_t* __restrict__ codes,
                                  uint8_t* __restrict__ scales, const uint32_t* __restrict__ peak,
                                  int64_t rows, int64_t columns, BlockOf row_of) {
  const uint32_t most = __ldg(peak);
  if (most >= 0x7F800000u) return;
  const float tensor_scale = nvfp4_tensor_scale(most);
  const int64_t groups = row_of.groups_per_block, bytes = (columns + 1) / 2;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * groups; i += step) {
    const int64_t row = row_of(i), column = (i - row * groups) * kNvfp4Group;
    const int64_t count = min(kNvfp4Group, columns - column);
    const T* from = x + row * columns + column;
    uint32_t largest = 0;
    for (int64_t k = 0; k < count; ++k) largest = max(largest, magnitude_bits(widen(from[k])));
    const Group g = group_of(largest, tensor_scale);
    scales[i] = static_cast<uint8_t>(g.code);
    for (int64_t k = 0; k < count; k += 2) {
      uint32_t byte = 0;
      if (g.factor != 0.0f) {
        byte = e2m1_code(__fdiv_rn(widen(from[k]), g.factor));
        if (k + 1 < count) byte |= e2m1_code(__fdiv_rn(widen(from[k + 1]), g.factor)) << 4;
      }
      codes[row * bytes + (column + k) / 2] = static_cast<uint8_t>(byte);
    }
  }
}

__global__ void tensor_scale_kernel(const uint32_t* __restrict__ peak,
                                    float* __restrict__ tensor_scale) {
  *tensor_scale = nvfp4_tensor_scale(*peak);
}

// One 16-byte word of outputs a step; columns are a multiple of its elements.
template <typename T>
__global__ void decode_kernel(const uint8_t* __restrict__ codes, const uint8_t* __restrict__ scales,
                              const float* __restrict__ tensor_scale, T* __restrict__ out,
                              int64_t words, int64_t groups, BlockOf row_of) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint32_t, uint16_t>;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  const float whole = __ldg(tensor_scale);
  Packed packed[kUnroll];
  uint8_t scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      packed[u] = __ldg(reinterpret_cast<const Packed*>(codes) + word);
      const int64_t row = row_of(word);
      const int64_t column = (word - row * row_of.groups_per_block) * kElements;
      scale[u] = __ldg(scales + row * groups + column / kNvfp4Group);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      const float factor = nvfp4_factor(scale[u], whole);
      float v[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) v[i] = __fmul_rn(e2m1_at(packed[u], i), factor);
      reinterpret_cast<uint4*>(out)[word] = Word<T>::make(v);
    }
  }
}

// Any number of columns and any alignment, from byte `begin` on: one byte, two elements a thread.
template <typename T>
__global__ void decode_any_kernel(const uint8_t* __restrict__ codes,
                                  const uint8_t* __restrict__ scales,
                                  const float* __restrict__ tensor_scale, T* __restrict__ out,
                                  int64_t begin, int64_t rows, int64_t columns, int64_t groups,
                                  BlockOf row_of) {
  const float whole = __ldg(tensor_scale);
  const int64_t bytes = row_of.groups_per_block;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * bytes;
       i += step) {
    const int64_t row = row_of(i), column = (i - row * bytes) * 2;
    const float factor = nvfp4_factor(scales[row * groups + column / kNvfp4Group], whole);
    T* to = out + row * columns + column;
    to[0] = narrow<T>(__fmul_rn(e2m1(codes[i]), factor));
    if (column + 1 < columns) to[1] = narrow<T>(__fmul_rn(e2m1(codes[i] >> 4), factor));
  }
}

}  // namespace

void launch_quantize_nvfp4(const void* data, DType dtype, uint8_t* codes, uint8_t* scales,
                           float* tensor_scale, uint32_t* peak, int64_t rows, int64_t columns,
                           void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const int64_t n = rows * columns, groups = (columns + kNvfp4Group - 1) / kNvfp4Group;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = static_cast<const T*>(data);
    if (n > 0) {
      const int64_t enough = grid_for(n, 8 * kThreads);
      peak_kernel<<<static_cast<unsigned>(enough < 2048 ? enough : 2048), kThreads, 0, stream>>>(
          x, n, aligned(x, 16), peak);
      if (columns % kNvfp4Group == 0 && aligned(x, 16) && aligned(codes, 4))
        encode_kernel<<<grid_for(n, 8 * kThreads), kThreads, 0, stream>>>(
            x, reinterpret_cast<uint32_t*>(codes), scales, peak, n / 8);
      else
        encode_any_kernel<<<grid_for(rows * groups, kThreads), kThreads, 0, stream>>>(
            x, codes, scales, peak, rows, columns, block_of(groups));
    }
    tensor_scale_kernel<<<1, 1, 0, stream>>>(peak, tensor_scale);
  });
  cuda_check_launch("quantize_nvfp4");
}

void launch_dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, const float* tensor_scale,
                             void* data, DType dtype, int64_t rows, int64_t columns,
                             void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  // Whole groups and bytes: nothing tells rows apart.
  if (columns % kNvfp4Group == 0) columns *= rows, rows = 1;
  const int64_t groups = (columns + kNvfp4Group - 1) / kNvfp4Group, bytes = (columns + 1) / 2;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    // A single row may end in an incomplete word, which is left over.
    const bool wide = (rows == 1 || columns % kElements == 0) && aligned(out, 16) &&
                      aligned(codes, kElements / 2);
    const int64_t words = wide ? rows * columns / kElements : 0;
    if (words > 0) {
      decode_kernel<<<grid_for(words, kThreads * kUnroll), kThreads, 0, stream>>>(
          codes, scales, tensor_scale, out, words, groups,
          block_of(rows == 1 ? words : columns / kElements));
      cuda_check_launch("dequantize_nvfp4");
    }
    const int64_t done = words * kElements / 2;
    if (done < rows * bytes) {
      decode_any_kernel<<<grid_for(rows * bytes - done, kThreads), kThreads, 0, stream>>>(
          codes, scales, tensor_scale, out, done, rows, columns, groups, block_of(bytes));
      cuda_check_launch("dequantize_nvfp4");
    }
  });
}

}  // namespace ts::quant
