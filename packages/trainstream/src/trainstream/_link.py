"""How fast page-locked memory crosses to a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ts_core import registry

__all__ = ["link_rate"]

_BYTES = 32 << 20
_TIMES = 4


@functools.cache
def link_rate(device: torch.device) -> float:
    """Measure the link from host memory to a device, once in a process; it takes some 20 ms.

    Args:
        device: A CUDA device.

    Returns:
        Bytes a second, the best of a few copies of 32 MiB.

    Raises:
        torch.OutOfMemoryError: The device has no room for that.
    """
    source = registry.host_allocator().empty(_BYTES)
    target = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    cuda: Any = torch.cuda  # torch leaves streams and events untyped
    with cuda.device(device):
        stream = cuda.Stream(device)
        best = 0.0
        with cuda.stream(stream):
            for _ in range(_TIMES):
                start, end = (cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                best = max(best, _BYTES / (start.elapsed_time(end) / 1e3))
    return best
