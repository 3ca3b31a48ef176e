"""The gated activation, forward and backward, beside the expression of transformers, Liger and a copy.

One JSON line per shape, contender and phase: the best and the median time of a call in microseconds and the
bytes it has to move over the median (forward: two read, one written; backward: three read, two written);
"copy" moves as many bytes by `Tensor.copy_`.
`python bench_gated_mlp.py [--device cuda] [--quick] [--threads N]`
"""

from __future__ import annotations

import torch
from timing import Case, liger, main

from ts_fused import gated_mlp, reference

RIVALS = {"silu": ("ops.swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("ops.geglu", "LigerGELUMulFunction")}
GPU_SHAPES = [(4096, 5120), (512, 13824), (2048, 13824), (4096, 14336)]
CPU_SHAPES = [(512, 1536), (512, 8192), (2048, 4096)]


def cases(device: str, quick: bool) -> list[Case]:
    """Make the inputs of every case."""
    found = []
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    for rows, width in shapes[: 1 if quick else None]:
        for dtype in (torch.float32, torch.bfloat16):
            for activation in ("silu", "gelu_tanh"):
                gate, up = (
                    torch.randn(rows, width, device=device).to(dtype).requires_grad_() for _ in range(2)
                )
                found.append(
                    Case(
                        name=f"{rows}x{width} {activation}",
                        dtype=dtype,
                        inputs=(gate, up),
                        moved_bytes=3 * gate.numel() * dtype.itemsize,
                        backward_bytes=5 * gate.numel() * dtype.itemsize,
                        contenders={
                            "ts_fused": lambda g, u, a=activation: gated_mlp(g, u, a),
                            "expression": lambda g, u, a=activation: reference.gated_mlp(g, u, a),
                        }
                        # Its backward writes over its inputs, which changes values and no times.
                        | liger(device, *RIVALS[activation]),
                    )
                )
    return found


if __name__ == "__main__":
    main("gated_mlp", __doc__, cases)
