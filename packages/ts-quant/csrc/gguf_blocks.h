// The blocks of GGUF files, as ggml publishes them: bytes of a block, values in it, and how a run
// of values is read. One source for CPU and GPU, so that both give the same bits: every product and
// sum is one rounding, in the order written here. Includes C headers only.
#pragma once

#include <stdint.h>

#include "ts/numeric.h"

namespace ts::quant {

TS_HOST_DEVICE static inline float read_half(const uint8_t* p) {
  const uint16_t bits = static_cast<uint16_t>(p[0] | p[1] << 8);
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  return to_float(fp16{bits});
#endif
}

// N bytes of a block from `p` on, shifted right, of which `mask` is kept. `p` is a multiple of
// kAlign. The GPU takes eight, in words, and shifts and masks four of them at once.
template <int N, int kAlign>
struct Fields {
#if defined(__CUDA_ARCH__)
  static_assert(N == 8);
  uint32_t words[2];
  __device__ __forceinline__ Fields(const uint8_t* p, int shift, uint32_t mask) {
    if constexpr (kAlign == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(p);
      words[0] = both.x, words[1] = both.y;
    } else if constexpr (kAlign == 4) {
      words[0] = reinterpret_cast<const uint32_t*>(p)[0];
      words[1] = reinterpret_cast<const uint32_t*>(p)[1];
    } else {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
      words[0] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
      words[1] = halves[2] | static_cast<uint32_t>(halves[3]) << 16;
    }
    words[0] = words[0] >> shift & mask * 0x01010101u;
    words[1] = words[1] >> shift & mask * 0x01010101u;
  }
  __device__ __forceinline__ int operator[](int i) const {
    return static_cast<int>(words[i / 4] >> 8 * (i % 4) & 255u);
  }
#else
  const uint8_t* p;
  int shift;
  int mask;
  TS_ALWAYS_INLINE Fields(const uint8_t* bytes, int right, int kept)
      : p(bytes), shift(right), mask(kept) {}
  TS_ALWAYS_INLINE int operator[](int i) const { return p[i] >> shift & mask; }
#endif
};

// Fields whose upper bits, from `up` on, lie elsewhere.
template <int N, int kAlign>
struct JoinedFields {
  Fields<N, kAlign> low;
#if defined(__CUDA_ARCH__)
  __device__ __forceinline__ JoinedFields(Fields<N, kAlign> a, Fields<N, kAlign> b, int up)
      : low(a) {
    low.words[0] |= b.words[0] << up;
    low.words[1] |= b.words[1] << up;
  }
  __device__ __forceinline__ int operator[](int i) const { return low[i]; }
#else
  Fields<N, kAlign> high;
  int up;
  TS_ALWAYS_INLINE JoinedFields(Fields<N, kAlign> a, Fields<N, kAlign> b, int place)
      : low(a), high(b), up(place) {}
  TS_ALWAYS_INLINE int operator[](int i) const { return low[i] | high[i] << up; }
#endif
};

// Fields of four bits whose fifth are the lowest bits of a word.
template <int N, int kAlign>
struct FifthFields {
  Fields<N, kAlign> low;
#if defined(__CUDA_ARCH__)
  // The product has bit i of four in the lowest bit of byte i; no two of its terms meet.
  __device__ __forceinline__ FifthFields(Fields<N, kAlign> a, uint32_t fifth) : low(a) {
    low.words[0] |= ((fifth & 15u) * 0x00204081u & 0x01010101u) << 4;
    low.words[1] |= ((fifth >> 4 & 15u) * 0x00204081u & 0x01010101u) << 4;
  }
  __device__ __forceinline__ int operator[](int i) const { return low[i]; }
#else
  uint32_t high;
  TS_ALWAYS_INLINE FifthFields(Fields<N, kAlign> a, uint32_t fifth) : low(a), high(fifth) {}
  TS_ALWAYS_INLINE int operator[](int i) const {
    return low[i] | ((high & (1u << i)) != 0 ? 16 : 0);
  }
#endif
};

// In each type: `run<N>(block, first, v)` writes values [first, first + N) of a block. They lie in
// one stretch of kRun values, within which scale and shift do not change.

struct GgufQ4_0 {
  static constexpr int kBytes = 18, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b);
    const Fields<N, 2> q(b + 2 + first % 16, first / 16 * 4, 15);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i] - 8);
  }
};

struct GgufQ4_1 {
  static constexpr int kBytes = 20, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b), m = read_half(b + 2);
    const Fields<N, 4> q(b + 4 + first % 16, first / 16 * 4, 15);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i]) + m;
  }
};

// The fifth bits of a block's 32 values lie in one little-endian word.
TS_HOST_DEVICE static inline uint32_t read_word(const uint8_t* p) {
  return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
}

struct GgufQ5_0 {
  static constexpr int kBytes = 22, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b);
    const Fields<N, 2> low(b + 6 + first % 16, first / 16 * 4, 15);
    const FifthFields<N, 2> q(low, read_word(b + 2) >> first);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i] - 16);
  }
};

struct GgufQ5_1 {
  static constexpr int kBytes = 24, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b), m = read_half(b + 2);
    const Fields<N, 8> low(b + 8 + first % 16, first / 16 * 4, 15);
    const FifthFields<N, 8> q(low, read_word(b + 4) >> first);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i]) + m;
  }
};

struct GgufQ8_0 {
  static constexpr int kBytes = 34, kValues = 32, kRun = 32;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b);
    const Fields<N, 2> q(b + 2 + first, 0, 255);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(static_cast<int8_t>(q[i]));
  }
};

// The 6-bit scale and minimum of sub-block j in the 12 bytes that hold eight of each.
TS_HOST_DEVICE static inline void k_scale(const uint8_t* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    *minimum = s[j + 4] >> 4 | s[j] >> 6 << 4;
  }
}

struct GgufQ4_K {
  static constexpr int kBytes = 144, kValues = 256, kRun = 32;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const int j = first / 32;
    int scale, minimum;
    k_scale(b + 4, j, &scale, &minimum);
    const float d = read_half(b) * static_cast<float>(scale);
    const float m = read_half(b + 2) * static_cast<float>(minimum);
    const Fields<N, 8> q(b + 16 + j / 2 * 32 + first % 32, j % 2 * 4, 15);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i]) - m;
  }
};

struct GgufQ5_K {
  static constexpr int kBytes = 176, kValues = 256, kRun = 32;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const int j = first / 32;
    int scale, minimum;
    k_scale(b + 4, j, &scale, &minimum);
    const float d = read_half(b) * static_cast<float>(scale);
    const float m = read_half(b + 2) * static_cast<float>(minimum);
    const Fields<N, 8> high(b + 16 + first % 32, j, 1);
    const Fields<N, 8> low(b + 48 + j / 2 * 32 + first % 32, j % 2 * 4, 15);
    const JoinedFields<N, 8> q(low, high, 4);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i]) - m;
  }
};

struct GgufQ6_K {
  static constexpr int kBytes = 210, kValues = 256, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    // Halves of 128 values; in each, four rows of 32 share 32 bytes of high bits.
    const int half = first / 128, row = first % 128 / 32;
    const float d =
        read_half(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + first / 16]));
    const Fields<N, 2> low(b + 64 * half + row % 2 * 32 + first % 32, row / 2 * 4, 15);
    const Fields<N, 2> high(b + 128 + 32 * half + first % 32, 2 * row, 3);
    const JoinedFields<N, 2> q(low, high, 4);
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i] - 32);
  }
};

}  // namespace ts::quant
