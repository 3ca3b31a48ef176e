// GPTQ and AWQ on the GPU, bit for bit the results of csrc/cpu/groups.cpp.
// Codes are stored transposed. A lane reads what lies side by side there, some outputs of eight
// columns (16 bytes, or eight times 8), and has with it eight columns of each output, which lie
// side by side here: 16 bytes. Eight lanes write 128 bytes of a row.
#include <type_traits>

#include "blocks.cuh"
#include "groups.h"

namespace ts::quant {
namespace {

constexpr int kChunk = 8;                        // columns of a lane
constexpr int kAcross = 8, kDown = 4;            // lanes of a warp, along columns and outputs
constexpr int kWarpColumns = kAcross * kChunk;   // 64
constexpr int kGptqSteps = 2, kGptqRows = 4;     // steps of a lane, and its outputs in each
constexpr int kAwqThreads = 128, kAwqWords = 2;  // a word has eight outputs
constexpr int kAwqRows = kDown * kAwqWords * 8;  // 64
constexpr int kGptqTile = kDown * kGptqRows * kGptqSteps;  // 32

// What is known of a matrix.
enum class Kind {
  kWhole,  // aligned, eight columns are always there, and of one group
  kMixed,  // the same, but each column has a group of its own
  kAny,    // nothing
};

// Which accesses may be wide in kAny; `tiles` and `group` divide by the blocks of a row and by the
// size of a group.
struct Layout {
  bool codes, scales, index, out;
  BlockOf tiles, group;
};

__device__ __forceinline__ float scale_at(const Groups& m, int64_t i) {
  if (m.scale_type == ScaleType::kF16) return widen(static_cast<const fp16*>(m.scales)[i]);
  if (m.scale_type == ScaleType::kBF16) return widen(static_cast<const bf16*>(m.scales)[i]);
  return static_cast<const float*>(m.scales)[i];
}

template <typename S>
__device__ __forceinline__ void load4(const S* p, float* v) {
  const uint2 w = __ldg(reinterpret_cast<const uint2*>(p));
  v[0] = widen(S{static_cast<uint16_t>(w.x & 0xFFFFu)});
  v[1] = widen(S{static_cast<uint16_t>(w.x >> 16)});
  v[2] = widen(S{static_cast<uint16_t>(w.y & 0xFFFFu)});
  v[3] = widen(S{static_cast<uint16_t>(w.y >> 16)});
}
__device__ __forceinline__ void load4(const float* p, float* v) {
  const float4 w = __ldg(reinterpret_cast<const float4*>(p));
  v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}

// kCount (4 or 8) scales from number `i` on, a multiple of kCount.
template <int kCount>
__device__ __forceinline__ void scales_at(const Groups& m, int64_t i, bool wide, float* v) {
  const auto load = [&](const auto* p) {
    if constexpr (kCount == 8) {
      load8(p + i, v);
    } else {
      load4(p + i, v);
    }
  };
  if (!wide) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) v[c] = scale_at(m, i + c);
  } else if (m.scale_type == ScaleType::kF16) {
    load(static_cast<const fp16*>(m.scales));
  } else if (m.scale_type == ScaleType::kBF16) {
    load(static_cast<const bf16*>(m.scales));
  } else {
    load(static_cast<const float*>(m.scales));
  }
}

// As group_of of groups_layout.h.
__device__ __forceinline__ int group_at(const Groups& m, const Layout& at, int64_t column) {
  const int64_t group = m.g_idx ? __ldg(m.g_idx + column) : at.group(column);
  return static_cast<int>(group < 0 || group >= m.groups ? m.groups - 1 : group);
}

// Groups of the first `count` of eight columns; of the others, the last of these.
template <Kind kKind>
__device__ __forceinline__ void groups_at(const Groups& m, const Layout& at, int64_t column,
                                          int count, int* group) {
  if constexpr (kKind == Kind::kWhole) {
    group[0] = group_at(m, at, column);
  } else if (m.g_idx && (kKind == Kind::kMixed || (at.index && count == kChunk))) {
    const int4 a = __ldg(reinterpret_cast<const int4*>(m.g_idx + column));
    const int4 b = __ldg(reinterpret_cast<const int4*>(m.g_idx + column) + 1);
    const int found[kChunk] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const int last = static_cast<int>(m.groups - 1);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) group[i] = found[i] < 0 ? last : min(found[i], last);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) group[i] = group_at(m, at, column + min(i, count - 1));
  }
}

