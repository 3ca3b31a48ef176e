"""Byte budgets of one wrapped model: what it may use on each tier, and what it uses now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstream import _session
from trainstream._copies import give_back, page_lock
from trainstream._options import WrapOptions
from ts_core import memory, registry
from ts_core.headroom import arena_growth, unplanned
from ts_core.memory import format_bytes
from ts_core.planner import Budgets
from ts_core.usage import CONTEXT_BYTES, device_usage, host_usage, release_free_memory
from ts_optim.gradients import gradient_of
from ts_paging.arena import HostArena
from ts_paging.files import locate
from ts_quant import QuantizedTensor

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = [
    "Limits", "cap_device", "context_bytes", "corrected", "host_used", "keep_to_budget", "limits",
    "return_ram", "return_unused_slabs",
]  # fmt: skip

_NOTICED = 4 << 20  # bytes from which on a limit follows what is held beside PyTorch


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may be used.

    Attributes:
        budgets: For the planner: bytes for this model and its training.
        cap: Limit of `used`, or None where nothing was asked for.
        used: Returns what is in use now on the compute tier, by the measure that `cap` is meant in.
        room: `cap` less a margin, what the governor plans with.
        device_cap: Bytes that PyTorch may reserve on the GPU, where ``vram_budget`` was given.
        others: Bytes that something else in this process uses of the budget already.
        hard: On a CPU run, what `used` may not exceed in any case; None: `room`.
        vram_budget: What was given; then `cap` is that, less what the process holds beside PyTorch's memory.
        free: Bytes that the GPU has for this model, whatever the budget.
        share: Of what may be used, what is planned with.
    """

    budgets: Budgets
    cap: int | None
    used: Callable[[], int]
    room: int
    device_cap: int | None = None
    others: int = 0
    hard: int | None = None
    vram_budget: int | None = None
    free: int = 0
    share: float = 1.0


