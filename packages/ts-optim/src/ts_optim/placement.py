"""Where optimizer state lives: host memory, memory that somebody provides, or beside a CUDA parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

__all__ = ["MemoryProvider", "Place", "PlacePolicy", "StateMemory", "place_by_size"]

Place = Literal["host", "device"]
PlacePolicy = Callable[[torch.Tensor], Place]


class StateMemory(Protocol):
    """Gives memory for state: files mapped into memory, for instance.

    It may also have `drop(tensor)`, called with a tensor made of its memory that is needed no more;
    `gives_zeros`, True if new memory is zeros; `lease`, see `ts_optim.leased`.
    """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 CPU tensor of `nbytes` elements; its contents do not matter."""
        ...


MemoryProvider = Callable[[torch.Tensor], StateMemory | None]

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
