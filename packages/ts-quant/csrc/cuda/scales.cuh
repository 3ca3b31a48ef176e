// The scale of a block, from what is stored, in two steps: `load` while the codes are on their way,
// `value` once they are there. `fill` puts into shared memory what `value` looks up; kSize floats.
#pragma once

#include "blocks.cuh"
#include "scale_data.h"

namespace ts::quant {

struct PlainScales {
  static constexpr int kSize = 1;
  using Raw = float;
  const float* absmax;
  __device__ __forceinline__ void fill(float*) const {}
  __device__ __forceinline__ Raw load(int64_t block) const { return __ldg(absmax + block); }
  __device__ __forceinline__ float value(Raw raw, const float*) const { return raw; }
};

struct CodedScale {
  float group;
  uint8_t code;
};

struct MapScales {
  static constexpr int kSize = kMapSize;
  using Raw = CodedScale;
  MapScaleData data;
  __device__ __forceinline__ void fill(float* shared) const {
    const float offset = __ldg(data.map + kMapSize - 1);  // on its way with the others
    for (int i = threadIdx.x; i < kMapSize - 1; i += blockDim.x) shared[i] = __ldg(data.map + i);
    if (threadIdx.x == 0) shared[kMapSize - 1] = offset;
  }
  __device__ __forceinline__ Raw load(int64_t block) const {
    return {__ldg(data.groups + (block >> kNestedShift)), __ldg(data.codes + block)};
  }
  __device__ __forceinline__ float value(Raw raw, const float* shared) const {
    return __fadd_rn(__fmul_rn(shared[raw.code], raw.group), shared[kMapSize - 1]);
  }
};

// Device code cannot index the host's constexpr arrays.
struct LogRoots {
  float root[16];
};
constexpr LogRoots make_log_roots() {
  LogRoots roots{};
  for (int i = 0; i < 16; ++i) roots.root[i] = kLogRoots[i];
  return roots;
}
// Global memory: lanes that read different words of __constant__ memory wait for one another.
static __device__ const LogRoots kDeviceLogRoots = make_log_roots();

struct LogScales {
  static constexpr int kSize = 256;
  using Raw = CodedScale;
  LogScaleData data;
  // The root has the exponent of 1; whole octaves are taken off it.
  __device__ static __forceinline__ float ratio(uint32_t code) {
    if (code == 0) return 0.0f;
    const uint32_t step = code + 1;
    return __uint_as_float(__float_as_uint(__ldg(kDeviceLogRoots.root + (step & 15u))) -
                           ((16u - (step >> 4)) << 23));
  }
  __device__ __forceinline__ void fill(float* shared) const {
    for (int i = threadIdx.x; i < kSize; i += blockDim.x) shared[i] = ratio(i);
  }
  __device__ __forceinline__ Raw load(int64_t block) const {
    return {__ldg(data.groups + (block >> kNestedShift)), __ldg(data.codes + block)};
  }
  __device__ __forceinline__ float value(Raw raw, const float* shared) const {
    return __fmul_rn(shared[raw.code], raw.group);
  }
};

}  // namespace ts::quant
