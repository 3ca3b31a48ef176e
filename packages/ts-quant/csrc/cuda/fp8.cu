// FP8 on the GPU, bit for bit the results of csrc/cpu/fp8.cpp.
#include <type_traits>

#include "fp8.h"
#include "small_floats.cuh"

namespace ts::quant {
namespace {

// How a tile turns values into the numbers that are rounded: by division, or by an exact product.
struct Factor {
  float value;
  bool nothing;
  uint32_t largest;  // code
  __device__ __forceinline__ float apply(float x, bool e8m0) const {
    return e8m0 ? __fmul_rn(x, value) : __fdiv_rn(x, value);
  }
};

template <typename T>
__device__ __forceinline__ Factor store_scale(uint32_t bits, void* scales, int64_t index, bool e8m0,
                                              bool writes) {
  const float absmax = __uint_as_float(bits);
  const bool finite = bits < 0x7F800000u;
  if (e8m0) {
    const uint32_t code = e8m0_code(absmax);
    if (writes) static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(code);
    const bool nothing = !finite || bits == 0;
    const uint32_t largest = std::is_same_v<T, fp16> ? e8m0_largest_fp16(code) : kFp8Largest;
    return Factor{nothing ? 0.0f : e8m0_inverse(code), nothing, largest};
  }
  const float scale = __fdiv_rn(absmax, kFp8Max);
  if (writes) static_cast<float*>(scales)[index] = scale;
  return Factor{scale, !finite || scale == 0.0f, kFp8Largest};
}

template <typename T>
__device__ __forceinline__ uint2 encode8(const float* v, Factor f, bool e8m0) {
  if (f.nothing) return make_uint2(0, 0);
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = f.apply(v[i], e8m0);
  if constexpr (std::is_same_v<T, fp16>) {
    const float most = e4m3(f.largest);
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = fminf(fmaxf(scaled[i], -most), most);
  }
  return e4m3_codes(scaled);
}

// Tiles of one row and 8 * kLanes columns, columns a multiple of that: eight elements a thread,
// kLanes threads a tile. kLanes is a power of two, 32 at most.
template <typename T, int kLanes, bool kE8m0>
__global__ void encode_lanes_kernel(const T* __restrict__ x, uint8_t* __restrict__ codes,
                                    void* __restrict__ scales, int64_t groups) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t rounds = (groups + step - 1) / step;  // all 32 lanes go round
  int64_t group = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t round = 0; round < rounds; ++round, group += step) {
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (group < groups) load8(x + group * 8, v);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, magnitude_bits(v[i]));
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2)
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, apart));
    if (group >= groups) continue;
    const Factor f = store_scale<T>(largest, scales, group / kLanes, kE8m0, group % kLanes == 0);
    *reinterpret_cast<uint2*>(codes + group * 8) = encode8<T>(v, f, kE8m0);
  }
}

// Any tile: one CUDA block a tile, read twice (the second time from cache). kWide: eight elements
// at a time, where rows and tiles are a multiple of eight and aligned.
template <typename T, bool kWide>
__global__ void encode_tiles_kernel(const T* __restrict__ x, uint8_t* __restrict__ codes,
                                    void* __restrict__ scales, Fp8Tiles m, int64_t down,
                                    int64_t across, int64_t tiles) {
  __shared__ uint32_t shared[32];
  constexpr int kStep = kWide ? 8 : 1;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t column = tile % across * m.tile_columns, strip = tile / across;
    const int64_t row = strip % down * m.tile_rows;
    const int64_t at = (strip / down * m.rows + row) * m.columns + column;
    const int64_t rows = min(m.rows - row, m.tile_rows);
    const int64_t per_row = min(m.columns - column, m.tile_columns) / kStep;
    const int64_t steps = rows * per_row;
    const bool small = static_cast<uint64_t>(steps | per_row) >> 32 == 0;
    const auto row_of = [&](int64_t i) {
      return small ? static_cast<uint32_t>(i) / static_cast<uint32_t>(per_row) : i / per_row;
    };
    const auto place = [&](int64_t i) {
      const int64_t r = rows == 1 ? 0 : row_of(i);
      return at + r * m.columns + (i - r * per_row) * kStep;
    };
    uint32_t largest = 0;
    for (int64_t i = threadIdx.x; i < steps; i += blockDim.x) {
      if constexpr (kWide) {
        float v[8];
        load8(x + place(i), v);
#pragma unroll
        for (int k = 0; k < 8; ++k) largest = max(largest, magnitude_bits(v[k]));
      } else {
        largest = max(largest, magnitude_bits(widen(x[place(i)])));
      }
    }
    const Factor f =
        store_scale<T>(block_max(largest, shared), scales, tile, m.e8m0, threadIdx.x == 0);
    for (int64_t i = threadIdx.x; i < steps; i += blockDim.x) {
      const int64_t p = place(i);
      if constexpr (kWide) {
        float v[8];
        load8(x + p, v);
        *reinterpret_cast<uint2*>(codes + p) = encode8<T>(v, f, m.e8m0);
      } else {
        codes[p] = f.nothing
                       ? 0
                       : static_cast<uint8_t>(e4m3_code(f.apply(widen(x[p]), m.e8m0), f.largest));
      }
    }
  }
}

// Where the scale of an element is: tiles are 1 or 128 rows high and 32, 128 or all columns wide.
struct ScaleOf {
  const void* scales;
  int64_t across;
  int row_shift, column_shift;
  bool e8m0;
  // What is stored, as bits: nothing waits for it before `value`.
  __device__ __forceinline__ uint32_t load(int64_t batch_strips, int64_t row,
                                           int64_t column) const {
    const int64_t index = (batch_strips + (row >> row_shift)) * across + (column >> column_shift);
    return e8m0 ? __ldg(static_cast<const uint8_t*>(scales) + index)
                : __ldg(static_cast<const uint32_t*>(scales) + index);
  }
  __device__ __forceinline__ float value(uint32_t bits) const {
    return e8m0 ? quant::e8m0(bits) : __uint_as_float(bits);
  }
};

