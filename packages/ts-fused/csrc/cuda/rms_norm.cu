// RMSNorm on CUDA. Bound by memory. A row of a head belongs to some lanes of a warp, one of up to
// 1024 elements to a warp, a longer one to a block, whose threads hold it in registers between the
// sum and what is made of it; rows of odd sizes and very long ones are read a second time, from
// cache.
#include "device.cuh"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

constexpr int kBlock = 256;
constexpr int64_t kWarpRow = 1024;
constexpr int64_t kSharedFloats = 12288;  // 48 KiB, what every card gives without asking

// Six blocks a multiprocessor where a block takes a row: without a bound five fit, and loads wait.
template <typename X, typename Y, int kVec, int kThreads>
__global__ void __launch_bounds__(kBlock, kThreads == 32 ? 1 : 6)
    rms_norm_forward_kernel(NormForward a, DType weight) {
  __shared__ float scratch[kBlock / 32];
  const int64_t h = a.hidden;
  for (int64_t r = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; r < a.rows;
       r += int64_t{gridDim.x} * blockDim.y) {
    const X* x = static_cast<const X*>(a.x) + r * h;
    Y* y = static_cast<Y*>(a.y) + r * h;
    float sum = 0.0f;
    for (int64_t i = int64_t{threadIdx.x} * kVec; i < h; i += kThreads * kVec) {
      float v[kVec];
      load<kVec>(x + i, v);
      if (a.residual) {
        float other[kVec];
        load<kVec>(static_cast<const X*>(a.residual) + r * h + i, other);
#pragma unroll
        for (int j = 0; j < kVec; ++j) v[j] = rounded<X>(v[j] + other[j]);
        store<kVec>(static_cast<X*>(a.sum) + r * h + i, v);
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += v[j] * v[j];
    }
    // A thread reads back what it wrote itself.
    if (a.residual) x = static_cast<const X*>(a.sum) + r * h;
    sum = row_sum<kThreads>(sum, scratch);
    const float rstd = 1.0f / sqrtf(sum / static_cast<float>(h) + a.eps);
    if (threadIdx.x == 0) a.rstd[r] = rstd;
    for (int64_t i = int64_t{threadIdx.x} * kVec; i < h; i += kThreads * kVec) {
      float v[kVec], w[kVec];
      load<kVec>(x + i, v);
      load_any<kVec>(a.weight, weight, i, w);
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        v[j] = a.gemma ? v[j] * rstd * (a.offset + w[j]) : rounded<X>(v[j] * rstd) * w[j];
      store<kVec>(y + i, v);
    }
  }
}

// Sum over the threads of a block of any whole number of warps, in a fixed order; every thread gets
// it. `scratch` holds a value per warp: who sums again takes another one in between, and one
// barrier is enough.
__device__ inline float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = scratch[0];
  for (int w = 1; w < warps; ++w) sum += scratch[w];
  return sum;
}

constexpr int kMostThreads = 1024;
constexpr int kWide = 8;  // elements of a load

