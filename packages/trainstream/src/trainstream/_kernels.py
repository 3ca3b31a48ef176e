"""The options `kernels`, `fused_lora` and `attention`: what of a model runs fused paths, and what does not.

Modules are replaced on the instance before anything is paged, so that the block runtime finds fused paths
where the modules' own code was: it computes, recomputes and offloads them as it does any code.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainstream._options import WrapOptions
from trainstream._session import Session
from ts_core.plan import Numerics, Plan
from ts_fused import AttentionChoice, FusedPatch, patch_fused
from ts_quant import QuantizedTensor

__all__ = ["Kernels"]

_MODULES = ("rms_norm", "rotary", "gated_mlp", "add_rms_norm")
_WORDS = {
    "rms_norm": "norms",
    "rotary": "rotary embeddings",
    "gated_mlp": "gated MLPs",
    "add_rms_norm": "residual sums with their norms",
    "lora": "LoRA layers",
}


class Kernels:
    """What runs fused in a wrapped model.

    Attributes:
        kernels: Norms (with the sums before them), rotary embeddings and MLPs are fused where they agree with
            the modules' own code.
        fused_lora: LoRA layers are.
        patch: The modules, with a report on each; None if both are off.
        attention: Which backend attention tries first; None for PyTorch's own order throughout.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, options: WrapOptions
    ) -> None:
        """Compare the model's modules with the fused paths and put these in; `undo` takes them out.

        Args:
            model: With its weights packed, and not paged yet.
            blocks: Its layer stack.
            device: Where it is going to compute.
            options: The checked options.
        """
        self._asked = options
        self._packed = any(isinstance(p, QuantizedTensor) for block in blocks for p in block.parameters())
        self.kernels = self._packed if options.kernels == "auto" else options.kernels is True
        self.fused_lora = self._packed if options.fused_lora == "auto" else options.fused_lora is True
        kinds = (_MODULES if self.kernels else ()) + (("lora",) if self.fused_lora else ())
        self.patch: FusedPatch | None = patch_fused(model, kinds=kinds, device=device) if kinds else None
        self.attention: AttentionChoice | None = None
        self._session: Callable[[], Session | None] = lambda: None
        if options.attention is not None:
            self.attention = AttentionChoice(options.attention, device, self._measured)
            self.attention.put(blocks)

    def adopt(self, session: Session) -> None:
        """Say in the events of a session what was done, and later what was measured."""
        self._session = weakref.ref(session)
        session.undo.append(self.undo)
        auto = (
            self._asked.kernels == "auto",
            self._asked.fused_lora == "auto",
            self._asked.attention == "auto",
        )
        for line, decided in zip(self._lines(), auto, strict=True):
            (session.decide if decided else session.events.add)(line)
        for line in self._left_alone():
            session.events.add(line)

    def in_plan(self, plan: Plan) -> Plan:
        """Write into a plan what decides bits."""
        named = self.attention.backend if self.attention is not None else None
        changed: dict[str, Any] = {
            "kernels": self.kernels,
            "fused_lora": self.fused_lora,
            "attention": named,
        }
        numerics: Numerics = dataclasses.replace(plan.numerics, **changed)
        return dataclasses.replace(plan, numerics=numerics)

    def keep_attention(self, backend: str | None, source: str) -> None:
        """Let attention that is still to be measured try the backend of the run that goes on.

        Args:
            backend: Its name; None for PyTorch's own order.
            source: Which run that is, for the events.
        """
        choice = self.attention
        if choice is None or not choice.open:
            return
        choice.backend, choice.open, choice.why = backend, False, f"as in {source}"
        self._measured(choice)

    def undo(self) -> None:
        """Give every module its own code back."""
        if self.attention is not None:
            self.attention.undo()
        if self.patch is not None:
            self.patch.undo()

    def report(self) -> dict[str, Any]:
        """Return what became of every module that looks like one with a fused path, JSON-ready."""
        rows: list[dict[str, Any]] = []
        if self.patch is not None:
            running = set(self.patch.patched)
            for reports in (self.patch.reports, self.patch.shared):
                for name, found in reports.items():
                    rows.append(
                        {
                            "name": name,
                            "kind": found.kind,
                            "fused": found.agrees and (reports is self.patch.shared or name in running),
                            "variant": found.variant,
                            "reason": found.reason,
                            "forward_error": found.forward_error,
                            "gradient_error": found.gradient_error,
                        }
                    )
        choice = self.attention
        times = None if choice is None or choice.times is None else choice.times
        return {
            "modules": rows,
            "attention": {
                "first": None if choice is None else choice.backend,
                "own_s": None if times is None else times.own,
                "backends_s": {} if times is None else dict(times.backends),
            },
        }

    def _lines(self) -> list[str]:
        """One line for each of the three options."""
        return [
            self._line("kernels", self.kernels, _MODULES, "the model's own modules compute"),
            self._line("fused_lora", self.fused_lora, ("lora",), "adapters compute as PEFT does"),
            f"attention={self._asked.attention}: {self._order()}",
        ]

    def _line(self, name: str, on: bool, kinds: Sequence[str], off: str) -> str:
        head = f"{name}={getattr(self._asked, name)}"
        if not on or self.patch is None:
            return f"{head}: {off}"
        found = [report for report in self.patch.reports.values() if report.kind in kinds]
        fused = [report.kind for report in found if report.agrees]
        counts = [f"{fused.count(kind)} {_WORDS[kind]}" for kind in kinds if kind in fused]
        shared = [r for r in self.patch.shared.values() if r.agrees and "lora" in kinds]
        together = f", {len(shared)} groups of them by their common input" if shared else ""
        left = f"; {len(found) - len(fused)} left alone" if len(found) > len(fused) else ""
        return f"{head}: {', '.join(counts) or 'nothing'} fused{together}{left}"

    def _left_alone(self) -> list[str]:
        """Why modules are left alone, one line for each reason."""
        if self.patch is None:
            return []
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, report in (*self.patch.reports.items(), *self.patch.shared.items()):
            if not report.agrees:
                reasons.setdefault((report.kind, report.reason), []).append(name)
        lines = []
        for (kind, reason), names in reasons.items():
            more = ", ..." if len(names) > 1 else ""
            lines.append(f"not fused: {len(names)} {_WORDS[kind]} ({names[0]}{more}): {reason}")
        return lines

    def _order(self) -> str:
        choice = self.attention
        if choice is None:
            return "torch's own order of backends"
        if choice.open:
            return "to be measured on the first step's shape"
        if choice.backend is None:
            return f"torch's own order of backends: {choice.why}"
        if choice.times is None:
            return f"{choice.backend} first" + (f": {choice.why}" if choice.why else "")
        times = {"torch's own order": choice.times.own, **choice.times.backends}
        took = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in times.items())
        return f"{choice.backend} first; forward and backward: {took}"

    def _measured(self, choice: AttentionChoice) -> None:
        session = self._session()
        if session is not None:
            session.plan = self.in_plan(session.plan)
            session.decide(f"attention=auto: {self._order()}")
