"""The search: the plan with the least predicted step time, within hard budgets.

Blocks of a class are interchangeable, so a plan is a few counts: how many blocks of each class lie where, and
how many keep, offload or recompute their activations. For every setting (codec, moments, micro-batch,
schedule, slots) all counts of places are bounded from below at once; in the order of that bound the policies
are then worked out exactly, until no bound is below the best plan found. With up to two classes in the stack
that is exact, but for 0.1 % where very many plans are nearly as good. With more, activations are kept class
by class, in a few orders, unless the stack is small.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._mixes import NEVER, ROWS, WORK, Best, Stack, alike, exactly, missing, rows_each, uniform, worth
from .cost import D2H_F, DEV, DISK, GPU_B, H2D_B, HOST, IO_B, IO_F, RUN_B, Tables, tables
from .errors import DoesNotFitError
from .hardware import HardwareProfile
from .job import Choice, Job, Packing, Prediction, Room, Setting
from .live import Live
from .memory import format_bytes
from .spec import ModelSpec
from .step import measure, phases, totals

__all__ = ["Found", "choose", "search", "smallest"]

_MIB = 1 << 20
_TOP = 1 << 60
_FEW = 5_000
_MOST = 80_000  # placements of a setting that are looked at; above that, counts go in larger steps


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        choice: The plan in counts.
        prediction: What it takes.
        rank: Which codec and format of moments it is, and whether it needs files: lower is preferred.
        tried: Settings that were looked at.
    """

    choice: Choice
    prediction: Prediction
    rank: tuple[int, int, int]
    tried: int


def search(
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    room: Room,
    *,
    any_plan: bool = False,
    live: Live | None = None,
    state_below: bool = False,
) -> Found:
    """Find the fastest plan that no tier is too small for.

    With ``prefer="exact"`` the first codec and format of moments count that any plan fits with, in the order
    given (codec first; without files before with files where `spare_files`); of its plans the fastest is
    returned. With ``"speed"`` the codec is free. Where nothing fits, a single slot is tried.

    Args:
        spec: The model.
        job: What is trained, and what may be chosen.
        hardware: Rates.
        room: What may be used.
        any_plan: Whether the first plan that fits will do.
        live: What is known of a live model beside its spec.
        state_below: As for `ts_core.cost.tables`.

    Returns:
        The plan and what it takes.

    Raises:
        DoesNotFitError: There is no such plan; `ts_core.nearest.nearest` says what would help.

    Example:
        >>> from ts_core.job import assumed_profile
        >>> from ts_core.spec import TensorSpec, block_of
        >>> weight = TensorSpec("mlp.up_proj.weight", (64, 16), use="matmul")
        >>> spec = ModelSpec(tuple(block_of(f"layers.{i}", [weight], 16) for i in range(4)))
        >>> found = search(spec, Job(seq_len=8, lora_rank=1), assumed_profile(), Room(1 << 20, 1 << 20))
        >>> found.choice.places
        ((4, 0, 0, 0),)
    """
    cpu = room.host is None
    rooms = [room]
    if job.spare_files and not cpu and room.disk:
        rooms.insert(0, dataclasses.replace(room, disk=0))
    tried = 0
    for files, space in enumerate(rooms):
        for numerics in _numerics(job):
            for slots in (sorted(set(job.slots)), [1] if min(job.slots) > 1 else []):
                settings = [
                    Setting(packing, moments, micro, schedule, count)
                    for packing, moments in numerics
                    for micro in job.rows()
                    for schedule in job.schedules
                    for count in slots
                    if schedule == "microbatch" or micro < job.batch
                ]
                tried += len(settings)
                best = Best()
                asked = _Question(spec, job, hardware, space, live, state_below)
                _fastest(asked, settings, best, any_plan)
                if best.choice is not None and best.prediction is not None:
                    setting = best.choice.setting
                    packing, moments = setting.packing, setting.moments
                    rank = (files, job.packings.index(packing), job.moments.index(moments))
                    return Found(best.choice, best.prediction, rank, tried)
    raise DoesNotFitError(
        f"[search] no plan fits: the device has {format_bytes(max(room.device, 0))}"
        + ("" if cpu else f", RAM {format_bytes(max(room.host or 0, 0))}")
        + f", files {format_bytes(max(room.disk, 0))} for {format_bytes(spec.bytes)} of weights"
    )


