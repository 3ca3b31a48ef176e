"""The weight pager: brings each block's weights into its slot ahead of the computation that needs them."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ts_core import registry
from ts_core.errors import StateError
from ts_core.guard import guard, guard_of, release
from ts_core.trace import span

from .activations import ActivationStore, HostActivations
from .block import PagedBlock
from .copy import h2d_many
from .files import locate
from .layout import copy_exactly
from .rows import GatheredRows, gathers
from .seats import Seat
from .sink import GradientSink, HostMemory
from .slots import Slot
from .turns import Turns

if TYPE_CHECKING:
    from .blockmode import BlockMode

__all__ = ["WeightPager"]


_Batch = tuple[list[Tensor], list[Tensor]]


class _Ticket(Protocol):
    def wait(self) -> Any: ...


class Governor(Protocol):
    """Decides about saved activations while the model runs; see `ts_paging.governor`."""

    def enter(self, block: PagedBlock, args: Any, kwargs: Any) -> None:
        """Called before a block runs with a graph: may set its policy."""
        ...

    def breathe(self) -> None:
        """Called at every block of a CPU run, forward and backward."""
        ...

    def counter(self, block: PagedBlock, args: Any, kwargs: Any) -> Callable[[Tensor], None] | None:
        """Return what is to be told each tensor that this run saves, or None."""
        ...


class WeightPager:
    """Pages the weights of blocks through slots.

    Blocks of the stack share `slots` slots, block b using slot b mod slots; the other paged modules
    (embedding, head, norm) share one more. A module that was settled has a slot of its own instead: its
    weights stay on the device, and are brought again only after they were written outside. Where a
    Parameter's bytes live and how they are stored is a matter of its tensor alone: in host memory, in a file
    of a `FileTensors`, plain or packed by a codec.

    Attributes:
        device: Where blocks compute.
        sink: Takes the gradients of trained weights.
        activations: Takes saved tensors of blocks whose policy is ``offload``.
        min_offload_bytes: Smaller saved tensors stay.
        governor: Decides about saved activations pass by pass; None leaves each block's policy as it is.
        block_mode: Runs blocks as one node of the graph each where that is right; None: in graph mode.
        slot_count: Slots that `attach` makes for the stack, at most.
        host_bytes: Bytes of weights copied from host memory to slots so far, as stored.
        disk_bytes: Bytes of weights read from files to slots so far, as stored.
        wait_s: Seconds that computing threads spent until weights were in their slots, decoding on the CPU
            included; what a GPU's stream waits is not known here.
        short: Whether memory for saved activations was short once: every second block that would offload
            recomputes from then on.
        when_short: Called when that happens.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slots: int = 2,
        prefetch: int = 1,
        gradients: HostMemory | None = None,
        activations: ActivationStore | None = None,
        min_offload_bytes: int = 1 << 20,
        pages: Callable[[nn.Parameter], bool] = lambda parameter: True,
        waits: bool = True,
    ) -> None:
        """Page nothing yet.

        Args:
            device: Where blocks compute.
            slots: Slots of the stack, at least 1. Two let the next block arrive while one computes.
            prefetch: Blocks that are brought ahead, those that followed last time; each needs a slot that
                none before it uses. 0 brings none.
            gradients: Memory for gradients on the host.
            activations: Where saved tensors go.
            min_offload_bytes: Smaller saved tensors stay.
            pages: Which Parameters of a paged block are paged; the others stay where they are.
            waits: Whether reads outside of any graph wait for updates under way; see `Guard.waits`.
        """
        self.device = device
        self.sink = GradientSink(gradients)
        self.activations = activations or HostActivations()
        self.min_offload_bytes = min_offload_bytes
        self.pages = pages
        self.waits = waits
        self.governor: Governor | None = None
        self.block_mode: BlockMode | None = None
        self.turns = Turns()
        self.short = False
        self.when_short: Callable[[], object] = lambda: None
        self._offloading = 0
        self.host_bytes = 0
        self.disk_bytes = 0
        self.wait_s = 0.0
        self.blocks: list[PagedBlock] = []
        self.edges: list[PagedBlock] = []
        self.slots: list[Slot] = []
        self.slot_count = slots
        self._depth = prefetch
        self._next: dict[tuple[int, bool], PagedBlock] = {}
        self._last: PagedBlock | None = None

    def attach(
        self,
        blocks: Sequence[tuple[str, nn.Module, str]],
        edges: Sequence[tuple[str, nn.Module]] = (),
        tail: Sequence[str] = (),
    ) -> None:
        """Start paging.

        Args:
            blocks: (name, module, policy) of the stack's blocks, in order; the policy is ``keep``,
                ``offload`` or ``recompute``.
            edges: (name, module) of the other modules.
            tail: Names of those that compute after the stack; the others come before it.
        """
        self.blocks = [PagedBlock(self, *block) for block in blocks]
        self.edges = [
            GatheredRows(self, name, module) if gathers(module) else PagedBlock(self, name, module, "keep")
            for name, module in edges
        ]
        paged = [block for block in self.blocks if block.parameters]
        count = min(self.slot_count, len(paged))
        sizes = [block.layout.nbytes for block in paged]
        self.slots = [Slot(max(sizes[index::count]), self.device) for index in range(count)]
        around = [edge for edge in self.edges if not isinstance(edge, GatheredRows)]
        if around:
            self.slots.append(Slot(max(edge.layout.nbytes for edge in around), self.device))
        # What is used first is updated first; a tied weight is due when the first of its modules computes.
        ranks = {id(edge): len(self.blocks) if edge.name in tail else -1 for edge in self.edges}
        ranks.update({id(block): index for index, block in enumerate(self.blocks)})
        uses = collections.Counter(id(p) for b in [*self.blocks, *self.edges] for p in b.parameters)
        self.sink.shared = {key for key, count in uses.items() if count > 1}
        for block in sorted([*self.blocks, *self.edges], key=lambda b: -ranks[id(b)]):
            for parameter in block.parameters:
                if type(parameter) is nn.Parameter or guard_of(parameter) is not None:
                    entry = guard(parameter, self.sink.divert)
                    entry.rank, entry.waits = ranks[id(block)], self.waits
        places = {id(block): self.slots[index % count] for index, block in enumerate(paged)}
        for block in self.blocks:
            block.attach(places.get(id(block)))
        for edge in self.edges:
            edge.attach(None if isinstance(edge, GatheredRows) else self.slots[-1])

    def unpage(self, names: Iterable[str], move: Callable[[nn.Parameter], None]) -> None:
        """Stop paging some modules; between two steps.

        A graph that is still held keeps working: what it saved asks for the same slot as before.

        Args:
            names: Of blocks and edges; modules that share a Parameter go together.
            move: Called with each of their Parameters once, an ordinary one again: puts its value where it
                shall live from now on.

        Raises:
            Exception: An update or a read under way failed; nothing is changed then.
        """
        leaving = set(names)
        self._seat()
        going = [block for block in [*self.blocks, *self.edges] if block.name in leaving]
        for block in going:
            for parameter in block.parameters:
                entry = guard_of(parameter)
                if entry is not None:
                    entry.wait()
            if block.slot is not None:
                self._finish(block.slot)
        staying = [block for block in [*self.blocks, *self.edges] if block.name not in leaving]
        held = {id(parameter) for block in staying for parameter in block.parameters}
        parameters = {id(p): p for block in going for p in block.parameters if id(p) not in held}
        for edge in self.edges:
            if edge.name in leaving:
                edge.detach()
        for parameter in parameters.values():
            release(parameter)
            self.sink.forget(parameter)
            move(parameter)
        self.edges = [edge for edge in self.edges if edge.name not in leaving]
        pages, self.pages = self.pages, lambda parameter: False
        for index, block in enumerate(self.blocks):
            if block.name in leaving:
                bare = PagedBlock(self, block.name, block.module, block.policy)
                bare.runs, bare.fills = block.runs, block.fills
                bare.attach(None, block)
                self.blocks[index] = bare
        self.pages = lambda parameter: id(parameter) not in parameters and pages(parameter)
        self._forget_order()

    def settle(self, names: Iterable[str]) -> None:
        """Give paged modules a slot of their own, which they leave no more; between two steps.

        Weights that an optimizer updates in host memory then cross to the device once a step, not once a
        pass. Modules that hold the same Parameters share one. A graph that is still held keeps working: what
        it saved asks for the same slot as before.

        Args:
            names: Of blocks and edges; those that page nothing, or gather rows, are left alone.

        Raises:
            torch.OutOfMemoryError: The device has no room; nothing is changed then.
            StorageError: A read under way failed; nothing is changed then.
        """
        chosen = set(names)
        self._seat()
        slots: dict[tuple[int, ...], Slot] = {}
        moving: list[tuple[PagedBlock, Slot]] = []
        for block in [*self.blocks, *self.edges]:
            if block.name in chosen and block.slot is not None:
                key = tuple(id(parameter) for parameter in block.parameters)
                if key not in slots:
                    slots[key] = Slot(block.layout.nbytes, self.device, own=True)
                moving.append((block, slots[key]))
        for block, _ in moving:
            self._finish(_slot_of(block))
        pages = self.pages
        for block, slot in moving:
            # Those that it has now: one that was assigned in the place of another is not known to `pages`.
            own = {id(parameter) for parameter in block.parameters}
            self.pages = lambda parameter, own=own: id(parameter) in own  # type: ignore[misc]
            settled = PagedBlock(self, block.name, block.module, block.policy)
            settled.runs, settled.fills = block.runs, block.fills
            settled.attach(slot, block)
            place = self.blocks if block in self.blocks else self.edges
            place[place.index(block)] = settled
        self.pages = pages
        self._forget_order()

    def _seat(self) -> None:
        """Let every block look for Parameters that were assigned in the place of its own."""
        for block in [*self.blocks, *self.edges]:
            block.seated()

    def _forget_order(self) -> None:
        """Modules or slots have changed: what followed what is learned anew."""
        self._next.clear()
        self._last = None
        self._forget_recordings()
        used = {id(block.slot): block.slot for block in [*self.blocks, *self.edges] if block.slot is not None}
        self.slots = [slot for slot in self.slots if used.pop(id(slot), None) is not None] + [*used.values()]

    def _forget_recordings(self) -> None:
        if self.block_mode is not None and self.block_mode.captures is not None:
            self.block_mode.captures.forget()

    def detach(self) -> None:
        """Stop paging; the Parameters are ordinary tensors with the true values, where these live.

        Raises:
            Exception: An update under way failed; all else is done then.
        """
        for slot in self.slots:
            self._finish(slot)
        failure: Exception | None = None
        for block in [*self.blocks, *self.edges]:
            block.detach()
            for parameter in block.parameters:
                try:
                    release(parameter)
                except Exception as error:
                    failure = failure or error
                self.sink.forget(parameter)
        self.blocks, self.edges, self.slots = [], [], []
        self._forget_recordings()
        self._next.clear()
        self._last = None
        if failure is not None:
            raise failure

    def use(self, block: PagedBlock, *, fresh: bool = False, backward: bool = False) -> None:
        """Have a block's weights in its slot before the next work of the current stream.

        Args:
            block: One of ours.
            fresh: Bring them again if they were written outside. Asked in forward only: backward needs what
                forward computed with.
            backward: Asked by a backward pass: the block that comes next is another one.
        """
        slot = _slot_of(block)
        self.turns.backward(block)
        if self.governor is not None and self.device.type == "cpu":
            self.governor.breathe()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if slot.owner is not block and slot.owner is not None and block.same_weights(slot.owner):
                block.take_over(slot.owner)
                slot.owner = block
            if slot.owner is not block or (fresh and block.stale()):
                self._start(block, urgent=True)
            self._finish(slot)
            if block.left:  # asked by a graph from before: it is nobody's follower, or it would stay for ever
                self._last = None
            elif self._last is not block:
                if self._last is not None:
                    self._next[id(self._last), backward] = block
                self._last = block
                self._hint(block, backward)

    def policy_of(self, block: PagedBlock) -> str:
        """Return what happens to the activations of a block in the pass that reaches it now."""
        if self.blocks and block is self.blocks[0]:
            self._offloading = 0
        if block.policy != "offload":
            return block.policy
        number = self._offloading
        self._offloading += 1
        if number == 0 and not self.short and self.activations.short():
            self.short = True
            self.when_short()
        return "recompute" if self.short and number % 2 else "offload"

    @property
    def current(self) -> PagedBlock | None:
        """The block that was used last."""
        return self._last

    def _hint(self, block: PagedBlock, backward: bool) -> None:
        """Start bringing the blocks that followed last time, if that can run beside the computation."""
        taken = {id(block.slot)}
        follower = block
        for _ in range(self._depth):
            known = self._next.get((id(follower), backward))
            if known is None or id(known.slot) in taken:
                return
            follower = known
            taken.add(id(follower.slot))
            if self._comes(follower, backward):
                self._start(follower)

    def _comes(self, block: PagedBlock, backward: bool) -> bool:
        """Whether a block's weights are to be brought now, ahead of their use."""
        there = _slot_of(block).owner
        here = there is not None and (there is block or block.same_weights(there))
        if there is not None and here and (backward or not there.stale()):
            return False
        if self.device.type == "cpu" and not block.in_files():
            return False
        return not block.comes_at_its_use(backward=backward)

    def _start(self, block: PagedBlock, urgent: bool = False) -> None:
        """Begin to bring a block's weights into its slot, whoever is there now.

        What lies in host memory crosses in one batch, or in several where updates are waited for in between;
        `urgent` ones pass those that are only fetched ahead.
        """
        slot = _slot_of(block)
        self._finish(slot)
        slot.owner = None  # if something fails on the way, nobody is there
        # What crosses is waited for if something fails on the way, too; decoding comes after all of it.
        slot.arriving = crossing = []
        arriving: list[Callable[[], None]] = []
        batch: _Batch = ([], [])
        for target, parameter, seat in zip(block.fill_views, block.parameters, block.seats, strict=True):
            entry = guard_of(parameter)
            if entry is not None and entry.pending is not None:
                if batch[0]:  # what is updated crosses while the rest is
                    crossing.append(h2d_many(*batch, priority=int(urgent)).wait_stream)
                    batch = ([], [])
                entry.wait()
            _check(block, seat, parameter)
            packed: dict[str, Tensor] | None = getattr(parameter, "packed", None)
            if packed is not None:
                places = seat.places(target)
                goes = dict.fromkeys(packed) if places is None else places
                parts = {key: self._move(part, goes[key], batch) for key, part in packed.items()}
                arriving.append(_unpacking(parameter, parts, target, places))
            elif parameter.numel():
                flat = target.as_strided((target.numel(),), (1,))
                source = _in_order_of(target, parameter.detach()).as_strided((target.numel(),), (1,))
                _, arrive = self._move(source, flat, batch)
                if arrive is not None:
                    arriving.append(arrive)
        if batch[0]:
            crossing.append(h2d_many(*batch, priority=int(urgent)).wait_stream)
        slot.arriving = [*crossing, *arriving]
        slot.owner = block
        block.filled()

    def _finish(self, slot: Slot) -> None:
        """Wait for what is on its way into a slot: the current stream on a GPU, else this thread."""
        arriving, slot.arriving = slot.arriving, []
        if not arriving:
            return
        start = time.perf_counter()
        try:
            with span("ts/paging/wait"):
                for arrive in arriving:
                    arrive()
        except BaseException:
            slot.owner = None
            raise
        finally:
            self.wait_s += time.perf_counter() - start

    def _move(
        self, source: Tensor, target: Tensor | None, batch: _Batch
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Start moving one stored tensor to the device.

        Args:
            source: Where it lives: host memory, or a mapped file.
            target: Where it goes; None: wherever, it is decoded from there.
            batch: Takes targets and sources that cross from host memory to a GPU.

        Returns:
            Where it will be, and what to call before using it (None: it is there).
        """
        cpu = self.device.type == "cpu"
        if source.device.type != "cpu":  # it returned while a graph from before still asks for its slot
            return (source, None) if target is None else (target.copy_(source), None)
        place = locate(source)
        if place is None:
            self.host_bytes += source.nbytes
            if cpu:
                if target is None:
                    return source, None
                target.copy_(source)
                return target, None
            if target is None:
                target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            batch[0].append(target)
            batch[1].append(source)
            return target, None
        files, key = place
        self.disk_bytes += source.nbytes
        if target is None:
            target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if cpu:
            ticket = files.read_async(key, target)
            return target, lambda: _done(ticket)
        return target, files.bring(key, target).wait_stream


def _slot_of(block: PagedBlock) -> Slot:
    assert block.slot is not None  # only blocks with paged Parameters ask
    return block.slot


def _done(ticket: _Ticket) -> None:
    ticket.wait()


def _in_order_of(target: Tensor, value: Tensor) -> Tensor:
    """Return the value with its elements in memory as the slot has them: ``.data`` may have changed that."""
    if value.stride() == target.stride():
        return value
    return copy_exactly(torch.empty_strided(target.size(), target.stride(), dtype=value.dtype), value)


def _check(block: PagedBlock, seat: Seat, parameter: Tensor) -> None:
    if not seat.fits(parameter):
        raise StateError(
            f"paged block {block.name!r}: a Parameter of {tuple(parameter.shape)} and {parameter.dtype} "
            f"takes the place of {seat}; unwrap the model before changing "
            "its weights' shape or dtype"
        )


def _unpacking(
    parameter: Any,
    parts: dict[str, tuple[Tensor, Callable[[], None] | None]],
    target: Tensor,
    places: dict[str, Tensor] | None,
) -> Callable[[], None]:
    """Make what decodes packed parts into a slot once they are there, or completes those that stay packed."""
    codec = registry.codec(parameter.codec)
    shape, meta = tuple(parameter.shape), parameter.meta

    def arrive() -> None:
        for _, arrived in parts.values():
            if arrived is not None:
                arrived()
        with span("ts/paging/decode"):
            if places is not None:
                parameter.complete_slot(places)
                return
            packed = {key: part for key, (part, _) in parts.items()}
            codec.decode(packed, shape, target.dtype, meta, out=target)

    return arrive
