// NVFP4 on the CPU; the format is in nvfp4_format.h. Every variant gives the same bits.
#include <stdint.h>

#include "../nvfp4_format.h"
#include "simd.h"
#include "small_floats_simd.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

static constexpr int64_t kSpan = 1 << 15;

// The maximum of all pieces, whichever comes first.
static inline void raise(uint32_t* peak, uint32_t bits) {
  uint32_t seen = __atomic_load_n(peak, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(peak, &seen, bits, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
}

template <typename T>
static void encode_group(const T* x, int64_t n, float tensor_scale, uint8_t* codes,
                         uint8_t* scale) {
  const float absmax = block_absmax(x, n);
  const uint32_t code = nvfp4_scale_code(absmax, tensor_scale);
  const float factor = nvfp4_factor(code, tensor_scale);
  *scale = static_cast<uint8_t>(code);
  if (factor == 0.0f) {
    memset(codes, 0, static_cast<size_t>((n + 1) / 2));
    return;
  }
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  const Floats by = splat(factor);
  for (; i + kLanes <= n; i += kLanes) store_e2m1(codes + i / 2, divide(load(x + i), by));
#endif
  for (; i < n; i += 2) {
    const uint32_t low = e2m1_code(to_float(x[i]) / factor);
    const uint32_t high = i + 1 < n ? e2m1_code(to_float(x[i + 1]) / factor) : 0;
    codes[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

template <typename T>
static void quantize(const T* x, uint8_t* codes, uint8_t* scales, float* tensor_scale,
                     uint32_t* peak, int64_t rows, int64_t columns, int threads) {
  parallel_for(rows * columns, kSpan, threads, [=](int64_t first, int64_t last) {
    raise(peak, magnitude_bits(block_absmax(x + first, last - first)));
  });
  const float whole = nvfp4_tensor_scale(*peak);
  *tensor_scale = whole;
  if (*peak >= 0x7F800000u) return;  // the caller refuses it
  const int64_t groups = (columns + kNvfp4Group - 1) / kNvfp4Group, bytes = (columns + 1) / 2;
  parallel_for(rows * groups, kSpan / kNvfp4Group, threads, [=](int64_t first, int64_t last) {
    int64_t row = first / groups, group = first % groups;
    for (int64_t g = first; g < last; ++g) {
      const int64_t column = group * kNvfp4Group, left = columns - column;
      encode_group(x + row * columns + column, left < kNvfp4Group ? left : kNvfp4Group, whole,
                   codes + row * bytes + column / 2, scales + g);
      if (++group == groups) group = 0, ++row;
    }
  });
}

// The 16 values a group can hold, rounded to the output type: decoding is then a lookup.
static constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

template <typename T>
struct Palette {
  alignas(64) T value[16];
  explicit Palette(float factor) {
#if defined(TS_QUANT_SIMD)
    for (int i = 0; i < 16; i += static_cast<int>(kLanes))
      store(value + i, multiply(load(kE2m1 + i), splat(factor)));
#else
    for (int i = 0; i < 16; ++i) value[i] = Convert<T>::from(kE2m1[i] * factor);
#endif
  }
};

#if defined(TS_ISA_avx512)

// Even lane: the low nibble; odd lane: the high one, of a byte.
static inline void lookup16(const Palette<float>& p, const uint8_t* codes, float* out) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const Ints b = _mm512_cvtepu8_epi64(bytes);
  const Ints index = _mm512_or_si512(b, _mm512_slli_epi64(b, 28));  // the permutation reads 4 bits
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(index, _mm512_load_ps(p.value)));
}

template <typename T>
static inline void lookup16(const Palette<T>& p, const uint8_t* codes, T* out) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m256i b = _mm256_cvtepu8_epi32(bytes);
  const __m256i index = _mm256_or_si256(b, _mm256_slli_epi32(b, 12));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_permutexvar_epi16(
                          index, _mm256_load_si256(reinterpret_cast<const __m256i*>(p.value))));
}

#elif defined(TS_ISA_avx2)

static inline void lookup16(const Palette<float>& p, const uint8_t* codes, float* out) {
  const Floats below = _mm256_load_ps(p.value), above = _mm256_load_ps(p.value + 8);
  for (int i = 0; i < 16; i += 8) {
    int packed;
    memcpy(&packed, codes + i / 2, 4);
    const Ints b = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(packed));
    // The permutations read 3 bits, the blend bit 3.
    const Ints index = _mm256_or_si256(b, _mm256_slli_epi64(b, 28));
    const Floats upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(below, index),
                                               _mm256_permutevar8x32_ps(above, index), upper));
  }
}

template <typename T>
static inline void lookup16(const Palette<T>& p, const uint8_t* codes, T* out) {
  // One byte shuffle for the low bytes of the 16 values and one for the high bytes.
  const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(p.value));
  const __m128i second = _mm_load_si128(reinterpret_cast<const __m128i*>(p.value + 8));
  const __m128i mask = _mm_set1_epi16(0xFF);
  const __m128i lows = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(second, mask));
  const __m128i highs = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i nibble = _mm_set1_epi8(15);
  const __m128i index = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble),
                                          _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
  const __m128i a = _mm_shuffle_epi8(lows, index), b = _mm_shuffle_epi8(highs, index);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(a, b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi8(a, b));
}

#endif

template <typename T>
static inline void decode_group(const uint8_t* codes, float factor, T* out, int64_t n) {
#if defined(TS_QUANT_SIMD)
  if (n == kNvfp4Group) {
    lookup16(Palette<T>(factor), codes, out);
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i)
    out[i] = Convert<T>::from(e2m1(codes[i / 2] >> (i & 1 ? 4 : 0) & 15u) * factor);
}

template <typename T>
static void dequantize(const uint8_t* codes, const uint8_t* scales, const float* tensor_scale,
                       T* out, int64_t rows, int64_t columns, int threads) {
  const float whole = *tensor_scale;
  const int64_t groups = (columns + kNvfp4Group - 1) / kNvfp4Group, bytes = (columns + 1) / 2;
  parallel_for(rows * groups, kSpan / kNvfp4Group, threads, [=](int64_t first, int64_t last) {
    int64_t row = first / groups, group = first % groups;
    for (int64_t g = first; g < last; ++g) {
      const int64_t column = group * kNvfp4Group, left = columns - column;
      decode_group(codes + row * bytes + column / 2, nvfp4_factor(scales[g], whole),
                   out + row * columns + column, left < kNvfp4Group ? left : kNvfp4Group);
      if (++group == groups) group = 0, ++row;
    }
  });
}

#define TS_QUANT_NVFP4(T)                                                                       \
  void quantize_nvfp4(const T* x, uint8_t* codes, uint8_t* scales, float* tensor_scale,         \
                      uint32_t* peak, int64_t rows, int64_t columns, int threads) {             \
    quantize(x, codes, scales, tensor_scale, peak, rows, columns, threads);                     \
  }                                                                                             \
  void dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, const float* tensor_scale, \
                        T* out, int64_t rows, int64_t columns, int threads) {                   \
    dequantize(codes, scales, tensor_scale, out, rows, columns, threads);                       \
  }

TS_QUANT_NVFP4(float)
TS_QUANT_NVFP4(bf16)
TS_QUANT_NVFP4(fp16)

}  // namespace ts::quant::TS_ISA
