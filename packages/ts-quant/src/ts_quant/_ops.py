"""The operations `torch.ops.ts_quant.*`: schema, kernels, fake kernels, and one contract for each.

Packed tensors are one-dimensional: codes uint8 `[ceil(n / 2)]` (nf4, first element in the high nibble) or
int8 `[n]`, absmax float32 `[ceil(n / block_size)]`, for a tensor of `n` elements taken in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

from . import _C

__all__ = ["FLOATS", "INT8", "NF4", "Format", "check_block_size"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are encoded and decoded natively."""

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


def _check_float(function: str, argument: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ArgumentTypeError(
            message(function, argument, "float32, float16 or bfloat16", dtype_name(dtype))
        )


def _check_packed(
    function: str,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    numel: int,
    block_size: int,
    code_dtype: torch.dtype,
    per_byte: int,
) -> None:
    check_block_size(function, block_size)
    sizes = (-(-numel // per_byte), -(-numel // block_size))
    for name, tensor, dtype, size in (
        ("codes", codes, code_dtype, sizes[0]),
        ("absmax", absmax, torch.float32, sizes[1]),
    ):
        if tensor.dtype != dtype:
            raise ArgumentTypeError(message(function, name, dtype_name(dtype), dtype_name(tensor.dtype)))
        if tensor.numel() != size or not tensor.is_contiguous():
            raise ArgumentError(
                message(
                    function,
                    name,
                    f"a contiguous tensor of {size} elements for {numel} values in blocks of {block_size}",
                    f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                )
            )
    if absmax.device != codes.device:
        raise ArgumentError(message(function, "absmax", f"a tensor on {codes.device}", str(absmax.device)))


_LIBRARY = OpLibrary("ts_quant")


# The native functions check everything again, so a call that is right pays for one check only: the Python
# checks below word the error after a refusal, and stand alone where there is no native call (fake kernels).
_REFUSALS = (ValueError, TypeError)


def _define(name: str, code_dtype: torch.dtype, per_byte: int, encode: Any, decode: Any) -> Format:
    """Declare the three operations of one format on top of its two native functions."""

    def check_quantize(x: torch.Tensor, block_size: int) -> None:
        _check_float(f"quantize_{name}", "x", x.dtype)
        check_block_size(f"quantize_{name}", block_size)

    def empty_pair(x: torch.Tensor, block_size: int) -> Pair:
        n = x.numel()
        codes = torch.empty(-(-n // per_byte), dtype=code_dtype, device=x.device)
        return codes, torch.empty(-(-n // block_size), dtype=torch.float32, device=x.device)

    def fake_quantize(x: torch.Tensor, block_size: int) -> Pair:
        check_quantize(x, block_size)
        return empty_pair(x, block_size)

    def run_quantize(x: torch.Tensor, block_size: int) -> Pair:
        check_quantize(x, block_size)
        codes, absmax = empty_pair(x, block_size)
        encode(x.contiguous(), codes, absmax, block_size)
        return codes, absmax

    def check_dequantize(
        codes: torch.Tensor,
        absmax: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        block_size: int,
    ) -> None:
        _check_float(f"dequantize_{name}", "dtype", dtype)
        numel = math.prod(shape)
        _check_packed(f"dequantize_{name}", codes, absmax, numel, block_size, code_dtype, per_byte)

    def fake_dequantize(
        codes: torch.Tensor,
        absmax: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        block_size: int,
    ) -> torch.Tensor:
        check_dequantize(codes, absmax, shape, dtype, block_size)
        return torch.empty(shape, dtype=dtype, device=codes.device)

    def run_dequantize(
        codes: torch.Tensor,
        absmax: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        block_size: int,
    ) -> torch.Tensor:
        # Before memory is taken for a shape that does not fit.
        if codes.numel() != -(-math.prod(shape) // per_byte):
            check_dequantize(codes, absmax, shape, dtype, block_size)
        out = torch.empty(shape, dtype=dtype, device=codes.device)
        try:
            decode(codes, absmax, out, block_size)
        except _REFUSALS:
            check_dequantize(codes, absmax, shape, dtype, block_size)
            raise
        return out

    def check_out(codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int) -> None:
        function = f"dequantize_{name}_out"
        _check_float(function, "out", out.dtype)
        if not out.is_contiguous():
            raise ArgumentError(message(function, "out", "a contiguous tensor", f"strides {out.stride()}"))
        if out.device != codes.device:
            raise ArgumentError(message(function, "out", f"a tensor on {codes.device}", str(out.device)))
        _check_packed(function, codes, absmax, out.numel(), block_size, code_dtype, per_byte)

    def run_out(codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int) -> None:
        try:
            decode(codes, absmax, out, block_size)
        except _REFUSALS:
            check_out(codes, absmax, out, block_size)
            raise

    packed = "Tensor codes, Tensor absmax"
    return Format(
        name,
        code_dtype,
        per_byte,
        _LIBRARY.define(
            f"quantize_{name}(Tensor x, int block_size) -> (Tensor codes, Tensor absmax)",
            cpu=run_quantize,
            fake=fake_quantize,
        ),
        _LIBRARY.define(
            f"dequantize_{name}({packed}, SymInt[] shape, ScalarType dtype, int block_size) -> Tensor",
            cpu=run_dequantize,
            fake=fake_dequantize,
        ),
        _LIBRARY.define(
            f"dequantize_{name}_out({packed}, Tensor(a!) out, int block_size) -> ()",
            cpu=run_out,
            fake=check_out,
        ),
    )


NF4 = _define("nf4", torch.uint8, 2, _C.quantize_nf4, _C.dequantize_nf4)
INT8 = _define("int8", torch.int8, 1, _C.quantize_int8, _C.dequantize_int8)
