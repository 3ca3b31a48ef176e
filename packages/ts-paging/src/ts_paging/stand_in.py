"""What stands in the place of a paged module's methods."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .block import PagedBlock

__all__ = ["StandIn"]


class StandIn:
    """What stands in the place of a method on the module; a copy of the module gets the class's own again."""

    def __init__(self, block: PagedBlock, name: str, run: Callable[..., Any]) -> None:
        """Stand in for the method `name` of a block's module; `run` is what is called instead."""
        self._block, self._name, self._run = block, name, run
        self.__wrapped__ = getattr(block.module, name)  # inspect.signature looks here

    def hand_over(self, block: PagedBlock, run: Callable[..., Any]) -> None:
        """Call another block's method from now on."""
        self._block, self._run = block, run

    def retire(self) -> None:
        """Call what stood here before: others have put a function around this one, and keep it."""
        self._run = self.__wrapped__

    @torch._disable_dynamo  # as torch.compiler.disable, which would import the compiler here and now
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands in."""
        return self._run(*args, **kwargs)

    @torch._disable_dynamo  # as torch.compiler.disable, which would import the compiler here and now
    def with_weights(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `ts_core.paged.with_weights` calls."""
        return self._block.seated().compute(function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module has its own method."""
        module, own = self._block.module, self._block.before.get(self._name)
        if own is not None:
            return copy.deepcopy(own, memo)
        return _method(memo[id(module)], self._name)

    def __reduce__(self) -> Any:
        """The same for a pickled one."""
        module, own = self._block.module, self._block.before.get(self._name)
        return (_itself, (own,)) if own is not None else (_method, (module, self._name))


def _itself(value: Any) -> Any:
    return value


def _method(module: nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)
