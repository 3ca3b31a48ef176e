#pragma once
#include <cstdint>
#include "ts/isa.h"
namespace ts::quant {
TS_DECLARE_ISA(void probe(const float* x, float* y, int64_t n, int threads))
void launch_probe(const float* x, float* y, int64_t n, void* stream);
}
