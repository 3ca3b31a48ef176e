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

// In each type: `run<N>(block, first, v)` writes values [first, first + N) of a block. They lie in
// one stretch of kRun values, within which scale and shift do not change.

struct GgufQ4_0 {
  static constexpr int kBytes = 18, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b);
    const uint8_t* q = b + 2 + first % 16;
    const int shift = first / 16 * 4;
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>((q[i] >> shift & 15) - 8);
  }
};

struct GgufQ4_1 {
  static constexpr int kBytes = 20, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b), m = read_half(b + 2);
    const uint8_t* q = b + 4 + first % 16;
    const int shift = first / 16 * 4;
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i] >> shift & 15) + m;
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
    const uint32_t high = read_word(b + 2) >> first;
    const uint8_t* q = b + 6 + first % 16;
    const int shift = first / 16 * 4;
    for (int i = 0; i < N; ++i) {
      const int fifth = (high & (1u << i)) != 0 ? 16 : 0;
      v[i] = d * static_cast<float>(((q[i] >> shift & 15) | fifth) - 16);
    }
  }
};

struct GgufQ5_1 {
  static constexpr int kBytes = 24, kValues = 32, kRun = 16;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b), m = read_half(b + 2);
    const uint32_t high = read_word(b + 4) >> first;
    const uint8_t* q = b + 8 + first % 16;
    const int shift = first / 16 * 4;
    for (int i = 0; i < N; ++i) {
      const int fifth = (high & (1u << i)) != 0 ? 16 : 0;
      v[i] = d * static_cast<float>((q[i] >> shift & 15) | fifth) + m;
    }
  }
};

struct GgufQ8_0 {
  static constexpr int kBytes = 34, kValues = 32, kRun = 32;
  template <int N>
  TS_HOST_DEVICE static TS_ALWAYS_INLINE void run(const uint8_t* b, int first, float* v) {
    const float d = read_half(b);
    const uint8_t* q = b + 2 + first;
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
    const uint8_t* q = b + 16 + j / 2 * 32 + first % 32;
    const int shift = j % 2 * 4;
    for (int i = 0; i < N; ++i) v[i] = d * static_cast<float>(q[i] >> shift & 15) - m;
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
    const uint8_t* high = b + 16 + first % 32;
    const uint8_t* q = b + 48 + j / 2 * 32 + first % 32;
    const int shift = j % 2 * 4;
    for (int i = 0; i < N; ++i) {
      const int code = (q[i] >> shift & 15) | (high[i] >> j & 1) << 4;
      v[i] = d * static_cast<float>(code) - m;
    }
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
    const uint8_t* low = b + 64 * half + row % 2 * 32 + first % 32;
    const uint8_t* high = b + 128 + 32 * half + first % 32;
    const int shift = row / 2 * 4;
    for (int i = 0; i < N; ++i) {
      const int code = (low[i] >> shift & 15) | (high[i] >> 2 * row & 3) << 4;
      v[i] = d * static_cast<float>(code - 32);
    }
  }
};

}  // namespace ts::quant