// Eight elements as they are stored.
template <typename T>
struct Raw {
  uint4 words[sizeof(T) * kWide / 16];
  __device__ void take(const T* p) {
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(T)) * kWide / 16; ++w)
      words[w] = reinterpret_cast<const uint4*>(p)[w];
  }
  __device__ void widened(float (&out)[kWide]) const {
    const T* values = reinterpret_cast<const T*>(words);
#pragma unroll
    for (int j = 0; j < kWide; ++j) out[j] = widen(values[j]);
  }
};
// A block takes a row; thread t holds elements 8 t .. 8 t + 7, and kItems - 1 times those a block's
// width further on.
template <typename X, typename Y, int kItems>
__global__ void __launch_bounds__(kMostThreads / kItems)
    rms_norm_forward_kernel_held(NormForward a, DType weight) {
  __shared__ float scratch[kMostThreads / 32];
  const int64_t h = a.hidden, r = blockIdx.x;
  const X* x = static_cast<const X*>(a.x) + r * h;
  float v[kItems][kWide];
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kItems; ++n) {
    const int64_t i = (threadIdx.x + n * int64_t{blockDim.x}) * kWide;
    if (i < h) load<kWide>(x + i, v[n]);
  }
  if (a.residual) {
    const X* residual = static_cast<const X*>(a.residual) + r * h;
    X* total = static_cast<X*>(a.sum) + r * h;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const int64_t i = (threadIdx.x + n * int64_t{blockDim.x}) * kWide;
      if (i >= h) break;
      float other[kWide];
      load<kWide>(residual + i, other);
#pragma unroll
      for (int j = 0; j < kWide; ++j) v[n][j] = rounded<X>(v[n][j] + other[j]);
      store<kWide>(total + i, v[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kItems; ++n) {
    if ((threadIdx.x + n * int64_t{blockDim.x}) * kWide >= h) break;
#pragma unroll
    for (int j = 0; j < kWide; ++j) sum += v[n][j] * v[n][j];
  }
  sum = block_sum(sum, scratch);
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(h) + a.eps);
  if (threadIdx.x == 0) a.rstd[r] = rstd;
  Y* y = static_cast<Y*>(a.y) + r * h;
#pragma unroll
  for (int n = 0; n < kItems; ++n) {
    const int64_t i = (threadIdx.x + n * int64_t{blockDim.x}) * kWide;
    if (i >= h) break;
    float w[kWide];
    load_any<kWide>(a.weight, weight, i, w);
#pragma unroll
    for (int j = 0; j < kWide; ++j)
      v[n][j] = a.gemma ? v[n][j] * rstd * (a.offset + w[j]) : rounded<X>(v[n][j] * rstd) * w[j];
    store<kWide>(y + i, v[n]);
  }
}

// The gradient of the same: a block takes rows_per_chunk rows, one after the other, the next one
// read while one is worked out, and adds up its columns' share of the weight's gradient in
// registers. Thread t has elements 8 t .. 8 t + 7; blocks are of at most kMost threads, kBlocks a
// multiprocessor.
template <typename X, typename Y, bool kShare, int kMost, int kBlocks>
__global__ void __launch_bounds__(kMost, kBlocks)
    rms_norm_backward_kernel_held(NormBackward a, DType weight) {
  __shared__ float scratch[2][kMost / 32];
  const int64_t h = a.hidden, i = int64_t{threadIdx.x} * kWide;
  const bool mine = i < h;
  const float offset = a.gemma ? a.offset : 0.0f;
  const int64_t first = blockIdx.x * a.rows_per_chunk;
  const int64_t last = first + a.rows_per_chunk < a.rows ? first + a.rows_per_chunk : a.rows;
  float w[kWide] = {}, share[kWide] = {};
  Raw<Y> next_grad{};
  Raw<X> next_value{};
  if (mine && first < last) {
    next_grad.take(static_cast<const Y*>(a.grad_y) + first * h + i);
    next_value.take(static_cast<const X*>(a.x) + first * h + i);
    load_any<kWide>(a.weight, weight, i, w);
  }
  for (int64_t r = first; r < last; ++r) {
    const float rstd = a.rstd[r];
    const Raw<Y> grad = next_grad;
    const Raw<X> value = next_value;
    if (mine && r + 1 < last) {
      next_grad.take(static_cast<const Y*>(a.grad_y) + (r + 1) * h + i);
      next_value.take(static_cast<const X*>(a.x) + (r + 1) * h + i);
    }
    float g[kWide], v[kWide], c = 0.0f;
    grad.widened(g);
    value.widened(v);
#pragma unroll
    for (int j = 0; j < kWide; ++j) c += g[j] * (offset + w[j]) * (v[j] * rstd);
    if (a.grad_x) c = block_sum(c, scratch[r % 2]) / static_cast<float>(h);
    if (!mine) continue;
    grad.widened(g);
    value.widened(v);
    float out[kWide];
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      v[j] *= rstd;
      out[j] = (g[j] * (offset + w[j]) - v[j] * c) * rstd;
      if constexpr (kShare) share[j] += g[j] * (a.gemma ? v[j] : rounded<X>(v[j]));
    }
    if (!a.grad_x) continue;
    if (a.grad_sum) {
      float extra[kWide];
      load<kWide>(static_cast<const X*>(a.grad_sum) + r * h + i, extra);
#pragma unroll
      for (int j = 0; j < kWide; ++j) out[j] += extra[j];
    }
    store<kWide>(static_cast<X*>(a.grad_x) + r * h + i, out);
  }
  if constexpr (kShare)
    if (mine) store<kWide>(a.partial + blockIdx.x * h + i, share);
}

