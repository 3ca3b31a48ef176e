"""Codecs with one code per element and one fp32 absmax per block of consecutive elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, message
from ts_core.options import not_yet

from .._ops import Format, check_block_size
from .base import Packed, PackedCodec, Part
from .meta import Meta

__all__ = ["BlockCodec"]


class BlockCodec(PackedCodec):
    """A codec that stores one code per element and one fp32 absmax per block.

    Example:
        >>> from ts_quant.codecs import NF4_CODEC
        >>> NF4_CODEC.packed_bytes(128, 64)
        72
    """

    def __init__(self, layout: Format) -> None:
        """Wrap a format.

        Args:
            layout: Layout and operations.
        """
        self._format = layout
        self.name = layout.name

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Keep the block size; see the base class."""
        not_yet("double_quant", double_quant, (False,))
        return Meta(block_size)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse block sizes that are not even, and options that the codec does not have."""
        check_block_size(function, meta.block_size)
        if meta.options:
            raise ArgumentError(message(function, "meta", "a block size and no options", meta))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes` and fp32 `absmax`, one-dimensional, of the values in row-major order."""
        numel, block_size = math.prod(shape), self.meta_of(meta).block_size
        return {
            "codes": Part(self._format.codes, (-(-numel // self._format.per_byte),)),
            "absmax": Part(torch.float32, (-(-numel // block_size),)),
        }

    def encode(self, tensor: torch.Tensor, meta: Meta | int, *, name: str = "tensor") -> Packed:
        """Pack a tensor; see the base class. On CUDA the call waits for the device once, for its check."""
        self.check_source(tensor, name)
        block_size = self.meta_of(meta).block_size
        check_block_size("quantize", block_size)
        with torch.no_grad():
            codes, absmax = self._format.quantize(tensor, block_size)
            # A block's absmax is its largest magnitude compared as bits: not finite if any element is not.
            if not absmax.is_meta and not bool(torch.isfinite(absmax).all()):
                bad = int((~torch.isfinite(absmax)).nonzero()[0]) * block_size
                raise self.not_finite(name, tensor, f"among the elements from flat index {bad} on")
        return {"codes": codes, "absmax": absmax}

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        codes, absmax, block_size = packed["codes"], packed["absmax"], self.meta_of(meta).block_size
        if out is None:
            return self._format.dequantize(codes, absmax, shape, dtype, block_size)
        self.check_out(out, shape, dtype)
        self._format.dequantize_out(codes, absmax, out, block_size)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out, where the cut falls between blocks."""
        row, block_size = math.prod(shape[1:]), self.meta_of(meta).block_size
        if (start * row) % block_size or (length * row) % block_size:
            return None
        first, count, per_byte = start * row, length * row, self._format.per_byte
        return {
            "codes": packed["codes"].narrow(0, first // per_byte, count // per_byte),
            "absmax": packed["absmax"].narrow(0, first // block_size, count // block_size),
        }

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Values are packed in row-major order: another shape of as many has the same bytes."""
        return packed
