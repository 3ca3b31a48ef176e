// The operations of adamw_math.h on 8 (AVX2) and 16 (AVX-512) elements, and `Ops`: the widest one
// of the variant being compiled. For ISA sources only.
#pragma once

#include "adamw_math.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ts::optim {
namespace {

// Results must not depend on which thread computes them, but denormal flushing is a per-thread mode
// (torch.set_flush_denormal sets it on the caller only): kernels run in the default mode.
struct FloatMode {
#if defined(__SSE2__)
  unsigned saved = _mm_getcsr();
  FloatMode() { _mm_setcsr(0x1F80); }
  ~FloatMode() { _mm_setcsr(saved); }
#endif
};

#if defined(TS_ISA_avx2)

struct Avx2Ops {
  using V = __m256;
  using I = __m256i;
  static constexpr int kWidth = 8;
  static inline V set(float x) { return _mm256_set1_ps(x); }
  static inline V load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static inline I load16(const uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline __m128i narrow(I x) {
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    return _mm256_castsi256_si128(packed);
  }
  static inline void store16(uint16_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x));
  }
  static inline V widen_bf16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static inline V widen_fp16(I x) { return _mm256_cvtph_ps(narrow(x)); }
  static inline I round_bf16(V x) {
    const I u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
    const I odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const I sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16),
                              _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
  }
  static inline I round_fp16(V x) {
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline V pick(I a, I b, V x, V y) {
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)));
  }
  static inline V pick_within(V p, I a, I b, V x) {
    const V within = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_min_epu32(a, b), a));
    return _mm256_blendv_ps(x, p, _mm256_and_ps(within, _mm256_cmp_ps(p, p, _CMP_ORD_Q)));
  }
  static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static inline V sqrt(V a) { return _mm256_sqrt_ps(a); }
  static inline V div(V a, V b) { return _mm256_div_ps(a, b); }
  // min returns its second operand when either is NaN
  static inline V cap(V a) { return _mm256_min_ps(_mm256_set1_ps(FLT_MAX), a); }
  static inline I seti(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static inline I load8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I load8s(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void store8(uint8_t* p, I x) {
    const __m128i half = narrow(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
  }
  static inline void store8(uint8_t* p, I a, I b, I c, I d) {
    const I bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<I*>(p), _mm256_permutevar8x32_epi32(bytes, order));
  }
  static inline void store16(uint16_t* p, I a, I b) {
    const I words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<I*>(p), words);
  }
  static inline I bits(V x) { return _mm256_castps_si256(x); }
  static inline V floats(I x) { return _mm256_castsi256_ps(x); }
  static inline I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static inline I minus(I a, I b) { return _mm256_sub_epi32(a, b); }
  static inline I both(I a, I b) { return _mm256_and_si256(a, b); }
  static inline I either(I a, I b) { return _mm256_or_si256(a, b); }
  static inline I exclusive(I a, I b) { return _mm256_xor_si256(a, b); }
  static inline I min_u(I a, I b) { return _mm256_min_epu32(a, b); }
  static inline I max_u(I a, I b) { return _mm256_max_epu32(a, b); }
  static inline I max_s(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int N>
  static inline I shl(I a) {
    return _mm256_slli_epi32(a, N);
  }
  template <int N>
  static inline I shr(I a) {
    return _mm256_srli_epi32(a, N);
  }
  template <int N>
  static inline I sar(I a) {
    return _mm256_srai_epi32(a, N);
  }
  static inline I min_s(I a, I b) { return _mm256_min_epi32(a, b); }
  using Zeros = I;
  static inline Zeros zeros(V x) {
    return _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ));
  }
  static inline Zeros zeros(I x, I bits) {
    return _mm256_cmpeq_epi32(_mm256_and_si256(x, bits), _mm256_setzero_si256());
  }
  static inline I keep(Zeros z, I x) { return _mm256_andnot_si256(z, x); }
  static inline I keep(Zeros z, I x, I other) { return _mm256_blendv_epi8(x, other, z); }
  static inline uint32_t largest_u(I x) {
    __m128i y = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0x4E));
    y = _mm_max_epu32(y, _mm_shuffle_epi32(y, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(y));
  }
  static inline uint32_t largest_s(I x) {
    const I flip = seti(0x80000000u);
    return largest_u(_mm256_xor_si256(x, flip)) ^ 0x80000000u;
  }
  static inline V at_least(V a, V low) { return _mm256_max_ps(low, a); }
  static inline V at_least(V a, V low, Zeros z) { return floats(keep(z, bits(at_least(a, low)))); }
  static inline I first_lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  // High and low halves of the products with m.
  static inline I multiply(I a, I m, I* low) {
    const I even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
};
using Ops = Avx2Ops;