// Sum over groups of kGroup lanes, in a fixed order.
template <int kGroup>
__device__ inline float group_sum(float x) {
#pragma unroll
  for (int step = kGroup / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Rows of a head, as norms of queries and keys have them: a group of kGroup lanes takes one, each
// lane eight elements.
template <typename X, typename Y, int kGroup>
__global__ void __launch_bounds__(kBlock)
    rms_norm_forward_kernel_small(NormForward a, DType weight) {
  const int64_t h = a.hidden, i = int64_t{threadIdx.x % kGroup} * kWide;
  const int64_t r = blockIdx.x * int64_t{kBlock / kGroup} + threadIdx.x / kGroup;
  const bool mine = r < a.rows && i < h;  // all lanes take part in the sum
  float v[kWide] = {}, w[kWide] = {};
  if (mine) {
    load<kWide>(static_cast<const X*>(a.x) + r * h + i, v);
    load_any<kWide>(a.weight, weight, i, w);
    if (a.residual) {
      float other[kWide];
      load<kWide>(static_cast<const X*>(a.residual) + r * h + i, other);
#pragma unroll
      for (int j = 0; j < kWide; ++j) v[j] = rounded<X>(v[j] + other[j]);
      store<kWide>(static_cast<X*>(a.sum) + r * h + i, v);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kWide; ++j) sum += v[j] * v[j];
  sum = group_sum<kGroup>(sum);
  if (!mine) return;
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(h) + a.eps);
  if (i == 0) a.rstd[r] = rstd;
#pragma unroll
  for (int j = 0; j < kWide; ++j)
    v[j] = a.gemma ? v[j] * rstd * (a.offset + w[j]) : rounded<X>(v[j] * rstd) * w[j];
  store<kWide>(static_cast<Y*>(a.y) + r * h + i, v);
}

// The same of the gradient of x; the weight's is for the kernel below.
template <typename X, typename Y, int kGroup>
__global__ void __launch_bounds__(kBlock)
    rms_norm_backward_kernel_small(NormBackward a, DType weight) {
  const int64_t h = a.hidden, i = int64_t{threadIdx.x % kGroup} * kWide;
  const int64_t r = blockIdx.x * int64_t{kBlock / kGroup} + threadIdx.x / kGroup;
  const bool mine = r < a.rows && i < h;
  const float offset = a.gemma ? a.offset : 0.0f;
  float g[kWide] = {}, v[kWide] = {}, w[kWide] = {}, extra[kWide] = {}, rstd = 0.0f;
  if (mine) {
    load<kWide>(static_cast<const Y*>(a.grad_y) + r * h + i, g);
    load<kWide>(static_cast<const X*>(a.x) + r * h + i, v);
    load_any<kWide>(a.weight, weight, i, w);
    rstd = a.rstd[r];
    if (a.grad_sum) load<kWide>(static_cast<const X*>(a.grad_sum) + r * h + i, extra);
  }
  float c = 0.0f;
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    v[j] *= rstd;
    c += g[j] * (offset + w[j]) * v[j];
  }
  c = group_sum<kGroup>(c) / static_cast<float>(h);
  if (!mine) return;
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    g[j] = (g[j] * (offset + w[j]) - v[j] * c) * rstd;
    if (a.grad_sum) g[j] += extra[j];
  }
  store<kWide>(static_cast<X*>(a.grad_x) + r * h + i, g);
}

// Calls f(group) with the lanes of a row; false: it is longer than that.
template <typename F>
bool with_group(int64_t h, F&& f) {
  if (h <= 8 * kWide)
    f(std::integral_constant<int, 8>{});
  else if (h <= 16 * kWide)
    f(std::integral_constant<int, 16>{});
  else if (h <= 32 * kWide)
    f(std::integral_constant<int, 32>{});
  else
    return false;
  return true;
}

