"""The operations of ts_optim: schema, contract, fake kernel; the arithmetic is native."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

from . import _C
from .moments import block_count

__all__ = ["adamw_blocks_", "adamw_step_", "grad_narrow", "grad_sumsq", "narrow_grads"]

_LIBRARY = OpLibrary("ts_optim")
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_LOWS = (torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)


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


def _adamw_blocks(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    m_scales: Sequence[torch.Tensor],
    v_scales: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor],
    emas: Sequence[torch.Tensor],
    hyper: torch.Tensor,
    groups: Sequence[int],
    seeds: Sequence[int],
    numbers: Sequence[int],
    grad_scale: float = 1.0,
    ema_decay: float = 1.0,
    reconcile: bool = False,
    measure: bool = False,
    threads: int = 0,
) -> torch.Tensor:
    blocks = sum(block_count(p.numel()) for p in params) if measure else 0
    device = grads[0].device if grads else torch.device("cpu")
    sums = torch.zeros(len(params) if measure else 0, 3, dtype=torch.float64, device=device)
    partials = torch.empty(3, blocks, dtype=torch.float64, device=device)
    _C.adamw_blocks_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        m_scales,
        v_scales,
        steps,
        lows,
        emas,
        hyper,
        groups,
        seeds,
        numbers,
        partials,
        sums,
        grad_scale,
        ema_decay,
        reconcile,
        threads,
    )
    return sums


def _adamw_blocks_fake(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    m_scales: Sequence[torch.Tensor],
    v_scales: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor],
    emas: Sequence[torch.Tensor],
    hyper: torch.Tensor,
    groups: Sequence[int],
    seeds: Sequence[int],
    numbers: Sequence[int],
    grad_scale: float = 1.0,
    ema_decay: float = 1.0,
    reconcile: bool = False,
    measure: bool = False,
    threads: int = 0,
) -> torch.Tensor:
    name = "adamw_blocks_"
    moments = exp_avgs[0].dtype if exp_avgs else torch.float32
    _require(moments in _MOMENTS, name, "exp_avgs[0]", "float32, bfloat16 or uint8", moments)
    packed = moments is torch.uint8
    lists: dict[str, tuple[Sequence[torch.Tensor], tuple[torch.dtype, ...], bool]] = {
        "grads": (grads, _GRADS, False),
        "exp_avgs": (exp_avgs, (moments,), False),
        "exp_avg_sqs": (exp_avg_sqs, (moments,), False),
        "lows": (lows, _LOWS, True),
        "emas": (emas, (torch.float32,), True),
        "m_scales": (m_scales, (torch.float32,), not packed),
        "v_scales": (v_scales, (torch.float32,), not packed),
    }
    _require_dtype(hyper, (torch.float64,), name, "hyper")
    for argument, (tensors, accepted, optional) in lists.items():
        length = len(tensors) == len(params) or (optional and not tensors)
        _require(length, name, argument, f"{len(params)} tensors", len(tensors))
        for i, t in enumerate(tensors):
            _require_dtype(t, accepted, name, f"{argument}[{i}]")
            numel = params[i].numel()
            numel = block_count(numel) if argument.endswith("scales") else numel
            good = t.numel() == numel and t.is_contiguous()
            _require(good, name, f"{argument}[{i}]", f"{numel} contiguous elements", t)
    for argument, given in {"steps": steps, "groups": groups, "seeds": seeds, "numbers": numbers}.items():
        _require(len(given) == len(params), name, argument, f"{len(params)} entries", len(given))
    device = grads[0].device if grads else torch.device("cpu")
    return torch.empty(len(params) if measure else 0, 3, dtype=torch.float64, device=device)


adamw_blocks_ = _LIBRARY.define(
    "adamw_blocks_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] m_scales, Tensor(e!)[] v_scales, Tensor(f!)[] steps, Tensor(g!)[] lows, Tensor(h!)[] emas, "
    "Tensor hyper, int[] groups, int[] seeds, int[] numbers, float grad_scale=1.0, float ema_decay=1.0, "
    "bool reconcile=False, bool measure=False, int threads=0) -> Tensor",
    cpu=_adamw_blocks,
    fake=_adamw_blocks_fake,
)
adamw_blocks_.__doc__ = """AdamW as `adamw_step_`, with packed moments, an average of the weights, and sums.

    ema <- ema + (1 - ema_decay) (p - ema), after the update

Bit-equal on the CPU (any instruction set and thread count) and on CUDA, and to `reference`. Beside CUDA
gradients, all else may be page-locked host memory, which the kernel reads and writes over the link.

Args:
    params: float32, contiguous; read and written.
    grads: float32, bfloat16 or float16, same sizes, all on one device; read.
    exp_avgs: First moments: float32, bfloat16 (stochastic rounding) or uint8 (`reference.encode_int8`).
    exp_avg_sqs: Second moments, same dtype.
    m_scales: float32 `[ceil(numel / 256)]` for each parameter with uint8 moments; else empty.
    v_scales: The same for the second moments.
    steps: One float32 on the CPU for each parameter; increased by one in the same call.
    lows: Empty, or one bfloat16 / float16 copy of the weights for each parameter; written.
    emas: Empty, or one float32 tensor for each parameter; read and written.
    hyper: float64 `[groups, 5]` on the CPU: lr, beta1, beta2, eps, weight_decay.
    groups: Row of `hyper` for each parameter.
    seeds: Seed of random rounding for each parameter.
    numbers: What tells its random bits from other parameters' with the same seed: its index.
    grad_scale: Multiplies each gradient.
    ema_decay: Decay of the moving average.
    reconcile: As for `adamw_step_`.
    measure: Return sums of squares of gradients, updates and new weights.
    threads: 0 takes `torch.get_num_threads()`.

