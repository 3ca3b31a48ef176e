"""The tuner: starts a run from the least memory, measures it, and brings back what there is room for.

What activations and temporaries take is known only once a step has run, and a budget must hold from the first
one. So with a budget everything that can be paged starts paged and every block recomputes. Two steps are
measured; then weights come back as far as the measured peak leaves room: first into slots of their own, so
that they cross the link once a step, then wholly, with the state of their optimizer. Activations are kept in
what is left; before that, where it is not the link or the optimizer that a step waits for, and not at all
where it waits for the link all the same. Without a budget, and with room for everything, only the optimizer's
state comes back. None of this changes a bit of the result.

The first steps are slow for reasons of their own: they record blocks and set libraries up. So the time that
the link is busy is compared with what was predicted of computation, and with steps in which nothing was
recorded; a peak counts once all is recorded that will be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainstream._budget import Limits, host_used, keep_to_budget, return_ram, return_unused_slabs
from trainstream._copies import let_go
from trainstream._decide import Decided, optimizer_tier
from trainstream._inventory import Inventory
from trainstream._link import link_rate
from trainstream._options import WrapOptions
from trainstream._paging import Asked, Tiers
from trainstream._spill import LINK_BOUND, Spill
from trainstream._staging import bring_back
from ts_core import registry
from ts_core.memory import format_bytes
from ts_core.planner import layout_of
from ts_core.usage import PeakSampler, release_free_memory
from ts_optim import OffloadAdamW
from ts_paging.copy import CopyEngine
from ts_paging.governor import ActivationGovernor
from ts_paging.pager import WeightPager
from ts_quant import QuantizedTensor

if TYPE_CHECKING:
    from trainstream._places import Places
    from trainstream._session import Session
    from ts_paging.captured import Captures

__all__ = ["Tuner", "settle"]

_MEASURED = 2  # steps before anything returns
_ROUNDS = 4  # times that groups may return
_PIECES = 22 << 20  # PyTorch reserves memory for small and for larger tensors in pieces of 2 and 20 MiB
#: What updates of weights in files may hold at most: an eighth of the RAM that may be used, and no more or
#: less than this. A step can be seen to do without, if they happened to run beside nothing else.
_LEASES, _LEAST_LEASES = 12 << 20, 3 << 20
_PATIENCE = 8  # steps in all that may go by until blocks are recorded: inputs may change their form each time
_SEEN = 0.5  # share of a steady step that the link is seen to be busy, below which no prediction counts
#: How much longer than computation the link has to be busy for that to be so in backward, which recomputes.
_BESIDE = 1.5


def settle(
    tell: Callable[[str], object], pager: WeightPager, inventory: Inventory, indices: Iterable[int]
) -> bool:
    """Give units a slot of their own; where the device has no room after all, they go on sharing.

    Args:
        tell: Told so then.
        pager: The attached pager.
        inventory: The model's units.
        indices: Of the units.

    Returns:
        Whether they have it now.
    """
    names = [name for index in indices for name, _ in inventory.units[index].modules]
    try:
        pager.settle(names)
    except torch.OutOfMemoryError as error:
        tell(f"no room for the weights of {len(names)} modules at once ({error}): they stream")
        return False
    return True


def offloads_by_itself(device: torch.device) -> bool:
    """Whether activations go below the device without being asked to: to RAM, not to files."""
    return device.type == "cuda"


def idle_in_pools(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """Return the bytes of one device that pools of recordings hold, and no statistic of tensors counts.

    Args:
        segments: What ``torch.cuda.memory_snapshot`` returns.
        index: Of the device.
    """
    pools = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    idle = [s for s in pools if s["device"] == index and not s["active_size"] and len(s["blocks"]) == 1]
    return sum(int(s["total_size"]) for s in idle)


class Tuner:
    """Adapts one session within its limits.

    Attributes:
        governor: Decides about activations at the start of each pass; None where their policy is fixed.
    """

    def __init__(
        self,
        pager: WeightPager,
        inventory: Inventory,
        decided: Decided,
        want: Asked,
        tiers: Tiers,
        limits: Limits,
        *,
        options: WrapOptions,
    ) -> None:
        """Start with what `wrap()` placed.

        Args:
            pager: The attached pager.
            inventory: The model's units.
            decided: What was decided about them.
            want: What the options ask for.
            tiers: Where paged weights live.
            limits: What may be used.
            options: Whether the optimizer's state may return.
        """
        self._pager = pager
        self._inventory = inventory
        self._specs = decided.specs
        self._computing = decided.computing
        self._paged = set(decided.layout.paged)
        self._settled = set(decided.layout.settled)
        self._settling = decided.settling
        self._takes_over = options.offload == "auto"
        self._slots = options.prefetch_depth + 1
        self._want = want
        self._tiers = tiers
        self._limits = limits
        self._steps = 0
        self._rounds = 0
        self._cpu = tiers.device.type == "cpu"
        self._updates = any(p.requires_grad for unit in inventory.units for p in unit.pageable)
        if self._cpu:
            tiers.lend(max(min(_LEASES, max(limits.budgets.device, 0) // 8), _LEAST_LEASES))
        self._sampler: PeakSampler | None = None
        self.governor: ActivationGovernor | None = None
        if decided.governed:
            hard = limits.room if limits.hard is None else limits.hard
            relief = limits.used if self._cpu else None
            # What was planned to offload, or where nothing was planned, all that has no room.
            planned = [fallback == "offload" for fallback in want.fallback]
            offers = planned if any(planned) else [fallback is not None for fallback in want.fallback]
            self.governor = ActivationGovernor(
                pager.blocks, want.fallback, limits.used, hard, limits.room, relief, offers, self._unseen
            )
        pager.governor = self.governor
        self._spill = self._start_spill(options)
        self._rate: float | None = None
        if self.governor is not None and not self._cpu:
            self.governor.hold = True
            with contextlib.suppress(torch.OutOfMemoryError):
                self._rate = link_rate(tiers.device)  # now, before the first step takes all there is
        self._since = (0.0, 0, 0, 0)
        self._high = 0  # largest peak since anything returned
        self._whole = self._steady = True
        self._made = (0, 0)
        self._waited = 0
        forced = iter(want.paged)
        self._forced = [next(forced) if unit.group.kind == "block" else None for unit in inventory.units]
        self._linked = inventory.linked()

    def _start_spill(self, options: WrapOptions) -> Spill | None:
        """Let activations go to RAM as far as was measured, where both ways to do without room are open."""
        auto = options.activation_offload == "auto" and options.recompute == "auto"
        if self.governor is None or not auto or not offloads_by_itself(self._tiers.device):
            return None
        engine, budget = registry.copy_engine(), options.ram_budget
        flight = engine.max_inflight_bytes if isinstance(engine, CopyEngine) else 0
        return Spill(
            self.governor,
            options.max_activation_slowdown,
            left=lambda: None if budget is None else int(budget) - host_used(),
            flight=flight + int(getattr(self._pager.activations, "max_ahead_bytes", 0)),
            steady=lambda: self._steady,
            link=self._share,
        )

    def share(self, places: Places) -> None:
        """Keep the sets of what is paged and settled together with whoever lets units leave again."""
        places.paged, places.settled = self._paged, self._settled

    def follow(self, places: Places) -> None:
        """Go on from where units are now, where another tuner has been at work before."""
        self._paged, self._settled = places.paged, places.settled

    def renew(self, inventory: Inventory) -> None:
        """Go on with an inventory that was made anew: Parameters have been replaced."""
        self._inventory = inventory

    def nothing_settled(self) -> None:
        """Start from groups that stream after all."""
        self._settled.clear()

    def start(self) -> None:
        """Begin to measure."""
        if self._cpu:
            self._sampler = PeakSampler(read=self._taken).start()
        else:
            torch.cuda.reset_peak_memory_stats(self._tiers.device)

    def stop(self) -> None:
        """End the measuring thread."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _unseen(self) -> int:
        return self._tiers.unseen() if self._cpu and self._updates else 0

    def _taken(self) -> int:
        """Return what is in use, with all that updates in the background may hold at once."""
        return host_used() + self._unseen()

    def _peak(self) -> int:
        if self._cpu:
            return self._sampler.reset() if self._sampler is not None else self._taken()
        device = self._tiers.device
        reserved, counted = torch.cuda.max_memory_reserved(device), torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        # What is free between tensors in use cannot be given back, and counts for the limit of the process.
        between = counted["inactive_split_bytes.all.peak"] + _PIECES
        if self._captures() is not None:
            index = torch.cuda.current_device() if device.index is None else device.index
            look: Any = torch.cuda.memory_snapshot
            between += idle_in_pools(look(), index)
        return int(min(reserved, counted["allocated_bytes.all.peak"] + between))

    def after_step(self, session: Session) -> None:
        """Take the measure of a step; bring groups back once enough is known."""
        if not session.adapting:
            return_unused_slabs()  # of steps that offloaded more
            return
        self._steps += 1
        if self._cpu:
            release_free_memory()
        else:
            torch.cuda.synchronize(self._tiers.device)  # what is measured is whole steps
        peak = self._peak()
        governor = self.governor
        if governor is not None and governor.base:
            governor.learn(max(peak - governor.base - governor.kept, 0))
        self._look_at_recordings()
        if not self._cpu:
            self._limits, evicted = keep_to_budget(session, self._limits, self._tiers.device, peak)
            if evicted:
                return
        held = governor is not None and governor.hold
        if self._steps == _MEASURED and held and not self._waits_for_others(session):
            held = False
            self._let_keep()
        if self._rounds < _ROUNDS and (self._steps > _MEASURED or held):
            self._advance(session, peak)
        elif held:
            self._release(session)
        trying = (governor is not None and governor.hold) or self._try_to_offload(session)
        if not self._cpu and not self._whole:
            torch.cuda.empty_cache()  # while blocks are recorded, nothing that is cached makes room
        self._mark()
        policies = self._policies()
        self._write_down(session, policies)
        if self._rounds >= _ROUNDS and not trying:
            session.adapting = False
            shared = len(self._paged) - len(self._settled)
            away = f", {n} offload them" if (n := policies.count("offload")) else ""
            session.events.add(
                f"settled after {self._steps} steps: {shared} groups are paged, {len(self._settled)} have "
                f"their optimizer on the host, {policies.count('keep')} of {len(policies)} blocks keep their "
                f"activations{away}; peak {format_bytes(peak)} of {format_bytes(self._limits.room)}"
            )
            self.stop()
            return_ram()  # what was tried has taken some that is needed no more
            if not self._paged and governor is None and not self._want.hooked:
                self._pager.detach()

    def _try_to_offload(self, session: Session) -> bool:
        """Say whether steps are still needed to find out how many blocks offload their activations."""
        spill = self._spill
        if spill is None:
            return False
        spill.tell = session.decide
        spill.measure_room()
        return self._rounds >= _ROUNDS and spill.after_step()

    def give_up_offloading(self) -> None:
        """Memory ran out while that was tried: blocks without room recompute."""
        if self._spill is not None:
            self._spill.give_up()

    def _captures(self) -> Captures | None:
        mode = self._pager.block_mode
        return None if mode is None else mode.captures

    def _look_at_recordings(self) -> None:
        """Find out whether all blocks are recorded that will be, and whether the latest step recorded any."""
        mode, captures = self._pager.block_mode, self._captures()
        if mode is None or captures is None:
            return
        made = captures.generation, captures.recordings
        # A form of inputs is looked at in one pass, recorded in the next and replayed from then on.
        self._whole = not captures.undecided(mode, self._pager.blocks)
        self._steady = self._whole and made == self._made
        self._made = made
        governor = self.governor
        if self._whole and governor is not None and governor.kept:
            governor.aside = 0  # such recordings are there, and were measured

    def _wait_until(self, reached: bool) -> bool:
        """Whether to wait for another step, which does not go on for ever."""
        waits = not reached and self._waited < _PATIENCE
        self._waited += waits
        return waits

    def _let_keep(self) -> None:
        """Let activations have what is left, beside the recordings of blocks that keep them."""
        governor, captures = self.governor, self._captures()
        if governor is not None:
            governor.hold = False
            governor.aside = captures.pool_bytes() if captures is not None else 0

    def _advance(self, session: Session, peak: int) -> None:
        """Go one round on, or be done."""
        if self._steps < _MEASURED:
            return
        self._high = max(self._high, peak)
        if not self._all_returns() and self._wait_until(self._whole):
            return
        self._rounds += 1
        room = self._limits.room - self._high - self._first_recordings()
        self._high = 0
        brought = self._bring_back(session, room)
        if brought:
            self._whole = self._steady = self._captures() is None
        if brought and self._rounds < _ROUNDS:
            return
        self._rounds = _ROUNDS
        if self.governor is not None and self.governor.hold and not brought:  # else by a step with them
            self._release(session)

    def _all_returns(self) -> bool:
        """Whether blocks are plain modules again in the end, so that nothing of them stays recorded."""
        if self.governor is not None or self._want.hooked:
            return False
        return set(self._choose(self._limits.room - self._high)[1]) == self._paged

    def _first_recordings(self) -> int:
        """Return what recordings of a block take whose weights do not stream, where there are none so far."""
        captures = self._captures()
        if captures is None or any(b.slot is None or b.slot.own for b in self._pager.blocks):
            return 0
        return captures.pool_bytes() // max(captures.shapes, 1)

    def _release(self, session: Session) -> None:
        """No weights return any more: activations have what is left, where keeping them saves time."""
        governor = self.governor
        streams = self._rate is not None and bool(self._paged - self._settled)
        if governor is None or (streams and self._wait_until(self._steady)):
            return
        self._rounds = _ROUNDS - 1  # one more step is measured with them
        share = self._share() if streams else 0.0
        link, computing, _ = self._times()
        if share <= LINK_BOUND or link < _BESIDE * computing or not self._steady:
            self._let_keep()
            return
        governor.hold = False
        size = (governor.passed - self._since[2]) / max(governor.passes - self._since[3], 1)
        longer = link / (_BESIDE * computing) if computing else 1.0
        governor.idle_to = round(size * longer) if computing else governor.largest
        self._spill = None
        session.decide(
            f"weights or activations: blocks recompute, as the link is busy for {share:.0%} of a step; so "
            f"they do with inputs up to {longer:.1f} times as long"
        )

    def _mark(self) -> None:
        """Begin to measure a step."""
        governor = self.governor
        passed = (governor.passed, governor.passes) if governor is not None else (0, 0)
        self._since = (time.perf_counter(), self._pager.host_bytes, *passed)

    def _times(self) -> tuple[float, float, float]:
        """Return seconds of the latest step: of the link, of computing as predicted (or 0.0), and in all."""
        since, moved, passed, passes = self._since
        governor = self.governor
        if governor is None or not self._rate:
            return 0.0, 0.0, 0.0
        computing = self._computing(governor.passed - passed, governor.passes - passes)
        link = (self._pager.host_bytes - moved) / self._rate
        return link, computing, time.perf_counter() - since

    def _share(self) -> float:
        """Return the share of a step like the latest one that the link is busy, once steps are steady.

        share = link / min(seconds of the step, max(link, computing as predicted))
        """
        link, computing, seconds = self._times()
        if not link:
            return 0.0
        seen = self._steady and link < _SEEN * seconds
        smooth = seconds if seen or not computing else min(seconds, max(link, computing))
        return min(link / smooth, 1.0)

    def _waits_for_others(self, session: Session) -> bool:
        """Whether a step waits for the link, or for the optimizer on the host, rather than for computation.

        Room then goes to weights and to the optimizer's state first: a byte of either saves more time than a
        byte of activations.
        """
        if self._settling or self._rate is None:
            return True
        share = self._share()
        if not self._steady and not self._times()[1]:
            return True  # nobody knows, but that they are moved
        session.decide(
            f"weights or activations: {'weights' if share > LINK_BOUND else 'activations'} have the room "
            f"first, as the link ({self._rate / 1e9:.1f} GB/s) is busy for {share:.0%} of a step"
        )
        return share > LINK_BOUND

    def _policies(self) -> list[str]:
        if self.governor is None:
            return list(self._want.policy)
        return [
            now if fallback is not None else asked
            for now, fallback, asked in zip(
                self.governor.policies, self._want.fallback, self._want.policy, strict=True
            )
        ]

    def _write_down(self, session: Session, policies: list[str]) -> None:
        """Let the session's plan say what holds now."""
        left = iter(policies)
        rows = []
        for index, row in enumerate(session.plan.blocks):
            tier = row.tier if index in self._paged else "device"
            optimizer = optimizer_tier(tier, bool(row.optimizer), self._tiers.device, index in self._settling)
            rows.append(
                dataclasses.replace(
                    row,
                    tier=tier,
                    policy=next(left) if row.kind == "block" else row.policy,
                    settled=index in self._settled,
                    optimizer=optimizer,
                )
            )
        paged, settled = frozenset(self._paged), frozenset(self._settled)
        layout = layout_of(self._specs, paged, self._limits.budgets, slots=self._slots, settled=settled)
        predicted = {
            **session.plan.predicted,  # the step that was predicted is that of the end: what settles returns
            "device": layout.device_bytes,
            "activations": self.governor.kept if self.governor is not None else 0,
            "host": layout.host_bytes,
            "disk": layout.disk_bytes,
        }
        slots = sum(not slot.own for slot in self._pager.slots)
        session.plan = dataclasses.replace(session.plan, blocks=tuple(rows), slots=slots, predicted=predicted)

    def _choose(self, room: int) -> tuple[list[int], list[int]]:
        """Say which units settle, and which return wholly, while `room` lasts.

        What streams is first, blocks before the groups around them; then the optimizer's state of what has
        settled, in the order in which the next pass needs it.
        """
        room += self._let_go_with_the_last(room)
        settling: list[int] = []
        returning: list[int] = []
        streaming = [i for i in sorted(self._paged - self._settled) if self._forced[i] is not True]
        for index in sorted(streaming, key=lambda i: self._specs[i].kind != "block"):
            spec = self._specs[index]
            cost = spec.slot if index in self._settling else spec.device
            if cost <= room:
                room -= cost
                (settling if index in self._settling else returning).append(index)
        if self._takes_over:
            due = sorted({*self._settled, *settling}, key=lambda i: self._specs[i].kind == "block")
            for index in due:
                cost = self._specs[index].device - self._specs[index].slot
                if cost <= room:
                    room -= cost
                    returning.append(index)
        returning = self._together(returning)
        return [index for index in settling if index not in returning], returning

    def _let_go_with_the_last(self, room: int) -> int:
        """What updates in the background may hold: nothing, once everything that streams has returned."""
        spare, needed = self._unseen(), sum(self._specs[index].device for index in self._paged)
        every = not any(self._forced[index] is True for index in self._paged)
        return spare if every and room < needed <= room + spare else 0

    def _together(self, returning: list[int]) -> list[int]:
        """Leave out units that have a Parameter in common with one that stays paged."""
        while True:
            staying = self._paged.difference(returning)
            chosen = [index for index in returning if not self._linked[index] & staying]
            if len(chosen) == len(returning):
                return chosen
            returning = chosen

    def _bring_back(self, session: Session, room: int) -> int:
        """Return units to the device while `room` lasts; say how many."""
        settling, returning = self._choose(room)
        if settling:
            if settle(session.events.add, self._pager, self._inventory, settling):
                let_go()
                self._settled.update(settling)
                session.events.add(f"{len(settling)} groups settle on {self._tiers.device}: there is room")
            else:
                settling = []
        returned = self._return(session, returning)
        return len(settling) + returned

    def _return(self, session: Session, chosen: list[int]) -> int:
        """Let units be resident from now on, with gradients and optimizer state; say how many have room."""
        count = 0
        left = list(chosen)
        while left:
            batch = self._all_linked(left)
            if not self._has_room(session, batch):
                break
            self._return_some(session, batch)
            left = [index for index in left if index not in batch]
            count += len(batch)
        if count:
            self._peak()  # what was tried is no step's need
            session.events.add(
                f"{count} groups return to {self._tiers.device}: the measured peak leaves room"
            )
        return count

    def _all_linked(self, left: list[int]) -> list[int]:
        """Return the first unit and those that must return with it, over however many others."""
        found, new = {left[0]}, {left[0]}
        while new:
            new = {other for index in new for other in self._linked[index] if other in left} - found
            found |= new
        return [index for index in left if index in found]

    def _has_room(self, session: Session, batch: list[int]) -> bool:
        """Try to allocate all that units take, which leaves the allocator with pieces of just these sizes.

        Bytes that are free are not always free in one piece.
        """
        if self._cpu:
            return True
        needed: list[Tensor] = []
        state = session.optimizer.state if isinstance(session.optimizer, OffloadAdamW) else {}
        for parameter in [p for index in batch for p in self._inventory.units[index].pageable]:
            with torch._C.DisableTorchFunctionSubclass():  # only its form is looked at: nothing escapes
                value: Any = parameter.detach()
            parts = list(value.packed.values()) if isinstance(value, QuantizedTensor) else [value]
            parts += parts if parameter.requires_grad else []
            needed += parts + [
                t for t in state.get(parameter, {}).values() if isinstance(t, Tensor) and t.dim()
            ]
        try:
            held = [torch.empty(t.shape, dtype=t.dtype, device=self._tiers.device) for t in needed]
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            session.events.add(f"{self._specs[batch[0]].name} stays paged: no room in one piece ({error})")
            return False
        del held
        return True

    def _return_some(self, session: Session, batch: list[int]) -> None:
        names = [name for index in batch for name, _ in self._inventory.units[index].modules]
        free: list[nn.Parameter] = []
        self._pager.unpage(names, free.append)
        self._tiers.to_host(free)
        bring_back(session.model, session.optimizer, {id(p): p for p in free}, self._tiers.device)
        if isinstance(session.optimizer, OffloadAdamW):
            session.optimizer.rehouse([p for p in free if p.requires_grad])
        self._paged.difference_update(batch)
        self._settled.difference_update(batch)
        let_go()
        if self.governor is not None:
            # Their gradients now come into being in backward, on the device.
            self.governor.expect(sum(self._specs[index].scratch for index in batch))
