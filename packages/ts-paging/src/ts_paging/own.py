"""What is a block's own and not in a slot: Parameters that are not paged, and buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .buffers import version_of

__all__ = ["Own", "parts_of", "versions_of"]


class Own:
    """Tensors that a recording reads, and what a look at them in each pass needs.

    There are no others for as long as the structure of the block holds: that watches the places they are in,
    and the attributes of packed ones.

    Attributes:
        tensors: They.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors apart once."""
        self.tensors = list(tensors)
        packed = [hasattr(tensor, "packed") for tensor in self.tensors]
        self._packed = [tensor for tensor, is_packed in zip(self.tensors, packed, strict=True) if is_packed]
        self._others = [t for t, is_packed in zip(self.tensors, packed, strict=True) if not is_packed]
        self._parts = [part for tensor in self._packed for part in parts_of(tensor)]
        # Others that wrap tensors may exchange them unseen.
        self._wrap = any(map(_wraps, self._others))

    def parts(self) -> list[Tensor]:
        """Return the plain tensors that they consist of."""
        others = self._others
        return [*([p for t in others for p in parts_of(t)] if self._wrap else others), *self._parts]

    def addresses(self, views: Sequence[Tensor]) -> list[int]:
        """Return where these and further tensors are."""
        there = [part for view in views for part in ((view,) if type(view) is Tensor else parts_of(view))]
        return [part.data_ptr() for part in (*there, *self.parts())]

    def layout(self) -> Hashable:
        """Return their forms, which a recording relies on."""
        return tuple([(part.shape, part.stride(), part.dtype) for part in self.parts()])

    def versions(self) -> list[int]:
        """Return how often they were written; a pending update lands before."""
        with torch._C.DisableTorchFunctionSubclass():
            packed = [version_of(tensor) for tensor in self._packed]
        return [*versions_of(self._others), *packed, *versions_of(self._parts)]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often tensors were written; -1 for one where nobody counts."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor counts no writes
        return [version_of(tensor) for tensor in tensors]


def parts_of(tensor: Any) -> list[Tensor]:
    """Return the plain tensors that one consists of."""
    packed: dict[str, Tensor] | None = getattr(tensor, "packed", None)
    if packed is not None:
        return list(packed.values())
    if _wraps(tensor):
        return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]
    return [tensor]


def _wraps(tensor: Any) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")
