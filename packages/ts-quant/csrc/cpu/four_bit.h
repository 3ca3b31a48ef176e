// Decoding 4-bit codes on the CPU: two codes a byte, the first in the high nibble, 16 levels times
// the scale of the block. Included by ISA sources only.
#pragma once

#include <stdint.h>
#include <string.h>

#include "scales.h"
#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

// The 16 values a block can hold, rounded to the output type: decoding is then a lookup.
template <typename T>
struct Palette {
  alignas(64) T value[16];
  Palette(const float* levels, float absmax) {
#if defined(TS_QUANT_SIMD)
    for (int i = 0; i < 16; i += static_cast<int>(kLanes))
      store(value + i, multiply(load(levels + i), splat(absmax)));
#else
    for (int i = 0; i < 16; ++i) value[i] = Convert<T>::from(levels[i] * absmax);
#endif
  }
};

#if defined(TS_ISA_avx512)

static inline int64_t lookup(const Palette<float>& p, const uint8_t* codes, float* out, int64_t n) {
  const Floats table = _mm512_load_ps(p.value);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i / 2));
    const Ints b = _mm512_cvtepu8_epi64(bytes);
    // Even lane: the high nibble; odd lane: the byte, of which the permutation reads 4 bits.
    const Ints index = _mm512_or_si512(_mm512_srli_epi64(b, 4), _mm512_slli_epi64(b, 32));
    _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(index, table));
  }
  return i;
}

template <typename T>
static inline int64_t lookup(const Palette<T>& p, const uint8_t* codes, T* out, int64_t n) {
  // Twice in a row, because the permutation reads 5 bits and the fifth is a stray one.
  const __m512i table =
      _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(p.value)));
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
    const Ints b = _mm512_cvtepu8_epi32(bytes);
    const Ints index = _mm512_or_si512(_mm512_srli_epi32(b, 4), _mm512_slli_epi32(b, 16));
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(index, table));
  }
  return i;
}

#elif defined(TS_ISA_avx2)

static inline int64_t lookup(const Palette<float>& p, const uint8_t* codes, float* out, int64_t n) {
  const Floats below = _mm256_load_ps(p.value), above = _mm256_load_ps(p.value + 8);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    int packed;
    memcpy(&packed, codes + i / 2, 4);
    const Ints b = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(packed));
    // Even lane: the high nibble; odd lane: the byte. The permutations read 3 bits, the blend
    // bit 3.
    const Ints index = _mm256_or_si256(_mm256_srli_epi64(b, 4), _mm256_slli_epi64(b, 32));
    const Floats upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(below, index),
                                               _mm256_permutevar8x32_ps(above, index), upper));
  }
  return i;
}

template <typename T>
static inline int64_t lookup(const Palette<T>& p, const uint8_t* codes, T* out, int64_t n) {
  // One byte shuffle for the low bytes of the 16 values and one for the high bytes.
  const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(p.value));
  const __m256i low_words = _mm256_and_si256(words, _mm256_set1_epi16(0xFF));
  const __m256i high_words = _mm256_srli_epi16(words, 8);
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16(low_words, high_words), 0xD8);
  const __m256i low_table = _mm256_permute4x64_epi64(both, 0x44);
  const __m256i high_table = _mm256_permute4x64_epi64(both, 0xEE);
  const __m128i nibble = _mm_set1_epi8(15);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    const __m128i low = _mm_and_si128(bytes, nibble);
    const __m256i index =
        _mm256_set_m128i(_mm_unpackhi_epi8(high, low), _mm_unpacklo_epi8(high, low));
    const __m256i lows = _mm256_shuffle_epi8(low_table, index);
    const __m256i highs = _mm256_shuffle_epi8(high_table, index);
    const __m256i a = _mm256_unpacklo_epi8(lows, highs), b = _mm256_unpackhi_epi8(lows, highs);
    auto* to = reinterpret_cast<__m256i*>(out + i);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(a, b, 0x31));
  }
  return i;
}

#else

template <typename T>
static inline int64_t lookup(const Palette<T>&, const uint8_t*, T*, int64_t) {
  return 0;
}

#endif

static inline unsigned nibble_of(const uint8_t* codes, int64_t i) {
  return i & 1 ? codes[i >> 1] & 15u : codes[i >> 1] >> 4;
}

template <typename T>
static void decode_span(const float* levels, const uint8_t* codes, float absmax, T* out,
                        int64_t n) {
  if (n < 16) {  // filling a palette would cost more than it saves
    for (int64_t i = 0; i < n; ++i) out[i] = Convert<T>::from(levels[nibble_of(codes, i)] * absmax);
    return;
  }
  const Palette<T> palette(levels, absmax);
  for (int64_t i = lookup(palette, codes, out, n); i < n; ++i)
    out[i] = palette.value[nibble_of(codes, i)];
}

template <typename T, typename Scales>
static void decode_four_bit(const float* levels, const uint8_t* codes, Scales scales, T* out,
                            int64_t n, int64_t block_size, int threads) {
  parallel_for(n, kDecodeGrain, threads, [=](int64_t begin, int64_t end) {
    for_each_span(begin, end, block_size, [=](int64_t first, int64_t last, int64_t block) {
      decode_span(levels, codes + first / 2, scales(block), out + first, last - first);
    });
  });
}

}  // namespace ts::quant::TS_ISA
