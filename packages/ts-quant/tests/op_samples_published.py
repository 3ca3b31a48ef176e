"""Calls of the operations of published formats, for opcheck."""

import torch

from ts_quant.codecs.fp_published import FP4, FP8
from ts_quant.codecs.gguf import GGUF
from ts_quant.codecs.groups import GROUPS


def _calls(tensors, shape, numbers, device):
    tensors = [tensor.to(device) for tensor in tensors]
    new = (*tensors, list(shape), torch.bfloat16, *numbers)
    return new, (*tensors, torch.empty(shape, device=device), *numbers)


def _bytes(*shape):
    return torch.randint(0, 100, shape, dtype=torch.uint8)


def samples(device):
    words, nothing = torch.arange(8 * 64 // 8).int(), torch.empty(0, dtype=torch.int32)
    zeros, scales = torch.zeros(2, dtype=torch.int32), torch.ones(2, 8, dtype=torch.float16)
    calls = {
        "gguf": [([_bytes(18 * 6)], (3, 64), (2,)), ([_bytes(0)], (0, 256), (14,))],
        "groups": [
            ([words, zeros, scales, nothing], (8, 64), (32, 4, 0, 1, 2, 0)),
            ([words, zeros, scales, torch.zeros(64).int()], (8, 64), (32, 4, 0, 0, 2, 1)),
            ([words, zeros, scales, nothing], (8, 64), (32, 4, 1, 0, 2, 0)),
        ],
        "published_fp4": [
            ([_bytes(2, 3, 32), _bytes(2, 3, 2), torch.empty(0)], (2, 64, 3), (0, 1)),
            ([_bytes(1, 3, 32), _bytes(1, 3, 4), torch.ones(1)], (1, 3, 64), (1, 0)),
        ],
        "published_fp8": [([_bytes(5, 7), torch.ones(2, 2)], (5, 7), (4, 4))],
    }
    made = {}
    for name, cases in calls.items():
        pairs = [_calls(*case, device) for case in cases]
        made[f"dequantize_{name}"] = [new for new, _ in pairs]
        made[f"dequantize_{name}_out"] = [into for _, into in pairs]
    assert {GGUF, GROUPS, FP4, FP8}  # declared by then
    return made
