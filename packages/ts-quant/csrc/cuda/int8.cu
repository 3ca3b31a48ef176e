// int8 on the GPU, bit for bit the results of csrc/cpu/int8.cpp.
#include <type_traits>

#include "blocks.cuh"
#include "eight_bit.cuh"
#include "encode.cuh"
#include "kernels.h"

namespace ts::quant {
void launch_quantize_int8(const void* x, DType dtype, int8_t* codes, float* absmax, int64_t n,
                          int64_t block_size, void* stream) {
  launch_encode<Int8>(x, dtype, codes, absmax, n, block_size, static_cast<cudaStream_t>(stream),
                      "quantize_int8");
}

void launch_dequantize_int8(const int8_t* codes, const float* absmax, void* out, DType dtype,
                            int64_t n, int64_t block_size, void* stream) {
  launch_decode_eight_bit<TimesScale>(codes, PlainScales{absmax}, out, dtype, n, block_size, stream,
                                      "dequantize_int8");
}

}  // namespace ts::quant
