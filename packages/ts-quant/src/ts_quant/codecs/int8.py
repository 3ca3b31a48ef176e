"""int8: 255 even steps from -absmax to absmax, one fp32 absmax per block."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from .._decode_ops import PackedPart, define_block_decode
from .._ops import LIBRARY, check_block_size, check_float
from .base import Packed
from .blockwise import define_format
from .nested import LOG_PARTS, NestedBlockCodec, Nesting, nest_in_logs

__all__ = ["ENCODE_INT8_DQ", "INT8", "INT8_CODEC", "INT8_DQ"]

INT8 = define_format("int8", torch.int8, 1, _C.quantize_int8, _C.dequantize_int8)
"""Layout and operations."""

_CODES = PackedPart("codes", torch.int8, lambda numel, block_size: numel)
INT8_DQ = define_block_decode("int8_dq", (_CODES, *LOG_PARTS), _C.dequantize_int8_dq)
"""Operations that decode it with quantized scales."""


def _fake_encode(
    x: torch.Tensor, absmax: torch.Tensor, nested_absmax: torch.Tensor, block_size: int
) -> torch.Tensor:
    check_float("encode_int8_dq", "x", x.dtype)
    check_block_size("encode_int8_dq", block_size)
    return torch.empty(x.numel(), dtype=torch.int8, device=x.device)


def _encode(
    x: torch.Tensor, absmax: torch.Tensor, nested_absmax: torch.Tensor, block_size: int
) -> torch.Tensor:
    codes = _fake_encode(x, absmax, nested_absmax, block_size)
    _C.encode_int8_dq(x.contiguous(), absmax, nested_absmax, codes, block_size)
    return codes


ENCODE_INT8_DQ: Any = LIBRARY.define(
    "encode_int8_dq(Tensor x, Tensor absmax, Tensor nested_absmax, int block_size) -> Tensor",
    cpu=_encode,
    fake=_fake_encode,
)
"""`(x, absmax, nested_absmax, block_size) -> codes`: codes for quantized scales that are there already."""


def _recode(x: torch.Tensor, nested: Packed, block_size: int) -> torch.Tensor:
    codes: torch.Tensor = ENCODE_INT8_DQ(x, nested["absmax"], nested["nested_absmax"], block_size)
    return codes


INT8_CODEC = NestedBlockCodec(INT8, Nesting(LOG_PARTS, nest_in_logs, _recode, INT8_DQ))
"""8 bits a value: 255 even steps from -absmax to absmax."""
