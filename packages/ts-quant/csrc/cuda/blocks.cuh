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
// element, the compiler makes four stores of a plain one. Loads may move across it: no kernel reads
// what it writes to global memory.
__device__ __forceinline__ void store16(void* p, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
}

// The first `count` of eight values, or all; `wide`: in 16-byte stores, `out` is 16-byte aligned.
template <typename T>
__device__ __forceinline__ void store_eight(T* out, const float* v, int64_t count, bool wide) {
  constexpr int kElements = Word<T>::kElements;
#pragma unroll
  for (int i = 0; i < 8; i += kElements) {
    const uint4 word = Word<T>::make(v + i);
    if (wide && i + kElements <= count) {
      store16(out + i, word);
    } else {
      const T* each = reinterpret_cast<const T*>(&word);
#pragma unroll
      for (int k = 0; k < kElements; ++k)  // counted: the word stays in registers
        if (i + k < count) out[i + k] = each[k];
    }
  }
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

// From the number of a group of elements to the number of its block: a product with the reciprocal,
// rounded up, which is exact for 31 and 63 bits. Both reciprocals lack their highest bit, which the
// sums add.
struct BlockOf {
  int64_t groups_per_block;
  uint64_t wide;
  uint32_t narrow;
  int shift, small_shift;
  // Below 2^31.
  __device__ __forceinline__ uint32_t small(uint32_t group) const {
    return (__umulhi(group, narrow) + group) >> small_shift;
  }
  __device__ __forceinline__ int64_t operator()(int64_t group) const {
    const uint64_t g = static_cast<uint64_t>(group);
    if (g >> 31 == 0) return small(static_cast<uint32_t>(g));
    return static_cast<int64_t>((__umul64hi(g, wide) + g) >> shift);
  }
};

inline BlockOf block_of(int64_t groups_per_block) {
  const uint64_t d = static_cast<uint64_t>(groups_per_block);
  int shift = 0;
  while (uint64_t{1} << shift < d) ++shift;
  const uint64_t missing = (uint64_t{1} << shift) - d;
  const auto wide = (static_cast<unsigned __int128>(missing) << 64) / d + 1;
  // From 2^31 on, whatever `small` takes is in block 0.
  const uint64_t narrow = d >> 31 != 0 ? 0 : (missing << 32) / d + 1;
  return BlockOf{groups_per_block, static_cast<uint64_t>(wide), static_cast<uint32_t>(narrow),
                 shift, shift < 31 ? shift : 31};
}

// The words of 16 bytes of outputs that a CUDA block decodes, kUnroll a thread, and the blocks that
// they are in. `clamped` words are always there: loads need no branch, and follow one another.
constexpr int kWordsOf = kThreads * kUnroll;
struct Span {
  int64_t first, first_block;
  int count;
  uint32_t begun;  // groups of the first block before the first word
  __device__ __forceinline__ Span(int64_t words, const BlockOf& block_of_word) {
    first = int64_t{blockIdx.x} * kWordsOf;
    count = static_cast<int>(min(words - first, int64_t{kWordsOf}));
    first_block = block_of_word(first);
    begun = static_cast<uint32_t>(first - first_block * block_of_word.groups_per_block);
  }
  __device__ __forceinline__ int local(int u) const {
    return u * kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int clamped(int u) const { return min(local(u), count - 1); }
  __device__ __forceinline__ int64_t block(int u, const BlockOf& block_of_word) const {
    return first_block + block_of_word.small(begun + static_cast<uint32_t>(clamped(u)));
  }
};
// What fits `begun`; larger blocks go element by element.
constexpr int64_t kLargestBlock = int64_t{1} << 30;  // words

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
