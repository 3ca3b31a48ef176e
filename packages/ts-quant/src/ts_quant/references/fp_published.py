"""Published fp4 and fp8 layouts in plain PyTorch, written from the formats' tables; slow, easy to read."""

from __future__ import annotations

import torch

__all__ = ["E2M1", "e4m3", "e8m0", "fp8", "mxfp4", "nvfp4"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of a code of four bits (OCP Microscaling Formats 1.0)."""


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low nibble."""
    table = torch.tensor(E2M1, device=codes.device)
    return table[torch.stack([codes & 15, codes >> 4], dim=-1).long()].flatten(-2)


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32: bias 7, no infinities, all-ones magnitudes are NaN (OCP 8-bit Floating Point 1.0)."""
    bits = codes.int()
    sign = torch.where(bits >= 128, -1.0, 1.0)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    return torch.where((bits & 127) == 127, torch.nan, sign * value)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32: 2 to the power of (code - 127), 255 is NaN (OCP Microscaling Formats 1.0)."""
    powers = torch.pow(2.0, codes.double() - 127).float()
    return torch.where(codes == 255, torch.nan, powers)


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 (..., columns / 2), scales uint8 (..., columns / 32) -> fp32 (..., columns)."""
    return _e2m1(codes) * e8m0(scales).repeat_interleave(32, dim=-1)


def nvfp4(
    codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, *, divided: bool = False
) -> torch.Tensor:
    """Codes uint8 (..., columns / 2), scales uint8 (..., columns / 16), one fp32 -> fp32 (..., columns)."""
    block = e4m3(scales)
    scale = block / tensor_scale if divided else block * tensor_scale
    return _e2m1(codes) * scale.repeat_interleave(16, dim=-1)


def fp8(codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Codes uint8 (n, k), scales (tiles down, across) of rows x columns each -> fp32 (n, k)."""
    n, k = codes.shape
    spread = scales.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return e4m3(codes) * spread
