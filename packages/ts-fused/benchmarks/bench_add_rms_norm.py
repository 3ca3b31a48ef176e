"""RMSNorm alone and with the residual addition, beside the expression of transformers, Liger and a copy.

One JSON line per shape, contender and phase: the best and the median time of a call in microseconds and the
bytes it has to move over the median; "copy" moves as many bytes by `Tensor.copy_`.
`python bench_add_rms_norm.py [--device cuda] [--quick] [--threads N]`
"""

from __future__ import annotations

import torch
from timing import Case, liger, main

from ts_fused import add_rms_norm, reference, rms_norm

FORM = (1e-6, 0.0, "llama", False)  # epsilon, offset, order of rounding, not in place
GPU_SHAPES = [(4096, 5120), (512, 5120), (8192, 4096)]
CPU_SHAPES = [(512, 576), (512, 2048), (1024, 4096)]


def cases(device: str, quick: bool) -> list[Case]:
    """Make the inputs of every case."""
    found = []
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    for rows, hidden in shapes[: 1 if quick else None]:
        for dtype in (torch.float32, torch.bfloat16):
            x, residual = (
                torch.randn(rows, hidden, device=device).to(dtype).requires_grad_() for _ in range(2)
            )
            weight = torch.randn(hidden, device=device).to(dtype).requires_grad_()
            one = x.numel() * dtype.itemsize
            found.append(
                Case(
                    name=f"{rows}x{hidden} norm",
                    dtype=dtype,
                    inputs=(x, weight),
                    moved_bytes=2 * one,
                    backward_bytes=3 * one,
                    contenders={"ts_fused": rms_norm, "expression": reference.rms_norm}
                    | liger(device, "ops.rms_norm", "LigerRMSNormFunction", *FORM),
                )
            )
            found.append(
                Case(
                    name=f"{rows}x{hidden} add and norm",
                    dtype=dtype,
                    inputs=(x, residual, weight),
                    moved_bytes=4 * one,
                    backward_bytes=4 * one,
                    contenders={"ts_fused": add_rms_norm, "expression": reference.add_rms_norm}
                    | liger(device, "ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction", *FORM),
                )
            )
    return found


if __name__ == "__main__":
    main("add_rms_norm", __doc__, cases)
