// What bitsandbytes publishes besides nf4, on the CPU: fp4, and int8 with one scale a row.
#include <stdint.h>

#include "eight_bit.h"
#include "four_bit.h"
#include "scale_data.h"
#include "scales.h"
#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

// Two roundings, in bitsandbytes' order: the scale of the row, then 1 / 127.
struct TimesRow {
  float scale;
  explicit TimesRow(float row_scale) : scale(row_scale) {}
  float operator()(float code) const { return code * scale * kInverse127; }
#if defined(TS_QUANT_SIMD)
  Floats operator()(Floats codes) const {
    return multiply(multiply(codes, splat(scale)), splat(kInverse127));
  }
#endif
};

#define TS_QUANT_BNB(T)                                                                      \
  void dequantize_fp4(const uint8_t* codes, const float* absmax, T* out, int64_t n,          \
                      int64_t block_size, int threads) {                                     \
    decode_four_bit(kFp4Levels, codes, PlainScales{absmax}, out, n, block_size, threads);    \
  }                                                                                          \
  void dequantize_fp4_dq(const uint8_t* codes, MapScaleData scales, T* out, int64_t n,       \
                         int64_t block_size, int threads) {                                  \
    decode_four_bit(kFp4Levels, codes, MapScales(scales), out, n, block_size, threads);      \
  }                                                                                          \
  void dequantize_int8_rows(const int8_t* codes, const float* row_scales, T* out, int64_t n, \
                            int64_t columns, int threads) {                                  \
    decode_eight_bit<TimesRow>(codes, PlainScales{row_scales}, out, n, columns, threads);    \
  }

TS_QUANT_BNB(float)
TS_QUANT_BNB(bf16)
TS_QUANT_BNB(fp16)

}  // namespace ts::quant::TS_ISA
