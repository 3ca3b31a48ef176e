"""The activation governor: keeps what a pass saves for backward within a byte limit.

What a block saves depends on the input, which is known only when it comes. So the decision is made at the
start of every forward pass, from what is used at that moment: as many blocks as there is room for keep their
activations, the last ones of the stack, which backward needs first; the others fall back to recomputing or
offloading. Policies never change a bit of the result, so they may differ from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ts_core.errors import DoesNotFitError
from ts_core.memory import format_bytes

from .block import PagedBlock

if TYPE_CHECKING:
    from .pager import WeightPager

__all__ = ["ActivationGovernor"]


class ActivationGovernor:
    """Decides the policy of managed blocks pass by pass.

    Until the first block has been measured and `learn` was called, every managed block falls back: nothing
    is known yet, and the limit is hard.

    Attributes:
        limit: Bytes that may be used.
        room: Bytes that are planned with.
        base: Least bytes in use at the start of a pass since the last `learn`.
        hold: Whether every managed block goes on falling back although there is room: it is for others.
        idle_to: A pass of inputs of so many bytes, or fewer, keeps nothing: its steps wait for something else
            than computation, so that recomputing costs no time.
        kept: Bytes that the blocks of the latest pass are taken to keep.
        offloads: Blocks at most that offload where they have no room; the rest of those that fall back to
            offloading, or may, recompute. None: each falls back to what it was given.
        ram: Bytes of RAM that the offloaded activations of a pass may take; None: no limit.
        flight: Bytes of the device that are set aside for copies under way while any block offloads, until
            `learn` has seen it.
        aside: Bytes of the device that are set aside for recordings of blocks that do not recompute, of which
            none is there yet.
        passed: Bytes of the inputs of all passes so far.
        passes: How many there were.
        offerable: Blocks of the latest pass that had no room and may offload.
        largest: Bytes of the largest input of a pass so far.
    """

    def __init__(
        self,
        blocks: Sequence[PagedBlock],
        managed: Sequence[str | None],
        used: Callable[[], int],
        limit: int,
        room: int | None = None,
        relief: Callable[[], object] | None = None,
        offers: Sequence[bool] = (),
        unseen: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start without knowledge.

        Args:
            blocks: The stack, in order.
            managed: For each block what it falls back to (``recompute`` or ``offload``), or None where its
                policy is fixed.
            used: Returns the bytes in use now.
            limit: Bytes that may be used; more of them in use when a pass starts is an error.
            room: Bytes that are planned with, at most `limit`; None: all of them.
            relief: Called at every block of a CPU run: gives freed memory back to the system if it adds up.
            offers: For each block whether it offloads rather than recompute as far as `offloads` allows;
                nothing: those that fall back to offloading.
            unseen: Returns bytes that work in the background may take beside what is used now; planned with,
                though no error while they are not there.
        """
        self._relief = relief
        self.room = limit if room is None else min(room, limit)
        self._names = {block.name: index for index, block in enumerate(blocks)}
        self._managed = list(managed)
        self._offers = list(offers) or [fallback == "offload" for fallback in managed]
        self.offloads: int | None = None
        self.ram: int | None = None
        self.flight = self.aside = self.idle_to = 0
        self.passed = self.passes = 0
        self.offerable = 0
        self._small: float = 0.0
        self._least = 0
        self._sharing: frozenset[int] = frozenset()
        self._used = used
        self._unseen = unseen
        self.limit = limit
        self.hold = False
        self.base = 0
        self.kept = 0
        self.largest = 0
        self._policies = [fallback or "keep" for fallback in self._managed]
        self._per_byte: float | None = None
        self._transient: int | None = None
        self._transient_input = 1
        self._counting: tuple[int, int, dict[int, int]] | None = None
        self._size = 0
        self._too_large: int | None = None

    @property
    def keepers(self) -> int:
        """How many managed blocks keep their activations in the latest pass, after they were measured."""
        if self._per_byte is None:
            return 0
        pairs = zip(self._policies, self._managed, strict=True)
        return sum(policy == "keep" and fallback is not None for policy, fallback in pairs)

    @property
    def each_offloaded(self) -> int:
        """Bytes that a block of the largest pass so far moves where it offloads; 0 while not known."""
        return self._leaving(self.largest)

    @property
    def measured(self) -> bool:
        """Whether a block's saved bytes are known."""
        return self._per_byte is not None

    @property
    def policies(self) -> list[str]:
        """Policy of each managed block in the latest pass; unmanaged ones read ``keep`` here."""
        return list(self._policies)

    def _leaving(self, size: int) -> int:
        return int(((self._per_byte or 0.0) - self._small) * size)

    def refresh(self) -> None:
        """Let `policies` say what holds from now on, after `offloads` was set."""
        kept = [i for i, p in enumerate(self._policies) if p == "keep" and self._managed[i] is not None]
        self._policies = self._fallen(frozenset(kept))

    def learn(self, transient: int) -> None:
        """Take over what a whole step used beyond its base and what was kept.

        Args:
            transient: Bytes; the largest seen is what counts.
        """
        self._transient = max(transient, self._transient or 0)
        self._transient_input = max(self.largest, 1)
        self.base = 0
        if "offload" in self._policies:
            self.flight = 0

    def expect(self, more: int) -> None:
        """Add bytes that coming steps will use beyond what was learned."""
        if self._transient is not None:
            self._transient += more

    def overrun(self) -> None:
        """Memory ran out in the latest pass: one of its size, or larger, keeps nothing from now on."""
        self._too_large = min(self._size, self._too_large or self._size)
        self._policies = self._fallen(frozenset())
        self.kept = 0

    def need(self, growth: float) -> int | None:
        """Return what a pass takes beyond what is used, one that is `growth` times the largest so far.

        Args:
            growth: At least 1.

        Returns:
            Bytes, if no managed block keeps its activations; None while nothing is known.
        """
        if self._transient is None or self._per_byte is None:
            return None
        grown = self._transient * max(growth * self.largest / self._transient_input, 1.0)
        return int(grown) + self._unseen()

    def enter(self, block: PagedBlock, args: Any, kwargs: Any) -> None:
        """Decide at the first block of a pass; give every managed block its policy."""
        index = self._names.get(block.name)
        if index is None:
            return
        self._settle(index)
        if index == 0:
            self._sharing = _sharing(block.pager)
            self._begin(_input_bytes(args, kwargs))
        if self._managed[index] is not None:
            block.policy = self._policies[index]

    def breathe(self) -> None:
        """Call what was given as `relief`."""
        if self._relief is not None:
            self._relief()

    def counter(self, block: PagedBlock, args: Any, kwargs: Any) -> Callable[[Tensor], None] | None:
        """Return what counts the storages that the first managed block saves, once."""
        index = self._names.get(block.name)
        if self.measured or index is None or self._managed[index] is None or block.policy != "keep":
            return None
        flat = tree_flatten((args, kwargs))[0]
        known = {t.untyped_storage()._cdata for t in flat if type(t) is Tensor} | _held_by(block.module)
        sizes: dict[int, int] = {}
        self._counting = (index, _input_bytes(args, kwargs), sizes)
        self._least = block.pager.min_offload_bytes
        address = None if block.slot is None else block.slot.address

        def count(tensor: Tensor) -> None:
            if type(tensor) is not Tensor or isinstance(tensor, nn.Parameter):
                return
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.data_ptr() != address:
                sizes[storage._cdata] = storage.nbytes()

        return count

    def _settle(self, index: int) -> None:
        """Take over what was counted, unless that block failed: then a pass starts anew at the first one."""
        if self._counting is not None:
            counted, size, sizes = self._counting
            self._counting = None
            if index > 0 or counted == len(self._names) - 1:
                self._per_byte = sum(sizes.values()) / size
                self._small = sum(n for n in sizes.values() if n < self._least) / size

    def _begin(self, size: int) -> None:
        used = self._used()
        if used > self.limit:
            raise DoesNotFitError(
                f"{format_bytes(used)} are in use where {format_bytes(self.limit)} may be, before the first "
                "block of the model computes. Use a smaller micro-batch or shorter rows, a larger budget, or "
                "free what else this process holds"
            )
        used += self._unseen()
        self.base = min(self.base or used, used)
        self.largest = max(self.largest, size)
        self._size = size
        self.passed += size
        self.passes += 1
        managed = [index for index, fallback in enumerate(self._managed) if fallback is not None]
        self._policies = self._fallen(frozenset())
        if self._per_byte is None:
            if managed:
                self._policies[managed[0]] = "keep"  # the block that is measured
            self.kept = 0
            return
        each = max(int(self._per_byte * size), 1)
        chosen = self._keepers(managed, each, 0, used, size)
        policies = self._fallen(frozenset(chosen))
        offload = policies.count("offload") if self.offloads is not None else 0
        if offload:  # what is on its way, and what is too small to leave, is on the device beside
            left = int(self._small * size) * offload + min(self.flight, each * offload)
            chosen = self._keepers(managed, each, left, used, size)
            policies = self._fallen(frozenset(chosen))
        self._policies = policies
        self.kept = each * len(chosen)

    def _keepers(self, managed: list[int], each: int, beside: int, used: int, size: int) -> list[int]:
        """Return the managed blocks that there is room for, with so many bytes beside them.

        They are the last ones; where blocks share recordings, only after all that have recordings of their
        own: those that share would need another set for each policy among them.
        """
        keep = 0
        if self._transient is not None and not self.hold and size > self.idle_to:
            transient = self._transient * max(1.0, size / self._transient_input)
            keep = int(max(0, self.room - used - transient - beside - self.aside) // each)
        if self._too_large is not None and size >= self._too_large:
            keep = 0
        managed = sorted(managed, key=lambda index: index not in self._sharing)
        return managed[max(0, len(managed) - keep) :]

    def _fallen(self, kept: frozenset[int]) -> list[str]:
        """Return the policies where these managed blocks keep, and the others fall back."""
        policies = [
            "keep" if fallback is None or index in kept else fallback
            for index, fallback in enumerate(self._managed)
        ]
        if self.offloads is None:
            return policies
        offered = [
            index
            for index, fallback in enumerate(self._managed)
            if fallback is not None and index not in kept and self._offers[index]
        ]
        self.offerable = len(offered)
        count = min(self.offloads, len(offered))
        each = self._leaving(self._size)
        if self.ram is not None or not each:
            count = min(count, (self.ram or 0) // each if each else 0)
        # Evenly over the stack, so that copies have as much computation beside them as can be.
        takes = {offered[step * len(offered) // count] for step in range(count)}
        for index in offered:
            policies[index] = "offload" if index in takes else "recompute"
        return policies


def _sharing(pager: WeightPager) -> frozenset[int]:
    """Return the blocks that replay recordings of others too: their weights take turns in a slot."""
    if pager.block_mode is None or pager.block_mode.captures is None:
        return frozenset()
    slots = [block.slot for block in pager.blocks]
    return frozenset(index for index, slot in enumerate(slots) if slot is not None and not slot.own)


def _held_by(module: nn.Module) -> set[int]:
    """Storages that a module holds anyway: saving one of them for backward takes nothing more."""
    with torch._C.DisableTorchFunctionSubclass():
        held = [*module.parameters(), *module.buffers()]
        parts = [part for t in held for part in (getattr(t, "packed", None) or {"": t}).values()]
        return {part.untyped_storage()._cdata for part in parts if part.layout is torch.strided}


def _input_bytes(args: Any, kwargs: Any) -> int:
    """Bytes of the largest floating input (the hidden states), or of any if there is none; at least 1."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    floating = [t for t in tensors if t.is_floating_point()]
    return max([t.numel() * t.element_size() for t in floating or tensors], default=1) or 1
