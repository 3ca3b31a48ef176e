// Decoding of GPTQ and AWQ matrices: what the bindings call.
#pragma once

#include "groups_layout.h"
#include "ts/dtype.h"
#include "ts/isa.h"

namespace ts::quant {

#define TS_QUANT_DECLARE(T) \
  TS_DECLARE_ISA(void dequantize_groups(const Groups& m, T* out, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `dtype` is that of out. Work is queued on `stream`; nothing waits.
void launch_dequantize_groups(const Groups& m, void* out, DType dtype, void* stream);

}  // namespace ts::quant
