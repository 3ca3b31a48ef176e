"""`quantize` and `dequantize`: what most callers need."""

from __future__ import annotations

from typing import Any

import torch

from ts_core import registry
from ts_core.errors import ArgumentTypeError, OptionError, message
from ts_core.options import boolean, choice, integer

from .codecs import Meta, PackedCodec, encoding_names, resolve
from .tensor import QuantizedTensor

__all__ = ["dequantize", "quantize"]


def find_codec(option: str, value: Any, device: torch.device | str | None = None) -> registry.Codec:
    """Return the codec of a name; "fp8" is what the device computes.

    Args:
        option: What to call the value in messages.
        value: The name.
        device: Where the weights are going to compute; `None` is the current GPU, if there is one.

    Returns:
        The codec.

    Raises:
        OptionError: No codec of this name.
    """
    known = registry.codecs()
    if value is None or value is False or (isinstance(value, str) and value in ("none", "auto")):
        raise OptionError(
            f"option {option}: expected a codec, {', '.join(map(repr, (*encoding_names(), 'fp8')))}, given "
            f"{value!r}. This call packs; weights that are to stay as they are need none"
        )
    # Codecs that only decode are refused with a message of their own, and not offered.
    name = (
        value
        if isinstance(value, str) and value in known
        else choice(option, value, (*encoding_names(), "fp8"))
    )
    return registry.codec(resolve(name, device))


def meta_for(codec: Any, block_size: Any, double_quant: Any = False) -> Meta:
    """Make the description that a codec packs with from the options of `quantize`.

    Args:
        codec: The codec.
        block_size: Values per scale, even, >= 2.
        double_quant: Quantize the scales too.

    Returns:
        The description.

    Raises:
        OptionError: A bad block size, or an option that the codec does not have.
    """
    block_size = integer("block_size", block_size, minimum=2, maximum=1 << 40, multiple_of=2)
    if boolean("double_quant", double_quant) and not hasattr(codec, "meta"):
        raise OptionError(f"option double_quant: the codec {codec.name!r} has no such option")
    return codec.meta(block_size, double_quant=double_quant) if hasattr(codec, "meta") else Meta(block_size)


def quantize(
    tensor: torch.Tensor,
    codec: str = "nf4",
    *,
    block_size: int = 64,
    double_quant: bool = False,
    name: str = "tensor",
) -> QuantizedTensor:
    r"""Encode a tensor: codes and scales, in the layout of a codec.

    int8: $q = \mathrm{round}(x / s)$, $s = \mathrm{absmax} / 127$; 1 + 4 / `block_size` bytes a value.
    nf4: the nearest of 16 levels to $x / \mathrm{absmax}$; 0.5 + 4 / `block_size` bytes a value, the bits of
    bitsandbytes. Both have one absmax per block of `block_size` consecutive elements. fp8 and nvfp4: e4m3
    codes with a scale per 32 columns, row or tile, and e2m1 codes with a scale per 16 columns.
    `ts_quant.reference` and `ts_quant.references.small_floats` spell them out.

    Args:
        tensor: float32, float16 or bfloat16 of any shape and layout, finite; CPU or CUDA. Not written.
        codec: "nf4", "int8", "nvfp4", "mxfp8", "fp8_row", "fp8_block", or "fp8": of the last three what this
            GPU computes; or another codec registered with `ts_core.registry` that encodes.
        block_size: Values per scale, taken in row-major order; even, >= 2; fp8 and nvfp4 ignore it.
        double_quant: nf4 and int8: keep the scales in 8 bits too, with one fp32 per 256 of them: 0.516 and
            1.016 bytes a value in all with blocks of 64. `ts_quant.references.bnb` spells both out. Other
            codecs refuse it.
        name: What to call the tensor in messages.

    Returns:
        A `QuantizedTensor` of the tensor's shape, dtype and device.

    Raises:
        OptionError: Unknown codec, bad block size, or an option that is not available yet.
        ArgumentTypeError: Not a floating tensor of the three dtypes, or quantized already.
        ArgumentError: A NaN or an infinity in the tensor.

    Example:
        >>> weight = torch.linspace(-1, 1, 128).reshape(2, 64)
        >>> quantize(weight, "int8").packed_bytes
        136

    Source: QLoRA, arXiv:2305.14314 (nf4).
    """
    found: Any = find_codec("codec", codec)
    meta = meta_for(found, block_size, double_quant)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, QuantizedTensor):
        given = "a QuantizedTensor" if isinstance(tensor, QuantizedTensor) else type(tensor).__name__
        hint = "Call dequantize() first to encode it again" if isinstance(tensor, QuantizedTensor) else None
        raise ArgumentTypeError(message("quantize", name, "a floating tensor", given, hint))
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(message("quantize", name, "a strided tensor", str(tensor.layout)))
    extra = {"name": name} if isinstance(found, PackedCodec) else {}
    packed = found.encode(tensor.detach(), meta, **extra)
    return QuantizedTensor(packed, found.name, tensor.shape, tensor.dtype, meta)


def dequantize(
    tensor: QuantizedTensor, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    r"""Decode a tensor: $\hat x = \mathrm{level}(q) \cdot \mathrm{absmax}$, in fp32, rounded once to `dtype`.

    Args:
        tensor: What `quantize` returned.
        dtype: Floating dtype of the result; `None`: that of `out`, else the one the tensor presents.
        out: Contiguous tensor of the same shape, on the same device, that is written; `None` allocates.

    Returns:
        A plain tensor; `out` if given.

    Raises:
        ArgumentTypeError: `tensor` is not quantized, or `dtype` and `out` do not fit together.
        ArgumentError: `out` has another shape, device, or is not contiguous.

    Example:
        >>> weight = torch.linspace(-1, 1, 128)
        >>> bool((dequantize(quantize(weight, "int8")) - weight).abs().max() < 1 / 254 + 1e-6)
        True
    """
    if not isinstance(tensor, QuantizedTensor):
        raise ArgumentTypeError(message("dequantize", "tensor", "a QuantizedTensor", type(tensor).__name__))
    return tensor.dequantize(dtype, out=out)
