// NF4 on the CPU. Every variant gives the same bits: one multiplication (or division) and exact
// comparisons when encoding, one multiplication and one rounding when decoding.
#include "nf4.h"

#include <stdint.h>
#include <string.h>

#include "four_bit.h"
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

#define TS_QUANT_NF4(T)                                                                       \
  void quantize_nf4(const T* x, uint8_t* codes, float* absmax, int64_t n, int64_t block_size, \
                    int threads) {                                                            \
    quantize(x, codes, absmax, n, block_size, threads);                                       \
  }                                                                                           \
  void dequantize_nf4(const uint8_t* codes, const float* absmax, T* out, int64_t n,           \
                      int64_t block_size, int threads) {                                      \
    decode_four_bit(kNf4Levels, codes, PlainScales{absmax}, out, n, block_size, threads);     \
  }

TS_QUANT_NF4(float)
TS_QUANT_NF4(bf16)
TS_QUANT_NF4(fp16)

}  // namespace ts::quant::TS_ISA
