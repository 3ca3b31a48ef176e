// The NF4 format: 16 levels, the thresholds between them, and how a block without range is scaled.
// Levels: QLoRA (arXiv:2305.14314), appendix E. Thresholds are the fp32 midpoints of neighbours.
#pragma once

namespace ts::quant {

static constexpr float kNf4Levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

static constexpr float nf4_midpoint(int i) { return (kNf4Levels[i] + kNf4Levels[i + 1]) / 2.0f; }

// A value x gets the code "number of thresholds below x": a tie goes to the lower level.
static constexpr float kNf4Thresholds[15] = {
    nf4_midpoint(0),  nf4_midpoint(1),  nf4_midpoint(2),  nf4_midpoint(3),  nf4_midpoint(4),
    nf4_midpoint(5),  nf4_midpoint(6),  nf4_midpoint(7),  nf4_midpoint(8),  nf4_midpoint(9),
    nf4_midpoint(10), nf4_midpoint(11), nf4_midpoint(12), nf4_midpoint(13), nf4_midpoint(14),
};

// The divisor of a block is at least this. A last, incomplete block stores the raised value too.
static constexpr float kNf4SmallestDivisor = 1e-38f;

// Code of 0.0, and the low nibble after an odd number of elements.
static constexpr unsigned kNf4Zero = 7;

}  // namespace ts::quant
