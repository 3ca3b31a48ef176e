// Decoding of published fp4 and fp8 layouts: what the bindings call.
#pragma once

#include "fp_layouts.h"
#include "ts/dtype.h"
#include "ts/isa.h"

namespace ts::quant {

#define TS_QUANT_DECLARE(T)                                                        \
  TS_DECLARE_ISA(void dequantize_published_fp4(const Fp4& m, T* out, int threads)) \
  TS_DECLARE_ISA(void dequantize_published_fp8(const Fp8& m, T* out, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of out. Work is queued on `stream`; nothing waits.
void launch_dequantize_published_fp4(const Fp4& m, void* out, DType dtype, void* stream);
void launch_dequantize_published_fp8(const Fp8& m, void* out, DType dtype, void* stream);

}  // namespace ts::quant
