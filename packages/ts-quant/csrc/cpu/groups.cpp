// GPTQ and AWQ on the CPU. A tile of 32 rows is made at a time: words are read once, and 64 columns
// of a row are computed and rounded together.
#include <stdint.h>
#include <string.h>

#include "groups_layout.h"
#include "spread.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

static constexpr int kTileRows = 32;
static constexpr int kSpan = 64;  // columns
static constexpr int kTable = 256;

static inline float group_scale(const Groups& m, int64_t group, int64_t row) {
  const int64_t i = group * m.rows + row;
  if (m.scale_type == ScaleType::kF16) return to_float(static_cast<const fp16*>(m.scales)[i]);
  if (m.scale_type == ScaleType::kBF16) return to_float(static_cast<const bf16*>(m.scales)[i]);
  return static_cast<const float*>(m.scales)[i];
}

// What a thread works with: scales and zeros of the tile's rows, unpacked once where their groups
// are few enough for the stack, and the words and groups of a span of columns.
struct Work {
  float scale[kTileRows][kTable], zero[kTileRows][kTable];
  uint32_t words[kTileRows][kSpan];
  int32_t group[kSpan];
};

static void fill(const Groups& m, int64_t row, int rows, Work* work) {
  if (m.groups > kTable) return;
  for (int64_t g = 0; g < m.groups; ++g) {
    for (int j = 0; j < rows; ++j) {
      work->scale[j][g] = group_scale(m, g, row + j);
      work->zero[j][g] = static_cast<float>(group_zero(m, g, row + j));
    }
  }
}

// (v - zero) * scale for `n` columns of row `row + j`.
static inline void apply(const Groups& m, const Work& work, int64_t row, int j, int n, float* v) {
  if (m.groups > kTable) {
    for (int i = 0; i < n; ++i) {
      const float zero = static_cast<float>(group_zero(m, work.group[i], row + j));
      v[i] = (v[i] - zero) * group_scale(m, work.group[i], row + j);
    }
  } else if (!m.g_idx && work.group[0] == work.group[n - 1]) {
    const float s = work.scale[j][work.group[0]], z = work.zero[j][work.group[0]];
    for (int i = 0; i < n; ++i) v[i] = (v[i] - z) * s;
  } else {
    const float *s = work.scale[j], *z = work.zero[j];
    for (int i = 0; i < n; ++i) v[i] = (v[i] - z[work.group[i]]) * s[work.group[i]];
  }
}

// The words of a span: whole rows of codes (GPTQ), or eight rows in one word a column (AWQ).
template <int Bits>
static inline void load_words(const Groups& m, int64_t row, int rows, int64_t column, int n,
                              Work* work) {
  constexpr int kPer = 32 / Bits;
  if (m.order == GroupOrder::kAwq) {
    const int64_t stride = m.rows / 8;
    for (int i = 0; i < n; ++i)
      for (int w = 0; w < rows / 8; ++w)
        work->words[w][i] = static_cast<uint32_t>(m.codes[(column + i) * stride + row / 8 + w]);
    return;
  }
  for (int r = 0; r < n / kPer; ++r) {
    const int32_t* source = m.codes + (column / kPer + r) * m.rows + row;
    for (int j = 0; j < rows; ++j) work->words[j][r] = static_cast<uint32_t>(source[j]);
  }
}

template <int Bits>
static inline void unpack(const Groups& m, const Work& work, int j, int n, float* v) {
  constexpr uint32_t kMask = (1u << Bits) - 1;
  constexpr int kPer = 32 / Bits;
  if (m.order == GroupOrder::kAwq) {
    const uint32_t* words = work.words[j / 8];
    const int shift = 4 * awq_nibble(j % 8);
    for (int i = 0; i < n; ++i) v[i] = static_cast<float>(static_cast<int>(words[i] >> shift & 15));
    return;
  }
  const uint32_t* words = work.words[j];
#if defined(TS_QUANT_SIMD)
  if constexpr (Bits == 4) {  // the order of the nibbles in memory; v has room for whole vectors
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words);
    for (int i = 0; i < n; i += static_cast<int>(kLanes))
      store(v + i, to_floats(load_nibbles(bytes + i / 2)));
    return;
  }
#endif
  for (int r = 0; r < n / kPer; ++r)
    for (int i = 0; i < kPer; ++i)
      v[r * kPer + i] = static_cast<float>(static_cast<int>(words[r] >> i * Bits & kMask));
}

template <int Bits, typename T>
static void decode_tile(const Groups& m, int64_t row, T* out, Work* work) {
  const int rows = static_cast<int>(m.rows - row < kTileRows ? m.rows - row : kTileRows);
  float v[kSpan];
  fill(m, row, rows, work);
  for (int64_t column = 0; column < m.columns; column += kSpan) {
    const int n = static_cast<int>(m.columns - column < kSpan ? m.columns - column : kSpan);
    load_words<Bits>(m, row, rows, column, n, work);
    for (int i = 0; i < n; ++i) work->group[i] = static_cast<int32_t>(group_of(m, column + i));
    for (int j = 0; j < rows; ++j) {
      unpack<Bits>(m, *work, j, n, v);
      apply(m, *work, row, j, n, v);
      spread(out + (row + j) * m.columns + column, v, n);
    }
  }
}

template <int Bits, typename T>
static void decode(const Groups& m, T* out, int threads) {
  const int64_t tiles = (m.rows + kTileRows - 1) / kTileRows;
  const int64_t grain = kDecodeGrain / (kTileRows * (m.columns > 0 ? m.columns : 1));
  parallel_for(tiles, grain > 0 ? grain : 1, threads, [&](int64_t first, int64_t last) {
    Work work;
    memset(work.words, 0, sizeof(work.words));  // the last span may be shorter than a vector
    for (int64_t tile = first; tile < last; ++tile)
      decode_tile<Bits>(m, tile * kTileRows, out, &work);
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
