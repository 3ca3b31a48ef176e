"""The operations in plain PyTorch: what they mean, and the oracle of the tests.

Every function works in the dtype of its arguments, so float64 arguments give the float64 truth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "add_rms_norm",
    "causal_lm_loss",
    "chunked_cross_entropy",
    "gated_mlp",
    "lora_linear",
    "rms_norm",
    "rotary",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Compute `x * rsqrt(mean(x^2) + eps) * (offset + weight)`, rounding as the usual modules do.

    Args:
        x: `(..., H)`, floating. float64 is not rounded on the way.
        weight: `(H,)`, floating.
        eps: Added to the mean square.
        offset: 0: rounded to the dtype of `x` before the weight; else after.

    Returns:
        `(..., H)`.

    Example:
        >>> rms_norm(torch.ones(1, 2), torch.ones(2), 0.0)
        tensor([[1., 1.]])
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if offset == 0.0:
        return weight * h.to(x.dtype)
    return (h * (offset + weight.to(wide))).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add, then normalize.

    Args:
        x: `(..., H)`, floating.
        residual: As `x`.
        weight: `(H,)`, floating.
        eps: As in `rms_norm`.
        offset: As in `rms_norm`.

    Returns:
        The normalized sum and the sum.

    Example:
        >>> add_rms_norm(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), 0.0)
        (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset), total


def gated_mlp(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """Compute `act(gate) * up`.

    Args:
        gate: `(..., I)`, or `(..., 2 I)` with `up` in its second half.
        up: `(..., I)` or `None`.
        activation: "silu" or "gelu_tanh".

    Returns:
        `(..., I)`.

    Example:
        >>> gated_mlp(torch.tensor([0.0, 3.0]))
        tensor([0.])
    """
    if up is None:
        gate, up = gate.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def lora_linear(
    x: Tensor,
    weight: Tensor,
    adapters: Sequence[tuple[Tensor, Tensor, float]],
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `x W^T + b` and add `s (x A^T) B^T` for every adapter.

    Args:
        x: `(..., in_features)`.
        weight: `(out_features, in_features)`.
        adapters: `(A, B, s)` of each.
        bias: `(out_features,)` or `None`.

    Returns:
        `(..., out_features)`.

    Example:
        >>> one = torch.ones(1, 1)
        >>> lora_linear(one, one, [(one, one, 2.0)])
        tensor([[3.]])
    """
    linear = torch.nn.functional.linear
    y = linear(x, weight, bias)
    for a, b, scaling in adapters:
        y = y + linear(linear(x, a), b) * scaling
    return y


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
    """Turn pairs of elements: `x * cos + partner(x) * sin`, the first of a pair with `-sin`.

    Args:
        q: `(B, heads, S, D)`, or `(B, S, heads, D)` with `unsqueeze_dim` 2.
        k: As `q`.
        cos: `(B or 1, S, W)` or `(S, W)`.
        sin: As `cos`.
        unsqueeze_dim: Where the heads are.
        interleaved: Pairs are (2i, 2i + 1), else (i, i + R / 2).
        rotary_dim: `R`: elements that turn; None: `W`.

    Returns:
        The two results.

    Example:
        >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> rotary(x, x, torch.zeros(1, 1, 2), torch.ones(1, 1, 2))[1].flatten()
        tensor([0., 1.])
    """
    size = cos.shape[-1] if rotary_dim is None else rotary_dim

    def full(angle: Tensor) -> Tensor:
        if angle.shape[-1] != size:
            angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
        return angle.unsqueeze(-3 if unsqueeze_dim == 1 else -2)

    def partner(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)

    def turn(x: Tensor) -> Tensor:
        head, rest = x[..., :size], x[..., size:]
        return torch.cat([(head * full(cos) + partner(head) * full(sin)).to(x.dtype), rest], -1)

    return turn(q), turn(k)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the loss from all logits at once.

    Args:
        hidden: `(..., H)`.
        weight: `(V, H)`.
        targets: `(...)`, int64.
        bias: `(V,)` or `None`.
        ignore_index: Targets that do not count.
        reduction: "mean" or "sum".
        num_items: Divisor of "mean" instead of the number of targets that count.
        softcap: `z = softcap * tanh(z / softcap)`.
        logit_scale: Factor of the logits, before the cap.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.

    Returns:
        0-dimensional loss; 0 where nothing counts.

    Example:
        >>> chunked_cross_entropy(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([1]))
        tensor(1.3863)
    """
    logits = torch.nn.functional.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = targets.reshape(-1)
    total = torch.nn.functional.cross_entropy(
        logits, flat, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    if reduction == "sum":
        return total
    count = (flat != ignore_index).sum() if num_items is None else num_items
    return total / count if bool(count) else total * 0.0


def causal_lm_loss(hidden: Tensor, weight: Tensor, labels: Tensor, **options: object) -> Tensor:
    """Compute the loss of predicting `labels[:, 1:]` from `hidden[:, :-1]`.

    Args:
        hidden: `(B, S, H)`.
        weight: `(V, H)`.
        labels: `(B, S)`, int64.
        options: Those of `chunked_cross_entropy`.

    Returns:
        0-dimensional loss.

    Example:
        >>> causal_lm_loss(torch.zeros(1, 2, 2), torch.zeros(4, 2), torch.tensor([[0, 1]]))
        tensor(1.3863)
    """
    return chunked_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], **options)  # type: ignore[arg-type]
