// Sums of squares of gradients, in double, in the summation tree that kernels.h describes. A
// product of two floats is exact in double, so only the order of additions matters, and it is
// fixed.
#include "adamw_math.h"
#include "cpu/vector_ops.h"
#include "ts/thread_pool.h"

namespace ts::optim::TS_ISA {

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

static double item_sum(const GradItem& t, int64_t chunk) {
  const int64_t begin = chunk * kSumChunk;
  const int64_t end = begin + kSumChunk < t.numel ? begin + kSumChunk : t.numel;
  if (t.kind == Kind::kF32) return chunk_sum<Kind::kF32>(t.grad, begin, end);
  if (t.kind == Kind::kBF16) return chunk_sum<Kind::kBF16>(t.grad, begin, end);
  return chunk_sum<Kind::kFP16>(t.grad, begin, end);
}

void sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count, double* partials,
           double* out, int threads) {
  // 16 pieces a turn: a piece alone is too little work for a thread.
  parallel_for(chunk_begins[count], 16, threads, [&](int64_t b, int64_t e) {
    const FloatMode mode;
    int64_t i = find_item(chunk_begins, count, b);
    for (; b < e; ++b) {
      while (b >= chunk_begins[i + 1]) ++i;
      partials[b] = item_sum(items[i], b - chunk_begins[i]);
    }
  });
  for (int64_t i = 0; i < count; ++i) {
    double lanes[kSumLanes] = {};
    for (int64_t c = chunk_begins[i]; c < chunk_begins[i + 1]; ++c)
      lanes[(c - chunk_begins[i]) % kSumLanes] += partials[c];
    out[i] = fold_lanes(lanes);
  }
}

}  // namespace ts::optim::TS_ISA
