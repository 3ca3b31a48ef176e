"""Where the optimizer state of a CUDA parameter lives: host memory or beside the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

__all__ = ["Place", "PlacePolicy", "place_by_size"]

Place = Literal["host", "device"]
PlacePolicy = Callable[[torch.Tensor], Place]

_SMALL_BYTES = 1 << 20
_THIN_SIDE = 128
_THIN_BYTES = 32 << 20


def place_by_size(param: torch.Tensor) -> Place:
    """Keep small trainables on the device, everything else on the host; the default policy.

    "device" for tensors under 1 MiB (norms, biases) and for thin matrices, up to 128 rows or columns and
    32 MiB (LoRA factors: all of a 7B model up to rank 128); "host" for the rest. It never changes a result:
    both sides compute the same bits.

    Args:
        param: A CUDA parameter; CPU parameters are always updated where they are.

    Returns:
        "host" or "device".

    Example:
        >>> place_by_size(torch.empty(16, 18944)), place_by_size(torch.empty(4096, 4096))
        ('device', 'host')
    """
    nbytes = param.numel() * param.element_size()
    thin = param.dim() == 2 and min(param.shape) <= _THIN_SIDE and nbytes <= _THIN_BYTES
    return "device" if nbytes < _SMALL_BYTES or thin else "host"
