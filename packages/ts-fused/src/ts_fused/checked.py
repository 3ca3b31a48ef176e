"""Fused paths for the modules of a model, each used only where it agrees with the module's own code.

Nothing here knows a model library: a module is recognised by what it holds, and then its own code is run on
random input beside the fused path. What does not agree, or is not recognised, is left alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import ArgumentTypeError, message
from ts_core.options import choice

from ._checked_lora import check_lora, looks_like_lora
from ._checked_rotary import check_rotary, rotary_function
from ._compare import Verdict, differences, random_linear, random_tensor, run_with_gradients
from ._ops import FLOATS
from .gated_mlp import gated_mlp
from .rms_norm import rms_norm

__all__ = ["KINDS", "FusedCheck", "FusedPatch", "check_fused", "patch_fused"]

KINDS = ("rms_norm", "rotary", "gated_mlp", "lora")


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


def _from_verdict(kind: str, verdict: Verdict) -> FusedCheck:
    return FusedCheck(
        kind,
        verdict.forward is not None,
        verdict.variant,
        verdict.reason,
        verdict.forward_error,
        verdict.gradient_error,
        verdict.forward,
    )


# --- RMSNorm ---------------------------------------------------------------------------------------------


def _epsilon_name(module: nn.Module) -> str | None:
    found = [n for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)]
    return found[0] if found else None


def _looks_like_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    plain = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
    return (
        plain and list(own) == ["weight"] and own["weight"].dim() == 1 and _epsilon_name(module) is not None
    )


def _compare_norm(
    module: nn.Module, eps: float, offset: float, device: torch.device, dtype: torch.dtype, scale: float
) -> Verdict:
    hidden = module.weight.numel()  # type: ignore[operator]
    x = random_tensor((3, 5, hidden), device, dtype, 0).mul_(scale).requires_grad_()
    weight = random_tensor((hidden,), device, dtype, 1).requires_grad_()
    theirs = run_with_gradients(
        lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)), (x, weight)
    )
    ours = run_with_gradients(lambda x, w: rms_norm(x, w, eps, offset=offset), (x, weight))
    return differences(ours, theirs, dtype, exact_rounding=True)


def _norm_forward(name: str, offset: float) -> Callable[..., Any]:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and x.dtype in FLOATS and module.weight.dtype in FLOATS:
            return rms_norm(x, module.weight, getattr(module, name), offset=offset)
        return type(module).forward(module, *args, **kwargs)

    return forward


def _check_norm(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    name = _epsilon_name(module)
    assert name is not None
    first, eps = None, getattr(module, name)
    # Where the mean square is about eps: elsewhere one cannot see which eps is added, and to what.
    small = eps**0.5 if eps > 0.0 else 1e-3
    for offset in (0.0, 1.0):
        total = Verdict()
        for kind, scale in dict.fromkeys(((torch.float32, 1.0), (torch.float32, small), (dtype, 1.0))):
            found = _compare_norm(module, eps, offset, device, kind, scale)
            if found.reason:
                first = first or found
                break
            total = total.and_(found)
        else:
            return total.with_forward(
                f"offset {offset:.0f}", types.MethodType(_norm_forward(name, offset), module)
            )
    assert first is not None
    return first


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


def _twin(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """Make a module of the same code and attributes, with other children: nothing of the model is touched."""
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, **children}
    twin.training = True  # a dropout of its own would not be seen else
    return twin


def _check_mlp(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    name = _activation_name(module)
    assert name is not None
    activation = _activation(getattr(module, name), device)
    if activation is None:
        return Verdict(reason=f"{name} is neither silu nor the tanh form of gelu")
    paired = "gate_proj" in dict(module.named_children())
    total = Verdict()
    # Large values too: some models cap gate and up.
    for kind, scale in dict.fromkeys(((torch.float32, 1.0), (torch.float32, 30.0), (dtype, 1.0))):
        sizes = {n: (16, 24) for n in _PAIR[:2]} if paired else {"gate_up_proj": (16, 48)}
        small: dict[str, nn.Module] = {
            name: random_linear(*size, device, kind, seed)
            for seed, (name, size) in enumerate({**sizes, "down_proj": (24, 16)}.items())
        }
        twin = _twin(module, small)
        x = random_tensor((2, 3, 16), device, kind, 0).mul_(scale).requires_grad_()
        inputs = (x, *(weight for linear in small.values() for weight in linear.parameters()))
        theirs = run_with_gradients(lambda *t, m=twin: type(m).forward(m, t[0]), inputs)
        ours = run_with_gradients(lambda *t, m=twin: _mlp(m, t[0], activation), inputs)
        found = differences(ours, theirs, kind)
        if found.reason:
            return found
        total = total.and_(found)

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and x.dtype in FLOATS:
            return _mlp(module, x, activation)
        return type(module).forward(module, *args, **kwargs)

    return total.with_forward(activation, types.MethodType(forward, module))


def _mlp(module: Any, x: Tensor, activation: str) -> Any:
    if "gate_proj" in module._modules:
        return module.down_proj(gated_mlp(module.gate_proj(x), module.up_proj(x), activation))
    return module.down_proj(gated_mlp(module.gate_up_proj(x), activation=activation))


# --- the public functions --------------------------------------------------------------------------------

_CHECKS: dict[str, tuple[Callable[[nn.Module], Any], Callable[..., Verdict]]] = {
    "rms_norm": (_looks_like_norm, _check_norm),
    "rotary": (rotary_function, check_rotary),
    "gated_mlp": (_looks_like_mlp, _check_mlp),
    "lora": (looks_like_lora, check_lora),
}


def _place(module: nn.Module, sample: Tensor | None) -> tuple[torch.device, torch.dtype]:
    if sample is not None:
        return sample.device, sample.dtype
    for parameter in module.parameters():
        if parameter.dtype in FLOATS:
            return parameter.device, parameter.dtype
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device, torch.float32


def _expect_module(function: str, argument: str, value: object) -> None:
    if not isinstance(value, nn.Module):
        raise ArgumentTypeError(message(function, argument, "a torch.nn.Module", type(value).__name__))


def check_fused(
    module: nn.Module, sample: Tensor | None = None, *, kinds: Iterable[str] = KINDS
) -> FusedCheck:
    """Compare a module's own code with the fused path for what it looks like, on random input.

    Recognised are RMSNorm (with `w` or `1 + w`), gated MLPs (`gate_proj`, `up_proj`, `down_proj`, or one
    `gate_up_proj`; silu or the tanh form of gelu), attention modules that call a function named
    `apply_rotary_pos_emb`, and linear layers with plain LoRA adapters. Compared are outputs and gradients,
    in fp32 and in the dtype of the sample. The module is not changed: a norm runs with another weight, the
    others as a small module of the same class. Random numbers of the process are not drawn.

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
    _expect_module("check_fused", "module", module)
    if sample is not None and not (isinstance(sample, Tensor) and sample.dtype in FLOATS):
        given = str(sample.dtype) if isinstance(sample, Tensor) else type(sample).__name__
        raise ArgumentTypeError(
            message("check_fused", "sample", "a float32, bfloat16 or float16 tensor", given)
        )
    for kind in [choice("kinds", kind, KINDS) for kind in kinds]:
        looks, check = _CHECKS[kind]
        if not looks(module):
            continue
        if "forward" in module.__dict__:
            return FusedCheck(kind, False, reason="its forward was replaced already")
        device, dtype = _place(module, sample)
        if dtype not in FLOATS or device.type == "meta":
            return FusedCheck(kind, False, reason=f"{dtype} on {device} has no kernel")
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
        try:
            with forked, torch.enable_grad(), torch.autocast(device.type, enabled=False):
                verdict = check(module, device, dtype)
        except Exception as error:
            # Code that does not run on what was tried is code that is not what it looked like.
            verdict = Verdict(reason=f"its own code did not run on random input: {error!r}"[:300])
        return _from_verdict(kind, verdict)
    return FusedCheck("", False, reason="it looks like nothing that has a fused path")


