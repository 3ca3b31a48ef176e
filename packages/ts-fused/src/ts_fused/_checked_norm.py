"""RMSNorm modules: which form they compute, and in which dtypes the fused one rounds as they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._compare import Verdict, differences, random_tensor, run_with_gradients, twin_of
from ._ops import FLOATS
from .rms_norm import norm_of, rms_norm

__all__ = ["NormForm", "check_norm", "looks_like_norm"]


class NormForm(NamedTuple):
    """What a norm computes.

    Attributes:
        epsilon: Name of the attribute that holds it.
        offset: Added to the weight.
        pairs: Dtypes of input and weight for which that was found.
        autocast: Whether autocast leaves the norm as it is; it does not change the fused one.
    """

    epsilon: str
    offset: float
    pairs: frozenset[tuple[torch.dtype, torch.dtype]]
    autocast: bool

    def holds(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the norm computes this now, for such an input and weight."""
        return (x.dtype, weight.dtype) in self.pairs and (
            self.autocast or not torch.is_autocast_enabled(x.device.type)
        )


def _epsilon_name(module: nn.Module) -> str | None:
    found = [n for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)]
    return found[0] if found else None


def looks_like_norm(module: nn.Module) -> bool:
    """Tell whether a module holds a vector and an epsilon, and nothing else."""
    own = dict(module.named_parameters(recurse=False))
    plain = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
    return (
        plain and list(own) == ["weight"] and own["weight"].dim() == 1 and _epsilon_name(module) is not None
    )


def _compare_norm(
    module: nn.Module,
    eps: float,
    offset: float,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    training: bool,
) -> Verdict:
    hidden = module.weight.numel()  # type: ignore[operator]
    twin = twin_of(module, {}, training)
    x = random_tensor((3, 5, hidden), device, dtypes[0], 0).mul_(scale).requires_grad_()
    weight = random_tensor((hidden,), device, dtypes[1], 1).requires_grad_()
    theirs = run_with_gradients(
        lambda x, w: torch.func.functional_call(twin, {"weight": w}, (x,)), (x, weight)
    )
    ours = run_with_gradients(lambda x, w: rms_norm(x, w, eps, offset=offset), (x, weight))
    return differences(ours, theirs, dtypes[0], exact_rounding=True)


def _norm_forward(form: NormForm) -> Callable[..., Any]:
    name, offset = form.epsilon, form.offset

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight = module.weight
        if isinstance(x, Tensor) and form.holds(x, weight):
            return norm_of(x, weight, getattr(module, name), offset)
        return type(module).forward(module, *args, **kwargs)

    return forward


def _same_under_autocast(
    module: nn.Module, device: torch.device, pairs: frozenset[tuple[torch.dtype, torch.dtype]]
) -> bool:
    """Tell whether autocast changes no bit; that of a GPU widens PyTorch's own RMSNorm, for instance."""
    hidden, twin = module.weight.numel(), twin_of(module, {}, True)  # type: ignore[operator]
    with torch.no_grad():
        for of_x, of_weight in pairs:
            x = random_tensor((3, hidden), device, of_x, 0)
            given = {"weight": random_tensor((hidden,), device, of_weight, 1)}
            want = torch.func.functional_call(twin, given, (x,))
            with torch.autocast(device.type):
                got = torch.func.functional_call(twin, given, (x,))
            if got.dtype is not want.dtype or not torch.equal(got, want):
                return False
    return True


def check_norm(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Find the form of a norm; the verdict holds it."""
    name = _epsilon_name(module)
    assert name is not None
    first, eps = None, getattr(module, name)
    # Where the mean square is about eps: elsewhere one cannot see which eps is added, and to what.
    small = eps**0.5 if eps > 0.0 else 1e-3
    whole = (torch.float32, torch.float32)
    for offset in (0.0, 1.0):
        total = Verdict()
        for pair, scale, training in (
            (whole, 1.0, False),
            (whole, small, True),
            *([((dtype, dtype), 1.0, True)] if dtype is not torch.float32 else []),
        ):
            found = _compare_norm(module, eps, offset, device, pair, scale, training)
            if found.reason:
                first = first or found
                break
            total = total.and_(found)
        else:
            pairs = {whole, (dtype, dtype)}
            # Where the rounding differs in another dtype, the module's own code runs in that one.
            for pair in ((x, w) for x in FLOATS for w in dict.fromkeys((x, torch.float32))):
                if pair in pairs:
                    continue
                if not _compare_norm(module, eps, offset, device, pair, 1.0, True).reason:
                    pairs.add(pair)
            found_for = frozenset(pairs)
            form = NormForm(name, offset, found_for, _same_under_autocast(module, device, found_for))
            return replace(total.with_forward(f"offset {offset:.0f}", _norm_forward(form)), form=form)
    assert first is not None
    return first
