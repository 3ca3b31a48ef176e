// Sixteen floats at a time for the CPU kernels, through the compiler's vector extension: the same
// source gives the same bits for every instruction set, since each operation rounds once and none
// is contracted. Loads and stores convert from and to the 16-bit formats, to nearest even.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(TS_ISA_avx2) || defined(TS_ISA_avx512)
#include <immintrin.h>
#endif

#include "ts/dtype.h"
#include "ts/numeric.h"

// Vectors are passed by value between always-inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"

#define TS_INLINE static inline __attribute__((always_inline))

namespace ts::fused::TS_ISA {

// What a register holds. Wider vectors would be legal, but GCC takes their comparisons apart into
// scalars.
#if defined(TS_ISA_avx512)
constexpr int kWidth = 16;
#elif defined(TS_ISA_avx2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;

typedef float Reg __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntReg __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UintReg __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfReg __attribute__((vector_size(kWidth * 2)));

// For the sums of RMSNorm, whose order has its own width.
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x1 __attribute__((vector_size(4)));

struct f32x16 {
  Reg part[kParts];
};

// ts::Convert's members have external linkage: used here, one variant's code could serve another.
TS_INLINE void narrow(float x, float* out) { *out = x; }
TS_INLINE void narrow(float x, bf16* out) { *out = to_bf16(x); }
TS_INLINE void narrow(float x, fp16* out) { *out = to_fp16(x); }

TS_INLINE f32x16 splat(float x) {
  f32x16 v;
  for (int k = 0; k < kParts; ++k) v.part[k] = x - Reg{};
  return v;
}

#define TS_OPERATOR(op)                                                  \
  TS_INLINE f32x16 operator op(f32x16 a, f32x16 b) {                     \
    for (int k = 0; k < kParts; ++k) a.part[k] = a.part[k] op b.part[k]; \
    return a;                                                            \
  }                                                                      \
  TS_INLINE f32x16 operator op(f32x16 a, float b) {                      \
    for (int k = 0; k < kParts; ++k) a.part[k] = a.part[k] op b;         \
    return a;                                                            \
  }                                                                      \
  TS_INLINE f32x16 operator op(float a, f32x16 b) {                      \
    for (int k = 0; k < kParts; ++k) b.part[k] = a op b.part[k];         \
    return b;                                                            \
  }
TS_OPERATOR(+)
TS_OPERATOR(-)
TS_OPERATOR(*)
TS_OPERATOR(/)
#undef TS_OPERATOR

TS_INLINE Reg select(IntReg mask, Reg yes, Reg no) {
  return (Reg)((mask & (IntReg)yes) | (~mask & (IntReg)no));
}

// NaN stays NaN in both.
TS_INLINE f32x16 at_least(f32x16 x, float low) {
  const Reg bound = low - Reg{};
  for (int k = 0; k < kParts; ++k) x.part[k] = select(x.part[k] < bound, bound, x.part[k]);
  return x;
}

TS_INLINE f32x16 at_most(f32x16 x, float high) {
  const Reg bound = high - Reg{};
  for (int k = 0; k < kParts; ++k) x.part[k] = select(x.part[k] > bound, bound, x.part[k]);
  return x;
}

TS_INLINE f32x16 max16(f32x16 a, f32x16 b) {
  for (int k = 0; k < kParts; ++k) a.part[k] = select(a.part[k] > b.part[k], a.part[k], b.part[k]);
  return a;
}

TS_INLINE Reg widen(const float* p) {
  Reg v;
  memcpy(&v, p, sizeof(v));
  return v;
}

TS_INLINE Reg widen(const bf16* p) {
#if defined(TS_ISA_avx512)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Reg)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(TS_ISA_avx2)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Reg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#else
  HalfReg raw;
  memcpy(&raw, p, sizeof(raw));
  return (Reg)(__builtin_convertvector(raw, UintReg) << 16);
#endif
}

TS_INLINE Reg widen(const fp16* p) {
#if defined(TS_ISA_avx512)
  return (Reg)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(TS_ISA_avx2)
  return (Reg)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Reg v;
  for (int l = 0; l < kWidth; ++l) v[l] = to_float(p[l]);
  return v;
#endif
}

// The upper half of each lane holds nothing.
TS_INLINE UintReg bf16_bits(Reg v) {
  const UintReg u = (UintReg)v;
  const UintReg high = u >> 16;
  const UintReg rounded = (u + (high & 1u) + 0x7FFFu) >> 16;
  return (UintReg)select(v == v, (Reg)rounded, (Reg)(high | 0x40u));
}

TS_INLINE void put(float* p, Reg v) { memcpy(p, &v, sizeof(v)); }

TS_INLINE void put(bf16* p, Reg v) {
  const UintReg bits = bf16_bits(v);
#if defined(TS_ISA_avx512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(TS_ISA_avx2)
  // packus works within 128-bit halves: the permutation brings the two useful quarters together.
  const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  const HalfReg raw = __builtin_convertvector(bits, HalfReg);
  memcpy(p, &raw, sizeof(raw));
#endif
}

TS_INLINE void put(fp16* p, Reg v) {
#if defined(TS_ISA_avx512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(TS_ISA_avx2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < kWidth; ++l) p[l] = to_fp16(v[l]);
#endif
}

template <typename T>
TS_INLINE f32x16 load16(const T* p) {
  f32x16 v;
  for (int k = 0; k < kParts; ++k) v.part[k] = widen(p + k * kWidth);
  return v;
}

template <typename T>
TS_INLINE void store16(T* p, f32x16 v) {
  for (int k = 0; k < kParts; ++k) put(p + k * kWidth, v.part[k]);
}

// The first n of 16 elements; the others are `fill`.
template <typename T>
TS_INLINE f32x16 load_tail(const T* p, int n, float fill) {
  float raw[16];
  for (int l = 0; l < 16; ++l) raw[l] = l < n ? to_float(p[l]) : fill;
  return load16(raw);
}

template <typename T>
TS_INLINE void store_tail(T* p, f32x16 v, int n) {
  float raw[16];
  store16(raw, v);
  for (int l = 0; l < n; ++l) narrow(raw[l], p + l);
}

TS_INLINE float first(f32x16 v) { return v.part[0][0]; }

// A vector type of its own width, for RMSNorm's sums.
template <typename V, typename T>
struct Load {
  TS_INLINE V at(const T* p) {
    V v;
    if constexpr (sizeof(V) == sizeof(Reg)) {
      const Reg r = widen(p);
      memcpy(&v, &r, sizeof(v));
    } else {
      for (int l = 0; l < static_cast<int>(sizeof(V) / 4); ++l) v[l] = to_float(p[l]);
    }
    return v;
  }
};
template <typename V>
struct Load<V, float> {
  TS_INLINE V at(const float* p) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
};
#if defined(TS_ISA_avx512)
template <>
struct Load<f32x8, bf16> {
  TS_INLINE f32x8 at(const bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
  }
};
template <>
struct Load<f32x8, fp16> {
  TS_INLINE f32x8 at(const fp16* p) {
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};
#endif

// The value after a round trip through T.
template <typename T>
struct Round {
  TS_INLINE f32x16 of(f32x16 v) {
    for (int k = 0; k < kParts; ++k) {
      T raw[kWidth];
      put(raw, v.part[k]);
      v.part[k] = widen(raw);
    }
    return v;
  }
  TS_INLINE float of(float x) {
    T raw;
    narrow(x, &raw);
    return to_float(raw);
  }
};
template <>
struct Round<float> {
  TS_INLINE f32x16 of(f32x16 v) { return v; }
  TS_INLINE float of(float x) { return x; }
};
template <>
struct Round<bf16> {
  TS_INLINE f32x16 of(f32x16 v) {
    for (int k = 0; k < kParts; ++k) v.part[k] = (Reg)(bf16_bits(v.part[k]) << 16);
    return v;
  }
  TS_INLINE float of(float x) { return to_float(to_bf16(x)); }
};

// Sum and maximum of the lanes, as a fixed tree.
TS_INLINE float sum_lanes(f32x16 v) {
  float p[16];
  store16(p, v);
  for (int half = 8; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) p[l] += p[l + half];
  return p[0];
}

TS_INLINE float max_lanes(f32x16 v) {
  float p[16];
  store16(p, v);
  for (int half = 8; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) p[l] = p[l] > p[l + half] ? p[l] : p[l + half];
  return p[0];
}

// Calls f with a Tag of the C++ type.
template <typename T>
struct Tag {
  using type = T;
};

template <typename F>
static void with_type(DType type, F&& f) {
  if (type == DType::kF32)
    f(Tag<float>{});
  else if (type == DType::kBF16)
    f(Tag<bf16>{});
  else
    f(Tag<fp16>{});
}

}  // namespace ts::fused::TS_ISA
