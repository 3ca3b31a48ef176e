// int8 on the CPU: scale = absmax / 127, code = round(x / scale), value = code * scale.
// Every variant gives the same bits: correctly rounded divisions and multiplications, no
// contraction.
#include <stdint.h>

#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

static inline float int8_scale(float absmax) { return absmax / 127.0f; }

// Adding and taking away 1.5 * 2^23 rounds to the nearest even integer. A quotient is below 191: a
// subnormal scale is off by less than half of itself.
static inline int8_t int8_code(float x, float scale) {
  const float v = x / scale;
  const float r = (v + 12582912.0f) - 12582912.0f;
  return static_cast<int8_t>(r > 127.0f ? 127.0f : r < -127.0f ? -127.0f : r);
}

#if defined(TS_ISA_avx512)

static inline void store_codes(int8_t* out, Floats v) {
  const Ints r = _mm512_cvtps_epi32(v);  // to nearest even
  const Ints c =
      _mm512_max_epi32(_mm512_min_epi32(r, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(c));
}

static inline Floats load_codes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

#elif defined(TS_ISA_avx2)

static inline void store_codes(int8_t* out, Floats v) {
  const Ints r = _mm256_cvtps_epi32(v);  // to nearest even
  const Ints c =
      _mm256_max_epi32(_mm256_min_epi32(r, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
}

static inline Floats load_codes(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

#endif

template <typename T>
static void encode_block(const T* x, int64_t n, float absmax, int8_t* codes) {
  const float scale = int8_scale(absmax);
  int64_t i = 0;
  // A block of zeros, one too small for a scale, or one that is not finite (the caller refuses it).
  if (scale == 0.0f || magnitude_bits(absmax) >= 0x7F800000u) {
    for (; i < n; ++i) codes[i] = 0;
    return;
  }
#if defined(TS_QUANT_SIMD)
  const Floats divisor = splat(scale);
  for (; i + kLanes <= n; i += kLanes) store_codes(codes + i, divide(load(x + i), divisor));
#endif
  for (; i < n; ++i) codes[i] = int8_code(to_float(x[i]), scale);
}

template <typename T>
static void quantize(const T* x, int8_t* codes, float* absmax, int64_t n, int64_t block_size,
                     int threads) {
  const int64_t blocks = n / block_size + (n % block_size != 0);
  parallel_for(blocks, encode_grain(block_size), threads, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * block_size;
      const int64_t count = n - begin < block_size ? n - begin : block_size;
      absmax[b] = block_absmax(x + begin, count);
      encode_block(x + begin, count, absmax[b], codes + begin);
    }
  });
}

template <typename T>
static void decode_span(const int8_t* codes, float absmax, T* out, int64_t n) {
  const float scale = int8_scale(absmax);
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  const Floats factor = splat(scale);
  for (; i + kLanes <= n; i += kLanes) store(out + i, multiply(load_codes(codes + i), factor));
#endif
  for (; i < n; ++i) out[i] = Convert<T>::from(static_cast<float>(codes[i]) * scale);
}

template <typename T>
static void dequantize(const int8_t* codes, const float* absmax, T* out, int64_t n,
                       int64_t block_size, int threads) {
  parallel_for(n, kDecodeGrain, threads, [=](int64_t begin, int64_t end) {
    for_each_span(begin, end, block_size, [=](int64_t first, int64_t last, int64_t block) {
      decode_span(codes + first, absmax[block], out + first, last - first);
    });
  });
}

#define TS_QUANT_INT8(T)                                                                      \
  void quantize_int8(const T* x, int8_t* codes, float* absmax, int64_t n, int64_t block_size, \
                     int threads) {                                                           \
    quantize(x, codes, absmax, n, block_size, threads);                                       \
  }                                                                                           \
  void dequantize_int8(const int8_t* codes, const float* absmax, T* out, int64_t n,           \
                       int64_t block_size, int threads) {                                     \
    dequantize(codes, absmax, out, n, block_size, threads);                                   \
  }

TS_QUANT_INT8(float)
TS_QUANT_INT8(bf16)
TS_QUANT_INT8(fp16)

}  // namespace ts::quant::TS_ISA
