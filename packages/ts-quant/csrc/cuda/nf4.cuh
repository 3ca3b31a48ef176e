// The tables of nf4 on the GPU.
#pragma once

#include "nf4.h"

namespace ts::quant {

// Device code cannot index the host's constexpr arrays.
struct Nf4Tables {
  float levels[16], thresholds[15];
};
constexpr Nf4Tables make_nf4_tables() {
  Nf4Tables t{};
  for (int i = 0; i < 16; ++i) t.levels[i] = kNf4Levels[i];
  for (int i = 0; i < 15; ++i) t.thresholds[i] = kNf4Thresholds[i];
  return t;
}
static __constant__ const Nf4Tables kNf4Tables = make_nf4_tables();

struct Nf4Levels {
  __device__ static __forceinline__ float level(int code) { return kNf4Tables.levels[code]; }
};

}  // namespace ts::quant
