"""Arguments of a block, taken apart into tensors and the rest, which says how to put them together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "OpaqueArgument", "flatten", "is_constant"]

_CONSTANTS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_LEAF = "tensor"  # stands for one in a description
_Spec = Any  # nested tuples of _LEAF and (type, value)


class OpaqueArgument(Exception):
    """An argument whose tensors cannot be seen, such as a key-value cache."""

    def __init__(self, value: object) -> None:
        """Say what it is."""
        name = type(value).__name__
        hint = " (training needs none: pass use_cache=False)" if name.endswith("Cache") else ""
        super().__init__(f"an argument of type {name}{hint}")


class Call:
    """The tensors of a call, and a hashable description of all else.

    Attributes:
        leaves: Tensors, in order.
        spec: Where they belong, and what stands between them.
    """

    __slots__ = ("leaves", "spec")

    def __init__(self, leaves: list[Tensor], spec: _Spec) -> None:
        """Keep both."""
        self.leaves, self.spec = leaves, spec

    def rebuild(self, leaves: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with other tensors in the places of the leaves."""
        each = iter(leaves)
        args, kwargs = self.spec
        return tuple([_value(entry, each) for entry in args]), {k: _value(v, each) for k, v in kwargs}


def is_constant(value: Any) -> bool:
    """Whether a value holds nothing else."""
    return type(value) in _CONSTANTS


def flatten(args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Take a call apart.

    Raises:
        OpaqueArgument: One is no plain tensor, no constant, and no list, tuple or dictionary of such.
    """
    leaves: list[Tensor] = []
    spec = (
        tuple([_entry(value, leaves) for value in args]),
        tuple([(key, _entry(value, leaves)) for key, value in kwargs.items()]),
    )
    return Call(leaves, spec)


def _entry(value: Any, leaves: list[Tensor]) -> _Spec:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.layout is not torch.strided or value.is_inference():
            raise OpaqueArgument(value)
        leaves.append(value)
        return _LEAF
    if kind in _CONSTANTS:
        # Zeros have signs, and are equal.
        return (str(value) if kind in (float, complex) and value == 0 else kind), value
    if kind is tuple or kind is list:
        return kind, tuple([_entry(each, leaves) for each in value])
    if kind is dict and all(type(key) is str for key in value):
        return kind, tuple([(key, _entry(each, leaves)) for key, each in value.items()])
    raise OpaqueArgument(value)


def _value(entry: _Spec, leaves: Iterator[Tensor]) -> Any:
    if entry is _LEAF:
        return next(leaves)
    kind, held = entry
    if kind is tuple or kind is list:
        return kind([_value(each, leaves) for each in held])
    if kind is dict:
        return {key: _value(each, leaves) for key, each in held}
    return held
