"""Fused paths for the modules of a model, each used only where it agrees with the module's own code.

Nothing here knows a model library: a module is recognised by what it holds, and then its own code is run on
random input beside the fused path. What does not agree, or is not recognised, is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import ArgumentTypeError, message
from ts_core.options import choice

from ._alike import state_of
from ._checked_lora import check_lora, looks_like_lora
from ._checked_norm import check_norm, looks_like_norm
from ._checked_rotary import check_rotary, rotary_function
from ._checked_sum import check_sums, norms_of_sums
from ._compare import (
    Verdict,
    differences,
    hooked,
    random_linear,
    random_tensor,
    replaced,
    run_with_gradients,
    twin_of,
)
from ._ops import FLOATS
from ._stand_in import FusedForward
from .gated_mlp import gated_mlp

__all__ = ["KINDS", "SIZES", "FusedCheck", "check_fused", "checked", "expect_place", "place_of", "quietly"]

KINDS = ("rms_norm", "rotary", "gated_mlp", "lora", "add_rms_norm")


@dataclass(frozen=True)
class FusedCheck:
    """What came of comparing a module with a fused path.

    Attributes:
        kind: One of `KINDS`, or "" for a module that looks like none of them.
        agrees: The fused path agrees with the module's own code.
        variant: Which form: "offset 1" of a norm, "silu" of an MLP, "interleaved" of an attention.
        reason: Why it does not agree, or "".
        forward_error: Largest difference of an output, relative to the largest output.
        gradient_error: The same of the gradients.
        forward: What can take the place of the module's `forward`; None if it does not agree.
    """

    kind: str
    agrees: bool
    variant: str = ""
    reason: str = ""
    forward_error: float = 0.0
    gradient_error: float = 0.0
    forward: Callable[..., Any] | None = field(default=None, repr=False, compare=False)


def _from_verdict(kind: str, verdict: Verdict, module: nn.Module) -> FusedCheck:
    return FusedCheck(
        kind,
        verdict.forward is not None,
        verdict.variant,
        verdict.reason,
        verdict.forward_error,
        verdict.gradient_error,
        None if verdict.forward is None else FusedForward(module, verdict.forward),
    )


# --- gated MLP -------------------------------------------------------------------------------------------

_PAIR, _PACKED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")


def _activation_name(module: nn.Module) -> str | None:
    found = [n for n in ("act_fn", "activation_fn", "act") if callable(getattr(module, n, None))]
    return found[0] if found else None


def _looks_like_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    names = _PAIR if all(n in children for n in _PAIR) else _PACKED
    if not all(n in children for n in names) or any(True for _ in module.parameters(recurse=False)):
        return False
    activation = _activation_name(module)
    return activation is not None and set(children) <= {*names, activation}


def _activation(function: Callable[[Tensor], Tensor], device: torch.device) -> str | None:
    """Tell which activation this is, in fp32, where the exact form of gelu differs from the tanh one."""
    x = torch.linspace(-8.0, 8.0, 1601, device=device)
    with torch.no_grad():
        try:
            got = function(x)
        except Exception:
            return None
        if not isinstance(got, Tensor) or got.shape != x.shape:
            return None
        for name, want in (
            ("silu", torch.nn.functional.silu(x)),
            ("gelu_tanh", torch.nn.functional.gelu(x, approximate="tanh")),
        ):
            if bool(((got - want).abs() <= 2e-6 * (1.0 + want.abs())).all()):
                return name
    return None


def _check_mlp(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    name = _activation_name(module)
    assert name is not None
    given = getattr(module, name)
    activation = _activation(given, device)
    if activation is None:
        return Verdict(reason=f"{name} is neither silu nor the tanh form of gelu")
    paired = "gate_proj" in dict(module.named_children())
    total = Verdict()
    # Large values too: some models cap gate and up. Both modes: one may drop out by itself, or scale.
    for kind, scale, training in (
        (torch.float32, 1.0, False),
        (torch.float32, 30.0, True),
        *([(dtype, 1.0, True)] if dtype is not torch.float32 else []),
    ):
        sizes = {n: (16, 24) for n in _PAIR[:2]} if paired else {"gate_up_proj": (16, 48)}
        small: dict[str, nn.Module] = {
            name: random_linear(*size, device, kind, seed)
            for seed, (name, size) in enumerate({**sizes, "down_proj": (24, 16)}.items())
        }
        twin = twin_of(module, small, training)
        x = random_tensor((2, 3, 16), device, kind, 0).mul_(scale).requires_grad_()
        inputs = (x, *(weight for linear in small.values() for weight in linear.parameters()))
        theirs = run_with_gradients(lambda *t, m=twin: type(m).forward(m, t[0]), inputs)
        ours = run_with_gradients(lambda *t, m=twin: _mlp(m, t[0], activation, always=True), inputs)
        found = differences(ours, theirs, kind)
        if found.reason:
            return found
        total = total.and_(found)

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        now = getattr(module, name)
        same = now is given or (isinstance(now, nn.Module) and type(now) is type(given))
        if isinstance(x, Tensor) and x.dtype in FLOATS and same and not hooked(now):
            return _mlp(module, x, activation)
        return type(module).forward(module, *args, **kwargs)

    return total.with_forward(activation, forward)


# Elements from which on a CPU the gated activation is faster than PyTorch's two operations: below, calls cost
# more than what is saved; 16-bit formats are converted either way, and less is saved.
WORTH_IT = {torch.float32: 1 << 16, torch.bfloat16: 1 << 18, torch.float16: 1 << 18}


def _mlp(module: Any, x: Tensor, activation: str, *, always: bool = False) -> Any:
    paired = "gate_proj" in module._modules
    gate = module.gate_proj(x) if paired else module.gate_up_proj(x)
    up = module.up_proj(x) if paired else None
    elements = gate.numel() if paired else gate.numel() // 2
    if not always and x.device.type == "cpu" and elements < WORTH_IT.get(gate.dtype, 0):
        if up is None:
            gate, up = gate.chunk(2, -1)
        return module.down_proj(_plain_activation(gate, activation) * up)
    return module.down_proj(gated_mlp(gate, up, activation))


def _plain_activation(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


# --- the public functions --------------------------------------------------------------------------------

_CHECKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[..., Verdict]]] = {
    "rms_norm": (looks_like_norm, check_norm),
    "rotary": (rotary_function, check_rotary),
    "gated_mlp": (_looks_like_mlp, _check_mlp),
    "lora": (looks_like_lora, check_lora),
    "add_rms_norm": (norms_of_sums, check_sums),
}


# What says nothing of how a LoRA layer computes: twins have sizes of their own, PEFT keeps the layer's name.
SIZES = frozenset({"in_features", "out_features", "target_name"})


def _likeness(kind: str, module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules have in common if one comparison holds for both."""
    if kind == "rotary":
        return (type(module),)  # it is the function that is compared
    if kind == "rms_norm":
        return *state_of(module), module.weight.numel()  # type: ignore[operator]
    if kind == "add_rms_norm":
        norms: list[tuple[str, Any]] = [(name, module._modules[name]) for name in norms_of_sums(module)]
        return type(module), *((name, *state_of(norm), norm.weight.numel()) for name, norm in norms)
    name = _activation_name(module) if kind == "gated_mlp" else None
    if name is not None:
        # Adapters and other classes of linear layers do not matter: small plain ones stand for them.
        activation = getattr(module, name)
        inner = state_of(activation) if isinstance(activation, nn.Module) else id(activation)
        return *state_of(module), tuple(module._modules), inner
    layer: Any = module
    factors = tuple(
        (
            key,
            type(drop),
            *((type(each[key]), each[key].bias is None) for each in (layer.lora_A, layer.lora_B)),
        )
        for key, drop in layer.lora_dropout.items()
    )
    return *state_of(module, SIZES), tuple(module._modules), factors


