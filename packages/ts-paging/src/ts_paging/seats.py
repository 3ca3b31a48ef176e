"""How one weight lies in a slot: decoded, or packed as its device multiplies it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .slots import own_view

__all__ = ["Seat"]

_ALIGN = 256  # bytes, of each packed tensor


class _Place(NamedTuple):
    offset: int  # bytes from where the weight begins
    like: Tensor


class Seat:
    """What one weight takes of a slot.

    A packed weight whose device multiplies packed operands (`ts_core.registry.SlottedWeight`) lies there
    packed, with what else it computes with; any other one lies there decoded.

    Attributes:
        like: A meta tensor as large as what it takes: the weight, or bytes.
    """

    def __init__(self, parameter: Tensor, device: torch.device) -> None:
        """Ask a Parameter what it computes with on a device."""
        slot_parts: Any = getattr(parameter, "slot_parts", None)
        parts = None if slot_parts is None else slot_parts(device)
        self._places: dict[str, _Place] | None = None
        if parts is not None:
            self._places, end = {}, 0
            for name, (dtype, shape) in parts.items():
                self._places[name] = _Place(end, torch.empty(shape, dtype=dtype, device="meta"))
                end += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
            self.like = torch.empty(end, dtype=torch.uint8, device="meta")
        elif getattr(parameter, "packed", None) is not None:
            self.like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        else:
            strides = parameter.stride()
            self.like = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self._packing = _packing(parameter)

    def __str__(self) -> str:
        """Name what fits."""
        packing = f", packed as {self._packing[0]}" if self.packed else ""
        return f"{tuple(self._shape)} and {self._dtype}{packing}"

    @property
    def packed(self) -> bool:
        """Whether it lies in the slot packed."""
        return self._places is not None

    def fits(self, parameter: Tensor) -> bool:
        """Whether another Parameter can lie in the same place."""
        if parameter.shape != self._shape or parameter.dtype != self._dtype:
            return False
        return not self.packed or _packing(parameter) == self._packing

    def places(self, region: Tensor) -> dict[str, Tensor] | None:
        """View what it takes as its packed tensors by name; None where it lies decoded."""
        if self._places is None:
            return None
        start = int(region.storage_offset()) * region.dtype.itemsize
        found = {}
        for name, (offset, like) in self._places.items():
            found[name] = own_view(region, start + offset, like)
        return found

    def over(self, parameter: Any, region: Tensor) -> Tensor:
        """Return the weight that the block computes with, over what it takes of the slot."""
        places = self.places(region)
        if places is None:
            return region
        made: Tensor = parameter.with_packed(places)
        return made


def _packing(parameter: Any) -> tuple[Any, Any]:
    """What else than shape and dtype decides which packed tensors there are; None for a plain weight."""
    return getattr(parameter, "codec", None), getattr(parameter, "meta", None)
