"""Small floats as others publish them: MXFP4, NVFP4 and fp8 with the scales of tensors, rows or tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import ArgumentError, TrainStreamError, message

from .. import _C
from .._decode_ops import Operand, define_decode
from .base import Packed, Part
from .meta import Meta
from .published import PublishedCodec

__all__ = ["FP8_EXPORT_CODEC", "MXFP4_CODEC", "NVFP4_EXPORT_CODEC", "Fp4Codec", "Fp8ExportCodec"]

_GROUP = {0: 32, 1: 16, 2: 16}
_BYTES, _FLOAT = (torch.uint8,), (torch.float32,)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def _expected_fp4(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    kind, transposed = numbers
    if len(shape) != 3 or kind not in _GROUP:
        raise ArgumentError(message(function, "shape", "stacked matrices", tuple(shape)))
    numel, columns = math.prod(shape), shape[1 if transposed else 2]
    if columns % _GROUP[kind]:
        expected = f"columns that are a multiple of {_GROUP[kind]}"
        raise ArgumentError(message(function, "shape", expected, tuple(shape)))
    return [
        Operand(_BYTES, numel // 2),
        Operand(_BYTES, numel // _GROUP[kind]),
        Operand(_FLOAT, 0 if kind == 0 else 1),
    ]


def _native_fp4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    out: torch.Tensor,
    kind: int,
    transposed: int,
) -> None:
    _C.dequantize_published_fp4(codes, scales, tensor_scale, out, kind, bool(transposed))


def _expected_fp8(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    tile_rows, tile_columns = numbers
    if len(shape) != 2 or tile_rows < 1 or tile_columns < 1:
        given = f"{tuple(shape)} in tiles of {tile_rows}x{tile_columns}"
        raise ArgumentError(message(function, "shape", "a matrix in tiles", given))
    rows, columns = shape
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    return [Operand(_BYTES, rows * columns), Operand(_FLOAT, tiles)]


FP4 = define_decode(
    "published_fp4",
    ("codes", "scales", "tensor_scale"),
    ("kind", "transposed"),
    _native_fp4,
    _expected_fp4,
)
FP8 = define_decode(
    "published_fp8",
    ("codes", "scales"),
    ("tile_rows", "tile_columns"),
    _C.dequantize_published_fp8,
    _expected_fp8,
)


class Fp4Codec(PublishedCodec):
    """e2m1 codes, two a byte, the first in the low nibble, with a scale per 16 or 32 columns.

    Packed are `codes` uint8 (rows, columns / 2), `scales` uint8 (rows, groups), the bits of e4m3 or e8m0
    numbers, and for NVFP4 `tensor_scale` fp32 (1). Stacked matrices have their rows one after the other. The
    option `transposed` says that the tensor presents each matrix transposed: (..., columns, rows).

    Example:
        >>> MXFP4_CODEC.packed_bytes((4, 64), 32) / 256
        0.53125
    """

    operation = FP4

    def __init__(self, name: str, block_size: int) -> None:
        """Make one of the two.

        Args:
            name: Its name.
            block_size: Columns of a scale.
        """
        self.name, self._block = name, block_size

    def describe(self, *, transposed: bool = False, divided: bool = False) -> Meta:
        """Describe a packing.

        Args:
            transposed: Whether matrices are presented transposed.
            divided: NVFP4: scales are divided by the tensor's instead of multiplied with it.

        Returns:
            The description.
        """
        return Meta.make(self._block, transposed=transposed, divided=divided)

    def meta(self, block_size: int = 0, *, double_quant: bool = False) -> Meta:
        """The block is fixed by the format; see the base class."""
        super().meta(block_size, double_quant=double_quant)
        return self.describe()

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse what `describe` does not make."""
        divided = bool(meta.get("divided", False))
        again = self.describe(transposed=bool(meta.get("transposed", False)), divided=divided)
        if meta != again or (divided and self._block == 32):
            raise ArgumentError(message(function, "meta", f"what describe() of {self.name} makes", meta))

    def _kind(self, meta: Meta) -> int:
        return 0 if self._block == 32 else 2 if meta.get("divided") else 1

    def _stacked(self, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) < 2:
            raise ArgumentError(message(self.name, "shape", "at least two dimensions", tuple(shape)))
        return (math.prod(shape[:-2]), *shape[-2:])

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes`, `scales` and, for NVFP4, `tensor_scale`; see the base class."""
        described, stacked = self.meta_of(meta), self._stacked(shape)
        transposed = bool(described.get("transposed"))
        _expected_fp4(self.name, stacked, (self._kind(described), int(transposed)))
        rows, columns = stacked[:0:-1] if transposed else stacked[1:]
        total = stacked[0] * rows
        parts = {
            "codes": Part(torch.uint8, (total, columns // 2)),
            "scales": Part(torch.uint8, (total, columns // self._block)),
        }
        return parts if self._block == 32 else parts | {"tensor_scale": Part(torch.float32, (1,))}

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called; see the base class."""
        codes = packed["codes"]
        scale = packed["tensor_scale"] if self._block == 16 else codes.new_empty(0, dtype=torch.float32)
        numbers = (self._kind(meta), int(bool(meta.get("transposed"))))
        return [codes, packed["scales"], scale], self._stacked(shape), numbers

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows, or matrices of a stack, out; see the base class."""
        if len(shape) == 2 and self.meta_of(meta).get("transposed"):
            return None
        if len(shape) < 2 or (len(shape) == 2 and length == 1):
            return None  # one row would be a vector, which the format does not have
        rows = packed["codes"].shape[0] // shape[0]
        cut = {name: packed[name].narrow(0, start * rows, length * rows) for name in ("codes", "scales")}
        return packed | cut


class Fp8ExportCodec(PublishedCodec):
    """e4m3 codes with one scale a tile: the whole tensor, a row, or 128 x 128.

    Packed are `codes` uint8 (rows, columns), the bits of e4m3 numbers, and `scales` (tiles down, across). The
    description holds `rows` and `columns` of a tile (0: all of them) and `scales`, their dtype.

    Example:
        >>> FP8_EXPORT_CODEC.packed_bytes((256, 128), FP8_EXPORT_CODEC.describe(128, 128))
        32776
    """

    name = "fp8_export"
    operation = FP8

    def describe(self, rows: int = 0, columns: int = 0, *, scales: torch.dtype = torch.float32) -> Meta:
        """Describe a packing.

        Args:
            rows: Rows of a tile; 0: all.
            columns: Columns of a tile; 0: all.
            scales: Their dtype.

        Returns:
            The description.
        """
        return Meta.make(0, rows=rows or False, columns=columns or False, scales=dtype_name(scales))

    def meta(self, block_size: int = 0, *, double_quant: bool = False) -> Meta:
        """One scale for the tensor; see the base class."""
        super().meta(block_size, double_quant=double_quant)
        return self.describe()

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse what `describe` does not make."""
        try:
            scales = parse_dtype(meta.get("scales", "float32"), accepted=_SCALES)
            rows, columns = meta.get("rows", 0), meta.get("columns", 0)
            good = meta == self.describe(rows, columns, scales=scales)
            good = good and type(rows) is int and type(columns) is int
            good = good and 0 <= rows <= 1 << 40 and 0 <= columns <= 1 << 40
        except (TrainStreamError, TypeError):
            good = False
        if not good:
            raise ArgumentError(message(function, "meta", f"what describe() of {self.name} makes", meta))

    def _tiles(self, shape: Sequence[int], meta: Meta) -> tuple[tuple[int, int], tuple[int, int]]:
        if len(shape) < 2:
            raise ArgumentError(message(self.name, "shape", "at least two dimensions", tuple(shape)))
        rows, columns = math.prod(shape[:-1]), shape[-1]
        tile_rows = meta.get("rows", 0) or max(rows, 1)
        return (rows, columns), (tile_rows, meta.get("columns", 0) or max(columns, 1))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes` and `scales`; see the base class."""
        described = self.meta_of(meta)
        (rows, columns), (tile_rows, tile_columns) = self._tiles(shape, described)
        scales = parse_dtype(described.get("scales", "float32"))
        return {
            "codes": Part(torch.uint8, (rows, columns)),
            "scales": Part(scales, (-(-rows // tile_rows), -(-columns // tile_columns))),
        }

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called; see the base class."""
        matrix, tile = self._tiles(shape, meta)
        return [packed["codes"], packed["scales"].float()], matrix, tile


MXFP4_CODEC = Fp4Codec("mxfp4", 32)
"""Power-of-two scales, as gpt-oss is published."""

NVFP4_EXPORT_CODEC = Fp4Codec("nvfp4_export", 16)
"""e4m3 scales and one of the tensor, as ModelOpt and compressed-tensors write them."""

FP8_EXPORT_CODEC = Fp8ExportCodec()
"""e4m3 codes with a scale of the tensor, of rows, or of tiles."""
