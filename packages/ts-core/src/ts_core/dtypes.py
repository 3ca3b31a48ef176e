"""Names of dtypes: what users write, what we print, and which ones are short."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import OptionError

__all__ = ["dtype_name", "is_low_precision", "parse_dtype"]

_BY_NAME: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_SHORT: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def parse_dtype(
    value: str | torch.dtype, *, name: str = "dtype", accepted: Sequence[torch.dtype] | None = None
) -> torch.dtype:
    """Turn what a user wrote into a `torch.dtype`.

    Args:
        value: A `torch.dtype`, or its name in any usual spelling: "bfloat16", "bf16", "torch.bfloat16",
            "BF16".
        name: Name of the option, for the message.
        accepted: The dtypes that this option takes; `None` takes every one.

    Returns:
        The dtype.

    Raises:
        OptionError: Unknown name, or a dtype that the option does not take.

    Example:
        >>> parse_dtype("bf16")
        torch.bfloat16
    """
    result: torch.dtype | None = None
    if isinstance(value, torch.dtype):
        result = value
    elif isinstance(value, str):
        key = value.strip().lower().removeprefix("torch.")
        result = _BY_NAME.get(_SHORT.get(key, key))
    if result is None or (accepted is not None and result not in accepted):
        names = _BY_NAME if accepted is None else [dtype_name(dtype) for dtype in accepted]
        raise OptionError(f"option {name}: expected one of {', '.join(names)}, given {value!r}")
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """Return the plain name of a dtype, without the `torch.` prefix.

    Args:
        dtype: Any dtype.

    Returns:
        For instance "bfloat16"; `parse_dtype(dtype_name(d)) is d` for every dtype `parse_dtype` names.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def is_low_precision(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is a floating one of fewer than 32 bits.

    Such weights need an fp32 master copy when they are trained.

    Args:
        dtype: Any dtype.

    Returns:
        True for float16, bfloat16 and the 8-bit and 4-bit floats.

    Example:
        >>> is_low_precision(torch.float16), is_low_precision(torch.float32), is_low_precision(torch.int8)
        (True, False, False)
    """
    return dtype.is_floating_point and dtype.itemsize < 4
