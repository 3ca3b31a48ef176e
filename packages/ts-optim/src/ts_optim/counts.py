"""How many host threads update."""

from __future__ import annotations

import time
from typing import Any

import torch

from ts_core.cores import usable_cores

from . import _C

__all__ = ["threads_behind"]

_FEW = 4
_cores, _until = 0, 0.0


def _usable() -> int:
    """Ask again after a second: it is read from files."""
    global _cores, _until
    now = time.monotonic()
    if now >= _until:
        _cores, _until = usable_cores(), now + 1.0
    return _cores


def threads_behind(given: int | None) -> int:
    """Return how many threads take updates that run while the next pass is launched.

    Args:
        given: The option; None takes those of torch, at most the usable cores. In a process that uses CUDA
            one of four or more cores is left to the thread that launches kernels: a device that waits for it
            costs more than a core gives.

    Returns:
        At least 1.

    Example:
        >>> threads_behind(3)
        3
    """
    count = _C.thread_count(given or 0)
    cuda: Any = torch.cuda  # untyped there
    if given is None and count >= _FEW and cuda.is_initialized():
        return min(count, _usable() - 1)
    return count
