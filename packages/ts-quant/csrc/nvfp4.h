// NVFP4: what the bindings call. A matrix of `rows` rows; codes: (rows, ceil(columns / 2)), the
// first of two in the low nibble; scales: (rows, ceil(columns / 16)), e4m3; one float for the
// tensor.
#pragma once

#include <cstdint>

#include "ts/dtype.h"
#include "ts/isa.h"
#include "ts/numeric.h"

namespace ts::quant {

// `peak` is one zero, which takes the bits of the largest magnitude.
#define TS_QUANT_DECLARE(T)                                                             \
  TS_DECLARE_ISA(void quantize_nvfp4(const T* x, uint8_t* codes, uint8_t* scales,       \
                                     float* tensor_scale, uint32_t* peak, int64_t rows, \
                                     int64_t columns, int threads))                     \
  TS_DECLARE_ISA(void dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales,     \
                                       const float* tensor_scale, T* out, int64_t rows, \
                                       int64_t columns, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of x or out: kF32, kBF16 or kF16. Work is queued on
// `stream`; nothing waits.
void launch_quantize_nvfp4(const void* x, DType dtype, uint8_t* codes, uint8_t* scales,
                           float* tensor_scale, uint32_t* peak, int64_t rows, int64_t columns,
                           void* stream);
void launch_dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, const float* tensor_scale,
                             void* out, DType dtype, int64_t rows, int64_t columns, void* stream);

}  // namespace ts::quant
