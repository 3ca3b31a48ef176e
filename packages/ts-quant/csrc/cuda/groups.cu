// GPTQ and AWQ on the GPU, bit for bit the results of csrc/cpu/groups.cpp.
#include <type_traits>

#include "groups.h"
#include "transposed.cuh"

namespace ts::quant {
namespace {

__device__ __forceinline__ float scale_at(const Groups& m, int64_t i) {
  if (m.scale_type == ScaleType::kF16) return widen(static_cast<const fp16*>(m.scales)[i]);
  if (m.scale_type == ScaleType::kBF16) return widen(static_cast<const bf16*>(m.scales)[i]);
  return static_cast<const float*>(m.scales)[i];
}

__device__ __forceinline__ uint4 load_words(const int32_t* p, bool wide) {
  if (wide) return __ldg(reinterpret_cast<const uint4*>(p));
  return make_uint4(p[0], p[1], p[2], p[3]);
}

// Scale and zero of output `n` in a group.
struct ScaleAndZero {
  float scale, zero;
};
template <int kBits>
__device__ __forceinline__ ScaleAndZero gptq_scale(const Groups& m, int64_t group, int64_t n) {
  constexpr int kPer = 32 / kBits;
  const uint32_t zeros = static_cast<uint32_t>(m.zeros[group * (m.rows / kPer) + n / kPer]);
  const uint32_t stored = (zeros >> static_cast<int>(n % kPer) * kBits) + m.zero_offset;
  return {scale_at(m, group * m.rows + n), static_cast<float>(stored & ((1u << kBits) - 1))};
}

// 128 columns of 64 outputs: a thread takes the words of four outputs, 32 / kBits columns each.
template <int kBits, typename T>
__global__ void gptq_kernel(Groups m, T* __restrict__ out, int64_t tiles_across, bool wide_in,
                            bool wide_out) {
  constexpr int kRows = 64, kColumns = 128, kPer = 32 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  __shared__ Tile<T, kRows, kColumns> tile;
  // Whether the columns of a word share a group.
  const bool whole_groups = !m.g_idx && m.group_size % kPer == 0;
  const int64_t row0 = blockIdx.x / tiles_across * kRows;
  const int64_t column0 = blockIdx.x % tiles_across * kColumns;
  const int rows = static_cast<int>(min(m.rows - row0, int64_t{kRows}));
  const int columns = static_cast<int>(min(m.columns - column0, int64_t{kColumns}));
  for (int i = threadIdx.x; i < kColumns / kPer * (kRows / 4); i += kThreads) {
    const int row = i % (kRows / 4) * 4, column = i / (kRows / 4) * kPer;
    if (row >= rows || column >= columns) continue;  // both end at multiples of the word
    const int64_t k0 = column0 + column;
    const uint4 quad = load_words(m.codes + k0 / kPer * m.rows + row0 + row, wide_in);
    const uint32_t words[4] = {quad.x, quad.y, quad.z, quad.w};
    if (!whole_groups) {  // each column has a group of its own
#pragma unroll 1
      for (int k = 0; k < kPer; ++k) {
        const int64_t group = group_of(m, k0 + k);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const ScaleAndZero s = gptq_scale<kBits>(m, group, row0 + row + c);
          const float code = static_cast<float>(words[c] >> k * kBits & kMask);
          tile.put(row + c, column + k, __fmul_rn(code - s.zero, s.scale));
        }
      }
      continue;
    }
    const int64_t group = group_of(m, k0);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const ScaleAndZero s = gptq_scale<kBits>(m, group, row0 + row + c);
      float v[kPer];
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        const float code = static_cast<float>(words[c] >> k * kBits & kMask);
        v[k] = __fmul_rn(code - s.zero, s.scale);
      }
      if constexpr (kPer >= 8) {
#pragma unroll
        for (int k = 0; k < kPer; k += 8) tile.put8(row + c, column + k, v + k);
      } else {
#pragma unroll
        for (int k = 0; k < kPer; ++k) tile.put(row + c, column + k, v[k]);
      }
    }
  }
  __syncthreads();
  tile.store(out + row0 * m.columns + column0, m.columns, rows, columns, wide_out);
}

