"""Byte budgets of one wrapped model: what it may use on each tier, and what it uses now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstream import _session
from trainstream._copies import page_lock
from trainstream._options import WrapOptions
from ts_core import memory
from ts_core.headroom import arena_growth, unplanned
from ts_core.planner import Budgets
from ts_core.usage import CONTEXT_BYTES, host_usage, release_free_memory
from ts_optim.gradients import gradient_of
from ts_paging.files import locate
from ts_quant import QuantizedTensor

__all__ = ["Limits", "host_used", "limits"]


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
    """

    budgets: Budgets
    cap: int | None
    used: Callable[[], int]
    room: int
    device_cap: int | None = None
    others: int = 0
    hard: int | None = None


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
    if others is None:
        others = max(allocated - own, 0)
    else:
        own = max(allocated - others, own)
    now = memory.device_budget(device)
    free = now.available_bytes + now.cached_bytes + own
    cap = None
    if options.vram_budget is not None:
        cap = max(options.vram_budget - CONTEXT_BYTES, 0)
        free = min(free, cap - others)
    usable = int(free * (1 - options.vram_headroom))

    def used() -> int:
        return torch.cuda.memory_allocated(device)

    room = usable + others
    return Limits(Budgets(usable, ram - arena_growth(ram), disk), cap, used, room, cap, others)
