r"""The formats in plain PyTorch: readable, slow, and bit for bit what the kernels compute.

Oracle of the tests and description of the formats. For a block $b$ of `block_size` consecutive elements in
row-major order, $a_b = \max_i |x_i|$ in fp32.

**int8.** $s_b = a_b / 127$, $q_i = \mathrm{clamp}(\mathrm{round}(x_i / s_b), -127, 127)$ with ties to even,
$\hat x_i = q_i s_b$. Where $s_b = 0$ (a block of zeros, or one so small that the scale is 0), $q_i = 0$.
The largest float is stored as the one before it: its $127 s_b$ rounds to infinity.

**nf4.** $v_i = x_i \cdot (1 / d_b)$ with $d_b = \max(a_b, 10^{-38})$; the code is the number of thresholds
below $v_i$, the thresholds being the midpoints of neighbouring levels, so a tie goes to the lower level;
$\hat x_i = \mathrm{level}(q_i)\, a_b$. A last block that is not complete divides, $v_i = x_i / d_b$, and
stores $d_b$ in place of $a_b$. Two codes share a byte, the first in the high nibble; after an odd number of
elements the low nibble is 7. These are the bits of bitsandbytes 0.50's CPU path (its CUDA path multiplies in
the incomplete block too, and gives code 0 to blocks of zeros).

Levels: QLoRA, arXiv:2305.14314, appendix E.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "NF4_LEVELS",
    "NF4_THRESHOLDS",
    "dequantize_int8",
    "dequantize_nf4",
    "quantize_int8",
    "quantize_nf4",
]

NF4_LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values of the format, in [-1, 1]; index = code."""

_LARGEST, _BEFORE_LARGEST = (2.0 - 2.0**-23) * 2.0**127, (2.0 - 2.0**-22) * 2.0**127
_LEVELS = torch.tensor(NF4_LEVELS, dtype=torch.float32)
NF4_THRESHOLDS: torch.Tensor = (_LEVELS[:-1] + _LEVELS[1:]) / 2
"""Midpoints of neighbouring levels, float32 `[15]`."""


def _blocks(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values as fp32 `[blocks, block_size]`, padded with zeros, and the absmax of each block."""
    flat = x.detach().reshape(-1).float()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).reshape(-1, block_size)
    absmax = rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)
    return rows, absmax


def quantize_int8(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode in int8; see the formulas of this module.

    Args:
        x: Floating tensor of any shape, finite, n elements; any device.
        block_size: Elements per scale.

    Returns:
        Codes int8 `[n]` and absmax float32 `[ceil(n / block_size)]`.

    Example:
        >>> quantize_int8(torch.tensor([1.0, -0.5]), 2)[0]
        tensor([127, -64], dtype=torch.int8)
    """
    rows, absmax = _blocks(x, block_size)
    absmax = torch.where(absmax == _LARGEST, _BEFORE_LARGEST, absmax)
    scale = (absmax / 127.0).unsqueeze(1)
    codes = torch.where(scale == 0, 0.0, (rows / scale).round().clamp(-127, 127))
    return codes.reshape(-1)[: x.numel()].to(torch.int8), absmax


def dequantize_int8(
    codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block_size: int
) -> torch.Tensor:
    """Decode int8; see the formulas of this module.

    Args:
        codes: int8 `[n]`.
        absmax: float32 `[ceil(n / block_size)]`.
        shape: Shape of the result, n elements.
        dtype: Dtype of the result.
        block_size: Elements per scale.

    Returns:
        The values, computed in fp32 and rounded once.

    Example:
        >>> dequantize_int8(torch.tensor([127], dtype=torch.int8), torch.ones(1), (1,), torch.float32, 2)
        tensor([1.])
    """
    scale = (absmax / 127.0).repeat_interleave(block_size)[: codes.numel()]
    return (codes.float() * scale).to(dtype).reshape(tuple(shape))


def quantize_nf4(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode in nf4; see the formulas of this module.

    Args:
        x: Floating tensor of any shape, finite, n elements; any device.
        block_size: Elements per scale, even.

    Returns:
        Codes uint8 `[ceil(n / 2)]` and absmax float32 `[ceil(n / block_size)]`.

    Example:
        >>> [hex(byte) for byte in quantize_nf4(torch.tensor([1.0, -1.0, 0.0]), 2)[0].tolist()]
        ['0xf0', '0x77']
    """
    rows, absmax = _blocks(x, block_size)
    divisor = absmax.clamp(min=1e-38).unsqueeze(1)
    values = rows * (1.0 / divisor)
    if x.numel() % block_size:
        values[-1] = rows[-1] / divisor[-1]
        absmax[-1] = divisor[-1, 0]
    flat = values.reshape(-1)[: x.numel()]
    if flat.numel() % 2:
        flat = torch.nn.functional.pad(flat, (0, 1))
    # The number of thresholds strictly below each value.
    codes = torch.bucketize(flat, NF4_THRESHOLDS.to(x.device)).to(torch.uint8)
    return codes[0::2] << 4 | codes[1::2], absmax


def dequantize_nf4(
    codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block_size: int
) -> torch.Tensor:
    """Decode nf4; see the formulas of this module.

    Args:
        codes: uint8 `[ceil(n / 2)]`.
        absmax: float32 `[ceil(n / block_size)]`.
        shape: Shape of the result, n elements.
        dtype: Dtype of the result.
        block_size: Elements per scale.

    Returns:
        The values, computed in fp32 and rounded once.

    Example:
        >>> dequantize_nf4(torch.tensor([0xF0], dtype=torch.uint8), torch.ones(1), (2,), torch.float32, 2)
        tensor([ 1., -1.])
    """
    numel = 1
    for size in shape:
        numel *= size
    nibbles = torch.stack((codes >> 4, codes & 15), dim=1).reshape(-1)[:numel]
    levels = _LEVELS.to(codes.device)[nibbles.long()]
    return (levels * absmax.repeat_interleave(block_size)[:numel]).to(dtype).reshape(tuple(shape))
