"""Rotary position embedding of queries and keys in one operation, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import boolean, integer

from . import _ops

__all__ = ["rotary"]


class _Rotary(torch.autograd.Function):
    """Saves the angles alone: the map is linear, its derivative the transposed map."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        q_out: Tensor
        k_out: Tensor
        q_out, k_out = _ops.rotary_heads(q, k, cos, sin, rotary_dim, interleaved, False)
        ctx.save_for_backward(cos, sin)
        ctx.form = (rotary_dim, interleaved)
        ctx.set_materialize_grads(False)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = [g if need else None for g, need in zip((grad_q, grad_k), ctx.needs_input_grad, strict=False)]
        there = [grad for grad in grads if grad is not None]
        if not there:
            return (None,) * 6
        second = there[1] if len(there) == 2 else None
        turned = list(_ops.rotary_heads(there[0], second, cos, sin, *ctx.form, True))
        results = [None if grad is None else turned.pop(0) for grad in grads]
        return (*results, None, None, None, None)


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message("rotary", name, "a torch.Tensor", type(tensor).__name__))
    for name in ("cos", "sin"):
        tensor = tensors[name]
        if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
            given = "one that requires grad"
            raise ArgumentError(message("rotary", name, "a tensor without gradient", given, "Detach it"))


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Turn pairs of elements of every query and key by the angles of their positions.

    With $R$ = `rotary_dim`, the pair $(a, b)$ of elements $(i, i + R/2)$, or $(2i, 2i + 1)$ if `interleaved`,
    becomes

    $$a' = a \cos_a - b \sin_a, \qquad b' = b \cos_b + a \sin_b;$$

    elements from $R$ on pass through. The angles are used as they are given, so every way of scaling them
    (linear, dynamic, YaRN, LongRoPE, Llama 3, sections of several axes) is in `cos` and `sin` already, a
    factor of the attention temperature included.

    Computed in fp32 and rounded once, where the expression in PyTorch rounds both products and the sum; the
    backward is the transposed map, also rounded once. Nothing but `cos` and `sin` is kept for it. Autocast
    does not change it. It cannot be differentiated twice; the second backward raises.

    Args:
        q: `(B, heads, S, D)` with `unsqueeze_dim` 1, `(B, S, heads, D)` with 2; float32, bfloat16 or float16,
            CPU or CUDA. Any strides; copied only if the last dimension has gaps.
        k: As `q`, of the same dtype, with its own number of heads.
        cos: `(B or 1, S, W)` or `(S, W)`, any of the three dtypes, on the device of `q`; no gradient. `W` is
            `R`, an angle for each element as transformers repeats them, or `R / 2`, one for each pair.
        sin: As `cos`.
        unsqueeze_dim: Where the heads are, as in transformers: 1 or 2.
        interleaved: Pairs are neighbours.
        rotary_dim: `R`, even, at most `D` and 1024; None: the `W` of `cos`.

    Returns:
        The two results, with the dtype, shape and order of strides of `q` and `k`.

    Raises:
        ArgumentTypeError: Not tensors, or another dtype.
        ArgumentError: Shapes or devices do not fit, or an angle requires grad.
        OptionError: `unsqueeze_dim`, `interleaved` or `rotary_dim` has a value of another kind.

    Example:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> turned, _ = rotary(x, x, torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
        >>> turned.flatten()
        tensor([0., 1.])

    Source: Su et al., arXiv:2104.09864.
    """
    _check_tensors(q=q, k=k, cos=cos, sin=sin)
    integer("unsqueeze_dim", unsqueeze_dim, minimum=1)
    boolean("interleaved", interleaved)
    if unsqueeze_dim > 2 or q.dim() != 4 or k.dim() != 4 or cos.dim() not in (2, 3) or cos.dim() != sin.dim():
        given = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}, {unsqueeze_dim}"
        wanted = "four dimensions, two or three of cos and sin, and unsqueeze_dim 1 or 2"
        raise ArgumentError(message("rotary", "q, k, cos, sin", wanted, given))
    dim = cos.shape[-1] if rotary_dim is None else integer("rotary_dim", rotary_dim, minimum=2)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if cos.dim() == 2 or cos.shape[0] == 1:
        cos, sin = (angle.expand(q.shape[0], *angle.shape[-2:]) for angle in (cos, sin))
    cos, sin = cos.detach(), sin.detach()
    if not _ops.needs_graph(q, k):
        q, k = _ops.rotary_heads(q, k, cos, sin, dim, interleaved, False)
    else:
        q, k = _Rotary.apply(q, k, cos, sin, dim, interleaved)  # type: ignore[no-untyped-call]
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)
