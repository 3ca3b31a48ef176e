"""Operations that decode any set of packed tensors whose sizes follow from the number of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message

from ._ops import LIBRARY, REFUSALS, check_block_size, check_float

__all__ = ["DecodeOps", "PackedPart", "define_decode"]


class PackedPart(NamedTuple):
    """One packed tensor of an operation.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        size: `(numel, block_size) -> elements`.
    """

    name: str
    dtype: torch.dtype
    size: Callable[[int, int], int]


class DecodeOps(NamedTuple):
    """The two operations that decode a format.

    Attributes:
        new: `(*packed, shape, dtype, block_size) -> Tensor`.
        out: `(*packed, out, block_size) -> None`.
    """

    new: Callable[..., torch.Tensor]
    out: Callable[..., None]


def _check_block(function: str, block_size: int) -> None:
    check_block_size(function, block_size)


def define_decode(
    name: str,
    parts: Sequence[PackedPart],
    native: Callable[..., None],
    *,
    check_size: Callable[[str, int], None] = _check_block,
) -> DecodeOps:
    """Declare `dequantize_<name>`, which allocates its result, and `dequantize_<name>_out`.

    The native function checks everything itself, so a call that is right pays for one check only: the ones
    here word the error after a refusal, and stand alone where there is no native call (fake kernels).

    Args:
        name: Name of the format.
        parts: Its packed tensors, in the order of the native function's arguments.
        native: `(*packed, out, block_size)`, which writes out.
        check_size: `(function, block_size)` raises for a block size that the format cannot have.

    Returns:
        The operations.
    """
    count, function = len(parts), f"dequantize_{name}"

    def check(called: str, packed: Sequence[torch.Tensor], numel: int, block_size: int) -> None:
        check_size(called, block_size)
        for part, tensor in zip(parts, packed, strict=True):
            if tensor.dtype != part.dtype:
                given = dtype_name(tensor.dtype)
                raise ArgumentTypeError(message(called, part.name, dtype_name(part.dtype), given))
            size = part.size(numel, block_size)
            if tensor.numel() != size or not tensor.is_contiguous():
                expected = f"a contiguous tensor of {size} elements ({numel} values, blocks of {block_size})"
                given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ArgumentError(message(called, part.name, expected, given))
            if tensor.device != packed[0].device:
                expected = f"a tensor on {packed[0].device}"
                raise ArgumentError(message(called, part.name, expected, str(tensor.device)))

    def fake(*arguments: Any) -> torch.Tensor:
        packed, (shape, dtype, block_size) = arguments[:count], arguments[count:]
        check_float(function, "dtype", dtype)
        check(function, packed, math.prod(shape), block_size)
        return torch.empty(shape, dtype=dtype, device=packed[0].device)

    def run(*arguments: Any) -> torch.Tensor:
        packed, (shape, dtype, block_size) = arguments[:count], arguments[count:]
        # Before memory is taken for a shape that does not fit.
        if packed[0].numel() != parts[0].size(math.prod(shape), max(block_size, 1)):
            fake(*arguments)
        out = torch.empty(shape, dtype=dtype, device=packed[0].device)
        try:
            native(*packed, out, block_size)
        except REFUSALS:
            fake(*arguments)
            raise
        return out

    def check_out(*arguments: Any) -> None:
        packed, (out, block_size) = arguments[:count], arguments[count:]
        called = f"{function}_out"
        check_float(called, "out", out.dtype)
        if not out.is_contiguous():
            raise ArgumentError(message(called, "out", "a contiguous tensor", f"strides {out.stride()}"))
        if out.device != packed[0].device:
            raise ArgumentError(message(called, "out", f"a tensor on {packed[0].device}", str(out.device)))
        check(called, packed, out.numel(), block_size)

    def run_out(*arguments: Any) -> None:
        try:
            native(*arguments)
        except REFUSALS:
            check_out(*arguments)
            raise

    packed = ", ".join(f"Tensor {part.name}" for part in parts)
    schema = f"{function}({packed}, SymInt[] shape, ScalarType dtype, int block_size) -> Tensor"
    out_schema = f"{function}_out({packed}, Tensor(a!) out, int block_size) -> ()"
    new: Any = LIBRARY.define(schema, cpu=run, fake=fake)
    out: Any = LIBRARY.define(out_schema, cpu=run_out, fake=check_out)
    return DecodeOps(new, out)