// Blocks for so many rows of a group each.
template <int kGroup>
unsigned blocks_of(int64_t rows) {
  return static_cast<unsigned>((rows + kBlock / kGroup - 1) / (kBlock / kGroup));
}

// Threads of a block that holds a row of h elements, `items` times eight each; 0: none does.
int held_by(int64_t h, int items) {
  if (h <= kWarpRow || h > int64_t{kMostThreads} * kWide) return 0;
  const int64_t threads = (h + kWide * items - 1) / (kWide * items);
  return static_cast<int>((threads + 31) / 32 * 32);
}

// One block takes rows_per_chunk rows and leaves their share of the weight gradient in
// partial[block]. Thread row ty takes rows ty, ty + blockDim.y, ... of the chunk and adds up its
// own columns, in shared memory if they fit.
template <typename X, typename Y, int kVec, int kThreads>
__global__ void __launch_bounds__(kBlock)
    rms_norm_backward_kernel(NormBackward a, DType weight, bool shared) {
  extern __shared__ float4 columns4[];
  __shared__ float scratch[kBlock / 32];
  const int64_t h = a.hidden;
  const float offset = a.gemma ? a.offset : 0.0f;
  float* partial = a.partial ? a.partial + blockIdx.x * h : nullptr;
  float* own = shared ? reinterpret_cast<float*>(columns4) + threadIdx.y * h : partial;
  if (partial)
    for (int64_t i = int64_t{threadIdx.x} * kVec; i < h; i += kThreads * kVec)
      for (int j = 0; j < kVec; ++j) own[i + j] = 0.0f;
  const int64_t first = blockIdx.x * a.rows_per_chunk;
  const int64_t last = first + a.rows_per_chunk < a.rows ? first + a.rows_per_chunk : a.rows;
  for (int64_t r = first + threadIdx.y; r < last; r += blockDim.y) {
    const Y* grad = static_cast<const Y*>(a.grad_y) + r * h;
    const X* x = static_cast<const X*>(a.x) + r * h;
    const float rstd = a.rstd[r];
    float c = 0.0f;
    if (a.grad_x) {
      for (int64_t i = int64_t{threadIdx.x} * kVec; i < h; i += kThreads * kVec) {
        float g[kVec], v[kVec], w[kVec];
        load<kVec>(grad + i, g);
        load<kVec>(x + i, v);
        load_any<kVec>(a.weight, weight, i, w);
#pragma unroll
        for (int j = 0; j < kVec; ++j) c += g[j] * (offset + w[j]) * (v[j] * rstd);
      }
      c = row_sum<kThreads>(c, scratch) / static_cast<float>(h);
    }
    for (int64_t i = int64_t{threadIdx.x} * kVec; i < h; i += kThreads * kVec) {
      float g[kVec], v[kVec], w[kVec], out[kVec];
      load<kVec>(grad + i, g);
      load<kVec>(x + i, v);
      load_any<kVec>(a.weight, weight, i, w);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        v[j] *= rstd;
        out[j] = (g[j] * (offset + w[j]) - v[j] * c) * rstd;
      }
      if (a.grad_x) {
        if (a.grad_sum) {
          float extra[kVec];
          load<kVec>(static_cast<const X*>(a.grad_sum) + r * h + i, extra);
#pragma unroll
          for (int j = 0; j < kVec; ++j) out[j] += extra[j];
        }
        store<kVec>(static_cast<X*>(a.grad_x) + r * h + i, out);
      }
      if (partial) {
        float sum[kVec];
        load<kVec>(own + i, sum);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[j] += g[j] * (a.gemma ? v[j] : rounded<X>(v[j]));
        store<kVec>(own + i, sum);
      }
    }
  }
  if (!partial || !shared) return;
  __syncthreads();
  const float* all = reinterpret_cast<const float*>(columns4);
  for (int64_t i = threadIdx.y * int64_t{blockDim.x} + threadIdx.x; i < h; i += kBlock) {
    float sum = all[i];
    for (unsigned t = 1; t < blockDim.y; ++t) sum += all[t * h + i];
    partial[i] = sum;
  }
}

