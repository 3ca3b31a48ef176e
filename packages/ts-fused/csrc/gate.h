// Constants of the gated activations. The tanh form of gelu is x * sigmoid(z),
// z = kGeluLinear x + kGeluCubic x^3.
#pragma once

namespace ts::fused {

constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.07135481627260025f;  // 0.044715 * 2 sqrt(2 / pi)

// Beyond it sigmoid(z) is 0 or 1 in fp32 for both activations. The activation takes gates from
// below no further, and the slope no gate at all: infinity times the 0 that belongs to it would be
// NaN.
constexpr float kGateLimit = 128.0f;

}  // namespace ts::fused
