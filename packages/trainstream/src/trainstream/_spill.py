"""How many blocks may offload their activations to RAM, by what was measured: room there, and time.

Offloading costs RAM and time on the link, recomputing costs computation. What RAM gives is bounded by what is
free when the first step is over; what time it may cost is found out by trying: one step in which every block
without room on the device recomputes, then one in which some of them offload instead. Where the first one
waits for the link as it is, nothing is tried: offloading would add to what is short.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from ts_core import memory, registry
from ts_core.memory import HostBudget, format_bytes
from ts_paging.arena import HostArena

__all__ = ["Spill", "ram_for_activations"]

_SHARE = 0.6  # of the RAM that is free
_FLOOR = 4 << 30  # stays untouched, or a tenth of all RAM if that is more
_TRIES = 3  # numbers of blocks that are tried
_PATIENCE = 8  # steps in all that are waited for until one is a measure
#: Share of a step that the link is busy, from which a step waits for it.
LINK_BOUND = 0.7


class Governor(Protocol):
    """The part of `ActivationGovernor` that is used here."""

    offloads: int | None
    ram: int | None
    flight: int

    offerable: int
    passed: int

    @property
    def measured(self) -> bool:
        """Whether a block's saved bytes are known."""
        ...

    @property
    def each_offloaded(self) -> int:
        """Bytes that one block takes in RAM."""
        ...

    def refresh(self) -> None:
        """Called after `offloads` was set."""
        ...


def arena_growth() -> int:
    """Return the bytes by which the page-locked arena may still grow beside what is asked of it."""
    arena = registry.host_allocator()
    if not isinstance(arena, HostArena):
        return 0  # each piece is made by itself
    stats = arena.stats()
    unused = max(stats.reserved_bytes - stats.live_bytes, 0)
    # Slabs on their way, and one that is begun for the last piece; what is free in those that are there
    # takes activations without growing.
    return max(stats.coming_bytes + arena.step_bytes - unused, 0)


def ram_for_activations(budget: HostBudget, growth: int, left: int | None = None) -> int:
    """Return the bytes of RAM that activations may take.

        min(60 % of what is free - growth, what is free - growth - max(10 % of RAM, 4 GiB))

    Args:
        budget: What this process may use; what is free is this rank's share, and so is the floor.
        growth: Bytes by which the page-locked arena may grow beside.
        left: What a RAM budget leaves; None where there is none.

    Returns:
        Bytes, 0 where there is no room.

    Example:
        >>> ram_for_activations(HostBudget(64 << 30, 40 << 30, None, ""), 1 << 30) >> 30
        23
    """
    free = budget.available_bytes
    floor = max(budget.whole_bytes // 10, _FLOOR) // budget.ranks
    room = min(int(_SHARE * free), free - floor) - growth
    return max(room if left is None else min(room, left), 0)


@dataclasses.dataclass
class Spill:
    """Decides for one governor; `after_step` is called after each step of a session that adapts.

    Attributes:
        governor: What is told how many blocks offload.
        slowdown: Share of the time of a step that offloading may add.
        tell: Told what was decided.
        left: Returns what a RAM budget leaves, or None.
        clock: Seconds.
        flight: Bytes of the device that copies under way may hold.
        steady: Whether the latest step is a measure: nothing was set up in it that later ones find there.
        link: Returns the share of the latest step, as it will be once it is steady, that the link is busy.
    """

    governor: Governor
    slowdown: float
    tell: Callable[[str], object] = lambda line: None
    left: Callable[[], int | None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    flight: int = 0
    steady: Callable[[], bool] = lambda: True
    link: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        """Begin with nothing known: nothing offloads until a step was measured."""
        self.governor.offloads = 0
        self.most: int | None = None
        self._count = self._tries = 0
        self._plain: float | None = None
        self._mark: tuple[float, int] | None = None
        self._warm = False
        self._waited = 0

    def measure_room(self) -> None:
        """Say once, as soon as the bytes of a block are known, for how many blocks RAM has room."""
        each = self.governor.each_offloaded
        if self.most is not None or not self.governor.measured:
            return
        budget = memory.host_budget()
        room = ram_for_activations(budget, arena_growth(), self.left())
        self.most = room // each if each else 0
        self.governor.ram = room
        if each:
            self.tell(
                f"activation_offload=auto: RAM has room for the activations of {self.most} blocks: "
                f"{format_bytes(each)} each, {format_bytes(room)} may be taken of "
                f"{format_bytes(budget.available_bytes)} that are free"
            )
        else:
            self.tell("activation_offload=auto: what a block saves is too small to offload")

    def after_step(self) -> bool:
        """Take the measure of a step; say whether another one is needed.

        The placement of weights stays as it is meanwhile.
        """
        seconds = self._seconds()
        if self._plain is None:
            if self._mark is None:
                self._count = min(self.most or 0, self.governor.offerable)
                if not self._count:
                    return False
                return self._again()  # how long a step takes in which these blocks recompute
            if seconds is None or self._unsteady():
                return self._again()
            share = self.link()
            if share > LINK_BOUND:
                self.give_up()
                self._said(
                    f"no block offloads: the link is busy for {share:.0%} of a step in which they recompute, "
                    "and would have more to move"
                )
                return False
            self._plain = seconds
            return self._offload(self._count)
        if self._warm:  # the first one has page-locked the memory that is used from then on
            self._warm = False
            return self._again()
        if seconds is None or self._unsteady():
            return self._again()
        cost = seconds / self._plain - 1.0
        if cost <= self.slowdown:
            self._said(f"{self._count} blocks offload; a step takes {max(cost, 0.0):.0%} longer by that")
            return False
        self._tries += 1
        fewer = min(int(self._count * self.slowdown / cost), self._count // 2)
        if self._tries >= _TRIES or not fewer:
            self.give_up()
            self._said(
                f"no block offloads: a step took {cost:.0%} longer with {self._count} of them, where "
                f"{self.slowdown:.0%} may be added (max_activation_slowdown); they recompute"
            )
            return False
        return self._offload(fewer)

    def give_up(self) -> None:
        """Let all of them recompute."""
        self.governor.offloads = 0
        self.governor.flight = 0
        self.governor.refresh()

    def _unsteady(self) -> bool:
        """Whether to wait for a step that is a measure, which does not go on for ever."""
        waits = not self.steady() and self._waited < _PATIENCE
        self._waited += waits
        return waits

    def _offload(self, count: int) -> bool:
        self._warm = self._tries == 0
        self._count = self.governor.offloads = count
        self.governor.flight = self.flight
        self.governor.refresh()
        return self._again()

    def _again(self) -> bool:
        self._mark = self.clock(), self.governor.passed
        return True

    def _seconds(self) -> float | None:
        """Return what a byte of input took since the last mark, or None if nothing passed."""
        if self._mark is None:
            return None
        start, passed = self._mark
        size = self.governor.passed - passed
        return (self.clock() - start) / size if size > 0 else None

    def _said(self, what: str) -> None:
        self.tell(f"activation_offload=auto: {what}")
