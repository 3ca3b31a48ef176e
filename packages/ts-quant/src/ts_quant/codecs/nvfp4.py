"""nvfp4: e2m1 codes, an e4m3 scale per 16 values along the last dimension, and one fp32 tensor scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import _C
from .._decode_ops import Operand, define_decode
from .._ops import LIBRARY, check_float
from .base import Packed, PackedCodec, Part
from .meta import Meta

__all__ = ["NVFP4_CODEC", "Nvfp4Codec"]

_GROUP = 16
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sizes(shape: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the codes and the number of scales: rows start at a byte and at a group."""
    dims = tuple(shape) or (1,)
    rows, columns = math.prod(dims[:-1]), dims[-1]
    return rows * -(-columns // 2), rows * -(-columns // _GROUP)


def _expected(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    bytes_, groups = _sizes(shape)
    return [Operand((torch.uint8,), bytes_), Operand((torch.uint8,), groups), Operand((torch.float32,), 1)]


def _encode_fake(x: torch.Tensor) -> Triple:
    check_float("quantize_nvfp4", "x", x.dtype)
    bytes_, groups = _sizes(x.shape)
    codes = torch.empty(bytes_, dtype=torch.uint8, device=x.device)
    scale = torch.empty(groups, dtype=torch.uint8, device=x.device)
    return codes, scale, torch.empty(1, dtype=torch.float32, device=x.device)


def _encode(x: torch.Tensor) -> Triple:
    codes, scale, whole = _encode_fake(x)
    peak = torch.zeros(1, dtype=torch.int32, device=x.device)
    _C.quantize_nvfp4(x.contiguous(), codes, scale, whole, peak)
    return codes, scale, whole


quantize_nvfp4 = LIBRARY.define(
    "quantize_nvfp4(Tensor x) -> (Tensor codes, Tensor scale, Tensor tensor_scale)",
    cpu=_encode,
    fake=_encode_fake,
)
dequantize_nvfp4, dequantize_nvfp4_out = define_decode(
    "nvfp4", ("codes", "scale", "tensor_scale"), (), _C.dequantize_nvfp4, _expected
)


class Nvfp4Codec(PackedCodec):
    """NVIDIA's 4-bit format; the block size of `quantize` is ignored.

    Example:
        >>> NVFP4_CODEC.packed_bytes((4, 64), 64)
        148
    """

    name = "nvfp4"

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Return the one description there is; the scales are 8-bit already. See the base class."""
        super().meta(block_size, double_quant=double_quant)
        return Meta(_GROUP)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse every other description."""
        self.check_fixed(meta, function)

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `codes` (two a byte), `scale` (e4m3 bytes) and `tensor_scale`; all one-dimensional."""
        bytes_, groups = _sizes(shape)
        return {
            "codes": Part(torch.uint8, (bytes_,)),
            "scale": Part(torch.uint8, (groups,)),
            "tensor_scale": Part(torch.float32, (1,)),
        }

    def encode(self, tensor: torch.Tensor, meta: Meta | int, *, name: str = "tensor") -> Packed:
        """Pack a tensor; see the base class. On CUDA the call waits for the device once, for its check."""
        self.check_source(tensor, name)
        with torch.no_grad():
            codes, scale, whole = quantize_nvfp4(tensor)
            if not whole.is_meta and not bool(whole.isfinite().all()):
                bad = int((~tensor.isfinite()).flatten().nonzero()[0])
                raise self.not_finite(name, tensor, f"at flat index {bad}")
        return {"codes": codes, "scale": scale, "tensor_scale": whole}

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        parts = packed["codes"], packed["scale"], packed["tensor_scale"]
        if out is None:
            return dequantize_nvfp4(*parts, shape, dtype)
        self.check_out(out, shape, dtype)
        dequantize_nvfp4_out(*parts, out)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out; of a single row, whole groups."""
        inner = tuple(shape[1:])
        if inner:
            bytes_, groups = _sizes(inner)
            first, count = (start * bytes_, start * groups), (length * bytes_, length * groups)
        elif start % _GROUP or (length % _GROUP and start + length != shape[0]):
            return None
        else:
            first, count = (start // 2, start // _GROUP), (-(-length // 2), -(-length // _GROUP))
        return {
            "codes": packed["codes"].narrow(0, first[0], count[0]),
            "scale": packed["scale"].narrow(0, first[1], count[1]),
            "tensor_scale": packed["tensor_scale"],
        }

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Other leading dimensions have the same bytes."""
        same = bool(shape) and bool(size) and shape[-1] == size[-1]
        return packed if same else None


NVFP4_CODEC = Nvfp4Codec()
"""4.5 bits a value: e2m1 with an e4m3 scale per 16 values and an fp32 scale for the tensor."""
