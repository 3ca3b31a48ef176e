"""What stands in the place of a module's `forward`."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["FusedForward"]


class FusedForward:
    """Runs something else in the place of a module's `forward`; copies and pickles have its own code again.

    Example:
        >>> module = nn.Identity()
        >>> stand_in = FusedForward(module, lambda module, x: x + 1)
        >>> stand_in.put()
        >>> module(1)
        2
        >>> stand_in.take_away()
        True
        >>> module(1)
        1
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Make it; `run` is called with the module first."""
        self._module, self._run = module, run
        self._before = module.__dict__.get("forward")
        self.__wrapped__: Callable[..., Any] = module.forward  # inspect.signature looks here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._run(self._module, *args, **kwargs)

    def put(self) -> None:
        """Take the place of the module's `forward`, on the instance."""
        self._module.__dict__["forward"] = self

    def take_away(self) -> bool:
        """Give the module back what was there before; False if someone else has taken the place since."""
        own = self._module.__dict__
        if own.get("forward") is not self:
            return False
        if self._before is None:
            del own["forward"]
        else:
            own["forward"] = self._before
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module has its own code."""
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return types.MethodType(type(self._module).forward, copy.deepcopy(self._module, memo))

    def __reduce__(self) -> Any:
        """The same for a pickled one, whose own dictionary is still empty when this is looked up."""
        return (
            (_itself, (self._before,)) if self._before is not None else (getattr, (self._module, "forward"))
        )


def _itself(value: Any) -> Any:
    return value
