"""Places in counts, made into plans: which policies the blocks of a placement may have at their best.

What `ts_core.search` bounds from below is worked out here, row by row of large tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cost import DEV, DISK, GPU_B, HOST, PIN, RUN_B, Tables
from .job import POLICIES, Choice, Job, Prediction, Room
from .step import measure, phases, prediction, totals

__all__ = [
    "NEVER",
    "ROWS",
    "WORK",
    "Best",
    "Stack",
    "alike",
    "exactly",
    "missing",
    "rows_each",
    "uniform",
    "worth",
]

_EXACT = 1e-6  # a plan that is better by less than this share is as good
ROWS = 60_000  # plans that are worked out at once
_MIXES = 3_000  # mixes of policies of a placement, up to which all are tried whatever the classes
WORK = 250_000  # plans that are worked out before one that is better by `_NEAR` is sought no more
_NEAR = 1e-3
NEVER = float("inf")


@dataclasses.dataclass
class Best:
    seconds: float = NEVER
    choice: Choice | None = None
    prediction: Prediction | None = None
    work: int = 0

    @property
    def below(self) -> float:
        """What a bound must be under for a plan to be worth working out."""
        return self.seconds * (1 - (_EXACT if self.work < WORK else _NEAR))


@dataclasses.dataclass(frozen=True)
class Stack:
    """The classes of the stack, and what their policies take."""

    axes: list[int]
    counts: Tensor
    keep: Tensor  # bytes on the device of one block that keeps
    again: Tensor  # of one that recomputes
    away: Tensor  # below the device of one that offloads
    seconds: Tensor  # of the device, for recomputing one
    launches: Tensor  # of the host, for the same

    @classmethod
    def of(cls, tab: Tables, cpu: bool) -> Stack:
        axes = [index for index, free in enumerate(tab.free) if free]
        policy = tab.policy[axes]
        return cls(
            axes,
            torch.tensor([tab.counts[a] for a in axes], dtype=torch.float64),
            policy[:, 0, DEV],
            policy[:, 2, DEV],
            policy[:, 1, DISK if cpu else HOST],
            policy[:, 2, GPU_B],
            policy[:, 2, RUN_B],
        )


def worth(values: Tensor, sizes: Tensor, counts: Tensor, room: Tensor) -> Tensor:
    """Return what fits of blocks worth `values` seconds each, were they divisible: the best a byte first."""
    total = torch.zeros_like(room)
    left = room
    for index in torch.argsort(values / sizes.clamp(min=1.0), descending=True).tolist():
        size = float(sizes[index])
        share = (left / size).clamp(min=0.0, max=float(counts[index])) if size > 0 else counts[index]
        total = total + share * values[index]
        left = left - share * max(size, 0.0)
    return total


def missing(columns: Tensor, room: Room) -> Tensor:
    """Return the bytes that RAM or its page-locked part are short of."""
    host = room.host or 0
    lock = host if room.page_lock is None else room.page_lock
    return torch.maximum(columns[:, HOST] - host, columns[:, PIN] - lock)


# ------------------------------------------------------------------------------------------------ exact


def _combinations(sizes: Sequence[int]) -> int:
    return math.prod(size + 1 for size in sizes)


def _all_mixes(counts: Sequence[int]) -> int:
    """Return how many mixes of policies there are, the share of the largest class being worked out."""
    return _combinations(counts) * _combinations(sorted(counts)[:-1])


def _mixes(counts: Sequence[int]) -> bool:
    """Whether all mixes of policies are tried."""
    return len(counts) <= 2 or _all_mixes(counts) <= _MIXES


def rows_each(tab: Tables) -> int:
    """Return how many plans belong to one placement."""
    counts = [n for n, free in zip(tab.counts, tab.free, strict=True) if free]
    mixes = _all_mixes(counts) if counts else 1
    return 2 * (mixes if _mixes(counts) else len(_orders(len(counts))) ** 2 * (sum(counts) + 1))


def _orders(classes: int) -> list[tuple[int, ...]]:
    """Return orders in which classes may be served, by their place in the order of seconds a byte."""
    forth = tuple(range(classes))
    return [forth, forth[::-1], forth[1:] + forth[:1]]


def exactly(tab: Tables, place: Tensor, room: Room, job: Job, best: Best) -> None:
    """Work out the best policies of these placements."""
    place, policy = _policies(tab, place, room, job, best)
    if room.host is not None and len(place):
        place, policy = _into_files(tab, place, policy, room)
        best.work += len(place)
    if not len(place):
        return
    _take(tab, place, policy, room, best)


def uniform(tab: Tables, place: Tensor, room: Room, job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield these placements with the same policy for all blocks, for each policy."""
    stack = Stack.of(tab, room.host is None)
    for index, name in enumerate(POLICIES):
        if name in job.policies:
            policy = torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
            policy[:, stack.axes, index] = stack.counts
            rows = place, policy
            if room.host is not None:
                rows = _into_files(tab, place, policy, room)
            if len(rows[0]):
                yield rows


