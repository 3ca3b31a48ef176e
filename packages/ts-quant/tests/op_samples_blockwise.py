"""Calls of the operations of int8 and nf4, for opcheck."""

import torch

from ts_quant.codecs.int8 import INT8
from ts_quant.codecs.nf4 import NF4

SHAPES = (((3, 50), 64), ((8, 64), 64), ((7,), 2), ((0,), 64))


def samples(device):
    made = {}
    for name, layout in (("nf4", NF4), ("int8", INT8)):
        encode, decode, decode_out = [], [], []
        for shape, block_size in SHAPES:
            x = torch.randn(shape, device=device)
            codes, absmax = layout.quantize(x, block_size)
            encode.append((x, block_size))
            decode.append((codes, absmax, list(shape), torch.bfloat16, block_size))
            decode_out.append((codes, absmax, torch.empty(shape, device=device), block_size))
        made |= {
            f"quantize_{name}": encode,
            f"dequantize_{name}": decode,
            f"dequantize_{name}_out": decode_out,
        }
    return made
