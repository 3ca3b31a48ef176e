r"""`F.linear` with a packed weight whose operands tensor cores multiply as they are.

$y = \hat x \hat W^T + b$ with $\hat x$ the quantized input. The input gradient is that of $x \hat W^T$, as if
the input had not been quantized: $\partial x = \partial y\, \hat W$ with the decoded weight in bf16, or from
a quantized $\partial y$ and a packed $W^T$ where that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from ._shared_input import shared
from .products import TRANSPOSED, Product, outlier_columns, split_outliers
from .scaled_mm import Operand, emulate, multiply

__all__ = ["Form", "packed_gradient", "scaled_linear"]


class Form(NamedTuple):
    """How one weight is multiplied.

    Attributes:
        product: Its codec's product.
        shape: (outputs, inputs).
        emulates: Without tensor cores.
        backward: The input gradient from packed operands.
        outliers: Share of the channels that stay in bf16.
    """

    product: Product
    shape: tuple[int, ...]
    emulates: bool
    backward: bool
    outliers: float


class _Input(NamedTuple):
    """A quantized input, and the channels that were left out of it."""

    operand: Operand
    outliers: torch.Tensor | None
    channels: torch.Tensor | None


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -rows.shape[0] % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _quantized(x: torch.Tensor, form: Form) -> _Input:
    rows = _padded(x.detach().reshape(-1, x.shape[-1]).contiguous(), form.product.rows)
    values = channels = None
    if form.outliers:
        rows, values, channels = split_outliers(rows, form.outliers)
    return _Input(form.product.activation(rows), values, channels)


def _multiply(form: Form, a: Operand, b: Operand, bias: torch.Tensor | None = None) -> torch.Tensor:
    return (emulate if form.emulates else multiply)(form.product.kind, a, b, bias)


def _forward(
    x: _Input,
    bias: torch.Tensor | None,
    form: Form,
    packed: Mapping[str, torch.Tensor],
    leading: torch.Size,
) -> torch.Tensor:
    out = _multiply(form, x.operand, form.product.weight(packed, form.shape), bias)
    if x.outliers is not None and x.channels is not None:
        out.addmm_(x.outliers, outlier_columns(packed, form.shape, x.channels).t())
    return out[: math.prod(leading)].view(*leading, form.shape[0])


def packed_gradient(
    grad: torch.Tensor, form: Form, packed: Mapping[str, torch.Tensor], shape: torch.Size
) -> torch.Tensor:
    """Compute the input gradient from packed operands.

    Args:
        grad: bf16 `(..., outputs)`.
        form: How.
        packed: Packed tensors of the weight; those of its transpose are made if they are not among them.
        shape: Shape of the input.

    Returns:
        bf16, of that shape.
    """
    product = form.product
    rows = _padded(grad.reshape(-1, grad.shape[-1]).contiguous(), product.rows)
    made: Mapping[str, torch.Tensor] = packed
    if "codes" + TRANSPOSED not in packed:
        made = product.transpose(packed, form.shape)
    a = product.gradient(rows, packed)
    out = _multiply(form, a, product.transposed(packed, made, form.shape))
    return out[: math.prod(shape[:-1])].view(shape)


class _ScaledLinear(torch.autograd.Function):
    """The autograd formula; every argument but `x` and `bias` is constant."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        form: Form,
        decode: Callable[..., torch.Tensor],
        quantized: _Input | None,
        names: tuple[str, ...],
        *packed: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply packed operands."""
        ctx.save_for_backward(*packed)
        ctx.form, ctx.decode, ctx.names, ctx.shape = form, decode, names, x.shape
        parts = dict(zip(names, packed, strict=True))
        return _forward(quantized or _quantized(x, form), bias, form, parts, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Multiply the other way."""
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            # A gradient that is differentiated again has the formula of the decoded weight.
            if ctx.form.backward and not torch.is_grad_enabled() and grad.numel():
                parts = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
                grad_x = packed_gradient(grad, ctx.form, parts, ctx.shape)
            else:
                grad_x = grad.matmul(ctx.decode(ctx.saved_tensors, grad.dtype))
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return (grad_x, grad_bias, *(None,) * (4 + len(ctx.names)))


def scaled_linear(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    packed: Mapping[str, torch.Tensor],
    form: Form,
    decode: Callable[..., torch.Tensor],
    identity: torch.Tensor,
) -> torch.Tensor:
    """Multiply with a packed weight.

    Args:
        x: bf16 `(..., inputs)`.
        bias: bf16 `(outputs,)` or `None`.
        packed: The codec's tensors.
        form: How to multiply.
        decode: `(packed tensors, dtype) -> weight`, for the gradient.
        identity: The tensor that tells one input from another: x before it was cast.

    Returns:
        bf16 `(..., outputs)`.
    """
    quantized: _Input | None = None
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            what = form.product.kind, form.outliers
            quantized = shared(identity, what, lambda: _quantized(x, form))
    if not torch.is_grad_enabled() or not (x.requires_grad or (bias is not None and bias.requires_grad)):
        with torch.no_grad():
            return _forward(quantized or _quantized(x, form), bias, form, packed, x.shape[:-1])
    arguments = (x, bias, form, decode, quantized, tuple(packed))
    return cast(torch.Tensor, _ScaledLinear.apply(*arguments, *packed.values()))  # type: ignore[no-untyped-call]
