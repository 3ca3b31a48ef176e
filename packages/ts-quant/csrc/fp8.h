// FP8 in its three layouts: what the bindings call.
#pragma once

#include "fp8_layout.h"
#include "ts/dtype.h"
#include "ts/isa.h"
#include "ts/numeric.h"

namespace ts::quant {

#define TS_QUANT_DECLARE(T)                                                                        \
  TS_DECLARE_ISA(                                                                                  \
      void quantize_fp8(const T* x, uint8_t* codes, void* scales, const Fp8Tiles& m, int threads)) \
  TS_DECLARE_ISA(void dequantize_fp8(const uint8_t* codes, const void* scales, T* out,             \
                                     const Fp8Tiles& m, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of x or out: kF32, kBF16 or kF16. Work is queued on
// `stream`; nothing waits.
void launch_quantize_fp8(const void* x, DType dtype, uint8_t* codes, void* scales,
                         const Fp8Tiles& m, void* stream);
void launch_dequantize_fp8(const uint8_t* codes, const void* scales, void* out, DType dtype,
                           const Fp8Tiles& m, void* stream);

}  // namespace ts::quant
