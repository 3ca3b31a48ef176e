"""GGUF block types: rows of blocks of 32 or 256 values, each with its own scales, as ggml packs them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, message

from .. import _C
from .._decode_ops import Operand, define_decode
from .base import Packed, Part
from .meta import Meta
from .published import PublishedCodec

__all__ = ["GGUF_CODECS", "GgufCodec"]

# By ggml's number of the type: its name, values of a block, bytes of a block.
TYPES = {
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
}


def _expected(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    if numbers[0] not in TYPES:
        raise ArgumentError(message(function, "type", f"one of ggml's numbers {list(TYPES)}", numbers[0]))
    name, values, size = TYPES[numbers[0]]
    numel = math.prod(shape)
    if numel % values:
        raise ArgumentError(message(function, "shape", f"whole blocks of {values} ({name})", tuple(shape)))
    return [Operand((torch.uint8,), numel // values * size)]


GGUF = define_decode("gguf", ("blocks",), ("type",), _C.dequantize_gguf, _expected)


class GgufCodec(PublishedCodec):
    """One block type of GGUF files: the blocks of all rows in one uint8 tensor, `blocks`.

    Attributes:
        number: ggml's number of the type.
        block_bytes: Bytes of a block.

    Example:
        >>> GGUF_CODECS["Q4_K"].packed_bytes((4, 256), 256)
        576
    """

    operation = GGUF

    def __init__(self, number: int) -> None:
        """Make the codec of a type.

        Args:
            number: ggml's number of it.
        """
        name, self._values, self.block_bytes = TYPES[number]
        self.number = number
        self.name = f"gguf_{name}"

    def meta(self, block_size: int = 0, *, double_quant: bool = False) -> Meta:
        """The values of a block are fixed by the type; see the base class."""
        super().meta(block_size, double_quant=double_quant)
        return Meta(self._values)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Accept the type's own values of a block only."""
        if meta != Meta(self._values):
            raise ArgumentError(message(function, "meta", f"a block size of {self._values}", meta))

    def parts(self, shape: Sequence[int], meta: Meta | int = 0) -> dict[str, Part]:
        """List `blocks`; see the base class."""
        operand = _expected(self.name, shape, (self.number,))[0]
        return {"blocks": Part(torch.uint8, (operand.numel,))}

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called; see the base class."""
        return [packed["blocks"]], shape, (self.number,)

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out, where they are whole blocks; see the base class."""
        row = math.prod(shape[1:])
        if row % self._values:
            return None
        size = row // self._values * self.block_bytes
        return {"blocks": packed["blocks"].narrow(0, start * size, length * size)}

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Blocks lie in row-major order; see the base class."""
        return packed


GGUF_CODECS = {name.upper(): GgufCodec(number) for number, (name, _, _) in TYPES.items()}
"""By the name of the type in GGUF files, such as "Q4_K"."""