// 64 columns of 128 outputs: a thread takes four words, 32 outputs of one column.
template <typename T>
__global__ void awq_kernel(Groups m, T* __restrict__ out, int64_t tiles_across, bool wide_in,
                           bool wide_out) {
  constexpr int kRows = 128, kColumns = 64;
  __shared__ Tile<T, kRows, kColumns> tile;
  const int64_t row0 = blockIdx.x / tiles_across * kRows;
  const int64_t column0 = blockIdx.x % tiles_across * kColumns;
  const int rows = static_cast<int>(min(m.rows - row0, int64_t{kRows}));
  const int columns = static_cast<int>(min(m.columns - column0, int64_t{kColumns}));
  const int64_t stride = m.rows / 8;
  const int column = threadIdx.x / 4, part = threadIdx.x % 4 * 32;  // kThreads = kColumns * 4
  if (column < columns && part < rows) {
    const int64_t k = column0 + column, group = group_of(m, k);
    const int32_t* source = m.codes + k * stride + (row0 + part) / 8;
    const int count = min(4, (rows - part) / 8);
    uint32_t words[4] = {0, 0, 0, 0};
    if (count == 4) {
      const uint4 quad = load_words(source, wide_in);
      words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w)
        if (w < count) words[w] = static_cast<uint32_t>(source[w]);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w >= count) break;
      const int64_t n = row0 + part + 8 * w;
      const uint32_t zeros = static_cast<uint32_t>(m.zeros[group * stride + n / 8]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int shift = 4 * awq_nibble(j);
        const int zero = (static_cast<int>(zeros >> shift) + m.zero_offset) & 15;
        const int code = static_cast<int>(words[w] >> shift & 15u);
        const float scale = scale_at(m, group * m.rows + n + j);
        tile.put(part + 8 * w + j, column, __fmul_rn(static_cast<float>(code - zero), scale));
      }
    }
  }
  __syncthreads();
  tile.store(out + row0 * m.columns + column0, m.columns, rows, columns, wide_out);
}

}  // namespace

void launch_dequantize_groups(const Groups& m, void* data, DType dtype, void* stream_pointer) {
  if (m.rows == 0 || m.columns == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int64_t kPerWord = 16 / sizeof(T);
    T* out = static_cast<T*>(data);
    const bool wide_out = aligned(out, 16) && m.columns % kPerWord == 0;
    const bool awq = m.order == GroupOrder::kAwq;
    // Rows of words: whole outputs (GPTQ), eight outputs a word (AWQ).
    const bool wide_in = aligned(m.codes, 16) && (awq ? m.rows / 8 : m.rows) % 4 == 0;
    const int64_t across = (m.columns + (awq ? 63 : 127)) / (awq ? 64 : 128);
    const int64_t down = (m.rows + (awq ? 127 : 63)) / (awq ? 128 : 64);
    const unsigned grid = grid_for(across * down, 1);
    if (awq) {
      awq_kernel<T><<<grid, kThreads, 0, stream>>>(m, out, across, wide_in, wide_out);
    } else if (m.bits == 2) {
      gptq_kernel<2, T><<<grid, kThreads, 0, stream>>>(m, out, across, wide_in, wide_out);
    } else if (m.bits == 8) {
      gptq_kernel<8, T><<<grid, kThreads, 0, stream>>>(m, out, across, wide_in, wide_out);
    } else {
      gptq_kernel<4, T><<<grid, kThreads, 0, stream>>>(m, out, across, wide_in, wide_out);
    }
  });
  cuda_check_launch("dequantize_groups");
}

}  // namespace ts::quant
