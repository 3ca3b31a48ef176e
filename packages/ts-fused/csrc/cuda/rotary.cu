// Rotary embedding on CUDA: a block per token, q and k in one launch. Bound by memory: every
// element is read and written once, 16 bytes at a time; angles are read once for several heads.
#include "device.cuh"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 2;  // heads of a thread whose loads are under way together

// (u, v) at the places (i, j) of a head; ci .. sj are the angles at these places.
__device__ inline void turn(float& u, float& v, float ci, float si, float cj, float sj,
                            bool inverse) {
  const float a = inverse ? u * ci + v * sj : u * ci - v * si;
  const float b = inverse ? v * cj - u * si : v * cj + u * sj;
  u = a;
  v = b;
}

template <typename T, int kVec>
struct Held : Raw<T> {};

template <typename T>
struct Held<T, 1> {
  T value;
  __device__ void take(const T* p) { value = *p; }
  __device__ void widened(float (&out)[1]) const { out[0] = widen(value); }
};

// What a thread turns in each head: kVec elements of both halves, or kVec neighbours; kVec = 1
// stands for one pair. Its angles are the same in every head.
template <typename X, int kVec, bool kInterleaved>
struct Part;

template <typename X, int kVec>
struct Part<X, kVec, false> {
  float ci[kVec], si[kVec], cj[kVec], sj[kVec];
  int64_t at, half;

  __device__ Part(const Rotary& a, DType angles, const void* cos, const void* sin, int part)
      : at(int64_t{part} * kVec), half(a.rotary_dim / 2) {
    const int64_t second = a.half_width ? at : at + half;
    load_any<kVec>(cos, angles, at, ci);
    load_any<kVec>(sin, angles, at, si);
    load_any<kVec>(cos, angles, second, cj);
    load_any<kVec>(sin, angles, second, sj);
  }

  struct Values {
    Held<X, kVec> u, v;
  };
  __device__ void take(const X* x, Values& values) const {
    values.u.take(x + at);
    values.v.take(x + half + at);
  }
  __device__ void put(const Values& values, X* y, bool inverse) const {
    float u[kVec], v[kVec];
    values.u.widened(u);
    values.v.widened(v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) turn(u[j], v[j], ci[j], si[j], cj[j], sj[j], inverse);
    store<kVec>(y + at, u);
    store<kVec>(y + half + at, v);
  }
};

template <typename X, int kVec>
struct Part<X, kVec, true> {
  static constexpr int kCount = kVec == 1 ? 2 : kVec;
  float c[kCount], s[kCount];
  int64_t at;

  __device__ Part(const Rotary& a, DType angles, const void* cos, const void* sin, int part)
      : at(int64_t{part} * kCount) {
    if (a.half_width || kVec == 1) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float one[1];
        const int64_t place = a.half_width ? (at + j) / 2 : at + j;
        load_any<1>(cos, angles, place, one);
        c[j] = one[0];
        load_any<1>(sin, angles, place, one);
        s[j] = one[0];
      }
    } else if constexpr (kVec != 1) {
      load_any<kVec>(cos, angles, at, c);
      load_any<kVec>(sin, angles, at, s);
    }
  }

  struct Values {
    float v[kCount];
  };
  __device__ void take(const X* x, Values& values) const {
    if constexpr (kVec == 1) {
      values.v[0] = widen(x[at]);
      values.v[1] = widen(x[at + 1]);
    } else {
      load<kVec>(x + at, values.v);
    }
  }
  __device__ void put(Values& values, X* y, bool inverse) const {
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
      turn(values.v[j], values.v[j + 1], c[j], s[j], c[j + 1], s[j + 1], inverse);
    if constexpr (kVec == 1) {
      narrow(values.v[0], y + at);
      narrow(values.v[1], y + at + 1);
    } else {
      store<kVec>(y + at, values.v);
    }
  }
};

// A head of a token, of q or behind these of k.
template <typename X>
__device__ inline void find_head(const Rotary& a, int64_t batch, int64_t token, int head,
                                 const X** x, X** y) {
  const bool is_q = head < a.q.heads;
  const RotaryHeads& t = is_q ? a.q : a.k;
  const int64_t n = is_q ? head : head - a.q.heads;
  *x = static_cast<const X*>(t.x) + batch * t.x_stride[0] + token * t.x_stride[1] +
       n * t.x_stride[2];
  *y = static_cast<X*>(t.y) + batch * t.y_stride[0] + token * t.y_stride[1] + n * t.y_stride[2];
}

// Threads take `turned` parts of several heads at once; what is beyond the turned elements of a
// head is copied afterwards, so that the threads of a warp do the same.
template <typename X, int kVec, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, 6)
    rotary_kernel(Rotary a, DType angles, int turned, int rest) {
  using Mine = Part<X, kVec, kInterleaved>;
  const int heads = static_cast<int>(a.q.heads + a.k.heads);
  for (int64_t row = blockIdx.x; row < a.batch * a.tokens; row += gridDim.x) {
    const int64_t batch = row / a.tokens, token = row % a.tokens;
    // Byte offsets: the angles' type is known at run time only.
    const int64_t size = angles == DType::kF32 ? 4 : 2;
    const char* cos = static_cast<const char*>(a.cos) +
                      (batch * a.cos_stride[0] + token * a.cos_stride[1]) * size;
    const char* sin = static_cast<const char*>(a.sin) +
                      (batch * a.sin_stride[0] + token * a.sin_stride[1]) * size;
    const int first = static_cast<int>(threadIdx.x) / turned;
    const int step = max(static_cast<int>(blockDim.x) / turned, 1);
    // With more parts than threads a thread has several of them.
    for (int part = static_cast<int>(threadIdx.x) % turned; part < turned && first < step;
         part += static_cast<int>(blockDim.x)) {
      const Mine mine(a, angles, cos, sin, part);
      for (int head = first; head < heads; head += kAtOnce * step) {
        typename Mine::Values values[kAtOnce];
        X* y[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (head + n * step >= heads) break;
          const X* x;
          find_head(a, batch, token, head + n * step, &x, &y[n]);
          mine.take(x, values[n]);
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (head + n * step >= heads) break;
          mine.put(values[n], y[n], a.inverse);
        }
      }
    }
    for (int item = static_cast<int>(threadIdx.x); item < heads * rest;
         item += static_cast<int>(blockDim.x)) {
      const X* x;
      X* y;
      find_head(a, batch, token, item / rest, &x, &y);
      const int64_t i = a.rotary_dim + int64_t{item % rest} * kVec;
      float v[kVec];
      load<kVec>(x + i, v);
      store<kVec>(y + i, v);
    }
  }
}

template <typename X, int kVec, bool kInterleaved>
void run(const Rotary& a, DType angles, cudaStream_t stream) {
  const int64_t pairs = kVec == 1 ? 1 : kVec / (kInterleaved ? 2 : 1);  // of one part
  const int64_t turned = a.rotary_dim / 2 / pairs;
  const int64_t rest = (a.dim - a.rotary_dim) / kVec;
  const int64_t rows = a.batch * a.tokens;
  // A whole number of heads at once, where a head has fewer parts than there are threads.
  const int64_t threads = turned < kThreads ? kThreads / turned * turned : kThreads;
  const unsigned grid = static_cast<unsigned>(rows < 0x7FFFFFFF ? rows : 0x7FFFFFFF);
  rotary_kernel<X, kVec, kInterleaved><<<grid, static_cast<unsigned>(threads), 0, stream>>>(
      a, angles, static_cast<int>(turned), static_cast<int>(rest));
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
