"""nf4: 16 quantiles of the normal distribution, times the absmax of the block."""

from __future__ import annotations

import torch

from .. import _C
from .._decode_ops import PackedPart, define_block_decode
from .blockwise import define_format
from .nested import MAP_PARTS, NestedBlockCodec, Nesting, nest_in_map

__all__ = ["NF4", "NF4_CODEC", "NF4_DQ"]

NF4 = define_format("nf4", torch.uint8, 2, _C.quantize_nf4, _C.dequantize_nf4)
"""Layout and operations."""

_CODES = PackedPart("codes", torch.uint8, lambda numel, block_size: -(-numel // 2))
NF4_DQ = define_block_decode("nf4_dq", (_CODES, *MAP_PARTS), _C.dequantize_nf4_dq)
"""Operations that decode it with quantized scales."""

NF4_CODEC = NestedBlockCodec(NF4, Nesting(MAP_PARTS, nest_in_map, None, NF4_DQ))
"""4 bits a value: 16 quantiles of the normal distribution, times the block's absmax."""
