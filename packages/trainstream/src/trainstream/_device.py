"""What a model says of its device while its first Parameter is on the host.

Many models answer ``model.device`` with the device of their first Parameter. That is where the embedding is,
and with a paged embedding it would be the host, while inputs belong where the model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["answer_with"]


def answer_with(model: nn.Module, device: torch.device) -> list[Callable[[], None]]:
    """Let every module of a model whose class has a ``device`` property answer with this device.

    The class of such a module is replaced by a subclass of the same name; copies and pickles are of the class
    as it was.

    Args:
        model: The model.
        device: Where it computes.

    Returns:
        What gives the modules their class back.
    """
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        kind = type(module)
        if isinstance(getattr(kind, "device", None), property) and module.device != device:
            module.__class__ = _answering(kind, device)
            undo.append(partial(setattr, module, "__class__", kind))
    return undo


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _answering(kind: type[nn.Module], device: torch.device) -> type[nn.Module]:
    def reduce(self: Any, protocol: Any) -> Any:
        mine = self.__class__
        self.__class__ = kind
        try:
            _, _, *rest = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = mine
        return (_blank, (kind,), *rest)

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "device": property(lambda self: device),
        "__reduce_ex__": reduce,
    }
    return type(kind.__name__, (kind,), names)