def place_of(
    module: nn.Module, sample: Tensor | None, device: torch.device | None
) -> tuple[torch.device, torch.dtype]:
    """Return where and in which dtype a module is going to compute."""
    if sample is not None:
        return sample.device, sample.dtype
    first = next(module.parameters(), None)
    for parameter in module.parameters():
        if parameter.dtype in FLOATS:
            return device or parameter.device, parameter.dtype
    return device or (torch.device("cpu") if first is None else first.device), torch.float32


@contextlib.contextmanager
def quietly(device: torch.device) -> Iterator[None]:
    """Compare with gradients and without autocast, and leave the random numbers of the process alone."""
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


def checked(
    module: nn.Module,
    sample: Tensor | None,
    kinds: tuple[str, ...],
    device: torch.device | None,
    known: dict[Any, Verdict],
) -> FusedCheck:
    """Compare as `check_fused` does; what is known of a module that is alike is not compared again."""
    for kind in kinds:
        looks, check = _CHECKS[kind]
        if not looks(module):
            continue
        if replaced(module):
            return FusedCheck(kind, False, reason="its forward was replaced already")
        where, dtype = place_of(module, sample, device)
        if dtype not in FLOATS or where.type == "meta":
            return FusedCheck(kind, False, reason=f"{dtype} on {where} has no kernel")
        key = None
        try:
            key = (kind, where, dtype, _likeness(kind, module))
            verdict = known.get(key)
            if verdict is None:
                with quietly(where):
                    verdict = check(module, where, dtype)
        except Exception as error:
            # Code that does not run on what was tried is code that is not what it looked like.
            verdict = Verdict(reason=f"its own code did not run on random input: {error!r}"[:300])
        if key is not None:
            known[key] = verdict
        return _from_verdict(kind, verdict, module)
    return FusedCheck("", False, reason="it looks like nothing that has a fused path")