// The word with the zeros of four outputs from `n` on, a multiple of four; they begin in bit 0.
template <int kBits>
__device__ __forceinline__ uint32_t gptq_zeros(const Groups& m, int group, int64_t n) {
  constexpr int kPer = 32 / kBits;
  const uint32_t word = static_cast<uint32_t>(__ldg(m.zeros + group * (m.rows / kPer) + n / kPer));
  return word >> static_cast<int>(n % kPer) * kBits;
}

template <int kBits>
__device__ __forceinline__ float gptq_zero(const Groups& m, uint32_t zeros, int output) {
  return static_cast<float>(((zeros >> output * kBits) + m.zero_offset) & ((1u << kBits) - 1));
}

// Code of column `i` of the eight that a lane has, in its words.
template <int kBits>
__device__ __forceinline__ float gptq_code(const uint32_t* words, int i) {
  constexpr int kPer = 32 / kBits;
  return static_cast<float>(words[i / kPer] >> i % kPer * kBits & ((1u << kBits) - 1));
}

// A lane takes eight columns of four outputs, twice.
template <int kBits, Kind kKind, typename T>
__global__ void gptq_kernel(Groups m, T* __restrict__ out, Layout at) {
  constexpr int kPer = 32 / kBits, kWords = kBits == 8 ? 2 : 1;
  constexpr bool kAny = kKind == Kind::kAny;
  constexpr int kGroups = kKind == Kind::kWhole ? 1 : kChunk;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strip = at.tiles(blockIdx.x);
  const int64_t tile = blockIdx.x - strip * at.tiles.groups_per_block;
  const int64_t k = (tile * (kThreads / 32) + warp) * kWarpColumns + lane / kDown * kChunk;
  const int64_t n0 = strip * kGptqTile + lane % kDown * kGptqRows;
  if (k >= m.columns) return;
  const int count = kAny ? static_cast<int>(min(m.columns - k, int64_t{kChunk})) : kChunk;
  uint32_t words[kGptqSteps][kGptqRows][kWords];
#pragma unroll
  for (int s = 0; s < kGptqSteps; ++s) {
    const int64_t n = n0 + s * kDown * kGptqRows;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint4 quad = make_uint4(0, 0, 0, 0);
      if (n < m.rows && w * kPer < count) {  // four outputs are all there, or none
        const int32_t* p = m.codes + (k / kPer + w) * m.rows + n;
        if (!kAny || at.codes) {
          quad = __ldg(reinterpret_cast<const uint4*>(p));
        } else {
          quad = make_uint4(p[0], p[1], p[2], p[3]);
        }
      }
      // Of 16 columns in a word, the lane has the lower or the upper half.
      const int shift = kPer > kChunk && k % kPer != 0 ? kChunk * kBits : 0;
      words[s][0][w] = quad.x >> shift, words[s][1][w] = quad.y >> shift;
      words[s][2][w] = quad.z >> shift, words[s][3][w] = quad.w >> shift;
    }
  }
  int group[kGroups];
  groups_at<kKind>(m, at, k, count, group);
