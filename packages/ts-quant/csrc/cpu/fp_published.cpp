// Published fp4 and fp8 layouts on the CPU. Every variant gives the same bits.
#include <stdint.h>

#include "fp_layouts.h"
#include "small_floats_simd.h"
#include "spread.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

#if defined(TS_QUANT_SIMD)
static constexpr float kE2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

static inline Floats load_e2m1(const uint8_t* p) {
  const Ints codes = load_nibbles(p);
#if defined(TS_ISA_avx512)
  const Floats table = _mm512_castps256_ps512(_mm256_loadu_ps(kE2m1));
  const Ints sign = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(8)), 28);
  const Ints index = _mm512_and_si512(codes, _mm512_set1_epi32(7));
  return _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(_mm512_permutexvar_ps(index, table)), sign));
#else
  const Ints sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  return _mm256_or_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1), codes),
                      _mm256_castsi256_ps(sign));
#endif
}
#endif

// One group, 16 or 32 codes.
template <int N>
static inline void unpack(const uint8_t* codes, float scale, float* v) {
#if defined(TS_QUANT_SIMD)
  for (int i = 0; i < N; i += static_cast<int>(kLanes))
    store(v + i, multiply(load_e2m1(codes + i / 2), splat(scale)));
#else
  for (int i = 0; i < N / 2; ++i) {
    v[2 * i] = e2m1(codes[i] & 15u) * scale;
    v[2 * i + 1] = e2m1(codes[i] >> 4) * scale;
  }
#endif
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
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  const Floats factor = splat(scale);
  for (; i + kLanes <= n; i += kLanes) store(out + i, multiply(load_e4m3(codes + i), factor));
#endif
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
