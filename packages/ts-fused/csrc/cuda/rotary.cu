// Rotary embedding on CUDA: a block per token, q and k in one launch. Bound by memory: every
// element is read and written once, 16 bytes at a time; the angles come from cache.
#include "device.cuh"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

constexpr int kMaxThreads = 256;

// (u, v) at the places (i, j) of a head; ci .. sj are the angles at these places.
__device__ inline void turn(float& u, float& v, float ci, float si, float cj, float sj,
                            bool inverse) {
  const float a = inverse ? u * ci + v * sj : u * ci - v * si;
  const float b = inverse ? v * cj - u * si : v * cj + u * sj;
  u = a;
  v = b;
}

template <typename X, int kVec>
__device__ inline void turn_halves(const X* x, X* y, const Rotary& a, DType angles, const void* cos,
                                   const void* sin, int64_t p) {
  const int64_t half = a.rotary_dim / 2;
  const int64_t second = a.half_width ? p : p + half;
  float u[kVec], v[kVec], ci[kVec], si[kVec], cj[kVec], sj[kVec];
  load<kVec>(x + p, u);
  load<kVec>(x + half + p, v);
  load_any<kVec>(cos, angles, p, ci);
  load_any<kVec>(sin, angles, p, si);
  load_any<kVec>(cos, angles, second, cj);
  load_any<kVec>(sin, angles, second, sj);
#pragma unroll
  for (int j = 0; j < kVec; ++j) turn(u[j], v[j], ci[j], si[j], cj[j], sj[j], a.inverse);
  store<kVec>(y + p, u);
  store<kVec>(y + half + p, v);
}

// kVec = 1 stands for one pair.
template <typename X, int kVec>
__device__ inline void turn_neighbours(const X* x, X* y, const Rotary& a, DType angles,
                                       const void* cos, const void* sin, int64_t i) {
  constexpr int kCount = kVec == 1 ? 2 : kVec;
  float v[kCount], c[kCount], s[kCount];
  if constexpr (kVec == 1) {
    v[0] = widen(x[i]);
    v[1] = widen(x[i + 1]);
  } else {
    load<kVec>(x + i, v);
  }
  if (a.half_width || kVec == 1) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float one[1];
      const int64_t at = a.half_width ? (i + j) / 2 : i + j;
      load_any<1>(cos, angles, at, one);
      c[j] = one[0];
      load_any<1>(sin, angles, at, one);
      s[j] = one[0];
    }
  } else {
    if constexpr (kVec != 1) {
      load_any<kVec>(cos, angles, i, c);
      load_any<kVec>(sin, angles, i, s);
    }
  }
#pragma unroll
  for (int j = 0; j < kCount; j += 2)
    turn(v[j], v[j + 1], c[j], s[j], c[j + 1], s[j + 1], a.inverse);
  if constexpr (kVec == 1) {
    narrow(v[0], y + i);
    narrow(v[1], y + i + 1);
  } else {
    store<kVec>(y + i, v);
  }
}

template <typename X, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads)
    rotary_kernel(Rotary a, DType angles, int turned, int per_head, int items) {
  for (int64_t row = blockIdx.x; row < a.batch * a.tokens; row += gridDim.x) {
    const int64_t batch = row / a.tokens, token = row % a.tokens;
    // Byte offsets: the angles' type is known at run time only.
    const int64_t size = angles == DType::kF32 ? 4 : 2;
    const char* cos = static_cast<const char*>(a.cos) +
                      (batch * a.cos_stride[0] + token * a.cos_stride[1]) * size;
    const char* sin = static_cast<const char*>(a.sin) +
                      (batch * a.sin_stride[0] + token * a.sin_stride[1]) * size;
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      int64_t head = item / per_head;
      const int64_t part = item % per_head;
      const bool is_q = head < a.q.heads;
      const RotaryHeads& t = is_q ? a.q : a.k;
      if (!is_q) head -= a.q.heads;
      const X* x = static_cast<const X*>(t.x) + batch * t.x_stride[0] + token * t.x_stride[1] +
                   head * t.x_stride[2];
      X* y = static_cast<X*>(t.y) + batch * t.y_stride[0] + token * t.y_stride[1] +
             head * t.y_stride[2];
      if (part >= turned) {
        float v[kVec];
        const int64_t i = a.rotary_dim + (part - turned) * kVec;
        load<kVec>(x + i, v);
        store<kVec>(y + i, v);
      } else if constexpr (kInterleaved) {
        turn_neighbours<X, kVec>(x, y, a, angles, cos, sin, part * (kVec == 1 ? 2 : kVec));
      } else {
        turn_halves<X, kVec>(x, y, a, angles, cos, sin, part * kVec);
      }
    }
  }
}

template <typename X, int kVec, bool kInterleaved>
void run(const Rotary& a, DType angles, cudaStream_t stream) {
  const int64_t pairs = kVec == 1 ? 1 : kVec / (kInterleaved ? 2 : 1);  // of one item
  const int64_t turned = a.rotary_dim / 2 / pairs;
  const int64_t per_head = turned + (a.dim - a.rotary_dim) / kVec;
  const int64_t items = (a.q.heads + a.k.heads) * per_head;
  const int64_t rows = a.batch * a.tokens;
  // As many threads as share the items evenly.
  const int64_t rounds = (items + kMaxThreads - 1) / kMaxThreads;
  const int64_t threads = ((items + rounds - 1) / rounds + 31) / 32 * 32;
  const unsigned grid = static_cast<unsigned>(rows < 0x7FFFFFFF ? rows : 0x7FFFFFFF);
  rotary_kernel<X, kVec, kInterleaved><<<grid, static_cast<unsigned>(threads), 0, stream>>>(
      a, angles, static_cast<int>(turned), static_cast<int>(per_head), static_cast<int>(items));
  cuda_check_launch("rotary");
}

bool vectors_fit(const RotaryHeads& t) {
  if (!aligned16(t.x) || !aligned16(t.y)) return false;
  for (int i = 0; i < 3; ++i)
    if (t.x_stride[i] % 8 != 0 || t.y_stride[i] % 8 != 0) return false;
  return true;
}

}  // namespace

void launch_rotary(const Rotary& a, DType dtype, DType angles, void* stream) {
  bool vectors = vectors_fit(a.q) && (a.k.heads == 0 || vectors_fit(a.k)) && aligned16(a.cos) &&
                 aligned16(a.sin) && a.rotary_dim % 16 == 0 && a.dim % 8 == 0;
  for (int i = 0; i < 2; ++i)
    vectors = vectors && a.cos_stride[i] % 8 == 0 && a.sin_stride[i] % 8 == 0;
  const auto s = static_cast<cudaStream_t>(stream);
  with_type(dtype, [&](auto tag) {
    using X = typename decltype(tag)::type;
    if (vectors)
      a.interleaved ? run<X, 8, true>(a, angles, s) : run<X, 8, false>(a, angles, s);
    else
      a.interleaved ? run<X, 1, true>(a, angles, s) : run<X, 1, false>(a, angles, s);
  });
}

}  // namespace ts::fused