#pragma unroll
  for (int s = 0; s < kGptqSteps; ++s) {
    const int64_t n = n0 + s * kDown * kGptqRows;
    if (n >= m.rows) break;
    float v[kGptqRows][kChunk];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t zeros = gptq_zeros<kBits>(m, group[g], n);
      float scale[kGptqRows];
      scales_at<kGptqRows>(m, group[g] * m.rows + n, !kAny || at.scales, scale);
#pragma unroll
      for (int c = 0; c < kGptqRows; ++c) {
        const float zero = gptq_zero<kBits>(m, zeros, c);
#pragma unroll
        for (int i = kGroups == 1 ? 0 : g; i < (kGroups == 1 ? kChunk : g + 1); ++i)
          v[c][i] = __fmul_rn(gptq_code<kBits>(words[s][c], i) - zero, scale[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < kGptqRows; ++c)
      store_eight(out + (n + c) * m.columns + k, v[c], count, !kAny || at.out);
  }
}

// A lane takes eight columns of 16 outputs, a word of eight after the other.
template <Kind kKind, typename T>
__global__ void awq_kernel(Groups m, T* __restrict__ out, Layout at) {
  constexpr bool kAny = kKind == Kind::kAny;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strip = at.tiles(blockIdx.x);
  const int64_t tile = blockIdx.x - strip * at.tiles.groups_per_block;
  const int64_t k = (tile * (kAwqThreads / 32) + warp) * kWarpColumns + lane / kDown * kChunk;
  const int64_t n0 = strip * kAwqRows + lane % kDown * (kAwqWords * 8);
  if (k >= m.columns || n0 >= m.rows) return;
  const int count = kAny ? static_cast<int>(min(m.columns - k, int64_t{kChunk})) : kChunk;
  const int64_t stride = m.rows / 8;
  const bool both = !kAny || n0 + 8 < m.rows;
  uint32_t words[kAwqWords][kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int32_t* p = m.codes + (k + i) * stride + n0 / 8;
    uint2 pair = make_uint2(0, 0);
    if (i < count) {
      if (!kAny || at.codes) {
        pair = __ldg(reinterpret_cast<const uint2*>(p));
      } else {
        pair = make_uint2(p[0], both ? p[1] : 0);
      }
    }
    words[0][i] = pair.x, words[1][i] = pair.y;
  }
  int group[kKind == Kind::kWhole ? 1 : kChunk];
  groups_at<kKind>(m, at, k, count, group);
#pragma unroll
  for (int w = 0; w < kAwqWords; ++w) {
    const int64_t n = n0 + 8 * w;
    if (w > 0 && !both) break;
    if constexpr (kKind != Kind::kWhole) {
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const int shift = 4 * awq_nibble(j);
        float v[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const uint32_t zeros = static_cast<uint32_t>(__ldg(m.zeros + group[i] * stride + n / 8));
          const int zero = (static_cast<int>(zeros >> shift) + m.zero_offset) & 15;
          const int code = static_cast<int>(words[w][i] >> shift & 15u);
          v[i] = __fmul_rn(static_cast<float>(code - zero), scale_at(m, group[i] * m.rows + n + j));
        }
        store_eight(out + (n + j) * m.columns + k, v, count, !kAny || at.out);
      }
    } else {
      const uint32_t zeros = static_cast<uint32_t>(__ldg(m.zeros + group[0] * stride + n / 8));
      float scale[8];
      scales_at<8>(m, group[0] * m.rows + n, true, scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int shift = 4 * awq_nibble(j);
        const int zero = (static_cast<int>(zeros >> shift) + m.zero_offset) & 15;
        float v[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int code = static_cast<int>(words[w][i] >> shift & 15u);
          v[i] = __fmul_rn(static_cast<float>(code - zero), scale[j]);
        }
        store_eight(out + (n + j) * m.columns + k, v, count, !kAny || at.out);
      }
    }
  }
}

template <int kBits, typename T>
void launch_gptq(const Groups& m, T* out, const Layout& at, Kind kind, unsigned grid,
                 cudaStream_t stream) {
  if (kind == Kind::kWhole) {
    gptq_kernel<kBits, Kind::kWhole><<<grid, kThreads, 0, stream>>>(m, out, at);
  } else if (kind == Kind::kMixed) {
    gptq_kernel<kBits, Kind::kMixed><<<grid, kThreads, 0, stream>>>(m, out, at);
  } else {
    gptq_kernel<kBits, Kind::kAny><<<grid, kThreads, 0, stream>>>(m, out, at);
  }
}

}  // namespace

void launch_dequantize_groups(const Groups& m, void* data, DType dtype, void* stream_pointer) {
  if (m.rows == 0 || m.columns == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const bool awq = m.order == GroupOrder::kAwq;
  const int64_t wide = (awq ? kAwqThreads : kThreads) / 32 * kWarpColumns;
  const int64_t high = awq ? kAwqRows : kGptqTile;
  const int64_t across = (m.columns + wide - 1) / wide, down = (m.rows + high - 1) / high;
  const unsigned grid = grid_for(across * down, 1);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = static_cast<T*>(data);
    // Rows of words: whole outputs (GPTQ), eight outputs a word (AWQ). Outputs fill words.
    const Layout at{awq ? aligned(m.codes, 8) && m.rows / 8 % kAwqWords == 0 : aligned(m.codes, 16),
                    aligned(m.scales, 16),
                    aligned(m.g_idx, 16),
                    aligned(out, 16) && m.columns % Word<T>::kElements == 0,
                    block_of(across),
                    block_of(m.group_size)};
    Kind kind = Kind::kAny;
    if (at.codes && at.scales && at.index && at.out && m.columns % kChunk == 0)
      kind = m.g_idx || m.group_size % kChunk != 0 ? Kind::kMixed : Kind::kWhole;
    if (awq) {
      if (kind == Kind::kWhole) {
        awq_kernel<Kind::kWhole><<<grid, kAwqThreads, 0, stream>>>(m, out, at);
      } else {
        awq_kernel<Kind::kAny><<<grid, kAwqThreads, 0, stream>>>(m, out, at);
      }
    } else if (m.bits == 2) {
      launch_gptq<2>(m, out, at, kind, grid, stream);
    } else if (m.bits == 8) {
      launch_gptq<8>(m, out, at, kind, grid, stream);
    } else {
      launch_gptq<4>(m, out, at, kind, grid, stream);
    }
  });
  cuda_check_launch("dequantize_groups");
}

}  // namespace ts::quant
