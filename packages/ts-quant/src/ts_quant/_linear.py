r"""`F.linear` with a packed weight: decode, multiply, forget; decode again in backward.

$y = x \hat W^T + b$, $\partial x = \partial y\, \hat W$, $\partial b = \sum \partial y$. The weight is
frozen, so between forward and backward only the packed tensors are alive, which the parameter holds anyway.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from typing import Any, cast

import torch

from ._scaled_linear import Form, scaled_linear
from .codecs import Meta, decode
from .matmul import DEFAULT, Matmul, how

__all__ = ["linear"]


class _PackedLinear(torch.autograd.Function):
    """The autograd formula; every argument but `x` and `bias` is constant."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        codec: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        meta: Meta,
        names: tuple[str, ...],
        *packed: torch.Tensor,
    ) -> torch.Tensor:
        """Decode and multiply."""
        ctx.save_for_backward(*packed)
        ctx.layout = (codec, shape, dtype, meta, names)
        weight = _decode_as(packed, ctx.layout, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Decode again and multiply the other way."""
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(_decode_as(ctx.saved_tensors, ctx.layout, grad.dtype))
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        constants = (None,) * (5 + len(ctx.layout[4]))
        return (grad_x, grad_bias, *constants)


def _decode_as(packed: tuple[torch.Tensor, ...], layout: Any, dtype: torch.dtype) -> torch.Tensor:
    codec, shape, presented, meta, names = layout
    tensors = dict(zip(names, packed, strict=True))
    # From fp32 one rounding is all there is; from a shorter dtype the plain module would round twice.
    first = dtype if presented is torch.float32 else presented
    return decode(tensors, codec, shape, first, meta, _scratch(packed[0], shape, first)).to(dtype)


def _decode_packed(layout: Any, packed: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    return _decode_as(packed, layout, dtype)


_local = threading.local()


def _scratch(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return a buffer to decode into, or None to allocate one.

    On the CPU a fresh large tensor costs more than decoding does: every page of it is a fault. The decoded
    weight lives for one product only, so each thread keeps one buffer, as large as its largest weight. It
    must not escape: not where autograd could save it, and not where something traces.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(like) is not torch.Tensor
        or like.device.type != "cpu"
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    size = math.prod(shape) * dtype.itemsize
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.numel() < size:
        _local.buffer = None  # the old one goes before the new one comes
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(shape)


def linear(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    packed: Mapping[str, torch.Tensor],
    codec: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    meta: Meta,
    options: Matmul = DEFAULT,
) -> torch.Tensor:
    """Multiply with a packed weight.

    Args:
        x: `(..., in_features)`, any floating dtype that the weight presents, or autocast.
        bias: `(out_features,)` or `None`.
        packed: The codec's tensors.
        codec: Name of the codec.
        shape: `(out_features, in_features)`.
        dtype: Dtype that the weight presents.
        meta: Description of the packing.
        options: Whether tensor cores may take it packed, and how.

    Returns:
        `(..., out_features)`.

    Raises:
        RuntimeError: Shapes or dtypes do not fit; PyTorch's own message.
    """
    kind, given = x.device.type, x
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        cast_to = torch.get_autocast_dtype(kind)
        x = x.to(cast_to)
        bias = None if bias is None else bias.to(cast_to)
    elif x.dtype != dtype:
        raise RuntimeError(f"expected input and weight of one dtype, got {x.dtype} and {dtype}")
    layout = (codec, shape, dtype, meta, tuple(packed))
    # A weight that is cast for the product is decoded, as it lies in the slot of a paged block.
    chosen = how(codec, shape, x.dtype, x.device, options) if x.dtype == dtype else None
    fits = bias is None or (bias.dtype == x.dtype and bias.shape == shape[:1])
    if chosen is not None and fits and x.numel() and x.shape[-1] == shape[1]:
        form = Form(chosen[0], shape, chosen[1], chosen[2], options.outliers)
        return scaled_linear(x, bias, packed, form, functools.partial(_decode_packed, layout), given)
    if not torch.is_grad_enabled() or not (x.requires_grad or (bias is not None and bias.requires_grad)):
        with torch.no_grad():
            weight = _decode_as(tuple(packed.values()), layout, x.dtype)
            return torch.nn.functional.linear(x, weight, bias)
    return cast(torch.Tensor, _PackedLinear.apply(x, bias, *layout, *packed.values()))  # type: ignore[no-untyped-call]
