// The row-wise half of cross-entropy on CUDA: a block per row, one pass for maximum and sum
// (online), a second one that overwrites the logits with the gradient. fp32; the sums of the
// threads are merged in float64 in a fixed order.
#include "device.cuh"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

struct Shape {
  float softcap, inverse_cap, scale;
};

template <bool kCap>
__device__ inline float shaped(float z, const Shape& s) {
  z = z * s.scale;
  if constexpr (kCap) return tanhf(z / s.softcap) * s.softcap;
  return z;
}

// Maximum and sum of e^(u - max) of a part of the row. A part that is -inf throughout has sum 0.
struct Part {
  float max;
  double sum;
};

__device__ inline Part merge(Part a, Part b) {
  const float top = a.max > b.max ? a.max : b.max;
  if (top == -INFINITY) return Part{top, a.sum + b.sum};
  return Part{top, a.sum * expf(a.max - top) + b.sum * expf(b.max - top)};
}

template <int kThreads>
__device__ Part row_merge(Part p, Part* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Part other{__shfl_down_sync(kAllLanes, p.max, step),
                     __shfl_down_sync(kAllLanes, p.sum, step)};
    p = merge(p, other);
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = p;
  __syncthreads();
  Part all = scratch[0];
  for (int w = 1; w < kThreads / 32; ++w) all = merge(all, scratch[w]);
  return all;
}

template <typename T, bool kCap, int kVec, int kThreads>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropyRows a, Shape shape) {
  __shared__ Part parts[kThreads / 32];
  __shared__ double sums[kThreads / 32];
  const int64_t r = blockIdx.x;
  T* row = static_cast<T*>(a.logits) + r * a.vocab;
  const int64_t target = a.targets[r];
  if (target == a.ignore_index || target < 0 || target >= a.vocab) {
    // A label outside the vocabulary is reported by the caller; here it must not be read.
    if (threadIdx.x == 0) a.losses[r] = target == a.ignore_index ? 0.0f : NAN;
    const float zero[kVec] = {};
    if (a.with_grad)
      for (int64_t i = int64_t{threadIdx.x} * kVec; i < a.vocab; i += kThreads * kVec)
        store<kVec>(row + i, zero);
    return;
  }
  float top = -INFINITY, sum_exp = 0.0f, sum = 0.0f;
  for (int64_t i = int64_t{threadIdx.x} * kVec; i < a.vocab; i += kThreads * kVec) {
    float u[kVec];
    load<kVec>(row + i, u);
    float best = top;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      u[j] = shaped<kCap>(u[j], shape);
      sum += u[j];
      best = u[j] > best ? u[j] : best;
    }
    if (best > top) {
      sum_exp *= expf(top - best);
      top = best;
    }
    const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum_exp += expf(u[j] - base);
  }
  const Part all = row_merge<kThreads>(Part{top, sum_exp}, parts);
  double total = 0.0;
  if (a.smoothing != 0.0f) total = row_sum<kThreads>(static_cast<double>(sum), sums);
  if (threadIdx.x == 0) {
    const float at_target = shaped<kCap>(widen(row[target]), shape);
    const double lse = log(all.sum);  // relative to the maximum
    double loss = lse + (static_cast<double>(all.max) - at_target);
    if (a.smoothing != 0.0f) {
      const double uniform = lse + (all.max - total / static_cast<double>(a.vocab));
      loss = (1.0 - a.smoothing) * loss + a.smoothing * uniform;
    }
    a.losses[r] = static_cast<float>(loss);
  }
  if (!a.with_grad) return;
  __syncthreads();  // the target's logit has been read
  const float inverse = static_cast<float>(1.0 / all.sum);
  const float spread = a.smoothing / static_cast<float>(a.vocab);
  for (int64_t i = int64_t{threadIdx.x} * kVec; i < a.vocab; i += kThreads * kVec) {
    float u[kVec];
    load<kVec>(row + i, u);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      u[j] = shaped<kCap>(u[j], shape);
      float g = expf(u[j] - all.max) * inverse - spread;
      if (i + j == target) g -= 1.0f - a.smoothing;
      if constexpr (kCap) {
        const float t = u[j] * shape.inverse_cap;
        g = g * (1.0f - t * t);
      }
      u[j] = g * shape.scale;
    }
    store<kVec>(row + i, u);
  }
}

