r"""The formats of bitsandbytes and quantized scales, in plain PyTorch, value by value.

Oracle of the tests and description of the formats. Slow, and built from tables: nothing here calls a kernel.

**Dynamic map.** Signed, 8 bits: for each power of ten $10^{-6} \ldots 10^0$ the midpoints of 1, 2, 4, ... 64
even parts of (0.1, 1), with both signs, and 0 and 1 (arXiv:1511.04561).

**Nested scales, map form** (nf4, fp4; arXiv:2305.14314). $o = \mathrm{mean}(a)$, $d = a - o$, per 256 values
$m = \max |d|$; $v = d \cdot (1/m)$ is put on the even grid of 65,536 steps from -1 to 1, and the byte is the
index of the map's value nearest to the grid point; $\hat a = \mathrm{map}(c)\, m + o$. That is what
bitsandbytes' CPU path makes; its CUDA path takes the value nearest to $v$ itself.

**Nested scales, log form** (int8). Per 256 values $m = \max a$; the byte is the smallest $c$ with
$2^{(c+1)/16 - 16} m \ge a$, 0 for $a = 0$.

**fp4.** $\hat x = \mathrm{level}(q)\, a$. **int8 by rows** (arXiv:2208.07339).
$\hat x = (q\, s) \cdot \mathrm{fl}(1/127)$.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = [
    "FP4_LEVELS",
    "decode_four_bit",
    "decode_int8_blocks",
    "decode_int8_rows",
    "dynamic_map",
    "encode_int8_for",
    "log_scales",
    "map_scales",
    "nest_in_logs",
    "nest_in_map",
]

FP4_LEVELS: tuple[float, ...] = tuple(
    sign * value / 12.0 for sign in (1.0, -1.0) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)
"""The 16 values of fp4, in [-1, 1]; index = code: sign, two exponent bits, one mantissa bit."""

_GROUP = 256


def dynamic_map() -> list[float]:
    """Return the 256 values of the dynamic type, ascending, each a float32.

    Example:
        >>> [round(value, 4) for value in dynamic_map()[-3:]]
        [0.9789, 0.993, 1.0]
    """
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        parts = 2 ** (exponent + 6)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        for part in range(parts):
            middle = float((edges[part] + edges[part + 1]) / 2 * float(10**exponent))
            values += [middle, -middle]
    return sorted(values)


def _nearest(value: float, table: Sequence[float]) -> int:
    return min(range(len(table)), key=lambda index: (abs(table[index] - value), index))


def nest_in_map(
    absmax: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize scales in the map form; see the formulas of this module.

    Args:
        absmax: float32 `[n]`, on the CPU.
        dtype: Of the values: a scale that it cannot hold gets the next smaller code.

    Returns:
        Codes uint8 `[n]`, the largest of each group float32 `[ceil(n / 256)]`, the offset float32 `[]`.

    Example:
        >>> nest_in_map(torch.tensor([1.0, 3.0]))[0].tolist()
        [0, 255]
    """
    table = dynamic_map()
    offset = absmax.mean() if absmax.numel() else torch.zeros(())
    if not offset.isfinite():
        offset = absmax.double().mean().float()
    codes, largest, known = [], [], {}
    for group in torch.split(absmax - offset, _GROUP) if absmax.numel() else ():
        top = group.abs().max()
        largest.append(float(top))
        for step in (((group * (1.0 / top)).clamp(-1, 1) + 1.0) * 0.5 * 65535.0 + 0.5).tolist():
            index = 0 if math.isnan(step) else int(step)
            if index not in known:
                known[index] = _nearest(index / 65535 * 2 - 1, table)
            code = known[index]
            beyond = not (torch.tensor(table[code]) * top + offset).to(dtype).isfinite()
            codes.append(code - 1 if beyond else code)
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(largest, dtype=torch.float32), offset


