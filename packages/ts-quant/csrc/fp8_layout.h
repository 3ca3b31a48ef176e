// e4m3 codes with one scale per tile of a matrix, for CPU and GPU. Includes C headers only.
#pragma once

#include <stdint.h>

namespace ts::quant {

// Codes and values: (batches, rows, columns). Scales: (batches, down, across), one for each tile of
// tile_rows x tile_columns; the last tiles of a matrix may be smaller. A scale is a float, or one
// byte if e8m0: 2^(byte - 127).
struct Fp8Tiles {
  int64_t batches, rows, columns, tile_rows, tile_columns;
  bool e8m0;
  int64_t down() const { return rows / tile_rows + (rows % tile_rows != 0); }
  int64_t across() const { return columns / tile_columns + (columns % tile_columns != 0); }
  int64_t numel() const { return batches * rows * columns; }
};

}  // namespace ts::quant
