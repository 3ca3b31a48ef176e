"""Log-probabilities of whole sequences from hidden states and the output head, without the full logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import boolean, integer, number

from . import _ops
from .cross_entropy import (
    _Accumulator,
    _check_tensors,
    _matmul_dtype,
    _Needs,
    _Options,
    _raise_bad_labels,
)

__all__ = ["check_segments", "sequence_logprobs", "sum_by_sequence"]

_NAME = "sequence_logprobs"


class _TokenLogprobs(torch.autograd.Function):
    """`-cross-entropy` of every row.

    A row's gradient is one number times what the loss of that row alone would give. For `hidden` that is
    computed with the values and multiplied in backward; the head's gradient sums rows whose numbers are not
    known before, so with a trained head backward computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
        with_grad: bool,
    ) -> Tensor:
        needs = _Needs(*ctx.needs_input_grad[:3]) if with_grad else _Needs(False, False, False)
        ctx.options, ctx.needs, ctx.dtype = options, needs, hidden.dtype
        ctx.again = needs.weight or needs.bias
        with torch.autocast(hidden.device.type, enabled=False):
            now = _Needs(needs.hidden and not ctx.again, False, False)
            work = _Accumulator(hidden.contiguous(), weight, bias, options, now)
            work.run(targets)
        if ctx.again:
            ctx.save_for_backward(hidden, weight, bias, targets)
        else:
            ctx.save_for_backward(work.grad_hidden)
        return work.losses.neg_().add_(0.0)  # no -0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = -grad.to(torch.float32)[:, None]
        if not ctx.again:
            (found,) = ctx.saved_tensors
            return ((found * scale).to(ctx.dtype) if found is not None else None, *[None] * 5)
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            work = _Accumulator(hidden.contiguous(), weight, bias, ctx.options, ctx.needs, row_scale=scale)
            work.run(targets)
        gradients: list[Tensor | None] = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in (
                (work.grad_hidden, hidden),
                (work.grad_weight, weight),
                (work.grad_bias, bias),
            )
        ]
        return (*gradients, None, None, None)


def sum_by_sequence(
    logprobs: Tensor, targets: Tensor, segments: Tensor | None, num_segments: int, ignore: int, average: bool
) -> Tensor:
    """Sum (or average) the values of `(B, S)` tokens by row, or by the number that `segments` gives them."""
    counted = targets != ignore
    wide = torch.where(counted, logprobs, 0.0).to(torch.float64)
    if segments is None:
        total, count = wide.sum(-1), counted.sum(-1)
    else:
        # One masked sum for each, not a scatter: a GPU's scatter adds in an order of its own.
        numbers = torch.arange(num_segments, device=wide.device)[:, None]
        member = segments.reshape(-1) == numbers
        total = torch.where(member, wide.reshape(-1), 0.0).sum(-1)
        count = (member & counted.reshape(-1)).sum(-1)
    result: Tensor = total / count.clamp(min=1) if average else total
    return result.to(torch.float32)


def check_segments(name: str, labels: Tensor, segments: Tensor | None, num_segments: int | None) -> int:
    """Return how many segments there are, 0 without; `name` is the function whose arguments they are."""
    if segments is None:
        if num_segments is not None:
            raise ArgumentError(message(name, "num_segments", "None without segments", num_segments))
        return 0
    if not isinstance(segments, Tensor) or segments.dtype not in (torch.int64, torch.int32):
        given = getattr(segments, "dtype", type(segments).__name__)
        raise ArgumentTypeError(message(name, "segments", "an int64 (or int32) tensor", str(given)))
    if segments.shape != labels.shape:
        raise ArgumentError(
            message(name, "segments", f"shape {tuple(labels.shape)}", f"shape {tuple(segments.shape)}")
        )
    if num_segments is None:
        raise ArgumentError(message(name, "num_segments", "how many segments there are", None))
    return integer("num_segments", num_segments, minimum=0)


