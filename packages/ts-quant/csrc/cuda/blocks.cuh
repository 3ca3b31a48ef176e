// What the CUDA kernels of both codecs share: exact loads, one rounding on the way out, the maximum
// of a block, and the mapping from a group of elements to its block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ts/cuda.h"
#include "ts/dtype.h"
#include "ts/numeric.h"

namespace ts::quant {

constexpr int kThreads = 256;
// Independent 16-byte stores (and as many loads) that a thread has in flight.
constexpr int kUnroll = 4;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return to_float(x); }
__device__ __forceinline__ float widen(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
  return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ fp16 narrow<fp16>(float x) {
  return fp16{__half_as_ushort(__float2half_rn(x))};
}

// Two values rounded into one 32-bit word, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  return narrow<T>(low).bits | static_cast<uint32_t>(narrow<T>(high).bits) << 16;
}
template <>
__device__ __forceinline__ uint32_t narrow_pair<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t narrow_pair<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One 16-byte word of outputs: 4 floats or 8 halves.
template <typename T>
struct Word {
  static constexpr int kElements = 16 / sizeof(T);
  __device__ static __forceinline__ uint4 make(const float* v) {
    return make_uint4(narrow_pair<T>(v[0], v[1]), narrow_pair<T>(v[2], v[3]),
                      narrow_pair<T>(v[4], v[5]), narrow_pair<T>(v[6], v[7]));
  }
};
template <>
struct Word<float> {
  static constexpr int kElements = 4;
  __device__ static __forceinline__ uint4 make(const float* v) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
  }
};

// A 16-byte store to global memory, `p` 16-byte aligned. Where the other branch stores element by
// element, the compiler makes four stores of a plain one.
__device__ __forceinline__ void store16(void* p, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}

// Eight elements in 16-byte loads; `p` is 16-byte aligned.
__device__ __forceinline__ void load8(const float* p, float* v) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(p));
  const float4 b = __ldg(reinterpret_cast<const float4*>(p) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <typename T>
__device__ __forceinline__ void load8(const T* p, float* v) {
  const uint4 w = __ldg(reinterpret_cast<const uint4*>(p));
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = widen(T{static_cast<uint16_t>(words[i] & 0xFFFFu)});
    v[2 * i + 1] = widen(T{static_cast<uint16_t>(words[i] >> 16)});
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7FFFFFFFu;
}

// From the number of a group of elements to the number of its block: a shift where the groups of a
// block are a power of two, else a division.
struct BlockOf {
  int64_t groups_per_block;
  int shift;  // -1: divide
  __device__ __forceinline__ int64_t operator()(int64_t group) const {
    if (shift >= 0) return group >> shift;
    if (static_cast<uint64_t>(group | groups_per_block) >> 32 == 0)
      return static_cast<uint32_t>(group) / static_cast<uint32_t>(groups_per_block);
    return group / groups_per_block;
  }
};

inline BlockOf block_of(int64_t groups_per_block) {
  BlockOf f{groups_per_block, -1};
  if ((groups_per_block & (groups_per_block - 1)) == 0) {
    f.shift = 0;
    while ((int64_t{1} << f.shift) < groups_per_block) ++f.shift;
  }
  return f;
}

inline bool aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

inline unsigned grid_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
}

// The largest magnitude, as bits, over all threads of a CUDA block of at most 1024 threads.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* shared) {
  value = __reduce_max_sync(0xFFFFFFFFu, value);
  if (blockDim.x <= 32) return value;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  __syncthreads();  // the previous round's readers are done
  if (threadIdx.x % 32 == 0) shared[warp] = value;
  __syncthreads();
  uint32_t best = 0;
  for (int i = 0; i < warps; ++i) best = max(best, shared[i]);
  return best;
}

// Calls fn with a null pointer of the C++ type of `dtype`; the bindings let no other type through.
template <typename Fn>
void with_type(DType dtype, Fn&& fn) {
  if (dtype == DType::kBF16) return fn(static_cast<bf16*>(nullptr));
  if (dtype == DType::kF16) return fn(static_cast<fp16*>(nullptr));
  return fn(static_cast<float*>(nullptr));
}

}  // namespace ts::quant
