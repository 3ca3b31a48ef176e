// Eight elements at a time in 16-byte accesses, and what the kernels share.
#pragma once

#include "adamw_math.h"

namespace ts::optim {
namespace {

__device__ inline int find_item(const int* begins, int count, int at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begins[middle] <= at ? low : high) = middle;
  }
  return low;
}

__device__ inline bool aligned(const void* p, size_t bytes) {
  return (reinterpret_cast<uintptr_t>(p) & (bytes - 1)) == 0;
}

struct alignas(16) Words {
  uint32_t word[4];
};

// Eight 16-bit or fp32 values as floats, in 16-byte loads.
template <Kind K>
__device__ inline void load8(const void* base, int64_t i, float* x) {
  if constexpr (K == Kind::kF32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + i);
    const float4 a = p[0], b = p[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const Words w = *reinterpret_cast<const Words*>(static_cast<const uint16_t*>(base) + i);
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = widen<ScalarOps, K>(w.word[k] & 0xFFFFu);
      x[2 * k + 1] = widen<ScalarOps, K>(w.word[k] >> 16);
    }
  }
}

__device__ inline void store8(float* base, int64_t i, const float* x) {
  float4* p = reinterpret_cast<float4*>(base + i);
  p[0] = make_float4(x[0], x[1], x[2], x[3]);
  p[1] = make_float4(x[4], x[5], x[6], x[7]);
}

template <Kind L>
__device__ inline void adamw_low8(const AdamWItem& t, int64_t i, const float* p) {
  Words w;
  for (int k = 0; k < 4; ++k)
    w.word[k] = round_low<ScalarOps, L>(p[2 * k]) | (round_low<ScalarOps, L>(p[2 * k + 1]) << 16);
  *reinterpret_cast<Words*>(static_cast<uint16_t*>(t.low) + i) = w;
}

// Folds one value a lane, as fold_lanes does.
__device__ inline double fold_warp(double sum) {
  for (int width = kSumLanes / 2; width >= 1; width /= 2)
    sum = __dadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, width));
  return sum;
}

}  // namespace
}  // namespace ts::optim
