// GGUF blocks on the GPU, bit for bit the results of csrc/cpu/gguf.cpp.
// Blocks have sizes such as 18 or 210 bytes, so a tile of them is brought to shared memory in
// 16-byte words, and every thread unpacks eight values at a time out of it.
#include <cuda_pipeline_primitives.h>

#include "blocks.cuh"
#include "gguf.h"
#include "gguf_blocks.h"

namespace ts::quant {
namespace {

// Values of a tile. Large ones keep more bytes on their way; small tensors need a tile for every
// SM.
constexpr int kLargeTile = 16384;
constexpr int kSmallTile = 8192;
constexpr int64_t kLargeFrom =
    int64_t{kLargeTile} * 512;  // values; more tiles than any GPU runs at once
constexpr int kAtOnce = 2;  // groups of eight values that a thread unpacks before it stores them

template <int kTileValues, typename Block, typename T>
__global__ void gguf_kernel(const uint8_t* __restrict__ blocks, T* __restrict__ out, int64_t count,
                            bool wide_in, bool wide_out) {
  constexpr int kTile = kTileValues / Block::kValues;  // blocks; a multiple of 16 bytes of them
  static_assert(kTile * Block::kBytes % 16 == 0);
  __shared__ __align__(16) uint8_t staged[kTile * Block::kBytes];
  const int64_t tiles = (count + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first = tile * kTile;
    const int here = static_cast<int>(count - first < kTile ? count - first : kTile);
    const uint8_t* source = blocks + first * Block::kBytes;
    const int bytes = here * Block::kBytes;
    const int words = wide_in ? bytes / 16 : 0;
    for (int i = threadIdx.x; i < words; i += kThreads)  // all on their way at once
      __pipeline_memcpy_async(staged + i * 16, source + i * 16, 16);
    __pipeline_commit();
#pragma unroll 1
    for (int i = words * 16 + threadIdx.x; i < bytes; i += kThreads) staged[i] = __ldg(source + i);
    __pipeline_wait_prior(0);
    __syncthreads();
    const int values = here * Block::kValues;
    for (int start = 8 * threadIdx.x; start < values; start += 8 * kThreads * kAtOnce) {
      float v[kAtOnce][8];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int e = start + u * 8 * kThreads;
        if (e < values)
          Block::template run<8>(staged + e / Block::kValues * Block::kBytes, e % Block::kValues,
                                 v[u]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int e = start + u * 8 * kThreads;
        if (e < values) store_eight(out + first * Block::kValues + e, v[u], 8, wide_out);
      }
    }
    __syncthreads();  // before the next tile overwrites what others still read
  }
}

template <typename Block>
void launch(const uint8_t* blocks, void* data, DType dtype, int64_t count, cudaStream_t stream) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const bool large = count * Block::kValues >= kLargeFrom;
    const int tile = (large ? kLargeTile : kSmallTile) / Block::kValues;
    auto* kernel = large ? &gguf_kernel<kLargeTile, Block, T> : &gguf_kernel<kSmallTile, Block, T>;
    kernel<<<grid_for(count, tile), kThreads, 0, stream>>>(blocks, static_cast<T*>(data), count,
                                                           aligned(blocks, 16), aligned(data, 16));
  });
  cuda_check_launch("dequantize_gguf");
}

}  // namespace

void launch_dequantize_gguf(const uint8_t* blocks, void* out, DType dtype, int64_t count,
                            GgufType type, void* stream_pointer) {
  if (count == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  switch (type) {
    case GgufType::kQ4_0:
      return launch<GgufQ4_0>(blocks, out, dtype, count, stream);
    case GgufType::kQ4_1:
      return launch<GgufQ4_1>(blocks, out, dtype, count, stream);
    case GgufType::kQ5_0:
      return launch<GgufQ5_0>(blocks, out, dtype, count, stream);
    case GgufType::kQ5_1:
      return launch<GgufQ5_1>(blocks, out, dtype, count, stream);
    case GgufType::kQ8_0:
      return launch<GgufQ8_0>(blocks, out, dtype, count, stream);
    case GgufType::kQ4_K:
      return launch<GgufQ4_K>(blocks, out, dtype, count, stream);
    case GgufType::kQ5_K:
      return launch<GgufQ5_K>(blocks, out, dtype, count, stream);
    case GgufType::kQ6_K:
      return launch<GgufQ6_K>(blocks, out, dtype, count, stream);
  }
}

}  // namespace ts::quant
