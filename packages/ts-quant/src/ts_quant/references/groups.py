"""GPTQ and AWQ in plain PyTorch, written from their published layouts; slow and easy to read."""

from __future__ import annotations

import torch

__all__ = ["AWQ_ORDER", "awq", "gptq", "pack_awq", "pack_gptq"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word holds, from the lowest."""


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., n) int32 -> (..., n, 32 / bits), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return (words[..., None].long() >> shifts) & ((1 << bits) - 1)


def _decode(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """(code - zero) scale, of transposed matrices, transposed back; fp32."""
    shifted = codes.float() - zeros.float()[group]
    return (shifted * scales.float()[group]).t().contiguous()


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    *,
    bits: int = 4,
    zero_offset: int = 0,
    g_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode `qweight` int32 (inputs bits / 32, outputs) to fp32 (outputs, inputs)."""
    codes = _unpack(qweight, bits).transpose(1, 2).flatten(0, 1)
    zeros = (_unpack(qzeros, bits).flatten(1) + zero_offset) % (1 << bits)
    group = torch.arange(len(codes), device=codes.device) // group_size if g_idx is None else g_idx.long()
    return _decode(codes, zeros, scales, group)


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Decode `qweight` int32 (inputs, outputs / 8) to fp32 (outputs, inputs)."""
    place = [AWQ_ORDER.index(output) for output in range(8)]
    codes = _unpack(qweight, 4)[..., place].flatten(1)
    zeros = _unpack(qzeros, 4)[..., place].flatten(1)
    group = torch.arange(len(codes), device=codes.device) // group_size
    return _decode(codes, zeros, scales, group)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., n, 32 / bits) integers -> (..., n) int32."""
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes.long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def pack_gptq(
    codes: torch.Tensor, zeros: torch.Tensor, bits: int = 4, zero_offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack codes (inputs, outputs) and zeros (groups, outputs) as GPTQ does: `qweight`, `qzeros`."""
    per = 32 // bits
    inputs, outputs = codes.shape
    qweight = _pack(codes.reshape(inputs // per, per, outputs).transpose(1, 2), bits)
    stored = (zeros - zero_offset) % (1 << bits)
    return qweight, _pack(stored.reshape(len(zeros), outputs // per, per), bits)


def pack_awq(codes: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack codes (inputs, outputs) and zeros (groups, outputs) as AWQ does: `qweight`, `qzeros`."""
    qweight, qzeros = (
        _pack(part.reshape(len(part), -1, 8)[..., list(AWQ_ORDER)], 4) for part in (codes, zeros)
    )
    return qweight, qzeros
