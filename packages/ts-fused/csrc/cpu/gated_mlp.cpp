// The gated activation act(gate) * up on the CPU, in fp32 with one rounding. Both activations are
// x * sigmoid(z): z = x for silu, z = 2 sqrt(2/pi) (x + 0.044715 x^3) for the tanh form of gelu.
#include "exp.h"
#include "gate.h"
#include "kernels.h"
#include "ts/thread_pool.h"

namespace ts::fused::TS_ISA {

struct Sigmoid {
  f32x16 s, t;  // sigmoid(z) and 1 - sigmoid(z), neither from a difference
};

TS_INLINE Sigmoid sigmoid(f32x16 z) {
  Sigmoid out;
  for (int k = 0; k < kParts; ++k) {
    const Reg x = z.part[k];
    const Reg e = exp_of((Reg)((UintReg)x | 0x80000000u));
    const Reg r = 1.0f / (1.0f + e);
    const Reg q = e * r;
    out.s.part[k] = select(x >= 0.0f, r, q);
    out.t.part[k] = select(x >= 0.0f, q, r);
  }
  return out;
}

template <bool kGelu>
TS_INLINE f32x16 exponent(f32x16 x) {
  if constexpr (!kGelu) return x;
  return x * (kGeluLinear + x * x * kGeluCubic);
}

template <bool kGelu>
TS_INLINE f32x16 activate(f32x16 x, f32x16 up) {
  const f32x16 least = at_least(x, -kGateLimit);
  return least * sigmoid(exponent<kGelu>(least)).s * up;
}

// act'(x) = s + x s (1 - s) z'(x)
template <bool kGelu>
TS_INLINE void derive(f32x16 grad, f32x16 x, f32x16 up, f32x16& grad_gate, f32x16& grad_up) {
  const f32x16 least = at_least(x, -kGateLimit), gate = at_most(least, kGateLimit);
  const Sigmoid g = sigmoid(exponent<kGelu>(gate));
  grad_up = grad * (least * g.s);
  f32x16 slope = gate * g.t;
  if constexpr (kGelu) slope = slope * (kGeluLinear + gate * gate * (3.0f * kGeluCubic));
  grad_gate = grad * up * (g.s * (1.0f + slope));
}

template <typename T, bool kGelu>
static void forward_row(const T* gate, const T* up, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(y + i, activate<kGelu>(load16(gate + i), load16(up + i)));
  if (i == n) return;
  const int left = static_cast<int>(n - i);
  const f32x16 v = activate<kGelu>(load_tail(gate + i, left, 0.0f), load_tail(up + i, left, 0.0f));
  store_tail(y + i, v, left);
}

template <typename T, bool kGelu>
static void backward_row(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up,
                         int64_t n) {
  f32x16 a, b;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    derive<kGelu>(load16(grad + i), load16(gate + i), load16(up + i), a, b);
    if (grad_gate) store16(grad_gate + i, a);
    if (grad_up) store16(grad_up + i, b);
  }
  if (i == n) return;
  const int left = static_cast<int>(n - i);
  derive<kGelu>(load_tail(grad + i, left, 0.0f), load_tail(gate + i, left, 0.0f),
                load_tail(up + i, left, 0.0f), a, b);
  if (grad_gate) store_tail(grad_gate + i, a, left);
  if (grad_up) store_tail(grad_up + i, b, left);
}

// Rows are cut into pieces, so that one long row is shared among threads too.
constexpr int64_t kPiece = 8192;

template <typename Row>
static void over_pieces(int64_t rows, int64_t width, int threads, Row&& row) {
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const int64_t grain = width >= kPiece ? 1 : kPiece / (width > 0 ? width : 1);
  parallel_for(rows * pieces, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t first = k % pieces * kPiece;
      row(k / pieces, first, width - first < kPiece ? width - first : kPiece);
    }
  });
}

template <typename T, bool kGelu>
static void forward(const GatedForward& a, int threads) {
  const T* gate = static_cast<const T*>(a.gate);
  const T* up = static_cast<const T*>(a.up);
  T* y = static_cast<T*>(a.y);
  over_pieces(a.rows, a.width, threads, [=](int64_t r, int64_t i, int64_t n) {
    forward_row<T, kGelu>(gate + r * a.gate_stride + i, up + r * a.up_stride + i,
                          y + r * a.width + i, n);
  });
}

template <typename T, bool kGelu>
static void backward(const GatedBackward& a, int threads) {
  const T* grad = static_cast<const T*>(a.grad_y);
  const T* gate = static_cast<const T*>(a.gate);
  const T* up = static_cast<const T*>(a.up);
  T* grad_gate = static_cast<T*>(a.grad_gate);
  T* grad_up = static_cast<T*>(a.grad_up);
  over_pieces(a.rows, a.width, threads, [=](int64_t r, int64_t i, int64_t n) {
    const int64_t out = r * a.out_stride + i;
    backward_row<T, kGelu>(grad + r * a.grad_stride + i, gate + r * a.gate_stride + i,
                           up + r * a.up_stride + i, grad_gate ? grad_gate + out : nullptr,
                           grad_up ? grad_up + out : nullptr, n);
  });
}

void gated_forward(const GatedForward& a, DType dtype, int threads) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    a.gelu ? forward<T, true>(a, threads) : forward<T, false>(a, threads);
  });
}

void gated_backward(const GatedBackward& a, DType dtype, int threads) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    a.gelu ? backward<T, true>(a, threads) : backward<T, false>(a, threads);
  });
}

}  // namespace ts::fused::TS_ISA
