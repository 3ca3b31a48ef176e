"""How much state in host memory is page-locked where nobody has said whether."""

from __future__ import annotations

from collections.abc import MutableMapping
from threading import Lock

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ts_core.memory import host_budget

__all__ = ["PinShare", "pin_share"]

_SHARE = 0.4


class PinShare:
    """Counts what all optimizers of this process have page-locked, up to a share of the RAM.

    Page-locked memory cannot be swapped or given to anybody else: a machine that has locked most of its RAM
    fails elsewhere.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            limit_bytes: What may be locked; None: 40 % of the RAM (of a container's, shared by its ranks).
        """
        self._limit = limit_bytes
        self._lock = Lock()
        # Of the state tensors that are still there.
        self._sizes: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self._held = 0

    def has_room(self, nbytes: int) -> bool:
        """Tell whether so many bytes more may be page-locked."""
        with self._lock:
            if self._limit is None:
                ram = host_budget()
                self._limit = int(_SHARE * ram.whole_bytes) // ram.ranks
            if self._held + nbytes > self._limit:
                self._held = sum(self._sizes.values())  # what has gone meanwhile counts no more
            return self._held + nbytes <= self._limit

    def note(self, made: torch.Tensor, nbytes: int) -> None:
        """Count a tensor until it goes."""
        with self._lock:
            self._sizes[made] = nbytes
            self._held += nbytes

    def follow(self, made: torch.Tensor, kept: torch.Tensor) -> None:
        """Count `kept`, a view of what was counted, in its place."""
        with self._lock:
            if made in self._sizes:
                self._sizes[kept] = self._sizes.pop(made)


#: Of this process.
pin_share = PinShare()
