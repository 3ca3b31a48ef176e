"""GPTQ and AWQ: integers with a scale and a zero for each group of input channels of an output.

$W_{nk} = (q_{kn} - z_{gn}) s_{gn}$, where $g$ is `g_idx[k]` or $k$ divided by the group size. Both store
the transposed matrix, several integers in a word of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import ArgumentError, TrainStreamError, message

from .. import _C
from .._decode_ops import Operand, define_decode
from .base import Packed, Part
from .meta import Meta
from .published import PublishedCodec

__all__ = ["AWQ_CODEC", "GPTQ_CODEC", "GroupCodec"]

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_BITS = {False: (2, 4, 8), True: (4,)}


def _expected(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> list[Operand]:
    group_size, bits, awq, _, groups, ordered = numbers
    if len(shape) != 2 or bits not in _BITS[bool(awq)] or group_size < 1 or groups < 1:
        given = f"shape {tuple(shape)}, {bits} bits, {groups} groups of {group_size}"
        raise ArgumentError(
            message(function, "shape", "a matrix in groups of 4-bit codes or the like", given)
        )
    rows, columns = shape
    per = 32 // bits
    if rows % per or (not awq and columns % per) or rows == 0:
        raise ArgumentError(message(function, "shape", f"multiples of {per}", tuple(shape)))
    if not ordered and groups < -(-columns // group_size):
        raise ArgumentError(message(function, "scales", f"a row for every group of {group_size}", groups))
    integers = (torch.int32,)
    return [
        Operand(integers, rows * columns // per),
        Operand(integers, groups * rows // per),
        Operand(_SCALES, groups * rows),
        Operand(integers, columns if ordered else 0),
    ]


def _native(
    codes: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor,
    out: torch.Tensor,
    group_size: int,
    bits: int,
    awq: int,
    zero_offset: int,
    groups: int,
    ordered: int,
) -> None:
    if bool(g_idx.numel()) != bool(ordered) or scales.numel() != groups * out.shape[0]:
        raise ValueError("the numbers say otherwise than the tensors")
    _C.dequantize_groups(codes, zeros, scales, g_idx, out, group_size, bits, bool(awq), zero_offset)


GROUPS = define_decode(
    "groups",
    ("codes", "zeros", "scales", "g_idx"),
    ("group_size", "bits", "awq", "zero_offset", "groups", "ordered"),
    _native,
    _expected,
)


class GroupCodec(PublishedCodec):
    """GPTQ's or AWQ's packing of a matrix (rows, columns) = (outputs, inputs).

    Packed are, named and shaped as published: `qweight` int32, `qzeros` int32, `scales` (groups, rows) and,
    where groups do not follow each other, `g_idx` int32 (columns).
    The description holds the group size, `bits`, `zero_offset` (1 for GPTQ's first format, which stores zeros
    less one), `scales` (their dtype) and `act_order`.

    Example:
        >>> GPTQ_CODEC.packed_bytes((128, 256), GPTQ_CODEC.describe(128)) / (128 * 256)
        0.51953125
    """

    operation = GROUPS

    def __init__(self, name: str, awq: bool) -> None:
        """Make one of the two.

        Args:
            name: Its name.
            awq: Whether words hold outputs, interleaved.
        """
        self.name, self._awq = name, awq

    def describe(
        self,
        group_size: int,
        bits: int = 4,
        *,
        zero_offset: int = 0,
        act_order: bool = False,
        scales: torch.dtype = torch.float16,
    ) -> Meta:
        """Describe a packing.

        Args:
            group_size: Input channels of a group.
            bits: Of a code: 4, or for GPTQ also 2 or 8.
            zero_offset: What is added to stored zeros, modulo 2 to the power of `bits`.
            act_order: Whether there is a `g_idx`.
            scales: Their dtype.

        Returns:
            The description.
        """
        return Meta.make(
            group_size,
            bits=bits,
            zero_offset=zero_offset or False,
            act_order=act_order,
            scales=dtype_name(scales),
        )

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse what `describe` does not make."""
        try:
            scales = parse_dtype(meta.get("scales", "float16"), accepted=_SCALES)
            again = self.describe(
                meta.block_size,
                meta.get("bits", 4),
                zero_offset=meta.get("zero_offset", 0),
                act_order=meta.get("act_order", False),
                scales=scales,
            )
            good = meta == again and meta.get("zero_offset", 0) in (0, 1)
            good = good and 1 <= meta.block_size <= 1 << 40
            good = good and meta.get("bits") in _BITS[self._awq] and type(meta.get("bits")) is int
            good = good and type(meta.get("act_order", False)) is bool
        except (TrainStreamError, TypeError):
            good = False
        if not good:
            raise ArgumentError(message(function, "meta", f"what describe() of {self.name} makes", meta))

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List `qweight`, `qzeros`, `scales` and, if there is one, `g_idx`; see the base class."""
        described = self.meta_of(meta)
        numbers = self._numbers(shape, described)
        _expected(self.name, shape, numbers)
        (rows, columns), per, groups = shape, 32 // numbers[1], numbers[4]
        scales = parse_dtype(described.get("scales", "float16"))
        parts = {
            "qweight": Part(torch.int32, (columns, rows // per) if self._awq else (columns // per, rows)),
            "qzeros": Part(torch.int32, (groups, rows // per)),
            "scales": Part(scales, (groups, rows)),
        }
        return parts | ({"g_idx": Part(torch.int32, (columns,))} if described.get("act_order") else {})

    def _numbers(self, shape: Sequence[int], meta: Meta) -> tuple[int, ...]:
        columns = shape[1] if len(shape) == 2 else 0
        groups = -(-columns // max(meta.block_size, 1))
        offset, ordered = meta.get("zero_offset", 0), meta.get("act_order", False)
        return meta.block_size, meta.get("bits", 4), int(self._awq), offset, groups, int(ordered)

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called; see the base class."""
        codes = packed["qweight"]
        g_idx = packed["g_idx"] if meta.get("act_order") else codes.new_empty(0)
        return [codes, packed["qzeros"], packed["scales"], g_idx], shape, self._numbers(shape, meta)


GPTQ_CODEC = GroupCodec("gptq", awq=False)
"""Words hold input channels of one output, in order."""

AWQ_CODEC = GroupCodec("awq", awq=True)
"""Words hold eight outputs of one input channel, in the order 0 2 4 6 1 3 5 7."""
