// RMSNorm on the CPU, in the rounding order of the PyTorch modules.
//
// The mean of squares is added up in the order PyTorch's own CPU sum uses for a contiguous row, so
// that the statistic, and with it y, has the same bits: with W lanes (8 on x86, 4 with 128-bit
// vectors), element e belongs to accumulator e mod 4W; every accumulator is a cascade of four
// levels, the four vectors of accumulators are added in order, then the elements beyond the last
// whole vector, then the lanes, one after another. A row shorter than W is summed with W = 1.
#include "kernels.h"
#include "ts/thread_pool.h"
#include "vec.h"

namespace ts::fused::TS_ISA {

constexpr int kLevels = 4;
constexpr int kAccumulators = 4;

static inline int ceil_log2(int64_t x) {
  int bits = 0;
  while ((int64_t{1} << bits) < x) ++bits;
  return bits;
}

template <typename V, typename X>
TS_INLINE V square_at(const X* p) {
  const V v = Load<V, X>::at(p);
  return v * v;
}

// Sum of the squares of `vectors` whole vectors.
template <typename V, typename X>
TS_INLINE V sum_vectors(const X* row, int64_t vectors) {
  constexpr int kW = static_cast<int>(sizeof(V) / 4);
  const int64_t steps = vectors / kAccumulators;
  const int levels_power = ceil_log2(steps) / kLevels;
  const int power = levels_power > 4 ? levels_power : 4;
  const int64_t block = int64_t{1} << power;
  if (steps < block) {  // a short row never leaves the first level
    V a0 = {}, a1 = {}, a2 = {}, a3 = {};
    for (int64_t i = 0; i < steps; ++i) {
      const X* p = row + i * kAccumulators * kW;
      a0 += square_at<V>(p);
      a1 += square_at<V>(p + kW);
      a2 += square_at<V>(p + 2 * kW);
      a3 += square_at<V>(p + 3 * kW);
    }
    for (int64_t v = steps * kAccumulators; v < vectors; ++v) a0 += square_at<V>(row + v * kW);
    return ((a0 + a1) + a2) + a3;
  }
  V acc[kLevels][kAccumulators] = {};
  int64_t i = 0;
  while (i + block <= steps) {
    V a0 = acc[0][0], a1 = acc[0][1], a2 = acc[0][2], a3 = acc[0][3];
    for (const int64_t end = i + block; i < end; ++i) {
      const X* p = row + i * kAccumulators * kW;
      a0 += square_at<V>(p);
      a1 += square_at<V>(p + kW);
      a2 += square_at<V>(p + 2 * kW);
      a3 += square_at<V>(p + 3 * kW);
    }
    acc[0][0] = a0, acc[0][1] = a1, acc[0][2] = a2, acc[0][3] = a3;
    for (int level = 1; level < kLevels; ++level) {
      for (int k = 0; k < kAccumulators; ++k) {
        acc[level][k] += acc[level - 1][k];
        acc[level - 1][k] = V{};
      }
      if ((i & ((block - 1) << (level * power))) != 0) break;
    }
  }
  for (; i < steps; ++i)
    for (int k = 0; k < kAccumulators; ++k)
      acc[0][k] += square_at<V>(row + (i * kAccumulators + k) * kW);
  for (int level = 1; level < kLevels; ++level)
    for (int k = 0; k < kAccumulators; ++k) acc[0][k] += acc[level][k];
  for (int64_t v = steps * kAccumulators; v < vectors; ++v) acc[0][0] += square_at<V>(row + v * kW);
  for (int k = 1; k < kAccumulators; ++k) acc[0][0] += acc[0][k];
  return acc[0][0];
}

template <typename V, typename X>
static float sum_squares_wide(const X* row, int64_t n) {
  constexpr int kW = static_cast<int>(sizeof(V) / 4);
  const int64_t vectors = n / kW;
  const V lanes = sum_vectors<V>(row, vectors);
  float sum = 0.0f;
  for (int64_t e = vectors * kW; e < n; ++e) {
    const float x = to_float(row[e]);
    sum += x * x;
  }
  for (int l = 0; l < kW; ++l) sum += lanes[l];
  return sum;
}

template <typename X>
static float sum_squares(const X* row, int64_t n, int mean_lanes) {
  if (n < mean_lanes) return sum_vectors<f32x1>(row, n)[0];
  if (mean_lanes == 8) return sum_squares_wide<f32x8>(row, n);
  return sum_squares_wide<f32x4>(row, n);
}

template <typename X, typename W, typename Y, bool kGemma>
struct Norm {
  // One element (or 16) of y from x * rstd and the weight.
  template <typename V>
  TS_INLINE V apply(V normalized, V weight, V offset) {
    if constexpr (kGemma) return normalized * (offset + weight);
    return Round<X>::of(normalized) * weight;
  }

