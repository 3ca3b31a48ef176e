"""Using the weights of a module that may be paged, from outside its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["with_weights"]


def with_weights(module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that reads the Parameters of a module: a loss that takes the output head's weight.

    While it runs, a paged module's Parameters are what the module computes with: on the device, and with
    gradients that find their way to the true Parameters. They must be read from the module inside the
    function. A module that is not paged is left alone.

    Args:
        module: The module whose own Parameters are read; those of its submodules count too.
        function: Called once, or once more in backward if the module recomputes.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Example:
        >>> head = nn.Linear(2, 3, bias=False)
        >>> with_weights(head, lambda: head.weight.shape)
        torch.Size([3, 2])
    """
    run = getattr(module.__dict__.get("forward"), "with_weights", None)
    return function(*args, **kwargs) if run is None else run(function, args, kwargs)
