"""After two steps: did every trained parameter get a gradient and change?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ts_core.errors import StateError
from ts_core.guard import guard_of
from ts_optim import OffloadAdamW
from ts_optim.gradients import ConsumedGradient

__all__ = ["ReachCheck"]

_STEPS = 2
_EMPTY = 4  # steps before there is any gradient that do not count: they do nothing
_SHOWN = 5
_PIECE = 1 << 20  # elements
_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # of a config: share of layers left out
_ADAMS = (OffloadAdamW, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax)
_MARGIN = 0.01  # of the expected change: momentum of a resumed run may take most of it


@dataclasses.dataclass
class _Seen:
    """The element with the largest gradient before a step: where, what the weight held, and the gradient."""

    at: int
    value: float
    grad: Tensor
    version: int


class ReachCheck:
    """Watches the first two steps of an optimizer; raises once if something did not train.

    A parameter counts as reached when it had a gradient in one of the steps. It counts as stuck when a
    gradient that was finite and not zero, at a learning rate that is large enough to show in its dtype, moved
    neither its fp32 value nor itself: the element with the largest gradient is looked at.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Watch the parameters of `model` that `optimizer` trains."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [
            (n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) in held and p.numel()
        ]
        configs = [module.__dict__.get("config") for module in model.modules()]
        shares = [getattr(config, name, None) for config in configs for name in _DROPS]
        self._drops = any(isinstance(share, float | int) and share > 0.0 for share in shares)
        self._reached: set[str] = set()
        self._moved: set[str] = set()
        self._due: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._skipped = 0
        self._steps = self._empty = 0

    def before(self, optimizer: Optimizer) -> None:
        """Note where the largest element of each gradient is and what the weight holds there."""
        self._seen = {}
        self._skipped = _skipped(optimizer)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        with (
            torch.no_grad(),
            torch._C.DisableTorchFunctionSubclass(),
        ):  # reads of ours are no use from outside
            for name, parameter, grad in self._gradients():
                if isinstance(grad, ConsumedGradient):  # its parameter has been updated already
                    continue
                if not grad.numel() or not parameter.is_floating_point() or grad.layout is not torch.strided:
                    continue
                at, size = _largest(grad.reshape(-1))
                if not math.isfinite(size):
                    self._seen = {}  # a step that may be skipped as a whole says nothing
                    return
                held = _held(optimizer, parameter)
                value = _value(held, at)
                numbers = torch.finfo(held.dtype)
                least = max(numbers.eps * abs(value), numbers.tiny)
                if _MARGIN * _expected(optimizer, groups.get(id(parameter), {}), size) > least:
                    self._seen[name] = _Seen(at, value, grad, grad._version)

    def after(self, optimizer: Optimizer) -> bool:
        """Compare with what the weights held before the step; say whether enough was seen."""
        seen, self._seen = self._seen, {}
        skipped = _skipped(optimizer) != self._skipped or _found_inf(optimizer)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name, parameter, grad in self._gradients():  # a closure may have made them only now
                before = seen.get(name)
                if before is None or skipped or grad is not before.grad or grad._version != before.version:
                    continue
                changed = _value(_held(optimizer, parameter), before.at) != before.value
                (self._moved if changed else self._due).add(name)
        if not self._reached and self._empty < _EMPTY:
            self._empty += 1
        else:
            self._steps += 1
        return self._steps >= _STEPS

    def _gradients(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Go through the parameters that have a gradient now."""
        for name, parameter in self._parameters:
            entry = guard_of(parameter)
            if entry is not None:
                entry.wait()
            grad = parameter.grad
            if grad is not None:
                self._reached.add(name)
                yield name, parameter, grad

    def finish(self) -> str:
        """Raise if something did not train.

        Experts that no token was routed to in these steps are no error: of each set of experts some were
        reached, and the others will be. So are layers that were left out, where the config says that some
        are at random.

        Returns:
            What to say of such experts and layers, or an empty text.

        Raises:
            StateError: Names the parameters without a gradient and those that did not change.
        """
        # What was frozen since is not trained any more: another adapter was chosen.
        lost = [name for name, p in self._parameters if p.requires_grad and name not in self._reached]
        idle = _idle(lost, self._reached, "expert")
        lost = [name for name in lost if name not in idle]
        dropped = _idle(lost, self._reached, "") if self._drops else {}
        lost = [name for name in lost if name not in dropped]
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
        said = [
            f"after {_STEPS} steps, {what.format(len({*found.values()}))}, whose {len(found)} parameters got "
            f"no gradient: {_listed(list(found))}"
            for what, found in (
                ("no token has been routed to {} experts", idle),
                ("layer drop has left out {} layers each time", dropped),
            )
            if found
        ]
        return "; ".join(said)


def _idle(lost: list[str], reached: set[str], kind: str) -> dict[str, str]:
    """Return which of the parameters that were not reached are a member's, and of which member.

    A member is numbered, in a container with `kind` in its name, beside another one of which the same
    parameter was reached: ``layers.0.mlp.experts.3.up_proj.weight``.
    """
    alike = {key[:2] for name in reached for key in _members(name, kind)}
    found: dict[str, str] = {}
    for name in lost:
        member = next((key[2] for key in _members(name, kind) if key[:2] in alike), None)
        if member is not None:
            found[name] = member
    return found


def _members(name: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """Go through (container, path within the member, path of the member) of a name, the innermost first."""
    parts = name.split(".")
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].isdigit() and kind in parts[index - 1].lower():
            yield ".".join(parts[:index]), ".".join(parts[index + 1 :]), ".".join(parts[: index + 1])


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")


def _skipped(optimizer: Any) -> int:
    return int(optimizer.stats()["skipped_steps"]) if hasattr(optimizer, "stats") else 0


def _found_inf(optimizer: Any) -> bool:
    """Whether a gradient scaler told the optimizer to leave this step out."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0.0


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


def _expected(optimizer: Any, group: dict[str, Any], size: float) -> float:
    """Say how far a step moves the element at least: lr for Adam and its like, lr x gradient for others.

    RAdam, say, does not divide by the gradient's size in its first steps; Prodigy scales lr by a tiny d.
    """
    try:
        rate = float(group.get("lr", 0.0)) * float(group.get("d", 1.0))
    except (TypeError, ValueError):
        return 0.0
    if isinstance(getattr(optimizer, "optimizer", optimizer), _ADAMS):
        return rate * size / (size + float(group["eps"])) if size else 0.0
    return rate * min(size, 1.0)


def _held(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return the fp32 value behind a 16-bit parameter, or the parameter."""
    master = optimizer.state.get(parameter, {}).get("master")
    return master if isinstance(master, Tensor) else parameter


def _value(held: Tensor, at: int) -> float:
    place = []
    for size in reversed(held.shape):
        at, index = divmod(at, size)
        place.append(index)
    return float(held[tuple(reversed(place))])
