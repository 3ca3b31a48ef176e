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

void stream_probe_bytes(float* a, const float* b, uint8_t* c, uint8_t* d, int64_t n, int64_t bytes,
                        int threads) {
  constexpr int64_t kStep = 64;  // elements, so that packed ones fill whole vectors
  parallel_for(n / kStep, kGrain / kStep, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kStep; i < end * kStep; i += kStep) {
      const Ops::V y = Ops::load(b + i);
      for (int64_t k = 0; k < kStep; k += Ops::kWidth)
        Ops::store(a + i + k, Ops::mul(Ops::load(a + i + k), Ops::load(b + i + k)));
      for (uint8_t* at : {c + i * bytes, d + i * bytes})
        for (int64_t k = 0; k < kStep * bytes; k += 4 * Ops::kWidth) {
          float* to = reinterpret_cast<float*>(at + k);
          Ops::store(to, Ops::mul(Ops::load(to), y));
        }
    }
  });
}

}  // namespace ts::optim::TS_ISA