def map_scales(
    codes: torch.Tensor, largest: torch.Tensor, table: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Decode scales in the map form.

    Args:
        codes: uint8 `[n]`.
        largest: float32 `[ceil(n / 256)]`.
        table: float32 `[256]`.
        offset: float32 `[]`.

    Returns:
        float32 `[n]`, rounded after the product and after the sum.

    Example:
        >>> code = torch.tensor([2], dtype=torch.uint8)
        >>> map_scales(code, torch.ones(1), torch.arange(256.0), torch.ones(()))
        tensor([3.])
    """
    return table[codes.long()] * largest.repeat_interleave(_GROUP)[: codes.numel()] + offset


def _ratio(code: int) -> float:
    return float(torch.tensor(2.0 ** ((code + 1) / 16 - 16) if code else 0.0, dtype=torch.float32))


def nest_in_logs(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize scales in the log form; see the formulas of this module.

    Args:
        absmax: float32 `[n]`, >= 0, on the CPU.

    Returns:
        Codes uint8 `[n]`, the largest of each group float32 `[ceil(n / 256)]`.

    Example:
        >>> nest_in_logs(torch.tensor([0.0, 1.0, 2.0]))[0].tolist()
        [0, 239, 255]
    """
    codes, largest = [], []
    for group in torch.split(absmax, _GROUP) if absmax.numel() else ():
        top = group.max()
        largest.append(float(top))
        scales = torch.tensor([_ratio(code) for code in range(256)]) * top
        codes += [int((scales < value).sum()) for value in group]
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(largest, dtype=torch.float32)


def log_scales(codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Decode scales in the log form.

    Args:
        codes: uint8 `[n]`.
        largest: float32 `[ceil(n / 256)]`.

    Returns:
        float32 `[n]`.

    Example:
        >>> log_scales(torch.tensor([239], dtype=torch.uint8), torch.tensor([2.0]))
        tensor([1.])
    """
    ratios = torch.tensor([_ratio(code) for code in range(256)])
    return ratios[codes.long()] * largest.repeat_interleave(_GROUP)[: codes.numel()]


def encode_int8_for(
    x: torch.Tensor, scale_codes: torch.Tensor, absmax: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Encode in int8 for scales that are there already, those with code 1 toward zero.

    Args:
        x: Floating tensor, n elements.
        scale_codes: uint8 `[ceil(n / block_size)]`.
        absmax: What they decode to, float32.
        block_size: Elements per scale.

    Returns:
        int8 `[n]`.

    Example:
        >>> encode_int8_for(torch.tensor([1.0, -0.5]), torch.tensor([255]), torch.ones(1), 2)
        tensor([127, -64], dtype=torch.int8)
    """
    codes = torch.zeros(x.numel(), dtype=torch.int8)
    for index, values in enumerate(torch.split(x.flatten().float(), block_size) if x.numel() else ()):
        scale = absmax[index] / 127.0
        if scale > 0:
            quotients = values / scale
            whole = quotients.trunc() if int(scale_codes[index]) == 1 else quotients.round()
            first = index * block_size
            codes[first : first + values.numel()] = whole.clamp(-127, 127).to(torch.int8)
    return codes


def decode_four_bit(
    levels: Sequence[float], codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], block_size: int
) -> torch.Tensor:
    """Decode two codes a byte, the first in the high nibble.

    Args:
        levels: The 16 values.
        codes: uint8 `[ceil(n / 2)]`.
        absmax: float32 `[ceil(n / block_size)]`.
        shape: Shape of the result, n elements.
        block_size: Elements per scale.

    Returns:
        float32 of the shape.

    Example:
        >>> decode_four_bit(FP4_LEVELS, torch.tensor([0x3B], dtype=torch.uint8), torch.ones(1), (2,), 2)
        tensor([ 1., -1.])
    """
    numel = math.prod(shape)
    nibbles = torch.stack((codes >> 4, codes & 15), dim=1).reshape(-1)[:numel]
    values = torch.tensor(levels, dtype=torch.float32)[nibbles.long()]
    return (values * absmax.repeat_interleave(block_size)[:numel]).reshape(tuple(shape))


def decode_int8_blocks(
    codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], block_size: int
) -> torch.Tensor:
    """Decode int8 with one scale per block: code times absmax / 127.

    Args:
        codes: int8 `[n]`.
        absmax: float32 `[ceil(n / block_size)]`.
        shape: Shape of the result, n elements.
        block_size: Elements per scale.

    Returns:
        float32 of the shape.

    Example:
        >>> decode_int8_blocks(torch.tensor([127], dtype=torch.int8), torch.ones(1), (1,), 2)
        tensor([1.])
    """
    scale = (absmax / 127.0).repeat_interleave(block_size)[: codes.numel()]
    return (codes.float() * scale).reshape(tuple(shape))


def decode_int8_rows(codes: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
    """Decode int8 with one scale per row.

    Args:
        codes: int8 `[rows, columns]`.
        row_absmax: float32 `[rows]`.

    Returns:
        float32 `[rows, columns]`, rounded after each product.

    Example:
        >>> decode_int8_rows(torch.tensor([[127]], dtype=torch.int8), torch.ones(1))
        tensor([[1.]])
    """
    return codes.float() * row_absmax.unsqueeze(1) * torch.tensor(1 / 127, dtype=torch.float32)
