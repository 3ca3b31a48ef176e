// Vectors of small floats: the bits of small_floats.h and fp_values.h, many at a time. Included by
// ISA sources only, inside no namespace.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../fp_values.h"
#include "../small_floats.h"
#include "simd.h"

namespace ts::quant::TS_ISA {

#if defined(TS_ISA_avx512)

static inline void store_e4m3(uint8_t* out, Floats v, uint32_t largest) {
  const Ints bits = _mm512_castps_si512(v);
  const Ints a = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(a, 20), _mm512_set1_epi32(1));
  const Ints up = _mm512_add_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(0x7FFFF)), odd);
  const Ints normal = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32(960));
  const Ints small = _mm512_sub_epi32(
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_set1_ps(16384.0f))),
      _mm512_set1_epi32(0x46800000));
  const __mmask16 below = _mm512_cmplt_epi32_mask(a, _mm512_set1_epi32(0x3C800000));
  const Ints code = _mm512_min_epu32(_mm512_mask_blend_epi32(below, normal, small),
                                     _mm512_set1_epi32(static_cast<int>(largest)));
  const Ints sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
}

// Through fp16, whose conversion takes subnormals as they are: e4m3 in its upper bits is 2^-8 of
// it.
static inline Floats load_e4m3(const uint8_t* p) {
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i m = _mm256_and_si256(w, _mm256_set1_epi16(0x7F));
  const __m256i nan =
      _mm256_and_si256(_mm256_cmpeq_epi16(m, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7E00));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(m, 7), nan), sign);
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

// Sixteen codes, two a byte, the first in the low nibble.
static inline void store_e2m1(uint8_t* out, Floats v) {
  const Ints bits = _mm512_castps_si512(v);
  const Floats a = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
  const Ints one = _mm512_set1_epi32(1);
  Ints c = _mm512_and_si512(_mm512_srli_epi32(bits, 28), _mm512_set1_epi32(8));
  const auto count = [&](__mmask16 above) { c = _mm512_mask_add_epi32(c, above, c, one); };
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(0.25f), _CMP_GT_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(0.75f), _CMP_GE_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(1.25f), _CMP_GT_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(1.75f), _CMP_GE_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(2.5f), _CMP_GT_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(3.5f), _CMP_GE_OQ));
  count(_mm512_cmp_ps_mask(a, _mm512_set1_ps(5.0f), _CMP_GT_OQ));
  const Ints pairs = _mm512_or_si512(c, _mm512_srli_epi64(c, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
}

#elif defined(TS_ISA_avx2)

static inline void store_e4m3(uint8_t* out, Floats v, uint32_t largest) {
  const Ints bits = _mm256_castps_si256(v);
  const Ints a = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const Ints odd = _mm256_and_si256(_mm256_srli_epi32(a, 20), _mm256_set1_epi32(1));
  const Ints up = _mm256_add_epi32(_mm256_add_epi32(a, _mm256_set1_epi32(0x7FFFF)), odd);
  const Ints normal = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32(960));
  const Ints small = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), _mm256_set1_ps(16384.0f))),
      _mm256_set1_epi32(0x46800000));
  const Ints below = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), a);
  const Ints code = _mm256_min_epu32(_mm256_blendv_epi8(normal, small, below),
                                     _mm256_set1_epi32(static_cast<int>(largest)));
  const Ints sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const Ints c = _mm256_or_si256(code, sign);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
}

static inline Floats load_e4m3(const uint8_t* p) {
  const __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i m = _mm_and_si128(w, _mm_set1_epi16(0x7F));
  const __m128i nan =
      _mm_and_si128(_mm_cmpeq_epi16(m, _mm_set1_epi16(0x7F)), _mm_set1_epi16(0x7E00));
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8);
  const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(m, 7), nan), sign);
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

static inline void store_e2m1(uint8_t* out, Floats v) {
  const Ints bits = _mm256_castps_si256(v);
  const Floats a = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
  Ints c = _mm256_and_si256(_mm256_srli_epi32(bits, 28), _mm256_set1_epi32(8));
  const auto count = [&](Floats above) { c = _mm256_sub_epi32(c, _mm256_castps_si256(above)); };
  count(_mm256_cmp_ps(a, _mm256_set1_ps(0.25f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(0.75f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(1.25f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(1.75f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(2.5f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(3.5f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(a, _mm256_set1_ps(5.0f), _CMP_GT_OQ));
  const Ints pairs = _mm256_or_si256(c, _mm256_srli_epi64(c, 28));
  const Ints picked = _mm256_shuffle_epi8(
      pairs, _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                              -1, -1, 0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m128i bytes =
      _mm_or_si128(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
  const int packed = _mm_cvtsi128_si32(bytes);
  memcpy(out, &packed, 4);
}

#endif

}  // namespace ts::quant::TS_ISA
