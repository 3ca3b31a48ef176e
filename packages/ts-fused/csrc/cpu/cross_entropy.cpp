// The row-wise half of cross-entropy on the CPU: loss and, in place, its gradient with respect to
// the logits. Everything is fp32 but the running sum of exponentials and the final logarithm
// (float64). One pass finds maximum and sum block by block while the block is in cache, a second
// one writes the gradient.
#include "exp.h"
#include "kernels.h"
#include "ts/thread_pool.h"
#include "vec.h"

namespace ts::fused::TS_ISA {

constexpr int64_t kBlock = 1024;

// tanh: an odd polynomial (least-squares fit) below 0.55, else (1 - e^-2|x|) / (1 + e^-2|x|).
TS_INLINE Reg tanh_of(Reg x) {
  const UintReg sign = (UintReg)x & 0x80000000u;
  const Reg a = (Reg)((UintReg)x & 0x7FFFFFFFu);
  const Reg s = x * x;
  Reg p = s * -0.006296012084931135f + 0.021088184788823128f;
  p = p * s + -0.05385666340589523f;
  p = p * s + 0.13332632184028625f;
  p = p * s + -0.33333319425582886f;
  const Reg small = x + x * s * p;
  const Reg e = exp_of(a * -2.0f);
  const Reg large = (1.0f - e) / (1.0f + e);
  return select(a < 0.55f, small, (Reg)((UintReg)large | sign));
}

TS_INLINE f32x16 tanh16(f32x16 x) {
  for (int k = 0; k < kParts; ++k) x.part[k] = tanh_of(x.part[k]);
  return x;
}

struct Shape {
  float softcap, inverse_cap, scale;
};

// What the loss sees of a logit: scaled, then soft-capped.
template <bool kCap>
TS_INLINE f32x16 shaped(f32x16 z, const Shape& s) {
  z = z * s.scale;
  if constexpr (kCap) return tanh16(z / s.softcap) * s.softcap;
  return z;
}

struct RowStats {
  float max;
  double sum_exp;  // of e^(u - max)
  double sum;      // of u, for label smoothing
};

template <typename T, bool kCap>
static RowStats row_stats(const T* row, int64_t vocab, const Shape& shape) {
  RowStats stats{-INFINITY, 0.0, 0.0};
  float u[kBlock];
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t n = vocab - begin < kBlock ? vocab - begin : kBlock;
    const int64_t padded = (n + 15) / 16 * 16;
    f32x16 top = splat(-INFINITY);
    f32x16 total = splat(0.0f);
    for (int64_t i = 0; i < padded; i += 16) {
      f32x16 v;
      if (i + 16 <= n) {
        v = shaped<kCap>(load16(row + begin + i), shape);
        total = total + v;
      } else {
        // Lanes beyond the vocabulary do not exist: they become -inf after the capping, which would
        // turn -inf into a finite logit.
        const int left = static_cast<int>(n - i);
        float last[16];
        store16(last, shaped<kCap>(load_tail(row + begin + i, left, 0.0f), shape));
        total = total + load_tail(last, left, 0.0f);
        v = load_tail(last, left, -INFINITY);
      }
      top = max16(v, top);
      store16(u + i, v);
    }
    const float block_max = max_lanes(top);
    stats.sum += sum_lanes(total);
    if (block_max > stats.max) {
      // exp(-inf) = 0 starts the sum; a row that is -inf so far has nothing to rescale.
      stats.sum_exp *= exp(static_cast<double>(stats.max) - block_max);
      stats.max = block_max;
    }
    // A block of nothing but -inf adds nothing; its NaNs, if any, must still reach the sum.
    const float base = stats.max == -INFINITY ? 0.0f : stats.max;
    f32x16 acc = splat(0.0f);
    for (int64_t i = 0; i < padded; i += 16) acc = acc + exp16(load16(u + i) - base);
    stats.sum_exp += sum_lanes(acc);
  }
  return stats;
}

