"""The operations `torch.ops.ts_quant.*`: schema, kernels, fake kernels, and one contract for each.

Here is what they share; codecs declare them (those that decode with `_decode_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

__all__ = [
    "FLOATS",
    "LIBRARY",
    "REFUSALS",
    "check_block_size",
    "check_decode",
    "check_float",
    "check_packed",
    "decode_with",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are encoded and decoded natively."""

LIBRARY = OpLibrary("ts_quant")
"""The library that every operation of this package is declared in."""

REFUSALS = (ValueError, TypeError)
"""What native checks raise."""


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
