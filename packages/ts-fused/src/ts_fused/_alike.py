"""Which modules are so alike that one comparison holds for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["state_of"]

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}


def _value(value: Any, leave_out: frozenset[str]) -> Any:
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_value(each, leave_out) for each in value)
    if isinstance(value, dict):
        return tuple((key, _value(each, leave_out)) for key, each in value.items() if key not in leave_out)
    if isinstance(value, nn.Module) and not (value._parameters or value._buffers or value._modules):
        return state_of(value, leave_out)
    return id(value)  # the module holds it, so no other object has this one


def state_of(module: nn.Module, leave_out: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """Return the class and every attribute of a module that is neither tensor nor child, hashable.

    Values that cannot be compared count as themselves, so two modules that hold different ones differ.

    Args:
        module: The module.
        leave_out: Attributes, and keys of dictionaries among them, that do not matter.
    """
    own = module.__dict__
    kept = sorted(name for name in own if name not in _INTERNAL and name not in leave_out)
    return type(module), *((name, _value(own[name], leave_out)) for name in kept)
