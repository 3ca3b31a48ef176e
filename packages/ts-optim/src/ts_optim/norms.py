"""Sums of squares of gradients: those that were measured on the way to the host, and the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._ops import grad_sumsq
from .transfer import Work

__all__ = ["square_sums"]


def square_sums(works: Sequence[Work], threads: int) -> list[float]:
    """Sum the squares of each gradient, wherever it is, in the same tree; what is known is not read again.

    Args:
        works: The parameters of a step.
        threads: Host threads; 0 takes `torch.get_num_threads()`.

    Returns:
        One number for each.
    """
    sums = [0.0] * len(works)
    by_device: dict[torch.device, list[int]] = {}
    for i, work in enumerate(works):
        if work.grad.dtype is torch.float64:
            sums[i] = float(work.grad.square().sum())
        elif work.square_sum is not None:
            sums[i] = work.square_sum
        else:
            by_device.setdefault(work.grad.device, []).append(i)
    for indices in by_device.values():
        values = grad_sumsq([works[i].grad for i in indices], threads)
        for i, value in zip(indices, values.tolist(), strict=True):
            sums[i] = value
    return sums
