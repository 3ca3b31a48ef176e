// AdamW's element formula, the only copy: host (every instruction set) and CUDA compile this text.
//
//   g <- g * grad_scale
//   m <- m + w1 (g - m)             w1 = 1 - beta1
//   v <- v + w2 (g^2 - v)           w2 = 1 - beta2
//   p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Loshchilov and Hutter, arXiv:1711.05101. Each line below is one correctly rounded operation, so
// every device gives the same bits. Moments decay as fma(-w, m, m): rounding beta2 = 0.999 to fp32
// instead would shift the stationary v by 1.3e-5. v is capped at the largest float, so that finite
// gradients (1e20 in bf16) never leave an infinite moment behind.
#pragma once

#include <float.h>
#include <math.h>

#include "kernels.h"
#include "ts/numeric.h"

namespace ts::optim {
namespace {  // internal: code compiled for one instruction set must not be shared by the linker

// The operations on one element; the CPU kernels add 8- and 16-wide ones with the same names.
struct ScalarOps {
  using V = float;
  using I = uint32_t;
  static constexpr int kWidth = 1;
  TS_HOST_DEVICE static inline V set(float x) { return x; }
  TS_HOST_DEVICE static inline V load(const float* p) { return *p; }
  TS_HOST_DEVICE static inline void store(float* p, V x) { *p = x; }
  TS_HOST_DEVICE static inline I load16(const uint16_t* p) { return *p; }
  TS_HOST_DEVICE static inline void store16(uint16_t* p, I x) { *p = static_cast<uint16_t>(x); }
  TS_HOST_DEVICE static inline V widen_bf16(I x) {
    return to_float(bf16{static_cast<uint16_t>(x)});
  }
  TS_HOST_DEVICE static inline V widen_fp16(I x) {
    return to_float(fp16{static_cast<uint16_t>(x)});
  }
  TS_HOST_DEVICE static inline I round_bf16(V x) { return to_bf16(x).bits; }
  TS_HOST_DEVICE static inline I round_fp16(V x) { return to_fp16(x).bits; }
  // a == b ? x : y
  TS_HOST_DEVICE static inline V pick(I a, I b, V x, V y) { return a == b ? x : y; }
  // p if it is a number and a <= b, unsigned, else x
  TS_HOST_DEVICE static inline V pick_within(V p, I a, I b, V x) {
    return p == p && a <= b ? p : x;
  }
#if defined(__CUDA_ARCH__)
  __device__ static inline V mul(V a, V b) { return __fmul_rn(a, b); }
  __device__ static inline V sub(V a, V b) { return __fsub_rn(a, b); }
  __device__ static inline V fma(V a, V b, V c) { return __fmaf_rn(a, b, c); }
  __device__ static inline V sqrt(V a) { return __fsqrt_rn(a); }
  __device__ static inline V div(V a, V b) { return __fdiv_rn(a, b); }
#else
  TS_HOST_DEVICE static inline V mul(V a, V b) { return a * b; }
  TS_HOST_DEVICE static inline V sub(V a, V b) { return a - b; }
  TS_HOST_DEVICE static inline V fma(V a, V b, V c) { return fmaf(a, b, c); }
  TS_HOST_DEVICE static inline V sqrt(V a) { return sqrtf(a); }
  TS_HOST_DEVICE static inline V div(V a, V b) { return a / b; }
#endif
  // min(a, FLT_MAX), NaN stays NaN
  TS_HOST_DEVICE static inline V cap(V a) { return a > FLT_MAX ? FLT_MAX : a; }
  // For packed moments; integers are 32 bits wide.
  TS_HOST_DEVICE static inline I seti(uint32_t x) { return x; }
  TS_HOST_DEVICE static inline I load8(const uint8_t* p) { return *p; }
  TS_HOST_DEVICE static inline I load8s(const uint8_t* p) {
    return static_cast<uint32_t>(static_cast<int8_t>(*p));
  }
  TS_HOST_DEVICE static inline void store8(uint8_t* p, I x) { *p = static_cast<uint8_t>(x); }
  static inline uint32_t largest_u(I x) { return x; }
  static inline uint32_t largest_s(I x) { return x; }
  // Several in a row.
  static inline void store8(uint8_t* p, I a, I b, I c, I d) {
    store8(p, a), store8(p + 1, b), store8(p + 2, c), store8(p + 3, d);
  }
  static inline void store16(uint16_t* p, I a, I b) { store16(p, a), store16(p + 1, b); }
  TS_HOST_DEVICE static inline I bits(V x) { return float_bits(x); }
  TS_HOST_DEVICE static inline V floats(I x) { return bits_float(x); }
  TS_HOST_DEVICE static inline I add(I a, I b) { return a + b; }
  TS_HOST_DEVICE static inline I minus(I a, I b) { return a - b; }
  TS_HOST_DEVICE static inline I both(I a, I b) { return a & b; }
  TS_HOST_DEVICE static inline I either(I a, I b) { return a | b; }
  TS_HOST_DEVICE static inline I exclusive(I a, I b) { return a ^ b; }
  TS_HOST_DEVICE static inline I min_u(I a, I b) { return a < b ? a : b; }
  TS_HOST_DEVICE static inline I max_u(I a, I b) { return a < b ? b : a; }
  TS_HOST_DEVICE static inline I max_s(I a, I b) {
    return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? b : a;
  }
  template <int N>
  TS_HOST_DEVICE static inline I shl(I a) {
    return a << N;
  }
  template <int N>
  TS_HOST_DEVICE static inline I shr(I a) {
    return a >> N;
  }
  template <int N>
  TS_HOST_DEVICE static inline I sar(I a) {
    return static_cast<uint32_t>(static_cast<int32_t>(a) >> N);
  }
  TS_HOST_DEVICE static inline I min_s(I a, I b) {
    return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b;
  }
  // Which lanes are zero.
  using Zeros = bool;
  TS_HOST_DEVICE static inline Zeros zeros(V x) { return x == 0.0f; }
  TS_HOST_DEVICE static inline Zeros zeros(I x, I bits) { return (x & bits) == 0; }
  // x, and 0 or `other` in those lanes.
  TS_HOST_DEVICE static inline I keep(Zeros z, I x) { return z ? 0u : x; }
  TS_HOST_DEVICE static inline I keep(Zeros z, I x, I other) { return z ? other : x; }
  TS_HOST_DEVICE static inline V at_least(V a, V low) { return a < low ? low : a; }
  TS_HOST_DEVICE static inline V at_least(V a, V low, Zeros z) {
    return z ? 0.0f : at_least(a, low);
  }
};

template <typename O>
struct Spread {
  typename O::V decay, w1, neg_w1, w2, neg_w2, neg_step, inv_sqrt_bc2, eps, grad_scale;
};

template <typename O>
TS_HOST_DEVICE static inline Spread<O> spread(const AdamWScalars& s) {
  return Spread<O>{O::set(s.decay),        O::set(s.w1),  O::set(-s.w1),
                   O::set(s.w2),           O::set(-s.w2), O::set(-s.step_size),
                   O::set(s.inv_sqrt_bc2), O::set(s.eps), O::set(s.grad_scale)};
}

// Returns sqrt(v).
template <typename O>
TS_HOST_DEVICE static inline typename O::V adamw_element(typename O::V& p, typename O::V g,
                                                         typename O::V& m, typename O::V& v,
                                                         const Spread<O>& s) {
  g = O::mul(g, s.grad_scale);
  m = O::fma(s.w1, g, O::fma(s.neg_w1, m, m));
  v = O::cap(O::fma(O::mul(s.w2, g), g, O::fma(s.neg_w2, v, v)));
  const typename O::V root = O::sqrt(v);
  const typename O::V denom = O::fma(root, s.inv_sqrt_bc2, s.eps);
  p = O::fma(s.neg_step, O::div(m, denom), O::mul(p, s.decay));
  return root;
}

template <typename O, Kind K>
TS_HOST_DEVICE static inline typename O::V widen(typename O::I x) {
  return K == Kind::kBF16 ? O::widen_bf16(x) : O::widen_fp16(x);
}

template <typename O, Kind K>
TS_HOST_DEVICE static inline typename O::I round_low(typename O::V x) {
  return K == Kind::kBF16 ? O::round_bf16(x) : O::round_fp16(x);
}

template <typename O, Kind K>
TS_HOST_DEVICE static inline typename O::V load_as_float(const void* base, int64_t i) {
  if constexpr (K == Kind::kF32) return O::load(static_cast<const float*>(base) + i);
  return widen<O, K>(O::load16(static_cast<const uint16_t*>(base) + i));
}

template <Kind L>
TS_HOST_DEVICE static inline uint16_t* low_at(const AdamWItem& t, int64_t i) {
  return static_cast<uint16_t*>(t.low) + (L == Kind::kNone ? 0 : i);
}

// The fp32 weight p, or the 16-bit one where somebody edited it: where that is not p rounded. In
// bf16 it is, if the bits are at most half a step apart (less, where that is a tie to the other).
template <typename O, Kind L>
TS_HOST_DEVICE static inline typename O::V reconciled(typename O::V p, typename O::I now) {
  const typename O::V low = widen<O, L>(now);
  if constexpr (L == Kind::kFP16) return O::pick(now, round_low<O, L>(p), p, low);
  const typename O::I apart = O::minus(O::bits(p), O::bits(low));
  const typename O::I size = O::max_s(apart, O::minus(O::seti(0), apart));
  const typename O::I odd = O::both(now, O::seti(1));
  return O::pick_within(p, O::add(size, odd), O::seti(0x8000u), low);
}

template <typename O, Kind L>
TS_HOST_DEVICE static inline typename O::V load_weight(const AdamWItem& t, int64_t i) {
  const typename O::V p = O::load(t.param + i);
  if (L == Kind::kNone || !t.reconcile) return p;
  return reconciled<O, L>(p, O::load16(low_at<L>(t, i)));
}

// Elements [i, i + O::kWidth) of one tensor: every read comes before the first write.
template <typename O, Kind G, Kind L>
TS_HOST_DEVICE static inline void adamw_at(const AdamWItem& t, int64_t i, const Spread<O>& s) {
  typename O::V p = load_weight<O, L>(t, i);
  const typename O::V g = load_as_float<O, G>(t.grad, i);
  typename O::V m = O::load(t.exp_avg + i);
  typename O::V v = O::load(t.exp_avg_sq + i);
  adamw_element<O>(p, g, m, v, s);
  O::store(t.param + i, p);
  O::store(t.exp_avg + i, m);
  O::store(t.exp_avg_sq + i, v);
  if (L != Kind::kNone) O::store16(low_at<L>(t, i), round_low<O, L>(p));
}

// Calls f.template operator()<G, L>() for the kinds of one tensor.
template <Kind G, typename F>
TS_HOST_DEVICE static inline void dispatch_low(Kind low, F&& f) {
  if (low == Kind::kNone)
    f.template run<G, Kind::kNone>();
  else if (low == Kind::kBF16)
    f.template run<G, Kind::kBF16>();
  else
    f.template run<G, Kind::kFP16>();
}

template <typename F>
TS_HOST_DEVICE static inline void dispatch_kinds(Kind grad, Kind low, F&& f) {
  if (grad == Kind::kF32)
    dispatch_low<Kind::kF32>(low, f);
  else if (grad == Kind::kBF16)
    dispatch_low<Kind::kBF16>(low, f);
  else
    dispatch_low<Kind::kFP16>(low, f);
}

// Folds kSumLanes partial sums in halves; CUDA does the same with shuffles.
static inline double fold_lanes(double* lanes) {
  for (int width = kSumLanes / 2; width >= 1; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

}  // namespace
}  // namespace ts::optim
