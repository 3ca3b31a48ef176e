// Vectors of floats for the CPU kernels, through the compiler's vector extension: the same source
// gives the same bits for every instruction set, since each operation rounds once and none is
// contracted. Loads and stores convert from and to the 16-bit formats, rounding to nearest even.
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

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x1 __attribute__((vector_size(4)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

// ts::Convert's members have external linkage: used here, one variant's code could serve another.
TS_INLINE void narrow(float x, float* out) { *out = x; }
TS_INLINE void narrow(float x, bf16* out) { *out = to_bf16(x); }
TS_INLINE void narrow(float x, fp16* out) { *out = to_fp16(x); }

template <typename V>
TS_INLINE constexpr int lanes_of() {
  return static_cast<int>(sizeof(V) / 4);
}

template <typename V>
TS_INLINE V splat(float x) {
  return x - V{};
}

// Any element type, any width: lane by lane.
template <typename V, typename T>
struct Load {
  TS_INLINE V at(const T* p) {
    V v;
    for (int l = 0; l < lanes_of<V>(); ++l) v[l] = to_float(p[l]);
    return v;
  }
};

template <typename V>
struct Load<V, float> {
  TS_INLINE V at(const float* p) {
    V v;
    memcpy(&v, p, sizeof(V));
    return v;
  }
};

template <>
struct Load<f32x16, bf16> {
  TS_INLINE f32x16 at(const bf16* p) {
    u16x16 raw;
    memcpy(&raw, p, sizeof(raw));
    return (f32x16)(__builtin_convertvector(raw, u32x16) << 16);
  }
};

template <>
struct Load<f32x8, bf16> {
  TS_INLINE f32x8 at(const bf16* p) {
    u16x8 raw;
    memcpy(&raw, p, sizeof(raw));
    return (f32x8)(__builtin_convertvector(raw, u32x8) << 16);
  }
};

#if defined(TS_ISA_avx2) || defined(TS_ISA_avx512)
template <>
struct Load<f32x8, fp16> {
  TS_INLINE f32x8 at(const fp16* p) {
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};
#endif

#if defined(TS_ISA_avx512)
template <>
struct Load<f32x16, fp16> {
  TS_INLINE f32x16 at(const fp16* p) {
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};
#elif defined(TS_ISA_avx2)
template <>
struct Load<f32x16, fp16> {
  TS_INLINE f32x16 at(const fp16* p) {
    const __m256 lo = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256 hi = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
    f32x16 v;
    memcpy(&v, &lo, 32);
    memcpy(reinterpret_cast<char*>(&v) + 32, &hi, 32);
    return v;
  }
};
#endif

template <typename V, typename T>
TS_INLINE V load(const T* p) {
  return Load<V, T>::at(p);
}

TS_INLINE void store16(float* p, f32x16 v) { memcpy(p, &v, sizeof(v)); }

TS_INLINE u32x16 bf16_bits(f32x16 v) {
  const u32x16 u = (u32x16)v;
  const u32x16 rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const u32x16 nan = (u32x16)((u & 0x7FFFFFFFu) > 0x7F800000u);
  return (nan & ((u >> 16) | 0x40u)) | (~nan & rounded);
}

TS_INLINE void store16(bf16* p, f32x16 v) {
  const u16x16 raw = __builtin_convertvector(bf16_bits(v), u16x16);
  memcpy(p, &raw, sizeof(raw));
}

TS_INLINE void store16(fp16* p, f32x16 v) {
#if defined(TS_ISA_avx512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(TS_ISA_avx2)
  __m256 lo, hi;
  memcpy(&lo, &v, 32);
  memcpy(&hi, reinterpret_cast<const char*>(&v) + 32, 32);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < 16; ++l) p[l] = to_fp16(v[l]);
#endif
}

// The value after a round trip through T.
template <typename T>
struct Round {
  TS_INLINE f32x16 of(f32x16 v) {
    T raw[16];
    store16(raw, v);
    return load<f32x16>(raw);
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
  TS_INLINE f32x16 of(f32x16 v) { return (f32x16)(bf16_bits(v) << 16); }
  TS_INLINE float of(float x) { return to_float(to_bf16(x)); }
};

TS_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

TS_INLINE f32x16 max16(f32x16 a, f32x16 b) { return select(a > b, a, b); }

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