  static void add_rows(const X* x, const X* residual, X* sum, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store16(sum + i, load16(x + i) + load16(residual + i));
    for (; i < n; ++i) narrow(to_float(x[i]) + to_float(residual[i]), sum + i);
  }

  static void forward(const NormForward& a, int mean_lanes, int threads) {
    const int64_t h = a.hidden;
    const int64_t grain = h >= 16384 ? 1 : 16384 / (h > 0 ? h : 1);
    parallel_for(a.rows, grain, threads, [&](int64_t begin, int64_t end) {
      const W* weight = static_cast<const W*>(a.weight);
      const f32x16 offset = splat(a.offset);
      for (int64_t r = begin; r < end; ++r) {
        const X* x = static_cast<const X*>(a.x) + r * h;
        Y* y = static_cast<Y*>(a.y) + r * h;
        if (a.residual) {
          X* sum = static_cast<X*>(a.sum) + r * h;
          add_rows(x, static_cast<const X*>(a.residual) + r * h, sum, h);
          x = sum;
        }
        const float mean = sum_squares(x, h, mean_lanes) / static_cast<float>(h);
        const float rstd = 1.0f / sqrtf(mean + a.eps);
        a.rstd[r] = rstd;
        int64_t i = 0;
        for (; i + 16 <= h; i += 16)
          store16(y + i, apply(load16(x + i) * rstd, load16(weight + i), offset));
        for (; i < h; ++i)
          narrow(apply(to_float(x[i]) * rstd, to_float(weight[i]), a.offset), y + i);
      }
    });
  }

  // Sum over the row of grad * weight * x * rstd.
  static float projection(const Y* grad, const X* x, const W* weight, float rstd, float offset,
                          int64_t h) {
    const float shift = kGemma ? offset : 0.0f;
    f32x16 acc[2] = {splat(0.0f), splat(0.0f)};
    int64_t i = 0;
    for (; i + 32 <= h; i += 32)
      for (int k = 0; k < 2; ++k) {
        const int64_t j = i + 16 * k;
        acc[k] = acc[k] + load16(grad + j) * (shift + load16(weight + j)) * (load16(x + j) * rstd);
      }
    float tail = 0.0f;
    for (; i < h; ++i)
      tail += to_float(grad[i]) * (shift + to_float(weight[i])) * (to_float(x[i]) * rstd);
    return sum_lanes(acc[0] + acc[1]) + tail;
  }

