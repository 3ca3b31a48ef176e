// Many small tensors copied, each from its dtype to that of its target, in one launch. A thread
// block takes kChunk elements of one tensor, so that a list of small matrices fills the GPU, where
// a launch with large pieces would leave most of it idle.
#include "device.cuh"
#include "kernels.h"
#include "ts/cuda.h"

namespace ts::fused {
namespace {

constexpr int kThreads = 128;
constexpr int kVec = 8;
constexpr int64_t kChunk = int64_t{kThreads} * kVec;
constexpr int kMost = 64;  // tensors of a launch; arguments of a kernel are at most 4 KiB

struct Batch {
  const void* src[kMost];
  void* dst[kMost];
  int64_t count[kMost];
  uint32_t end[kMost];  // chunks of this tensor and of those before it
  uint8_t from[kMost], to[kMost];
  bool vectors[kMost];
  int tensors;
};

template <int kSize>
__device__ inline void store_any(void* p, DType type, int64_t i, const float (&in)[kSize]) {
  if (type == DType::kF32)
    store<kSize>(static_cast<float*>(p) + i, in);
  else if (type == DType::kBF16)
    store<kSize>(static_cast<bf16*>(p) + i, in);
  else
    store<kSize>(static_cast<fp16*>(p) + i, in);
}

template <int kSize>
__device__ inline void copy_some(const Batch& batch, int at, int64_t i) {
  const DType from = static_cast<DType>(batch.from[at]), to = static_cast<DType>(batch.to[at]);
  float values[kSize];
  load_any<kSize>(batch.src[at], from, i, values);
  store_any<kSize>(batch.dst[at], to, i, values);
}

__global__ void __launch_bounds__(kThreads) copy_each_kernel(const __grid_constant__ Batch batch) {
  int low = 0, high = batch.tensors - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (blockIdx.x < batch.end[middle])
      high = middle;
    else
      low = middle + 1;
  }
  const int64_t chunk = blockIdx.x - (low ? batch.end[low - 1] : 0u);
  const int64_t count = batch.count[low];
  const int64_t begin = chunk * kChunk;
  const int64_t mine = begin + int64_t{threadIdx.x} * kVec;
  if (batch.vectors[low] && mine + kVec <= count) {
    copy_some<kVec>(batch, low, mine);
    return;
  }
  // The end of a tensor, or one that does not start on 16 bytes: neighbours in turn. With vectors
  // only the last thread with anything left comes here, for its own elements.
  if (batch.vectors[low]) {
    for (int64_t i = mine; i < count; ++i) copy_some<1>(batch, low, i);
    return;
  }
  const int64_t end = begin + kChunk < count ? begin + kChunk : count;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) copy_some<1>(batch, low, i);
}

}  // namespace

void launch_copy_each(const CopyEach* copies, int64_t tensors, void* stream) {
  for (const CopyEach* end = copies + tensors; copies != end;) {
    Batch batch{};
    uint32_t chunks = 0;
    int n = 0;
    for (; copies != end && n < kMost; ++copies) {
      if (copies->count == 0) continue;
      batch.src[n] = copies->src;
      batch.dst[n] = copies->dst;
      batch.count[n] = copies->count;
      batch.from[n] = static_cast<uint8_t>(copies->from);
      batch.to[n] = static_cast<uint8_t>(copies->to);
      batch.vectors[n] = aligned16(copies->src) && aligned16(copies->dst);
      chunks += static_cast<uint32_t>((copies->count + kChunk - 1) / kChunk);
      batch.end[n++] = chunks;
    }
    if (n == 0) return;
    batch.tensors = n;
    copy_each_kernel<<<chunks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch);
    cuda_check_launch("copy_each");
  }
}

}  // namespace ts::fused
