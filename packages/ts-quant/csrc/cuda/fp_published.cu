// Published fp4 and fp8 layouts on the GPU, bit for bit the results of csrc/cpu/fp_published.cpp.
#include <type_traits>

#include "fp_published.h"
#include "transposed.cuh"

namespace ts::quant {
namespace {

template <typename T>
__device__ __forceinline__ void store8(T* out, const float* v, int64_t n, bool wide) {
  if (wide && n >= 8) {
#pragma unroll
    for (int i = 0; i < 8; i += Word<T>::kElements) store16(out + i, Word<T>::make(v + i));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < n) out[i] = narrow<T>(v[i]);
  }
}

// Groups are whole and a multiple of eight codes: eight outputs a step lie in one group.
template <typename T>
__global__ void fp4_rows_kernel(Fp4 m, T* __restrict__ out, int64_t steps, int group_shift,
                                bool wide_in, bool wide_out) {
  const float tensor_scale = m.tensor_scale ? __ldg(m.tensor_scale) : 1.0f;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  uint32_t packed[kUnroll];
  uint32_t scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t step = start + u * kThreads;
    if (step >= steps) continue;
    const uint8_t* p = m.codes + step * 4;
    packed[u] = wide_in ? __ldg(reinterpret_cast<const uint32_t*>(p))
                        : p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
    scale[u] = __ldg(m.scales + (step >> group_shift));
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t step = start + u * kThreads;
    if (step >= steps) continue;
    const float factor = fp4_scale(scale[u], m.kind, tensor_scale);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(e2m1(packed[u] >> 4 * i & 15u), factor);
    store8(out + step * 8, v, 8, wide_out);
  }
}

// 64 packed rows of 128 columns: a thread takes 32 codes of one row, and they become one column of
// 32 rows of the output.
template <typename T>
__global__ void fp4_transposed_kernel(Fp4 m, T* __restrict__ out, int64_t across, int64_t down,
                                      int group_shift, bool wide_in, bool wide_out) {
  constexpr int kRows = 128, kColumns = 64;  // of the output
  __shared__ Tile<T, kRows, kColumns> tile;
  const float tensor_scale = m.tensor_scale ? __ldg(m.tensor_scale) : 1.0f;
  const int64_t stack = blockIdx.x / (across * down);
  const int64_t row0 = blockIdx.x / across % down * kColumns;
  const int64_t column0 = blockIdx.x % across * kRows;
  const int rows = static_cast<int>(min(m.rows - row0, int64_t{kColumns}));
  const int columns = static_cast<int>(min(m.columns - column0, int64_t{kRows}));
  const int row = threadIdx.x / 4, part = threadIdx.x % 4 * 32;  // kThreads = kColumns * 4
  if (row < rows && part < columns) {
    const int64_t at = (stack * m.rows + row0 + row) * m.columns + column0 + part;
    const int count = min(32, columns - part);
    uint32_t words[4] = {0, 0, 0, 0};
    if (wide_in && count == 32) {
      const uint4 quad = __ldg(reinterpret_cast<const uint4*>(m.codes + at / 2));
      words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i < count / 2)
          words[i / 4] |= static_cast<uint32_t>(m.codes[at / 2 + i]) << 8 * (i % 4);
    }
    float factor = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i >= count) break;
      if ((i & ((1 << group_shift) - 1)) == 0)
        factor = fp4_scale(__ldg(m.scales + ((at + i) >> group_shift)), m.kind, tensor_scale);
      tile.put(part + i, row, __fmul_rn(e2m1(words[i / 8] >> 4 * (i % 8) & 15u), factor));
    }
  }
  __syncthreads();
  tile.store(out + (stack * m.columns + column0) * m.rows + row0, m.rows, columns, rows, wide_out);
}

// A block takes 2048 columns of a row, a thread eight of them.
template <typename T>
__global__ void fp8_kernel(Fp8 m, T* __restrict__ out, uint32_t across, int64_t tiles,
                           BlockOf strip_of, BlockOf tile_of, bool wide_in, bool wide_out) {
  const int64_t row = blockIdx.x / across;
  const int64_t column = (int64_t{blockIdx.x % across} * kThreads + threadIdx.x) * 8;
  const int64_t n = m.columns - column;
  if (n <= 0) return;
  const int64_t at = row * m.columns + column;
  uint32_t words[2] = {0, 0};
  if (wide_in && n >= 8) {
    const uint2 pair = __ldg(reinterpret_cast<const uint2*>(m.codes + at));
    words[0] = pair.x, words[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < n) words[i / 4] |= static_cast<uint32_t>(m.codes[at + i]) << 8 * (i % 4);
  }
  const float* scales = m.scales + strip_of(row) * tiles;
  int64_t tile = tiles == 1 ? 0 : tile_of(column), edge = (tile + 1) * m.tile_columns;
  float factor = __ldg(scales + tile);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i >= edge && i < n) {
      edge += m.tile_columns;
      factor = __ldg(scales + ++tile);
    }
    v[i] = __fmul_rn(e4m3(words[i / 4] >> 8 * (i % 4) & 255u), factor);
  }
  store8(out + at, v, n, wide_out);
}

}  // namespace

void launch_dequantize_published_fp4(const Fp4& m, void* data, DType dtype, void* stream_pointer) {
  const int64_t numel = m.stacks * m.rows * m.columns;
  if (numel == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const int group_shift = m.kind == Fp4Scale::kE8M0 ? 5 : 4;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = static_cast<T*>(data);
    if (m.transposed) {
      const int64_t across = (m.columns + 127) / 128, down = (m.rows + 63) / 64;
      const bool wide_in = aligned(m.codes, 16) && m.columns % 32 == 0;
      const bool wide_out = aligned(out, 16) && m.rows % (16 / sizeof(T)) == 0;
      fp4_transposed_kernel<<<grid_for(m.stacks * across * down, 1), kThreads, 0, stream>>>(
          m, out, across, down, group_shift, wide_in, wide_out);
    } else {
      fp4_rows_kernel<<<grid_for(numel / 8, kThreads * kUnroll), kThreads, 0, stream>>>(
          m, out, numel / 8, group_shift - 3, aligned(m.codes, 4), aligned(out, 16));
    }
  });
  cuda_check_launch("dequantize_published_fp4");
}

void launch_dequantize_published_fp8(const Fp8& m, void* data, DType dtype, void* stream_pointer) {
  if (m.rows == 0 || m.columns == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = static_cast<T*>(data);
    const int64_t across = (m.columns + 8 * kThreads - 1) / (8 * kThreads);
    const int64_t tiles = (m.columns + m.tile_columns - 1) / m.tile_columns;
    fp8_kernel<<<grid_for(m.rows * across, 1), kThreads, 0, stream>>>(
        m, out, static_cast<uint32_t>(across), tiles, block_of(m.tile_rows),
        block_of(m.tile_columns), aligned(m.codes, 8) && m.columns % 8 == 0,
        aligned(out, 16) && m.columns % 8 == 0);
  });
  cuda_check_launch("dequantize_published_fp8");
}

}  // namespace ts::quant
