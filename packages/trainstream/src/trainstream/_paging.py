"""Placement of blocks: which are paged to which tier, and what happens to saved activations."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ts_paging
from trainstream._inventory import Inventory
from trainstream._options import WrapOptions
from ts_core import memory, registry
from ts_core.errors import DoesNotFitError, OptionError
from ts_core.memory import format_bytes
from ts_core.planner import Layout
from ts_paging.activations import ActivationStore, FileActivations, HostActivations
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.files import FileTensors, locate
from ts_paging.pager import WeightPager
from ts_paging.recording import captures_by_itself
from ts_quant import QuantizedTensor

__all__ = ["Asked", "Tiers", "asked", "captured", "start_paging", "to_offload"]

_AHEAD = 1 << 30
_SHARE_OF_RECORDINGS = 4  # of the device's budget, the inverse


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the options ask for, block by block.

    Attributes:
        paged: True, False, or None where the planner decides.
        policy: ``keep``, ``offload`` or ``recompute``.
        fallback: Where the policy is automatic, what a block falls back to when room is short; else None.
    """

    paged: tuple[bool | None, ...]
    policy: tuple[str, ...]
    fallback: tuple[str | None, ...]

    @property
    def hooked(self) -> bool:
        """Whether any policy needs the block runtime."""
        return any(policy != "keep" for policy in self.policy)


