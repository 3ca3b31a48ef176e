// Sums of squares of gradients, in double, in the summation tree that kernels.h describes. A
// product of two floats is exact in double, so only the order of additions matters, and it is
// fixed.
#include "adamw_math.h"
#include "cpu/sum_lanes.h"
#include "ts/thread_pool.h"

namespace ts::optim::TS_ISA {

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