template <typename S, typename O, int kVec>
__global__ void scale_cast_kernel(const S* src, const float* scale, O* out, int64_t n) {
  const float factor = scale[0];
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kVec;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kVec; i < n; i += step) {
    float v[kVec];
    load<kVec>(src + i, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] *= factor;
    store<kVec>(out + i, v);
  }
}

constexpr int kCountThreads = 1024;

__global__ void label_counts_kernel(const int64_t* targets, int64_t n, int64_t ignore_index,
                                    int64_t vocab, int64_t* counts) {
  __shared__ long long scratch[2][kCountThreads / 32];
  long long valid = 0, bad = 0;
  for (int64_t i = threadIdx.x; i < n; i += kCountThreads) {
    const int64_t t = targets[i];
    const bool ignored = t == ignore_index;
    const bool inside = t >= 0 && t < vocab;
    valid += !ignored && inside;
    bad += !ignored && !inside;
  }
  valid = row_sum<kCountThreads>(valid, scratch[0]);
  bad = row_sum<kCountThreads>(bad, scratch[1]);
  if (threadIdx.x == 0) {
    counts[0] = valid;
    counts[1] = bad;
  }
}

__global__ void loss_total_kernel(const float* losses, int64_t n, double* total) {
  __shared__ double scratch[kCountThreads / 32];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < n; i += kCountThreads) sum += losses[i];
  sum = row_sum<kCountThreads>(sum, scratch);
  if (threadIdx.x == 0) total[0] = sum;
}

template <typename T, bool kCap, int kVec>
void launch(const CrossEntropyRows& a, cudaStream_t stream) {
  const Shape shape{a.softcap, kCap ? 1.0f / a.softcap : 0.0f, a.scale};
  const unsigned grid = static_cast<unsigned>(a.rows);
  if (a.vocab <= 4096)
    cross_entropy_kernel<T, kCap, kVec, 128><<<grid, 128, 0, stream>>>(a, shape);
  else
    cross_entropy_kernel<T, kCap, kVec, 512><<<grid, 512, 0, stream>>>(a, shape);
  cuda_check_launch("cross_entropy_rows");
}

}  // namespace

void launch_cross_entropy_rows(const CrossEntropyRows& a, DType dtype, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  const bool vectors = a.vocab % 8 == 0 && aligned16(a.logits);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.softcap != 0.0f)
      vectors ? launch<T, true, 8>(a, s) : launch<T, true, 1>(a, s);
    else
      vectors ? launch<T, false, 8>(a, s) : launch<T, false, 1>(a, s);
  });
}

void launch_scale_cast(const void* src, DType src_type, const float* scale, void* out,
                       DType out_type, int64_t n, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  const bool vectors = n % 8 == 0 && aligned16(src) && aligned16(out);
  const int64_t wanted = ((vectors ? n / 8 : n) + 255) / 256;
  const unsigned grid = static_cast<unsigned>(wanted < 65536 ? wanted : 65536);
  with_type(src_type, [&](auto from) {
    with_type(out_type, [&](auto to) {
      using S = typename decltype(from)::type;
      using O = typename decltype(to)::type;
      const S* in = static_cast<const S*>(src);
      if (vectors)
        scale_cast_kernel<S, O, 8><<<grid, 256, 0, s>>>(in, scale, static_cast<O*>(out), n);
      else
        scale_cast_kernel<S, O, 1><<<grid, 256, 0, s>>>(in, scale, static_cast<O*>(out), n);
    });
  });
  cuda_check_launch("scale_cast");
}

void launch_label_counts(const int64_t* targets, int64_t n, int64_t ignore_index, int64_t vocab,
                         int64_t* counts, void* stream) {
  label_counts_kernel<<<1, kCountThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      targets, n, ignore_index, vocab, counts);
  cuda_check_launch("label_counts");
}

void launch_loss_total(const float* losses, int64_t n, double* total, void* stream) {
  loss_total_kernel<<<1, kCountThreads, 0, static_cast<cudaStream_t>(stream)>>>(losses, n, total);
  cuda_check_launch("loss_total");
}

}  // namespace ts::fused
