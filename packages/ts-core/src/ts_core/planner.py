"""The planner: which groups of parameters stay on the device and which are paged, within byte budgets.

A pure function over plain data: nothing here touches a model, a device or a file, and the same function is
asked before anything is allocated, and again when activations and temporaries have been measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from .errors import ArgumentError, DoesNotFitError
from .memory import format_bytes

__all__ = [
    "LEASES",
    "RING",
    "Budgets",
    "GroupSpec",
    "Layout",
    "from_files",
    "layout_of",
    "least",
    "place",
    "staged_bytes",
]

_MIXES = 4096  # sets of groups to try at most
#: Host memory that brings files to a GPU, in pieces (`ts_paging.ring`), and of copies of what is in files
#: while it is updated (`ts_paging.leases`); both at most, and less of what is smaller.
RING, LEASES = 32 << 20, 12 << 20


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """What one group of parameters (a block, the embedding, the head, ...) takes, in bytes.

    Attributes:
        name: Path of the group.
        kind: ``block``, ``embedding``, ``head``, ``norm`` or ``other``.
        fixed: On the device wherever the group is: adapters and buffers, their gradients and state.
        device: Beside that on the device while the group is resident: weights, gradients, state of their
            optimizer.
        host: On the host while the group is resident (state of its optimizer); 0 on a CPU run.
        paged: Below the device while it is paged: weights as stored, gradients, optimizer state.
        slot: Of its decoded weights in a slot; 0 if it is used without one (a frozen embedding).
        scratch: Transient on the device: the largest set of its gradients before they leave.
        pageable: Whether it can be paged at all.
        staged: Bytes that arrive packed, beside a slot, and are decoded into it.
        updated: Of `paged`, what an optimizer on the host works on; from files it uses copies.
    """

    name: str
    kind: str = "block"
    fixed: int = 0
    device: int = 0
    host: int = 0
    paged: int = 0
    slot: int = 0
    scratch: int = 0
    pageable: bool = True
    staged: int = 0
    updated: int = 0


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Bytes that may be used on each tier; on a CPU run `device` is RAM and `host` is None.

    Attributes:
        device: Memory that the model computes in.
        host: RAM under a GPU, or None where there is no such tier.
        disk: Files.
        page_lock: Bytes of `host` that can be page-locked, for the search; None: all. `place` does not ask:
            what cannot be is ordinary memory, whose copies are slower.
    """

    device: int
    host: int | None
    disk: int
    page_lock: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every group goes, and what that takes.

    Attributes:
        tiers: ``device``, ``host`` or ``disk`` of each group, in the order given.
        slots: Slots that paged blocks share; 0 if none is paged.
        device_bytes: Predicted on the device, the reserve included.
        host_bytes: Predicted on the host.
        disk_bytes: Predicted in files.
        settled: Indices of the paged groups that have a slot of their own.
    """

    tiers: tuple[str, ...]
    slots: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    settled: tuple[int, ...] = ()

    def fits(self, budgets: Budgets) -> bool:
        """Whether no tier holds more than may be used of it."""
        return not any(_excess(self, budgets))

    @property
    def paged(self) -> frozenset[int]:
        """Indices of the groups that are paged."""
        return frozenset(index for index, tier in enumerate(self.tiers) if tier != "device")


def place(
    groups: Sequence[GroupSpec],
    budgets: Budgets,
    *,
    reserve: int = 0,
    forced: Sequence[bool | None] | None = None,
    slots: int = 2,
    settled: frozenset[int] = frozenset(),
) -> Layout:
    """Page as few groups as the budgets allow.

    device = sum of fixed + sum of resident + slots x largest slot + one slot of the other groups
             + packed bytes that arrive + slots of their own + largest scratch + reserve

    Of what fits, the fewest bytes are paged, of blocks rather than of the groups around them; groups that
    take the same are spread evenly, so that each has a resident neighbour to arrive behind. Paged groups fill
    the host first, in order, then the disk.

    Args:
        groups: In order of use.
        budgets: What may be used.
        reserve: Bytes of the device for activations and temporaries.
        forced: For each group True (page it), False (keep it) or None (as needed).
        slots: Slots of the stack; fewer are taken only if nothing fits otherwise.
        settled: Indices of groups that have a slot of their own if they are paged.

    Returns:
        The layout.

    Raises:
        DoesNotFitError: No layout fits; the message has the bytes of the least one.
        ArgumentError: `forced` does not match, or asks to page what cannot be, or `slots` is below 1.

    Example:
        >>> blocks = [GroupSpec(f"layers.{i}", device=100, paged=100, slot=100) for i in range(4)]
        >>> place(blocks, Budgets(device=350, host=None, disk=1000)).tiers
        ('disk', 'disk', 'disk', 'device')
    """
    wanted = list(forced) if forced is not None else [None] * len(groups)
    if len(wanted) != len(groups):
        raise ArgumentError(f"[place] forced: expected {len(groups)} entries, given {len(wanted)}")
    for group, force in zip(groups, wanted, strict=True):
        if force and not group.pageable:
            raise ArgumentError(f"[place] forced: {group.name!r} cannot be paged")
    if slots < 1:
        raise ArgumentError(f"[place] slots: expected at least 1, given {slots}")
    best = None
    for count in range(slots, 0, -1):
        for paged in _choices(groups, wanted, settled):
            layout = _layout(groups, paged, budgets, count, reserve, settled)
            if layout.fits(budgets):
                return layout
            best = _nearer(best, layout, budgets)
    assert best is not None  # there is always a choice: nothing more than what is forced
    raise DoesNotFitError(_refusal(best, budgets, reserve))


def layout_of(
    groups: Sequence[GroupSpec],
    paged: frozenset[int],
    budgets: Budgets,
    *,
    slots: int = 2,
    settled: frozenset[int] = frozenset(),
    reserve: int = 0,
) -> Layout:
    """Say what a given choice of paged groups takes.

    Args:
        groups: As for `place`.
        paged: Indices of the groups that are paged.
        budgets: Decide which of them are on the host.
        slots: Slots of the stack.
        settled: As for `place`.
        reserve: As for `place`.

    Returns:
        The layout, whether it fits or not.

    Example:
        >>> block = GroupSpec("a", device=100, paged=100, slot=100)
        >>> layout_of([block, block], frozenset({0}), Budgets(1000, None, 1000)).device_bytes
        200
    """
    return _layout(groups, paged, budgets, slots, reserve, settled)


def least(
    groups: Sequence[GroupSpec],
    *,
    forced: Sequence[bool | None] | None = None,
    settled: frozenset[int] = frozenset(),
) -> int:
    """Return the bytes of the device that the smallest layout takes, without any reserve.

    Args:
        groups: As for `place`.
        forced: As for `place`.
        settled: As for `place`.

    Returns:
        Bytes.

    Example:
        >>> least([GroupSpec("a", device=100, paged=100, slot=100)] * 4)
        100
    """
    wanted = list(forced) if forced is not None else [None] * len(groups)
    unlimited = Budgets(1 << 62, None, 1 << 62)
    return min(
        _layout(groups, p, unlimited, 1, 0, settled).device_bytes for p in _choices(groups, wanted, settled)
    )


def staged_bytes(slots: int, largest: int) -> int:
    """Return the bytes on the device that arrive packed at once: of each block that is fetched ahead.

    Args:
        slots: Slots that are used.
        largest: Packed bytes of the largest block that comes through them.

    Example:
        >>> staged_bytes(3, 100)
        200
    """
    return max(slots - 1, 1) * largest


def from_files(brought: int, updated: int, *, cpu: bool) -> int:
    """Return the memory that work with files takes, beside slots.

    Args:
        brought: Bytes of the largest group that comes from them.
        updated: Bytes of the largest that an optimizer updates there.
        cpu: Whether they come to RAM: straight into a slot.

    Example:
        >>> from_files(100 << 20, 0, cpu=False) >> 20, from_files(0, 1 << 20, cpu=True) >> 20
        (32, 1)
    """
    ring = 0 if cpu else min(RING, brought)
    return ring + min(LEASES, updated)


def _choices(
    groups: Sequence[GroupSpec], forced: Sequence[bool | None], settled: frozenset[int]
) -> list[frozenset[int]]:
    """List the sets of paged groups to try, fewest bytes first.

    Groups that take the same are interchangeable, so it is enough to try every number of each sort. Where
    there are too many sorts for that, it is the blocks first, then the groups around them, and the reverse.
    """
    always = frozenset(i for i, force in enumerate(forced) if force)
    sorts: dict[tuple[GroupSpec, bool], list[int]] = {}
    for i, force in enumerate(forced):
        if force is None and groups[i].pageable:
            sorts.setdefault((dataclasses.replace(groups[i], name=""), i in settled), []).append(i)
    if math.prod(len(members) + 1 for members in sorts.values()) <= _MIXES:
        counts = itertools.product(*[range(len(members) + 1) for members in sorts.values()])
        sets = [
            always.union(*[_spread(members, n) for members, n in zip(sorts.values(), mix, strict=True)])
            for mix in counts
        ]
    else:
        sets = [always | chosen for chosen in _in_order(groups, sorted(itertools.chain(*sorts.values())))]

    def cost(chosen: frozenset[int]) -> tuple[int, int]:
        return sum(groups[i].device for i in chosen), sum(groups[i].kind != "block" for i in chosen)

    return sorted(dict.fromkeys(sets), key=cost)


def _spread(members: Sequence[int], count: int) -> frozenset[int]:
    """Take so many of them, at even distances."""
    return frozenset(members[i * len(members) // count] for i in range(count))


def _in_order(groups: Sequence[GroupSpec], free: Sequence[int]) -> list[frozenset[int]]:
    """List a few sets, where all of them are too many: linear in the number of groups."""
    blocks = [i for i in free if groups[i].kind == "block"]
    edges = sorted((i for i in free if groups[i].kind != "block"), key=lambda i: -groups[i].device)
    sets = [_spread(blocks, count) for count in range(len(blocks) + 1)]
    sets += [frozenset(blocks) | set(edges[:count]) for count in range(1, len(edges) + 1)]
    # Where blocks are large and the head is small, paging only the edges can be the better way round.
    sets += [frozenset(edges[:count]) for count in range(1, len(edges) + 1)]
    # One slot serves many small groups better than a few large ones: leave out what is the largest.
    for size in ("slot", "scratch"):
        rising = sorted(free, key=lambda i: getattr(groups[i], size))
        sets += [frozenset(rising[:count]) for count in range(1, len(free) + 1)]
    return sets


def _layout(
    groups: Sequence[GroupSpec],
    paged: frozenset[int],
    budgets: Budgets,
    slots: int,
    reserve: int,
    settled: frozenset[int],
) -> Layout:
    settled &= paged
    sharing = paged - settled
    in_slots = [groups[i].slot for i in sharing if groups[i].kind == "block"]
    around = [groups[i].slot for i in sharing if groups[i].kind != "block"]
    used = min(slots, len(in_slots))
    device = reserve + sum(g.fixed for g in groups) + used * max(in_slots, default=0)
    device += sum(groups[i].slot for i in settled)
    device += max(around, default=0) + max((groups[i].scratch for i in paged), default=0)
    device += staged_bytes(used, max((groups[i].staged for i in sharing), default=0))
    device += sum(g.device for i, g in enumerate(groups) if i not in paged)
    host = sum(g.host for i, g in enumerate(groups) if i not in paged)
    cpu = budgets.host is None
    tiers = _fill(groups, paged, None if cpu else (budgets.host or 0) - host)
    if not cpu and "disk" in tiers:  # what brings it from there needs host memory too
        most = _for_files([groups[i] for i in paged], cpu)
        tiers = _fill(groups, paged, (budgets.host or 0) - host - most)
    host += sum(g.paged for g, tier in zip(groups, tiers, strict=True) if tier == "host")
    files = [g for g, tier in zip(groups, tiers, strict=True) if tier == "disk"]
    disk, more = sum(g.paged for g in files), _for_files(files, cpu)
    if cpu:  # where all is RAM, copies are made in no more than an eighth of it
        more = min(more, max(budgets.device, 0) // 8)
    device, host = (device + more, host) if cpu else (device, host + more)
    return Layout(tuple(tiers), used, device, host, disk, tuple(sorted(settled)))


def _fill(groups: Sequence[GroupSpec], paged: frozenset[int], room: int | None) -> list[str]:
    """Put paged groups into host memory, in order, while there is room, and the others into files."""
    tiers = []
    for index, group in enumerate(groups):
        if index not in paged:
            tiers.append("device")
        elif room is not None and group.paged <= room:
            room -= group.paged
            tiers.append("host")
        else:
            tiers.append("disk")
    return tiers


def _for_files(groups: Sequence[GroupSpec], cpu: bool) -> int:
    brought = max((max(g.slot, g.staged) for g in groups), default=0)
    return from_files(brought, max((g.updated for g in groups), default=0), cpu=cpu)


def _excess(layout: Layout, budgets: Budgets) -> tuple[int, int, int]:
    host = 0 if budgets.host is None else max(layout.host_bytes - budgets.host, 0)
    return (
        max(layout.device_bytes - budgets.device, 0),
        host,
        max(layout.disk_bytes - budgets.disk, 0),
    )


def _nearer(best: Layout | None, layout: Layout, budgets: Budgets) -> Layout:
    if best is None or sum(_excess(layout, budgets)) < sum(_excess(best, budgets)):
        return layout
    return best


def _left(limit: int) -> str:
    if limit < 0:
        return f"where the limit is {format_bytes(-limit)} below what is taken or kept free already"
    return f"where {format_bytes(limit)} may be used" if limit else "where none may be used"


def _refusal(layout: Layout, budgets: Budgets, reserve: int) -> str:
    parts = []
    names = ("RAM", "", "disk") if budgets.host is None else ("the device", "RAM", "disk")
    needs = (layout.device_bytes, layout.host_bytes, layout.disk_bytes)
    limits = (budgets.device, budgets.host or 0, budgets.disk)
    for name, need, limit, over in zip(names, needs, limits, _excess(layout, budgets), strict=True):
        if over:
            parts.append(f"{format_bytes(need)} of {name} {_left(limit)}")
    held = f", {format_bytes(reserve)} of them for activations and temporaries" if reserve else ""
    return f"the least that it takes is {' and '.join(parts)}{held}"
