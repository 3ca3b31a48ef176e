"""The operations `torch.ops.ts_quant.*`: schema, kernels, fake kernels, and one contract for each.

Here is what codecs share, and the block-wise formats int8 and nf4; the others are declared by their codecs.
Packed tensors of those two are one-dimensional: codes uint8 `[ceil(n / 2)]` (nf4, first element in the high
nibble) or int8 `[n]`, absmax float32 `[ceil(n / block_size)]`, for a tensor of `n` elements taken in
row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

__all__ = [
    "FLOATS",
    "LIBRARY",
    "REFUSALS",
    "Format",
    "check_block_size",
    "check_decode",
    "check_float",
    "check_packed",
    "decode_with",
    "define_format",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are encoded and decoded natively."""

LIBRARY = OpLibrary("ts_quant")
"""The library that every operation of this package is declared in."""

REFUSALS = (ValueError, TypeError)
"""What native checks raise."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """One block-wise format: its layout and its operations.

    Attributes:
        name: "nf4" or "int8".
        codes: Dtype of the codes.
        per_byte: Codes in one byte.
        quantize: `(x, block_size) -> (codes, absmax)`.
        dequantize: `(codes, absmax, shape, dtype, block_size) -> Tensor`.
        dequantize_out: `(codes, absmax, out, block_size) -> None`.
    """

    name: str
    codes: torch.dtype
    per_byte: int
    quantize: Callable[[torch.Tensor, int], Pair]
    dequantize: Callable[[torch.Tensor, torch.Tensor, Sequence[int], torch.dtype, int], torch.Tensor]
    dequantize_out: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def check_block_size(function: str, block_size: int) -> None:
    """Raise `ArgumentError` unless `block_size` is even and at least 2."""
    if block_size < 2 or block_size % 2:
        raise ArgumentError(message(function, "block_size", "an even integer >= 2", block_size))


def check_float(function: str, argument: str, dtype: torch.dtype) -> None:
    """Raise `ArgumentTypeError` unless `dtype` is one of `FLOATS`."""
    if dtype not in FLOATS:
        raise ArgumentTypeError(
            message(function, argument, "float32, float16 or bfloat16", dtype_name(dtype))
        )


def check_packed(function: str, expected: Mapping[str, tuple[torch.Tensor, torch.dtype, int]]) -> None:
    """Check packed tensors by name: (tensor, dtype, number of elements); contiguous, on one device.

    Args:
        function: Whose arguments they are.
        expected: What is there and what should be.

    Raises:
        ArgumentTypeError: Another dtype.
        ArgumentError: Another size, layout or device.
    """
    device = next(iter(expected.values()))[0].device
    for name, (tensor, dtype, size) in expected.items():
        if tensor.dtype != dtype:
            raise ArgumentTypeError(message(function, name, dtype_name(dtype), dtype_name(tensor.dtype)))
        if tensor.numel() != size or not tensor.is_contiguous() or tensor.device != device:
            given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
            wanted = f"a contiguous tensor of {size} elements on {device}"
            raise ArgumentError(message(function, name, wanted, given))


def check_decode(function: str, out: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless `out` is a contiguous float32, float16 or bfloat16 tensor on the device of `like`."""
    check_float(function, "out", out.dtype)
    if not out.is_contiguous():
        raise ArgumentError(message(function, "out", "a contiguous tensor", f"strides {out.stride()}"))
    if out.device != like.device:
        raise ArgumentError(message(function, "out", f"a tensor on {like.device}", str(out.device)))


def decode_with(native: Callable[..., None], contract: Callable[..., None], *arguments: Any) -> None:
    """Call a native function, which checks everything again; if it refuses, let the contract word it."""
    try:
        native(*arguments)
    except REFUSALS:
        contract(*arguments)
        raise


