"""What codecs share that decode weights in the form others published them, and never make any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message

from .._ops import FLOATS, LIBRARY, REFUSALS
from .base import Packed, PackedCodec
from .meta import Meta

__all__ = ["Operand", "PublishedCodec", "PublishedOp", "define_published"]


class Operand(NamedTuple):
    """What a packed tensor has to be for an output of some shape.

    Attributes:
        dtypes: Accepted dtypes.
        numel: Number of elements.
    """

    dtypes: tuple[torch.dtype, ...]
    numel: int


Expected = Callable[[str, Sequence[int], tuple[int, ...]], Sequence[Operand]]


class PublishedOp(NamedTuple):
    """The two operations of a format.

    Attributes:
        new: `(*packed, shape, dtype, *numbers) -> Tensor`.
        into: `(*packed, out, *numbers) -> None`.
    """

    new: Any
    into: Any


def _check(
    function: str,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    expected: Sequence[Operand],
    device: torch.device,
) -> None:
    for name, tensor, wanted in zip(names, tensors, expected, strict=True):
        if tensor.dtype not in wanted.dtypes:
            kinds = " or ".join(map(dtype_name, wanted.dtypes))
            raise ArgumentTypeError(message(function, name, kinds, dtype_name(tensor.dtype)))
        if tensor.numel() != wanted.numel or not tensor.is_contiguous() or tensor.device != device:
            given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            raise ArgumentError(
                message(function, name, f"a contiguous tensor of {wanted.numel} elements on {device}", given)
            )


def define_published(
    name: str, tensors: Sequence[str], numbers: Sequence[str], native: Any, expected: Expected
) -> PublishedOp:
    """Declare `dequantize_<name>` and `dequantize_<name>_out`.

    Args:
        name: The format.
        tensors: Names of the packed tensors, in the order of the native function's arguments.
        numbers: Names of its integers, which follow the output.
        native: `(*tensors, out, *numbers) -> None`; it checks its arguments, too.
        expected: `(function, shape, numbers) -> operands`: what the packed tensors have to be; raises
            `ArgumentError` for a shape or numbers that no tensor can have.

    Returns:
        The operations.
    """
    count = len(tensors)
    packed = ", ".join(f"Tensor {tensor}" for tensor in tensors)
    extra = "".join(f", int {number}" for number in numbers)
    function = f"dequantize_{name}"

    def check(arguments: Sequence[Any], shape: Sequence[int], rest: tuple[int, ...]) -> None:
        _check(function, tensors, arguments, expected(function, shape, rest), arguments[0].device)

    def fake(*arguments: Any) -> torch.Tensor:
        shape, dtype = arguments[count : count + 2]
        if dtype not in FLOATS:
            raise ArgumentTypeError(
                message(function, "dtype", "float32, float16 or bfloat16", dtype_name(dtype))
            )
        check(arguments[:count], shape, arguments[count + 2 :])
        return torch.empty(shape, dtype=dtype, device=arguments[0].device)

    def run(*arguments: Any) -> torch.Tensor:
        out = fake(*arguments)
        native(*arguments[:count], out, *arguments[count + 2 :])
        return out

    def check_into(*arguments: Any) -> None:
        out = arguments[count]
        if out.dtype not in FLOATS:
            raise ArgumentTypeError(
                message(function, "out", "float32, float16 or bfloat16", dtype_name(out.dtype))
            )
        if not out.is_contiguous() or out.device != arguments[0].device:
            expected_out = f"a contiguous tensor on {arguments[0].device}"
            given = f"strides {out.stride()}, on {out.device}"
            raise ArgumentError(message(function, "out", expected_out, given))
        check(arguments[:count], out.shape, arguments[count + 1 :])

    def run_into(*arguments: Any) -> None:
        try:
            native(*arguments)
        except REFUSALS:
            check_into(*arguments)
            raise

    return PublishedOp(
        LIBRARY.define(
            f"{function}({packed}, SymInt[] shape, ScalarType dtype{extra}) -> Tensor", cpu=run, fake=fake
        ),
        LIBRARY.define(
            f"{function}_out({packed}, Tensor(a!) out{extra}) -> ()", cpu=run_into, fake=check_into
        ),
    )


class PublishedCodec(PackedCodec):
    """A codec that keeps what others packed, byte for byte, and decodes it.

    A subclass says in `arguments` how its operation is called.
    """

    encodes = False
    operation: PublishedOp

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called.

        Args:
            packed: The packed tensors.
            shape: Shape of the result.
            meta: Description of the packing.

        Returns:
            The operation's tensors, the shape it gives the result (of as many values), its integers.
        """
        raise NotImplementedError

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        size = tuple(shape)
        tensors, viewed, numbers = self.arguments(packed, size, self.meta_of(meta))
        if out is None:
            made: torch.Tensor = self.operation.new(*tensors, viewed, dtype, *numbers)
            return made.view(size)
        self.check_out(out, size, dtype)
        if not out.is_contiguous():
            raise ArgumentError(
                message("dequantize", "out", "a contiguous tensor", f"strides {out.stride()}")
            )
        self.operation.into(*tensors, out.view(viewed), *numbers)
        return out
