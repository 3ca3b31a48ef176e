r"""fp8 and nvfp4 in plain PyTorch: readable, slow, and bit for bit what the kernels compute.

The tables are those of the OCP 8-bit floating point specification (e4m3: sign, 4 exponent bits with bias 7,
3 mantissa bits, no infinities, $\pm 448$ the largest) and of the OCP Microscaling specification (e2m1; e8m0:
$2^{b - 127}$, 255 is NaN). A number is rounded to the nearest table value, ties go to the even code, and what
is beyond the largest becomes the largest. Arithmetic on values is fp32, results are rounded once.

**Layouts.** A tensor is matrices: the last dimension makes the columns, the one before it the rows. Each
tile has one scale. *mx32*: 1 x 32, an e8m0 scale $2^{\lceil \log_2(a / 448) \rceil}$ of the tile's absmax
$a$ (from $2^{-127}$ to $2^{119}$; code 0 for a tile of zeros), $q = \mathrm{e4m3}(x / s)$, with fp16 values
beyond $\pm 61440$ taken as that: the next one, $256 \cdot 2^8$, is no fp16. *row*: 1 x
columns, *block*: 128 x 128; $s = a / 448$ in fp32; where that is 0, codes are 0. $\hat x = q s$.

**nvfp4.** Tensor scale $t = a_{tensor} / 2688$ in fp32 (1 where that is 0). For each 16 columns of a row
$w = a / 6 / t$, $s = \mathrm{e4m3}(w)$, or the next smaller code where $s > 1.1 w$ (which only happens below
$2^{-6}$; without it small groups would grow); $q = \mathrm{e2m1}(x / (s t))$, codes 0 where $s t = 0$;
$\hat x = q (s t)$. Rows start at a byte; two codes share one, the first in the low nibble.

Sources: OCP OFP8 1.0 and OCP Microscaling Formats (MX) 1.0, opencompute.org; scales of mx32 are not rounded
down as there, which cuts off up to an eighth of a tile's largest value, but up, as in "Recipes for Pre-
training LLMs with MXFP8", arXiv:2506.08027. NVFP4: NVIDIA's description of its block format (16 elements,
e4m3 scale, fp32 tensor scale).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = [
    "E2M1",
    "E4M3",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "matrix_shape",
    "quantize_fp8",
    "quantize_nvfp4",
    "round_to_table",
    "tile_shape",
]


def _float_table(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    """Return the magnitudes of all codes without their sign bit."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(
            2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        )
    return values


E4M3: tuple[float, ...] = tuple(_float_table(4, 3, 7)[:127])
"""Magnitudes of the codes 0 to 126; 127 is NaN."""

E2M1: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7."""


def round_to_table(x: torch.Tensor, table: Sequence[float], sign: int) -> torch.Tensor:
    """Return the code of the nearest magnitude, ties to the even code, with `sign` added below zero.

    Args:
        x: float32, no NaN.
        table: Rising magnitudes, index = code.
        sign: The sign bit.

    Returns:
        uint8 codes; a negative zero keeps its sign.

    Example:
        >>> round_to_table(torch.tensor([0.25, 0.26, -5.0, 100.0]), E2M1, 8).tolist()
        [0, 1, 14, 7]
    """
    values = torch.tensor(table, dtype=torch.float64, device=x.device)
    middles = (values[:-1] + values[1:]) / 2
    magnitude = x.double().abs().contiguous()
    below = torch.searchsorted(middles, magnitude, right=False)  # middles strictly below
    upto = torch.searchsorted(middles, magnitude, right=True)
    code = torch.where((below != upto) & (below % 2 == 1), upto, below)  # on a middle: the even one
    return (code + sign * torch.signbit(x)).to(torch.uint8)


def matrix_shape(shape: Sequence[int], layout: str) -> tuple[int, int, int]:
    """Return (batches, rows, columns); only "block" has tiles of several rows."""
    dims = tuple(shape) or (1,)
    lead = dims[:-1]
    if layout == "block" and lead:
        return math.prod(lead[:-1]), lead[-1], dims[-1]
    return math.prod(lead), 1, dims[-1]


def tile_shape(rows: int, columns: int, layout: str) -> tuple[int, int]:
    """Return (rows, columns) of a tile of a matrix; what is smaller than a tile is a tile of its size."""
    high, wide = {"mx32": (1, 32), "row": (1, columns), "block": (128, 128)}[layout]
    return max(min(high, rows), 1), max(min(wide, columns), 1)


def _tiled(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values as (batches, down, tile rows, across, tile columns), padded with zeros."""
    batches, rows, columns = matrix_shape(x.shape, layout)
    high, wide = tile_shape(rows, columns, layout)
    matrix = x.detach().float().reshape(batches, rows, columns)
    padded = torch.nn.functional.pad(matrix, (0, -columns % wide, 0, -rows % high))
    return padded.reshape(batches, padded.shape[1] // high, high, padded.shape[2] // wide, wide)


def _untiled(tiles: torch.Tensor, shape: Sequence[int], layout: str) -> torch.Tensor:
    """Take the padding away again."""
    batches, rows, columns = matrix_shape(shape, layout)
    full = tiles.reshape(batches, tiles.shape[1] * tiles.shape[2], tiles.shape[3] * tiles.shape[4])
    return full[:, :rows, :columns].reshape(tuple(shape))


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes.long() - 127).float()


