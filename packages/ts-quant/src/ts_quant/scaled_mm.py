r"""Products of packed operands: how tensor cores take them, and the same product without tensor cores.

$y = (s_a \circ a)\,(s_b \circ b)^T$ for codes $a$ `[m, k]` and $b$ `[n, k]`, both with the reduced dimension
contiguous, and scales laid out as `torch._scaled_mm` documents for each kind:

* ``row``: one fp32 scale a row of $a$ and of $b$.
* ``block``: one fp32 scale for 1 x 128 of $a$, one for 128 x 128 of $b$.
* ``mx``: one e8m0 scale for 1 x 32 of both, in the blocked order of `blocked_scales`.
* ``nv``: e2m1 codes, two a byte, one e4m3 scale for 1 x 16 of both in the same order, and one fp32 scale for
  each tensor.

`emulate` takes the very operands that `multiply` hands to the GPU: quantization and layouts are tested bit
for bit without one. It sums in float64: with one scale a row the sum of products is then exact. Tensor cores
sum in about fp32; on Hopper the addends of one instruction are aligned to 14 bits or more. `ROUNDING` is what
the two may differ by, relative to $\sum |a||b|$, beside the rounding of the result.

Sources: PyTorch, `torch.nn.functional.scaled_mm`; NVIDIA cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from .references.small_floats import E2M1

__all__ = ["ROUNDING", "Operand", "blocked_scales", "emulate", "multiply", "plain_scales"]

ROUNDING = 2.0**-10
"""Bound on |tensor cores - emulation| relative to the sum of the magnitudes of the products."""

_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


class Operand(NamedTuple):
    """One side of a product.

    Attributes:
        codes: `[rows, k]` float8_e4m3fn, or `[rows, k / 2]` float4_e2m1fn_x2; contiguous.
        scale: Its scales, as its kind takes them on this side.
        whole: fp32 `[1]` for "nv", else None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    whole: torch.Tensor | None = None


def blocked_scales(scale: torch.Tensor) -> torch.Tensor:
    """Put scales of 1 x 32 or 1 x 16 into the order that tensor cores read.

    Scale `(r, c)` of a matrix padded with zeros to whole tiles of 128 x 4 goes to byte
    `512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4`, tiles numbered row by row.

    Args:
        scale: uint8 `[rows, columns]`.

    Returns:
        uint8, one-dimensional, 512 bytes a tile.

    Example:
        >>> blocked_scales(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))[:20].tolist()
        [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0]
    """
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    if (rows, columns) != (down * 128, across * 4):
        scale = torch.nn.functional.pad(scale, (0, across * 4 - columns, 0, down * 128 - rows))
    return scale.reshape(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def plain_scales(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Undo `blocked_scales`.

    Args:
        blocked: uint8, one-dimensional.
        rows: Rows without the padding.
        columns: Columns without it.

    Returns:
        uint8 `[rows, columns]`.
    """
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = blocked.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns]


def multiply(kind: str, a: Operand, b: Operand, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply on tensor cores.

    Args:
        kind: "row", "block", "mx" or "nv".
        a: `[m, k]`.
        b: `[n, k]`.
        bias: bf16 `[n]`; with "row" it is added before the result is rounded, else after.

    Returns:
        bf16 `[m, n]`.

    Raises:
        RuntimeError: The device has no such tensor cores, or the shape is not one of theirs.
    """
    if kind == "nv":
        functional: Any = torch.nn.functional
        recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
        swizzle = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
        left, right = [a.scale, a.whole], [b.scale, b.whole]
        out = functional.scaled_mm(
            a.codes, b.codes.t(), left, recipe, right, recipe, swizzle, swizzle, output_dtype=torch.bfloat16
        )
        return cast(torch.Tensor, out if bias is None else out.add_(bias))
    fused = bias if kind == "row" else None
    # Scales of single values are transposed with the operand; blocked ones have an order of their own.
    scale_b = b.scale if kind == "mx" else b.scale.t()
    out = torch._scaled_mm(a.codes, b.codes.t(), a.scale, scale_b, bias=fused, out_dtype=torch.bfloat16)
    return out if bias is None or fused is not None else out.add_(bias)


def _fp8_values(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(_E4M3).double()


def _fp4_values(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float64, device=codes.device)
    pairs = codes.view(torch.uint8).long()
    return table[torch.stack((pairs & 15, pairs >> 4), dim=-1)].flatten(-2)


def _unpacked(kind: str, operand: Operand, right: bool) -> torch.Tensor:
    """Return values times scales in float64, but for the scales of "row" and of whole tensors."""
    if kind == "row":
        return _fp8_values(operand.codes)
    values = _fp4_values(operand.codes) if kind == "nv" else _fp8_values(operand.codes)
    rows, k = values.shape
    if kind == "block":
        scale = operand.scale.double()
        spread = scale.repeat_interleave(128, 0)[:rows] if right else scale
        return values * spread.repeat_interleave(128, 1)[:, :k]
    per, dtype = (32, _E8M0) if kind == "mx" else (16, _E4M3)
    plain = plain_scales(operand.scale.view(torch.uint8).reshape(-1), rows, -(-k // per)).contiguous()
    return values * plain.view(dtype).double().repeat_interleave(per, 1)[:, :k]


def emulate(kind: str, a: Operand, b: Operand, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply the same operands on any device, summing in float64.

    Args:
        kind: "row", "block", "mx" or "nv".
        a: `[m, k]`.
        b: `[n, k]`.
        bias: bf16 `[n]` or None; as in `multiply`.

    Returns:
        bf16 `[m, n]`.
    """
    out = _unpacked(kind, a, False) @ _unpacked(kind, b, True).t()
    if kind == "row":
        out = out * a.scale.double() * b.scale.double().t()
        if bias is not None:
            return (out + bias.double()).float().bfloat16()
    if a.whole is not None and b.whole is not None:
        out = out * (a.whole * b.whole).double()
    made = out.float().bfloat16()
    return made if bias is None else made.add_(bias)
