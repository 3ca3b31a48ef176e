// NF4 on the CPU. Every variant gives the same bits: one multiplication (or division) and exact
// comparisons when encoding, one multiplication and one rounding when decoding.
#include "nf4.h"

#include <stdint.h>
#include <string.h>

#include "simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

// How a block maps to [-1, 1]: complete blocks multiply by the reciprocal, the last, incomplete one
// divides. That is what bitsandbytes does, and the codes depend on it.
struct Scaling {
  float factor;
  bool divides;
};

static inline unsigned code_of(float x, Scaling s) {
  const float v = s.divides ? x / s.factor : x * s.factor;
  unsigned code = 0;
  for (int i = 0; i < 15; ++i) code += v > kNf4Thresholds[i];
  return code;
}

#if defined(TS_ISA_avx512)

// Binary search for 16 values at once.
static inline Ints codes_of(Floats v, Floats thresholds) {
  Ints code = zero_ints();
  for (int step = 8; step > 0; step >>= 1) {
    const Ints probe = _mm512_add_epi32(code, _mm512_set1_epi32(step - 1));
    const Floats t = _mm512_permutexvar_ps(probe, thresholds);
    const __mmask16 above = _mm512_cmp_ps_mask(v, t, _CMP_GT_OQ);
    code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(step));
  }
  return code;
}

struct Search {
  Floats thresholds;
  Search() {
    float t[16];
    memcpy(t, kNf4Thresholds, sizeof(kNf4Thresholds));
    t[15] = 0.0f;  // never probed
    thresholds = _mm512_loadu_ps(t);
  }
  void pack(Floats v, uint8_t* out) const {
    const Ints c = codes_of(v, thresholds);
    const Ints pairs = _mm512_or_si512(_mm512_slli_epi64(c, 4), _mm512_srli_epi64(c, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
  }
};

#elif defined(TS_ISA_avx2)

// Binary search for 8 values at once: the thresholds of each level fit one 8-entry permutation.
struct Search {
  Floats level1, level2, level3, level4;
  Search() {
    float t2[8], t3[8], t4[8];
    for (int i = 0; i < 8; ++i) {
      t2[i] = kNf4Thresholds[3 + 8 * (i & 1)];
      t3[i] = kNf4Thresholds[1 + 4 * (i & 3)];
      t4[i] = kNf4Thresholds[2 * i];
    }
    level1 = _mm256_set1_ps(kNf4Thresholds[7]);
    level2 = _mm256_loadu_ps(t2);
    level3 = _mm256_loadu_ps(t3);
    level4 = _mm256_loadu_ps(t4);
  }
  // code * 2 + (v > threshold)
  static Ints descend(Ints code, Floats v, Floats threshold) {
    const Ints above = _mm256_castps_si256(_mm256_cmp_ps(v, threshold, _CMP_GT_OQ));
    return _mm256_sub_epi32(_mm256_add_epi32(code, code), above);
  }
  void pack(Floats v, uint8_t* out) const {
    Ints c = descend(zero_ints(), v, level1);
    c = descend(c, v, _mm256_permutevar8x32_ps(level2, c));
    c = descend(c, v, _mm256_permutevar8x32_ps(level3, c));
    c = descend(c, v, _mm256_permutevar8x32_ps(level4, c));
    const Ints pairs = _mm256_or_si256(_mm256_slli_epi64(c, 4), _mm256_srli_epi64(c, 32));
    const Ints picked = _mm256_shuffle_epi8(
        pairs, _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                -1, -1, 0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i bytes =
        _mm_or_si128(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
    const int packed = _mm_cvtsi128_si32(bytes);
    memcpy(out, &packed, 4);
  }
};

#endif

template <typename T>
static void encode_block(const T* x, int64_t n, Scaling s, uint8_t* codes) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  if (n >= kLanes) {
    const Search search;
    const Floats factor = splat(s.factor);
    if (s.divides) {
      for (; i + kLanes <= n; i += kLanes) search.pack(divide(load(x + i), factor), codes + i / 2);
    } else {
      for (; i + kLanes <= n; i += kLanes)
        search.pack(multiply(load(x + i), factor), codes + i / 2);
    }
  }
#endif
  for (; i < n; i += 2) {
    const unsigned high = code_of(to_float(x[i]), s);
    const unsigned low = i + 1 < n ? code_of(to_float(x[i + 1]), s) : kNf4Zero;
    codes[i / 2] = static_cast<uint8_t>(high << 4 | low);
  }
}

template <typename T>
static void quantize(const T* x, uint8_t* codes, float* absmax, int64_t n, int64_t block_size,
                     int threads) {
  const int64_t blocks = n / block_size + (n % block_size != 0);
  parallel_for(blocks, encode_grain(block_size), threads, [=](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * block_size;
      const bool whole = n - begin >= block_size;
      const int64_t count = whole ? block_size : n - begin;
      const float largest_magnitude = block_absmax(x + begin, count);
      const float divisor =
          largest_magnitude < kNf4SmallestDivisor ? kNf4SmallestDivisor : largest_magnitude;
      absmax[b] = whole ? largest_magnitude : divisor;
      encode_block(x + begin, count,
                   whole ? Scaling{1.0f / divisor, false} : Scaling{divisor, true},
                   codes + begin / 2);
    }
  });
}

// The 16 values a block can hold, rounded to the output type: decoding is then a lookup.
template <typename T>
struct Palette {
  alignas(64) T value[16];
  explicit Palette(float absmax) {
#if defined(TS_QUANT_SIMD)
    for (int i = 0; i < 16; i += static_cast<int>(kLanes))
      store(value + i, multiply(load(kNf4Levels + i), splat(absmax)));
#else
    for (int i = 0; i < 16; ++i) value[i] = Convert<T>::from(kNf4Levels[i] * absmax);
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
static void decode_span(const uint8_t* codes, float absmax, T* out, int64_t n) {
  if (n < 16) {  // filling a palette would cost more than it saves
    for (int64_t i = 0; i < n; ++i)
      out[i] = Convert<T>::from(kNf4Levels[nibble_of(codes, i)] * absmax);
    return;
  }
  const Palette<T> palette(absmax);
  for (int64_t i = lookup(palette, codes, out, n); i < n; ++i)
    out[i] = palette.value[nibble_of(codes, i)];
}

template <typename T>
static void dequantize(const uint8_t* codes, const float* absmax, T* out, int64_t n,
                       int64_t block_size, int threads) {
  parallel_for(n, kDecodeGrain, threads, [=](int64_t begin, int64_t end) {
    for_each_span(begin, end, block_size, [=](int64_t first, int64_t last, int64_t block) {
      decode_span(codes + first / 2, absmax[block], out + first, last - first);
    });
  });
}

#define TS_QUANT_NF4(T)                                                                       \
  void quantize_nf4(const T* x, uint8_t* codes, float* absmax, int64_t n, int64_t block_size, \
                    int threads) {                                                            \
    quantize(x, codes, absmax, n, block_size, threads);                                       \
  }                                                                                           \
  void dequantize_nf4(const uint8_t* codes, const float* absmax, T* out, int64_t n,           \
                      int64_t block_size, int threads) {                                      \
    dequantize(codes, absmax, out, n, block_size, threads);                                   \
  }

TS_QUANT_NF4(float)
TS_QUANT_NF4(bf16)
TS_QUANT_NF4(fp16)

}  // namespace ts::quant::TS_ISA