#elif defined(TS_ISA_avx512)

struct Avx512Ops {
  using V = __m512;
  using I = __m512i;
  static constexpr int kWidth = 16;
  static inline V set(float x) { return _mm512_set1_ps(x); }
  static inline V load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static inline I load16(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline void store16(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static inline V widen_bf16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static inline V widen_fp16(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  static inline I round_bf16(V x) {
    const I u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    const I odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const I sum = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), nan, high, _mm512_set1_epi32(0x40));
  }
  static inline I round_fp16(V x) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static inline V pick(I a, I b, V x, V y) {
    return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(a, b), y, x);
  }
  static inline V pick_within(V p, I a, I b, V x) {
    const __mmask16 number = _mm512_cmp_ps_mask(p, p, _CMP_ORD_Q);
    return _mm512_mask_blend_ps(_mm512_mask_cmple_epu32_mask(number, a, b), x, p);
  }
  static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static inline V sqrt(V a) { return _mm512_sqrt_ps(a); }
  static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
  static inline V cap(V a) { return _mm512_min_ps(_mm512_set1_ps(FLT_MAX), a); }
  static inline I seti(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static inline I load8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline I load8s(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static inline void store8(uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  static inline void store8(uint8_t* p, I a, I b, I c, I d) {
    const I bytes = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
  }
  static inline void store16(uint16_t* p, I a, I b) {
    const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, _mm512_packus_epi32(a, b)));
  }
  static inline I bits(V x) { return _mm512_castps_si512(x); }
  static inline V floats(I x) { return _mm512_castsi512_ps(x); }
  static inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static inline I minus(I a, I b) { return _mm512_sub_epi32(a, b); }
  static inline I both(I a, I b) { return _mm512_and_si512(a, b); }
  static inline I either(I a, I b) { return _mm512_or_si512(a, b); }
  static inline I exclusive(I a, I b) { return _mm512_xor_si512(a, b); }
  static inline I min_u(I a, I b) { return _mm512_min_epu32(a, b); }
  static inline I max_u(I a, I b) { return _mm512_max_epu32(a, b); }
  static inline I max_s(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int N>
  static inline I shl(I a) {
    return _mm512_slli_epi32(a, N);
  }
  template <int N>
  static inline I shr(I a) {
    return _mm512_srli_epi32(a, N);
  }
  template <int N>
  static inline I sar(I a) {
    return _mm512_srai_epi32(a, N);
  }
  static inline I min_s(I a, I b) { return _mm512_min_epi32(a, b); }
  using Zeros = __mmask16;  // the others
  static inline Zeros zeros(V x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
  static inline Zeros zeros(I x, I bits) { return _mm512_test_epi32_mask(x, bits); }
  static inline I keep(Zeros z, I x) { return _mm512_maskz_mov_epi32(z, x); }
  static inline I keep(Zeros z, I x, I other) { return _mm512_mask_mov_epi32(other, z, x); }
  static inline uint32_t largest_u(I x) { return _mm512_reduce_max_epu32(x); }
  static inline uint32_t largest_s(I x) {
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(x));
  }
  static inline V at_least(V a, V low) { return _mm512_max_ps(low, a); }
  static inline V at_least(V a, V low, Zeros z) { return _mm512_maskz_max_ps(z, low, a); }
  static inline I first_lanes() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static inline I multiply(I a, I m, I* low) {
    const I even = _mm512_mul_epu32(a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
    *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, static_cast<_MM_PERM_ENUM>(0xA0));
    return _mm512_mask_shuffle_epi32(odd, 0x5555, even, static_cast<_MM_PERM_ENUM>(0xF5));
  }
};
using Ops = Avx512Ops;

#else
using Ops = ScalarOps;
#endif

}  // namespace

// Asks for the bytes that vector i of a stream of BYTES an element has `ahead` elements on, once a
// cache line. Streams of a few hundred bytes a block are too short for the hardware to see them
// come.
template <typename O, int BYTES>
static inline void prefetch(const void* base, int64_t i, int64_t ahead) {
#if defined(__GNUC__)
  constexpr int64_t kLine = 64;
  if constexpr (O::kWidth > 1)
    if (BYTES * O::kWidth >= kLine || i * BYTES % kLine == 0)
      __builtin_prefetch(static_cast<const char*>(base) + (i + ahead) * BYTES);
#endif
}

// The item that element or piece `at` of the concatenation belongs to: begins[i] <= at <
// begins[i+1].
static inline int64_t find_item(const int64_t* begins, int64_t count, int64_t at) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (begins[middle] <= at ? low : high) = middle;
  }
  return low;
}

}  // namespace ts::optim