def cap_device(device: torch.device, cap: int | None) -> None:
    """Let PyTorch reserve no more than this on a GPU; None lifts the limit."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else min(cap / total, 1.0), device)


def context_bytes(device: torch.device) -> int | None:
    """Return what this process holds of a GPU beside what PyTorch has reserved; None if nobody can say.

    That is the CUDA context, the code and the workspaces of libraries, and what recorded graphs take.
    """
    found = device_usage(device)
    if not found.source.startswith("nvml"):
        return None
    return max(found.used_bytes - int(torch.cuda.memory_reserved(device)), 0)


def corrected(bounds: Limits, device: torch.device) -> Limits:
    """Return limits of a GPU that leave room for what the process really holds beside PyTorch's memory.

    Args:
        bounds: The limits until now.
        device: The GPU.

    Returns:
        Others, or the same ones where there is no budget, nobody can say, or next to nothing has changed.
    """
    if bounds.vram_budget is None or bounds.cap is None:
        return bounds
    held = context_bytes(device)
    if held is None:
        return bounds
    cap = max(bounds.vram_budget - held, 0)
    if abs(cap - bounds.cap) < _NOTICED:
        return bounds
    usable = max(int(min(bounds.free, cap - bounds.others) * bounds.share), 0)
    return dataclasses.replace(
        bounds,
        budgets=dataclasses.replace(bounds.budgets, device=usable),
        cap=cap,
        room=min(usable + bounds.others, cap),
        device_cap=cap,
    )


def keep_to_budget(session: Session, bounds: Limits, device: torch.device, peak: int) -> tuple[Limits, bool]:
    """Let a session keep to its budget by what it holds of the GPU in all, between two steps.

    What has no room within the corrected limits leaves the device; then the session adapts no more.

    Args:
        session: What adapts.
        bounds: Its limits until now.
        device: The GPU.
        peak: Bytes that the latest step took.

    Returns:
        The limits from now on, and whether anything had to leave.
    """
    found = corrected(bounds, device)
    if found is bounds or found.cap is None:
        return bounds, False
    session.relief.places.limits = found
    governor = session.tuner.governor if session.tuner is not None else None
    kept = 0
    if governor is not None:
        governor.limit = governor.room = found.room
        kept = governor.kept
    if torch.cuda.memory_reserved(device) > found.cap:
        torch.cuda.empty_cache()
    cap_device(device, found.device_cap)
    held = (found.vram_budget or 0) - found.cap
    session.events.add(
        f"vram_budget: this process holds {format_bytes(held)} of {device} beside PyTorch's memory: "
        f"{format_bytes(found.room)} can be used, {format_bytes(bounds.room)} before"
    )
    over = max(found.used() - found.room, peak - kept - found.cap)
    why = "what libraries hold of the device counts for vram_budget"
    return found, over > 0 and session.relief.make_room(over, why) > 0


def return_ram() -> None:
    """Return RAM that nothing is in any more: slabs, what the C library keeps, tensors held in cycles."""
    give_back()
    release_free_memory(collect=True)


def return_unused_slabs() -> None:
    """Return page-locked slabs that have held nothing for many steps; called once a step."""
    arena = registry.host_allocator()
    if isinstance(arena, HostArena):
        arena.trim_unused()


def host_used() -> int:
    """Return anonymous and shared memory above the value just after ``import trainstream``."""
    return max(host_usage().used_bytes - _session.baseline_bytes, 0)


class _Meter:
    """Reads what is used, and gives freed heap back before it adds up.

    Memory that was freed between tensors that live longer stays with the C library, in holes that the next
    tensors do not always fit; asked often enough, it keeps them from growing into the budget.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._least = cap // 2
        self._next = self._least

    def __call__(self) -> int:
        used = host_used()
        if used > self._next:
            release_free_memory(collect=used > self._cap)
            used = host_used()
            self._next = max(self._least, min(used + self._cap // 16, self._cap))
        return used


def _in_ram(tensor: Any) -> int:
    """Bytes of a CPU tensor that are not in one of our files."""
    if isinstance(tensor, QuantizedTensor):
        return sum(_in_ram(part) for part in (*tensor.packed.values(), *(tensor.error_factors or ())))
    if tensor.device.type != "cpu" or locate(tensor.detach()) is not None:
        return 0
    return int(tensor.numel() * tensor.element_size())


def _tensors(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    held = [*model.parameters(), *model.buffers()]
    held += [grad for t in held if (grad := gradient_of(t)) is not None]
    if optimizer is not None:
        held += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return held


def limits(
    model: nn.Module,
    optimizer: Optimizer | None,
    device: torch.device,
    options: WrapOptions,
    directory: str,
    others: int | None = None,
) -> Limits:
    """Work out the limits from options, environment and what the machine has free now.

    Args:
        model: As it is before it is wrapped: its own tensors do not count as used by others.
        optimizer: The optimizer given to `wrap()`; the same holds for its state.
        device: Where the model computes.
        options: The budgets and the headroom.
        directory: Where files would be made.
        others: Bytes that something else in this process uses, where that is known: of a model that is
            wrapped already, slots and buffers are neither its tensors nor others'.
    """
    tensors = _tensors(model, optimizer)
    own_ram = sum(_in_ram(t) for t in tensors)
    disk = memory.disk_budget(directory)
    if options.disk_budget is not None:
        disk = min(disk, options.disk_budget)
    cpu = device.type == "cpu"
    outside = others if others is not None and cpu else max(host_used() - own_ram, 0)
    ram = memory.host_budget().available_bytes + own_ram
    if options.ram_budget is not None:
        ram = min(ram, options.ram_budget - outside)
    if cpu:
        spare = unplanned(ram, sum(t.numel() * t.element_size() for t in tensors))
        cap = options.ram_budget
        most = cap if cap is not None else outside + max(ram, 0)
        budgets = Budgets(ram - spare, None, disk)
        return Limits(budgets, cap, _Meter(most), most - spare, others=outside, hard=most)
    found = _device_limits(tensors, device, options, ram, disk, others)
    return dataclasses.replace(
        found, budgets=dataclasses.replace(found.budgets, page_lock=page_lock(options, own_ram))
    )


def _device_limits(
    tensors: list[Tensor],
    device: torch.device,
    options: WrapOptions,
    ram: int,
    disk: int,
    others: int | None = None,
) -> Limits:
    own = sum(t.numel() * t.element_size() for t in tensors if t.device == device)
    allocated = torch.cuda.memory_allocated(device)
    fresh = others is None
    if others is None:
        others = max(allocated - own, 0)
    else:
        own = max(allocated - others, own)
    now = memory.device_budget(device)
    free = now.available_bytes + now.cached_bytes + own
    cap = None
    share = 1 - options.vram_headroom
    usable = int(free * share)
    if options.vram_budget is not None:
        held = context_bytes(device)
        if fresh or held is None:  # libraries load more of their code with the first steps
            held = max(held or 0, CONTEXT_BYTES)
        cap = max(options.vram_budget - held, 0)
        usable = int(min(free, cap - others) * share)

    def used() -> int:
        return torch.cuda.memory_allocated(device)

    room = usable + others
    return Limits(
        Budgets(usable, ram - arena_growth(ram), disk), cap, used, room, cap, others,
        vram_budget=options.vram_budget, free=free, share=share,
    )  # fmt: skip
