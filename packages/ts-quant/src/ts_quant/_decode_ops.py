"""Operations that decode packed tensors: one way to declare them for every codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message

from ._ops import LIBRARY, REFUSALS, check_block_size, check_decode, check_float

__all__ = ["DecodeOps", "Operand", "PackedPart", "define_block_decode", "define_decode"]


class Operand(NamedTuple):
    """What a packed tensor has to be for an output of some shape.

    Attributes:
        dtypes: Accepted dtypes.
        numel: Number of elements.
    """

    dtypes: tuple[torch.dtype, ...]
    numel: int


Expected = Callable[[str, Sequence[int], tuple[int, ...]], Iterable[Operand]]


class PackedPart(NamedTuple):
    """One packed tensor of a format whose sizes follow from the number of values.

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
        new: `(*packed, shape, dtype, *numbers) -> Tensor`.
        out: `(*packed, out, *numbers) -> None`.
    """

    new: Callable[..., torch.Tensor]
    out: Callable[..., None]


def _check(
    function: str, names: Sequence[str], tensors: Sequence[torch.Tensor], expected: Iterable[Operand]
) -> None:
    device = tensors[0].device
    for name, tensor, wanted in zip(names, tensors, expected, strict=True):
        if tensor.dtype not in wanted.dtypes:
            kinds = " or ".join(map(dtype_name, wanted.dtypes))
            raise ArgumentTypeError(message(function, name, kinds, dtype_name(tensor.dtype)))
        if tensor.numel() != wanted.numel or not tensor.is_contiguous() or tensor.device != device:
            given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            wish = f"a contiguous tensor of {wanted.numel} elements on {device}"
            raise ArgumentError(message(function, name, wish, given))


def define_decode(
    name: str, tensors: Sequence[str], numbers: Sequence[str], native: Callable[..., None], expected: Expected
) -> DecodeOps:
    """Declare `dequantize_<name>`, which allocates its result, and `dequantize_<name>_out`.

    The native function checks everything itself, so a call that is right pays for one check only: `expected`
    words the error after a refusal, and stands alone where there is no native call (fake kernels). Only the
    size of the first packed tensor is looked at before memory is taken for the result.

    Args:
        name: Name of the format.
        tensors: Names of its packed tensors, in the order of the native function's arguments.
        numbers: Names of its integers, which follow the output.
        native: `(*packed, out, *numbers)`, which writes out, or raises `ValueError` or `TypeError`.
        expected: `(function, shape, numbers) -> operands`: what the packed tensors have to be; raises
            `ArgumentError` for a shape or numbers that no tensor can have.

    Returns:
        The operations.
    """
    count, function = len(tensors), f"dequantize_{name}"

    def fake(*arguments: Any) -> torch.Tensor:
        packed, (shape, dtype), rest = arguments[:count], arguments[count : count + 2], arguments[count + 2 :]
        check_float(function, "dtype", dtype)
        _check(function, tensors, packed, expected(function, shape, rest))
        return torch.empty(shape, dtype=dtype, device=packed[0].device)

    def run(*arguments: Any) -> torch.Tensor:
        packed, (shape, dtype), rest = arguments[:count], arguments[count : count + 2], arguments[count + 2 :]
        if packed[0].numel() != next(iter(expected(function, shape, rest))).numel:
            fake(*arguments)
        out = torch.empty(shape, dtype=dtype, device=packed[0].device)
        try:
            native(*packed, out, *rest)
        except REFUSALS:
            fake(*arguments)
            raise
        return out

    def check_out(*arguments: Any) -> None:
        packed, out, rest = arguments[:count], arguments[count], arguments[count + 1 :]
        check_decode(f"{function}_out", out, packed[0])
        _check(f"{function}_out", tensors, packed, expected(f"{function}_out", out.shape, rest))

    def run_out(*arguments: Any) -> None:
        try:
            native(*arguments)
        except REFUSALS:
            check_out(*arguments)
            raise

    parts = ", ".join(f"Tensor {tensor}" for tensor in tensors)
    extra = "".join(f", int {number}" for number in numbers)
    schema = f"{function}({parts}, SymInt[] shape, ScalarType dtype{extra}) -> Tensor"
    new: Any = LIBRARY.define(schema, cpu=run, fake=fake)
    into: Any = LIBRARY.define(
        f"{function}_out({parts}, Tensor(a!) out{extra}) -> ()", cpu=run_out, fake=check_out
    )
    return DecodeOps(new, into)


def define_block_decode(
    name: str,
    parts: Sequence[PackedPart],
    native: Callable[..., None],
    *,
    check_size: Callable[[str, int], None] = check_block_size,
) -> DecodeOps:
    """Declare the operations of a format whose sizes follow from the number of values and a block size.

    Args:
        name: Name of the format.
        parts: Its packed tensors, in the order of the native function's arguments.
        native: `(*packed, out, block_size)`, which writes out.
        check_size: `(function, block_size)` raises for a block size that the format cannot have.

    Returns:
        The operations; their one number is the block size.
    """

    def expected(function: str, shape: Sequence[int], numbers: tuple[int, ...]) -> Iterable[Operand]:
        numel, block_size = math.prod(shape), numbers[0]
        check_size(function, block_size)
        for part in parts:
            yield Operand((part.dtype,), part.size(numel, block_size))

    return define_decode(name, [part.name for part in parts], ("block_size",), native, expected)