def alike(tab: Tables, place: Tensor, room: Room, job: Job, best: Best) -> None:
    """Try these placements with the same policy for all blocks."""
    for rows in uniform(tab, place, room, job):
        _take(tab, *rows, room, best)


def _take(tab: Tables, place: Tensor, policy: Tensor, room: Room, best: Best) -> None:
    """Remember the fastest of these plans that fits, if it is faster than what was found before."""
    cpu = room.host is None
    found = measure(tab, place, policy, cpu=cpu)
    seconds = torch.where(found.fits(room), found.seconds, NEVER)
    index = int(torch.argmin(seconds))
    if float(seconds[index]) < best.seconds:
        best.seconds = float(seconds[index])
        places = [tuple(int(n) for n in row) for row in place[index].tolist()]
        policies = [tuple(int(n) for n in row) for row in policy[index].tolist()]
        best.choice = Choice(tab.setting, tuple(places), tuple(policies))  # type: ignore[arg-type]
        one = slice(index, index + 1)
        best.prediction = prediction(tab, measure(tab, place[one], policy[one], cpu=cpu), cpu=cpu)


def _grid(*sizes: int) -> Tensor:
    """Return all combinations of numbers from 0 to each size: [combinations, sizes]."""
    axes = [torch.arange(size + 1, dtype=torch.float64) for size in sizes]
    return torch.cartesian_prod(*axes).reshape(-1, len(sizes)) if axes else torch.zeros(1, 0).double()


def _policies(tab: Tables, place: Tensor, room: Room, job: Job, best: Best) -> tuple[Tensor, Tensor]:
    """Return placements and policies, a row for each plan that may be the best of its placement."""
    stack = Stack.of(tab, room.host is None)
    if not stack.axes:
        return place, torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
    counts = [int(n) for n in stack.counts]
    if _mixes(counts):
        grid = _grid(*[n if "offload" in job.policies else 0 for n in counts])
        place, off = _promising(tab, stack, place, grid, room, job, best)
        place, keep, off = _every_mix(tab, stack, counts, place, off, room, job)
    else:
        place, keep, off = _in_orders(tab, stack, place, room, job, best)
    best.work += len(place)
    policy = torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
    policy[:, stack.axes, 0] = keep
    policy[:, stack.axes, 1] = off
    policy[:, stack.axes, 2] = stack.counts - keep - off
    return place, policy


def _promising(
    tab: Tables, stack: Stack, place: Tensor, off: Tensor, room: Room, job: Job, best: Best
) -> tuple[Tensor, Tensor]:
    """Return all pairs of a placement and numbers that offload, but for those that cannot be the best."""
    cpu = room.host is None
    best.work += len(place) * len(off) // 3
    empty = torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
    columns, fill, alone = (t.repeat_interleave(len(off), dim=0) for t in totals(tab, place, empty, cpu=cpu))
    place, off = place.repeat_interleave(len(off), dim=0), off.repeat(len(place), 1)
    columns += off @ tab.policy[stack.axes, 1]
    rest = stack.counts - off
    slack = room.device - columns[:, DEV] - (rest * torch.minimum(stack.again, stack.keep)).sum(dim=1)
    if "recompute" in job.policies:
        for column, values in ((GPU_B, stack.seconds), (RUN_B, stack.launches)):
            again = (rest * values).sum(dim=1)
            if "keep" in job.policies:
                again = again - worth(values, stack.keep - stack.again, stack.counts, slack)
            columns[:, column] += again.clamp(min=0.0)
    good = (slack >= 0) & (columns[:, DISK] <= room.disk)
    if not (cpu or room.disk):
        good &= missing(columns, room) <= 0
    forward, backward = phases(tab, columns, alone, cpu=cpu)
    good &= fill + forward + backward < best.below
    return place[good], off[good]


