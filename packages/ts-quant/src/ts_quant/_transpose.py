"""`torch.ops.ts_quant.transpose_bytes`: the bytes of a transposed matrix."""

from __future__ import annotations

import torch

from . import _C
from ._ops import LIBRARY, check_packed, decode_with

__all__ = ["transpose_bytes"]


def _fake(codes: torch.Tensor, out: torch.Tensor, rows: int, columns: int) -> None:
    size = rows * columns
    check_packed("transpose_bytes", {"codes": (codes, torch.uint8, size), "out": (out, torch.uint8, size)})


def _run(codes: torch.Tensor, out: torch.Tensor, rows: int, columns: int) -> None:
    decode_with(_C.transpose_bytes, _fake, codes, out, rows, columns)


transpose_bytes = LIBRARY.define(
    "transpose_bytes(Tensor codes, Tensor(a!) out, SymInt rows, SymInt columns) -> ()", cpu=_run, fake=_fake
)
"""`out[c * rows + r] = codes[r * columns + c]`: uint8, one-dimensional, rows * columns elements."""
