"""Calls of the operations with quantized scales and of those for what bitsandbytes publishes, for opcheck."""

import torch

from ts_quant.codecs import INT8_CODEC, NF4_CODEC

SHAPES = (((3, 50), 64), ((8, 64), 64), ((7,), 2), ((0,), 64))


def samples(device):
    made = {name: [] for name in ("dequantize_nf4_dq", "dequantize_int8_dq", "encode_int8_dq")}
    made |= {name: [] for name in ("dequantize_fp4", "dequantize_fp4_dq", "dequantize_int8_rows")}
    made |= {f"{name}_out": [] for name in made if name.startswith("dequantize")}

    def add(name, packed, shape, block_size):
        tensors = tuple(packed)
        made[f"dequantize_{name}"].append((*tensors, list(shape), torch.bfloat16, block_size))
        out = torch.empty(shape, device=device)
        made[f"dequantize_{name}_out"].append((*tensors, out, block_size))

    for shape, block_size in SHAPES:
        x = torch.randn(shape, device=device)
        nf4 = NF4_CODEC.encode(x, NF4_CODEC.meta(block_size, double_quant=True))
        int8 = INT8_CODEC.encode(x, INT8_CODEC.meta(block_size, double_quant=True))
        add("nf4_dq", nf4.values(), shape, block_size)
        add("fp4_dq", nf4.values(), shape, block_size)
        add("fp4", NF4_CODEC.encode(x, block_size).values(), shape, block_size)
        add("int8_dq", int8.values(), shape, block_size)
        made["encode_int8_dq"].append((x, int8["absmax"], int8["nested_absmax"], block_size))
        rows = torch.ones(x.numel() // shape[-1] if x.numel() else 0, device=device)
        add("int8_rows", (int8["codes"], rows), shape, max(shape[-1], 1))
    return made