Returns:
    float64 `[len(params), 3]`, or `[0, 3]` if not measured.

Source: https://arxiv.org/abs/1711.05101, https://arxiv.org/abs/2110.02861, https://arxiv.org/abs/1502.02551.
"""


def _piece_count(grads: Sequence[torch.Tensor]) -> int:
    return sum(-(-g.numel() // _C.SUM_CHUNK) for g in grads)


def _sumsq(grads: Sequence[torch.Tensor], threads: int = 0) -> torch.Tensor:
    device = grads[0].device
    partials = torch.empty(_piece_count(grads), dtype=torch.float64, device=device)
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


_Narrow = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _narrow_sizes(grads: Sequence[torch.Tensor]) -> list[int]:
    """Elements of each bf16 form, each followed by those that nothing is in."""
    return [size for g in grads for size in (g.numel(), -g.numel() % _C.LOW_ALIGN)]


def _narrow_cuda(grads: Sequence[torch.Tensor], threads: int = 0) -> _Narrow:
    count, device = len(grads), grads[0].device
    low = torch.empty(sum(_narrow_sizes(grads)), dtype=torch.bfloat16, device=device)
    lost = torch.empty(count, dtype=torch.uint8, device=device)
    partials = torch.empty(_piece_count(grads), dtype=torch.float64, device=device)
    sums = torch.empty(count, dtype=torch.float64, device=device)
    _C.grad_narrow(grads, low, lost, partials, sums)
    return low, lost, sums


def _narrow_cpu(grads: Sequence[torch.Tensor], threads: int = 0) -> _Narrow:
    low, lost, _ = _narrow_fake(grads)
    forms = low.zero_().split_with_sizes(_narrow_sizes(grads))[::2]
    for i, (form, g) in enumerate(zip(forms, grads, strict=True)):
        flat = g.view(-1)
        lost[i] = torch.ne(form.copy_(flat), flat).any()
    return low, lost, _sumsq(grads, threads)


def _narrow_fake(grads: Sequence[torch.Tensor], threads: int = 0) -> _Narrow:
    for i, g in enumerate(grads):
        _require_dtype(g, (torch.float32,), "grad_narrow", f"grads[{i}]")
        good = g.is_contiguous() and g.device == grads[0].device
        _require(good, "grad_narrow", f"grads[{i}]", "a contiguous tensor on the device of grads[0]", g)
    device = grads[0].device
    return (
        torch.empty(sum(_narrow_sizes(grads)), dtype=torch.bfloat16, device=device),
        torch.empty(len(grads), dtype=torch.uint8, device=device),
        torch.empty(len(grads), dtype=torch.float64, device=device),
    )


grad_narrow = _LIBRARY.define(
    "grad_narrow(Tensor[] grads, int threads=0) -> (Tensor, Tensor, Tensor)",
    cpu=_narrow_cpu,
    cuda=_narrow_cuda,
    fake=_narrow_fake,
)
grad_narrow.__doc__ = """What `narrow_grads` is made of: the bfloat16 forms are one tensor here.

Args:
    grads: See `narrow_grads`.
    threads: See there.

Returns:
    The forms one after another, each from a multiple of 8 elements on and filled up with zeros; `lost` and
    `sums` of `narrow_grads`.
"""


def narrow_grads(
    grads: Sequence[torch.Tensor], threads: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Round gradients to bfloat16, say whether that lost anything, and measure them: in one pass on CUDA.

    Args:
        grads: One or more, float32, contiguous, all on one device.
        threads: 0 takes `torch.get_num_threads()`; for the sums of CPU tensors.

    Returns:
        `lows`, as ``grad.to(torch.bfloat16)``, with the shapes of the gradients: parts of one buffer, each
        from a multiple of 16 bytes on; `lost`, uint8 `[len(grads)]`: 1 where an element differs from its
        bfloat16 form, as a NaN always does, else 0; `sums`, float64 `[len(grads)]`: the bits of `grad_sumsq`.
        All on the device of the gradients.

    Raises:
        TypeError: A gradient is not float32.
        ValueError: One is not contiguous, or on another device.

    Example:
        >>> lows, lost, sums = narrow_grads([torch.tensor([1.5, -2.0]), torch.tensor([1.0 + 2.0**-20])])
        >>> lows, lost.tolist(), sums[0].item()
        ([tensor([ 1.5000, -2.0000], dtype=torch.bfloat16), tensor([1.], dtype=torch.bfloat16)], [0, 1], 6.25)
    """
    low, lost, sums = grad_narrow(grads, threads)
    forms = low.split_with_sizes(_narrow_sizes(grads))[::2]
    shaped = [form if g.dim() == 1 else form.view(g.shape) for form, g in zip(forms, grads, strict=True)]
    return shaped, lost, sums
