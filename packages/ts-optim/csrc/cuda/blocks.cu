// AdamW in blocks of 256 elements on the device: one warp a block, eight elements a lane. State may
// be page-locked host memory. Same text, random numbers and summation tree as the CPU.
#include "cuda/wide.h"
#include "packed_math.h"
#include "ts/cuda.h"
#include "ts/philox.h"

namespace ts::optim {
namespace {

constexpr int kWarps = 8;
constexpr int kLanes = 32;
constexpr int kEach = 8;
constexpr int kTable = 22;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;
constexpr uint32_t kAll = 0xFFFFFFFFu;
static_assert(kLanes * kEach == kBlock && kLanes == kSumLanes, "one warp a block");

struct BlockTable {
  BlockItem items[kTable];
  int begins[kTable + 1];
  int count;
};
static_assert(sizeof(BlockTable) <= 4096, "kernel parameters");

// A warp's own.
struct Scratch {
  alignas(16) uint16_t random[kBlock];
  float values[kBlock];
};

// What a lane holds of its block.
struct Lane {
  int64_t first;  // its first element
  int count;      // how many of them exist
  bool wide;      // all, and every pointer allows 16-byte accesses
};

__device__ inline void load_random(const BlockItem& t, int64_t block, int lane, Scratch& x,
                                   uint32_t* r) {
  if (lane < 16) {
    const Philox p = philox4x32(t.seed, random_counter(block / 2, lane), t.number);
    for (int k = 0; k < 8; ++k) {
      const uint32_t word = (block % 2 ? p.out[2 + k / 4] : p.out[k / 4]) + t.turn;
      const uint32_t turned = __funnelshift_r(word, word, 8 * (k % 4));
      const int i = 32 * (k - k % 4) + 16 * (k % 4) + lane;
      x.random[i] = static_cast<uint16_t>(turned);
      x.random[i + 64] = static_cast<uint16_t>(turned ^ kOtherHalf);
    }
  }
  __syncwarp();
  const Words w = *reinterpret_cast<const Words*>(x.random + kEach * lane);
  for (int k = 0; k < kEach; ++k) r[k] = k % 2 ? w.word[k / 2] >> 16 : w.word[k / 2] & 0xFFFFu;
}

template <Kind K>
__device__ inline void take(const void* base, const Lane& at, float* x) {
  if (at.wide) return load8<K>(base, at.first, x);
  for (int k = 0; k < at.count; ++k) x[k] = load_as_float<ScalarOps, K>(base, at.first + k);
}

__device__ inline void put(float* base, const Lane& at, const float* x) {
  if (at.wide) return store8(base, at.first, x);
  for (int k = 0; k < at.count; ++k) base[at.first + k] = x[k];
}

__device__ inline void put16(void* base, const Lane& at, const uint32_t* x) {
  uint16_t* to = static_cast<uint16_t*>(base) + at.first;
  if (at.wide) {
    Words w;
    for (int k = 0; k < 4; ++k) w.word[k] = x[2 * k] | (x[2 * k + 1] << 16);
    *reinterpret_cast<Words*>(to) = w;
    return;
  }
  for (int k = 0; k < at.count; ++k) to[k] = static_cast<uint16_t>(x[k]);
}

__device__ inline void take_codes(const void* base, const Lane& at, uint32_t* x) {
  const uint8_t* from = static_cast<const uint8_t*>(base) + at.first;
  if (at.wide) {
    const uint2 w = *reinterpret_cast<const uint2*>(from);
    for (int k = 0; k < kEach; ++k) x[k] = ((k < 4 ? w.x : w.y) >> (8 * (k % 4))) & 0xFFu;
    return;
  }
  for (int k = 0; k < at.count; ++k) x[k] = from[k];
}

__device__ inline void put_codes(void* base, const Lane& at, const uint32_t* x) {
  uint8_t* to = static_cast<uint8_t*>(base) + at.first;
  if (at.wide) {
    uint2 w = make_uint2(0, 0);
    for (int k = 0; k < 4; ++k) {
      w.x |= x[k] << (8 * k);
      w.y |= x[4 + k] << (8 * k);
    }
    *reinterpret_cast<uint2*>(to) = w;
    return;
  }
  for (int k = 0; k < at.count; ++k) to[k] = static_cast<uint8_t>(x[k]);
}

// Sum of squares of the block's values, for lane 0, in the tree of sumsq.
__device__ inline double block_sum(Scratch& s, const Lane& at, int lane, int n, const float* x) {
  __syncwarp();
  for (int k = 0; k < at.count; ++k) s.values[kEach * lane + k] = x[k];
  __syncwarp();
  double sum = 0.0;
  for (int i = lane; i < n; i += kLanes) {
    const double value = s.values[i];
    sum = __fma_rn(value, value, sum);
  }
  return fold_warp(sum);
}

__device__ inline void encode(const BlockItem& t, int64_t block, const Lane& at, const float* m,
                              float* root, const uint32_t* random) {
  uint32_t a[kEach] = {}, b[kEach] = {}, r[kEach];
  uint32_t most_root = 0, most_ratio = kNoRatio;
  for (int k = 0; k < at.count; ++k) {
    r[k] = storable<ScalarOps>(m[k], root[k], kSmallestRoot);
    most_root = ScalarOps::max_u(most_root, float_bits(root[k]));
    most_ratio = ScalarOps::max_s(most_ratio, r[k]);
  }
  most_root = __reduce_max_sync(kAll, most_root);
  most_ratio = static_cast<uint32_t>(__reduce_max_sync(kAll, static_cast<int>(most_ratio)));
  const BlockScales scales = block_scales(most_root, most_ratio);
  const Coding coding = encoding(scales);
  for (int k = 0; k < at.count; ++k) {
    const uint32_t rounding = root_rounding<ScalarOps>(random[k]);
    if (scales.some_roots) b[k] = encode_root<ScalarOps>(root[k], coding, rounding);
    if (scales.some_ratios)
      a[k] = encode_ratio<ScalarOps>(m[k], r[k], coding,
                                     ratio_rounding<ScalarOps>(rounding, t.m_random, t.m_fixed));
  }
  put_codes(t.m, at, a);
  put_codes(t.v, at, b);
  if (threadIdx.x % kLanes == 0) {
    t.v_scale[block] = scales.root;
    t.m_scale[block] = scales.ratio;
  }
}

template <Moments M>
__device__ inline void load_moments(const BlockItem& t, int64_t block, const Lane& at, float* m,
                                    float* v) {
  if constexpr (M == Moments::kF32) {
    take<Kind::kF32>(t.m, at, m);
    take<Kind::kF32>(t.v, at, v);
  } else if constexpr (M == Moments::kBF16) {
    take<Kind::kBF16>(t.m, at, m);
    take<Kind::kBF16>(t.v, at, v);
  } else {
    uint32_t a[kEach], b[kEach];
    take_codes(t.m, at, a);
    take_codes(t.v, at, b);
    const Coding coding = decoding(t.v_scale[block], t.m_scale[block]);
    for (int k = 0; k < at.count; ++k) {
      const float root = decode_root<ScalarOps>(b[k], coding);
      const auto code = static_cast<uint32_t>(static_cast<int8_t>(a[k]));
      m[k] = decode_moment<ScalarOps>(code, root, coding);
      v[k] = ScalarOps::mul(root, root);
    }
  }
}

template <Moments M>
struct WarpBlock {
  const BlockItem& t;
  int64_t block;
  Scratch& x;

