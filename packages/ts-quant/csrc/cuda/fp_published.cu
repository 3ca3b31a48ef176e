// Published fp4 and fp8 layouts on the GPU, bit for bit the results of csrc/cpu/fp_published.cpp.
#include <type_traits>

#include "fp_published.h"
#include "small_floats.cuh"

namespace ts::quant {
namespace {

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
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(e2m1_at(packed[u], i), factor);
    store_eight(out + step * 8, v, 8, wide_out);
  }
}

// A lane takes 16 columns of eight packed rows and has with them eight values of each of 16 rows of
// the output: 16 bytes. Eight lanes write 128 bytes of a row, four read 32 of a packed one. Groups
// are whole, so 16 columns are all there, or none, and in one group.
constexpr int kPackedColumns = 4 * 16, kPackedRows = 8 * 8;  // of a warp
constexpr int kWarpsAcross = 4, kTransposedThreads = 32 * kWarpsAcross;

template <typename T>
__global__ void fp4_transposed_kernel(Fp4 m, T* __restrict__ out, BlockOf strip_of,
                                      BlockOf stack_of, int group_shift, bool wide_in,
                                      bool wide_out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strip = strip_of(blockIdx.x), stack = stack_of(strip);
  const int64_t row = (blockIdx.x - strip * strip_of.groups_per_block) * kPackedRows + lane / 4 * 8;
  const int64_t across = strip - stack * stack_of.groups_per_block;
  const int64_t column = (across * kWarpsAcross + warp) * kPackedColumns + lane % 4 * 16;
  if (row >= m.rows || column >= m.columns) return;
  const int count = static_cast<int>(min(m.rows - row, int64_t{8}));
  uint32_t words[2][8];
  uint32_t scale[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint2 pair = make_uint2(0, 0);
    scale[i] = 0;
    if (i < count) {
      const int64_t at = (stack * m.rows + row + i) * m.columns + column;
      const uint8_t* p = m.codes + at / 2;
      if (wide_in) {
        pair = __ldg(reinterpret_cast<const uint2*>(p));
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pair.x |= static_cast<uint32_t>(p[k]) << 8 * k;
          pair.y |= static_cast<uint32_t>(p[4 + k]) << 8 * k;
        }
      }
      scale[i] = __ldg(m.scales + (at >> group_shift));
    }
    words[0][i] = pair.x, words[1][i] = pair.y;
  }
  const float tensor_scale = m.tensor_scale ? __ldg(m.tensor_scale) : 1.0f;
  float factor[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) factor[i] = fp4_scale(scale[i], m.kind, tensor_scale);
  T* target = out + (stack * m.columns + column) * m.rows + row;
#pragma unroll
  for (int c = 0; c < 16; ++c) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(e2m1_at(words[c / 8][i], c % 8), factor[i]);
    store_eight(target + c * m.rows, v, count, wide_out);
  }
}

// One 16-byte word of outputs a step; words do not cross rows or tiles. `row_of` and `tile_of`
// divide by the words of a row and of a tile's row.
template <typename T>
__global__ void fp8_words_kernel(Fp8 m, T* __restrict__ out, int64_t words, int64_t tiles,
                                 BlockOf row_of, BlockOf strip_of, BlockOf tile_of) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint2, uint1>;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  Packed packed[kUnroll];
  float scale[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      packed[u] = reinterpret_cast<const Packed*>(m.codes)[word];
      const int64_t row = row_of(word), column = word - row * row_of.groups_per_block;
      scale[u] = __ldg(m.scales + strip_of(row) * tiles + tile_of(column));
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t word = start + u * kThreads;
    if (word < words) {
      float v[kElements];
      e4m3_values(packed[u].x, v);
      if constexpr (kElements == 8) e4m3_values(packed[u].y, v + 4);
#pragma unroll
      for (int i = 0; i < kElements; ++i) v[i] = __fmul_rn(v[i], scale[u]);
      reinterpret_cast<uint4*>(out)[word] = Word<T>::make(v);
    }
  }
}

// Any tile and alignment: a block takes 2048 columns of a row, a thread eight of them.
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
  store_eight(out + at, v, n, wide_out);
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
      const int64_t wide = kPackedColumns * kWarpsAcross;
      const int64_t across = (m.columns + wide - 1) / wide;
      const int64_t down = (m.rows + kPackedRows - 1) / kPackedRows;
      const unsigned grid = grid_for(m.stacks * across * down, 1);
      const bool wide_out = aligned(out, 16) && m.rows % Word<T>::kElements == 0;
      fp4_transposed_kernel<<<grid, kTransposedThreads, 0, stream>>>(
          m, out, block_of(down), block_of(across), group_shift, aligned(m.codes, 8), wide_out);
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
    constexpr int kElements = Word<T>::kElements;
    const int64_t tiles = m.columns / m.tile_columns + (m.columns % m.tile_columns != 0);
    if (m.columns % kElements == 0 && (tiles == 1 || m.tile_columns % kElements == 0) &&
        aligned(m.codes, kElements) && aligned(out, 16)) {
      const int64_t words = m.rows * m.columns / kElements, per_row = m.columns / kElements;
      fp8_words_kernel<<<grid_for(words, kThreads * kUnroll), kThreads, 0, stream>>>(
          m, out, words, tiles, block_of(per_row), block_of(m.tile_rows),
          block_of(tiles == 1 ? per_row : m.tile_columns / kElements));
      return;
    }
    const int64_t across = (m.columns + 8 * kThreads - 1) / (8 * kThreads);
    fp8_kernel<<<grid_for(m.rows * across, 1), kThreads, 0, stream>>>(
        m, out, static_cast<uint32_t>(across), tiles, block_of(m.tile_rows),
        block_of(m.tile_columns), aligned(m.codes, 8) && m.columns % 8 == 0,
        aligned(out, 16) && m.columns % 8 == 0);
  });
  cuda_check_launch("dequantize_published_fp8");
}

}  // namespace ts::quant