def sequence_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    average: bool = False,
    segments: Tensor | None = None,
    num_segments: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    validate: bool = True,
) -> Tensor:
    r"""Log-probability of each sequence: `hidden[:, t]` predicts `labels[:, t + 1]`.

    $$\log p_b = \sum_t \log \operatorname{softmax}(u_{b,t})_{y_{b,t+1}},$$

    over the labels after the shift that are not `ignore_index`, with `u` as in `chunked_cross_entropy`: for
    preference losses, labels of the answer's tokens alone. The logits of at most `chunk_size` tokens exist at
    a time. If the head is trained too, backward computes them once more; else it only multiplies.

    Numerics: as in `chunked_cross_entropy`; log-probabilities of tokens are fp32, their sum is taken in
    float64 in a fixed order and returned as float32.

    Args:
        hidden: `(B, S, H)`, the last hidden states; float32, bfloat16 or float16, CPU or CUDA.
        weight: `(V, H)`, the output head, same dtype (any under autocast) and device.
        labels: `(B, S)`, int64 or int32, not shifted.
        bias: `(V,)` or None.
        chunk_size: Tokens per chunk, >= 1.
        ignore_index: Label that does not count.
        average: Divide by the number of labels that count (1 if there is none).
        segments: `(B, S)`, int64: the number of the sequence that each token belongs to, for several
            sequences in a row; numbers outside `[0, num_segments)` belong to none. A label counts for its own
            token's sequence; the first label of a sequence must be `ignore_index`.
        num_segments: How many there are.
        softcap: Cap of the logits, > 0, or None.
        logit_scale: Factor of the logits, before the cap.
        validate: Check the labels; on CUDA that waits for the device.

    Returns:
        `(B,)` or `(num_segments,)` float32; exactly 0 for a sequence without a label that counts.

    Raises:
        ArgumentTypeError: Not tensors, or dtypes that do not fit.
        ArgumentError: Shapes, devices or labels that do not fit.
        OptionError: An option outside its range.

    Example:
        >>> hidden, head = torch.zeros(1, 3, 8), torch.zeros(10, 8)
        >>> round(sequence_logprobs(hidden, head, torch.tensor([[-100, 2, 3]])).item(), 4)
        -4.6052
    """
    for argument, tensor in (("hidden", hidden), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message(_NAME, argument, "a torch.Tensor", type(tensor).__name__))
    if hidden.dim() != 3 or labels.shape != hidden.shape[:2] or labels.shape[1] == 0:
        expected = "(B, S) labels for (B, S, H) hidden states, S >= 1"
        given = f"shapes {tuple(labels.shape)} and {tuple(hidden.shape)}"
        raise ArgumentError(message(_NAME, "labels", expected, given))
    count = check_segments(_NAME, labels, segments, num_segments)
    ignore_index = integer("ignore_index", ignore_index)
    targets = torch.full_like(labels, ignore_index)
    targets[:, :-1] = labels[:, 1:]
    if segments is not None:  # a label counts where its own token is
        owner = torch.full_like(segments, -1)
        owner[:, :-1] = segments[:, 1:]
        segments = owner
    _check_tensors(_NAME, hidden, weight, targets, bias)
    options = _Options(
        chunk_size=integer("chunk_size", chunk_size, minimum=1),
        ignore_index=ignore_index,
        softcap=0.0 if softcap is None else number("softcap", softcap, above=0.0),
        logit_scale=number("logit_scale", logit_scale),
        label_smoothing=0.0,
        dtype=_matmul_dtype(_NAME, hidden, weight, bias),
    )
    boolean("average", average)
    flat = targets.detach().reshape(-1).to(torch.int64).contiguous()
    if boolean("validate", validate):
        _, bad = _ops.label_counts(flat, ignore_index, weight.shape[0]).tolist()
        if bad:
            _raise_bad_labels(_NAME, flat, bad, ignore_index, weight.shape[0])
    rows = hidden.reshape(flat.shape[0], hidden.shape[-1])
    values: Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, flat, options, torch.is_grad_enabled()
    )
    return sum_by_sequence(values.reshape(targets.shape), targets, segments, count, ignore_index, average)
