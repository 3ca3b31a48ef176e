// Rounds a stretch of floats into an output of any element type. Included by ISA sources only.
#pragma once

#include "simd.h"

namespace ts::quant::TS_ISA {

template <typename T>
static inline void spread(T* out, const float* v, int64_t n) {
  int64_t i = 0;
#if defined(TS_QUANT_SIMD)
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(v + i));
#endif
  for (; i < n; ++i) out[i] = Convert<T>::from(v[i]);
}

}  // namespace ts::quant::TS_ISA
