// FP8 on the CPU: code = e4m3(x / scale), value = code * scale, in fp32. With float scales,
// scale = absmax / 448; with e8m0, a power of two, whose inverse is multiplied with. Every variant
// gives the same bits.
#include <stdint.h>

#include "../fp8_layout.h"
#include "simd.h"
#include "small_floats_simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

template <typename T>
static void encode_row(const T* x, int64_t n, float factor, bool divides, uint32_t largest,
                       uint8_t* codes) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  const Floats by = splat(factor);
  if (divides) {
    for (; i + kLanes <= n; i += kLanes) store_e4m3(codes + i, divide(load(x + i), by), largest);
  } else {
    for (; i + kLanes <= n; i += kLanes) store_e4m3(codes + i, multiply(load(x + i), by), largest);
  }
#endif
  for (; i < n; ++i) {
    const float v = to_float(x[i]);
    codes[i] = static_cast<uint8_t>(e4m3_code(divides ? v / factor : v * factor, largest));
  }
}

static inline bool is_fp16(const void*) { return false; }
static inline bool is_fp16(const fp16*) { return true; }

// One tile: `rows` rows of `n` elements, `stride` apart.
template <typename T>
static void encode_tile(const T* x, uint8_t* codes, int64_t rows, int64_t n, int64_t stride,
                        void* scales, int64_t index, bool e8m0) {
  uint32_t bits = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t row = magnitude_bits(block_absmax(x + r * stride, n));
    bits = row > bits ? row : bits;
  }
  const float absmax = bits_float(bits);
  float factor = absmax / kFp8Max;
  uint32_t largest_code = kFp8Largest;
  // Nothing to hold, too little for a scale, or not finite (the caller refuses it).
  bool nothing = bits >= 0x7F800000u || factor == 0.0f;
  if (e8m0) {
    const uint32_t code = e8m0_code(absmax);
    static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(code);
    nothing = bits >= 0x7F800000u || bits == 0;
    factor = nothing ? 0.0f : e8m0_inverse(code);
    if (is_fp16(x)) largest_code = e8m0_largest_fp16(code);
  } else {
    static_cast<float*>(scales)[index] = factor;
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (nothing)
      memset(codes + r * stride, 0, static_cast<size_t>(n));
    else
      encode_row(x + r * stride, n, factor, !e8m0, largest_code, codes + r * stride);
  }
}

template <typename T>
static void quantize(const T* x, uint8_t* codes, void* scales, const Fp8Tiles& m, int threads) {
  const int64_t down = m.down(), across = m.across();
  const int64_t size = (m.tile_rows < m.rows ? m.tile_rows : m.rows) *
                       (m.tile_columns < m.columns ? m.tile_columns : m.columns);
  const int64_t grain = size >= (1 << 15) ? 1 : (1 << 15) / size;
  parallel_for(m.batches * down * across, grain, threads, [=, &m](int64_t first, int64_t last) {
    int64_t column = first % across * m.tile_columns, strip = first / across;
    for (int64_t tile = first; tile < last; ++tile, column += m.tile_columns) {
      if (column >= m.columns) column = 0, ++strip;
      const int64_t batch = down == 1 ? strip : strip / down;  // a division a tile of 32 would show
      const int64_t row = (strip - batch * down) * m.tile_rows;
      const int64_t left = m.rows - row, wide = m.columns - column;
      const int64_t at = (batch * m.rows + row) * m.columns + column;
      encode_tile(x + at, codes + at, left < m.tile_rows ? left : m.tile_rows,
                  wide < m.tile_columns ? wide : m.tile_columns, m.columns, scales, tile, m.e8m0);
    }
  });
}

template <typename T>
static void decode_span(const uint8_t* codes, float scale, T* out, int64_t n) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  const Floats factor = splat(scale);
  for (; i + kLanes <= n; i += kLanes) store(out + i, multiply(load_e4m3(codes + i), factor));
#endif
  for (; i < n; ++i) out[i] = Convert<T>::from(e4m3(codes[i]) * scale);
}

// Columns that a thread takes of one row; a multiple of every tile of a fixed width.
static constexpr int64_t kSegment = 1 << 15;

template <typename T>
static void dequantize(const uint8_t* codes, const void* scales, T* out, const Fp8Tiles& m,
                       int threads) {
  const int64_t down = m.down(), across = m.across();
  const int64_t segments = (m.columns + kSegment - 1) / kSegment;
  const int64_t grain = m.columns >= kSegment ? 1 : kSegment / m.columns;
  parallel_for(m.batches * m.rows * segments, grain, threads, [=, &m](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t row = unit / segments, begin = unit % segments * kSegment;
      const int64_t end = m.columns - begin < kSegment ? m.columns : begin + kSegment;
      const int64_t strip = row / m.rows * down + row % m.rows / m.tile_rows;
      int64_t index = strip * across + begin / m.tile_columns;
      for (int64_t c = begin; c < end; ++index) {
        const int64_t stop = end - c < m.tile_columns ? end : c + m.tile_columns;
        const float scale = m.e8m0 ? e8m0(static_cast<const uint8_t*>(scales)[index])
                                   : static_cast<const float*>(scales)[index];
        decode_span(codes + row * m.columns + c, scale, out + row * m.columns + c, stop - c);
        c = stop;
      }
    }
  });
}

#define TS_QUANT_FP8(T)                                                                         \
  void quantize_fp8(const T* x, uint8_t* codes, void* scales, const Fp8Tiles& m, int threads) { \
    quantize(x, codes, scales, m, threads);                                                     \
  }                                                                                             \
  void dequantize_fp8(const uint8_t* codes, const void* scales, T* out, const Fp8Tiles& m,      \
                      int threads) {                                                            \
    dequantize(codes, scales, out, m, threads);                                                 \
  }

TS_QUANT_FP8(float)
TS_QUANT_FP8(bf16)
TS_QUANT_FP8(fp16)

}  // namespace ts::quant::TS_ISA
