// What the bindings call: plain functions over pointers, sizes and a stream.
// n counts elements; codes hold n bytes (int8) or (n + 1) / 2 (nf4); absmax one float per block.
#pragma once

#include <cstdint>

#include "ts/dtype.h"
#include "ts/isa.h"
#include "ts/numeric.h"

namespace ts::quant {

#define TS_QUANT_DECLARE(T)                                                                        \
  TS_DECLARE_ISA(void quantize_nf4(const T* x, uint8_t* codes, float* absmax, int64_t n,           \
                                   int64_t block_size, int threads))                               \
  TS_DECLARE_ISA(void dequantize_nf4(const uint8_t* codes, const float* absmax, T* out, int64_t n, \
                                     int64_t block_size, int threads))                             \
  TS_DECLARE_ISA(void quantize_int8(const T* x, int8_t* codes, float* absmax, int64_t n,           \
                                    int64_t block_size, int threads))                              \
  TS_DECLARE_ISA(void dequantize_int8(const int8_t* codes, const float* absmax, T* out, int64_t n, \
                                      int64_t block_size, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of x or out: kF32, kBF16 or kF16. Work is queued on
// `stream`; nothing waits.
void launch_quantize_nf4(const void* x, DType dtype, uint8_t* codes, float* absmax, int64_t n,
                         int64_t block_size, void* stream);
void launch_dequantize_nf4(const uint8_t* codes, const float* absmax, void* out, DType dtype,
                           int64_t n, int64_t block_size, void* stream);
void launch_quantize_int8(const void* x, DType dtype, int8_t* codes, float* absmax, int64_t n,
                          int64_t block_size, void* stream);
void launch_dequantize_int8(const int8_t* codes, const float* absmax, void* out, DType dtype,
                            int64_t n, int64_t block_size, void* stream);

}  // namespace ts::quant
