// The gated activation on CUDA. Bound by memory: every element is read and written once, sixteen
// bytes at a time.
#include "device.cuh"
#include "gate.h"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

constexpr int kThreads = 256;

// sigmoid(z) and 1 - sigmoid(z), neither from a difference. 1 + e lies in [1, 2]: the fast division
// is within 2 units in the last place there.
__device__ inline void sigmoid(float z, float& s, float& t) {
  const float e = expf(-fabsf(z));
  const float r = __fdividef(1.0f, 1.0f + e);
  const float q = e * r;
  s = z >= 0.0f ? r : q;
  t = z >= 0.0f ? q : r;
}

template <bool kGelu>
__device__ inline float exponent(float x) {
  if constexpr (!kGelu) return x;
  return x * (kGeluLinear + x * x * kGeluCubic);
}

// NaN stays NaN in both, which fminf and fmaxf would not let it.
__device__ inline float at_least(float x, float low) { return x < low ? low : x; }
__device__ inline float at_most(float x, float high) { return x > high ? high : x; }

// Rows of `parts` items of kVec elements; the quotient is taken in 32 bits where it fits.
__device__ inline void place(int64_t item, int64_t parts, bool narrow_index, int64_t& row,
                             int64_t& part) {
  if (narrow_index) {
    row = static_cast<uint32_t>(item) / static_cast<uint32_t>(parts);
    part = static_cast<uint32_t>(item) % static_cast<uint32_t>(parts);
  } else {
    row = item / parts;
    part = item % parts;
  }
}

template <typename T, int kVec, bool kGelu>
__global__ void __launch_bounds__(kThreads)
    gated_forward_kernel(GatedForward a, int64_t parts, int64_t items) {
  const bool narrow_index = items <= 0xFFFFFFFFLL;
  for (int64_t item = blockIdx.x * int64_t{kThreads} + threadIdx.x; item < items;
       item += int64_t{gridDim.x} * kThreads) {
    int64_t row, part;
    place(item, parts, narrow_index, row, part);
    const int64_t i = part * kVec;
    float x[kVec], up[kVec];
    load<kVec>(static_cast<const T*>(a.gate) + row * a.gate_stride + i, x);
    load<kVec>(static_cast<const T*>(a.up) + row * a.up_stride + i, up);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float least = at_least(x[j], -kGateLimit);
      float s, t;
      sigmoid(exponent<kGelu>(least), s, t);
      x[j] = least * s * up[j];
    }
    store<kVec>(static_cast<T*>(a.y) + row * a.width + i, x);
  }
}

template <typename T, int kVec, bool kGelu>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(GatedBackward a, int64_t parts, int64_t items) {
  const bool narrow_index = items <= 0xFFFFFFFFLL;
  for (int64_t item = blockIdx.x * int64_t{kThreads} + threadIdx.x; item < items;
       item += int64_t{gridDim.x} * kThreads) {
    int64_t row, part;
    place(item, parts, narrow_index, row, part);
    const int64_t i = part * kVec;
    float g[kVec], x[kVec], up[kVec];
    load<kVec>(static_cast<const T*>(a.grad_y) + row * a.grad_stride + i, g);
    load<kVec>(static_cast<const T*>(a.gate) + row * a.gate_stride + i, x);
    load<kVec>(static_cast<const T*>(a.up) + row * a.up_stride + i, up);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float least = at_least(x[j], -kGateLimit), gate = at_most(least, kGateLimit);
      float s, t;
      sigmoid(exponent<kGelu>(gate), s, t);
      float slope = gate * t;
      if constexpr (kGelu) slope *= kGeluLinear + gate * gate * (3.0f * kGeluCubic);
      const float grad_up = g[j] * (least * s);
      x[j] = g[j] * up[j] * (s * (1.0f + slope));
      up[j] = grad_up;
    }
    const int64_t out = row * a.out_stride + i;
    if (a.grad_gate) store<kVec>(static_cast<T*>(a.grad_gate) + out, x);
    if (a.grad_up) store<kVec>(static_cast<T*>(a.grad_up) + out, up);
  }
}

unsigned blocks_for(int64_t items) {
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
}

// Calls f(T, vec, gelu).
template <typename F>
void dispatch(DType dtype, bool vectors, bool gelu, F&& f) {
  with_type(dtype, [&](auto tag) {
    const auto sized = [&](auto vec) {
      if (gelu)
        f(tag, vec, std::true_type{});
      else
        f(tag, vec, std::false_type{});
    };
    if (vectors)
      sized(std::integral_constant<int, 8>{});
    else
      sized(std::integral_constant<int, 1>{});
  });
}

bool fits(const void* p, int64_t stride) { return aligned16(p) && stride % 8 == 0; }

}  // namespace

void launch_gated_forward(const GatedForward& a, DType dtype, void* stream) {
  const bool vectors =
      a.width % 8 == 0 && fits(a.gate, a.gate_stride) && fits(a.up, a.up_stride) && aligned16(a.y);
  dispatch(dtype, vectors, a.gelu, [&](auto tag, auto vec, auto gelu) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = decltype(vec)::value;
    const int64_t parts = a.width / kVec, items = a.rows * parts;
    gated_forward_kernel<T, kVec, decltype(gelu)::value>
        <<<blocks_for(items), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, parts, items);
  });
  cuda_check_launch("gated_forward");
}

void launch_gated_backward(const GatedBackward& a, DType dtype, void* stream) {
  const bool vectors = a.width % 8 == 0 && fits(a.grad_y, a.grad_stride) &&
                       fits(a.gate, a.gate_stride) && fits(a.up, a.up_stride) &&
                       fits(a.grad_gate, a.out_stride) && fits(a.grad_up, a.out_stride);
  dispatch(dtype, vectors, a.gelu, [&](auto tag, auto vec, auto gelu) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = decltype(vec)::value;
    const int64_t parts = a.width / kVec, items = a.rows * parts;
    gated_backward_kernel<T, kVec, decltype(gelu)::value>
        <<<blocks_for(items), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, parts, items);
  });
  cuda_check_launch("gated_backward");
}

}  // namespace ts::fused
