"""How the Parameters of a model will be stored once they are packed: bytes, and what they take of a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ts_core import registry
from ts_core.blocks import parameter_bytes
from ts_paging.seats import Seat
from ts_quant import QuantizedTensor
from ts_quant.codecs import resolve
from ts_quant.codecs.base import Part, parts_of
from ts_quant.functional import meta_for
from ts_quant.matmul import how, matmul_of
from ts_quant.precision import NEXT_CODEC

__all__ = ["Stored"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """Answers for one codec.

    Attributes:
        device: Where the model computes.
        codec: Of the Parameters in `packed`.
        block_size: Its values per scale.
        packed: ids of the frozen Parameters that are going to be packed.
        precise: ids of those of them that move up one codec.
        double_quant: Whether their scales are quantized too, where the codec can.
        backward: Whether input gradients of fp8 weights, and those of nvfp4 weights, are packed too.
    """

    device: torch.device
    codec: str = "none"
    block_size: int = 64
    packed: frozenset[int] = frozenset()
    precise: frozenset[int] = frozenset()
    double_quant: bool = False
    backward: tuple[bool, bool] = (False, False)

    def nbytes(self, parameter: Tensor) -> int:
        """Bytes of a Parameter, packed or not."""
        if not self._will_be(parameter):
            return parameter_bytes(parameter)
        name, meta = self._coding(parameter)
        return int(registry.codec(name).packed_bytes(tuple(parameter.shape), meta))

    def staged(self, parameter: Tensor) -> int:
        """Of these, bytes that arrive beside a slot, to be decoded into it."""
        coded = isinstance(parameter, QuantizedTensor) or self._will_be(parameter)
        return self.nbytes(parameter) if coded and self._operands(parameter) is None else 0

    def seat(self, parameter: Tensor) -> Tensor:
        """Return a meta tensor as large as what a Parameter takes of a slot (see `ts_paging.seats`)."""
        operands = self._operands(parameter)
        if operands is None:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return Seat(_Coming(parameter, operands), self.device).like  # type: ignore[arg-type]

    def _will_be(self, parameter: Tensor) -> bool:
        return id(parameter) in self.packed and self.codec != "none"

    def _coding(self, parameter: Tensor) -> tuple[str, Any]:
        name = resolve(NEXT_CODEC[self.codec] if id(parameter) in self.precise else self.codec)
        return name, meta_for(registry.codec(name), self.block_size, self.double_quant)

    def _operands(self, parameter: Any) -> dict[str, Part] | None:
        """List what a Parameter will be multiplied with on the device; None: its decoded values."""
        shape = tuple(parameter.shape)
        if isinstance(parameter, QuantizedTensor):
            name = parameter.codec
            parts = {key: Part(part.dtype, tuple(part.shape)) for key, part in parameter.packed.items()}
        elif self._will_be(parameter):
            name, meta = self._coding(parameter)
            parts = parts_of(name, shape, meta) or {}
        else:
            return None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return None  # nobody can say what a machine that is not at hand multiplies
        options = matmul_of(parameter)._replace(backward=self.backward[name == "nvfp4"])
        chosen = how(name, shape, parameter.dtype, self.device, options)
        if chosen is None:
            return None
        return {**parts, **chosen[0].transposed_parts(shape)} if chosen[2] else parts


class _Coming:
    """A weight that is not packed yet, as a slot sees it."""

    def __init__(self, parameter: Tensor, parts: dict[str, Part]) -> None:
        self.shape, self.dtype, self._parts = parameter.shape, parameter.dtype, parts

    def slot_parts(self, device: torch.device) -> dict[str, Part]:
        """List what it computes with."""
        return self._parts
