"""Linear layers with low-rank adapters: base and adapters in one autograd function, over any weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.registry import PackedWeight

__all__ = ["LoraAdapter", "LoraProjection", "lora_linear", "lora_linears"]


class LoraAdapter(NamedTuple):
    r"""One low-rank term $s\,(x A^T) B^T$.

    Attributes:
        a: `(rank, in_features)`, floating.
        b: `(out_features, rank)`, floating.
        scaling: `s`.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0


class LoraProjection(NamedTuple):
    """One of several linear layers that take the same input.

    Attributes:
        weight: `(out_features, in_features)`, frozen; plain or packed.
        adapters: Its low-rank terms; none is allowed.
        bias: `(out_features,)` or None.
    """

    weight: Tensor
    adapters: Sequence[LoraAdapter] = ()
    bias: Tensor | None = None


class _Form(NamedTuple):
    """How the tensors of one projection follow one another in the arguments of the autograd function."""

    packing: Any  # None, or how to put a packed weight together again
    parts: int  # tensors of the weight
    bias: bool
    scalings: tuple[float, ...]


class _Pieces(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    factors: list[tuple[Tensor, Tensor]]
    bias_at: int  # places among the arguments
    factors_at: int


def _packed(weight: Tensor) -> bool:
    # Types first: torch.compile cannot ask a plain tensor about a Protocol.
    return type(weight) not in (Tensor, torch.nn.Parameter) and isinstance(weight, PackedWeight)


def _flatten(projection: LoraProjection) -> tuple[_Form, list[Tensor]]:
    weight = projection.weight
    packing, parts = None, [weight]
    # A packed weight goes in as its packed tensors: they are what is saved for backward.
    if _packed(weight):
        names, context = cast(PackedWeight, weight).__tensor_flatten__()
        packing = (type(weight), tuple(names), context, weight.shape, weight.stride())
        parts = [getattr(weight, name) for name in names]
    form = _Form(
        packing, len(parts), projection.bias is not None, tuple(a.scaling for a in projection.adapters)
    )
    tensors = parts + ([] if projection.bias is None else [projection.bias])
    for adapter in projection.adapters:
        tensors += [adapter.a, adapter.b]
    return form, tensors


def _take_apart(forms: tuple[_Form, ...], tensors: Sequence[Tensor]) -> list[_Pieces]:
    found, at = [], 0
    for form in forms:
        parts = tensors[at : at + form.parts]
        weight = parts[0]
        if form.packing is not None:
            kind, names, context, size, stride = form.packing
            weight = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
        bias_at = at + form.parts
        factors_at = bias_at + form.bias
        at = factors_at + 2 * len(form.scalings)
        factors = [(tensors[i], tensors[i + 1]) for i in range(factors_at, at, 2)]
        found.append(_Pieces(weight, tensors[bias_at] if form.bias else None, factors, bias_at, factors_at))
    return found


def _plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if _packed(weight):
        # From fp32 there is one rounding; a shorter dtype is what the layer presents, and rounds first.
        first = dtype if weight.dtype is torch.float32 else weight.dtype
        weight = cast(PackedWeight, weight).dequantize(first)
    return weight.to(dtype)


def _packed_gradient(weight: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Compute `grad @ weight` from packed operands, if the weight was told to; None: decode it."""
    made = getattr(weight, "input_gradient", None)
    found: Tensor | None = None if made is None or grad.dtype != dtype else made(grad)
    return found


def _stacked(pieces: list[_Pieces], dtype: torch.dtype) -> Tensor | None:
    """All A under one another: the input is read once for all of them."""
    every = [a.to(dtype) for piece in pieces for a, _ in piece.factors]
    return None if not every else every[0] if len(every) == 1 else torch.cat(every)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute `scale * a @ b`, the scale applied before the rounding."""
    return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale)


class _LoraLinears(torch.autograd.Function):
    """Every argument after the forms is a tensor: weight parts, bias, then A and B of each adapter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[_Form, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        pieces = _take_apart(forms, tensors)
        rows = x.reshape(-1, x.shape[-1])
        stacked = _stacked(pieces, x.dtype)
        low = None if stacked is None else rows @ stacked.t()
        outs, at = [], 0
        for piece, form in zip(pieces, forms, strict=True):
            # A packed weight multiplies by itself in the dtype that it presents; autocast may want another.
            weight = piece.weight if piece.weight.dtype == x.dtype else _plain(piece.weight, x.dtype)
            bias = None if piece.bias is None else piece.bias.to(x.dtype)
            out = torch.nn.functional.linear(rows, weight, bias)
            for (a, b), scaling in zip(piece.factors, form.scalings, strict=True):
                assert low is not None
                out.addmm_(low[:, at : at + a.shape[0]], b.to(x.dtype).t(), alpha=scaling)
                at += a.shape[0]
            outs.append(out.view(*x.shape[:-1], out.shape[-1]))
        ctx.save_for_backward(x, low, *tensors)
        ctx.forms = forms
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, low, *tensors = ctx.saved_tensors
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _backward(ctx, x, low, tensors, grads)
        return _backward(ctx, x, low, tensors, grads)


def _backward(
    ctx: Any, x: Tensor, low: Tensor | None, tensors: list[Tensor], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    pieces = _take_apart(ctx.forms, tensors)
    rows = x.reshape(-1, x.shape[-1])
    needs = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(tensors)
    flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
    stacked = _stacked(pieces, x.dtype)
    back = None if low is None else torch.empty_like(low)
    at = 0
    for piece, form, grad in zip(pieces, ctx.forms, flat, strict=True):
        if piece.bias is not None and needs[2 + piece.bias_at] and grad is not None:
            results[piece.bias_at] = grad.sum(0).to(piece.bias.dtype)
        for i, ((a, b), scaling) in enumerate(zip(piece.factors, form.scalings, strict=True)):
            assert low is not None
            assert back is not None
            here = slice(at, at + a.shape[0])
            at += a.shape[0]
            if grad is None:
                back[:, here].zero_()
                continue
            back[:, here].addmm_(grad, b.to(x.dtype), beta=0, alpha=scaling)
            place = piece.factors_at + 2 * i + 1
            if needs[2 + place]:
                results[place] = _scaled_product(grad.t(), low[:, here], scaling).to(b.dtype)
    if back is not None:
        _gradients_of_a(pieces, back, rows, needs, flat, results)
    grad_x = _gradient_of_x(pieces, flat, stacked, back, x) if needs[0] else None
    return (grad_x, None, *results)


def _gradients_of_a(
    pieces: list[_Pieces],
    back: Tensor,
    rows: Tensor,
    needs: tuple[bool, ...],
    flat: list[Tensor | None],
    results: list[Tensor | None],
) -> None:
    """One product with the input for all A; those of an output that nobody used get none, not zeros."""
    places = [piece.factors_at + 2 * i for piece in pieces for i in range(len(piece.factors))]
    used = [grad is not None for piece, grad in zip(pieces, flat, strict=True) for _ in piece.factors]
    wanted = [use and needs[2 + place] for use, place in zip(used, places, strict=True)]
    if not any(wanted):
        return
    ranks = [a.shape[0] for piece in pieces for a, _ in piece.factors]
    dtypes = [a.dtype for piece in pieces for a, _ in piece.factors]
    together = back.t() @ rows
    # Each gets memory of its own: a view would keep all of them alive, and share a version counter.
    if len(ranks) == 1:
        results[places[0]] = together.to(dtypes[0])
        return
    for place, want, part, dtype in zip(places, wanted, torch.split(together, ranks), dtypes, strict=True):
        if want:
            results[place] = part.to(dtype) if dtype != part.dtype else part.clone()


def _gradient_of_x(
    pieces: list[_Pieces], flat: list[Tensor | None], stacked: Tensor | None, back: Tensor | None, x: Tensor
) -> Tensor:
    total: Tensor | None = None
    for piece, grad in zip(pieces, flat, strict=True):
        if grad is None:
            continue
        packed = _packed_gradient(piece.weight, grad, x.dtype)
        if packed is not None:
            total = packed if total is None else total.add_(packed)
            continue
        weight = _plain(piece.weight, x.dtype)
        total = grad @ weight if total is None else total.addmm_(grad, weight)
        del weight
    if total is None:
        return torch.zeros_like(x)
    if stacked is not None and back is not None:
        total.addmm_(back, stacked)
    return total.view(x.shape)


def _check_adapter(adapter: LoraAdapter, out_features: int, in_features: int, x: Tensor) -> None:
    for name, tensor in (("a", adapter.a), ("b", adapter.b)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentTypeError(message("lora_linear", name, "a floating tensor", given))
        if tensor.device != x.device:
            raise ArgumentError(
                message("lora_linear", name, f"a tensor on {x.device}", f"one on {tensor.device}")
            )
    rank = adapter.a.shape[0] if adapter.a.dim() == 2 else 0
    if rank < 1 or adapter.a.shape != (rank, in_features) or adapter.b.shape != (out_features, rank):
        given = f"{tuple(adapter.a.shape)} and {tuple(adapter.b.shape)}"
        expected = f"(rank, {in_features}) and ({out_features}, rank), rank >= 1"
        raise ArgumentError(message("lora_linear", "a, b", expected, given))
    if not isinstance(adapter.scaling, (int, float)) or not math.isfinite(adapter.scaling):
        raise ArgumentError(message("lora_linear", "scaling", "a finite number", adapter.scaling))


def _check(x: Tensor, projection: LoraProjection, dtype: torch.dtype, autocast: bool) -> None:
    weight, bias = projection.weight, projection.bias
    if not isinstance(weight, Tensor):
        raise ArgumentTypeError(message("lora_linear", "weight", "a torch.Tensor", type(weight).__name__))
    if weight.requires_grad:
        given = "one that requires grad"
        raise ArgumentError(message("lora_linear", "weight", "a frozen weight", given, "Use F.linear for it"))
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            message("lora_linear", "weight", f"(out_features, {x.shape[-1]})", f"shape {tuple(weight.shape)}")
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(message("lora_linear", name, "a torch.Tensor", type(tensor).__name__))
        if tensor.device != x.device:
            raise ArgumentError(
                message("lora_linear", name, f"a tensor on {x.device}", f"one on {tensor.device}")
            )
        if not autocast and tensor.dtype != dtype:
            raise ArgumentTypeError(
                message("lora_linear", name, f"the dtype of x, {dtype}", str(tensor.dtype))
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            message("lora_linear", "bias", f"shape ({weight.shape[0]},)", f"shape {tuple(bias.shape)}")
        )
    for adapter in projection.adapters:
        _check_adapter(adapter, weight.shape[0], weight.shape[1], x)


def lora_linears(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    r"""Apply several frozen linear layers with low-rank adapters to one input: q, k and v, or gate and up.

    For each projection, $y = x W^T + b + \sum_j s_j (x A_j^T) B_j^T$. The products $x A^T$ of all projections
    are one matrix product, and so are the gradients of all $A$; the second product of an adapter is added
    to the base's output where that lies, and the gradients with respect to $x$ of all projections and
    adapters are added up in one buffer.

    Everything is in the dtype of `x`: adapters of another dtype are rounded to it, the small matrices and
    not the activations, and their gradients have their own dtype again. PEFT instead converts `x` to the
    dtype of the adapter, so the two agree but for what intermediates round; in one dtype throughout only the
    order of additions differs. The base is frozen: it gets no gradient; its bias may have one. For backward
    `x`, the product with $A$ (rank values a row) and the parameters are kept, of a packed weight its packed
    bytes, which are decoded again.

    Under autocast the dtype is that of autocast. It cannot be differentiated twice; the second backward
    raises.

    Args:
        x: `(..., in_features)`, floating, CPU or CUDA.
        projections: At least one; all with the same `in_features`.

    Returns:
        A tensor `(..., out_features)` for each projection.

    Raises:
        ArgumentTypeError: Not tensors, or weight and bias of another dtype than `x` without autocast.
        ArgumentError: Shapes or devices do not fit, or a base weight requires grad.

    Example:
        >>> adapter = LoraAdapter(torch.ones(1, 2), torch.ones(2, 1), 0.5)
        >>> q, k = lora_linears(torch.ones(1, 2), [LoraProjection(torch.eye(2), [adapter]),
        ...                                        LoraProjection(torch.eye(2))])
        >>> q, k
        (tensor([[2., 2.]]), tensor([[1., 1.]]))

    Source: Hu et al., arXiv:2106.09685.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(message("lora_linear", "x", "a floating tensor", given))
    if x.dim() == 0 or not projections:
        given = f"{x.dim()} dimensions, {len(projections)} projections"
        raise ArgumentError(message("lora_linear", "x, projections", "at least one of each", given))
    autocast = _autocast_dtype(x)
    for projection in projections:
        _check(x, projection, autocast or x.dtype, autocast is not None)
    return run_projections(x, projections)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def run_projections(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    """Do what `lora_linears` does, without looking at the arguments."""
    autocast = _autocast_dtype(x)
    flat = [_flatten(projection) for projection in projections]
    forms = tuple([form for form, _ in flat])
    tensors = [tensor for _, some in flat for tensor in some]
    outs: tuple[Tensor, ...]
    if autocast is not None:
        with torch.autocast(x.device.type, enabled=False):
            outs = _LoraLinears.apply(x.to(autocast), forms, *tensors)  # type: ignore[no-untyped-call]
    else:
        outs = _LoraLinears.apply(x, forms, *tensors)  # type: ignore[no-untyped-call]
    return outs


def lora_linear(
    x: Tensor, weight: Tensor, adapters: Sequence[LoraAdapter], bias: Tensor | None = None
) -> Tensor:
    r"""Apply a frozen linear layer with low-rank adapters: $y = x W^T + b + \sum_j s_j (x A_j^T) B_j^T$.

    Beside the base's products (one forward, one backward) an adapter takes two small ones forward, the
    second of which adds to the base's output in place, and four backward, the last of which adds to the
    base's gradient of `x` in place. See `lora_linears` for dtypes and what is kept.

    Args:
        x: `(..., in_features)`, floating, CPU or CUDA.
        weight: `(out_features, in_features)`, frozen, of the dtype of `x`; plain, or a packed weight
            (`ts_core.registry.PackedWeight`, such as `ts_quant.QuantizedTensor`).
        adapters: The low-rank terms, of any rank and floating dtype.
        bias: `(out_features,)` or None.

    Returns:
        `(..., out_features)`, in the dtype of `x`.

    Raises:
        ArgumentTypeError: Not tensors, or weight and bias of another dtype than `x` without autocast.
        ArgumentError: Shapes or devices do not fit, or the base weight requires grad.

    Example:
        >>> adapter = LoraAdapter(torch.ones(1, 2), torch.ones(2, 1), 0.5)
        >>> lora_linear(torch.ones(1, 2), torch.eye(2), [adapter], torch.ones(2))
        tensor([[3., 3.]])
    """
    return lora_linears(x, [LoraProjection(weight, adapters, bias)])[0]
