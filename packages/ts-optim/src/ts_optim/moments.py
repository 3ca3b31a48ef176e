"""How the moments of a parameter are stored: float32, bfloat16, or one byte each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _C

__all__ = ["MOMENT_DTYPES", "block_count", "flat", "is_dense", "pack", "unpack"]

#: What tensors of moments are made of, by the option's canonical value. uint8 are codes with a scale for each
# 256.
MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}


def block_count(numel: int) -> int:
    """Return how many scales a tensor of packed moments has."""
    return -(-numel // _C.BLOCK)


def is_dense(t: torch.Tensor) -> bool:
    """Tell whether the elements of `t` fill one stretch of memory, in whatever order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(t: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as one dimension, in the order of its memory."""
    t = t.detach()
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,), t.storage_offset())


def pack(
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> None:
    """Encode moments to nearest, one byte each; see `reference.encode_int8`. Undoes `unpack` exactly.

    Args:
        exp_avg: First moments, float32, dense, any device.
        exp_avg_sq: Second moments, same strides.
        codes: uint8 tensors of the same strides, for both; written.
        scales: float32 `[ceil(numel / 256)]`, for both; written.
    """
    m, v = (flat(t).cpu() for t in (exp_avg, exp_avg_sq))
    targets = [*map(flat, codes), *scales]
    made = [t if t.device.type == "cpu" else torch.empty(t.shape, dtype=t.dtype) for t in targets]
    _C.pack_moments_(m, v, made[0], made[1], made[2], made[3])
    for to, source in zip(targets, made, strict=True):
        if to is not source:
            to.copy_(source)


def unpack(
    codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode moments.

    Args:
        codes: uint8, dense, of the first and the second moments.
        scales: Theirs.

    Returns:
        First and second moments: float32, in host memory, shape and strides of the codes.
    """
    like = codes[0]
    first, second = (torch.empty(like.numel()) for _ in range(2))
    given = [flat(t).cpu() for t in codes] + [t.cpu() for t in scales]
    _C.unpack_moments_(first, second, given[0], given[1], given[2], given[3])
    return first.as_strided(like.shape, like.stride()), second.as_strided(like.shape, like.stride())
