// nf4 and int8 with packed scales on the CPU. Every variant gives the same bits.
#include <stdint.h>

#include "eight_bit.h"
#include "four_bit.h"
#include "nf4.h"
#include "scale_data.h"
#include "scales.h"
#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

// The smallest scale of a group may be much larger than the block needs: rounding to the nearest
// could then enlarge its values.
template <typename T>
static void encode_toward_zero(const T* x, int64_t n, float absmax, int8_t* codes) {
  const float scale = int8_scale(absmax);
  for (int64_t i = 0; i < n; ++i) {
    const float v = scale == 0.0f ? 0.0f : to_float(x[i]) / scale;
    codes[i] = static_cast<int8_t>(v > 127.0f ? 127.0f : v < -127.0f ? -127.0f : v);
  }
}

template <typename T>
static void encode(const T* x, LogScaleData data, int8_t* codes, int64_t n, int64_t block_size,
                   int threads) {
  const int64_t blocks = n / block_size + (n % block_size != 0);
  parallel_for(blocks, encode_grain(block_size), threads, [=](int64_t first, int64_t last) {
    const LogScales scales(data);
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * block_size;
      const int64_t count = n - begin < block_size ? n - begin : block_size;
      if (data.codes[b] == 1) {
        encode_toward_zero(x + begin, count, scales(b), codes + begin);
      } else {
        encode_block(x + begin, count, scales(b), codes + begin);
      }
    }
  });
}

#define TS_QUANT_NESTED(T)                                                               \
  void dequantize_nf4_dq(const uint8_t* codes, MapScaleData scales, T* out, int64_t n,   \
                         int64_t block_size, int threads) {                              \
    decode_four_bit(kNf4Levels, codes, MapScales(scales), out, n, block_size, threads);  \
  }                                                                                      \
  void encode_int8_dq(const T* x, LogScaleData scales, int8_t* codes, int64_t n,         \
                      int64_t block_size, int threads) {                                 \
    encode(x, scales, codes, n, block_size, threads);                                    \
  }                                                                                      \
  void dequantize_int8_dq(const int8_t* codes, LogScaleData scales, T* out, int64_t n,   \
                          int64_t block_size, int threads) {                             \
    decode_eight_bit<TimesScale>(codes, LogScales(scales), out, n, block_size, threads); \
  }

TS_QUANT_NESTED(float)
TS_QUANT_NESTED(bf16)
TS_QUANT_NESTED(fp16)

}  // namespace ts::quant::TS_ISA
