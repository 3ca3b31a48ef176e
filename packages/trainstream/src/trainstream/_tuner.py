"""The tuner: starts a run from the least memory, measures it, and brings back what there is room for.

What activations and temporaries take is known only once a step has run, and a budget must hold from the first
one. So with a budget everything that can be paged starts paged and every block recomputes. Two steps are
measured; then activations are kept and blocks return to the device, as far as the measured peak leaves room.
None of this changes a bit of the result.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainstream._budget import Limits, host_used
from trainstream._inventory import Inventory
from trainstream._paging import Asked, Tiers
from trainstream._staging import bring_back
from ts_core.memory import format_bytes
from ts_core.planner import GroupSpec, layout_of
from ts_core.usage import PeakSampler, release_free_memory
from ts_optim import OffloadAdamW
from ts_paging.governor import ActivationGovernor
from ts_paging.pager import WeightPager

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Tuner"]

_MEASURED = 2  # steps before anything returns
_ROUNDS = 2  # times that blocks may return


class Tuner:
    """Adapts one session within its limits.

    Attributes:
        governor: Decides about activations at the start of each pass.
    """

    def __init__(
        self,
        pager: WeightPager,
        inventory: Inventory,
        specs: list[GroupSpec],
        paged: frozenset[int],
        want: Asked,
        tiers: Tiers,
        limits: Limits,
    ) -> None:
        """Start with what `wrap()` placed.

        Args:
            pager: The attached pager.
            inventory: The model's units.
            specs: What each of them takes.
            paged: Indices of the units that are paged now.
            want: What the options ask for.
            tiers: Where paged weights live.
            limits: What may be used.
        """
        self._pager = pager
        self._inventory = inventory
        self._specs = specs
        self._paged = set(paged)
        self._want = want
        self._tiers = tiers
        self._limits = limits
        self._steps = 0
        self._rounds = 0
        self._cpu = tiers.device.type == "cpu"
        self._sampler: PeakSampler | None = None
        hard = limits.cap if limits.cap is not None and self._cpu else limits.room
        self.governor = ActivationGovernor(
            pager.blocks, want.fallback, limits.used, hard, limits.room, limits.used if self._cpu else None
        )
        pager.governor = self.governor
        forced = iter(want.paged)
        self._forced = [next(forced) if unit.group.kind == "block" else None for unit in inventory.units]

    def start(self) -> None:
        """Begin to measure."""
        if self._cpu:
            self._sampler = PeakSampler(read=host_used).start()
        else:
            torch.cuda.reset_peak_memory_stats(self._tiers.device)

    def stop(self) -> None:
        """End the measuring thread."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _peak(self) -> int:
        if self._cpu:
            return self._sampler.reset() if self._sampler is not None else host_used()
        peak = torch.cuda.max_memory_allocated(self._tiers.device)
        torch.cuda.reset_peak_memory_stats(self._tiers.device)
        return int(peak)

    def after_step(self, session: Session) -> None:
        """Take the measure of a step; bring blocks back once enough is known."""
        if not session.adapting:
            return
        self._steps += 1
        if self._cpu:
            release_free_memory()
        peak = self._peak()
        governor = self.governor
        if governor.base:
            governor.learn(max(peak - governor.base - governor.kept, 0))
        if self._steps > _MEASURED:
            self._rounds += 1
            if not self._bring_back(session, self._limits.room - peak):
                self._rounds = _ROUNDS
        policies = [
            now if fallback is not None else asked
            for now, fallback, asked in zip(
                governor.policies, self._want.fallback, self._want.policy, strict=True
            )
        ]
        self._write_down(session, policies)
        if self._rounds >= _ROUNDS:
            session.adapting = False
            session.events.add(
                f"settled after {self._steps} steps: {len(self._paged)} groups are paged, "
                f"{policies.count('keep')} of {len(policies)} blocks keep their activations; peak "
                f"{format_bytes(peak)} of {format_bytes(self._limits.room)}"
            )
            self.stop()

    def _write_down(self, session: Session, policies: list[str]) -> None:
        """Let the session's plan say what holds now."""
        left = iter(policies)
        rows = tuple(
            dataclasses.replace(
                row,
                tier=row.tier if index in self._paged else "device",
                policy=next(left) if row.kind == "block" else row.policy,
            )
            for index, row in enumerate(session.plan.blocks)
        )
        layout = layout_of(self._specs, frozenset(self._paged), self._limits.budgets)
        predicted = {
            "device": layout.device_bytes,
            "activations": self.governor.kept,
            "host": layout.host_bytes,
            "disk": layout.disk_bytes,
        }
        slots = len(self._pager.slots)
        session.plan = dataclasses.replace(session.plan, blocks=rows, slots=slots, predicted=predicted)

    def _bring_back(self, session: Session, room: int) -> int:
        """Return units to the device while `room` lasts, blocks first; say how many."""
        candidates = [i for i in sorted(self._paged) if self._forced[i] is not True]
        candidates.sort(key=lambda i: self._specs[i].kind != "block")
        chosen = []
        for index in candidates:
            if self._specs[index].device <= room:
                room -= self._specs[index].device
                chosen.append(index)
        if not chosen:
            return 0
        names: list[str] = []
        for index in chosen:
            names += [name for name, _ in self._inventory.units[index].modules]
        free: list[nn.Parameter] = []
        self._pager.unpage(names, free.append)
        self._tiers.to_host(free)
        bring_back(session.model, session.optimizer, {id(p): p for p in free}, self._tiers.device)
        if isinstance(session.optimizer, OffloadAdamW):
            session.optimizer.rehouse([p for p in free if p.requires_grad])
        self._paged -= set(chosen)
        session.events.add(
            f"{len(chosen)} groups return to {self._tiers.device}: the measured peak leaves room"
        )
        # Their gradients now come into being in backward, on the device.
        self.governor.expect(sum(self._specs[index].scratch for index in chosen))
        return len(chosen)
