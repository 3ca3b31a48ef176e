"""Gradients in a narrower format: how they are made, and what says whether that lost anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Flags", "NarrowBy", "SquareSum", "narrow_by_torch"]

SquareSum = Callable[[Sequence[Tensor]], Tensor]
NarrowBy = Callable[[Sequence[Tensor]], tuple[list[Tensor], Tensor, Tensor]]


class Flags:
    """Small numbers that come to the host, on the stream that makes them: not behind gradients that leave."""

    __slots__ = ("_event", "_host")

    def __init__(self, there: Tensor) -> None:
        """Ask for them.

        Args:
            there: On a device, or here.
        """
        self._host = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        self._host.copy_(there, non_blocking=True)
        self._event: Any = None
        if there.is_cuda:
            make: Any = torch.cuda.Event  # untyped there
            self._event = make(blocking=True)
            self._event.record(torch.cuda.current_stream(there.device))

    def done(self) -> bool:
        """Whether they are there."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[Any]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def narrow_by_torch(
    square_sum: SquareSum | None, grads: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Do what a sink's `narrow_by` does; without `square_sum` nobody reads the sums."""
    forms = [grad.to(torch.bfloat16) for grad in grads]
    # A NaN differs from itself, and goes as it is.
    lost = torch.stack([torch.ne(form, grad).any() for form, grad in zip(forms, grads, strict=True)])
    return forms, lost, lost if square_sum is None else square_sum(grads)
