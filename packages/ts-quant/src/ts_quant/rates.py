"""How fast a device decodes each codec; the hardware profile imports this when it measures."""

from __future__ import annotations

import torch

from ts_core.hardware import seconds_per_call

from .functional import dequantize, quantize
from .tensor import QuantizedTensor

__all__ = ["decode_rates"]

_CODECS = ("int8", "nf4", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
_COLUMNS = 4096


def decode_rates(device: torch.device, quick: bool) -> dict[str, float]:
    """Time decoding to bfloat16 in memory that is there already.

    Args:
        device: Where the packed weights lie.
        quick: Take a small sample.

    Returns:
        Weights a second by codec.

    Example:
        >>> sorted(decode_rates(torch.device("cpu"), True))
        ['fp8_block', 'fp8_row', 'int8', 'mxfp8', 'nf4', 'nvfp4']
    """
    numel = (32 << 20) if device.type == "cpu" else (64 << 20)
    values = torch.linspace(-1.0, 1.0, numel if quick else 2 * numel, dtype=torch.bfloat16, device=device)
    values = values.view(-1, _COLUMNS)
    out = torch.empty_like(values)
    rates: dict[str, float] = {}
    for codec in _CODECS:
        packed = quantize(values, codec)

        def decode(packed: QuantizedTensor = packed) -> None:
            dequantize(packed, out=out)

        rates[codec] = values.numel() / seconds_per_call(decode, device, quick)
    return rates
