// Decoding of GPTQ and AWQ matrices: integers with a scale and a zero per group of input channels,
// stored transposed, (columns, rows) for an output of (rows, columns).
//   value[n, k] = (code[k, n] - zero[g, n]) * scale[g, n],  g = g_idx[k] or k / group_size
#pragma once

#include <stdint.h>

#include "ts/numeric.h"

namespace ts::quant {

enum class GroupOrder : int {
  kGptq = 0,  // a word holds 32 / bits input channels of one output; zeros: outputs, in order
  kAwq = 1,   // a word holds 8 outputs of one input channel, as 0 2 4 6 1 3 5 7; zeros alike
};

enum class ScaleType : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

struct Groups {
  const int32_t* codes;
  const int32_t* zeros;  // (groups, rows * bits / 32)
  const void* scales;    // (groups, rows)
  const int32_t* g_idx;  // (columns), or null
  int64_t rows, columns, groups, group_size;
  ScaleType scale_type;
  GroupOrder order;
  int bits;         // 2, 4 or 8; AWQ: 4
  int zero_offset;  // added to what is stored, modulo 2^bits
};

// In an AWQ word output j lies in nibble 0 4 1 5 2 6 3 7.
TS_HOST_DEVICE static inline int awq_nibble(int j) { return (j & 1) * 4 + j / 2; }

TS_HOST_DEVICE static inline int group_zero(const Groups& m, int64_t group, int64_t row) {
  const int per = 32 / m.bits, mask = (1 << m.bits) - 1, j = static_cast<int>(row % per);
  const uint32_t word = static_cast<uint32_t>(m.zeros[group * (m.rows / per) + row / per]);
  const int place = m.order == GroupOrder::kAwq ? awq_nibble(j) : j;
  return (static_cast<int>(word >> place * m.bits) + m.zero_offset) & mask;
}

// A group outside the tables would read memory that is not theirs: the last one is taken.
TS_HOST_DEVICE static inline int64_t group_of(const Groups& m, int64_t column) {
  const int64_t group = m.g_idx ? m.g_idx[column] : column / m.group_size;
  return group < 0 || group >= m.groups ? m.groups - 1 : group;
}

}  // namespace ts::quant
