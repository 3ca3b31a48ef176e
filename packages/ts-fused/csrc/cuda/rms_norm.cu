// RMSNorm on CUDA. Bound by memory: each row is read once from DRAM and a second time from cache.
// A row of up to 1024 elements belongs to a warp, a longer one to a block of 256 threads.
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
  if (!a.partial) return;
  const unsigned columns = static_cast<unsigned>((a.hidden + 31) / 32);
  with_type(weight, [&](auto w) {
    using W = typename decltype(w)::type;
    weight_gradient_kernel<<<columns, dim3(32, 8), 0, stream>>>(
        a.partial, static_cast<W*>(a.grad_weight), chunks, a.hidden);
  });
  cuda_check_launch("rms_norm_backward");
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

}  // namespace

void launch_rms_norm_forward(const NormForward& a, NormTypes types, void* stream) {
  const bool vectors = a.hidden % 8 == 0 && aligned16(a.x) && aligned16(a.weight) &&
                       aligned16(a.y) && aligned16(a.residual) && aligned16(a.sum);
  dispatch(types, vectors, a.hidden, [&](auto x, auto y, auto vec, auto threads) {
    forward<typename decltype(x)::type, typename decltype(y)::type, decltype(vec)::value,
            decltype(threads)::value>(a, types.weight, static_cast<cudaStream_t>(stream));
  });
}

void launch_rms_norm_backward(const NormBackward& a, NormTypes types, void* stream) {
  const bool vectors = a.hidden % 8 == 0 && aligned16(a.x) && aligned16(a.weight) &&
                       aligned16(a.grad_y) && aligned16(a.grad_x) && aligned16(a.partial) &&
                       aligned16(a.grad_sum);
  dispatch(types, vectors, a.hidden, [&](auto x, auto y, auto vec, auto threads) {
    backward<typename decltype(x)::type, typename decltype(y)::type, decltype(vec)::value,
             decltype(threads)::value>(a, types.weight, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace ts::fused