def _every_mix(
    tab: Tables, stack: Stack, counts: list[int], place: Tensor, off: Tensor, room: Room, job: Job
) -> tuple[Tensor, Tensor, Tensor]:
    """Return placements with every number of blocks of the smaller classes that keep."""
    large = max(range(len(counts)), key=lambda i: counts[i])
    others = [i for i in range(len(counts)) if i != large]
    grid = _grid(*[counts[i] for i in others])
    kept = grid.repeat(len(off), 1)
    place = place.repeat_interleave(len(grid), dim=0)
    off = off.repeat_interleave(len(grid), dim=0)
    full = stack.counts[others]
    fine = (kept + off[:, others] <= full).all(dim=1)
    if "recompute" not in job.policies:
        fine &= (kept + off[:, others] == full).all(dim=1)
    if "keep" not in job.policies:
        fine &= (kept == 0).all(dim=1)
    place, off = place[fine], off[fine]
    keep = _fill(tab, stack, place, off, kept[fine], large, room, job)
    return torch.cat([place, place]), keep, torch.cat([off, off])


def _fill(
    tab: Tables,
    stack: Stack,
    place: Tensor,
    off: Tensor,
    kept: Tensor,
    large: int,
    room: Room,
    job: Job,
) -> Tensor:
    """Keep as many blocks of the largest class as there is room for; then again with none recomputed."""
    keep = torch.zeros_like(off)
    keep[:, [i for i in range(off.shape[1]) if i != large]] = kept
    left = stack.counts[large] - off[:, large]
    every = keep.clone()
    every[:, large] = left
    if "recompute" not in job.policies:
        return torch.cat([every, every])
    some = keep.clone()
    if "keep" in job.policies:
        each = float(stack.keep[large] - stack.again[large])
        base = _device_bytes(tab, stack, place, keep, off, room)
        spare = torch.floor((room.device - base) / each) if each > 0 else left
        some[:, large] = torch.minimum(spare.clamp(min=0.0), (left - 1).clamp(min=0.0))
    else:
        every = torch.where((left == 0).unsqueeze(1), every, some)
    return torch.cat([some, every])


def _device_bytes(tab: Tables, stack: Stack, place: Tensor, keep: Tensor, off: Tensor, room: Room) -> Tensor:
    policy = torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
    policy[:, stack.axes, 0] = keep
    policy[:, stack.axes, 1] = off
    policy[:, stack.axes, 2] = stack.counts - keep - off
    return totals(tab, place, policy, cpu=room.host is None)[0][:, DEV]


def _in_orders(
    tab: Tables, stack: Stack, place: Tensor, room: Room, job: Job, best: Best
) -> tuple[Tensor, Tensor, Tensor]:
    """Return placements with 0, 1, 2, ... blocks that offload, class by class in a few orders."""
    total = int(stack.counts.sum()) if "offload" in job.policies else 0
    ratio = torch.argsort(stack.seconds / stack.keep.clamp(min=1.0), descending=True).tolist()
    orders = [[ratio[i] for i in order] for order in _orders(len(ratio))]
    places, keeps, offs = [], [], []
    for first in orders:
        left = torch.arange(total + 1, dtype=torch.float64)
        off = torch.zeros(total + 1, len(ratio), dtype=torch.float64)
        for axis in first:
            off[:, axis] = torch.minimum(left, stack.counts[axis])
            left = left - off[:, axis]
        rows, off = _promising(tab, stack, place, off, room, job, best)
        for second in orders:
            for keep in _keep_in_order(tab, stack, rows, off, second, room, job):
                places.append(rows)
                keeps.append(keep)
                offs.append(off)
    return torch.cat(places), torch.cat(keeps), torch.cat(offs)