// One 16-byte word of outputs a step; words do not cross tiles.
template <typename T>
__global__ void decode_kernel(const uint8_t* __restrict__ codes, T* __restrict__ out, int64_t words,
                              int64_t batches, int64_t down, BlockOf row_of, ScaleOf scale_of) {
  constexpr int kElements = Word<T>::kElements;
  using Packed = std::conditional_t<kElements == 8, uint2, uint1>;
  const int64_t start = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  for (int64_t batch = blockIdx.y; batch < batches; batch += gridDim.y) {
    const auto* from = reinterpret_cast<const Packed*>(codes) + batch * words;
    auto* to = reinterpret_cast<uint4*>(out) + batch * words;
    Packed packed[kUnroll];
    uint32_t scale[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t word = start + u * kThreads;
      if (word < words) {
        packed[u] = from[word];
        const int64_t row = row_of(word);
        const int64_t column = (word - row * row_of.groups_per_block) * kElements;
        scale[u] = scale_of.load(batch * down, row, column);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t word = start + u * kThreads;
      if (word < words) {
        const float factor = scale_of.value(scale[u]);
        float v[kElements];
        e4m3_values(packed[u].x, v);
        if constexpr (kElements == 8) e4m3_values(packed[u].y, v + 4);
#pragma unroll
        for (int i = 0; i < kElements; ++i) v[i] = __fmul_rn(v[i], factor);
        to[word] = Word<T>::make(v);
      }
    }
  }
}

// Any alignment and number of columns, from element `begin` of all on: one element a thread.
template <typename T>
__global__ void decode_any_kernel(const uint8_t* __restrict__ codes, T* __restrict__ out,
                                  int64_t begin, int64_t n, int64_t rows, int64_t down,
                                  BlockOf row_of, ScaleOf scale_of) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const int64_t line = row_of(i), batch = line / rows;
    const float scale = scale_of.value(
        scale_of.load(batch * down, line - batch * rows, i - line * row_of.groups_per_block));
    out[i] = narrow<T>(__fmul_rn(e4m3(codes[i]), scale));
  }
}

int shift_of(int64_t size) { return size == 1 ? 0 : size == 32 ? 5 : 7; }

}  // namespace

void launch_quantize_fp8(const void* data, DType dtype, uint8_t* codes, void* scales,
                         const Fp8Tiles& m, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  const int64_t n = m.numel(), down = m.down(), across = m.across();
  const int64_t tiles = m.batches * down * across;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = static_cast<const T*>(data);
    const bool wide = m.columns % 8 == 0 && aligned(x, 16) && aligned(codes, 8);
    const unsigned grid = grid_for(n, 8 * kThreads);
    if (wide && m.e8m0 && m.columns % 32 == 0) {
      encode_lanes_kernel<T, 4, true><<<grid, kThreads, 0, stream>>>(x, codes, scales, n / 8);
      return;
    }
    if (wide && !m.e8m0 && m.tile_rows == 1 && m.columns == 128) {
      encode_lanes_kernel<T, 16, false><<<grid, kThreads, 0, stream>>>(x, codes, scales, n / 8);
      return;
    }
    const int threads = m.e8m0 ? 32 : kThreads;
    if (wide)
      encode_tiles_kernel<T, true>
          <<<grid_for(tiles, 1), threads, 0, stream>>>(x, codes, scales, m, down, across, tiles);
    else
      encode_tiles_kernel<T, false>
          <<<grid_for(tiles, 1), threads, 0, stream>>>(x, codes, scales, m, down, across, tiles);
  });
  cuda_check_launch("quantize_fp8");
}

void launch_dequantize_fp8(const uint8_t* codes, const void* scales, void* data, DType dtype,
                           const Fp8Tiles& tiles, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  Fp8Tiles m = tiles;
  if (m.tile_rows == 1) m.rows *= m.batches, m.batches = 1;  // nothing tells batches apart
  if (m.tile_rows == 1 && m.tile_columns < m.columns && m.columns % m.tile_columns == 0)
    m.columns *= m.rows, m.rows = 1;  // nor rows
  const int64_t n = m.numel(), down = m.down();
  const ScaleOf scale_of{scales, m.across(), shift_of(m.tile_rows),
                         m.tile_columns >= m.columns ? 62 : shift_of(m.tile_columns), m.e8m0};
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kElements = Word<T>::kElements;
    T* out = static_cast<T*>(data);
    // A single row may end in an incomplete word, which is left over.
    const bool single = m.rows * m.batches == 1;
    const bool wide =
        (single || m.columns % kElements == 0) && aligned(out, 16) && aligned(codes, kElements);
    const int64_t words = wide ? m.rows * m.columns / kElements : 0;
    if (words > 0) {
      const dim3 grid(grid_for(words, kThreads * kUnroll),
                      static_cast<unsigned>(m.batches < 65535 ? m.batches : 65535));
      const int64_t per_row = single ? words : m.columns / kElements;
      decode_kernel<<<grid, kThreads, 0, stream>>>(codes, out, words, m.batches, down,
                                                   block_of(per_row), scale_of);
      cuda_check_launch("dequantize_fp8");
    }
    const int64_t done = words * kElements * m.batches;
    if (done < n) {
      decode_any_kernel<<<grid_for(n - done, kThreads), kThreads, 0, stream>>>(
          codes, out, done, n, m.rows, down, block_of(m.columns), scale_of);
      cuda_check_launch("dequantize_fp8");
    }
  });
}

}  // namespace ts::quant