def _indices(name: str, value: Any, count: int) -> frozenset[int]:
    """Turn True, False, a share or a list into block indices; a share takes blocks evenly over the stack."""
    if isinstance(value, str) or value is False or value is None:
        return frozenset()
    if value is True:
        return frozenset(range(count))
    if isinstance(value, Sequence):
        wrong = [index for index in value if not 0 <= index < count]
        if wrong:
            raise OptionError(f"option {name}: the model has {count} blocks, given index {wrong[0]}")
        return frozenset(value)
    chosen = math.ceil(float(value) * count)
    return frozenset(index * count // chosen for index in range(chosen))


def to_offload(options: WrapOptions, count: int) -> frozenset[int]:
    """Return the blocks that `activation_offload` names: True leaves out the last one of `count`."""
    offload = _indices("activation_offload", options.activation_offload, count)
    return offload - {count - 1} if options.activation_offload is True else offload


def asked(options: WrapOptions, count: int, *, cpu: bool = True) -> Asked:
    """Read the placement options for a stack of `count` blocks.

    ``activation_offload=True`` leaves the last block's activations, which backward needs at once. A block
    named by `recompute` recomputes, whatever `activation_offload` says.

    Raises:
        OptionError: An index that the stack does not have, or paging of a model without blocks.
    """
    if not count:
        for name in ("param_offload", "recompute", "activation_offload"):
            if getattr(options, name) not in ("auto", False, 0.0, []):
                raise OptionError(f"option {name}: the model has no stack of blocks; name one with blocks=")
    recompute = _indices("recompute", options.recompute, count)
    offload = to_offload(options, count)
    policy = tuple(
        "recompute" if index in recompute else "offload" if index in offload else "keep"
        for index in range(count)
    )
    fallback: str | None = None
    if options.recompute == "auto":
        fallback = "recompute"
    elif options.activation_offload == "auto" and not cpu:
        fallback = "offload"
    falls = tuple(fallback if p == "keep" and options.activation_offload == "auto" else None for p in policy)
    chosen = _indices("param_offload", options.param_offload, count)
    auto = isinstance(options.param_offload, str)
    paged = tuple(None if auto else index in chosen for index in range(count))
    return Asked(paged, policy, falls)


class Tiers:
    """Where what leaves the device goes: page-locked host memory under a GPU, and files under both.

    Attributes:
        files: The files of the disk tier, made when the first one is needed.
    """

    def __init__(self, device: torch.device, directory: str | None, budget: int | None) -> None:
        """Nothing is made yet; `directory` None is a private folder in the system's temporary directory."""
        self.device = device
        self.directory = directory
        self.files: FileTensors | None = None
        self._budget = budget
        self._lease = 0
        self._on_disk: set[int] = set()

    @staticmethod
    def folder(directory: Any) -> str:
        """Return the directory that files would be made in."""
        return str(directory) if directory is not None else tempfile.gettempdir()

    def to_disk(self, parameters: Sequence[Tensor]) -> None:
        """Let these Parameters, their gradients and their optimizer state live in files."""
        self._on_disk.update(id(p) for p in parameters)

    def to_host(self, parameters: Sequence[Tensor]) -> None:
        """Let these live in memory from now on."""
        self._on_disk.difference_update(id(p) for p in parameters)

    def renamed(self, replaced: dict[int, nn.Parameter]) -> None:
        """Go on with the Parameters that took the place of others."""
        self._on_disk = {id(replaced[key]) if key in replaced else key for key in self._on_disk}

    def make_files(self) -> FileTensors:
        """Return the files, making their folder the first time."""
        if self.files is None:
            self.files = FileTensors(self.directory, budget=self._budget)
            self.lend(self._lease or self.files.lease_bytes)
        return self.files

    def lend(self, nbytes: int) -> None:
        """Bound the memory of copies that what is in files is updated on."""
        self._lease = nbytes
        if self.files is not None:
            self.files.lease_bytes = nbytes

    def unseen(self) -> int:
        """Return the bytes of these copies that may come at any time and are not there now."""
        files = self.files
        return 0 if files is None else max(files.lease_bytes - files.leased_bytes, 0)

    def tier_of(self, parameter: Tensor) -> str:
        """Return ``disk`` or ``host`` for a paged Parameter."""
        return "disk" if id(parameter) in self._on_disk else "host"

    def store(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """Return a Parameter's value in its tier; one that is in a file already stays there.

        A trained one leaves a checkpoint's own file, which is never written.
        """
        value = parameter.detach() if value is None else value
        return self._store(value, self.tier_of(parameter) == "disk", parameter.requires_grad)

    def _store(self, tensor: Tensor, disk: bool, trained: bool = False) -> Tensor:
        if isinstance(tensor, QuantizedTensor):
            packed = {key: self._store(part, disk) for key, part in tensor.packed.items()}
            made = tensor.with_packed(packed)
            if tensor.error_factors is None:
                return made
            # Nothing computes with the fit: it needs no page-locked memory.
            return made.with_error(
                *(self._store(t, True) if disk else t.to("cpu", copy=True) for t in tensor.error_factors)
            )
        if not ts_paging.layout.is_dense(tensor):
            tensor = tensor.contiguous()
        if disk:
            place = locate(tensor) if tensor.device.type == "cpu" else None
            if place is not None and not (trained and place[0].span_of(tensor) is not None):
                return tensor
            return self.make_files().place(tensor.cpu())
        if self.device.type == "cpu":
            return tensor.clone()
        raw = registry.host_allocator().empty(tensor.numel() * tensor.element_size())
        host = (
            raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()) if raw.numel() else tensor.cpu()
        )
        return host.copy_(tensor)

    def memory_for(self, parameter: Tensor) -> FileTensors | None:
        """Return the files for what belongs to a Parameter of the disk tier, None for any other."""
        return self.make_files() if id(parameter) in self._on_disk else None

    def like(self, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return memory for a gradient: in a file, or host memory that the device copies to.

        Args:
            tensor: Has its dtype, shape and strides.
            owner: The Parameter; its tier is what counts.
        """
        if id(owner) in self._on_disk:
            return self.make_files().like(tensor)
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        if self.device.type == "cpu" or not tensor.numel():
            return torch.empty_strided(size, stride, dtype=dtype)
        raw = registry.host_allocator().empty(tensor.numel() * dtype.itemsize)
        return raw.view(dtype).as_strided(size, stride)

    def set_budget(self, budget: int | None) -> None:
        """Let files take so many bytes from now on; None: as much as the disk has.

        Raises:
            DoesNotFitError: They take more already.
        """
        used = 0 if self.files is None else self.files.used_bytes
        if budget is not None and used > budget:
            raise DoesNotFitError(
                f"{format_bytes(used)} are in files already, where {format_bytes(budget)} may be: give more "
                "RAM or VRAM first, so that groups return from there"
            )
        self._budget = budget
        if self.files is not None:
            self.files.store.budget_bytes = budget

    def close(self) -> None:
        """Remove the files."""
        if self.files is not None:
            self.files.close()


def hooked_edges(
    inventory: Inventory, paged: dict[int, nn.Parameter]
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """Return (path, module) of what is paged around the stack, and the paths of what computes after it."""
    around = [unit for unit in inventory.units if unit.group.kind != "block"]
    edges = [
        (name, module)
        for unit in around
        for name, module in unit.modules
        if any(id(p) in paged for p in module._parameters.values())
    ]
    after = {name for unit in around if unit.group.kind in ("norm", "head") for name in unit.group.modules}
    return edges, [name for name, _ in edges if name in after]


def start_paging(
    inventory: Inventory,
    want: Asked,
    layout: Layout,
    paged: dict[int, nn.Parameter],
    tiers: Tiers,
    options: WrapOptions,
    room: int,
) -> WeightPager:
    """Attach a pager to a model whose paged Parameters are in their tier already.

    `room` is what may be used of the device: a tenth of it at most holds activations that have come back and
    are not used yet.
    """
    ahead = min(options.max_inflight_bytes or _AHEAD, max(room, 0) // 10)
    offloading = "offload" in want.policy or "offload" in want.fallback
    cpu = tiers.device.type == "cpu"
    if cpu and offloading:
        store: ActivationStore = FileActivations(tiers.make_files().store)
    else:
        store = HostActivations(max_ahead_bytes=ahead)
    pager = WeightPager(
        tiers.device,
        slots=max(layout.slots, 1),
        prefetch=options.prefetch_depth,
        gradients=tiers,
        activations=store,
        min_offload_bytes=int(options.min_offload_bytes),
        pages=lambda parameter: id(parameter) in paged,
        waits=options.guard_params,
    )
    blocks = [
        (unit.group.name, unit.modules[0][1], want.policy[index])
        for index, unit in enumerate(inventory.blocks)
    ]
    pager.attach(blocks, *hooked_edges(inventory, paged))
    if captured(options, tiers.device):
        # What recordings hold is measured with the first steps, before anything returns to the device.
        limit = max(room, 0) // _SHARE_OF_RECORDINGS or None
        auto = options.capture == "auto"
        left = partial(_left, tiers.device, room) if auto and not cpu else None
        pager.block_mode = BlockMode(Captures(tiers.device, max_bytes=limit, auto=auto, room=left))
    return pager


def captured(options: WrapOptions, device: torch.device) -> bool:
    """Whether blocks that a pager looks after may be recorded: as asked for, or where that is proven."""
    return options.capture is True or (options.capture == "auto" and captures_by_itself(device))


def _left(device: torch.device, room: int) -> int:
    """Bytes that neither this process nor another one holds of what may be used of a GPU."""
    free = memory.device_budget(device).available_bytes
    return min(free, room - torch.cuda.memory_reserved(device))
