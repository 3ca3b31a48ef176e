"""fp8: e4m3 codes in three layouts, each a codec of its own.

"mxfp8" has a power-of-two scale (e8m0) for each 32 values along the last dimension, "fp8_row" one fp32 scale
for each row, "fp8_block" one for each tile of 128 x 128. The last dimension makes the columns, the one before
it the rows. "fp8" is no codec but a choice among them: what this GPU computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import _C
from .._decode_ops import Operand, define_decode
from .._ops import LIBRARY, check_float
from .base import Packed, PackedCodec, Part
from .meta import Meta

__all__ = ["FP8_BLOCK_CODEC", "FP8_ROW_CODEC", "MXFP8_CODEC", "Fp8Codec", "fp8_choice"]

_MX, _ROW, _BLOCK = range(3)


def _tiles(shape: Sequence[int], layout: int) -> tuple[int, ...]:
    """Return how many scales there are: (batches * down, across), or with the batches apart for "block"."""
    dims = tuple(shape) or (1,)
    columns = dims[-1]
    if layout == _ROW:
        return math.prod(dims[:-1]), int(columns > 0)
    if layout == _MX:
        return math.prod(dims[:-1]), -(-columns // 32)
    rows = dims[-2] if len(dims) > 1 else 1
    return math.prod(dims[:-2]) * -(-rows // 128), -(-columns // 128)


def _scale_dtype(layout: int) -> torch.dtype:
    return torch.uint8 if layout == _MX else torch.float32


def _expected(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    (layout,) = numbers
    scales = math.prod(_tiles(shape, layout))
    return [Operand((torch.uint8,), math.prod(shape)), Operand((_scale_dtype(layout),), scales)]


def _encode_fake(x: torch.Tensor, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("quantize_fp8", "x", x.dtype)
    scales = math.prod(_tiles(x.shape, layout))
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(scales, dtype=_scale_dtype(layout), device=x.device)


def _encode(x: torch.Tensor, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = _encode_fake(x, layout)
    _C.quantize_fp8(x.contiguous(), codes, scale, layout)
    return codes, scale


quantize_fp8 = LIBRARY.define(
    "quantize_fp8(Tensor x, int layout) -> (Tensor codes, Tensor scale)", cpu=_encode, fake=_encode_fake
)
dequantize_fp8, dequantize_fp8_out = define_decode(
    "fp8", ("codes", "scale"), ("layout",), _C.dequantize_fp8, _expected
)


class Fp8Codec(PackedCodec):
    """e4m3 codes with one scale per tile; the block size of `quantize` is ignored.

    Example:
        >>> MXFP8_CODEC.packed_bytes((4, 64), 64), FP8_ROW_CODEC.packed_bytes((4, 64), 64)
        (264, 272)
    """

    def __init__(self, name: str, layout: int) -> None:
        """Make the codec of a layout.

        Args:
            name: Its name.
            layout: 0 (1 x 32, e8m0), 1 (rows) or 2 (128 x 128).
        """
        self.name, self.layout = name, layout

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Return the one description there is; the scales are as they are. See the base class."""
        super().meta(block_size, double_quant=double_quant)
        return Meta({_MX: 32, _ROW: 0, _BLOCK: 128}[self.layout])

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse every other description."""
        self.check_fixed(meta, function)

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes`, one byte a value, and `scale`, e8m0 bytes or fp32; both one-dimensional."""
        return {
            "codes": Part(torch.uint8, (math.prod(shape),)),
            "scale": Part(_scale_dtype(self.layout), (math.prod(_tiles(shape, self.layout)),)),
        }

    def encode(self, tensor: torch.Tensor, meta: Meta | int, *, name: str = "tensor") -> Packed:
        """Pack a tensor; see the base class. On CUDA the call waits for the device once, for its check."""
        self.check_source(tensor, name)
        with torch.no_grad():
            codes, scale = quantize_fp8(tensor, self.layout)
            # A tile with a NaN or an infinity has a scale that is not finite; in e8m0 that is 255.
            bad = None if scale.is_meta else (scale == 255 if self.layout == _MX else ~scale.isfinite())
            if bad is not None and bool(bad.any()):
                tile = int(bad.nonzero()[0])
                raise self.not_finite(name, tensor, f"in the tile of scale {tile}")
        return {"codes": codes, "scale": scale}

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        codes, scale = packed["codes"], packed["scale"]
        if out is None:
            return dequantize_fp8(codes, scale, shape, dtype, self.layout)
        self.check_out(out, shape, dtype)
        dequantize_fp8_out(codes, scale, out, self.layout)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows or matrices out, where the cut falls between tiles."""
        inner = tuple(shape[1:])
        if not inner:  # one row: 32 or 128 values at a time, or the whole
            step = {_MX: 32, _ROW: 0, _BLOCK: 128}[self.layout]
            if not step or start % step or (length % step and start + length != shape[0]):
                return None
            first, count = start // step, -(-length // step)
        elif self.layout == _BLOCK and len(inner) == 1:
            if start % 128 or (length % 128 and start + length != shape[0]):
                return None
            across = _tiles(shape, self.layout)[1]
            first, count = start // 128 * across, -(-length // 128) * across
        else:
            per = math.prod(_tiles(inner, self.layout))
            first, count = start * per, length * per
        row = math.prod(inner)
        return {
            "codes": packed["codes"].narrow(0, start * row, length * row),
            "scale": packed["scale"].narrow(0, first, count),
        }

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Other leading dimensions have the same bytes, as long as no tile is cut another way."""
        kept = 2 if self.layout == _BLOCK else 1
        same = len(shape) >= kept and tuple(shape[-kept:]) == tuple(size[-kept:])
        return packed if same else None


MXFP8_CODEC = Fp8Codec("mxfp8", _MX)
"""8.25 bits a value: the OCP MX layout, a power-of-two scale per 32 values."""

FP8_ROW_CODEC = Fp8Codec("fp8_row", _ROW)
"""8 bits a value, and a scale per row: what Ada and Hopper multiply."""

FP8_BLOCK_CODEC = Fp8Codec("fp8_block", _BLOCK)
"""8 bits a value, and a scale per tile of 128 x 128."""


def fp8_choice(device: torch.device | str | None = None) -> str:
    """Say which layout "fp8" stands for: the one that a device multiplies.

    Args:
        device: Where the weights are going to compute; `None` is the current GPU, if there is one.

    Returns:
        "fp8_row" on Ada and Hopper; "mxfp8" on Blackwell, on other GPUs, and without one.

    Example:
        >>> fp8_choice("cpu")
        'mxfp8'
    """
    where = torch.device("cuda" if device is None else device)
    if (device is not None and where.type == "cpu") or not torch.cuda.is_available():
        return "mxfp8"
    major, minor = torch.cuda.get_device_capability(where)
    return "fp8_row" if (major, minor) == (8, 9) or major == 9 else "mxfp8"