def choose(
    spec: ModelSpec, job: Job, hardware: HardwareProfile, room: Room, live: Live | None = None
) -> Found:
    """Find the plan of a run: what `search` finds among those that it can start from.

    A run begins with the optimizer's state of large weights on the host, and it comes to the device once
    steps have been measured. So codec and moments are those that fit before that; for these, the fastest plan
    that can be come to in this way is returned.

    Args:
        spec: The model.
        job: What is trained, and what may be chosen.
        hardware: Rates.
        room: What may be used.
        live: What is known of a live model beside its spec.

    Returns:
        The plan and what it takes.

    Raises:
        DoesNotFitError: There is no such plan.
    """
    if room.host is None:
        return search(spec, job, hardware, room, live=live)
    found = search(spec, job, hardware, room, live=live, state_below=True)
    returns = not job.lora_rank if live is None else bool(live.settling) and live.returns
    if not returns:
        return found
    setting = found.choice.setting
    same = dataclasses.replace(job, packings=(setting.packing,), moments=(setting.moments,))
    later = search(spec, same, hardware, room, live=live)
    if not _can_start(tables(spec, same, hardware, later.choice.setting, live=live), later.choice, room):
        return found
    tried = found.tried + later.tried
    return dataclasses.replace(later, rank=(later.rank[0], *found.rank[1:]), tried=tried)


def _can_start(tab: Tables, choice: Choice, room: Room) -> bool:
    """Whether there is room for a plan while the state of all its optimizers is on the host."""
    place = torch.tensor([choice.places], dtype=torch.float64)
    for index, allowed in enumerate(tab.allowed):
        if "settled" in allowed:
            place[0, index, 1] += place[0, index, 0]
            place[0, index, 0] = 0
    policy = torch.tensor([choice.policies], dtype=torch.float64)
    return bool(measure(tab, place, policy).fits(room)[0])


