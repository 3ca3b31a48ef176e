"""Codecs with one code per element and one fp32 absmax per block of consecutive elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ts_core.errors import ArgumentError, message
from ts_core.options import not_yet

from .._decode_ops import PackedPart, define_block_decode
from .._ops import LIBRARY, check_block_size, check_float
from .base import Packed, PackedCodec, Part
from .meta import Meta

__all__ = ["BlockCodec", "Format", "define_format"]

Pair = tuple[torch.Tensor, torch.Tensor]


class Format(NamedTuple):
    """One block-wise format: its layout and its operations.

    Packed tensors are one-dimensional, of `n` values in row-major order: codes `[ceil(n / per_byte)]`, of two
    in a byte the first in the high nibble, and absmax float32 `[ceil(n / block_size)]`.

    Attributes:
        name: "nf4" or "int8".
        codes: Dtype of the codes.
        per_byte: Codes in one byte.
        quantize: `(x, block_size) -> (codes, absmax)`.
        dequantize: `(codes, absmax, shape, dtype, block_size) -> Tensor`.
        dequantize_out: `(codes, absmax, out, block_size) -> None`.
    """

    name: str
    codes: torch.dtype
    per_byte: int
    quantize: Callable[[torch.Tensor, int], Pair]
    dequantize: Callable[..., torch.Tensor]
    dequantize_out: Callable[..., None]


def define_format(name: str, code_dtype: torch.dtype, per_byte: int, encode: Any, decode: Any) -> Format:
    """Declare the three operations of one block-wise format on top of its two native functions.

    Args:
        name: Name of the format.
        code_dtype: Dtype of the codes.
        per_byte: Codes in one byte.
        encode: `(x, codes, absmax, block_size)`, which writes codes and absmax.
        decode: `(codes, absmax, out, block_size)`, which writes out.

    Returns:
        Layout and operations.
    """
    function = f"quantize_{name}"
    parts = (
        PackedPart("codes", code_dtype, lambda numel, block_size: -(-numel // per_byte)),
        PackedPart("absmax", torch.float32, lambda numel, block_size: -(-numel // block_size)),
    )

    def fake(x: torch.Tensor, block_size: int) -> Pair:
        check_float(function, "x", x.dtype)
        check_block_size(function, block_size)
        codes, absmax = (
            torch.empty(part.size(x.numel(), block_size), dtype=part.dtype, device=x.device) for part in parts
        )
        return codes, absmax

    def run(x: torch.Tensor, block_size: int) -> Pair:
        codes, absmax = fake(x, block_size)
        encode(x.contiguous(), codes, absmax, block_size)
        return codes, absmax

    schema = f"{function}(Tensor x, int block_size) -> (Tensor codes, Tensor absmax)"
    quantize: Any = LIBRARY.define(schema, cpu=run, fake=fake)
    return Format(name, code_dtype, per_byte, quantize, *define_block_decode(name, parts, decode))


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
