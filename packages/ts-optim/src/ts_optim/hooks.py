"""Counting backward passes per parameter, so that a forgotten `step()` is an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ts_core.errors import StateError

__all__ = ["BackwardCounter"]


class BackwardCounter:
    """Raises in the backward pass that adds one gradient too many to a parameter.

    A tied parameter counts once a pass, however often it is used. The hook does not keep the counter alive.
    """

    def __init__(
        self,
        limit: int,
        name_of: Callable[[torch.Tensor], str],
        complete: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Start at zero.

        Args:
            limit: Accepted passes before `reset`.
            name_of: A method that gives a parameter's name for the message.
            complete: A method that is called with a parameter when its last accepted gradient is there.
        """
        self._limit = limit
        self._complete = None if complete is None else weakref.WeakMethod(complete)
        # Weak: the optimizer that owns this counter must go when its last user does.
        self._name_of = weakref.WeakMethod(name_of)
        self._counts: dict[int, int] = {}
        self._handles: dict[int, Any] = {}

    def watch(self, param: torch.Tensor) -> None:
        """Count this parameter's gradients from now on; one that needs no gradient is left for later."""
        if id(param) not in self._handles and param.requires_grad and param.is_leaf:
            me = weakref.ref(self)

            def hook(p: torch.Tensor) -> None:
                counter = me()
                if counter is not None:
                    counter._count(p)

            register: Any = param.register_post_accumulate_grad_hook  # torch leaves it untyped
            self._handles[id(param)] = register(hook)

    def _count(self, param: torch.Tensor) -> None:
        count = self._counts.get(id(param), 0) + 1
        self._counts[id(param)] = count
        name_of = self._name_of()
        if count > self._limit and name_of is not None:
            raise StateError(
                f"[OffloadAdamW] backward pass {count} since the last step() reached {name_of(param)}, "
                f"but accumulation_steps={self._limit}. Call step() after {self._limit} backward "
                f"pass{'es' if self._limit > 1 else ''}, zero_grad() to discard the gradients, or make the "
                "optimizer with accumulation_steps=None for any number"
            )
        complete = None if self._complete is None else self._complete()
        if count == self._limit and complete is not None:
            complete(param)

    def reset(self) -> None:
        """Start again at zero."""
        self._counts.clear()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
