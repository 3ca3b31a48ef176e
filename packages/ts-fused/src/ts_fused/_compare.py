"""How a fused path is compared with a module's own code: outputs and gradients on random input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Verdict",
    "any_global_hook",
    "differences",
    "hooked",
    "random_linear",
    "random_tensor",
    "replaced",
    "run_with_gradients",
    "twin_of",
]

any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook
# Largest difference, relative to the largest element: a few roundings of intermediates.
_LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# One unit in the last place, and how many elements may fall on the other side of a rounding boundary where
# the order of rounding is promised: another order moves a quarter of them.
_ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_SHARE = 0.05


@dataclass(frozen=True)
class Verdict:
    """A comparison; `forward` only where it succeeded, and `form` if that has one (`NormForm`)."""

    variant: str = ""
    reason: str = ""
    forward_error: float = 0.0
    gradient_error: float = 0.0
    forward: Callable[..., Any] | None = field(default=None, repr=False)
    form: Any = field(default=None, repr=False)

    def and_(self, other: Verdict) -> Verdict:
        """Join two comparisons that both agreed: the larger errors."""
        return Verdict(
            forward_error=max(self.forward_error, other.forward_error),
            gradient_error=max(self.gradient_error, other.gradient_error),
        )

    def with_forward(self, variant: str, forward: Callable[..., Any]) -> Verdict:
        """Return it with what may run instead."""
        return replace(self, variant=variant, reason="", forward=forward)


def replaced(module: Any) -> bool:
    """Whether a module's `forward` is not its class's. Copies of patched modules hold that one themselves."""
    own = getattr(module, "__dict__", {}).get("forward")
    if own is None:
        return False
    code = getattr(type(module), "forward", None)
    return not (isinstance(own, MethodType) and own.__self__ is module and own.__func__ is code)


def hooked(module: Any) -> bool:
    """Whether someone wants to see or change what goes in or comes out of a module that would be left out."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = getattr(module, "__dict__", {})
    return replaced(module) or any_global_hook() or any(own.get(name) for name in hooks)


def random_tensor(shape: Sequence[int], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw normal numbers without touching the generators of the process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(device, dtype)


def random_linear(
    inputs: int, outputs: int, device: torch.device, dtype: torch.dtype, seed: int, *, bias: bool = False
) -> torch.nn.Linear:
    """Make a small linear layer; its own initialization would draw from the generators of the process."""
    skip_init: Any = torch.nn.utils.skip_init
    made = skip_init(torch.nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)
    assert isinstance(made, torch.nn.Linear)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(random_tensor(parameter.shape, device, dtype, 20 + 2 * seed + i) * 0.4)
    return made


def twin_of(module: torch.nn.Module, children: dict[str, torch.nn.Module], training: bool) -> torch.nn.Module:
    """Make a module of the same code and attributes, with other children: nothing of the model is touched."""
    twin: torch.nn.Module = object.__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__.pop("forward", None)  # of a copy: its own, but bound to the module
    twin.__dict__["_modules"] = {**module._modules, **children}
    twin.training = training
    return twin


def run_with_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Call with fresh leaves and differentiate against a fixed random gradient."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    # Modules that hold an input as their parameter need the very tensors.
    held = [t if isinstance(t, torch.nn.Parameter) else leaf for t, leaf in zip(inputs, leaves, strict=True)]
    out = function(*held)
    outs = out if isinstance(out, tuple) else (out,)
    grads = [random_tensor(o.shape, o.device, o.dtype, 100 + i) for i, o in enumerate(outs)]
    wanted = [t for t in held if t.requires_grad]
    got = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return tuple(o.detach() for o in outs), got


def _error(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    a, b = ours.double(), theirs.double()
    top = float(b.abs().max()) if b.numel() else 0.0
    far = float((a - b).abs().max()) if b.numel() else 0.0
    return far if far == 0.0 else far / top if top > 0.0 else float("inf")


def differences(ours: Any, theirs: Any, dtype: torch.dtype, *, exact_rounding: bool = False) -> Verdict:
    """Compare two results of `run_with_gradients`; `reason` is "" if they agree."""
    (outs, grads), (want_outs, want_grads) = ours, theirs
    if len(outs) != len(want_outs):
        return Verdict(reason=f"{len(want_outs)} outputs, not {len(outs)}")
    for a, b in zip(outs, want_outs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            given = f"{b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
            return Verdict(reason=f"its output is {given}")
    forward = max(_error(a, b) for a, b in zip(outs, want_outs, strict=True))
    backward = max((_error(a, b) for a, b in zip(grads, want_grads, strict=True)), default=0.0)
    reason = ""
    if not forward <= _LIMIT[dtype]:
        reason = f"outputs differ by {forward:.3g} of the largest in {dtype}"
    elif not backward <= _LIMIT[dtype]:
        reason = f"gradients differ by {backward:.3g} of the largest in {dtype}"
    elif exact_rounding and dtype is not torch.float32:
        for a, b in zip(outs, want_outs, strict=True):
            differ = a != b
            share = float(differ.double().mean())
            near = (a.double() - b.double()).abs() <= 2.0 * _ULP[dtype] * b.double().abs()
            if share > _SHARE or not bool(near.all()):
                reason = f"it rounds in another order: {share:.1%} of the outputs differ in {dtype}"
    return Verdict("", reason, forward, backward)