@dataclass(frozen=True)
class _Contract:
    """The argument checks of one format, with the signatures of its operations.

    The native functions check everything again, so a call that is right pays for one check only: these here
    word the error after a refusal, and stand alone where there is no native call (fake kernels).
    """

    name: str
    codes: torch.dtype
    per_byte: int

    def encode(self, x: torch.Tensor, block_size: int) -> None:
        check_float(f"quantize_{self.name}", "x", x.dtype)
        check_block_size(f"quantize_{self.name}", block_size)

    def decode(
        self,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        block_size: int,
    ) -> None:
        function = f"dequantize_{self.name}"
        check_float(function, "dtype", dtype)
        self._packed(function, codes, absmax, math.prod(shape), block_size)

    def decode_out(
        self, codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int
    ) -> None:
        function = f"dequantize_{self.name}_out"
        check_float(function, "out", out.dtype)
        if not out.is_contiguous():
            raise ArgumentError(message(function, "out", "a contiguous tensor", f"strides {out.stride()}"))
        if out.device != codes.device:
            raise ArgumentError(message(function, "out", f"a tensor on {codes.device}", str(out.device)))
        self._packed(function, codes, absmax, out.numel(), block_size)

    def _packed(
        self, function: str, codes: torch.Tensor, absmax: torch.Tensor, numel: int, block_size: int
    ) -> None:
        check_block_size(function, block_size)
        for name, tensor, dtype, size in (
            ("codes", codes, self.codes, -(-numel // self.per_byte)),
            ("absmax", absmax, torch.float32, -(-numel // block_size)),
        ):
            if tensor.dtype != dtype:
                raise ArgumentTypeError(message(function, name, dtype_name(dtype), dtype_name(tensor.dtype)))
            if tensor.numel() != size or not tensor.is_contiguous():
                expected = f"a contiguous tensor of {size} elements ({numel} values, blocks of {block_size})"
                given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ArgumentError(message(function, name, expected, given))
        if absmax.device != codes.device:
            raise ArgumentError(
                message(function, "absmax", f"a tensor on {codes.device}", str(absmax.device))
            )


_PACKED = "Tensor codes, Tensor absmax"


def _define_encode(contract: _Contract, native: Any) -> Any:
    """Declare `quantize_*`."""

    def fake(x: torch.Tensor, block_size: int) -> Pair:
        contract.encode(x, block_size)
        n = x.numel()
        codes = torch.empty(-(-n // contract.per_byte), dtype=contract.codes, device=x.device)
        return codes, torch.empty(-(-n // block_size), dtype=torch.float32, device=x.device)

    def run(x: torch.Tensor, block_size: int) -> Pair:
        codes, absmax = fake(x, block_size)
        native(x.contiguous(), codes, absmax, block_size)
        return codes, absmax

    schema = f"quantize_{contract.name}(Tensor x, int block_size) -> (Tensor codes, Tensor absmax)"
    return LIBRARY.define(schema, cpu=run, fake=fake)


def _define_decode(contract: _Contract, native: Any) -> Any:
    """Declare `dequantize_*`, which allocates its result."""

    def fake(
        codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block_size: int
    ) -> torch.Tensor:
        contract.decode(codes, absmax, shape, dtype, block_size)
        return torch.empty(shape, dtype=dtype, device=codes.device)

    def run(
        codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, block_size: int
    ) -> torch.Tensor:
        # Before memory is taken for a shape that does not fit.
        if codes.numel() != -(-math.prod(shape) // contract.per_byte):
            contract.decode(codes, absmax, shape, dtype, block_size)
        out = torch.empty(shape, dtype=dtype, device=codes.device)
        try:
            native(codes, absmax, out, block_size)
        except REFUSALS:
            contract.decode(codes, absmax, shape, dtype, block_size)
            raise
        return out

    arguments = f"{_PACKED}, SymInt[] shape, ScalarType dtype, int block_size"
    return LIBRARY.define(f"dequantize_{contract.name}({arguments}) -> Tensor", cpu=run, fake=fake)


def _define_decode_out(contract: _Contract, native: Any) -> Any:
    """Declare `dequantize_*_out`, which writes into a given tensor."""

    def run(codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int) -> None:
        try:
            native(codes, absmax, out, block_size)
        except REFUSALS:
            contract.decode_out(codes, absmax, out, block_size)
            raise

    schema = f"dequantize_{contract.name}_out({_PACKED}, Tensor(a!) out, int block_size) -> ()"
    return LIBRARY.define(schema, cpu=run, fake=contract.decode_out)


def define_format(name: str, code_dtype: torch.dtype, per_byte: int, encode: Any, decode: Any) -> Format:
    """Declare the three operations of one block-wise format on top of its two native functions.

    Args:
        name: Name of the format.
        code_dtype: Dtype of the codes.
        per_byte: Codes in one byte.
        encode: `(x, codes, absmax, block_size)`, which writes codes and absmax.
        decode: `(codes, absmax, out, block_size)`, which writes out.

    Returns:
        Layout and operations.
    """
    contract = _Contract(name, code_dtype, per_byte)
    return Format(
        name,
        code_dtype,
        per_byte,
        _define_encode(contract, encode),
        _define_decode(contract, decode),
        _define_decode_out(contract, decode),
    )
