// What the CUDA kernels share: 16-byte loads and stores of eight elements as fp32, and reductions
// in a fixed order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ts/dtype.h"
#include "ts/numeric.h"

namespace ts::fused {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return to_float(x); }
__device__ inline float widen(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline void narrow(float x, float* out) { *out = x; }
__device__ inline void narrow(float x, bf16* out) { *out = to_bf16(x); }
__device__ inline void narrow(float x, fp16* out) {
  out->bits = __half_as_ushort(__float2half_rn(x));
}

template <typename T>
__device__ inline float rounded(float x) {
  T y;
  narrow(x, &y);
  return widen(y);
}

// kVec is 8 (pointers aligned to 16 bytes) or 1.
template <int kVec, typename T>
__device__ inline void load(const T* p, float (&out)[kVec]) {
  if constexpr (kVec == 1) {
    out[0] = widen(*p);
  } else {
    constexpr int kWords = sizeof(T) * kVec / 16;
    alignas(16) T raw[kVec];
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      reinterpret_cast<uint4*>(raw)[w] = reinterpret_cast<const uint4*>(p)[w];
#pragma unroll
    for (int j = 0; j < kVec; ++j) out[j] = widen(raw[j]);
  }
}

template <int kVec, typename T>
__device__ inline void store(T* p, const float (&in)[kVec]) {
  if constexpr (kVec == 1) {
    narrow(in[0], p);
  } else {
    constexpr int kWords = sizeof(T) * kVec / 16;
    alignas(16) T raw[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) narrow(in[j], raw + j);
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      reinterpret_cast<uint4*>(p)[w] = reinterpret_cast<const uint4*>(raw)[w];
  }
}

// For what is read from cache (a norm's weight, angles): the type is a branch and not a template
// parameter, and the number of kernels in the module falls to a quarter.
template <int kVec>
__device__ inline void load_any(const void* p, DType type, int64_t i, float (&out)[kVec]) {
  if (type == DType::kF32)
    load<kVec>(static_cast<const float*>(p) + i, out);
  else if (type == DType::kBF16)
    load<kVec>(static_cast<const bf16*>(p) + i, out);
  else
    load<kVec>(static_cast<const fp16*>(p) + i, out);
}

template <typename T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Sum over the kThreads threads of a row; `scratch` holds a value per warp. Every thread gets it.
template <int kThreads, typename T>
__device__ inline T row_sum(T x, T* scratch) {
  x = warp_sum(x);
  if constexpr (kThreads == 32) return x;
  constexpr int kWarps = kThreads / 32;
  __syncthreads();  // the scratch may still be read from the row before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  T sum = scratch[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += scratch[w];
  return sum;
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename T>
struct Tag {
  using type = T;
};

template <typename F>
void with_type(DType type, F&& f) {
  if (type == DType::kF32)
    f(Tag<float>{});
  else if (type == DType::kBF16)
    f(Tag<bf16>{});
  else
    f(Tag<fp16>{});
}

}  // namespace
}  // namespace ts::fused
