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

from ._ops import copy_each_

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


def _packed(weight: Tensor) -> bool:
    # Types first: torch.compile cannot ask a plain tensor about a Protocol.
    return type(weight) not in (Tensor, torch.nn.Parameter) and isinstance(weight, PackedWeight)


def _flatten(projection: LoraProjection, tensors: list[Tensor]) -> _Form:
    """Append the tensors of a projection: weight or its packed parts, bias, then A and B of each adapter."""
    weight, adapters, bias = projection
    packing, parts = None, 1
    # A packed weight goes in as its packed tensors: they are what is saved for backward.
    if _packed(weight):
        names, context = cast(PackedWeight, weight).__tensor_flatten__()
        packing, parts = (type(weight), tuple(names), context, weight.shape, weight.stride()), len(names)
        tensors += [getattr(weight, name) for name in names]
    else:
        tensors.append(weight)
    if bias is not None:
        tensors.append(bias)
    for a, b, _ in adapters:
        tensors += (a, b)
    return _Form(packing, parts, bias is not None, tuple([adapter[2] for adapter in adapters]))


def _whole(form: _Form, parts: Sequence[Tensor]) -> Tensor:
    if form.packing is None:
        return parts[0]
    kind, names, context, size, stride = form.packing
    made: Tensor = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, size, stride)
    return made


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


def _factors(
    downs: Sequence[Tensor], ups: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Sequence[Tensor]]:
    """All A under one another, so that the input is read once for all of them, and every B; in a dtype."""
    if all([t.dtype is dtype for t in downs]) and all([t.dtype is dtype for t in ups]):
        return downs[0] if len(downs) == 1 else torch.cat([*downs]), ups
    ranks = [a.shape[0] for a in downs]
    stacked = downs[0].new_empty((sum(ranks), downs[0].shape[1]), dtype=dtype)
    made = [torch.empty_like(b, dtype=dtype) for b in ups]
    # One launch for all: there are many of these small matrices.
    copy_each_([*torch.split(stacked, ranks), *made], [*downs, *ups])
    return stacked, made


