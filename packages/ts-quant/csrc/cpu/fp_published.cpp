// Published fp4 and fp8 layouts on the CPU. The loops over constant counts are what the compiler
// vectorizes, for each instruction set.
#include <stdint.h>

#include "fp_layouts.h"
#include "spread.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

// One group, 16 or 32 codes.
template <int N>
static inline void unpack(const uint8_t* codes, float scale, float* v) {
  for (int i = 0; i < N / 2; ++i) {
    v[2 * i] = e2m1(codes[i] & 15u) * scale;
    v[2 * i + 1] = e2m1(codes[i] >> 4) * scale;
  }
}

template <int N, typename T>
static void decode_rows(const Fp4& m, float tensor_scale, T* out, int threads) {
  const int64_t groups = m.stacks * m.rows * (m.columns / N);
  parallel_for(groups, kDecodeGrain / N, threads, [=, &m](int64_t first, int64_t last) {
    float v[N];
    for (int64_t g = first; g < last; ++g) {
      unpack<N>(m.codes + g * (N / 2), fp4_scale(m.scales[g], m.kind, tensor_scale), v);
      spread(out + g * N, v, N);
    }
  });
}

// One group of columns of 64 rows at a time: N output rows of 64.
template <int N, typename T>
static void decode_transposed(const Fp4& m, float tensor_scale, T* out, int threads) {
  constexpr int kRows = 64;
  const int64_t across = m.columns / N, down = (m.rows + kRows - 1) / kRows;
  const int64_t tiles = m.stacks * across * down;
  parallel_for(tiles, kDecodeGrain / (N * kRows), threads, [=, &m](int64_t first, int64_t last) {
    float v[N], columns[N][kRows];
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t stack = tile / (across * down), row = tile / across % down * kRows;
      const int64_t group = tile % across;
      const int rows = static_cast<int>(m.rows - row < kRows ? m.rows - row : kRows);
      for (int r = 0; r < rows; ++r) {
        const int64_t g = (stack * m.rows + row + r) * across + group;
        unpack<N>(m.codes + g * (N / 2), fp4_scale(m.scales[g], m.kind, tensor_scale), v);
        for (int c = 0; c < N; ++c) columns[c][r] = v[c];
      }
      T* target = out + (stack * m.columns + group * N) * m.rows + row;
      for (int c = 0; c < N; ++c) spread(target + c * m.rows, columns[c], rows);
    }
  });
}

template <typename T>
static void decode_fp4(const Fp4& m, T* out, int threads) {
  const float tensor_scale = m.tensor_scale ? *m.tensor_scale : 1.0f;
  if (m.kind == Fp4Scale::kE8M0) {
    if (m.transposed) return decode_transposed<32>(m, tensor_scale, out, threads);
    return decode_rows<32>(m, tensor_scale, out, threads);
  }
  if (m.transposed) return decode_transposed<16>(m, tensor_scale, out, threads);
  decode_rows<16>(m, tensor_scale, out, threads);
}

template <typename T>
static void decode_fp8_span(const uint8_t* codes, float scale, T* out, int64_t n) {
  constexpr int kSpan = 64;
  float v[kSpan];
  int64_t i = 0;
  for (; i + kSpan <= n; i += kSpan) {
    for (int k = 0; k < kSpan; ++k) v[k] = e4m3(codes[i + k]) * scale;
    spread(out + i, v, kSpan);
  }
  for (; i < n; ++i) out[i] = Convert<T>::from(e4m3(codes[i]) * scale);
}

template <typename T>
static void decode_fp8(const Fp8& m, T* out, int threads) {
  const int64_t across = (m.columns + m.tile_columns - 1) / m.tile_columns;
  const int64_t grain = kDecodeGrain / (m.columns > 0 ? m.columns : 1);
  parallel_for(m.rows, grain > 0 ? grain : 1, threads, [=, &m](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* scales = m.scales + row / m.tile_rows * across;
      for (int64_t tile = 0; tile < across; ++tile) {
        const int64_t begin = tile * m.tile_columns, rest = m.columns - begin;
        const int64_t at = row * m.columns + begin;
        decode_fp8_span(m.codes + at, scales[tile], out + at,
                        rest < m.tile_columns ? rest : m.tile_columns);
      }
    }
  });
}

#define TS_QUANT_PUBLISHED(T)                                        \
  void dequantize_published_fp4(const Fp4& m, T* out, int threads) { \
    decode_fp4(m, out, threads);                                     \
  }                                                                  \
  void dequantize_published_fp8(const Fp8& m, T* out, int threads) { decode_fp8(m, out, threads); }

TS_QUANT_PUBLISHED(float)
TS_QUANT_PUBLISHED(bf16)
TS_QUANT_PUBLISHED(fp16)

}  // namespace ts::quant::TS_ISA