def smallest(
    spec: ModelSpec, job: Job, hardware: HardwareProfile, room: Room, names: Sequence[str]
) -> Room | None:
    """Return about the least of some budgets that a plan fits with, the others as they are.

    Only plans with one policy for all blocks are looked at.

    Args:
        spec: The model.
        job: The first of each of its choices is taken.
        hardware: Rates.
        room: The budgets.
        names: Of those that may be larger: ``device``, ``host``, ``disk``.

    Returns:
        The budgets, or None if nothing fits.
    """
    cpu = room.host is None
    wide = dataclasses.replace(room, **{name: _TOP for name in names})
    setting = Setting(job.packings[0], job.moments[0], job.rows()[0], job.schedules[0], job.slots[0])
    tab = tables(spec, job, hardware, setting, cpu=cpu, state_below=not cpu)
    place = _placements(tab, cpu, _FEW)
    columns = [{"device": DEV, "host": HOST, "disk": DISK}[name] for name in names]
    least: list[float] | None = None
    for start in range(0, len(place), ROWS):
        for rows in uniform(tab, place[start : start + ROWS], wide, job):
            found = measure(tab, *rows, cpu=cpu)
            taken = found.columns[found.fits(wide)][:, columns]
            if len(taken):
                row = taken[int(taken.sum(dim=1).argmin())].tolist()
                least = row if least is None or sum(row) < sum(least) else least
    if least is None:
        return None
    sizes = {name: -(-int(size) // _MIB) * _MIB for name, size in zip(names, least, strict=True)}
    return dataclasses.replace(room, **{n: max(size, getattr(room, n) or 0) for n, size in sizes.items()})


def _numerics(job: Job) -> Iterator[list[tuple[Packing, str]]]:
    """Go through the sets of codec and moments that compete on time, preferred ones first."""
    if job.prefer == "speed":
        for moments in job.moments:
            yield [(packing, moments) for packing in job.packings]
        return
    for packing in job.packings:
        for moments in job.moments:
            yield [(packing, moments)]


@dataclasses.dataclass(frozen=True)
class _Question:
    """What is asked for."""

    spec: ModelSpec
    job: Job
    hardware: HardwareProfile
    room: Room
    live: Live | None = None
    state_below: bool = False

    def tables(self, setting: Setting) -> Tables:
        """Work out the tables of a setting."""
        cpu = self.room.host is None
        return tables(
            self.spec, self.job, self.hardware, setting, cpu=cpu, live=self.live, state_below=self.state_below
        )


def _fastest(asked: _Question, settings: Sequence[Setting], best: Best, any_plan: bool) -> None:
    """Put the fastest plan of these settings into `best`."""
    room, job = asked.room, asked.job
    cpu = room.host is None
    queue = []
    hopeless: list[Setting] = []
    for setting in sorted(settings, key=lambda s: (s.slots, s.micro)):
        # More rows at once and more slots only take more memory.
        if any(_takes_more(setting, other) for other in hopeless):
            continue
        tab = asked.tables(setting)
        place = _placements(tab, cpu, _MOST)
        bound = _bound(tab, place, room, job, 4)
        near = torch.isfinite(bound)
        if not bool(near.any()):
            hopeless.append(setting)
            continue
        queue.append((float(bound[near].min()), tab, place[near], bound[near]))
        if any_plan:
            _look(queue[-1:], room, job, best, any_plan)
            if best.choice is not None:
                return
    if not any_plan:
        _look(queue, room, job, best, any_plan)


def _takes_more(setting: Setting, other: Setting) -> bool:
    """Whether what does not fit with `other` does not fit with `setting` either."""
    same = dataclasses.replace(setting, micro=other.micro, slots=other.slots) == other
    return same and setting.micro >= other.micro and setting.slots >= other.slots


_Queue = list[tuple[float, Tables, Tensor, Tensor]]


def _look(queue: _Queue, room: Room, job: Job, best: Best, any_plan: bool) -> None:
    """Work out what the bounds of these settings leave open."""
    queue.sort(key=lambda entry: entry[0])
    for least, tab, place, bound in queue:
        if least >= best.below:
            break
        order = torch.argsort(bound)
        step = max(1, ROWS // rows_each(tab))
        for start in range(0, len(order), 512):
            part = order[start : start + 512]
            part = part[bound[part] < best.below]
            if not len(part):
                break
            finer = _bound(tab, place[part], room, job, 64)
            part = part[torch.argsort(finer)]
            finer = finer.sort().values
            for begin in range(0, len(part), step):
                chunk = part[begin : begin + step][finer[begin : begin + step] < best.below]
                if not len(chunk):
                    break
                exactly(tab, place[chunk], room, job, best)
                if best.work > 2 * WORK or (any_plan and best.choice is not None):
                    return _or_any(queue, room, job, best)


def _or_any(queue: _Queue, room: Room, job: Job, best: Best) -> None:
    """Where nothing was found in time, see whether a plan fits with one policy for all blocks."""
    if best.choice is not None:
        return
    for _, tab, place, _ in queue:
        for start in range(0, len(place), ROWS):
            alike(tab, place[start : start + ROWS], room, job, best)


# ------------------------------------------------------------------------------------------- placements


def _compositions(count: int, allowed: Sequence[str], low: str, step: int) -> list[tuple[int, int, int, int]]:
    """List the ways to divide so many groups among the places; what is below the device is all in one."""
    numbers = sorted({*range(0, count + 1, step), count})
    settled = numbers if "settled" in allowed else [0]
    lows = numbers if low in allowed else [0]
    found = []
    for beside, below in itertools.product(settled, lows):
        if beside + below <= count and ("device" in allowed or beside + below == count):
            row = [count - beside - below, beside, 0, 0]
            row[2 if low == "host" else 3] = below
            found.append((row[0], row[1], row[2], row[3]))
    return found


def _placements(tab: Tables, cpu: bool, most: int) -> Tensor:
    """Return [placements, classes, 4]: all, or so many with counts in larger steps."""
    return _all_placements(tab.counts, tab.allowed, tab.block, cpu, most)


@functools.lru_cache(maxsize=4)
def _all_placements(
    counts: tuple[int, ...],
    places: tuple[tuple[str, ...], ...],
    stack: tuple[bool, ...],
    cpu: bool,
    most: int,
) -> Tensor:
    low = "disk" if cpu else "host"
    step = 1
    while True:
        ways = [
            _compositions(count, allowed, low, step if block else 1)
            for count, allowed, block in zip(counts, places, stack, strict=True)
        ]
        total = 1
        for way in ways:
            total *= len(way)
        if total <= most or step >= max(counts):
            break
        step += 1
    index = torch.arange(total)
    columns = []
    for way in ways:
        columns.append(torch.tensor(way, dtype=torch.float64)[index % len(way)])
        index = torch.div(index, len(way), rounding_mode="floor")
    return torch.stack(columns, dim=1)


# ------------------------------------------------------------------------------------------------ bound


def _bound(tab: Tables, place: Tensor, room: Room, job: Job, pieces: int) -> Tensor:
    """Return for each placement seconds that no plan with it is below; infinite if it cannot fit.

    Offloaded bytes are taken as continuous, in pieces: within one the link has at least the bytes of its
    lower end, and at least what its upper end leaves is recomputed.
    """
    cpu = room.host is None
    empty = torch.zeros(len(place), len(tab.counts), 3, dtype=torch.float64)
    columns, fill, alone = totals(tab, place, empty, cpu=cpu)
    stack = Stack.of(tab, cpu)
    good = _may_fit(tab, columns, room, job, stack)
    result = torch.full((len(place),), NEVER, dtype=torch.float64)
    if not bool(good.any()):
        return result
    columns, fill, alone = columns[good], fill[good], alone[good]
    total = float((stack.counts * stack.away).sum()) if "offload" in job.policies else 0.0
    # What RAM has no room for is in files: weights that had to make room for activations too.
    short = missing(columns, room) if not cpu else columns[:, DISK] - room.disk
    spills = bool(room.disk) and not cpu
    most = torch.full_like(short, room.host or 0) if spills else -short
    most = most.clamp(min=0.0, max=total)
    slack = (room.device - columns[:, DEV] - (stack.counts * stack.again).sum()).clamp(min=0.0)
    least = torch.full_like(short, NEVER)
    pieces = pieces if total else 1
    for piece in range(pieces):
        low, high = most * piece / pieces, most * (piece + 1) / pieces
        trial = _with_activations(tab, columns, stack, slack, low, high, job, cpu)
        if spills:
            for column in (IO_F, IO_B):
                trial[:, column] += (short + low).clamp(min=0.0) * _read_rate(tab, column)
        forward, backward = phases(tab, trial, alone, cpu=cpu)
        least = torch.minimum(least, fill + forward + backward)
    result[good] = torch.where(_holds(columns, stack, most, room, job), least, NEVER)
    return result


def _holds(columns: Tensor, stack: Stack, most: Tensor, room: Room, job: Job) -> Tensor:
    """Return where the device has room for activations, of which so many bytes can be offloaded."""
    ways = [w for name, w in (("keep", stack.keep), ("recompute", stack.again)) if name in job.policies]
    if not ways or not stack.axes:
        return torch.ones_like(most, dtype=torch.bool)
    each = torch.stack(ways).amin(dim=0)
    freed = float((each / stack.away.clamp(min=1.0)).max())
    return columns[:, DEV] + (stack.counts * each).sum() - most * freed <= room.device


def _read_rate(tab: Tables, column: int) -> float:
    """Return the least seconds a byte that moves from RAM to files."""
    low = tab.place[:, 2, HOST]
    rates = [float(tab.place[i, 3, column] / low[i]) for i in range(len(low)) if low[i] > 0]
    return min(rates, default=0.0)


def _may_fit(tab: Tables, columns: Tensor, room: Room, job: Job, stack: Stack) -> Tensor:
    """Return which placements have a chance."""
    cpu = room.host is None
    ways = []
    if "keep" in job.policies:
        ways.append(stack.keep)
    if "recompute" in job.policies:
        ways.append(stack.again)
    if "offload" in job.policies:
        ways.append(torch.zeros_like(stack.keep))
    least = float((stack.counts * torch.stack(ways).amin(dim=0)).sum()) if len(stack.axes) else 0.0
    good = (columns[:, DEV] + least <= room.device) & (columns[:, DISK] <= room.disk)
    if not cpu:
        good &= missing(columns, room) <= room.disk
    return good


def _with_activations(
    tab: Tables,
    columns: Tensor,
    stack: Stack,
    slack: Tensor,
    low: Tensor,
    high: Tensor,
    job: Job,
    cpu: bool,
) -> Tensor:
    """Return the columns with at least what offloading between `low` and `high` bytes adds."""
    trial = columns.clone()
    if not stack.axes:
        return trial
    link = tab.policy[stack.axes, 1]
    each = stack.away.clamp(min=1.0)
    for column in (IO_F, IO_B) if cpu else (D2H_F, H2D_B):
        trial[:, column] += low * float((link[:, column] / each).min())
    if "recompute" in job.policies:
        freed = float((stack.again / each).max()) if "offload" in job.policies else 0.0
        for column, values in ((GPU_B, stack.seconds), (RUN_B, stack.launches)):
            saved = torch.zeros_like(slack)
            if "keep" in job.policies:
                sizes = stack.keep - stack.again
                saved = saved + worth(values, sizes, stack.counts, slack + high * freed)
            if "offload" in job.policies:
                saved = saved + worth(values, stack.away, stack.counts, high)
            trial[:, column] += ((stack.counts * values).sum() - saved).clamp(min=0.0)
    return trial
