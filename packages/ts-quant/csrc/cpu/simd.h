// Vectors of floats for the kernels of this package: 16 (AVX-512), 8 (AVX2) or none (portable).
// Loads widen exactly; stores round once, to nearest even, with the bits of ts/numeric.h.
// Included by ISA sources only, inside no namespace.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(TS_ISA_avx2) || defined(TS_ISA_avx512)
#include <immintrin.h>
#define TS_QUANT_SIMD 1
#endif

#include "ts/numeric.h"

namespace ts::quant::TS_ISA {

static inline uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFFu; }

#if defined(TS_ISA_avx512)

static constexpr int64_t kLanes = 16;
using Floats = __m512;
using Ints = __m512i;

static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
static inline Floats load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static inline Floats load(const fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
static inline void store(bf16* p, Floats x) {
  const Ints u = _mm512_castps_si512(x);
  const Ints odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  Ints r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
static inline void store(fp16* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Floats splat(float x) { return _mm512_set1_ps(x); }
static inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline Ints zero_ints() { return _mm512_setzero_si512(); }
static inline Ints larger_magnitude(Ints m, Floats x) {
  const Ints a = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_max_epu32(m, a);
}
static inline uint32_t largest(Ints m) { return _mm512_reduce_max_epu32(m); }

#elif defined(TS_ISA_avx2)

static constexpr int64_t kLanes = 8;
using Floats = __m256;
using Ints = __m256i;

static inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
static inline Floats load(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static inline Floats load(const fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
static inline void store(bf16* p, Floats x) {
  const Ints u = _mm256_castps_si256(x);
  const Ints odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  Ints r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
  const Ints quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const Ints nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_srli_epi32(_mm256_blendv_epi8(r, quiet, nan), 16);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
}
static inline void store(fp16* p, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Floats splat(float x) { return _mm256_set1_ps(x); }
static inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
static inline Ints zero_ints() { return _mm256_setzero_si256(); }
static inline Ints larger_magnitude(Ints m, Floats x) {
  const Ints a = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
  return _mm256_max_epu32(m, a);
}
static inline uint32_t largest(Ints m) {
  __m128i x = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
}

#endif

// Largest |x| of a block. Compared as integers, so a NaN or an infinity comes out as the result.
template <typename T>
static inline float block_absmax(const T* x, int64_t n) {
  uint32_t best = 0;
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  if (n >= kLanes) {
    Ints m = zero_ints();
    for (; i + kLanes <= n; i += kLanes) m = larger_magnitude(m, load(x + i));
    best = largest(m);
  }
#endif
  for (; i < n; ++i) {
    const uint32_t a = magnitude_bits(to_float(x[i]));
    best = a > best ? a : best;
  }
  return bits_float(best);
}

// Cuts the piece [begin, end) of a tensor where its blocks end: body(first, last, block).
template <typename Body>
static inline void for_each_span(int64_t begin, int64_t end, int64_t block_size, Body&& body) {
  int64_t block = begin / block_size;
  for (int64_t i = begin; i < end; ++block) {
    const int64_t edge = (block + 1) * block_size;
    const int64_t last = edge < end ? edge : end;
    body(i, last, block);
    i = last;
  }
}

// Elements a thread takes at a time when it decodes; even, so that no byte has two writers.
static constexpr int64_t kDecodeGrain = 1 << 15;

// Blocks a thread takes at a time when it encodes.
static inline int64_t encode_grain(int64_t block_size) {
  return block_size >= (1 << 15) ? 1 : (1 << 15) / block_size;
}

}  // namespace ts::quant::TS_ISA
