"""Where an optimizer's state lives, and how that is changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ts_core.errors import ArgumentTypeError

from .placement import MemoryProvider, PlacePolicy
from .reports import Reports

__all__ = ["Housing"]


class Housing(Reports):
    """The part of `OffloadAdamW` that moves state."""

    def set_memory(self, provider: MemoryProvider | None) -> None:
        """Say where host state made from now on lives: at the first step, on loading, by `rehouse`.

        Args:
            provider: Called with a parameter, returns None for the default memory, or an object whose
                `empty(nbytes)` returns a uint8 CPU tensor, such as a file mapped into memory. Moments and
                masters are made of it. If it has `drop(tensor)`, that is called when such a tensor is given
                up. None: default memory for all. Copies and pickles of the optimizer have none.

        Raises:
            ArgumentTypeError: Not callable.
        """
        if provider is not None and not callable(provider):
            raise ArgumentTypeError(
                f"[OffloadAdamW.set_memory] provider: expected a function of a parameter, given {provider!r}"
            )
        self._maker.provider = provider

    @property
    def mode(self) -> str:
        """Where state in host memory is updated, as asked for: "cpu", "gpu" or "auto"."""
        return self._options.mode

    @property
    def placement(self) -> PlacePolicy:
        """Where the state of a CUDA parameter lives."""
        return self._maker.policy

    def set_placement(self, policy: PlacePolicy) -> None:
        """Say where state made from now on lives: at the first step, on loading, by `rehouse`.

        Args:
            policy: Called with a CUDA parameter, returns "host" or "device"; see `place_by_size`. Copies and
                pickles of the optimizer have the one it was made with.

        Raises:
            ArgumentTypeError: Not callable.
        """
        if not callable(policy):
            raise ArgumentTypeError(
                f"[OffloadAdamW.set_placement] policy: expected a function of a parameter, given {policy!r}"
            )
        self._maker.policy = policy

    def rehouse(self, params: Iterable[torch.Tensor]) -> None:
        """Move the state of parameters to where it belongs now; the bytes stay the same.

        Tensors move one by one and old memory is given up at once, so that there is never a second copy of
        more than one. If memory runs out in between, what has moved stays moved, and nothing is lost.

        Args:
            params: Parameters; those without state are left alone.

        Raises:
            ArgumentTypeError: The provider returned something that makes no memory.
        """
        self._drain()
        self._roster = None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param in params:
                if self._state.get(param):
                    slot = self._slots.pop(param, None)
                    if slot is not None and slot.staged:
                        self._maker.discard([slot.master])  # made anew from the parameter
                    self._maker.rehouse(param, self._state[param])
