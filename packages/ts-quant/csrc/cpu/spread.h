// Stretches of floats in and out of packed forms. Included by ISA sources only.
#pragma once

#include "simd.h"

namespace ts::quant::TS_ISA {

template <typename T>
static inline void spread(T* out, const float* v, int64_t n) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(v + i));
#endif
  for (; i < n; ++i) out[i] = Convert<T>::from(v[i]);
}

#if defined(TS_QUANT_SIMD)
// kLanes codes of four bits, two a byte, the first in the low nibble.
static inline Ints load_nibbles(const uint8_t* p) {
#if defined(TS_ISA_avx512)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
#else
  int word;
  memcpy(&word, p, 4);
  const __m128i bytes = _mm_cvtsi32_si128(word);
#endif
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i codes =
      _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
#if defined(TS_ISA_avx512)
  return _mm512_cvtepu8_epi32(codes);
#else
  return _mm256_cvtepu8_epi32(codes);
#endif
}

static inline Floats to_floats(Ints x) {
#if defined(TS_ISA_avx512)
  return _mm512_cvtepi32_ps(x);
#else
  return _mm256_cvtepi32_ps(x);
#endif
}
#endif

}  // namespace ts::quant::TS_ISA
