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
        host_work: Launches of Python, modules and autograd around each kernel, in launches.
        adapter_kernels: Launches of an adapter's forward pass.
        beside: Share of its own seconds that whatever goes on beside the longest costs all the same: it takes
            memory bandwidth and cores. Of plans that are as fast otherwise, the one that moves least is
            taken.
        saved: Bytes that autograd keeps of a block, over those that `ts_core.spec.saved_values` counts.
        work: Temporaries of the block at work, over what is saved of it.
        captured: Launches of a pass through a captured block: copies in and out, the replay, its node.
    """

    traffic: float = 16.0
    host_work: float = 3.0
    adapter_kernels: float = 6.0
    beside: float = 0.02
    saved: float = 1.0
    work: float = 0.15
    captured: float = 16.0


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
