"""The page-locked arena and the copy engine that a GPU run uses, one of each in a process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import ts_paging
from trainstream._options import WrapOptions
from ts_core import registry
from ts_core.blocks import parameter_bytes
from ts_core.headroom import arena_growth
from ts_paging.arena import HostArena, lockable_bytes, slab_bytes_from_env

__all__ = ["give_back", "let_go", "page_lock", "reserve", "use_fast_copies"]

_INFLIGHT = 1 << 30
_LEAST_SLAB = 16 << 20
_SLABS_OF_A_BUDGET = 16  # so that the last slab, half empty, takes little of it


def use_fast_copies(device: torch.device, options: WrapOptions) -> None:
    """Put ts-paging's arena and copy engine in the place of torch's, once a GPU is used.

    Args:
        device: Where the model computes.
        options: ``max_inflight_bytes``, ``host_arena`` and ``ram_budget``.
    """
    if device.type != "cuda":
        return
    inflight = options.max_inflight_bytes
    if inflight is None:
        inflight = min(_INFLIGHT, torch.cuda.get_device_properties(device).total_memory // 10)
    engine = registry.copy_engine()
    if not isinstance(engine, ts_paging.CopyEngine) or engine.max_inflight_bytes != inflight:
        registry.set_copy_engine(ts_paging.CopyEngine(max_inflight_bytes=inflight))
    allocator = registry.host_allocator()
    if options.host_arena is False:
        if not isinstance(allocator, ts_paging.PinnedAllocator):
            registry.set_host_allocator(ts_paging.PinnedAllocator())
        return
    named, ceiling = _ceiling(options)
    if not isinstance(allocator, HostArena) or allocator.ceiling_bytes != ceiling:
        slab = slab_bytes_from_env()
        if ceiling is not None:
            slab = max(min(slab, ceiling // _SLABS_OF_A_BUDGET), _LEAST_SLAB)
        allocator = HostArena(ceiling=ceiling, slab_bytes=slab)
        registry.set_host_allocator(allocator)
    if named is not None:
        allocator.reserve(named)


def _ceiling(options: WrapOptions) -> tuple[int | None, int | None]:
    """Return what ``host_arena`` names, and what all slabs may take."""
    named = None if options.host_arena in ("auto", None) else int(options.host_arena)
    return named, options.ram_budget if named is None else named


def page_lock(options: WrapOptions, own: int) -> int | None:
    """Return the bytes that a model may have page-locked, by the limits that the arena keeps to.

    Args:
        options: ``host_arena`` and ``ram_budget``.
        own: Bytes of the model that are in RAM already; they make room when they move.

    Returns:
        Bytes, less what the arena's last slab may waste; None where each tensor is page-locked by itself.
    """
    if options.host_arena is False:
        return None
    arena = registry.host_allocator()
    stats = arena.stats() if isinstance(arena, HostArena) else None
    reserved, live = (0, 0) if stats is None else (stats.reserved_bytes, stats.live_bytes)
    most = lockable_bytes() + own + reserved - live
    _, ceiling = _ceiling(options)
    if ceiling is not None:
        most = min(most, ceiling - max(live - own, 0))
    most = max(most, 0)
    return most - arena_growth(most)


def reserve(paged: Iterable[Tensor]) -> None:
    """Have page-locked memory made for weights that leave the device and for their gradients, meanwhile."""
    arena = registry.host_allocator()
    if isinstance(arena, HostArena):
        more = sum(parameter_bytes(p) * (2 if p.requires_grad else 1) for p in paged)
        arena.reserve(arena.live_bytes + more)


def let_go() -> None:
    """Wait for the copies under way and let go of what they moved: slots and gradients of the latest step.

    The engine holds the tensors of a copy until it sees that it is through, and looks when the next one is
    issued. Where nothing streams any more, there may be no next one.
    """
    engine = registry.copy_engine()
    if isinstance(engine, ts_paging.CopyEngine):
        engine.synchronize()


def give_back() -> None:
    """Return page-locked slabs that hold nothing any more."""
    let_go()
    arena = registry.host_allocator()
    if isinstance(arena, HostArena):
        arena.trim()