class _LoraLinears(torch.autograd.Function):
    """Every argument after the forms is a tensor: weight parts, bias, then A and B of each adapter.

    Saved are the input (where there are adapters), its product with all A, and the tensors but the biases.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[_Form, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        dtype, shape = x.dtype, x.shape
        rows = x.reshape(-1, shape[-1])
        bases: list[tuple[Tensor, Tensor | None]] = []
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        kept: list[Tensor] = []
        at = 0
        for form in forms:
            parts = tensors[at : at + form.parts]
            at += form.parts + form.bias
            bases.append((_whole(form, parts), tensors[at - 1] if form.bias else None))
            kept += parts
            end = at + 2 * len(form.scalings)
            downs += tensors[at:end:2]
            ups += tensors[at + 1 : end : 2]
            at = end
        low = None
        lows: Sequence[Tensor] = ()
        factors: Sequence[Tensor] = ()
        if downs:
            stacked, factors = _factors(downs, ups, dtype)
            low = torch.nn.functional.linear(rows, stacked)
            lows = torch.split(low, [a.shape[0] for a in downs], 1) if len(downs) > 1 else (low,)
        outs, at = [], 0
        for form, (weight, bias) in zip(forms, bases, strict=True):
            # A packed weight multiplies by itself in the dtype that it presents; autocast may want another.
            if weight.dtype is not dtype:
                weight = _plain(weight, dtype)
            if bias is not None and bias.dtype is not dtype:
                bias = bias.to(dtype)
            out = torch.nn.functional.linear(rows, weight, bias)
            for scaling in form.scalings:
                out.addmm_(lows[at], factors[at].t(), alpha=scaling)
                at += 1
            # No view: whoever gets one of several may change it in place.
            outs.append(torch.ops.aten._unsafe_view(out, (*shape[:-1], out.shape[-1])))
        ctx.save_for_backward(x if downs else None, low, *downs, *ups, *kept)
        ctx.form = forms, shape, dtype, [t.dtype for t in tensors]
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kind = next((grad.device.type for grad in grads if grad is not None), None)
        if kind is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return _backward(ctx, grads)
        return _backward(ctx, grads)


def _backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    forms, shape, dtype, dtypes = ctx.form
    x, low, *others = ctx.saved_tensors
    count = sum([len(form.scalings) for form in forms])
    downs, ups, parts = others[:count], others[count : 2 * count], others[2 * count :]
    needs_x, _, *needs = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(needs)
    flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
    ranks = [a.shape[0] for a in downs]
    stacked, factors = _factors(downs, ups, dtype) if count else (None, ())
    back: Any = None
    lows: Sequence[Any] = (low,)
    backs: Sequence[Tensor] = ()
    if count > 1:
        back = torch.empty_like(low)
        lows, backs = torch.split(low, ranks, 1), torch.split(back, ranks, 1)
    places, used, at, n = [], [], 0, 0
    for form, grad in zip(forms, flat, strict=True):
        at += form.parts
        if form.bias:
            if grad is not None and needs[at]:
                results[at] = grad.sum(0)
            at += 1
        for scaling in form.scalings:
            places.append(at)
            used.append(grad is not None and needs[at])
            # Scaled before the rounding. With beta 0 the first tensor of `addmm` gives its shape alone.
            if grad is None:
                if backs:
                    backs[n].zero_()
            else:
                if backs:
                    backs[n].addmm_(grad, factors[n], beta=0, alpha=scaling)
                else:
                    back = torch.addmm(low, grad, factors[n], beta=0, alpha=scaling)
                if needs[at + 1]:
                    results[at + 1] = torch.addmm(factors[n], grad.t(), lows[n], beta=0, alpha=scaling)
            at, n = at + 2, n + 1
    if back is not None and any(used):
        copied = all([dtypes[place] is not dtype for place in places])
        found = _gradients_of_a(back, x.reshape(-1, shape[-1]), ranks, used, copied)
        for place, of_a in zip(places, found, strict=True):
            results[place] = of_a
    grad_x = None
    if needs_x:
        grad_x = _gradient_of_x(forms, parts, flat, dtype)
        if back is not None and stacked is not None:
            grad_x.addmm_(back, stacked)
        grad_x = grad_x.view(shape)
    return (grad_x, None, *_in_dtypes(results, dtypes))


def _in_dtypes(grads: list[Tensor | None], dtypes: list[torch.dtype]) -> list[Tensor | None]:
    """Give every gradient the dtype of its tensor, and memory of its own, in one launch."""
    late = [i for i, grad in enumerate(grads) if grad is not None and grad.dtype is not dtypes[i]]
    if late:
        given = [cast(Tensor, grads[i]) for i in late]
        made = [torch.empty_like(grad, dtype=dtypes[i]) for i, grad in zip(late, given, strict=True)]
        copy_each_(made, given)
        for i, grad in zip(late, made, strict=True):
            grads[i] = grad
    return grads


# Bytes of the input from which reading it once and copying the gradients of several A apart costs less than
# reading it for each of them: what stays in a GPU's cache is as good as free.
_READ_ONCE = 32 << 20


def _gradients_of_a(
    back: Tensor, rows: Tensor, ranks: list[int], wanted: list[bool], copied: bool
) -> list[Tensor | None]:
    """The gradients of all A; those of an output that nobody used get none, not zeros.

    Each gets memory of its own, here or where it is `copied` anyway: a view would keep all of them alive, and
    share a version counter.
    """
    small = rows.numel() * rows.element_size() < _READ_ONCE
    if len(ranks) == 1 or (small and not copied):
        parts = (back,) if len(ranks) == 1 else torch.split(back, ranks, 1)
        return [part.t() @ rows if want else None for want, part in zip(wanted, parts, strict=True)]
    pieces = torch.split(back.t() @ rows, ranks)
    return [
        None if not want else part if copied else part.clone()
        for want, part in zip(wanted, pieces, strict=True)
    ]


def _gradient_of_x(
    forms: tuple[_Form, ...], parts: Sequence[Tensor], flat: list[Tensor | None], dtype: torch.dtype
) -> Tensor:
    """Add up what the bases send back; one of the gradients is there."""
    total: Tensor | None = None
    at = 0
    for form, grad in zip(forms, flat, strict=True):
        here = parts[at : at + form.parts]
        at += form.parts
        if grad is None:
            continue
        weight = _whole(form, here)
        packed = None if form.packing is None else _packed_gradient(weight, grad, dtype)
        if packed is not None:
            total = packed if total is None else total.add_(packed)
            continue
        if form.packing is not None or weight.dtype is not dtype:
            weight = _plain(weight, dtype)
        total = grad @ weight if total is None else total.addmm_(grad, weight)
        del weight
    assert total is not None
    return total


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
    tensors: list[Tensor] = []
    forms = tuple([_flatten(projection, tensors) for projection in projections])
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
