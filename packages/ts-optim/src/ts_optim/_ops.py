"""The operations of ts_optim: schema, contract, fake kernel; the arithmetic is native."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

from . import _C

__all__ = ["adamw_step_", "grad_sumsq"]

_LIBRARY = OpLibrary("ts_optim")
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_LOWS = (torch.bfloat16, torch.float16)


def _require(ok: bool, function: str, argument: str, expected: str, given: object) -> None:
    if not ok:
        raise ArgumentError(message(function, argument, expected, given))


def _require_dtype(t: torch.Tensor, accepted: Sequence[torch.dtype], function: str, argument: str) -> None:
    if t.dtype not in accepted:
        names = ", ".join(str(d).removeprefix("torch.") for d in accepted)
        raise ArgumentTypeError(message(function, argument, names, str(t.dtype).removeprefix("torch.")))


def _adamw_cpu(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor],
    hyper: torch.Tensor,
    groups: Sequence[int],
    grad_scale: float = 1.0,
    found_inf: torch.Tensor | None = None,
    reconcile: bool = False,
    threads: int = 0,
) -> None:
    if found_inf is not None and bool(found_inf):
        return
    _C.adamw_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        lows,
        hyper,
        groups,
        grad_scale,
        reconcile,
        threads,
    )


def _adamw_fake(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor],
    hyper: torch.Tensor,
    groups: Sequence[int],
    grad_scale: float = 1.0,
    found_inf: torch.Tensor | None = None,
    reconcile: bool = False,
    threads: int = 0,
) -> None:
    name = "adamw_step_"
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if lows:
        lists["lows"] = lows
    for argument, tensors in lists.items():
        _require(len(tensors) == len(params), name, argument, f"{len(params)} tensors", len(tensors))
    _require(len(groups) == len(params), name, "groups", f"{len(params)} indices", len(groups))
    _require_dtype(hyper, (torch.float64,), name, "hyper")
    rows = hyper.shape[0] if hyper.dim() == 2 and hyper.shape[1] == 5 else -1
    _require(rows >= 0, name, "hyper", "shape (groups, 5)", tuple(hyper.shape))
    kinds = {"exp_avgs": (torch.float32,), "exp_avg_sqs": (torch.float32,), "grads": _GRADS, "lows": _LOWS}
    for i, param in enumerate(params):
        _require_dtype(param, (torch.float32,), name, f"params[{i}]")
        for argument, accepted in kinds.items():
            if argument not in lists:
                continue
            t = lists[argument][i]
            _require_dtype(t, accepted, name, f"{argument}[{i}]")
            good = t.numel() == param.numel() and t.is_contiguous() and t.device == params[0].device
            _require(good, name, f"{argument}[{i}]", f"{param.numel()} contiguous elements beside params", t)
        _require_dtype(steps[i], (torch.float32,), name, f"steps[{i}]")
        _require(0 <= groups[i] < rows, name, f"groups[{i}]", "a row of hyper", groups[i])


adamw_step_ = _LIBRARY.define(
    "adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] lows, Tensor hyper, int[] groups, float grad_scale=1.0, "
    "Tensor? found_inf=None, bool reconcile=False, int threads=0) -> ()",
    cpu=_adamw_cpu,
    fake=_adamw_fake,
)
adamw_step_.__doc__ = """AdamW on a list of tensors, in one pass over memory and one call.

    g <- grad * grad_scale;  m <- m + (1 - beta1) (g - m);  v <- v + (1 - beta2) (g^2 - v)
    p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps),  t = step + 1

Bit-equal on the CPU (any instruction set and thread count) and on CUDA.

Args:
    params: float32, contiguous, all on one device; read and written.
    grads: float32, bfloat16 or float16, same sizes; read.
    exp_avgs: First moments, float32; read and written.
    exp_avg_sqs: Second moments, float32; read and written. A finite gradient never makes one infinite.
    steps: One float32 on the CPU for each parameter; increased by one in the same call.
    lows: Empty, or one bfloat16 / float16 copy of the weights for each parameter; written.
    hyper: float64 `[groups, 5]` on the CPU: lr, beta1, beta2, eps, weight_decay.
    groups: Row of `hyper` for each parameter.
    grad_scale: Multiplies each gradient.
    found_inf: One number; when it is not zero nothing is written.
    reconcile: An element of `lows` that is not the rounding of its float32 weight was edited by somebody and
        replaces that weight before the update.
    threads: 0 takes `torch.get_num_threads()`.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
"""


def _sumsq(grads: Sequence[torch.Tensor], threads: int = 0) -> torch.Tensor:
    device = grads[0].device
    chunks = sum(-(-g.numel() // _C.SUM_CHUNK) for g in grads)
    partials = torch.empty(chunks, dtype=torch.float64, device=device)
    out = torch.empty(len(grads), dtype=torch.float64, device=device)
    _C.grad_sumsq(grads, partials, out, threads)
    return out


def _sumsq_fake(grads: Sequence[torch.Tensor], threads: int = 0) -> torch.Tensor:
    for i, g in enumerate(grads):
        _require_dtype(g, _GRADS, "grad_sumsq", f"grads[{i}]")
        good = g.is_contiguous() and g.device == grads[0].device
        _require(good, "grad_sumsq", f"grads[{i}]", "a contiguous tensor on the device of grads[0]", g)
    return torch.empty(len(grads), dtype=torch.float64, device=grads[0].device)


grad_sumsq = _LIBRARY.define(
    "grad_sumsq(Tensor[] grads, int threads=0) -> Tensor", cpu=_sumsq, fake=_sumsq_fake
)
grad_sumsq.__doc__ = """Sum of squares of each tensor, in float64, in a fixed summation tree.

Bit-equal on the CPU (any instruction set and thread count) and on CUDA; 1e20 in bfloat16 does not overflow. A
result is finite exactly when every element of its tensor is.

Args:
    grads: One or more, float32, bfloat16 or float16, contiguous, all on one device.
    threads: 0 takes `torch.get_num_threads()`.

Returns:
    float64 `[len(grads)]` on their device.
"""