// grad_weight[i] = sum over chunks of partial[chunk][i]: eight threads a column, then a tree.
template <typename W>
__global__ void weight_gradient_kernel(const float* partial, W* grad_weight, int64_t chunks,
                                       int64_t h) {
  __shared__ float sums[8][33];
  const int64_t i = blockIdx.x * int64_t{32} + threadIdx.x;
  float sum = 0.0f;
  if (i < h)
    for (int64_t k = threadIdx.y; k < chunks; k += 8) sum += partial[k * h + i];
  sums[threadIdx.y][threadIdx.x] = sum;
  for (int half = 4; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y == 0 && i < h) narrow(sums[0][threadIdx.x], grad_weight + i);
}

template <typename X, typename Y, int kVec, int kThreads>
void forward(const NormForward& a, DType weight, cudaStream_t stream) {
  constexpr int64_t kRows = kBlock / kThreads;
  const int64_t blocks = (a.rows + kRows - 1) / kRows;
  const dim3 threads(kThreads, kRows);
  const unsigned grid = static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
  rms_norm_forward_kernel<X, Y, kVec, kThreads><<<grid, threads, 0, stream>>>(a, weight);
  cuda_check_launch("rms_norm_forward");
}

// The gradient of the weight from the chunks' shares, if it is wanted.
void add_chunks(const NormBackward& a, DType weight, int64_t chunks, cudaStream_t stream) {
  if (!a.partial) return;
  const unsigned columns = static_cast<unsigned>((a.hidden + 31) / 32);
  with_type(weight, [&](auto w) {
    using W = typename decltype(w)::type;
    weight_gradient_kernel<<<columns, dim3(32, 8), 0, stream>>>(
        a.partial, static_cast<W*>(a.grad_weight), chunks, a.hidden);
  });
  cuda_check_launch("rms_norm_backward");
}

template <typename X, typename Y, int kVec, int kThreads>
void backward(const NormBackward& a, DType weight, cudaStream_t stream) {
  constexpr int kRows = kBlock / kThreads;
  const int64_t chunks = (a.rows + a.rows_per_chunk - 1) / a.rows_per_chunk;
  // A warp's row always fits: 8 warps x 1024 floats.
  const bool shared = a.partial && a.hidden * kRows <= kSharedFloats - kBlock / 32;
  const size_t bytes = shared ? a.hidden * kRows * sizeof(float) : 0;
  if (chunks > 0) {
    rms_norm_backward_kernel<X, Y, kVec, kThreads>
        <<<static_cast<unsigned>(chunks), dim3(kThreads, kRows), bytes, stream>>>(a, weight,
                                                                                  shared);
    cuda_check_launch("rms_norm_backward");
  }
  add_chunks(a, weight, chunks, stream);
}

// Calls f(x, y, vec, threads), each a type or a constant.
template <typename F>
void dispatch(NormTypes types, bool vectors, int64_t hidden, F&& f) {
  const auto sized = [&](auto x, auto y) {
    const auto wide = [&](auto vec) {
      if (hidden <= kWarpRow)
        f(x, y, vec, std::integral_constant<int, 32>{});
      else
        f(x, y, vec, std::integral_constant<int, kBlock>{});
    };
    if (vectors)
      wide(std::integral_constant<int, 8>{});
    else
      wide(std::integral_constant<int, 1>{});
  };
  with_type(types.x, [&](auto x) {
    if (types.out == types.x)
      sized(x, x);
    else
      sized(x, Tag<float>{});
  });
}

// Calls f(x, y), each a type, as the kernels above have them.
template <typename F>
void with_types(NormTypes types, F&& f) {
  with_type(types.x, [&](auto x) {
    if (types.out == types.x)
      f(x, x);
    else
      f(x, Tag<float>{});
  });
}

}  // namespace

