// nf4 and int8 with packed scales on the GPU, bit for bit the results of csrc/cpu/nested.cpp.
#include "blocks.cuh"
#include "eight_bit.cuh"
#include "encode.cuh"
#include "four_bit.cuh"
#include "nested.h"
#include "nf4.cuh"

namespace ts::quant {
namespace {

// Codes for scales that are there already: eight elements a thread. The smallest scale of a group
// may be much larger than the block needs; rounding to the nearest could then enlarge its values,
// so it is toward zero.
__device__ __forceinline__ unsigned code_for(float x, uint8_t scale_code, float scale) {
  if (scale_code != 1) return Int8::code(x, Int8::Scale{scale});
  if (scale == 0.0f) return 0;
  return static_cast<unsigned>(max(-127, min(127, __float2int_rz(__fdiv_rn(x, scale)))));
}

template <typename T>
__global__ void encode_log_kernel(const T* __restrict__ x, LogScales scales,
                                  int8_t* __restrict__ codes, int64_t groups,
                                  BlockOf block_of_group) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t g = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; g < groups; g += step) {
    const CodedScale raw = scales.load(block_of_group(g));
    const float scale = int8_scale(__fmul_rn(LogScales::ratio(raw.code), raw.group));
    float v[8];
    load8(x + g * 8, v);
    unsigned c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = code_for(v[i], raw.code, scale);
    store8<Int8>(codes, g * 8, c, 8);
  }
}

// Any block size and alignment, from element `begin` on: one element a thread.
template <typename T>
__global__ void encode_log_each_kernel(const T* __restrict__ x, LogScales scales,
                                       int8_t* __restrict__ codes, int64_t begin, int64_t n,
                                       BlockOf block_of_element) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const CodedScale raw = scales.load(block_of_element(i));
    const float scale = int8_scale(__fmul_rn(LogScales::ratio(raw.code), raw.group));
    codes[i] = static_cast<int8_t>(code_for(widen(x[i]), raw.code, scale));
  }
}

}  // namespace

void launch_dequantize_nf4_dq(const uint8_t* codes, MapScaleData scales, void* out, DType dtype,
                              int64_t n, int64_t block_size, void* stream) {
  launch_decode_four_bit<Nf4Levels>(codes, MapScales{scales}, out, dtype, n, block_size, stream,
                                    "dequantize_nf4_dq");
}

void launch_encode_int8_dq(const void* data, DType dtype, LogScaleData scales, int8_t* codes,
                           int64_t n, int64_t block_size, void* stream_pointer) {
  if (n == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = static_cast<const T*>(data);
    const bool wide = block_size % 8 == 0 && aligned(x, 16) && aligned(codes, 8);
    const int64_t groups = wide ? n / 8 : 0;
    if (groups > 0) {
      encode_log_kernel<<<grid_for(groups, kThreads), kThreads, 0, stream>>>(
          x, LogScales{scales}, codes, groups, block_of(block_size / 8));
      cuda_check_launch("encode_int8_dq");
    }
    const int64_t rest = n - groups * 8;
    if (rest > 0) {
      encode_log_each_kernel<<<grid_for(rest, kThreads), kThreads, 0, stream>>>(
          x, LogScales{scales}, codes, groups * 8, n, block_of(block_size));
      cuda_check_launch("encode_int8_dq");
    }
  });
}

void launch_dequantize_int8_dq(const int8_t* codes, LogScaleData scales, void* out, DType dtype,
                               int64_t n, int64_t block_size, void* stream) {
  launch_decode_eight_bit<TimesScale>(codes, LogScales{scales}, out, dtype, n, block_size, stream,
                                      "dequantize_int8_dq");
}

}  // namespace ts::quant