@dataclass
class FusedPatch:
    """The modules of a model that run fused paths.

    Attributes:
        reports: By the module's name, the report of every module that looked like one of the kinds.
    """

    reports: dict[str, FusedCheck]
    _modules: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def patched(self) -> tuple[str, ...]:
        """Names of the modules that run a fused path."""
        return tuple(self._modules)

    def undo(self) -> tuple[str, ...]:
        """Give every module its own code back.

        Returns:
            Names of modules whose `forward` someone replaced since; they keep it.
        """
        kept = []
        for name, module in self._modules.items():
            if module.__dict__.get("forward") is self.reports[name].forward:
                del module.__dict__["forward"]
            else:
                kept.append(name)
        self._modules.clear()
        return tuple(kept)


def patch_fused(
    model: nn.Module, sample: Tensor | None = None, *, kinds: Iterable[str] = KINDS
) -> FusedPatch:
    """Let the modules of a model run fused paths where these agree with their own code.

    The `forward` of a module is replaced on the instance; classes, functions and parameters stay as they are.

    Args:
        model: The model; every module of it is looked at.
        sample: A tensor with the dtype and device of the activations; None: those of each module's own
            parameters.
        kinds: Which paths to use; see `check_fused`.

    Returns:
        The reports, and how to undo it.

    Raises:
        ArgumentTypeError: Not a module, or a sample that is no floating tensor.
        OptionError: Another kind.

    Example:
        >>> norm = torch.nn.RMSNorm(8, eps=1e-5)
        >>> patch = patch_fused(torch.nn.Sequential(norm, torch.nn.Linear(8, 8)))
        >>> patch.patched
        ('0',)
        >>> patch.undo()
        ()
    """
    _expect_module("patch_fused", "model", model)
    chosen = tuple(kinds)
    patch = FusedPatch({})
    for name, module in model.named_modules():
        report = check_fused(module, sample, kinds=chosen)
        if report.kind:
            patch.reports[name] = report
        if report.forward is not None:
            module.__dict__["forward"] = report.forward
            patch._modules[name] = module
    return patch
