r"""Scales that are quantized themselves (`double_quant`): one byte a block, one fp32 per 256 blocks.

**Map** (nf4; the nested statistics of bitsandbytes). With $o$ the mean of the absmax, $d_b = a_b - o$ and
$m_g = \max_{b \in g} |d_b|$, the byte is the index of the dynamic map's value nearest to $d_b / m_g$, of
which bitsandbytes' CPU path keeps 16 bits; $\hat a_b = \mathrm{map}(c_b)\, m_g + o$. Where the dtype of the
values cannot hold that, it is the next smaller byte. A mean whose sum overflows is taken in float64.

**Log** (int8). $m_g = \max_{b \in g} a_b$; the byte is the smallest whose
$\hat a_b = 2^{(c_b + 1)/16 - 16}\, m_g$ (0 for 0) is at least $a_b$, so that no value is cut off, and the
codes are those of $\hat a_b$. Blocks at byte 1, 60,000 times smaller than their group's largest and more, are
rounded toward zero: nothing grows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ts_core.errors import ArgumentError, message

from .._decode_ops import DecodeOps, PackedPart
from .base import Packed, Part
from .blockwise import BlockCodec, Format
from .meta import Meta

__all__ = [
    "GROUP",
    "LOG_PARTS",
    "MAP_PARTS",
    "NestedBlockCodec",
    "Nesting",
    "dynamic_map",
    "nest_in_logs",
    "nest_in_map",
    "ratios",
]

GROUP = 256
"""Blocks that share one fp32."""

_MAP_SIZE = 257
_GRID = 65536  # values of the quotient that bitsandbytes' CPU path tells apart


def _blocks(numel: int, block_size: int) -> int:
    return -(-numel // block_size)


def _groups(numel: int, block_size: int) -> int:
    return -(-_blocks(numel, block_size) // GROUP)


_NESTED_PARTS = (
    PackedPart("absmax", torch.uint8, _blocks),
    PackedPart("nested_absmax", torch.float32, _groups),
)
MAP_PARTS = (*_NESTED_PARTS, PackedPart("nested_map", torch.float32, lambda numel, block_size: _MAP_SIZE))
"""Packed tensors of the map form; `nested_map` holds 256 values and the offset."""
LOG_PARTS = _NESTED_PARTS
"""Packed tensors of the log form."""


@functools.cache
def dynamic_map() -> torch.Tensor:
    """Return the 256 values of the signed dynamic 8-bit type, ascending, float32.

    For each power of ten from 1e-6 to 1, the midpoints of 1, 2, 4, ... 64 even parts of (0.1, 1), times it,
    with both signs; and 0 and 1.

    Source: 8-Bit Approximations for Parallelism in Deep Learning, arXiv:1511.04561.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32)


@functools.lru_cache(maxsize=16)
def _nearest_codes(device: torch.device) -> torch.Tensor:
    """Return the code nearest to each of the 65,536 even steps from -1 to 1."""
    values = dynamic_map().double()
    grid = torch.arange(_GRID, dtype=torch.float64) / (_GRID - 1) * 2 - 1
    return torch.bucketize(grid, (values[:-1] + values[1:]) / 2).to(torch.uint8).to(device)


@functools.lru_cache(maxsize=16)
def ratios(device: torch.device) -> torch.Tensor:
    """Return what each byte of the log form stands for, relative to its group's largest, float32 `[256]`."""
    values = [0.0, *(2.0 ** ((code + 1) / 16 - 16) for code in range(1, 256))]
    return torch.tensor(values, dtype=torch.float64).float().to(device)


def _in_groups(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).reshape(-1, GROUP)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)


def _mean(absmax: torch.Tensor) -> torch.Tensor:
    mean = absmax.mean() if absmax.numel() else torch.zeros(())
    return mean if bool(mean.isfinite()) else absmax.double().mean().float()


def nest_in_map(absmax: torch.Tensor, dtype: torch.dtype = torch.float32) -> Packed:
    """Quantize scales in the map form.

    Args:
        absmax: float32 `[blocks]`, finite; any device. Not written.
        dtype: Of the values: what the scales come to is finite in it.

    Returns:
        `absmax` uint8 `[blocks]`, `nested_absmax` float32, `nested_map` float32 `[257]`.
    """
    device = absmax.device
    if absmax.is_meta:
        groups = absmax.new_empty(_groups(absmax.numel(), 1))
        codes = absmax.new_empty(absmax.numel(), dtype=torch.uint8)
        return {"absmax": codes, "nested_absmax": groups, "nested_map": absmax.new_empty(_MAP_SIZE)}
    # On the CPU wherever the scales are: the sum has another order on a GPU.
    offset = _mean(absmax.cpu())
    rows = _in_groups(absmax - offset.to(device))
    largest = _largest(rows)
    quotients = (rows * (1.0 / largest).unsqueeze(1)).clamp(-1, 1)
    # 0 / 0, in a group without range, goes to index 0.
    steps = ((quotients + 1.0) * 0.5 * (_GRID - 1.0) + 0.5).nan_to_num(nan=0.0).long()
    codes = _nearest_codes(device)[steps].reshape(-1)[: absmax.numel()]
    table = torch.cat((dynamic_map(), offset.reshape(1))).to(device)
    # One wait: no scale is beyond the largest of its group, and next to never is one out of reach.
    if largest.numel() and not bool((largest.max() + offset.to(device)).to(dtype).isfinite()):
        scales = table[codes.long()] * largest.repeat_interleave(GROUP)[: codes.numel()] + table[-1]
        codes = codes - (~scales.to(dtype).isfinite()).to(torch.uint8)
    return {"absmax": codes.contiguous(), "nested_absmax": largest, "nested_map": table}


