"""Fused paths in the place of the modules of a model, and how they are taken away again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.options import choice

from ._alike import state_of
from ._checked_group import SharedInput, check_group, shared_inputs
from ._compare import Verdict
from ._stand_in import FusedForward
from .checked import KINDS, SIZES, FusedCheck, checked, expect_place, place_of, quietly

__all__ = ["FusedPatch", "patch_fused"]


@dataclasses.dataclass
class FusedPatch:
    """The modules of a model that run fused paths.

    Attributes:
        reports: By the module's name, the report of every module that looked like one of the kinds.
        shared: By the name of the first of several LoRA layers that take the same input, a report on them;
            `variant` names them. Where it agrees the one that is called first computes all of them.
    """

    reports: dict[str, FusedCheck]
    shared: dict[str, FusedCheck] = dataclasses.field(default_factory=dict)
    _stand_ins: list[tuple[str, FusedForward]] = dataclasses.field(default_factory=list, repr=False)

    @property
    def patched(self) -> tuple[str, ...]:
        """Names of the modules that run a fused path."""
        standing = {name for name, _ in self._stand_ins}
        return tuple(name for name, report in self.reports.items() if report.agrees and name in standing)

    def undo(self) -> tuple[str, ...]:
        """Give every module its own code back.

        Returns:
            Names of modules whose `forward` someone replaced since; they keep it.
        """
        kept = [name for name, stand_in in reversed(self._stand_ins) if not stand_in.take_away()]
        self._stand_ins.clear()
        return tuple(dict.fromkeys(reversed(kept)))

    def _put(self, name: str, stand_in: FusedForward) -> None:
        stand_in.put()
        self._stand_ins.append((name, stand_in))


def patch_fused(
    model: nn.Module,
    sample: Tensor | None = None,
    *,
    kinds: Iterable[str] = KINDS,
    device: torch.device | None = None,
) -> FusedPatch:
    """Let the modules of a model run fused paths where these agree with their own code.

    The `forward` of a module is replaced on the instance; classes, functions and parameters stay as they are.
    A copy or a pickle of the module has its own code again. LoRA layers that their parent calls with the very
    same tensor (q, k and v; gate and up) are computed as one, see `lora_linears`. Of modules that are alike
    one is compared.

    Args:
        model: The model; every module of it is looked at.
        sample: A tensor with the dtype and device of the activations; None: those of each module's own
            parameters.
        kinds: Which paths to use; see `check_fused`.
        device: Where the modules are going to compute; None: where their parameters are.

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
    expect_place("patch_fused", model, sample)
    chosen = tuple(choice("kinds", kind, KINDS) for kind in kinds)
    patch = FusedPatch({})
    known: dict[Any, Verdict] = {}
    for name, module in model.named_modules():
        report = checked(module, sample, chosen, device, known)
        if report.kind:
            patch.reports[name] = report
        if isinstance(report.forward, FusedForward):
            patch._put(name, report.forward)
    if "lora" in chosen:
        for name, module in model.named_modules():
            _share(patch, name, module, sample, device, known)
    return patch


def _share(
    patch: FusedPatch,
    name: str,
    parent: nn.Module,
    sample: Tensor | None,
    device: torch.device | None,
    known: dict[Any, Verdict],
) -> None:
    """Let the LoRA layers of one module that take the same input be computed as one."""
    prefix = f"{name}." if name else ""
    layers = {
        key: child
        for key, child in parent.named_children()
        if (report := patch.reports.get(prefix + key)) is not None and report.kind == "lora" and report.agrees
    }
    if len(layers) < 2:
        return
    where, dtype = place_of(parent, sample, device)
    with quietly(where):
        groups = shared_inputs(parent, layers)
    for group in groups:
        members = [layers[key] for key in group]
        alike = ("shared", where, dtype, *(state_of(member, SIZES) for member in members))
        if alike not in known:
            with quietly(where):
                known[alike] = check_group(members, where, dtype)
        verdict = known[alike]
        errors = verdict.reason, verdict.forward_error, verdict.gradient_error
        report = FusedCheck("lora", not verdict.reason, ", ".join(group), *errors)
        patch.shared[prefix + group[0]] = report
        if not report.agrees:
            continue
        together = SharedInput(members)
        for key, member in zip(group, members, strict=True):
            patch._put(prefix + key, FusedForward(member, together.run))
        inner = parent.forward
        patch._put(name, FusedForward(parent, lambda _, *a, t=together, f=inner, **k: t.call(f, a, k)))
