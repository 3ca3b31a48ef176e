"""Clipping for the Trainer by the norm that the optimizer would compute, wherever gradients are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from ts_optim import grad_sumsq

__all__ = ["can_clip", "clip_gradients_"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    grads = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [grad for grad in grads if grad is not None]


def can_clip(optimizer: Optimizer) -> bool:
    """Whether every gradient is of a kind that `clip_gradients_` takes: dense, fp32, bf16 or fp16."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(
        type(grad) in plain and grad.layout is torch.strided and grad.dtype in _DTYPES
        for grad in _gradients(optimizer)
    )


def clip_gradients_(optimizer: Optimizer, max_norm: float) -> torch.Tensor:
    """Scale the gradients of an optimizer's parameters to a global norm of at most `max_norm`.

        g <- g * min(1, max_norm / (norm + 1e-6))

    `torch.nn.utils.clip_grad_norm_` sums in fp32 and by device, so its last bits depend on where each
    gradient is; here every sum is float64, in a fixed order, as `OffloadAdamW(max_grad_norm=)` has it.

    Args:
        optimizer: Its parameters' `grad` are changed; `can_clip` says whether they can be.
        max_norm: Largest norm, or infinity to measure only.

    Returns:
        The norm before, fp32 on the CPU.
    """
    grads = _gradients(optimizer)
    places: dict[torch.device, list[int]] = {}
    for index, grad in enumerate(grads):
        places.setdefault(grad.device, []).append(index)
    sums = [0.0] * len(grads)
    for indices in places.values():
        values: Any = grad_sumsq([grads[i].detach().contiguous() for i in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            sums[index] = value
    total = 0.0
    for value in sums:
        total += value
    norm = math.sqrt(total)
    factor = max_norm / (norm + 1e-6)
    if (
        grads and not factor > 1.0
    ):  # a norm that is no number makes every gradient so, as torch's clipping does
        with torch.no_grad():
            torch._foreach_mul_(grads, factor)  # few launches on a GPU; the same bits
    return torch.tensor(norm)
