// Operands of low-precision products: what the bindings call.
#pragma once

#include <cstdint>

#include "ts/isa.h"

namespace ts::quant {

// out[c * rows + r] = in[r * columns + c], bytes.
TS_DECLARE_ISA(void transpose_bytes(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns,
                                    int threads))

#if defined(TS_WITH_CUDA)
void launch_transpose_bytes(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns,
                            void* stream);
// The number of the capture that a stream is in; 0 outside of one.
uint64_t capture_id(void* stream);
#endif

}  // namespace ts::quant
