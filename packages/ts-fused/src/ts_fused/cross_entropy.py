"""Cross-entropy from hidden states and the output head, without the full logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import boolean, choice, integer, not_yet, number

from . import _ops

__all__ = ["causal_lm_loss", "chunked_cross_entropy"]

_NAME = "chunked_cross_entropy"


@dataclass(frozen=True)
class _Options:
    """What does not change from chunk to chunk."""

    chunk_size: int
    ignore_index: int
    softcap: float  # 0: none
    logit_scale: float
    label_smoothing: float
    dtype: torch.dtype  # of the matmuls and the logits


class _Needs(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool


def _add_weight_gradient(total: Tensor, grad_logits: Tensor, hidden: Tensor, *, fresh: bool) -> None:
    """Add `grad_logits.T @ hidden` to the fp32 `total`, or write it there if `fresh`."""
    beta = 0 if fresh else 1  # 0 ignores what `total` held
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden, beta=beta)
        return
    if total.is_cuda:
        # cuBLAS adds up in fp32 and writes fp32.
        torch.ops.aten.addmm.dtype_out(total, grad_logits.t(), hidden, torch.float32, beta=beta, out=total)
        return
    # The CPU's product has the dtype of its factors: rounded once per chunk, then added in fp32.
    step = 8192
    for begin in range(0, total.shape[0], step):
        product = grad_logits[:, begin : begin + step].t() @ hidden
        part = total[begin : begin + step]
        if fresh:
            part.copy_(product)
        else:
            part.add_(product)


class _Accumulator:
    """Runs the chunks: losses per row and, where needed, unscaled gradients of their sum."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
        needs: _Needs,
        *,
        row_scale: Tensor | None = None,
    ) -> None:
        rows, device = hidden.shape[0], hidden.device
        self.row_scale = row_scale  # (rows, 1): factor of each row's gradient
        self.options, self.needs = options, needs
        self.hidden = hidden
        self.weight = weight.to(options.dtype)
        self.bias = None if bias is None else bias.to(options.dtype)
        self.losses = torch.empty(rows, dtype=torch.float32, device=device)
        self.logits = torch.empty(
            (min(options.chunk_size, rows), weight.shape[0]), dtype=options.dtype, device=device
        )
        self.grad_hidden = torch.empty_like(hidden) if needs.hidden else None
        self.grad_weight = (
            torch.empty(weight.shape, dtype=torch.float32, device=device) if needs.weight else None
        )
        self.fresh = True  # nothing has been written to grad_weight yet
        self.grad_bias = (
            torch.zeros(weight.shape[0], dtype=torch.float32, device=device) if needs.bias else None
        )

    def run(self, targets: Tensor) -> None:
        for begin in range(0, self.hidden.shape[0], self.options.chunk_size):
            rows = slice(begin, begin + self.options.chunk_size)
            # Looking at the targets is free on the CPU; on a GPU it would wait for the device.
            if targets.device.type == "cpu" and bool((targets[rows] == self.options.ignore_index).all()):
                self.losses[rows] = 0.0
                if self.grad_hidden is not None:
                    self.grad_hidden[rows] = 0.0
                continue
            self._chunk(rows, targets[rows])
        if self.fresh and self.grad_weight is not None:
            self.grad_weight.zero_()

    def _chunk(self, rows: slice, targets: Tensor) -> None:
        o = self.options
        hidden = self.hidden[rows].to(o.dtype)
        logits = self.logits[: hidden.shape[0]]
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        _ops.cross_entropy_rows_(
            logits,
            targets,
            self.losses[rows],
            o.ignore_index,
            o.softcap,
            o.logit_scale,
            o.label_smoothing,
            any(self.needs),
        )
        if self.row_scale is not None:
            logits.mul_(self.row_scale[rows])
        if self.grad_hidden is not None:
            if self.grad_hidden.dtype == o.dtype:
                torch.mm(logits, self.weight, out=self.grad_hidden[rows])
            else:
                self.grad_hidden[rows] = logits @ self.weight
        if self.grad_weight is not None:
            _add_weight_gradient(self.grad_weight, logits, hidden, fresh=self.fresh)
            self.fresh = False
        if self.grad_bias is not None:
            self.grad_bias += logits.sum(0, dtype=torch.float32)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are computed with the loss; backward only multiplies them by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_count: Tensor,
        options: _Options,
        with_grad: bool,
    ) -> Tensor:
        needs = _Needs(*ctx.needs_input_grad[:3]) if with_grad else _Needs(False, False, False)
        with torch.autocast(hidden.device.type, enabled=False):
            work = _Accumulator(hidden.contiguous(), weight, bias, options, needs)
            work.run(targets)
            loss: Tensor = (_ops.loss_total(work.losses) * inverse_count).to(torch.float32)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            work.grad_hidden, work.grad_weight, work.grad_bias, inverse_count.to(torch.float32)
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, inverse_count = ctx.saved_tensors
        scale = grad_loss.to(torch.float32) * inverse_count
        scaled = [
            None if gradient is None else _ops.scale_cast(gradient, scale, dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _check_tensors(name: str, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    given = [("hidden", hidden), ("weight", weight), ("targets", targets)]
    given += [] if bias is None else [("bias", bias)]
    for argument, tensor in given:
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message(name, argument, "a torch.Tensor", type(tensor).__name__))
        if argument != "targets" and tensor.dtype not in _ops.FLOATS:
            raise ArgumentTypeError(
                message(name, argument, "float32, bfloat16 or float16", str(tensor.dtype))
            )
        if tensor.device != hidden.device:
            raise ArgumentError(
                message(name, argument, f"a tensor on {hidden.device}", f"one on {tensor.device}")
            )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(message(name, "targets", "int64 (or int32) labels", str(targets.dtype)))
    if hidden.dim() == 0:
        raise ArgumentError(message(name, "hidden", "(..., H)", "a 0-dimensional tensor"))
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.numel() == 0:
        raise ArgumentError(
            message(name, "weight", f"shape (V, {hidden.shape[-1]})", f"shape {tuple(weight.shape)}")
        )
    if targets.shape != hidden.shape[:-1]:
        raise ArgumentError(
            message(name, "targets", f"shape {tuple(hidden.shape[:-1])}", f"shape {tuple(targets.shape)}")
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            message(name, "bias", f"shape ({weight.shape[0]},)", f"shape {tuple(bias.shape)}")
        )


def _matmul_dtype(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return dtype if dtype in _ops.FLOATS else hidden.dtype
    for argument, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ArgumentTypeError(
                message(name, argument, f"the dtype of hidden ({hidden.dtype})", str(tensor.dtype),
                        "Convert it, or use torch.autocast")
            )  # fmt: skip
    return hidden.dtype


def _divisor(name: str, num_items: Any, reduction: str, device: torch.device) -> Tensor | None:
    """Return `num_items` as a float64 scalar on `device`; None if not given."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise ArgumentError(message(name, "num_items", 'None unless reduction is "mean"', repr(num_items)))
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1 or num_items.is_complex():
            raise ArgumentError(
                message(name, "num_items", "an integer or one-element tensor", repr(num_items))
            )
        return num_items.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    count = integer("num_items", num_items, minimum=0)
    return torch.full((), count, dtype=torch.float64, device=device)


def _inverse_count(counts: Tensor, divisor: Tensor | None, reduction: str) -> Tensor:
    """Return the factor of the summed loss, a float64 scalar; 0 where nothing counts."""
    if reduction == "sum":
        return torch.ones((), dtype=torch.float64, device=counts.device)
    valid = counts[0]
    if divisor is None:
        return torch.where(valid > 0, 1.0 / valid.to(torch.float64), 0.0)
    return torch.where((divisor == 0) & (valid == 0), 0.0, 1.0 / divisor)


def _raise_bad_labels(name: str, targets: Tensor, bad: int, ignore_index: int, vocab: int) -> None:
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    example = int(targets[wrong][0])
    raise ArgumentError(
        message(
            name,
            "targets" if name == "chunked_cross_entropy" else "labels",
            f"labels in [0, {vocab}) or ignore_index ({ignore_index})",
            f"{bad} other(s), for instance {example}",
        )
    )


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    validate: bool = True,
) -> Tensor:
    r"""Cross-entropy of a linear head, computed chunk by chunk so that the logits never exist as a whole.

    $$z = s\,(h W^\top + b), \quad u = c \tanh(z / c)\ \text{(with a cap)}, \quad
      \ell = \log \sum_j e^{u_j} - (1 - \alpha) u_y - \tfrac{\alpha}{V} \sum_j u_j,$$

    summed over the rows whose target is not `ignore_index` and divided by their number, or by `num_items`.

    The gradients of `hidden`, `weight` and `bias` are computed together with the loss, those that require
    grad only and none under `no_grad`, and kept until backward, which multiplies them by the incoming
    gradient.
    Scaled losses, several losses and repeated backward passes behave as usual; a second derivative raises.

    Memory: one chunk of logits, `chunk_size * V`, plus the gradients: `hidden` in its own dtype, `weight` and
    `bias` in fp32.

    Numerics: matmuls and logits have the dtype of `hidden` (under autocast, the autocast dtype); everything
    per row is fp32, the loss is summed in float64 in a fixed order and returned as float32; the gradient of
    the logits is rounded to their dtype; the weight gradient adds up in fp32 over the chunks (on CPUs a
    chunk's 16-bit product is rounded to 16 bits first). Results depend on `chunk_size` only through the
    rounding of the matmuls.

    Args:
        hidden: `(..., H)`, float32, bfloat16 or float16, CPU or CUDA.
        weight: `(V, H)`, same dtype (any under autocast) and device.
        targets: `(...)`, int64 or int32, same device.
        bias: `(V,)` or `None`.
        chunk_size: Rows per chunk, >= 1.
        ignore_index: Target value that does not count; such rows have gradient exactly 0.
        reduction: "mean" or "sum". "none" is not available: the weight gradient is summed before the incoming
            gradient is known.
        num_items: Divisor of "mean", an int or a one-element tensor (not read back from the device): for
            gradient accumulation the number of valid targets in all micro-batches.
        softcap: Cap of the logits, > 0, or `None`.
        logit_scale: Factor of the logits, before the cap.
        label_smoothing: In [0, 1], as in `torch.nn.functional.cross_entropy`.
        validate: Check the targets. On CUDA that waits for the device once per call. With False, a label
            outside the vocabulary makes the loss NaN; it is never used as an index.

    Returns:
        0-dimensional float32 loss. If no target counts it is 0, with gradients of exactly 0 (where
        `torch.nn.functional.cross_entropy` gives NaN).

    Raises:
        ArgumentTypeError: Not tensors, or dtypes that do not fit.
        ArgumentError: Shapes, devices or labels that do not fit; `num_items` 0 with valid targets.
        OptionError: An option outside its range.

    Example:
        >>> hidden = torch.zeros(3, 8, requires_grad=True)
        >>> loss = chunked_cross_entropy(hidden, torch.zeros(10, 8), torch.tensor([1, 2, -100]))
        >>> loss.backward()
        >>> round(loss.item(), 4)
        2.3026
    """
    return _loss(
        _NAME, hidden, weight, targets, bias, chunk_size=chunk_size, ignore_index=ignore_index,
        reduction=reduction, num_items=num_items, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, validate=validate,
    )  # fmt: skip


def _loss(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    chunk_size: int,
    ignore_index: int,
    reduction: str,
    num_items: int | Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    validate: bool,
) -> Tensor:
    _check_tensors(name, hidden, weight, targets, bias)
    choice("reduction", reduction, ("mean", "sum", "none"))
    not_yet("reduction", reduction, ("mean", "sum"))
    options = _Options(
        chunk_size=integer("chunk_size", chunk_size, minimum=1),
        ignore_index=integer("ignore_index", ignore_index),
        softcap=0.0 if softcap is None else number("softcap", softcap, above=0.0),
        logit_scale=number("logit_scale", logit_scale),
        label_smoothing=number("label_smoothing", label_smoothing, minimum=0.0, maximum=1.0),
        dtype=_matmul_dtype(name, hidden, weight, bias),
    )
    boolean("validate", validate)
    divisor = _divisor(name, num_items, reduction, hidden.device)
    vocab = weight.shape[0]
    rows = hidden.reshape(-1, hidden.shape[-1]) if hidden.numel() else hidden.reshape(0, hidden.shape[-1])
    flat = targets.detach().reshape(-1).to(torch.int64).contiguous()
    counts = _ops.label_counts(flat, ignore_index, vocab)
    if validate:
        valid, bad = counts.tolist()
        if bad:
            _raise_bad_labels(name, flat, bad, ignore_index, vocab)
        if valid and not isinstance(num_items, Tensor) and num_items is not None and int(num_items) == 0:
            raise ArgumentError(message(name, "num_items", "the number of targets that count", num_items))
    inverse_count = _inverse_count(counts, divisor, reduction)
    result: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, flat, inverse_count, options, torch.is_grad_enabled()
    )
    return result


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    validate: bool = True,
) -> Tensor:
    r"""Next-token loss: `hidden[:, t]` predicts `labels[:, t + 1]`.

    `chunked_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], ...)`, without copying `hidden`: the labels
    are shifted, and the last position of each row gets `ignore_index`. The first label of a row is never
    used, so the number of valid labels, and a `num_items` that fits, counts `labels[:, 1:]` alone.

    Args:
        hidden: `(B, S, H)`, the last hidden states of the model.
        weight: `(V, H)`, the output head.
        labels: `(B, S)`, int64 or int32, not shifted.
        bias: As in `chunked_cross_entropy`, as is every option below.
        chunk_size: Rows per chunk.
        ignore_index: Label that does not count.
        reduction: "mean" or "sum".
        num_items: Divisor of "mean".
        softcap: Cap of the logits (`final_logit_softcapping` of Gemma 2's config).
        logit_scale: Factor of the logits (Cohere: `logit_scale`; Granite: `1 / logits_scaling`).
        label_smoothing: In [0, 1].
        validate: Check the labels.

    Returns:
        0-dimensional float32 loss; 0 if no label counts, also for `S = 1` and an empty batch.

    Raises:
        ArgumentTypeError: Not tensors, or dtypes that do not fit.
        ArgumentError: Shapes, devices or labels that do not fit.
        OptionError: An option outside its range.

    Example:
        >>> hidden, head = torch.zeros(1, 3, 8), torch.zeros(10, 8)
        >>> round(causal_lm_loss(hidden, head, torch.tensor([[1, 2, 3]])).item(), 4)
        2.3026
    """
    name = "causal_lm_loss"
    for argument, tensor in (("hidden", hidden), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message(name, argument, "a torch.Tensor", type(tensor).__name__))
    if hidden.dim() != 3 or labels.shape != hidden.shape[:2] or labels.shape[1] == 0:
        raise ArgumentError(
            message(
                name,
                "labels",
                "(B, S) labels for (B, S, H) hidden states, S >= 1",
                f"shapes {tuple(labels.shape)} and {tuple(hidden.shape)}",
            )
        )
    ignore_index = integer("ignore_index", ignore_index)
    shifted = torch.full_like(labels, ignore_index)
    shifted[:, :-1] = labels[:, 1:]
    return _loss(
        name, hidden, weight, shifted, bias, chunk_size=chunk_size, ignore_index=ignore_index,
        reduction=reduction, num_items=num_items, softcap=softcap, logit_scale=logit_scale,
        label_smoothing=label_smoothing, validate=validate,
    )  # fmt: skip