  __device__ inline Lane place(int lane) const {
    const int64_t first = block * kBlock + kEach * lane;
    const int64_t left = t.numel - first;
    const int count = left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0;
    constexpr size_t bytes = M == Moments::kInt8 ? 8 : 16;
    const bool wide = count == kEach && aligned(t.param, 16) && aligned(t.grad, 16) &&
                      aligned(t.low, 16) && aligned(t.m, bytes) && aligned(t.v, bytes) &&
                      aligned(t.ema, 16);
    return Lane{first, count, wide};
  }

  template <Kind L>
  __device__ inline void load_weights(const Lane& at, float* p) const {
    take<Kind::kF32>(t.param, at, p);
    if (L == Kind::kNone || !t.reconcile) return;
    for (int k = 0; k < at.count; ++k) p[k] = load_weight<ScalarOps, L>(t, at.first + k);
  }

  __device__ inline void average(const Lane& at, const float* p) const {
    if (t.ema == nullptr) return;
    float e[kEach];
    take<Kind::kF32>(t.ema, at, e);
    for (int k = 0; k < at.count; ++k)
      e[k] = ScalarOps::fma(t.ema_weight, ScalarOps::sub(p[k], e[k]), e[k]);
    put(t.ema, at, e);
  }

  __device__ inline void measure(const Lane& at, int lane, const float* g, const float* before,
                                 const float* p) const {
    if (t.sums == nullptr) return;
    const int64_t left = t.numel - block * kBlock;
    const int n = left < kBlock ? static_cast<int>(left) : static_cast<int>(kBlock);
    float moved[kEach];
    for (int k = 0; k < at.count; ++k) moved[k] = ScalarOps::sub(p[k], before[k]);
    const float* values[kSums] = {g, moved, p};
    for (int j = 0; j < kSums; ++j) {
      const double sum = block_sum(x, at, lane, n, values[j]);
      if (lane == 0) t.sums[j * t.sum_stride + block] = sum;
    }
  }

