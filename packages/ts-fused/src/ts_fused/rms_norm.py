"""RMSNorm as one operation, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentTypeError, message
from ts_core.options import number

from . import _ops

__all__ = ["add_rms_norm", "rms_norm"]


class _RMSNorm(torch.autograd.Function):
    """Saves the input, the weight and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y: Tensor
        y, rstd = _ops.rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = _ops.rms_norm_backward(grad_y, x, weight, rstd, ctx.offset, need_x, need_weight)
        return grad_x if need_x else None, grad_weight if need_weight else None, None, None


class _AddRMSNorm(torch.autograd.Function):
    """Saves the sum, which lives on as the residual stream, the weight and one fp32 number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        y: Tensor
        total: Tensor
        y, total, rstd = _ops.add_rms_norm_forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        grad, grad_weight = grad_sum, None
        if grad_y is not None:
            either = need_x or need_residual
            grad, grad_weight = _ops.rms_norm_backward(
                grad_y, *ctx.saved_tensors, ctx.offset, either, need_weight, grad_sum if either else None
            )
        # Both terms of a sum have its gradient.
        return (
            grad if need_x else None,
            grad if need_residual else None,
            grad_weight if need_weight else None,
            None,
            None,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    r"""Root-mean-square normalization over the last dimension, in the rounding order of the usual modules.

    With $r = 1 / \sqrt{\mathrm{mean}(x^2) + \epsilon}$ in fp32,

    $$y = \mathrm{cast}(x r) \cdot w \quad (\text{offset} = 0), \qquad
      y = \mathrm{cast}(x r \cdot (\text{offset} + w)) \quad (\text{offset} \ne 0),$$

    where cast rounds to the dtype of `x`. The first is the order of Llama's module and its relatives, whose
    product with the weight has the promoted dtype of both; the second, with offset 1, is Gemma's, all in fp32
    until the end.

    Agreement with those modules in plain PyTorch: on x86 CPUs the forward has the same bits (the mean of
    squares is summed in the order of PyTorch's own kernel; seen with torch 2.13), except for a single row of
    32768 or more elements, which PyTorch splits among threads. On CUDA the sum has a fixed order of its own:
    the fp32 statistic is within a few units in the last place and now and then an output falls on the other
    side of a rounding boundary. The backward computes in fp32 and rounds once, where autograd rounds every
    intermediate to the dtype of `x`; the weight gradient is summed in fp32 over fixed chunks of rows and a
    fixed tree, whatever the number of threads or the instruction set.

    Autocast does not change it: the dtypes are those of the arguments, as in the modules of transformers;
    `patch_fused` leaves a norm that autocast does change (PyTorch's own on a GPU) to its own code there. It
    cannot be differentiated twice; the second backward raises.

    Args:
        x: `(..., H)`, float32, bfloat16 or float16, CPU or CUDA, any strides (copied when not contiguous).
        weight: `(H,)`, any of the three dtypes, on the device of `x`.
        eps: Added to the mean square, >= 0.
        offset: Added to the weight; 0 and 1 select the two forms above.

    Returns:
        `(..., H)`, contiguous; dtype of `x` if it equals the weight's or with an offset, else float32.

    Raises:
        ArgumentTypeError: Not tensors, or another dtype.
        ArgumentError: Shapes or devices do not fit.
        OptionError: `eps` or `offset` is not a finite number, or `eps` negative.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> rms_norm(x, torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    _expect_tensors("rms_norm", x=x, weight=weight)
    eps = number("eps", eps, minimum=0.0)
    offset = number("offset", offset)
    return norm_of(x, weight, eps, offset)


def norm_of(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Do what `rms_norm` does, without looking at the numbers."""
    result: Tensor
    if not _ops.needs_graph(x, weight):
        result = _ops.rms_norm_forward(x, weight, eps, offset)[0]
    else:
        result = _RMSNorm.apply(x, weight, eps, offset)  # type: ignore[no-untyped-call]
    return result


def _expect_tensors(function: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message(function, name, "a torch.Tensor", type(tensor).__name__))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Add to the residual stream and normalize the sum, in one pass over memory.

    $$h = \mathrm{cast}(x + \text{residual}), \qquad y = \text{rms\_norm}(h, w).$$

    The bits are those of the addition followed by `rms_norm`. In backward the gradient that arrives at `h`
    is added in fp32 to that of the normalization and rounded once; `x` and `residual` get the same one. So
    in fp32 backward has the bits of the two operations too; in 16 bits autograd rounds the normalization's
    gradient before it adds, and this does not. The gradient of the weight has the same bits in every dtype.

    Args:
        x: `(..., H)`, float32, bfloat16 or float16, CPU or CUDA, any strides (copied when not contiguous).
        residual: As `x`, of the same shape and dtype.
        weight: `(H,)`, any of the three dtypes, on the device of `x`.
        eps: Added to the mean square, >= 0.
        offset: Added to the weight, as in `rms_norm`.

    Returns:
        `y`, as of `rms_norm`, and `h` with the dtype of `x`; both contiguous.

    Raises:
        ArgumentTypeError: Not tensors, or another dtype.
        ArgumentError: Shapes or devices do not fit.
        OptionError: `eps` or `offset` is not a finite number, or `eps` negative.

    Example:
        >>> y, h = add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), torch.ones(2), 0.0)
        >>> y, h
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    _expect_tensors("add_rms_norm", x=x, residual=residual, weight=weight)
    eps = number("eps", eps, minimum=0.0)
    offset = number("offset", offset)
    return sum_and_norm(x, residual, weight, eps, offset)


def sum_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Do what `add_rms_norm` does, without looking at the numbers."""
    y, total = _AddRMSNorm.apply(x, residual, weight, eps, offset)  # type: ignore[no-untyped-call]
    return y, total
