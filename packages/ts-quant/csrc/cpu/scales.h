// The scale of a block, from what is stored. Included by ISA sources only.
#pragma once

#include <stdint.h>

#include "scale_data.h"
#include "ts/numeric.h"

namespace ts::quant::TS_ISA {

struct PlainScales {
  const float* absmax;
  float operator()(int64_t block) const { return absmax[block]; }
};

struct MapScales : MapScaleData {
  explicit MapScales(MapScaleData data) : MapScaleData(data) {}
  float operator()(int64_t block) const {
    const float product = map[codes[block]] * groups[block >> kNestedShift];
    return product + map[kMapSize - 1];
  }
};

// The root has the exponent of 1; whole octaves are taken off it.
static inline float log_ratio(uint32_t code) {
  if (code == 0) return 0.0f;
  const uint32_t step = code + 1;
  return bits_float(float_bits(kLogRoots[step & 15u]) - ((16u - (step >> 4)) << 23));
}

struct LogScales : LogScaleData {
  explicit LogScales(LogScaleData data) : LogScaleData(data) {}
  float operator()(int64_t block) const {
    return log_ratio(codes[block]) * groups[block >> kNestedShift];
  }
};

}  // namespace ts::quant::TS_ISA
