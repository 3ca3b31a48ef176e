"""One step under a plan, or under many at once: seconds, the limiter and bytes of every tier.

`measure` adds up the tables of `ts_core.cost`; `predict` does so for one plan.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .constants import constants
from .cost import (
    ACT,
    ADAM,
    D2H_B,
    D2H_F,
    DEV,
    DISK,
    GPU_B,
    GPU_F,
    H2D_B,
    H2D_F,
    HOST,
    IO_B,
    IO_F,
    PIN,
    RUN_B,
    RUN_F,
    WIDTH,
    Tables,
    tables,
)
from .errors import ArgumentError, message
from .hardware import HardwareProfile
from .job import Choice, Job, Prediction, Room
from .live import Live
from .spec import ModelSpec

__all__ = ["Totals", "measure", "phases", "predict", "prediction", "totals"]


@dataclasses.dataclass(frozen=True)
class Totals:
    """What many plans take, each a row.

    Attributes:
        columns: [plans, columns].
        fill: [plans]: seconds before the first block can compute.
        alone: [plans]: whether nothing comes while a block computes.
        seconds: [plans]: of a step.
    """

    columns: Tensor
    fill: Tensor
    alone: Tensor
    seconds: Tensor

    def fits(self, room: Room) -> Tensor:
        """Return for each plan whether no tier holds more than may be used of it."""
        host = room.host if room.host is not None else 0
        lock = host if room.page_lock is None else room.page_lock
        limits = ((DEV, room.device), (HOST, host), (PIN, lock), (DISK, room.disk))
        good = torch.ones(len(self.columns), dtype=torch.bool)
        for column, limit in limits:
            good &= self.columns[:, column] <= limit
        return good


def _most(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).amax(dim=1) if values.numel() else torch.zeros(len(where), dtype=torch.float64)


def _recordings(tab: Tables, place: Tensor, cpu: bool) -> Tensor:
    """Return what captured blocks hold on the device."""
    if tab.recorded is None:
        return torch.zeros(len(place), dtype=torch.float64)
    below, here = place[:, :, 2] + place[:, :, 3], place[:, :, 0] + place[:, :, 1]
    fixed, pair, sorts, ways = tab.recorded.unbind(dim=1)
    structures = torch.minimum(below, sorts * ways) + torch.minimum(here, sorts * ways)
    held = (structures * fixed).sum(dim=1)
    if not cpu:
        return held + tab.pool
    # One pair for each slot, and one for each block that has its weights to itself.
    pairs = torch.minimum(below, (tab.setting.slots + sorts - 1) * ways) + here
    return held + (pairs * pair).sum(dim=1)


def totals(tab: Tables, place: Tensor, policy: Tensor, *, cpu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the columns, maxima included; return them, the seconds of filling, and what is alone."""
    count = len(place)
    columns = place.flatten(1) @ tab.place.reshape(-1, WIDTH)
    columns = columns + policy.flatten(1) @ tab.policy.reshape(-1, WIDTH) + tab.fixed
    stack = torch.tensor(tab.block)
    below = place[:, :, 2] + place[:, :, 3]
    paged = (below > 0) & stack
    shared = below[:, stack].sum(dim=1) if bool(stack.any()) else torch.zeros(count, dtype=torch.float64)
    used = shared.clamp(max=float(tab.setting.slots))
    files = place[:, :, 3] > 0
    away = place[:, :, 1:].sum(dim=2) > 0
    again, off = policy[:, :, 2] > 0, policy[:, :, 1] > 0
    device = used * _most(tab.slot, paged) + _most(tab.slot, (below > 0) & ~stack)
    device = device + (used - 1).clamp(min=1.0) * _most(tab.staged, below > 0) + _most(tab.grads, away)
    device = device + _recordings(tab, place, cpu)
    moving = torch.maximum(_most(tab.saved, again), 2 * _most(tab.saved, off)).clamp(min=tab.moving)
    moving = (moving + tab.work).clamp(min=tab.logits)
    device = device + moving
    columns[:, ACT] += moving
    columns[:, DEV] += device
    copies = _most(tab.copies, files)
    if cpu:
        columns[:, DEV] += copies
    else:
        ring = _most(tab.ring, files)
        columns[:, HOST] += ring + copies
        columns[:, PIN] += ring
    if tab.last >= 0:  # what the slots hold when a pass turns does not come again
        rest = (place[:, tab.last, 2] - 1).clamp(min=0.0, max=float(tab.setting.slots))
        held = rest * tab.stored[tab.last] * tab.reloads
        columns[:, H2D_B] -= held
        if tab.frozen_last:
            columns[:, H2D_F] -= held
    h2d, _, _, read = tab.rates
    first = _most(tab.stored, paged)
    fill = _most(tab.stored, files) / read
    if not (cpu or tab.frozen_last):
        fill = fill + first / h2d
    alone = (shared > 0) if tab.setting.slots == 1 else torch.zeros(count, dtype=torch.bool)
    return columns, fill, alone


def link_seconds(tab: Tables, h2d: Tensor, d2h: Tensor) -> Tensor:
    """Return the seconds that the link takes for bytes both ways."""
    to, back, both, _ = tab.rates
    return torch.maximum(torch.maximum(h2d / to, d2h / back), (h2d + d2h) / both)


