#include "ts/numeric.h"
#include "ts/thread_pool.h"
namespace ts::quant::TS_ISA {
void probe(const float* x, float* y, int64_t n, int threads) {
  parallel_for(n, 1 << 14, threads, [&](int64_t b, int64_t e) { for (int64_t i = b; i < e; ++i) y[i] = to_float(to_bf16(x[i])); });
}
}
