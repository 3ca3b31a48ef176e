r"""How each codec's weights multiply on tensor cores: what is quantized how, which shapes, on which devices.

Forward $y = x W^T$: $x$ is quantized along its last dimension, in the codec's own format. Input gradient
$\partial x = \partial y\, W$, if it is asked to be packed too: $\partial y$ is quantized along the outputs,
which are reduced now, and $W^T$ must have them contiguous.

* ``fp8_row``: bytes of $W^T$ are those of $W$, transposed. The scale of a row of $W$ is one of the reduced
  dimension; it multiplies $\partial y$ (rounded to bf16) before that is quantized, and $W$ is exact.
* ``fp8_block``: bytes and scales are transposed, exact too. $\partial y$ has a scale per 1 x 128.
* ``mxfp8``, ``nvfp4``: scales lie along the inputs, so that $W^T$ is decoded and quantized again, to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._transpose import transpose_bytes
from .codecs.base import Part
from .codecs.fp8 import MXFP8_CODEC, dequantize_fp8, quantize_fp8
from .codecs.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from .scaled_mm import Operand, blocked_scales

__all__ = ["PRODUCTS", "TRANSPOSED", "Product", "outlier_columns", "split_outliers"]

Packed = Mapping[str, torch.Tensor]

TRANSPOSED = "_t"
"""What the names of the packed tensors of W^T end in."""

_ROW, _BLOCK, _MX = 1, 2, 0
_FP8 = torch.float8_e4m3fn


class Product:
    """One codec's product; a subclass says how it quantizes.

    Attributes:
        kind: Its name in `scaled_mm`.
        step: What both sides of W must be multiples of, where they are reduced.
        outer: What both must be multiples of where they are not.
        rows: What the number of rows of the activation is padded to a multiple of.
    """

    kind: str
    step: int
    outer = 16
    rows = 1

    def on(self, major: int, minor: int, cuda: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability has such tensor cores, under this CUDA version."""
        raise NotImplementedError

    def accepts(self, shape: Sequence[int], *, backward: bool = False) -> bool:
        """Whether they take a weight of this shape, (outputs, inputs); backward: its transpose too."""
        if len(shape) != 2 or 0 in shape:
            return False
        outputs, inputs = shape
        good = inputs % self.step == 0 and outputs % self.outer == 0
        return good and (not backward or (outputs % self.step == 0 and inputs % self.outer == 0))

    def activation(self, x: torch.Tensor) -> Operand:
        """Quantize `[m, k]` along k; m must be a multiple of `rows`."""
        raise NotImplementedError

    def weight(self, packed: Packed, shape: Sequence[int]) -> Operand:
        """Arrange a packed weight; its codes are not copied."""
        raise NotImplementedError

    def gradient(self, grad: torch.Tensor, packed: Packed) -> Operand:
        """Quantize the gradient of the output, `[m, outputs]`, along the outputs."""
        return self.activation(grad)

    def transposed_parts(self, shape: Sequence[int]) -> dict[str, Part]:
        """List what `transpose` makes, beside the packed tensors of W."""
        raise NotImplementedError

    def transpose(
        self, packed: Packed, shape: Sequence[int], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Make the packed tensors of W^T from those of W, into `out` if given."""
        raise NotImplementedError

    def transposed(self, packed: Packed, made: Packed, shape: Sequence[int]) -> Operand:
        """Arrange W^T: `made` is what `transpose` returned."""
        raise NotImplementedError


def _own(parts: Mapping[str, Part], like: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=kind, device=like.device) for name, (kind, shape) in parts.items()}


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Return scales that begin at 16 bytes, as vector loads want them: rows cut out of a weight may not."""
    return scale.clone() if scale.storage_offset() % 4 else scale


class _Row(Product):
    kind, step = "row", 16

    def on(self, major: int, minor: int, cuda: tuple[int, int]) -> bool:
        return (major, minor) == (8, 9) or major == 9

    def activation(self, x: torch.Tensor) -> Operand:
        codes, scale = quantize_fp8(x, _ROW)
        return Operand(codes.view(_FP8).view(x.shape), scale.view(-1, 1))

    def weight(self, packed: Packed, shape: Sequence[int]) -> Operand:
        return Operand(packed["codes"].view(_FP8).view(tuple(shape)), _aligned(packed["scale"]).view(-1, 1))

    def gradient(self, grad: torch.Tensor, packed: Packed) -> Operand:
        # One rounding of the product: bf16, as the gradient was.
        return self.activation(torch.mul(grad, packed["scale"], out=torch.empty_like(grad)))

    def transposed_parts(self, shape: Sequence[int]) -> dict[str, Part]:
        return {"codes" + TRANSPOSED: Part(torch.uint8, (shape[0] * shape[1],))}

    def transpose(
        self, packed: Packed, shape: Sequence[int], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        made = dict(out or _own(self.transposed_parts(shape), packed["codes"]))
        transpose_bytes(packed["codes"], made["codes" + TRANSPOSED], *shape)
        return made

    def transposed(self, packed: Packed, made: Packed, shape: Sequence[int]) -> Operand:
        codes = made["codes" + TRANSPOSED].view(_FP8).view(shape[1], shape[0])
        return Operand(codes, torch.ones(shape[1], 1, device=codes.device))


class _Block(_Row):
    # Of K: scales of 128 x 128 are read four at a time.
    kind, step, outer, rows = "block", 512, 128, 4

    def on(self, major: int, minor: int, cuda: tuple[int, int]) -> bool:
        return major == 9 and cuda >= (12, 9)

    def activation(self, x: torch.Tensor) -> Operand:
        rows, columns = x.shape
        codes, scale = quantize_fp8(x.view(-1, 128), _ROW)
        # Scales of one column of tiles follow one another.
        scale = scale.view(rows, columns // 128).t().contiguous().t()
        return Operand(codes.view(_FP8).view(rows, columns), scale)

    def weight(self, packed: Packed, shape: Sequence[int]) -> Operand:
        rows, columns = shape
        scale = _aligned(packed["scale"]).view(-(-rows // 128), -1)
        return Operand(packed["codes"].view(_FP8).view(rows, columns), scale)

    def gradient(self, grad: torch.Tensor, packed: Packed) -> Operand:
        return self.activation(grad)

    def transposed(self, packed: Packed, made: Packed, shape: Sequence[int]) -> Operand:
        codes = made["codes" + TRANSPOSED].view(_FP8).view(shape[1], shape[0])
        return Operand(codes, packed["scale"].view(-1, shape[1] // 128).t().contiguous())


class _Mx(Product):
    kind, step = "mx", 32

    def on(self, major: int, minor: int, cuda: tuple[int, int]) -> bool:
        return major in (10, 12) and cuda >= (12, 8)

    def _operand(self, codes: torch.Tensor, scale: torch.Tensor, rows: int) -> Operand:
        blocked = blocked_scales(scale.view(rows, -1)).view(torch.float8_e8m0fnu)
        return Operand(codes.view(_FP8).view(rows, -1), blocked)

    def activation(self, x: torch.Tensor) -> Operand:
        codes, scale = quantize_fp8(x, _MX)
        return self._operand(codes, scale, x.shape[0])

    def weight(self, packed: Packed, shape: Sequence[int]) -> Operand:
        return self._operand(packed["codes"], packed["scale"], shape[0])

    def transposed_parts(self, shape: Sequence[int]) -> dict[str, Part]:
        parts = MXFP8_CODEC.parts((shape[1], shape[0]), 32)
        return {name + TRANSPOSED: part for name, part in parts.items()}

    def transpose(
        self, packed: Packed, shape: Sequence[int], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        plain = dequantize_fp8(packed["codes"], packed["scale"], tuple(shape), torch.bfloat16, _MX)
        return _kept(("codes", "scale"), quantize_fp8(plain.t().contiguous(), _MX), out)

    def transposed(self, packed: Packed, made: Packed, shape: Sequence[int]) -> Operand:
        return self._operand(made["codes" + TRANSPOSED], made["scale" + TRANSPOSED], shape[1])


class _Nv(Product):
    kind, step = "nv", 32

    def on(self, major: int, minor: int, cuda: tuple[int, int]) -> bool:
        return major in (10, 12) and cuda >= (12, 8)

    def _operand(self, parts: Sequence[torch.Tensor], rows: int) -> Operand:
        codes, scale, whole = parts
        blocked = blocked_scales(scale.view(rows, -1)).view(_FP8)
        return Operand(codes.view(torch.float4_e2m1fn_x2).view(rows, -1), blocked, whole)

    def activation(self, x: torch.Tensor) -> Operand:
        return self._operand(quantize_nvfp4(x), x.shape[0])

    def weight(self, packed: Packed, shape: Sequence[int]) -> Operand:
        return self._operand([packed[name] for name in ("codes", "scale", "tensor_scale")], shape[0])

    def transposed_parts(self, shape: Sequence[int]) -> dict[str, Part]:
        outputs, inputs = shape
        return {
            "codes" + TRANSPOSED: Part(torch.uint8, (inputs * outputs // 2,)),
            "scale" + TRANSPOSED: Part(torch.uint8, (inputs * outputs // 16,)),
            "tensor_scale" + TRANSPOSED: Part(torch.float32, (1,)),
        }

    def transpose(
        self, packed: Packed, shape: Sequence[int], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        names = ("codes", "scale", "tensor_scale")
        plain = dequantize_nvfp4(*(packed[name] for name in names), tuple(shape), torch.bfloat16)
        return _kept(names, quantize_nvfp4(plain.t().contiguous()), out)

    def transposed(self, packed: Packed, made: Packed, shape: Sequence[int]) -> Operand:
        names = ("codes", "scale", "tensor_scale")
        return self._operand([made[name + TRANSPOSED] for name in names], shape[1])


def _kept(
    names: Sequence[str], parts: Sequence[torch.Tensor], out: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    made = dict(zip((name + TRANSPOSED for name in names), parts, strict=True))
    if out is None:
        return made
    for name, part in made.items():
        out[name].copy_(part)
    return dict(out)


PRODUCTS: dict[str, Product] = {
    "fp8_row": _Row(),
    "fp8_block": _Block(),
    "mxfp8": _Mx(),
    "nvfp4": _Nv(),
}
"""By codec."""


def outlier_columns(packed: Packed, shape: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """Decode some columns of an nvfp4 weight.

    Args:
        packed: Its tensors.
        shape: Its shape; an even number of columns, in whole groups of 16.
        index: int64 `[n]`, which ones.

    Returns:
        bf16 `[rows, n]`, bit for bit those columns of the decoded weight.
    """
    rows, _ = shape
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=index.device)
    table = torch.cat((table, -table))
    pairs = packed["codes"].view(rows, -1).index_select(1, index >> 1)
    codes = (pairs >> ((index & 1) << 2).to(torch.uint8)) & 15
    scale = packed["scale"].view(rows, -1).index_select(1, index >> 4).view(_FP8).float()
    return (table[codes.long()] * (scale * packed["tensor_scale"])).bfloat16()


def split_outliers(x: torch.Tensor, share: float) -> tuple[torch.Tensor, Any, Any]:
    """Set the input channels with the largest values of a call apart; nothing waits for the device.

    Args:
        x: bf16 `[m, k]`.
        share: Share of the k channels, at least one.

    Returns:
        `x` with zeros in those channels, their values `[m, n]`, and their numbers, int64 `[n]`.
    """
    count = max(1, round(share * x.shape[1]))
    index = x.abs().amax(0).topk(count).indices
    return x.index_fill(1, index, 0.0), x.index_select(1, index), index
