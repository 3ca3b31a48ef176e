"""How fast host threads step AdamW; the hardware profile imports this when it measures."""

from __future__ import annotations

import torch

from ts_core.hardware import seconds_per_call
from ts_core.memory import host_budget

from .offload import OffloadAdamW

__all__ = ["adamw_rates"]

_BYTES = 16  # of a parameter: weight, gradient and two moments
_LEAST = 4 << 20  # parameters


def adamw_rates(device: torch.device, quick: bool) -> dict[str, float]:
    """Time steps of fp32 weights and gradients in host memory, by format of moments.

    Args:
        device: Of the profile; the weights are in host memory whatever it is.
        quick: Take a small sample.

    Returns:
        Parameters a second by format of moments.

    Raises:
        RuntimeError: Too little RAM is free.

    Example:
        >>> sorted(adamw_rates(torch.device("cpu"), True))
        ['bfloat16', 'float32', 'int8']
    """
    # Beyond the caches of most processors, and little of what is free.
    numel = min((16 << 20) if quick else (64 << 20), host_budget().available_bytes // (16 * _BYTES))
    if numel < _LEAST:
        raise RuntimeError("too little RAM is free to measure AdamW beyond the caches")
    rates: dict[str, float] = {}
    for moments in ("float32", "bfloat16", "int8"):
        param = torch.nn.Parameter(torch.ones(numel))
        param.grad = torch.full_like(param, 0.5)
        optimizer = OffloadAdamW([param], lr=1e-3, moment_dtype=moments)

        def step(optimizer: OffloadAdamW = optimizer) -> None:
            optimizer.step()
            optimizer.synchronize()

        rates[moments] = numel / seconds_per_call(step, torch.device("cpu"), quick)
    return rates
