r"""What bitsandbytes publishes besides nf4, kept as it came: fp4, and int8 with one scale a row.

**bnb_fp4.** $\hat x_i = \mathrm{level}(q_i)\, a_b$ with 16 levels of one sign, two exponent and one mantissa
bit; plain fp32 scales, or quantized ones in the map form (see `nested`).

**bnb_int8** (LLM.int8). $\hat x_{ij} = (q_{ij}\, s_i) \cdot \mathrm{fl}(1 / 127)$ with $s_i$ the absmax of
row $i$, rounded after each product.

Sources: QLoRA, arXiv:2305.14314; LLM.int8(), arXiv:2208.07339.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, message

from .. import _C
from .._decode_ops import DecodeOps, PackedPart, define_block_decode
from .._ops import check_block_size
from .base import Packed, PackedCodec, Part
from .meta import Meta
from .nested import GROUP, MAP_PARTS

__all__ = ["BNB_FP4_CODEC", "BNB_INT8_CODEC", "FP4", "FP4_DQ", "INT8_ROWS"]

_CODES = PackedPart("codes", torch.uint8, lambda numel, block_size: -(-numel // 2))
_ABSMAX = PackedPart("absmax", torch.float32, lambda numel, block_size: -(-numel // block_size))

FP4 = define_block_decode("fp4", (_CODES, _ABSMAX), _C.dequantize_fp4)
"""Operations that decode fp4 with fp32 scales."""

FP4_DQ = define_block_decode("fp4_dq", (_CODES, *MAP_PARTS), _C.dequantize_fp4_dq)
"""Operations that decode fp4 with quantized scales."""


def _check_columns(function: str, columns: int) -> None:
    if columns < 1:
        raise ArgumentError(message(function, "block_size", "the length of a row, >= 1", columns))


INT8_ROWS = define_block_decode(
    "int8_rows",
    (
        PackedPart("codes", torch.int8, lambda numel, columns: numel),
        PackedPart("row_absmax", torch.float32, lambda numel, columns: -(-numel // columns)),
    ),
    _C.dequantize_int8_rows,
    check_size=_check_columns,
)
"""Operations that decode int8 with a scale per row; their block size is the length of a row."""


class _Fp4Codec(PackedCodec):
    """fp4 of bitsandbytes, decoded as published."""

    name = "bnb_fp4"
    encodes = False

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Keep the block size and whether the scales are quantized."""
        return Meta.make(block_size, double_quant=bool(double_quant))

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse block sizes that are not even, and options that the codec does not have."""
        check_block_size(function, meta.block_size)
        if meta.options not in ((), (("double_quant", True),)):
            expected = "a block size and no option but double_quant=True"
            raise ArgumentError(message(function, "meta", expected, meta))

    def _form(self, meta: Meta) -> tuple[DecodeOps, tuple[PackedPart, ...]]:
        return (FP4_DQ, (_CODES, *MAP_PARTS)) if meta.options else (FP4, (_CODES, _ABSMAX))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List the packed tensors, one-dimensional, of the values in row-major order."""
        described, numel = self.meta_of(meta), math.prod(shape)
        parts = self._form(described)[1]
        return {part.name: Part(part.dtype, (part.size(numel, described.block_size),)) for part in parts}

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode straight from what is stored; see the base class."""
        described = self.meta_of(meta)
        ops, parts = self._form(described)
        tensors = [packed[part.name] for part in parts]
        if out is None:
            return ops.new(*tensors, shape, dtype, described.block_size)
        self.check_out(out, shape, dtype)
        ops.out(*tensors, out, described.block_size)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out, where the cut falls between blocks; with quantized scales between groups of them."""
        described, row = self.meta_of(meta), math.prod(shape[1:])
        size = described.block_size
        if (start * row) % size or (length * row) % size:
            return None
        first, count = start * row // size, length * row // size
        cut = {
            "codes": packed["codes"].narrow(0, first * size // 2, count * size // 2),
            "absmax": packed["absmax"].narrow(0, first, count),
        }
        if not described.options:
            return cut
        if first % GROUP:
            return None
        groups = packed["nested_absmax"].narrow(0, first // GROUP, -(-count // GROUP))
        return {**cut, "nested_absmax": groups, "nested_map": packed["nested_map"]}

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Values are packed in row-major order: another shape of as many has the same bytes."""
        return packed


class _RowsCodec(PackedCodec):
    """int8 of bitsandbytes with a scale per row, decoded as published."""

    name = "bnb_int8"
    encodes = False

    def meta(self, block_size: int = 0, *, double_quant: bool = False) -> Meta:
        """Rows are as long as the shape says; see the base class."""
        super().meta(block_size, double_quant=double_quant)
        return Meta(0)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse anything but the description of rows."""
        if meta != Meta(0):
            raise ArgumentError(message(function, "meta", "block size 0 and no options", meta))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes`, one-dimensional in row-major order, and `row_absmax`: rows are the last dimension."""
        if not shape:
            raise ArgumentError(message("bnb_int8", "shape", "at least one dimension", "()"))
        rows = math.prod(shape[:-1])
        return {
            "codes": Part(torch.int8, (math.prod(shape),)),
            "row_absmax": Part(torch.float32, (rows,)),
        }

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        codes, scales = packed["codes"], packed["row_absmax"]
        columns = max(shape[-1], 1)
        if not math.prod(shape):  # rows of nothing may be any number
            scales = scales[:0]
        if out is None:
            return INT8_ROWS.new(codes, scales, shape, dtype, columns)
        self.check_out(out, shape, dtype)
        INT8_ROWS.out(codes, scales, out, columns)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out of a matrix or a stack."""
        if len(shape) < 2:
            return None
        each, rows = math.prod(shape[1:]), math.prod(shape[1:-1])
        return {
            "codes": packed["codes"].narrow(0, start * each, length * each),
            "row_absmax": packed["row_absmax"].narrow(0, start * rows, length * rows),
        }

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Keep the bytes where the rows stay as long as they are."""
        return packed if size and shape and size[-1] == shape[-1] else None


BNB_FP4_CODEC = _Fp4Codec()
"""4-bit floats of bitsandbytes."""

BNB_INT8_CODEC = _RowsCodec()
"""8-bit integers of bitsandbytes (LLM.int8), one fp32 a row."""