def phases(tab: Tables, columns: Tensor, alone: Tensor, *, cpu: bool) -> tuple[Tensor, Tensor]:
    """Return the seconds of the forward and of the backward phase."""
    found, beside = [], constants().beside
    for gpu, run, to, back, disk in (
        (GPU_F, RUN_F, H2D_F, D2H_F, IO_F),
        (GPU_B, RUN_B, H2D_B, D2H_B, IO_B),
    ):
        compute = torch.maximum(columns[:, gpu], columns[:, run])
        moving = columns[:, disk]
        if not cpu:
            link = link_seconds(tab, columns[:, to], columns[:, back])
            if gpu == GPU_F:  # the slots are full while no block computes
                link = link + torch.minimum(columns[:, to] / tab.rates[0], torch.tensor(tab.outside))
            moving = torch.maximum(moving, link)
        seconds = torch.where(alone, compute + moving, torch.maximum(compute, moving))
        if gpu == GPU_F:
            seconds = torch.maximum(seconds, columns[:, ADAM])
            moving = moving + columns[:, ADAM]
        found.append(seconds + beside * moving)
    return found[0], found[1]


def measure(tab: Tables, place: Tensor, policy: Tensor, *, cpu: bool = False) -> Totals:
    """Say what many plans take.

    Args:
        tab: The tables of their setting.
        place: [plans, classes, 4]: groups of each class on ``device``, ``settled``, ``host`` and ``disk``.
        policy: [plans, classes, 3]: blocks of each class that ``keep``, ``offload`` and ``recompute``.
        cpu: As for `tables`.

    Returns:
        Their totals.
    """
    columns, fill, alone = totals(tab, place.double(), policy.double(), cpu=cpu)
    forward, backward = phases(tab, columns, alone, cpu=cpu)
    return Totals(columns, fill, alone, fill + forward + backward)


def predict(
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    choice: Choice,
    *,
    cpu: bool = False,
    live: Live | None = None,
) -> Prediction:
    """Say what one plan takes.

    Args:
        spec: The model.
        job: What is trained.
        hardware: Rates.
        choice: The plan.
        cpu: Whether the model computes in RAM.
        live: What is known of a live model beside its spec.

    Returns:
        Seconds, what limits them, and bytes of every tier.

    Raises:
        ArgumentError: Counts that are not those of the spec's classes.

    Example:
        >>> from ts_core.job import Choice, Setting, assumed_profile
        >>> from ts_core.spec import TensorSpec, block_of
        >>> weight = TensorSpec("mlp.up_proj.weight", (64, 16), use="matmul")
        >>> spec = ModelSpec((block_of("layers.0", [weight], 16), block_of("layers.1", [weight], 16)))
        >>> choice = Choice(Setting(), ((2, 0, 0, 0),), ((2, 0, 0),))
        >>> predict(spec, Job(seq_len=8), assumed_profile(), choice).host_bytes
        0
    """
    tab = tables(spec, job, hardware, choice.setting, cpu=cpu, live=live)
    for name, rows in (("places", choice.places), ("policies", choice.policies)):
        wanted = [n if name == "places" or b else 0 for n, b in zip(tab.counts, tab.free, strict=True)]
        if [sum(row) for row in rows] != wanted:
            raise ArgumentError(message("predict", name, f"rows that add up to {wanted}", list(rows)))
    place = torch.tensor([choice.places], dtype=torch.float64)
    policy = torch.tensor([choice.policies], dtype=torch.float64)
    return prediction(tab, measure(tab, place, policy, cpu=cpu), cpu=cpu)


def prediction(tab: Tables, found: Totals, *, cpu: bool = False) -> Prediction:
    """Write out the first row of totals."""
    row = found.columns[0]
    to, back = tab.rates[:2]
    busy = {
        "gpu": float(row[GPU_F] + row[GPU_B]),
        "launch": float(row[RUN_F] + row[RUN_B]),
        "h2d": 0.0 if cpu else float(row[H2D_F] + row[H2D_B]) / to,
        "d2h": 0.0 if cpu else float(row[D2H_F] + row[D2H_B]) / back,
        "disk": float(row[IO_F] + row[IO_B]),
        "dram": float(row[ADAM]),
    }
    forward, backward = (float(p[0]) for p in phases(tab, found.columns, found.alone, cpu=cpu))
    lengths = {
        "gpu": (row[GPU_F], row[GPU_B]),
        "launch": (row[RUN_F], row[RUN_B]),
        "disk": (row[IO_F], row[IO_B]),
        "dram": (row[ADAM], row[ADAM] * 0),
    }
    if not cpu:
        lengths["link"] = (
            link_seconds(tab, row[H2D_F], row[D2H_F]),
            link_seconds(tab, row[H2D_B], row[D2H_B]),
        )
    # What ends last in a phase limits it; over the step, what limits it for longest.
    share = dict.fromkeys(lengths, 0.0)
    for index, seconds in enumerate((forward, backward)):
        share[max(lengths, key=lambda name: float(lengths[name][index]))] += seconds
    limiter = max(share, key=lambda name: share[name])
    if limiter == "link":
        limiter = "h2d" if busy["h2d"] >= busy["d2h"] else "d2h"
    seconds = float(found.seconds[0])
    return Prediction(
        step_s=seconds,
        tokens_per_s=tab.tokens / seconds if seconds else math.inf,
        limiter=limiter,
        busy_s=busy,
        device_bytes=round(float(row[DEV])),
        activation_bytes=round(float(row[ACT])),
        host_bytes=round(float(row[HOST])),
        page_locked_bytes=round(float(row[PIN])),
        disk_bytes=round(float(row[DISK])),
    )
