"""`session.set_budget`: other limits for a run that is under way."""

from __future__ import annotations

import dataclasses
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from trainstream._budget import Limits, cap_device, context_bytes, limits
from trainstream._copies import use_fast_copies
from trainstream._paging import Tiers
from trainstream._places import Places
from trainstream._tuner import Tuner
from ts_core.errors import DoesNotFitError
from ts_core.memory import format_bytes
from ts_core.planner import Layout, layout_of, least, place
from ts_core.usage import CONTEXT_BYTES, keep_heap_tight, release_free_memory
from ts_optim import OffloadAdamW

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Size", "set_budget"]

Size = int | str | None | EllipsisType


def set_budget(session: Session, vram: Size, ram: Size, disk: Size) -> None:
    """Do what `Session.set_budget` says."""
    places = session.relief.places
    asked = {"vram_budget": vram, "ram_budget": ram, "disk_budget": disk}
    changed: dict[str, Any] = {
        name: value for name, value in asked.items() if not isinstance(value, EllipsisType)
    }
    options = dataclasses.replace(places.options, **changed)
    if isinstance(session.optimizer, OffloadAdamW):
        session.optimizer.synchronize()
    device, folder = places.tiers.device, Tiers.folder(options.disk_offload)
    bounds = limits(session.model, session.optimizer, device, options, folder, places.limits.others)
    layout = _least_layout(places, bounds)
    places.tiers.set_budget(options.disk_budget)
    before, places.limits, places.options, session.options = places.limits, bounds, options, options
    session.relief.pause_adapting()
    use_fast_copies(device, options)
    _make_room(session, bounds, layout)
    if device.type == "cpu":
        if bounds.cap is not None:
            keep_heap_tight()
        release_free_memory()
    else:
        torch.cuda.empty_cache()
        cap_device(device, bounds.device_cap)
    _adapt_again(session, places, bounds)
    places.write_down(session)
    if device.type == "cpu" and options.vram_budget is not None and "vram_budget" in changed:
        session.events.add(f"vram={format_bytes(options.vram_budget)} ignored: the model computes on the CPU")
    session.events.add(
        f"budgets: {format_bytes(bounds.room)} of {'RAM' if device.type == 'cpu' else 'the device'} can be "
        f"used, {format_bytes(before.room)} before: the next steps are measured; then groups return and "
        "activations stay as room allows"
    )


def _least_layout(places: Places, bounds: Limits) -> Layout:
    """Return the layout with everything paged that can be.

    Raises:
        DoesNotFitError: Not even that fits; nothing is changed.
    """
    specs, free = places.decided.specs, set(places.removable())
    paged = [index in free or index in places.paged for index in range(len(specs))]
    kept = frozenset(i for i in places.settled if i not in free)
    slots = places.options.prefetch_depth + 1
    try:
        return place(specs, bounds.budgets, forced=paged, slots=slots, settled=kept)
    except DoesNotFitError as error:
        cpu = places.tiers.device.type == "cpu"
        smallest = least(specs, forced=paged, settled=kept)
        beside = 4 << 20 if cpu else context_bytes(places.tiers.device) or CONTEXT_BYTES
        need = int(smallest * 1.3) + bounds.others + beside
        raise DoesNotFitError(
            f"session.set_budget: {error}. What would help: {'ram' if cpu else 'vram'} of at least "
            f"{format_bytes(need)}. Nothing is changed"
        ) from error


def _make_room(session: Session, bounds: Limits, layout: Layout) -> None:
    """Let units leave, as far as a step takes more than may be used now."""
    places = session.relief.places
    over = _measured(session) - bounds.room
    if over > 0:
        session.relief.make_room(over, f"{format_bytes(bounds.room)} may be used from now on")
    if places.tiers.device.type == "cpu":
        return
    now = layout_of(places.decided.specs, frozenset(places.paged), bounds.budgets, slots=layout.slots)
    rows = session.plan.blocks
    moving = {i: t for i, t in enumerate(now.tiers) if i in places.paged and t != rows[i].tier}
    if moving:
        places.evict(session, [*moving], moving)


def _measured(session: Session) -> int:
    """Return what a step takes with no activations kept, as far as that is known; else more than there is."""
    places = session.relief.places
    governor = session.tuner.governor if session.tuner is not None else None
    if places.tiers.device.type == "cuda" and session.steps:
        kept = governor.kept if governor is not None else 0
        return int(torch.cuda.max_memory_allocated(places.tiers.device)) - kept
    needed = governor.need(1.0) if governor is not None else None
    return places.limits.used() + needed if needed is not None else 1 << 62


def _adapt_again(session: Session, places: Places, bounds: Limits) -> None:
    """Measure anew, and let groups return by that."""
    if not places.inventory.blocks:
        return
    pager = places.pager_of(session)
    decided = dataclasses.replace(places.decided, adapts=True, governed=True)
    tuner = Tuner(pager, places.inventory, decided, places.want, places.tiers, bounds, options=places.options)
    tuner.follow(places)
    session.tuner, session.adapting = tuner, True
    tuner.start()