def nest_in_logs(absmax: torch.Tensor, dtype: torch.dtype = torch.float32) -> Packed:
    """Quantize scales in the log form, upwards; none is beyond its group's largest.

    Args:
        absmax: float32 `[blocks]`, finite, >= 0; any device. Not written.
        dtype: Of the values.

    Returns:
        `absmax` uint8 `[blocks]`, `nested_absmax` float32.
    """
    if absmax.is_meta:
        groups = absmax.new_empty(_groups(absmax.numel(), 1))
        return {"absmax": absmax.new_empty(absmax.numel(), dtype=torch.uint8), "nested_absmax": groups}
    rows = _in_groups(absmax)
    largest = _largest(rows)
    scales = ratios(absmax.device) * largest.unsqueeze(1)  # ascending, and the last one is the largest
    codes = torch.searchsorted(scales, rows).to(torch.uint8).reshape(-1)[: absmax.numel()]
    return {"absmax": codes.contiguous(), "nested_absmax": largest}


class Nesting(NamedTuple):
    """How a block-wise format quantizes its scales.

    Attributes:
        parts: The packed tensors beside the codes.
        nest: `(absmax, dtype of the values) -> packed`, by the names of `parts`.
        recode: `(x, packed, block_size) -> codes` for the scales that came of it; None keeps the codes.
        decode: The operations.
    """

    parts: tuple[PackedPart, ...]
    nest: Callable[[torch.Tensor, torch.dtype], Packed]
    recode: Callable[[torch.Tensor, Packed, int], torch.Tensor] | None
    decode: DecodeOps


class NestedBlockCodec(BlockCodec):
    """A block-wise codec whose scales can be quantized too.

    Attributes:
        nests: True, for those who ask a codec before they ask for `double_quant`.

    Example:
        >>> from ts_quant.codecs import NF4_CODEC
        >>> NF4_CODEC.packed_bytes((64, 256), NF4_CODEC.meta(64, double_quant=True))
        9480
    """

    nests = True

    def __init__(self, layout: Format, nesting: Nesting) -> None:
        """Wrap a format.

        Args:
            layout: Layout and operations.
            nesting: What becomes of the scales with `double_quant`.
        """
        super().__init__(layout)
        self._nesting = nesting

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Keep the block size and whether the scales are quantized; see the base class."""
        return Meta.make(block_size, double_quant=bool(double_quant))

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse block sizes that are not even, and options that the codec does not have."""
        super().check_meta(Meta(meta.block_size), function)
        if meta.options not in ((), (("double_quant", True),)):
            expected = "a block size and no option but double_quant=True"
            raise ArgumentError(message(function, "meta", expected, meta))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List the packed tensors, one-dimensional, of the values in row-major order."""
        plain, described = super().parts(shape, meta), self.meta_of(meta)
        if not described.options:
            return plain
        numel = math.prod(shape)
        nested = {p.name: Part(p.dtype, (p.size(numel, described.block_size),)) for p in self._nesting.parts}
        return {"codes": plain["codes"], **nested}

    def encode(self, tensor: torch.Tensor, meta: Meta | int, *, name: str = "tensor") -> Packed:
        """Pack a tensor; see the base class."""
        described = self.meta_of(meta)
        packed = super().encode(tensor, described.block_size, name=name)
        if not described.options:
            return packed
        with torch.no_grad():
            nested = self._nesting.nest(packed.pop("absmax"), tensor.dtype)
            if self._nesting.recode is not None:
                packed = {"codes": self._nesting.recode(tensor, nested, described.block_size)}
        return {**packed, **nested}

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
        if not described.options:
            return super().decode(packed, shape, dtype, meta, out)
        tensors = [packed["codes"], *(packed[part.name] for part in self._nesting.parts)]
        if out is None:
            return self._nesting.decode.new(*tensors, shape, dtype, described.block_size)
        self.check_out(out, shape, dtype)
        self._nesting.decode.out(*tensors, out, described.block_size)
        return out

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out, where the cut falls between blocks; with quantized scales between groups of them."""
        described = self.meta_of(meta)
        cut = super().narrow(packed, shape, start, length, described.block_size)
        if cut is None or not described.options:
            return cut
        row = math.prod(shape[1:])
        first, count = start * row // described.block_size, length * row // described.block_size
        if first % GROUP:
            return None
        groups = packed["nested_absmax"].narrow(0, first // GROUP, -(-count // GROUP))
        return {**packed, **cut, "nested_absmax": groups}
