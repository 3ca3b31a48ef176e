"""Random numbers of a second run: the generators' states as they were at the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState", "as_it_was"]


class RandomState:
    """States of the CPU's generator and of a device's, at the moment it is made."""

    __slots__ = ("_cpu", "_device", "_index")

    def __init__(self, device: torch.device) -> None:
        """Keep the states of now."""
        self._cpu: Tensor = torch.default_generator.get_state()
        self._index: int | None = None
        self._device: Tensor | None = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
            # Seed and offset, 16 bytes in host memory: the GPU is not asked.
            self._device = _generator(self._index).get_state()

    def put_back(self) -> None:
        """Let the generators go on from here."""
        torch.default_generator.set_state(self._cpu)
        if self._device is not None:
            _generator(self._index).set_state(self._device)

    def same_on_cpu(self, other: RandomState) -> bool:
        """Whether nothing was drawn from the CPU's generator between two states."""
        return torch.equal(self._cpu, other._cpu)


def _generator(index: int | None) -> Any:
    assert index is not None
    return torch.cuda.default_generators[index]


@contextlib.contextmanager
def as_it_was(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draw the numbers that followed a state again; afterwards go on as if nothing had been drawn."""
    now = RandomState(device)
    state.put_back()
    try:
        yield
    finally:
        now.put_back()