template <typename T, bool kCap>
static void write_gradient(T* row, int64_t vocab, int64_t target, const CrossEntropyRows& a,
                           const Shape& shape, const RowStats& stats) {
  const float inverse = static_cast<float>(1.0 / stats.sum_exp);
  const float spread = a.smoothing / static_cast<float>(vocab);
  auto gradient = [&](f32x16 z) __attribute__((always_inline)) {
    const f32x16 u = shaped<kCap>(z, shape);
    f32x16 g = exp16(u - stats.max) * inverse - spread;
    if constexpr (kCap) {
      const f32x16 t = u * shape.inverse_cap;
      g = g * (1.0f - t * t);
    }
    return g * shape.scale;
  };
  // The target's own element is computed from its logit before the row is overwritten.
  f32x16 at_target = splat(to_float(row[target]));
  const f32x16 u = shaped<kCap>(at_target, shape);
  float g = first(exp16(u - stats.max) * inverse - spread) - (1.0f - a.smoothing);
  if constexpr (kCap) {
    const float t = first(u) * shape.inverse_cap;
    g = g * (1.0f - t * t);
  }
  int64_t i = 0;
  for (; i + 16 <= vocab; i += 16) store16(row + i, gradient(load16(row + i)));
  if (i < vocab) {
    const int left = static_cast<int>(vocab - i);
    store_tail(row + i, gradient(load_tail(row + i, left, 0.0f)), left);
  }
  narrow(g * shape.scale, row + target);
}

template <typename T, bool kCap>
static void rows_of(const CrossEntropyRows& a, int threads) {
  const Shape shape{a.softcap, kCap ? 1.0f / a.softcap : 0.0f, a.scale};
  const int64_t grain = a.vocab >= 8192 ? 1 : 8192 / a.vocab;
  parallel_for(a.rows, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* row = static_cast<T*>(a.logits) + r * a.vocab;
      const int64_t target = a.targets[r];
      if (target == a.ignore_index || target < 0 || target >= a.vocab) {
        a.losses[r] = target == a.ignore_index ? 0.0f : NAN;
        if (a.with_grad) memset(static_cast<void*>(row), 0, a.vocab * sizeof(T));
        continue;
      }
      const RowStats stats = row_stats<T, kCap>(row, a.vocab, shape);
      const f32x16 at_target = shaped<kCap>(splat(to_float(row[target])), shape);
      const double lse = log(stats.sum_exp);  // relative to the maximum
      double loss = lse + (static_cast<double>(stats.max) - first(at_target));
      if (a.smoothing != 0.0f) {
        const double mean = stats.sum / static_cast<double>(a.vocab);
        const double uniform = lse + (static_cast<double>(stats.max) - mean);
        loss = (1.0 - a.smoothing) * loss + a.smoothing * uniform;
      }
      a.losses[r] = static_cast<float>(loss);
      if (a.with_grad) write_gradient<T, kCap>(row, a.vocab, target, a, shape, stats);
    }
  });
}

void cross_entropy_rows(const CrossEntropyRows& a, DType dtype, int threads) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.softcap != 0.0f)
      rows_of<T, true>(a, threads);
    else
      rows_of<T, false>(a, threads);
  });
}

void scale_cast(const void* src, DType src_type, const float* scale, void* out, DType out_type,
                int64_t n, int threads) {
  with_type(src_type, [&](auto s) {
    with_type(out_type, [&](auto o) {
      using S = typename decltype(s)::type;
      using O = typename decltype(o)::type;
      const S* from = static_cast<const S*>(src);
      O* to = static_cast<O*>(out);
      const float factor = scale[0];
      parallel_for(n, 1 << 15, threads, [=](int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + 16 <= end; i += 16) store16(to + i, load16(from + i) * factor);
        for (; i < end; ++i) narrow(to_float(from[i]) * factor, to + i);
      });
    });
  });
}

void label_counts(const int64_t* targets, int64_t n, int64_t ignore_index, int64_t vocab,
                  int64_t* counts) {
  int64_t valid = 0, bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool ignored = targets[i] == ignore_index;
    const bool inside = targets[i] >= 0 && targets[i] < vocab;
    valid += !ignored && inside;
    bad += !ignored && !inside;
  }
  counts[0] = valid;
  counts[1] = bad;
}

void loss_total(const float* losses, int64_t n, double* total) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += losses[i];
  total[0] = sum;
}

}  // namespace ts::fused::TS_ISA
