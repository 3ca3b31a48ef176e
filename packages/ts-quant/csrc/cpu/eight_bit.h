// 8-bit codes on the CPU: scale = absmax / 127, code = round(x / scale), value = code * scale.
// Every variant gives the same bits: correctly rounded divisions and multiplications, no
// contraction. Included by ISA sources only.
#pragma once

#include <stdint.h>

#include "scales.h"
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

// How a code becomes a value, given the scale that is stored for its block.
struct TimesScale {
  float factor;
  explicit TimesScale(float absmax) : factor(int8_scale(absmax)) {}
  float operator()(float code) const { return code * factor; }
#if defined(TS_QUANT_SIMD)
  Floats operator()(Floats codes) const { return multiply(codes, splat(factor)); }
#endif
};

template <typename Rule, typename T>
static void decode_span(Rule rule, const int8_t* codes, T* out, int64_t n) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  for (; i + kLanes <= n; i += kLanes) store(out + i, rule(load_codes(codes + i)));
#endif
  for (; i < n; ++i) out[i] = Convert<T>::from(rule(static_cast<float>(codes[i])));
}

template <typename Rule, typename T, typename Scales>
static void decode_eight_bit(const int8_t* codes, Scales scales, T* out, int64_t n,
                             int64_t block_size, int threads) {
  parallel_for(n, kDecodeGrain, threads, [=](int64_t begin, int64_t end) {
    for_each_span(begin, end, block_size, [=](int64_t first, int64_t last, int64_t block) {
      decode_span(Rule(scales(block)), codes + first, out + first, last - first);
    });
  });
}

}  // namespace ts::quant::TS_ISA
