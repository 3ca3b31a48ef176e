// Bytes of a transposed matrix on the GPU: 16-byte loads and stores, bytes exchanged in registers.
#include "blocks.cuh"
#include "operands.h"

namespace ts::quant {
namespace {

constexpr int kSide = 128;            // bytes of a tile's side
constexpr int kWords = kSide / 4;     // 32-bit words of its row
constexpr int kStride = kWords + 1;   // of shared memory
constexpr int kVectors = kSide / 16;  // 16-byte words of its row

// Rows are one word apart in their banks, groups of 16 rows four more: neither the loads (four rows
// of eight vectors a warp) nor the reads (eight groups of rows, four words) meet in a bank.
__device__ __forceinline__ int place(int row, int word) {
  return row * kStride + (row >> 4) * 4 + word;
}

// Column j of the 4 x 4 bytes in w[0..3], a row each, is word j of the result.
__device__ __forceinline__ void exchange(const uint32_t* w, uint32_t* out) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

// Rows and columns are multiples of 16, both sides are 16-byte aligned.
__global__ void transpose_kernel(const uint8_t* __restrict__ in, uint8_t* __restrict__ out,
                                 int64_t rows, int64_t columns, int64_t across, int64_t tiles) {
  __shared__ uint32_t shared[kSide * kStride + kSide / 4];
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t top = tile / across * kSide, left = tile % across * kSide;
    for (int i = threadIdx.x; i < kSide * kVectors; i += kThreads) {
      const int row = i / kVectors, vector = i % kVectors;
      if (top + row >= rows || left + vector * 16 >= columns) continue;
      const uint4 v =
          __ldg(reinterpret_cast<const uint4*>(in + (top + row) * columns + left + vector * 16));
      const int at = place(row, vector * 4);
      shared[at] = v.x, shared[at + 1] = v.y, shared[at + 2] = v.z, shared[at + 3] = v.w;
    }
    __syncthreads();
    // One thread takes 16 rows of 4 columns and makes 16 bytes of each of 4 rows of the output.
    const int lane = threadIdx.x % 32;
    const int group = lane % 8, word = threadIdx.x / 32 * 4 + lane / 8;
    if (top + group * 16 < rows && left + word * 4 < columns) {
      uint32_t made[4][4];  // [block of four rows][column]
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        uint32_t w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) w[r] = shared[place(group * 16 + block * 4 + r, word)];
        exchange(w, made[block]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint8_t* target = out + (left + word * 4 + c) * rows + top + group * 16;
        *reinterpret_cast<uint4*>(target) =
            make_uint4(made[0][c], made[1][c], made[2][c], made[3][c]);
      }
    }
    __syncthreads();
  }
}

// Any size and alignment: one byte a thread.
__global__ void transpose_each_kernel(const uint8_t* __restrict__ in, uint8_t* __restrict__ out,
                                      int64_t n, int64_t rows, int64_t columns) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const int64_t column = i / rows;
    out[i] = in[(i - column * rows) * columns + column];
  }
}

}  // namespace

void launch_transpose_bytes(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns,
                            void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (rows % 16 == 0 && columns % 16 == 0 && aligned(in, 16) && aligned(out, 16)) {
    const int64_t across = (columns + kSide - 1) / kSide;
    const int64_t tiles = across * ((rows + kSide - 1) / kSide);
    transpose_kernel<<<grid_for(tiles, 1), kThreads, 0, stream>>>(in, out, rows, columns, across,
                                                                  tiles);
  } else {
    const int64_t n = rows * columns;
    transpose_each_kernel<<<grid_for(n, kThreads), kThreads, 0, stream>>>(in, out, n, rows,
                                                                          columns);
  }
  cuda_check_launch("transpose_bytes");
}

uint64_t capture_id(void* stream_pointer) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t asked =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream_pointer), &status, &id);
  if (asked == cudaErrorStreamCaptureImplicit) {  // the legacy stream, while another one captures
    (void)cudaGetLastError();
    return 0;
  }
  cuda_check(asked, "capture_id");
  return status == cudaStreamCaptureStatusNone ? 0 : static_cast<uint64_t>(id) + 1;
}

}  // namespace ts::quant
