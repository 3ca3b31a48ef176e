"""Calls of the operations on operands of low-precision products, for opcheck."""

import torch


def samples(device):
    def sample(rows, columns):
        codes = torch.randint(0, 256, (rows * columns,), dtype=torch.uint8, device=device)
        return codes, torch.empty_like(codes), rows, columns

    return {"transpose_bytes": [sample(5, 7), sample(32, 48), sample(0, 3)]}
