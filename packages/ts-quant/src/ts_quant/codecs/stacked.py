"""Matrices that were packed one by one and that a model holds as one tensor: the experts of a mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ts_core import registry
from ts_core.errors import ArgumentError, TrainStreamError, message

from .base import Packed, PackedCodec, Part
from .meta import Meta

__all__ = ["STACKED_CODEC", "StackedCodec"]

_OWN = ("codec", "piece_rows")
_PREFIX = "of_"


class StackedCodec(PackedCodec):
    """Pieces of `piece_rows` rows, each packed by another codec, one below the other.

    The packed tensors are the pieces' own, stacked along a new first dimension. The description holds the
    other codec's name, `piece_rows`, and the pieces' description with its options called `of_...`.

    Example:
        >>> from ts_quant.codecs import FP8_EXPORT_CODEC
        >>> meta = STACKED_CODEC.describe("fp8_export", FP8_EXPORT_CODEC.describe(), 4)
        >>> STACKED_CODEC.packed_bytes((3, 8, 16), meta)
        408
    """

    name = "stacked"
    encodes = False

    def describe(self, codec: str, meta: Meta, piece_rows: int) -> Meta:
        """Describe a stack.

        Args:
            codec: Name of the pieces' codec.
            meta: Their description.
            piece_rows: Rows of a piece.

        Returns:
            The description.
        """
        options = {f"{_PREFIX}{key}": value for key, value in meta.options}
        return Meta.make(meta.block_size, codec=codec, piece_rows=piece_rows, **options)

    def _pieces(self, meta: Meta) -> tuple[str, Meta, int]:
        """The pieces' codec, their description and their rows."""
        options: dict[str, Any] = {
            key.removeprefix(_PREFIX): value for key, value in meta.options if key not in _OWN
        }
        return str(meta.get("codec")), Meta.make(meta.block_size, **options), meta.get("piece_rows", 0)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse what `describe` does not make, and pieces that are not rows of the whole."""
        name, inner, rows = self._pieces(meta)
        try:
            found: Any = registry.codec(name)
            good = type(rows) is int and rows > 0 and name != self.name and hasattr(found, "parts")
            good = good and not inner.get("transposed") and meta == self.describe(name, inner, rows)
            if good:
                found.check_meta(inner, function)
        except (TrainStreamError, TypeError):
            good = False
        if not good:
            raise ArgumentError(message(function, "meta", "what describe() of 'stacked' makes", meta))

    def _count(self, shape: Sequence[int], rows: int) -> int:
        total = math.prod(shape[:-1])
        if len(shape) < 2 or rows < 1 or total % rows:
            raise ArgumentError(message(self.name, "shape", f"pieces of {rows} rows", tuple(shape)))
        return total // rows

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List the pieces' tensors, stacked; see the base class."""
        name, inner, rows = self._pieces(self.meta_of(meta))
        count = self._count(shape, rows)
        found: Any = registry.codec(name)
        pieces: dict[str, Part] = found.parts((rows, shape[-1]), inner)
        return {key: Part(dtype, (count, *size)) for key, (dtype, size) in pieces.items()}

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode piece by piece; see the base class."""
        name, inner, rows = self._pieces(self.meta_of(meta))
        count = self._count(shape, rows)
        found = registry.codec(name)
        if out is None:
            out = torch.empty(tuple(shape), dtype=dtype, device=next(iter(packed.values())).device)
        self.check_out(out, shape, dtype)
        if not out.is_contiguous():
            raise ArgumentError(
                message("dequantize", "out", "a contiguous tensor", f"strides {out.stride()}")
            )
        flat = out.view(-1, shape[-1])
        for index in range(count):
            piece = {key: part[index] for key, part in packed.items()}
            found.decode(piece, (rows, shape[-1]), dtype, inner, out=flat[index * rows : (index + 1) * rows])
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut whole pieces out; see the base class."""
        rows = self._pieces(self.meta_of(meta))[2]
        each = math.prod(shape[1:-1])
        if len(shape) < 3 or each % rows:
            return None
        first, count = start * each // rows, length * each // rows
        return {key: part.narrow(0, first, count) for key, part in packed.items()}


STACKED_CODEC = StackedCodec()
"""Pieces of any other codec."""
