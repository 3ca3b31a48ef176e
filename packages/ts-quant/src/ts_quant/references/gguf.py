"""GGUF block types in plain PyTorch, written from ggml's published structures; slow and easy to read.

Each function takes blocks as uint8 (count, bytes of a block) and returns fp32 (count, values of a block).
Halves are little-endian; every product and sum is one fp32 operation, in the order written.
"""

from __future__ import annotations

import torch

__all__ = ["DECODERS", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    low, high = blocks[:, at].int(), blocks[:, at + 1].int()
    return (low | high << 8).to(torch.int16).view(torch.float16).float()[:, None]


def _signed(bytes_: torch.Tensor) -> torch.Tensor:
    return bytes_.view(torch.int8).float()


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """The low nibbles of all bytes, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, 16 bytes: d (nibble - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, half m, 16 bytes: d nibble + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]).float() + _half(blocks, 2)


def _fifth(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Bit i of a 32-bit word, times 16, for value i."""
    bits = [(blocks[:, at + i // 8] >> i % 8) & 1 for i in range(32)]
    return torch.stack(bits, dim=1).float() * 16


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, 32 fifth bits, 16 bytes: d (code - 16)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:22]).float() + _fifth(blocks, 2) - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, half m, 32 fifth bits, 16 bytes: d code + m."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:24]).float() + _fifth(blocks, 4)) + _half(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, 32 signed bytes: d code."""
    return _half(blocks, 0) * _signed(blocks[:, 2:34])


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits in bytes 4 to 16: two upper bits of the last four apart."""
    s = blocks[:, 4:16].int()
    low, high = s[:, 0:4] & 63, s[:, 4:8] & 63
    scales = torch.cat([low, (s[:, 8:12] & 15) | (s[:, 0:4] >> 6 << 4)], dim=1)
    minima = torch.cat([high, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6 << 4)], dim=1)
    return scales.float(), minima.float()


def _k_values(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Values: d scale code - dmin minimum, for eight sub-blocks of 32 codes."""
    scales, minima = _k_scales(blocks)
    d, m = (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]
    return (d * codes.float() - m).flatten(1)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Fields: half d, half dmin, 12 bytes of scales, 4 x 32 bytes of two sub-blocks each."""
    quads = blocks[:, 16:144].reshape(-1, 4, 32)
    return _k_values(blocks, _nibbles(quads).reshape(-1, 8, 32))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As q4_k, with the fifth bit of sub-block j in bit j of 32 bytes."""
    quads = blocks[:, 48:176].reshape(-1, 4, 32)
    fifth = torch.stack([(blocks[:, 16:48] >> j) & 1 for j in range(8)], dim=1)
    return _k_values(blocks, _nibbles(quads).reshape(-1, 8, 32) + fifth * 16)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of low nibbles, 64 of upper bits, 16 signed scales, half d: d scale (code - 32)."""
    halves = []
    for half in range(2):
        low = blocks[:, 64 * half : 64 * half + 64]
        high = blocks[:, 128 + 32 * half : 160 + 32 * half]
        nibbles = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
        halves += [nibble + ((high >> 2 * row) & 3) * 16 for row, nibble in enumerate(nibbles)]
    codes = torch.cat(halves, dim=1).float() - 32
    scales = _signed(blocks[:, 192:208])
    return (_half(blocks, 208) * scales).repeat_interleave(16, dim=1) * codes


DECODERS = {
    "Q4_0": (q4_0, 32, 18),
    "Q4_1": (q4_1, 32, 20),
    "Q5_0": (q5_0, 32, 22),
    "Q5_1": (q5_1, 32, 24),
    "Q8_0": (q8_0, 32, 34),
    "Q4_K": (q4_k, 256, 144),
    "Q5_K": (q5_k, 256, 176),
    "Q6_K": (q6_k, 256, 210),
}
"""By type: the function, the values of a block, the bytes of a block."""
