"""nf4: 16 quantiles of the normal distribution, times the absmax of the block."""

from __future__ import annotations

import torch

from .. import _C
from .._ops import define_format
from .blockwise import BlockCodec

__all__ = ["NF4", "NF4_CODEC"]

NF4 = define_format("nf4", torch.uint8, 2, _C.quantize_nf4, _C.dequantize_nf4)
"""Layout and operations."""

NF4_CODEC = BlockCodec(NF4)
"""4 bits a value: 16 quantiles of the normal distribution, times the block's absmax."""
