"""LoRA layers of one module that take the same input: q, k and v, or gate and up, computed as one."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._checked_lora import lora_projection, run_lora, small_twin, worth_it
from ._compare import Verdict, differences, random_tensor, run_with_gradients
from .lora import lora_linears, run_projections

__all__ = ["SharedInput", "check_group", "shared_inputs"]


class _Call:
    """One call of the parent: the input that the layers share, and outputs that are still to be asked for."""

    __slots__ = ("outs", "version", "x")

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.version = 0
        self.outs: dict[int, Tensor] = {}


class _Calls(threading.local):
    current: _Call | None = None


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


class SharedInput:
    """Layers of which the first that is called computes all, while their parent runs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Take the layers, in the order in which they are called."""
        self.layers = tuple(layers)
        self._calls = _Calls()  # recomputation runs on threads of autograd

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the parent's code; what was computed for layers that it does not call is dropped afterwards."""
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        calls = self._calls
        before, calls.current = calls.current, _Call()
        try:
            return function(*args, **kwargs)
        finally:
            calls.current = before

    def output(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Return the output of one of the layers, or None where it must be computed by itself."""
        if torch.compiler.is_compiling():
            return None
        call = self._calls.current
        if call is None:
            return None
        if call.x is None:
            call.x, call.version = x, _version(x)
            projections = []
            for each in self.layers:
                projection = lora_projection(each, x)
                if projection is None:
                    return None
                projections.append(projection)
            if not worth_it(x, sum(each.weight.shape[0] for each in projections)):
                return None
            call.outs = dict(zip(map(id, self.layers), run_projections(x, projections), strict=True))
        # The very tensor, with the values that it had.
        if x is not call.x or _version(x) != call.version:
            return None
        return call.outs.pop(id(layer), None)

    def run(self, layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one of the layers; what stands in its `forward`."""
        if not args and not kwargs and isinstance(x, Tensor) and x.is_floating_point():
            found = self.output(layer, x)
            if found is not None:
                return found
        return run_lora(layer, x, *args, **kwargs)


class _Recorder(nn.Module):
    """Stands for a layer: notes its input, returns zeros of the right width."""

    def __init__(self, name: str, width: int, seen: list[tuple[str, Any]]) -> None:
        super().__init__()
        self._name, self._width, self._seen = name, width, seen

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self._seen.append((self._name, x))
        return x.new_zeros(*x.shape[:-1], self._width)


class _Passes(nn.Module):
    """Stands for every other child."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def _recorded(parent: nn.Module, layers: dict[str, Any]) -> list[tuple[str, Any]]:
    """Run the parent's own code as far as it goes without its children, and see what the layers get."""
    seen: list[tuple[str, Any]] = []
    children: dict[str, nn.Module] = {
        name: _Recorder(name, layers[name].base_layer.out_features, seen) if name in layers else _Passes()
        for name in parent._modules
    }
    twin: Any = object.__new__(type(parent))
    twin.__dict__ = dict(parent.__dict__)
    twin.__dict__["_modules"] = children
    x = torch.zeros(1, 3, next(iter(layers.values())).base_layer.in_features)
    code = type(parent).forward
    given = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        rest = list(inspect.signature(code).parameters.values())[2:]
        code(twin, x, **{p.name: None for p in rest if p.default is p.empty and p.kind in given})
    except Exception:
        # Angles and masks are missing: what was seen until then is what is asked for.
        pass
    return seen


def shared_inputs(parent: nn.Module, layers: dict[str, Any]) -> list[tuple[str, ...]]:
    """Find those of a module's layers that it calls with the very same tensor, each once.

    Args:
        parent: The module.
        layers: LoRA layers among its children, by name.

    Returns:
        Names, in the order of the calls, of two or more each.
    """
    seen = _recorded(parent, layers)
    names = [name for name, _ in seen]
    groups: dict[int, list[str]] = {}
    for name, x in seen:
        if names.count(name) == 1:
            groups.setdefault(id(x), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def check_group(layers: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Verdict:
    """Compare small layers of the same classes, each with its own code, with all of them at once."""
    try:
        return _check_group(layers, device, dtype)
    except Exception as error:
        return Verdict(reason=f"their own code did not run on random input: {error!r}"[:300])


def _check_group(layers: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Verdict:
    total = Verdict()
    for kind in dict.fromkeys((torch.float32, dtype)):
        twins = [small_twin(layer, device, kind, seed) for seed, layer in enumerate(layers)]
        x = random_tensor((2, 3, 12), device, kind, 0).requires_grad_()
        projections = [lora_projection(twin, x) for twin in twins]
        plain = [projection for projection in projections if projection is not None]
        if len(plain) < len(twins):
            return Verdict(reason="its adapters are not plain ones: a variant, a bias, a hook")
        inputs = (x, *(t for p in plain for adapter in p.adapters for t in adapter[:2]))
        theirs = run_with_gradients(lambda x, *_, m=twins: tuple(type(t).forward(t, x) for t in m), inputs)
        ours = run_with_gradients(lambda x, *_, p=plain: lora_linears(x, p), inputs)
        found = differences(ours, theirs, kind)
        if found.reason:
            return found
        total = total.and_(found)
    return total
