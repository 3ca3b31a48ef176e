"""int8: 255 even steps from -absmax to absmax, one fp32 absmax per block."""

from __future__ import annotations

import torch

from .. import _C
from .._ops import define_format
from .blockwise import BlockCodec

__all__ = ["INT8", "INT8_CODEC"]

INT8 = define_format("int8", torch.int8, 1, _C.quantize_int8, _C.dequantize_int8)
"""Layout and operations."""

INT8_CODEC = BlockCodec(INT8)
"""8 bits a value: 255 even steps from -absmax to absmax."""
