// Published fp4 and fp8 layouts, for CPU and GPU. Includes C headers only.
#pragma once

#include <stdint.h>

#include "fp_values.h"

namespace ts::quant {

// Codes: two a byte, the first in the low nibble, (stacks, rows, columns / 2). Scales: one byte a
// group of 32 (e8m0) or 16 (e4m3) columns. `tensor_scale`: one float, or null. The output is
// (stacks, rows, columns), or (stacks, columns, rows) if `transposed`.
struct Fp4 {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* tensor_scale;
  int64_t stacks, rows, columns;
  Fp4Scale kind;
  bool transposed;
};

// e4m3 codes (rows, columns); one float for each tile of tile_rows x tile_columns.
struct Fp8 {
  const uint8_t* codes;
  const float* scales;
  int64_t rows, columns, tile_rows, tile_columns;
};

}  // namespace ts::quant
