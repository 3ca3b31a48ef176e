"""Where the units of a wrapped model are, and how they leave the device while it is in use.

`wrap()` places units once, and the tuner lets some return. This is the way back: when memory turns out to be
short, or a budget shrinks, activations are kept no longer, and units that are resident, or settled in a slot
of their own, stream again. None of this changes a bit of the result.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainstream._budget import Limits
from trainstream._copies import let_go
from trainstream._decide import Decided, optimizer_tier
from trainstream._device import answer_with
from trainstream._inventory import Inventory, Unit
from trainstream._options import WrapOptions
from trainstream._paging import Asked, Tiers, hooked_edges, start_paging
from trainstream._session import Instead, converting, zero_grad
from trainstream._staging import Followers, Staged, commit, gradient_in, parts_of
from ts_core.blocks import block_map, find_blocks
from ts_core.headroom import require_ram
from ts_core.planner import layout_of
from ts_core.usage import release_free_memory
from ts_optim import OffloadAdamW, grad_sumsq
from ts_optim.gradients import gradient_of
from ts_optim.placement import PlacePolicy
from ts_paging.pager import WeightPager
from ts_quant import QuantizedTensor

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Places", "beside", "stand_in"]


def stand_in(model: nn.Module, name: str, run: Callable[..., Any]) -> None:
    """Put a function in the place of a method, unless somebody else's stands there."""
    if name not in model.__dict__:
        model.__dict__[name] = Instead(model, name, run)


def beside(inventory: Inventory, settling: frozenset[int], default: PlacePolicy) -> PlacePolicy:
    """Return the placement of optimizer state: weights that return to the device take theirs along."""
    moving = {id(p) for index in settling for p in inventory.units[index].pageable}
    return lambda parameter: "device" if id(parameter) in moving else default(parameter)


