// Kernels and launchers of the codecs with packed scales, and of what bitsandbytes publishes
// besides nf4: fp4, and int8 with one scale a row. n counts elements.
#pragma once

#include <cstdint>

#include "scale_data.h"
#include "ts/dtype.h"
#include "ts/isa.h"
#include "ts/numeric.h"

namespace ts::quant {

#define TS_QUANT_DECLARE(T)                                                                        \
  TS_DECLARE_ISA(void dequantize_nf4_dq(const uint8_t* codes, MapScaleData scales, T* out,         \
                                        int64_t n, int64_t block_size, int threads))               \
  TS_DECLARE_ISA(void dequantize_fp4(const uint8_t* codes, const float* absmax, T* out, int64_t n, \
                                     int64_t block_size, int threads))                             \
  TS_DECLARE_ISA(void dequantize_fp4_dq(const uint8_t* codes, MapScaleData scales, T* out,         \
                                        int64_t n, int64_t block_size, int threads))               \
  TS_DECLARE_ISA(void encode_int8_dq(const T* x, LogScaleData scales, int8_t* codes, int64_t n,    \
                                     int64_t block_size, int threads))                             \
  TS_DECLARE_ISA(void dequantize_int8_dq(const int8_t* codes, LogScaleData scales, T* out,         \
                                         int64_t n, int64_t block_size, int threads))              \
  TS_DECLARE_ISA(void dequantize_int8_rows(const int8_t* codes, const float* row_scales, T* out,   \
                                           int64_t n, int64_t columns, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of x or out: kF32, kBF16 or kF16. Work is queued on
// `stream`; nothing waits.
void launch_dequantize_nf4_dq(const uint8_t* codes, MapScaleData scales, void* out, DType dtype,
                              int64_t n, int64_t block_size, void* stream);
void launch_dequantize_fp4(const uint8_t* codes, const float* absmax, void* out, DType dtype,
                           int64_t n, int64_t block_size, void* stream);
void launch_dequantize_fp4_dq(const uint8_t* codes, MapScaleData scales, void* out, DType dtype,
                              int64_t n, int64_t block_size, void* stream);
void launch_encode_int8_dq(const void* x, DType dtype, LogScaleData scales, int8_t* codes,
                           int64_t n, int64_t block_size, void* stream);
void launch_dequantize_int8_dq(const int8_t* codes, LogScaleData scales, void* out, DType dtype,
                               int64_t n, int64_t block_size, void* stream);
void launch_dequantize_int8_rows(const int8_t* codes, const float* row_scales, void* out,
                                 DType dtype, int64_t n, int64_t columns, void* stream);

}  // namespace ts::quant
