// Decoding of GGUF blocks: what the bindings call.
#pragma once

#include <cstdint>

#include "ts/dtype.h"
#include "ts/isa.h"
#include "ts/numeric.h"

namespace ts::quant {

// ggml's own numbers of the types.
enum class GgufType : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
};

#define TS_QUANT_DECLARE(T) \
  TS_DECLARE_ISA(           \
      void dequantize_gguf(const uint8_t* blocks, T* out, int64_t count, int type, int threads))

TS_QUANT_DECLARE(float)
TS_QUANT_DECLARE(bf16)
TS_QUANT_DECLARE(fp16)
#undef TS_QUANT_DECLARE

// Only in builds with CUDA; `count` blocks; `dtype` is that of out. Work is queued on `stream`;
// nothing waits.
void launch_dequantize_gguf(const uint8_t* blocks, void* out, DType dtype, int64_t count,
                            GgufType type, void* stream);

}  // namespace ts::quant
