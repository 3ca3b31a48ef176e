"""The gated activation of an MLP as one operation, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import choice

from . import _ops

__all__ = ["ACTIVATIONS", "gated_mlp"]

ACTIVATIONS = ("silu", "gelu_tanh")


class _Gated(torch.autograd.Function):
    """Saves its two inputs; the activation is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        y: Tensor = _ops.gated_forward(gate, up, gelu)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs = ctx.needs_input_grad[:2]
        grads = _ops.gated_backward(grad_y, *ctx.saved_tensors, ctx.gelu, *needs)
        return grads[0] if needs[0] else None, grads[1] if needs[1] else None, None


class _GatedPair(torch.autograd.Function):
    """Gate and up in one tensor: so is their gradient, without a concatenation."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(pair)
        ctx.gelu = gelu
        y: Tensor = _ops.gated_forward(*pair.chunk(2, -1), gelu)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        grad: Tensor = _ops.gated_pair_backward(grad_y, *ctx.saved_tensors, ctx.gelu)
        return grad, None


def gated_mlp(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    r"""Compute the product of an activated gate and its partner, which the down projection of an MLP takes.

    $$y = \mathrm{act}(\text{gate}) \cdot \text{up}, \qquad \mathrm{silu}(x) = x\,\sigma(x), \qquad
      \mathrm{gelu_{tanh}}(x) = x\,\sigma\!\left(2\sqrt{2/\pi}\,(x + 0.044715\,x^3)\right),$$

    the second being the tanh form of gelu written without a difference. Computed in fp32 and rounded once,
    where the expression in PyTorch rounds the activation first; backward too. Only the two inputs are kept
    for it. Biases are those of the linear layers before. Autocast does not change it. It cannot be
    differentiated twice; the second backward raises.

    Args:
        gate: `(..., I)`, float32, bfloat16 or float16, CPU or CUDA; `(..., 2 I)` without `up`. Any strides;
            copied only if it cannot be seen as rows without gaps.
        up: `(..., I)`, of the dtype and on the device of `gate`; None: the second half of `gate`, and the
            gradient of both is one tensor too.
        activation: "silu" or "gelu_tanh".

    Returns:
        `(..., I)`, contiguous, of the same dtype.

    Raises:
        ArgumentTypeError: Not tensors, or another dtype.
        ArgumentError: Shapes or devices do not fit.
        OptionError: Another activation.

    Example:
        >>> gated_mlp(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor([0.0000, 1.4621])

    Source: Shazeer, arXiv:2002.05202.
    """
    for name, tensor in (("gate", gate), ("up", up)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "gate"):
            raise ArgumentTypeError(message("gated_mlp", name, "a torch.Tensor", type(tensor).__name__))
    gelu = choice("activation", activation, ACTIVATIONS) == "gelu_tanh"
    result: Tensor
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            given = f"shape {tuple(gate.shape)}"
            raise ArgumentError(message("gated_mlp", "gate", "an even last dimension without up", given))
        result = _GatedPair.apply(gate, gelu)  # type: ignore[no-untyped-call]
    elif not _ops.needs_graph(gate, up):
        result = _ops.gated_forward(gate, up, gelu)
    else:
        result = _Gated.apply(gate, up, gelu)  # type: ignore[no-untyped-call]
    return result