@dataclasses.dataclass
class Places:
    """What is known about the units of one session, and where they are now.

    Attributes:
        inventory: The units; made anew when packed Parameters are replaced.
        decided: What `wrap()` decided about them.
        want: What the options ask for.
        limits: What may be used now.
        options: The options of `wrap()`, with the budgets that hold now.
        tiers: Where paged weights live.
        paged: Indices of the units that are paged; the tuner's own set, if there is a tuner.
        settled: Those of them that have a slot of their own; likewise.
    """

    inventory: Inventory
    decided: Decided
    want: Asked
    limits: Limits
    options: WrapOptions
    tiers: Tiers
    paged: set[int] = dataclasses.field(default_factory=set)
    settled: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Start with what was decided."""
        self.paged = set(self.decided.layout.paged)
        self.settled = set(self.decided.layout.settled)
        self.linked = self.inventory.linked()

    # -- what can leave --------------------------------------------------------------------------------

    def removable(self) -> list[int]:
        """Return the units that can leave the device, those first that give most for what they cost.

        Blocks before what is around them, and evenly over the stack; settled ones are among them. What
        ``param_offload`` keeps on the device stays there.
        """
        blocks: list[int] = []
        around: list[int] = []
        for index, unit in enumerate(self.inventory.units):
            streams = index in self.paged and index not in self.settled
            if unit.pageable and not streams and self._may_stream(index):
                (blocks if unit.group.kind == "block" else around).append(index)
        spread = [blocks[i] for step in range(2) for i in range(step, len(blocks), 2)]
        return spread + sorted(around, key=lambda i: -self.decided.specs[i].device)

    def _may_stream(self, index: int) -> bool:
        if self.options.param_offload is False:
            return False
        unit = self.inventory.units[index]
        if unit.group.kind != "block":
            return True
        number = sum(u.group.kind == "block" for u in self.inventory.units[:index])
        return self.want.paged[number] is not False

    def gives(self, index: int) -> int:
        """Return the bytes of the device that a unit takes where it is and would not while it streams."""
        spec = self.decided.specs[index]
        return spec.slot if index in self.settled else spec.device

    def enough_of(self, candidates: Sequence[int], wanted: int) -> list[int]:
        """Take of them, in order, until they give so many bytes, with those they share a Parameter with."""
        chosen: list[int] = []
        freed = shared = 0
        new = not any(index not in self.settled for index in self.paged)
        for index in candidates:
            if chosen and freed - shared >= wanted:
                break
            for other in sorted(self._with_linked(index)):
                if other not in chosen:
                    chosen.append(other)
                    freed += self.gives(other)
            if new:  # the first ones that stream bring the slots that they share
                slots = self.options.prefetch_depth + 1
                shared = slots * max(self.decided.specs[i].slot for i in chosen)
        return chosen

    def _with_linked(self, index: int) -> set[int]:
        found, new = {index}, {index}
        while new:
            new = {o for i in new for o in self.linked[i] if self.inventory.units[o].pageable} - found
            found |= new
        return {i for i in found if i not in self.paged or i in self.settled or i == index}

    # -- moving ----------------------------------------------------------------------------------------

    def keepers(self, session: Session) -> int:
        """Count the blocks whose activations are kept by our own choice, and need not be."""
        governor = session.tuner.governor if session.tuner is not None else None
        if governor is not None:
            return governor.keepers
        if not any(fallback is not None for fallback in self.want.fallback):
            return 0
        if session.pager is None or not session.pager.blocks:
            return len(self.want.fallback)
        pairs = zip(session.pager.blocks, self.want.fallback, strict=True)
        return sum(fallback is not None and block.policy == "keep" for block, fallback in pairs)

    def forget_activations(self, session: Session) -> None:
        """Let every one of them recompute, or offload, from now on.

        Where a governor decides pass by pass, that holds for passes at least as large as the latest one.
        """
        governor = session.tuner.governor if session.tuner is not None else None
        if governor is not None:
            governor.overrun()
            return
        for block, fallback in zip(self.pager_of(session).blocks, self.want.fallback, strict=True):
            if fallback is not None and block.policy == "keep":
                block.policy = fallback

    def evict(self, session: Session, chosen: Iterable[int], tiers: dict[int, str] | None = None) -> None:
        """Let units stream from now on; between two passes.

        Args:
            session: The session.
            chosen: Their indices.
            tiers: ``host`` or ``disk`` for units, where that is decided already; else disk on a CPU run, and
                beside a GPU the host as long as its budget lasts.

        Raises:
            StorageError: A file could not be written; what has moved by then streams, the rest is where it
                was, and everything can be used.
        """
        session.settle_save()  # its thread reads the weights where they are
        where = tiers or {}
        leaving = [i for i in chosen if i not in self.paged or i in self.settled or i in where]
        synchronize = getattr(session.optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
        pager = self.pager_of(session)
        policies = {block.name: block.policy for block in pager.blocks}
        counts = {b.name: (b.runs, b.fills) for b in (*pager.blocks, *pager.edges)}
        slots = bool(pager.slots)
        pager.detach()
        if slots:
            gc.collect()  # what stood on the modules holds them in a cycle
        done: set[int] = set()
        together = frozenset({*self.paged, *leaving})
        below = layout_of(self.decided.specs, together, self.limits.budgets).tiers
        try:
            for index in leaving:
                if index not in self.paged or index in where:
                    self._move(session, index, where.get(index, below[index]), together)
                done.add(index)
        finally:
            # Also after a failure: what has moved so far is paged, and the rest is resident.
            self.paged |= done
            self.settled -= done
            self._attach(session, pager, policies, counts)
            let_go()
            if self.tiers.device.type == "cuda":
                torch.cuda.empty_cache()
            else:
                release_free_memory()

    def pager_of(self, session: Session) -> WeightPager:
        """Return the session's pager; one that is at rest, or was never made, starts to page nothing."""
        pager = session.pager
        if pager is not None and (pager.blocks or pager.edges):
            return pager
        nothing: dict[int, nn.Parameter] = {}
        if pager is None:
            room = self.limits.budgets.device
            layout = dataclasses.replace(self.decided.layout, slots=self.options.prefetch_depth + 1)
            pager = start_paging(self.inventory, self.want, layout, nothing, self.tiers, self.options, room)
            session.pager = pager
            session.undo += answer_with(session.model, self.tiers.device)
        else:
            pager.pages = lambda parameter: False
            units = zip(self.inventory.blocks, self.want.policy, strict=True)
            pager.attach([(unit.group.name, unit.modules[0][1], policy) for unit, policy in units])
        session.watch.start()
        stand_in(session.model, "zero_grad", zero_grad)
        stand_in(session.model, "_apply", converting(pager))
        optimizer = session.optimizer
        if isinstance(optimizer, OffloadAdamW):
            if session.placement is None:
                session.placement = optimizer.placement
            optimizer.set_placement(beside(self.inventory, self.decided.settling, session.placement))
            optimizer.set_memory(self.tiers.memory_for)
            if optimizer.needs_norm:
                pager.sink.square_sum = grad_sumsq
        return pager

    def _move(self, session: Session, index: int, tier: str, together: frozenset[int]) -> None:
        """Put the values, gradients and optimizer state of a unit where they live while it is paged.

        `together` are all units that will be: what none else uses leaves with them.
        """
        paged = self.inventory.paged(together)
        moving = [p for p in self.inventory.units[index].pageable if id(p) in paged]
        (self.tiers.to_disk if tier == "disk" else self.tiers.to_host)(moving)
        staged, follow = Staged(), Followers(session.optimizer)
        for parameter in moving:
            value: Any = parameter.detach()
            if tier == "host":  # out of files
                grad = gradient_of(parameter)
                staged.left += parts_of(value) + ([] if grad is None else [grad])
            stored = self.tiers.store(parameter)
            if isinstance(value, QuantizedTensor):
                staged.replaced[id(parameter)] = nn.Parameter(stored, requires_grad=False)
                continue
            staged.data.append((parameter, stored, gradient_in(parameter, stored, self.tiers)))
            staged.state += follow(parameter, torch.device("cpu"))
        self.tiers.renamed(staged.replaced)
        commit(session.model, session.optimizer, staged)
        staged.discard()
        if staged.replaced:
            self._take_stock(session)
        if isinstance(session.optimizer, OffloadAdamW):
            session.optimizer.rehouse([p for p in moving if p.requires_grad])

    def _take_stock(self, session: Session) -> None:
        """Look at the model's Parameters anew."""
        blocks = find_blocks(session.model, self.options.blocks)
        self.inventory = Inventory(session.model, block_map(session.model, self.options.blocks), blocks)
        if session.tuner is not None:
            session.tuner.renew(self.inventory)

    def _attach(
        self,
        session: Session,
        pager: WeightPager,
        policies: dict[str, str],
        counts: dict[str, tuple[int, int]],
    ) -> None:
        """Page what is paged now."""
        paged = self.inventory.paged(frozenset(self.paged))
        pager.pages = lambda parameter: id(parameter) in paged
        blocks = [
            (unit.group.name, unit.modules[0][1], policies[unit.group.name]) for unit in self.inventory.blocks
        ]
        edges = hooked_edges(self.inventory, paged)
        try:
            pager.attach(blocks, *edges)
        except torch.OutOfMemoryError:
            pager.detach()
            gc.collect()
            torch.cuda.empty_cache()
            pager.slot_count = 1
            pager.attach(blocks, *edges)
        names = [name for index in self.settled for name, _ in self.inventory.units[index].modules]
        try:
            pager.settle(names)
        except torch.OutOfMemoryError as error:
            session.events.add(f"no room for {len(self.settled)} groups in slots of their own: {error}")
            self.settled.clear()
        for block in (*pager.blocks, *pager.edges):
            block.runs, block.fills = counts.get(block.name, (0, 0))

    def require_room_to_return(self) -> None:
        """Look whether RAM has room for all that lives in files, before it returns.

        Raises:
            DoesNotFitError: It has not; with what to do.
        """
        if self.tiers.files is None:
            return
        advice = (
            "Save the model while it is wrapped (save_pretrained, state_dict and the optimizer's state_dict "
            "work), then load it where it fits; or unwrap on a machine, or in a container, with more RAM"
        )
        if self.tiers.device.type == "cpu":
            values = sum(self.decided.specs[index].paged for index in self.paged)
            require_ram("unwrap", min(self.tiers.files.used_bytes, values), advice)

    # -- the plan --------------------------------------------------------------------------------------

    def policies(self, session: Session) -> list[str]:
        """Return what happens to the activations of each block."""
        governor = session.tuner.governor if session.tuner is not None else None
        if governor is not None:
            return [
                now if fallback is not None else asked
                for now, fallback, asked in zip(
                    governor.policies, self.want.fallback, self.want.policy, strict=True
                )
            ]
        if session.pager is not None and session.pager.blocks:
            return [block.policy for block in session.pager.blocks]
        return list(self.want.policy)

    def write_down(self, session: Session) -> None:
        """Let the session's plan say what holds now."""
        left = iter(self.policies(session))
        device, budgets = self.tiers.device, self.limits.budgets
        paged, settled = frozenset(self.paged), frozenset(self.settled)
        specs, slots = self.decided.specs, self.options.prefetch_depth + 1
        layout = layout_of(specs, paged, budgets, slots=slots, settled=settled)
        governor = session.tuner.governor if session.tuner is not None else None
        rows = []
        for index, (row, unit) in enumerate(zip(session.plan.blocks, self.inventory.units, strict=True)):
            tier = "device" if index not in paged else self._tier_of(unit, row.tier)
            optimizer = optimizer_tier(tier, bool(row.optimizer), device, index in self.decided.settling)
            policy = next(left) if row.kind == "block" else row.policy
            rows.append(
                dataclasses.replace(
                    row, tier=tier, policy=policy, settled=index in settled, optimizer=optimizer
                )
            )
        session.plan = dataclasses.replace(
            session.plan,
            blocks=tuple(rows),
            slots=sum(not slot.own for slot in session.pager.slots) if session.pager is not None else 0,
            predicted={
                "device": layout.device_bytes,
                "activations": governor.kept if governor is not None else 0,
                "host": layout.host_bytes,
                "disk": layout.disk_bytes,
            },
        )

    def _tier_of(self, unit: Unit, before: str) -> str:
        tiers = {self.tiers.tier_of(parameter) for parameter in unit.pageable}
        return tiers.pop() if len(tiers) == 1 else before if before != "device" else "host"
