"""LoRA linear layers, forward and backward, beside PEFT's expression and the base layer alone.

One JSON line per shape, contender and phase: the best and the median time of a call in microseconds. "base"
is the frozen layer without adapters, what no adapter can beat; "qkv" and "gate_up" are several layers
of one input. `python bench_lora.py [--device cuda] [--quick] [--threads N]`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timing import Case, main

from ts_fused import LoraAdapter, LoraProjection, lora_linears

RANK, SCALING = 16, 2.0
# (tokens, in_features, out_features of each projection)
GPU_SHAPES = {
    "o 14B": (512, 5120, [5120]),
    "qkv 14B": (512, 5120, [5120, 1024, 1024]),
    "gate_up 14B": (512, 5120, [13824, 13824]),
    "gate_up 14B long": (2048, 5120, [13824, 13824]),
}
CPU_SHAPES = {"o": (256, 576, [576]), "qkv": (256, 576, [576, 192, 192]), "gate_up": (256, 576, [1536, 1536])}


def expression(x: torch.Tensor, projections: Sequence[LoraProjection]) -> tuple[torch.Tensor, ...]:
    """What PEFT computes: adapters in their own dtype, converted back."""
    outs = []
    for projection in projections:
        out = F.linear(x, projection.weight, projection.bias)
        kind = out.dtype
        for a, b, scaling in projection.adapters:
            out = out + F.linear(F.linear(x.to(a.dtype), a), b) * scaling
        outs.append(out.to(kind))
    return tuple(outs)


def make(
    inner: int, outer: list[int], dtype: torch.dtype, adapter: torch.dtype, device: str
) -> list[LoraProjection]:
    """Random projections."""
    found = []
    for size in outer:
        weight = torch.randn(size, inner, device=device).mul_(inner**-0.5).to(dtype)
        a = torch.randn(RANK, inner, device=device).mul_(inner**-0.5).to(adapter).requires_grad_()
        b = torch.randn(size, RANK, device=device).mul_(0.01).to(adapter).requires_grad_()
        found.append(LoraProjection(weight, [LoraAdapter(a, b, SCALING)]))
    return found


def cases(device: str, quick: bool) -> list[Case]:
    """Make the inputs of every case."""
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    found = []
    for name, (tokens, inner, outer) in list(shapes.items())[: 1 if quick else None]:
        for dtype, adapter in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ):
            projections = make(inner, outer, dtype, adapter, device)
            x = torch.randn(tokens, inner, device=device).to(dtype).requires_grad_()
            factors = [t for p in projections for t in p.adapters[0][:2]]
            bare = [LoraProjection(p.weight) for p in projections]
            short = "fp32" if adapter == torch.float32 else "bf16"
            found.append(
                Case(
                    name=f"{name} {tokens}x{inner}, rank {RANK}, {short} adapters",
                    dtype=dtype,
                    inputs=(x, *factors),
                    moved_bytes=0,
                    backward_bytes=0,
                    contenders={
                        "ts_fused": lambda x, *_, p=projections: lora_linears(x, p),
                        "expression": lambda x, *_, p=projections: expression(x, p),
                        "base": lambda x, *_, p=bare: expression(x, p),
                    },
                )
            )
    return found


if __name__ == "__main__":
    main("lora", __doc__, cases)
