"""Calls of the operations of fp8 and nvfp4, for opcheck."""

import torch

from ts_quant.codecs.fp8 import quantize_fp8
from ts_quant.codecs.nvfp4 import quantize_nvfp4

SHAPES = ((3, 50), (2, 130, 64), (7,), (0,), ())


def samples(device):
    made = {
        name: []
        for kind in ("fp8", "nvfp4")
        for name in (f"quantize_{kind}", f"dequantize_{kind}", f"dequantize_{kind}_out")
    }
    for index, shape in enumerate(SHAPES):
        x, out = torch.randn(shape, device=device), torch.empty(shape, device=device)
        layout = index % 3
        made["quantize_fp8"].append((x, layout))
        parts = quantize_fp8(x, layout)
        made["dequantize_fp8"].append((*parts, list(shape), torch.bfloat16, layout))
        made["dequantize_fp8_out"].append((*parts, out, layout))
        made["quantize_nvfp4"].append((x,))
        parts = quantize_nvfp4(x)
        made["dequantize_nvfp4"].append((*parts, list(shape), torch.bfloat16))
        made["dequantize_nvfp4_out"].append((*parts, out.clone()))
    return made