  template <Kind G, Kind L>
  __device__ inline void run() const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const Lane at = place(lane);
    const Spread<ScalarOps> s = spread<ScalarOps>(t.scalars);
    uint32_t random[kEach];
    if constexpr (M != Moments::kF32) load_random(t, block, lane, x, random);
    float p[kEach], g[kEach], m[kEach], v[kEach], before[kEach];
    load_weights<L>(at, p);
    take<G>(t.grad, at, g);
    load_moments<M>(t, block, at, m, v);
    for (int k = 0; k < at.count; ++k) {
      before[k] = p[k];
      const float root = adamw_element<ScalarOps>(p[k], g[k], m[k], v[k], s);
      if constexpr (M == Moments::kInt8) v[k] = root;
    }
    put(t.param, at, p);
    if constexpr (L != Kind::kNone) {
      uint32_t low[kEach];
      for (int k = 0; k < at.count; ++k) low[k] = round_low<ScalarOps, L>(p[k]);
      put16(t.low, at, low);
    }
    average(at, p);
    measure(at, lane, g, before, p);
    if constexpr (M == Moments::kF32) {
      put(static_cast<float*>(t.m), at, m);
      put(static_cast<float*>(t.v), at, v);
    } else if constexpr (M == Moments::kBF16) {
      uint32_t a[kEach], b[kEach];
      for (int k = 0; k < at.count; ++k) {
        a[k] = round_random_bf16<ScalarOps>(m[k], random[k]);
        b[k] = round_random_bf16<ScalarOps>(v[k], random[k]);
      }
      put16(t.m, at, a);
      put16(t.v, at, b);
    } else {
      encode(t, block, at, m, v, random);
    }
  }
};

template <Moments M>
__global__ void __launch_bounds__(kWarps* kLanes)
    blocks_kernel(const __grid_constant__ BlockTable table) {
  __shared__ Scratch scratch[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int turn = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (turn >= table.begins[table.count]) return;  // a whole warp
  const int which = find_item(table.begins, table.count, turn);
  const BlockItem& item = table.items[which];
  dispatch_kinds(item.grad_kind, item.low_kind,
                 WarpBlock<M>{item, turn - table.begins[which], scratch[warp]});
}

// One warp for each sum of each tensor.
__global__ void fold_blocks_kernel(const __grid_constant__ BlockTable table, double* out) {
  const BlockItem& t = table.items[blockIdx.x];
  const int64_t blocks = (t.numel + kBlock - 1) / kBlock;
  const double* from = t.sums + blockIdx.y * t.sum_stride;
  double sum = 0.0;
  for (int64_t b = threadIdx.x; b < blocks; b += kLanes) sum = __dadd_rn(sum, from[b]);
  sum = fold_warp(sum);
  if (threadIdx.x == 0) out[kSums * blockIdx.x + blockIdx.y] = sum;
}

void launch_table(const BlockTable& table, Moments moments, double* out, cudaStream_t s) {
  const int blocks = table.begins[table.count];
  const int grid = (blocks + kWarps - 1) / kWarps;
  if (grid > 0) {
    if (moments == Moments::kF32)
      blocks_kernel<Moments::kF32><<<grid, kWarps * kLanes, 0, s>>>(table);
    else if (moments == Moments::kBF16)
      blocks_kernel<Moments::kBF16><<<grid, kWarps * kLanes, 0, s>>>(table);
    else
      blocks_kernel<Moments::kInt8><<<grid, kWarps * kLanes, 0, s>>>(table);
    cuda_check_launch("adamw_blocks_");
  }
  if (out != nullptr) {
    fold_blocks_kernel<<<dim3(table.count, kSums), kLanes, 0, s>>>(table, out);
    cuda_check_launch("adamw_blocks_");
  }
}

}  // namespace

void launch_adamw_blocks(const BlockItem* items, const int64_t* begins, int64_t count,
                         Moments moments, double* out, void* stream) {
  for (int64_t i = 0; i < count;) {
    BlockTable table{};
    const int64_t first = i;
    for (; i < count && table.count < kTable; ++i) {
      const int64_t end = begins[i + 1] - begins[first];
      if (end > kMaxBlocks && i > first) break;
      if (end > kMaxBlocks) cuda_check(cudaErrorInvalidValue, "adamw_blocks_");
      table.items[table.count] = items[i];
      table.begins[++table.count] = static_cast<int>(end);
    }
    launch_table(table, moments, out == nullptr ? nullptr : out + kSums * first,
                 static_cast<cudaStream_t>(stream));
  }
}

void* mapped_pointer(void* host) {
  cudaPointerAttributes found{};
  if (cudaPointerGetAttributes(&found, host) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return found.type == cudaMemoryTypeUnregistered ? nullptr : found.devicePointer;
}

}  // namespace ts::optim
