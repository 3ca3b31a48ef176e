// int8 on the CPU, with one fp32 absmax per block; see eight_bit.h.
#include <stdint.h>

#include "eight_bit.h"
#include "scale_data.h"
#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

template <typename T>
static void quantize(const T* x, int8_t* codes, float* absmax, int64_t n, int64_t block_size,
                     int threads) {
  const int64_t blocks = n / block_size + (n % block_size != 0);
  parallel_for(blocks, encode_grain(block_size), threads, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * block_size;
      const int64_t count = n - begin < block_size ? n - begin : block_size;
      absmax[b] = int8_absmax(block_absmax(x + begin, count));
      encode_block(x + begin, count, absmax[b], codes + begin);
    }
  });
}

#define TS_QUANT_INT8(T)                                                                      \
  void quantize_int8(const T* x, int8_t* codes, float* absmax, int64_t n, int64_t block_size, \
                     int threads) {                                                           \
    quantize(x, codes, absmax, n, block_size, threads);                                       \
  }                                                                                           \
  void dequantize_int8(const int8_t* codes, const float* absmax, T* out, int64_t n,           \
                       int64_t block_size, int threads) {                                     \
    decode_eight_bit<TimesScale>(codes, PlainScales{absmax}, out, n, block_size, threads);    \
  }

TS_QUANT_INT8(float)
TS_QUANT_INT8(bf16)
TS_QUANT_INT8(fp16)

}  // namespace ts::quant::TS_ISA
