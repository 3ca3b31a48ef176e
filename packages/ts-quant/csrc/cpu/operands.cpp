// Bytes of a transposed matrix on the CPU, tile by tile so that both sides stay in cache.
#include "operands.h"

#include <stdint.h>

#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

static constexpr int64_t kTile = 64;

static void transpose_tile(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns,
                           int64_t stride_in, int64_t stride_out) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) out[c * stride_out + r] = in[r * stride_in + c];
}

void transpose_bytes(const uint8_t* in, uint8_t* out, int64_t rows, int64_t columns, int threads) {
  const int64_t across = (columns + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
  parallel_for(across * down, 16, threads, [=](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t row = tile % down * kTile, column = tile / down * kTile;
      const int64_t high = rows - row < kTile ? rows - row : kTile;
      const int64_t wide = columns - column < kTile ? columns - column : kTile;
      transpose_tile(in + row * columns + column, out + column * rows + row, high, wide, columns,
                     rows);
    }
  });
}

}  // namespace ts::quant::TS_ISA