def _keep_in_order(
    tab: Tables, stack: Stack, place: Tensor, off: Tensor, order: Sequence[int], room: Room, job: Job
) -> Iterator[Tensor]:
    """Yield how many blocks keep: all that do not offload, and what there is room for, class by class."""
    every = stack.counts - off
    if "keep" in job.policies:
        yield every
    if "recompute" not in job.policies:
        return
    keep = torch.zeros_like(off)
    if "keep" in job.policies:
        spare = room.device - _device_bytes(tab, stack, place, keep, off, room)
        each = (stack.keep - stack.again).clamp(min=1.0)
        for axis in order:
            fits = torch.floor(spare.clamp(min=0.0) / each[axis])
            keep[:, axis] = torch.minimum(fits, every[:, axis])
            spare = spare - keep[:, axis] * each[axis]
    yield keep


# ------------------------------------------------------------------------------------------------ files


def _into_files(tab: Tables, place: Tensor, policy: Tensor, room: Room) -> tuple[Tensor, Tensor]:
    """Move what RAM has no room for into files: the fewest of the largest class, with any of the others."""
    columns = totals(tab, place, policy, cpu=False)[0]
    short = missing(columns, room) > 0
    if not bool(short.any()):
        return place, policy
    low = [i for i, n in enumerate(tab.allowed) if "host" in n and "disk" in n]
    if not room.disk or not low:  # what may go to neither stays too large
        return place[~short], policy[~short]
    size = tab.place[:, 2, HOST]
    large = max(low, key=lambda i: float(size[i]) * tab.counts[i])
    others = [i for i in low if i != large]
    sizes = [tab.counts[i] for i in others]
    while _combinations(sizes) > 256:  # several classes in the stack: all or nothing of the others
        sizes[sizes.index(max(sizes))] = 1
    steps = [tab.counts[i] // n for i, n in zip(others, sizes, strict=True)]
    grid = _grid(*sizes) * torch.tensor(steps, dtype=torch.float64)
    moved, pairs = [place[~short]], [policy[~short]]
    for start in range(0, int(short.sum()), max(1, ROWS // len(grid))):
        rows = torch.nonzero(short).flatten()[start : start + max(1, ROWS // len(grid))]
        some = place[rows].repeat_interleave(len(grid), dim=0)
        goes = grid.repeat(len(rows), 1)
        fine = (goes <= some[:, others, 2]).all(dim=1)
        some, goes = some[fine], goes[fine]
        same = policy[rows].repeat_interleave(len(grid), dim=0)[fine]
        some[:, others, 2] -= goes
        some[:, others, 3] += goes
        over = totals(tab, some, same, cpu=False)[0]
        moved.append(_fewest(tab, some, over, room, large))
        pairs.append(same)
    return torch.cat(moved), torch.cat(pairs)


def _fewest(tab: Tables, place: Tensor, columns: Tensor, room: Room, large: int) -> Tensor:
    """Move as few groups of the largest class as it takes."""
    host = room.host or 0
    lock = host if room.page_lock is None else room.page_lock
    # The first of them may need a wider ring, and more memory for copies.
    wider = torch.zeros(len(place), dtype=torch.float64)
    for sizes in (tab.ring, tab.copies):
        now = (sizes * (place[:, :, 3] > 0)).amax(dim=1)
        wider += (sizes[large] - now).clamp(min=0.0)
    need = torch.zeros(len(place), dtype=torch.float64)
    for column, limit in ((HOST, host), (PIN, lock)):
        over = columns[:, column] - limit
        each = float(tab.place[large, 2, column])
        if each > 0:
            count = torch.ceil((over + wider) / each)
            need = torch.maximum(need, torch.where(over > 0, count, 0.0))
    need = torch.minimum(need.clamp(min=0.0), place[:, large, 2])
    result = place.clone()
    result[:, large, 2] -= need
    result[:, large, 3] += need
    return result
