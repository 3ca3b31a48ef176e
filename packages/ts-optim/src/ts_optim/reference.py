"""What the kernels compute, in plain PyTorch: the oracle of the tests, and the path of float64 parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["adamw_", "grad_norm"]


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """Apply one AdamW step in place, in the dtype of `param`.

        g <- grad * grad_scale;  m <- m + (1 - beta1) (g - m);  v <- v + (1 - beta2) (g^2 - v)
        p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        param: Any floating dtype, shape and layout; written.
        grad: Same shape; read.
        exp_avg: First moment m, same shape; written.
        exp_avg_sq: Second moment v, same shape; written.
        step: t, 1 at the first step.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled decay wd.
        grad_scale: Multiplies the gradient.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    g = grad * grad_scale
    exp_avg.add_(g - exp_avg, alpha=1.0 - betas[0])
    exp_avg_sq.add_(g * g - exp_avg_sq, alpha=1.0 - betas[1])
    denom = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - betas[1] ** step)).add_(eps)
    param.mul_(1.0 - lr * weight_decay).addcdiv_(exp_avg, denom, value=-lr / (1.0 - betas[0] ** step))


def grad_norm(grads: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all elements of `grads` together, in float64.

    Args:
        grads: Any floating dtypes, shapes and devices.

    Returns:
        The norm; NaN or infinite if an element is.
    """
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))
