"""The numbers of the cost model that no profile of a machine gives: fitted to measured steps.

`packages/trainstream/benchmarks/predicted.py --calibrate` fits them to its results.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

__all__ = ["Constants", "constants", "using"]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the time and the memory of a step are worked out with.

    Attributes:
        traffic: Bytes that PyTorch's own kernels move in the device's memory for each byte that autograd
            saves: unfused norms, rotary embedding, activations and casts read and write it again and again.
            Where the model computes on the CPU.
        gpu_traffic: The same on a GPU.
        host_work: Launches of Python, modules and autograd around each kernel, in launches; on the CPU.
        gpu_host_work: The same beside a GPU, whose launches are short.
        adapter_kernels: Launches of an adapter's forward pass.
        beside: Share of its own seconds that whatever goes on beside the longest costs all the same: it takes
            memory bandwidth and cores. Of plans that are as fast otherwise, the one that moves least is
            taken.
        saved: Bytes that autograd keeps of a block, over those that `ts_core.spec.saved_values` counts.
        work: Temporaries of the block at work, over what is saved of it.
        captured: Launches of a forward pass through a captured block: copies in and out, replay, its node.
        captured_back: The same of its backward pass.
        outside: Launches of a micro-batch beside a GPU that no block is at work in: its input, embedding and
            masks, the loss.
    """

    traffic: float = 16.0
    gpu_traffic: float = 24.0
    host_work: float = 3.0
    gpu_host_work: float = 6.0
    adapter_kernels: float = 6.0
    beside: float = 0.02
    saved: float = 1.0
    work: float = 0.15
    captured: float = 143.0
    captured_back: float = 75.0
    outside: float = 2000.0


_DEFAULT = Constants()
_now: contextvars.ContextVar[Constants] = contextvars.ContextVar("constants", default=_DEFAULT)


def constants() -> Constants:
    """Return those that hold now.

    Example:
        >>> constants().work
        0.15
    """
    return _now.get()


@contextlib.contextmanager
def using(those: Constants) -> Iterator[None]:
    """Let others hold for a while, in this thread.

    Args:
        those: The others.

    Example:
        >>> with using(Constants(work=1.0)):
        ...     constants().work
        1.0
    """
    token = _now.set(those)
    try:
        yield
    finally:
        _now.reset(token)
