"""After two steps: did every trained parameter get a gradient and change?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ts_core.errors import StateError

__all__ = ["ReachCheck"]

_STEPS = 2
_SHOWN = 5
_PIECE = 1 << 20  # elements


class ReachCheck:
    """Watches the first two steps of an optimizer; raises once if something did not train.

    A parameter counts as reached when it had a gradient in one of the steps. It counts as stuck when a
    gradient that was finite and not zero, at a learning rate above zero, moved neither its fp32 value nor
    itself: the element with the largest gradient is looked at.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Watch the parameters of `model` that `optimizer` trains."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) in held]
        self._reached: set[str] = set()
        self._moved: set[str] = set()
        self._due: set[str] = set()
        self._before: dict[str, tuple[int, float]] = {}
        self._skipped = 0
        self._steps = 0

    def before(self, optimizer: Optimizer) -> None:
        """Note where the largest element of each gradient is and what the weight holds there."""
        self._before = {}
        self._skipped = _skipped(optimizer)
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        with torch.no_grad():
            for name, parameter in self._parameters:
                grad = parameter.grad
                if grad is None:
                    continue
                self._reached.add(name)
                if not grad.numel() or not parameter.is_floating_point():
                    continue
                if grad.layout is not torch.strided or rates.get(id(parameter), 0.0) <= 0.0:
                    continue
                at, size = _largest(grad.reshape(-1))
                if not size or not math.isfinite(size):
                    continue
                self._before[name] = at, _value(optimizer, parameter, at)

    def after(self, optimizer: Optimizer) -> bool:
        """Compare with what the weights held before the step; say whether enough was seen."""
        self._steps += 1
        if _skipped(optimizer) == self._skipped:
            with torch.no_grad():
                for name, parameter in self._parameters:
                    if name in self._before:
                        at, value = self._before[name]
                        changed = _value(optimizer, parameter, at) != value
                        (self._moved if changed else self._due).add(name)
        return self._steps >= _STEPS

    def finish(self) -> None:
        """Raise if something did not train.

        Raises:
            StateError: Names the parameters without a gradient and those that did not change.
        """
        lost = [name for name, _ in self._parameters if name not in self._reached]
        stuck = [name for name, _ in self._parameters if name in self._due - self._moved]
        parts = []
        if lost:
            parts.append(f"{_listed(lost)} got no gradient")
        if stuck:
            parts.append(f"{_listed(stuck)} did not change although the gradient is not zero")
        if parts:
            raise StateError(
                f"after {_STEPS} steps, {'; '.join(parts)}. Freeze what the loss does not depend on "
                "(requires_grad_(False)), or see why it is not reached. The steps themselves are done and "
                "whole, and this is looked at once: training can go on"
            )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


def _skipped(optimizer: Any) -> int:
    return int(optimizer.stats()["skipped_steps"]) if hasattr(optimizer, "stats") else 0


def _largest(flat: Tensor) -> tuple[int, float]:
    """Return where the largest magnitude is and what it is; in pieces, for RAM may be short."""
    piece = flat.numel() if flat.is_cuda else _PIECE
    best = 0, 0.0
    for start in range(0, flat.numel(), piece):
        value, index = flat[start : start + piece].abs().max(0)
        size = float(value)
        if size > best[1] or math.isnan(size):
            best = start + int(index), size
    return best


def _value(optimizer: Optimizer, parameter: Tensor, at: int) -> float:
    master = optimizer.state.get(parameter, {}).get("master")
    held = parameter if master is None else master
    place = []
    for size in reversed(held.shape):
        at, index = divmod(at, size)
        place.append(index)
    return float(held[tuple(reversed(place))])
