"""Rotary embedding of q and k, forward and backward, beside the expression of transformers, Liger and a copy.

One JSON line per shape, contender and phase: the best time of a call in microseconds and the bytes it has to
move (each of q and k read and written once) over that time; "copy" moves as many bytes by `Tensor.copy_`. The
contenders take turns for several rounds. `python bench_rotary.py [--device cuda] [--quick] [--threads N]`
"""

from __future__ import annotations

import torch
from timing import Case, liger, main

from ts_fused import reference, rotary

# (batch, tokens, query heads, key heads, head size, elements that turn): the first is 4,096 x 5,120 of q.
GPU_SHAPES = [(1, 4096, 40, 8, 128, 128), (1, 512, 40, 8, 128, 128), (2, 2048, 32, 8, 128, 32)]
CPU_SHAPES = [(1, 512, 9, 3, 64, 64), (1, 512, 32, 8, 128, 128), (1, 512, 32, 32, 96, 32)]


def cases(device: str, quick: bool) -> list[Case]:
    """Make the inputs of every case."""
    found = []
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    for batch, tokens, heads, kv, dim, turned in shapes[: 1 if quick else None]:
        for dtype in (torch.float32, torch.bfloat16):
            q, k = (
                torch.randn(batch, tokens, h, dim, device=device).to(dtype).transpose(1, 2).requires_grad_()
                for h in (heads, kv)
            )
            angle = torch.rand(batch, tokens, turned, device=device) * 6.28
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            found.append(
                Case(
                    name=f"{batch}x{tokens}, {heads}+{kv} heads of {dim}, {turned} turned",
                    dtype=dtype,
                    inputs=(q, k),
                    moved_bytes=2 * (q.numel() + k.numel()) * dtype.itemsize,
                    backward_bytes=2 * (q.numel() + k.numel()) * dtype.itemsize,
                    contenders={
                        "ts_fused": lambda q, k, c=cos, s=sin: rotary(q, k, c, s),
                        "expression": lambda q, k, c=cos, s=sin: reference.rotary(q, k, c, s),
                    }
                    # It turns whole heads.
                    | (liger(device, "ops.rope", "LigerRopeFunction", cos, sin) if turned == dim else {}),
                )
            )
    return found


if __name__ == "__main__":
    main("rotary", __doc__, cases)
