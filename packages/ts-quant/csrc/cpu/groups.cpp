// GPTQ and AWQ on the CPU. A tile of 8 rows is made at a time: words are read once, and 64 columns
// of a row are computed and rounded together.
#include <stdint.h>

#include "groups_layout.h"
#include "spread.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

static constexpr int kTileRows = 8;
static constexpr int kSpan = 64;  // columns
static constexpr int kTable = 512;

static inline float group_scale(const Groups& m, int64_t group, int64_t row) {
  const int64_t i = group * m.rows + row;
  if (m.scale_type == ScaleType::kF16) return to_float(static_cast<const fp16*>(m.scales)[i]);
  if (m.scale_type == ScaleType::kBF16) return to_float(static_cast<const bf16*>(m.scales)[i]);
  return static_cast<const float*>(m.scales)[i];
}

// Scales and zeros of the tile's rows, unpacked once where they are few enough for the stack.
struct Table {
  float scale[kTable][kTileRows], zero[kTable][kTileRows];
};

static void fill(const Groups& m, int64_t row, int rows, Table* table) {
  if (m.groups > kTable) return;
  for (int64_t g = 0; g < m.groups; ++g) {
    for (int j = 0; j < rows; ++j) {
      table->scale[g][j] = group_scale(m, g, row + j);
      table->zero[g][j] = static_cast<float>(group_zero(m, g, row + j));
    }
  }
}

// Scale and zero of each of `n` columns, for row `row + j`.
static inline void span_factors(const Groups& m, const Table& table, const int64_t* group,
                                int64_t row, int j, int n, float* scale, float* zero) {
  const bool direct = m.groups > kTable;
  int64_t last = -1;
  float s = 0.0f, z = 0.0f;
  for (int i = 0; i < n; ++i) {
    if (group[i] != last) {
      last = group[i];
      s = direct ? group_scale(m, last, row + j) : table.scale[last][j];
      z = direct ? static_cast<float>(group_zero(m, last, row + j)) : table.zero[last][j];
    }
    scale[i] = s;
    zero[i] = z;
  }
}

// The codes of a span: rows of words over the columns (GPTQ), one word a column (AWQ).
template <int Bits>
static inline void load_words(const Groups& m, int64_t row, int64_t column, int n,
                              uint32_t (*words)[kSpan]) {
  if (m.order == GroupOrder::kAwq) {
    const int64_t stride = m.rows / 8;
    for (int i = 0; i < n; ++i)
      words[0][i] = static_cast<uint32_t>(m.codes[(column + i) * stride + row / 8]);
    return;
  }
  constexpr int kPer = 32 / Bits;
  for (int r = 0; r < n / kPer; ++r)
    for (int j = 0; j < kTileRows && row + j < m.rows; ++j)
      words[j][r] = static_cast<uint32_t>(m.codes[(column / kPer + r) * m.rows + row + j]);
}

template <int Bits>
static inline void unpack(const Groups& m, const uint32_t (*words)[kSpan], int j, int n, float* v) {
  constexpr uint32_t kMask = (1u << Bits) - 1;
  constexpr int kPer = 32 / Bits;
  if (m.order == GroupOrder::kAwq) {
    const int shift = 4 * awq_nibble(j);
    for (int i = 0; i < n; ++i)
      v[i] = static_cast<float>(static_cast<int>(words[0][i] >> shift & 15));
    return;
  }
  for (int r = 0; r < n / kPer; ++r) {
    const uint32_t word = words[j][r];
    for (int i = 0; i < kPer; ++i)
      v[r * kPer + i] = static_cast<float>(static_cast<int>(word >> i * Bits & kMask));
  }
}

template <int Bits, typename T>
static void decode_tile(const Groups& m, int64_t row, T* out, Table* table) {
  const int rows = static_cast<int>(m.rows - row < kTileRows ? m.rows - row : kTileRows);
  uint32_t words[kTileRows][kSpan];
  int64_t group[kSpan];
  float v[kSpan], scale[kSpan], zero[kSpan];
  fill(m, row, rows, table);
  for (int64_t column = 0; column < m.columns; column += kSpan) {
    const int n = static_cast<int>(m.columns - column < kSpan ? m.columns - column : kSpan);
    load_words<Bits>(m, row, column, n, words);
    for (int i = 0; i < n; ++i) group[i] = group_of(m, column + i);
    for (int j = 0; j < rows; ++j) {
      unpack<Bits>(m, words, j, n, v);
      if (!m.g_idx && group[0] == group[n - 1]) {
        span_factors(m, *table, group, row, j, 1, scale, zero);
        const float s = scale[0], z = zero[0];
        for (int i = 0; i < n; ++i) v[i] = (v[i] - z) * s;
      } else {
        span_factors(m, *table, group, row, j, n, scale, zero);
        for (int i = 0; i < n; ++i) v[i] = (v[i] - zero[i]) * scale[i];
      }
      spread(out + (row + j) * m.columns + column, v, n);
    }
  }
}

template <int Bits, typename T>
static void decode(const Groups& m, T* out, int threads) {
  const int64_t tiles = (m.rows + kTileRows - 1) / kTileRows;
  const int64_t grain = kDecodeGrain / (kTileRows * (m.columns > 0 ? m.columns : 1));
  parallel_for(tiles, grain > 0 ? grain : 1, threads, [&](int64_t first, int64_t last) {
    Table table;
    for (int64_t tile = first; tile < last; ++tile)
      decode_tile<Bits>(m, tile * kTileRows, out, &table);
  });
}

template <typename T>
static void decode_bits(const Groups& m, T* out, int threads) {
  if (m.bits == 2) return decode<2>(m, out, threads);
  if (m.bits == 8) return decode<8>(m, out, threads);
  decode<4>(m, out, threads);
}

#define TS_QUANT_GROUPS(T) \
  void dequantize_groups(const Groups& m, T* out, int threads) { decode_bits(m, out, threads); }

TS_QUANT_GROUPS(float)
TS_QUANT_GROUPS(bf16)
TS_QUANT_GROUPS(fp16)

}  // namespace ts::quant::TS_ISA
