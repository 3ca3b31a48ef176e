// AdamW over a list of tensors in one pass over memory, and the probe it is measured against.
#include "adamw_math.h"
#include "cpu/vector_ops.h"
#include "ts/thread_pool.h"

namespace ts::optim::TS_ISA {

// Elements per piece of work: 7 streams of 64 KiB, small enough to balance, large against its cost.
constexpr int64_t kGrain = 1 << 14;

struct Range {
  const AdamWItem& item;
  int64_t begin, end;
  template <Kind G, Kind L>
  inline void run() const {
    int64_t i = begin;
    const Spread<Ops> wide = spread<Ops>(item.scalars);
    for (; i + Ops::kWidth <= end; i += Ops::kWidth) adamw_at<Ops, G, L>(item, i, wide);
    const Spread<ScalarOps> one = spread<ScalarOps>(item.scalars);
    for (; i < end; ++i) adamw_at<ScalarOps, G, L>(item, i, one);
  }
};

// Pieces are cut from the concatenation of all tensors, so that many small ones share a piece.
void adamw(const AdamWItem* items, const int64_t* begins, int64_t count, int threads) {
  if (count == 0) return;
  parallel_for(begins[count], kGrain, threads, [&](int64_t b, int64_t e) {
    const FloatMode mode;
    for (int64_t i = find_item(begins, count, b); b < e; ++i) {
      const int64_t stop = e < begins[i + 1] ? e : begins[i + 1];
      dispatch_kinds(items[i].grad_kind, items[i].low_kind,
                     Range{items[i], b - begins[i], stop - begins[i]});
      b = stop;
    }
  });
}

void stream_probe(float* a, const float* b, float* c, float* d, int64_t n, int threads) {
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + Ops::kWidth <= end; i += Ops::kWidth) {
      const Ops::V x = Ops::load(a + i), y = Ops::load(b + i);
      const Ops::V z = Ops::load(c + i), w = Ops::load(d + i);
      Ops::store(a + i, Ops::mul(x, y));
      Ops::store(c + i, Ops::mul(z, y));
      Ops::store(d + i, Ops::mul(w, y));
    }
    for (; i < end; ++i) {
      a[i] *= b[i];
      c[i] *= b[i];
      d[i] *= b[i];
    }
  });
}

}  // namespace ts::optim::TS_ISA
