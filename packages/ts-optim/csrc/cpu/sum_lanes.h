// Sums of squares of one piece of memory, in double, in lanes. For ISA sources only.
#pragma once

#include "adamw_math.h"
#include "cpu/vector_ops.h"

namespace ts::optim {
namespace {

// Adds the squares of 32 elements to 32 lanes.
#if defined(TS_ISA_avx512)

struct Lanes {
  __m512d sum[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(),
                    _mm512_setzero_pd()};
  template <Kind K>
  inline void add(const void* base, int64_t i) {
    for (int half = 0; half < 2; ++half) {
      const __m512 x = load_as_float<Ops, K>(base, i + 16 * half);
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
      sum[2 * half] = _mm512_fmadd_pd(low, low, sum[2 * half]);
      sum[2 * half + 1] = _mm512_fmadd_pd(high, high, sum[2 * half + 1]);
    }
  }
  inline void store(double* lanes) const {
    for (int k = 0; k < 4; ++k) _mm512_storeu_pd(lanes + 8 * k, sum[k]);
  }
};

#elif defined(TS_ISA_avx2)

struct Lanes {
  __m256d sum[8] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                    _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                    _mm256_setzero_pd(), _mm256_setzero_pd()};
  template <Kind K>
  inline void add(const void* base, int64_t i) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const __m256 x = load_as_float<Ops, K>(base, i + 8 * quarter);
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
      sum[2 * quarter] = _mm256_fmadd_pd(low, low, sum[2 * quarter]);
      sum[2 * quarter + 1] = _mm256_fmadd_pd(high, high, sum[2 * quarter + 1]);
    }
  }
  inline void store(double* lanes) const {
    for (int k = 0; k < 8; ++k) _mm256_storeu_pd(lanes + 4 * k, sum[k]);
  }
};

#else

struct Lanes {
  double sum[kSumLanes] = {};
  template <Kind K>
  inline void add(const void* base, int64_t i) {
    for (int l = 0; l < kSumLanes; ++l) {
      const double x = load_as_float<ScalarOps, K>(base, i + l);
      sum[l] += x * x;
    }
  }
  inline void store(double* lanes) const {
    for (int l = 0; l < kSumLanes; ++l) lanes[l] = sum[l];
  }
};

#endif

template <Kind K>
static double chunk_sum(const void* base, int64_t begin, int64_t end) {
  Lanes wide;
  int64_t i = begin;
  for (; i + kSumLanes <= end; i += kSumLanes) wide.add<K>(base, i);
  double lanes[kSumLanes];
  wide.store(lanes);
  for (int l = 0; i < end; ++i, ++l) {
    const double x = load_as_float<ScalarOps, K>(base, i);
    lanes[l] += x * x;
  }
  return fold_lanes(lanes);
}

}  // namespace
}  // namespace ts::optim
