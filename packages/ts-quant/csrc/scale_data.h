// Scales that are packed themselves, one byte a block and one fp32 per 256 blocks, and the
// constants of the formats of bitsandbytes. For host and device code; C headers only.
#pragma once

#include <stdint.h>

#include "ts/numeric.h"

namespace ts::quant {

// Blocks that share one fp32.
static constexpr int kNestedShift = 8;
// A map has 256 values, and after them the offset.
static constexpr int kMapSize = 257;

// absmax = map[code] * group + offset, rounded after each step: bitsandbytes' nested statistics.
struct MapScaleData {
  const uint8_t* codes;
  const float* groups;
  const float* map;
};

// absmax = 2^((code + 1) / 16 - 16) * group, 0 for code 0: from the group's largest down by 15.9
// octaves.
struct LogScaleData {
  const uint8_t* codes;
  const float* groups;
};

// fp32 nearest to 2^(k / 16).
static constexpr float kLogRoots[16] = {
    0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fe0p+0f, 0x1.3dea64p+0f,
    0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
    0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f,
};

// 1-bit sign, 2-bit exponent, 1-bit mantissa in an order of their own, over 12; index = code.
static constexpr float kFp4Levels[16] = {
    0.0f,  0.0625f / 12.0f,  8.0f / 12.0f,  1.0f,  4.0f / 12.0f,  0.5f,  2.0f / 12.0f,  0.25f,
    -0.0f, -0.0625f / 12.0f, -8.0f / 12.0f, -1.0f, -4.0f / 12.0f, -0.5f, -2.0f / 12.0f, -0.25f,
};

// The absmax that int8 stores for a block: 127 times the scale of the largest float, which rounds
// up, is infinite; its neighbour's is not.
TS_HOST_DEVICE static inline float int8_absmax(float absmax) {
  return absmax == 0x1.fffffep+127f ? 0x1.fffffcp+127f : absmax;
}

// fp32 nearest to 1 / 127: bitsandbytes multiplies by it after the scale of the row.
static constexpr float kInverse127 = 0x1.020408p-7f;

}  // namespace ts::quant
