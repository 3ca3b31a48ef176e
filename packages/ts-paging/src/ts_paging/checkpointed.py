"""Checkpointing that leaves nothing behind when the function raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed"]

_Result = TypeVar("_Result")


def checkpointed(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Run a function under non-reentrant checkpointing.

    Up to PyTorch 2.12, `checkpoint` leaves its hooks on saved tensors set when the function raises, until
    nobody holds the traceback; a notebook does, and so does a debugger. Whatever is saved meanwhile would be
    taken for a part of the run that failed. So an exception is led past it, and `checkpoint` ends as usual.

    Args:
        function: Run now, and once more in backward.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What it returns.

    Raises:
        BaseException: What the function raises.
    """
    failed: list[BaseException] = []
    ran = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        if ran:
            return function(*args, **kwargs)
        ran = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            failed.append(error)
            return None

    try:
        result: _Result = checkpoint(run, *args, use_reentrant=False, **kwargs)
    except RuntimeError:  # what it says of a first run that has begun to use a device comes second
        if not failed:
            raise
    if failed:
        raise failed.pop()  # kept in no frame, or it would hold itself
    return result
