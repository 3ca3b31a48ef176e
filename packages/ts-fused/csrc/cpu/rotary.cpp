// Rotary embedding on the CPU. For every token the angles are laid out once as
// y[i] = x[i] * c[i] + x[partner(i)] * s[i], signs and transposition folded into s; then every head
// of q and k runs over the same two rows.
#include "kernels.h"
#include "ts/thread_pool.h"
#include "vec.h"

namespace ts::fused::TS_ISA {

typedef uint64_t LongReg __attribute__((vector_size(kWidth * 4)));

// Neighbours change places: (1, 0, 3, 2, ...).
TS_INLINE f32x16 swap_pairs(f32x16 v) {
  for (int k = 0; k < kParts; ++k) {
    const LongReg u = (LongReg)v.part[k];
    v.part[k] = (Reg)((u >> 32) | (u << 32));
  }
  return v;
}

template <typename T>
static void widen_row(const T* p, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(out + i, load16(p + i));
  for (; i < n; ++i) out[i] = to_float(p[i]);
}

struct Angles {
  float c[kMaxRotaryDim], s[kMaxRotaryDim];
};

template <typename T>
static void lay_out(const Rotary& a, int64_t batch, int64_t token, Angles& out) {
  const int64_t r = a.rotary_dim, half = r / 2;
  const int64_t width = a.half_width ? half : r;
  float c[kMaxRotaryDim], s[kMaxRotaryDim];
  widen_row(static_cast<const T*>(a.cos) + batch * a.cos_stride[0] + token * a.cos_stride[1], width,
            c);
  widen_row(static_cast<const T*>(a.sin) + batch * a.sin_stride[0] + token * a.sin_stride[1], width,
            s);
  for (int64_t p = 0; p < half; ++p) {
    const int64_t first = a.interleaved ? 2 * p : p;
    const int64_t second = a.interleaved ? 2 * p + 1 : p + half;
    const int64_t at_first = a.half_width ? p : first, at_second = a.half_width ? p : second;
    out.c[first] = c[at_first];
    out.c[second] = c[at_second];
    out.s[first] = a.inverse ? s[at_second] : -s[at_first];
    out.s[second] = a.inverse ? -s[at_first] : s[at_second];
  }
}

template <typename X>
static void turn_halves(const X* x, X* y, const Angles& g, int64_t half) {
  int64_t p = 0;
  for (; p + 16 <= half; p += 16) {
    const f32x16 u = load16(x + p), v = load16(x + half + p);
    store16(y + p, u * load16(g.c + p) + v * load16(g.s + p));
    store16(y + half + p, v * load16(g.c + half + p) + u * load16(g.s + half + p));
  }
  for (; p < half; ++p) {
    const float u = to_float(x[p]), v = to_float(x[half + p]);
    narrow(u * g.c[p] + v * g.s[p], y + p);
    narrow(v * g.c[half + p] + u * g.s[half + p], y + half + p);
  }
}

template <typename X>
static void turn_neighbours(const X* x, X* y, const Angles& g, int64_t r) {
  int64_t i = 0;
  for (; i + 16 <= r; i += 16) {
    const f32x16 v = load16(x + i);
    store16(y + i, v * load16(g.c + i) + swap_pairs(v) * load16(g.s + i));
  }
  for (; i < r; i += 2) {
    const float u = to_float(x[i]), v = to_float(x[i + 1]);
    narrow(u * g.c[i] + v * g.s[i], y + i);
    narrow(v * g.c[i + 1] + u * g.s[i + 1], y + i + 1);
  }
}

template <typename X>
static void turn_heads(const RotaryHeads& t, const Rotary& a, int64_t batch, int64_t token,
                       const Angles& g) {
  const X* x = static_cast<const X*>(t.x) + batch * t.x_stride[0] + token * t.x_stride[1];
  X* y = static_cast<X*>(t.y) + batch * t.y_stride[0] + token * t.y_stride[1];
  const int64_t r = a.rotary_dim;
  for (int64_t h = 0; h < t.heads; ++h, x += t.x_stride[2], y += t.y_stride[2]) {
    if (a.interleaved)
      turn_neighbours(x, y, g, r);
    else
      turn_halves(x, y, g, r / 2);
    if (r < a.dim) memcpy(static_cast<void*>(y + r), x + r, (a.dim - r) * sizeof(X));
  }
}

void rotary(const Rotary& a, DType dtype, DType angles, int threads) {
  const int64_t work = (a.q.heads + a.k.heads) * a.dim;
  const int64_t grain = work >= 32768 ? 1 : 32768 / (work > 0 ? work : 1);
  with_type(dtype, [&](auto tag) {
    using X = typename decltype(tag)::type;
    parallel_for(a.batch * a.tokens, grain, threads, [&](int64_t begin, int64_t end) {
      Angles g;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t batch = i / a.tokens, token = i % a.tokens;
        with_type(angles, [&](auto t) { lay_out<typename decltype(t)::type>(a, batch, token, g); });
        turn_heads<X>(a.q, a, batch, token, g);
        turn_heads<X>(a.k, a, batch, token, g);
      }
    });
  });
}

}  // namespace ts::fused::TS_ISA