def quantize_fp8(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode in fp8; see the formulas of this module.

    Args:
        x: Floating CPU tensor of any shape, finite, n elements.
        layout: "mx32", "row" or "block".

    Returns:
        Codes uint8 `[n]`; scales, one per tile, uint8 for "mx32" and else float32, one-dimensional.

    Example:
        >>> quantize_fp8(torch.tensor([1.0, -448.0]), "row")[1]
        tensor([1.])
    """
    tiles = _tiled(x, layout)
    absmax = tiles.abs().amax(dim=(2, 4)) if tiles.numel() else tiles.new_zeros(tiles.shape[0::2][:2])
    if not tiles.numel():
        absmax = tiles.new_zeros(tiles.shape[0], tiles.shape[1], tiles.shape[3])
    if layout == "mx32":
        # absmax / 448 = m * 2^e with 0.5 <= m < 1, in float64 on the same side of 0.5 as the exact quotient
        mantissa, exponent = torch.frexp(absmax.double() / 448)
        exponent = (exponent - (mantissa == 0.5).int()).clamp(max=119)
        stored = torch.where(absmax == 0, 0, (exponent + 127).clamp(min=0)).to(torch.uint8)
        scale, nothing = _e8m0(stored), absmax == 0
    else:
        stored = scale = absmax / 448.0
        nothing = scale == 0
    spread = (slice(None), slice(None), None, slice(None), None)
    if layout == "mx32" and x.dtype == torch.float16:
        tiles = tiles.clamp(-61440, 61440)
    # A power of two divides exactly, except that fp32 has no 2^-136 to divide by 2^119.
    codes = round_to_table((tiles / torch.where(nothing, 1.0, scale)[spread]), E4M3, 128)
    codes = torch.where(nothing[spread], 0, codes).to(torch.uint8)
    return _untiled(codes, x.shape, layout).reshape(-1), stored.reshape(-1)


def dequantize_fp8(
    codes: torch.Tensor, scale: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, layout: str
) -> torch.Tensor:
    """Decode fp8; see the formulas of this module.

    Args:
        codes: uint8 `[n]`.
        scale: One per tile.
        shape: Shape of the result, n elements.
        dtype: Dtype of the result.
        layout: "mx32", "row" or "block".

    Returns:
        The values, computed in fp32 and rounded once.

    Example:
        >>> codes, scale = quantize_fp8(torch.tensor([1.0, -448.0]), "row")
        >>> dequantize_fp8(codes, scale, (2,), torch.float32, "row")
        tensor([   1., -448.])
    """
    table = torch.tensor([*E4M3, math.nan], dtype=torch.float32)
    signed = torch.cat((table, -table))
    values = _tiled(signed[codes.long()].reshape(tuple(shape)), layout)
    factor = _e8m0(scale) if layout == "mx32" else scale
    factor = factor.reshape(values.shape[0], values.shape[1], 1, values.shape[3], 1)
    return _untiled((values * factor).to(dtype), shape, layout)


def quantize_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode in nvfp4; see the formulas of this module.

    Args:
        x: Floating CPU tensor of any shape, finite; as a matrix (rows, columns).

    Returns:
        Codes uint8 `[rows * ceil(columns / 2)]`, scales uint8 `[rows * ceil(columns / 16)]` (e4m3) and the
        tensor scale float32 `[1]`.

    Example:
        >>> codes, scale, whole = quantize_nvfp4(torch.tensor([6.0, -3.0]))
        >>> [hex(byte) for byte in codes.tolist()], scale.tolist(), round(2688 * whole.item())
        (['0xd7'], [126], 6)
    """
    columns = x.shape[-1] if x.dim() else 1
    rows = math.prod(x.shape[:-1])
    matrix = x.detach().float().reshape(rows, columns)
    groups = torch.nn.functional.pad(matrix, (0, -columns % 16)).reshape(rows, -(-columns // 16), 16)
    largest = matrix.abs().max() if matrix.numel() else matrix.new_zeros(())
    whole = (largest / 2688.0).reshape(1)
    whole = torch.where(whole == 0, 1.0, whole)
    absmax = groups.abs().amax(dim=2) if groups.numel() else groups.new_zeros(groups.shape[:2])
    wanted = absmax / 6.0 / whole
    table = torch.tensor(E4M3)
    stored = round_to_table(wanted, E4M3, 128).long()
    stored -= (table[stored] > torch.tensor(1.1) * wanted).long()
    factor = (table[stored] * whole).unsqueeze(2)
    codes = round_to_table(groups / torch.where(factor == 0, 1.0, factor), E2M1, 8)
    codes = torch.where(factor == 0, 0, codes).to(torch.uint8).reshape(rows, groups.shape[1] * 16)
    # What is past the end of a row is 0; a byte more than that is never stored.
    even = codes[:, : columns + columns % 2]
    packed = even[:, 0::2] | even[:, 1::2] << 4
    return packed.reshape(-1), stored.reshape(-1).to(torch.uint8), whole


def dequantize_nvfp4(
    codes: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode nvfp4; see the formulas of this module.

    Args:
        codes: As `quantize_nvfp4` returned it.
        scale: The same.
        tensor_scale: The same.
        shape: Shape of the result.
        dtype: Dtype of the result.

    Returns:
        The values, computed in fp32 and rounded once.

    Example:
        >>> parts = quantize_nvfp4(torch.tensor([6.0, -3.0]))
        >>> dequantize_nvfp4(*parts, (2,), torch.float32)
        tensor([ 6., -3.])
    """
    dims = tuple(shape) or (1,)
    rows, columns = math.prod(dims[:-1]), dims[-1]
    table = torch.tensor(E2M1)
    signed = torch.cat((table, -table))
    pairs = torch.stack((codes & 15, codes >> 4), dim=1).reshape(rows, columns + columns % 2)[:, :columns]
    factor = torch.tensor((*E4M3, math.nan))[scale.long()] * tensor_scale
    spread = factor.reshape(rows, -(-columns // 16)).repeat_interleave(16, dim=1)[:, :columns]
    return (signed[pairs.long()] * spread).to(dtype).reshape(tuple(shape))