void launch_rms_norm_forward(const NormForward& a, NormTypes types, void* stream) {
  const bool vectors = a.hidden % 8 == 0 && aligned16(a.x) && aligned16(a.weight) &&
                       aligned16(a.y) && aligned16(a.residual) && aligned16(a.sum);
  const bool grid_holds = a.rows > 0 && a.rows <= 0x7FFFFFFF;
  const auto small = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    with_types(types, [&](auto x, auto y) {
      rms_norm_forward_kernel_small<typename decltype(x)::type, typename decltype(y)::type, kGroup>
          <<<blocks_of<kGroup>(a.rows), kBlock, 0, static_cast<cudaStream_t>(stream)>>>(
              a, types.weight);
    });
    cuda_check_launch("rms_norm_forward");
  };
  if (vectors && grid_holds && with_group(a.hidden, small)) return;
  const int threads = held_by(a.hidden, a.hidden <= 2048 ? 1 : 2);
  if (vectors && threads && grid_holds) {
    with_types(types, [&](auto x, auto y) {
      using X = typename decltype(x)::type;
      using Y = typename decltype(y)::type;
      const auto grid = static_cast<unsigned>(a.rows);
      const auto s = static_cast<cudaStream_t>(stream);
      // Small blocks: more of them are at different stages.
      if (a.hidden <= 2048)
        rms_norm_forward_kernel_held<X, Y, 1><<<grid, threads, 0, s>>>(a, types.weight);
      else
        rms_norm_forward_kernel_held<X, Y, 2><<<grid, threads, 0, s>>>(a, types.weight);
    });
    cuda_check_launch("rms_norm_forward");
    return;
  }
  dispatch(types, vectors, a.hidden, [&](auto x, auto y, auto vec, auto threads) {
    forward<typename decltype(x)::type, typename decltype(y)::type, decltype(vec)::value,
            decltype(threads)::value>(a, types.weight, static_cast<cudaStream_t>(stream));
  });
}

void launch_rms_norm_backward(const NormBackward& a, NormTypes types, void* stream) {
  const bool vectors = a.hidden % 8 == 0 && aligned16(a.x) && aligned16(a.weight) &&
                       aligned16(a.grad_y) && aligned16(a.grad_x) && aligned16(a.partial) &&
                       aligned16(a.grad_sum);
  const int64_t chunks = (a.rows + a.rows_per_chunk - 1) / a.rows_per_chunk;
  const auto small = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    with_types(types, [&](auto x, auto y) {
      rms_norm_backward_kernel_small<typename decltype(x)::type, typename decltype(y)::type, kGroup>
          <<<blocks_of<kGroup>(a.rows), kBlock, 0, static_cast<cudaStream_t>(stream)>>>(
              a, types.weight);
    });
    cuda_check_launch("rms_norm_backward");
  };
  const bool one_each = vectors && a.grad_x && !a.partial && a.rows > 0 && a.rows <= 0x7FFFFFFF;
  if (one_each && with_group(a.hidden, small)) return;
  const int held = held_by(a.hidden, 1);
  if (vectors && held && chunks && chunks <= 0x7FFFFFFF) {
    const auto s = static_cast<cudaStream_t>(stream);
    with_types(types, [&](auto x, auto y) {
      using X = typename decltype(x)::type;
      using Y = typename decltype(y)::type;
      // Two blocks a multiprocessor, where registers allow: one loads while one waits for a sum.
      constexpr int kUsual = 640, kBlocks = sizeof(X) + sizeof(Y) == 4 ? 2 : 1;
      const auto grid = static_cast<unsigned>(chunks);
      if (a.partial && held <= kUsual)
        rms_norm_backward_kernel_held<X, Y, true, kUsual, kBlocks>
            <<<grid, held, 0, s>>>(a, types.weight);
      else if (a.partial)
        rms_norm_backward_kernel_held<X, Y, true, kMostThreads, 1>
            <<<grid, held, 0, s>>>(a, types.weight);
      else if (held <= kUsual)
        rms_norm_backward_kernel_held<X, Y, false, kUsual, 2>
            <<<grid, held, 0, s>>>(a, types.weight);
      else
        rms_norm_backward_kernel_held<X, Y, false, kMostThreads, 1>
            <<<grid, held, 0, s>>>(a, types.weight);
    });
    cuda_check_launch("rms_norm_backward");
    add_chunks(a, types.weight, chunks, s);
    return;
  }
  dispatch(types, vectors, a.hidden, [&](auto x, auto y, auto vec, auto threads) {
    backward<typename decltype(x)::type, typename decltype(y)::type, decltype(vec)::value,
             decltype(threads)::value>(a, types.weight, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace ts::fused