  template <bool kNeedX, bool kNeedWeight, bool kAdd>
  static void backward_row(const NormBackward& a, int64_t r, float* partial) {
    const int64_t h = a.hidden;
    const Y* grad = static_cast<const Y*>(a.grad_y) + r * h;
    const X* x = static_cast<const X*>(a.x) + r * h;
    const W* weight = static_cast<const W*>(a.weight);
    X* grad_x = static_cast<X*>(a.grad_x) + (kNeedX ? r * h : 0);
    const X* extra = static_cast<const X*>(a.grad_sum) + (kAdd ? r * h : 0);
    const float rstd = a.rstd[r];
    const float offset = kGemma ? a.offset : 0.0f;
    float c = 0.0f;
    if constexpr (kNeedX)
      c = projection(grad, x, weight, rstd, a.offset, h) / static_cast<float>(h);
    int64_t i = 0;
    for (; i + 16 <= h; i += 16) {
      const f32x16 g = load16(grad + i);
      const f32x16 normalized = load16(x + i) * rstd;
      if constexpr (kNeedX) {
        f32x16 out = (g * (offset + load16(weight + i)) - normalized * c) * rstd;
        if constexpr (kAdd) out = out + load16(extra + i);
        store16(grad_x + i, out);
      }
      if constexpr (kNeedWeight)
        store16(partial + i,
                load16(partial + i) + g * (kGemma ? normalized : Round<X>::of(normalized)));
    }
    for (; i < h; ++i) {
      const float g = to_float(grad[i]);
      const float normalized = to_float(x[i]) * rstd;
      if constexpr (kNeedX) {
        float out = (g * (offset + to_float(weight[i])) - normalized * c) * rstd;
        if constexpr (kAdd) out += to_float(extra[i]);
        narrow(out, grad_x + i);
      }
      if constexpr (kNeedWeight) partial[i] += g * (kGemma ? normalized : Round<X>::of(normalized));
    }
  }

  static void backward(const NormBackward& a, int threads) {
    const int64_t h = a.hidden;
    parallel_for(a.rows, a.rows_per_chunk, threads, [&](int64_t begin, int64_t end) {
      float* partial = a.partial ? a.partial + begin / a.rows_per_chunk * h : nullptr;
      if (partial) memset(partial, 0, h * sizeof(float));
      for (int64_t r = begin; r < end; ++r) {
        if (!a.grad_x)
          backward_row<false, true, false>(a, r, partial);
        else if (!partial && !a.grad_sum)
          backward_row<true, false, false>(a, r, partial);
        else if (!partial)
          backward_row<true, false, true>(a, r, partial);
        else if (!a.grad_sum)
          backward_row<true, true, false>(a, r, partial);
        else
          backward_row<true, true, true>(a, r, partial);
      }
    });
    if (!a.partial) return;
    const int64_t chunks = (a.rows + a.rows_per_chunk - 1) / a.rows_per_chunk;
    parallel_for(h, 1024, threads, [&](int64_t begin, int64_t end) {
      for (int64_t stride = 1; stride < chunks; stride *= 2)
        for (int64_t k = 0; k + stride < chunks; k += 2 * stride)
          for (int64_t i = begin; i < end; ++i)
            a.partial[k * h + i] += a.partial[(k + stride) * h + i];
      for (int64_t i = begin; i < end; ++i)
        narrow(chunks ? a.partial[i] : 0.0f, static_cast<W*>(a.grad_weight) + i);
    });
  }
};

template <typename X, typename W>
struct Promote {
  using type = float;
};
template <typename X>
struct Promote<X, X> {
  using type = X;
};

void rms_norm_forward(const NormForward& a, NormTypes types, int mean_lanes, int threads) {
  with_type(types.x, [&](auto x) {
    with_type(types.weight, [&](auto w) {
      using X = typename decltype(x)::type;
      using W = typename decltype(w)::type;
      if (a.gemma)
        Norm<X, W, X, true>::forward(a, mean_lanes, threads);
      else
        Norm<X, W, typename Promote<X, W>::type, false>::forward(a, mean_lanes, threads);
    });
  });
}

void rms_norm_backward(const NormBackward& a, NormTypes types, int threads) {
  with_type(types.x, [&](auto x) {
    with_type(types.weight, [&](auto w) {
      using X = typename decltype(x)::type;
      using W = typename decltype(w)::type;
      if (a.gemma)
        Norm<X, W, X, true>::backward(a, threads);
      else
        Norm<X, W, typename Promote<X, W>::type, false>::backward(a, threads);
    });
  });
}

}  // namespace ts::fused::TS_ISA