def expect_place(function: str, module: object, sample: object) -> None:
    """Check the two arguments that `check_fused` and `patch_fused` share."""
    if not isinstance(module, nn.Module):
        name = "module" if function == "check_fused" else "model"
        raise ArgumentTypeError(message(function, name, "a torch.nn.Module", type(module).__name__))
    if sample is not None and not (isinstance(sample, Tensor) and sample.dtype in FLOATS):
        given = str(sample.dtype) if isinstance(sample, Tensor) else type(sample).__name__
        raise ArgumentTypeError(message(function, "sample", "a float32, bfloat16 or float16 tensor", given))


def check_fused(
    module: nn.Module, sample: Tensor | None = None, *, kinds: Iterable[str] = KINDS
) -> FusedCheck:
    """Compare a module's own code with the fused path for what it looks like, on random input.

    Recognised are RMSNorm (with `w` or `1 + w`), gated MLPs (`gate_proj`, `up_proj`, `down_proj`, or one
    `gate_up_proj`; silu or the tanh form of gelu), attention modules that call a function named
    `apply_rotary_pos_emb`, linear layers with plain LoRA adapters, and layers whose code forms a sum and
    normalizes it in the next statement. Compared are outputs and gradients, in fp32 and in the dtype of the
    sample. The module is not changed: a norm runs with another weight, the others as a small module of the
    same class; of the last, sum and norm are compared, and a copy of the code runs both as one there. Random
    numbers of the process are not drawn.

    At run time the fused path itself hands a call on to the module's own code where the call is not what was
    checked: another dtype, further arguments, adapters that are merged, disabled or drop out.

    Args:
        module: Any module.
        sample: A tensor with the dtype and device that its input will have; None: those of its parameters.
        kinds: Which paths to try.

    Returns:
        The report; its `forward` can take the place of the module's.

    Raises:
        ArgumentTypeError: Not a module, or a sample that is no floating tensor.
        OptionError: Another kind.

    Example:
        >>> check_fused(torch.nn.RMSNorm(8, eps=1e-5)).agrees
        True
        >>> check_fused(torch.nn.Linear(2, 2)).kind
        ''
    """
    expect_place("check_fused", module, sample)
    return checked(module, sample, tuple(choice("kinds", kind, KINDS) for kind in kinds), None, {})
