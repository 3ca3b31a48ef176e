// Constants of the tanh form of gelu as x * sigmoid(z), z = kGeluLinear x + kGeluCubic x^3.
#pragma once

namespace ts::fused {

constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.07135481627260025f;  // 0.044715 * 2 sqrt(2 / pi)

}  // namespace ts::fused
