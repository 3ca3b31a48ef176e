"""A paged block: its weights live elsewhere and are in a slot while it computes.

The block's ``forward`` is replaced on the instance by: wait for the slot; put the slot's views in the place
of the Parameters; run the original forward under the block's activation policy; put the Parameters back. A
saved tensor that is a weight is remembered as (block, view) and asks for the block again when backward uses
it, so the order of backward passes does not matter.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ts_core.errors import StateError
from ts_core.guard import GuardedParameter, guard, guard_of, release

from .activations import park_hook
from .buffers import HeldBuffer, Residents, as_they_were, version_of
from .buffers import written_between as _written
from .caches import Once, as_found, is_cache
from .checkpointed import checkpointed
from .files import locate
from .outside import FromOutside
from .seats import Seat
from .slots import Slot, SlotLayout, own_view
from .stand_in import StandIn

if TYPE_CHECKING:
    from .blockmode import Interior
    from .pager import WeightPager

__all__ = ["PagedBlock"]

_version = version_of
_SMALL_BUFFER_BYTES = 1 << 20  # what a block that recomputes copies of each buffer before it runs

_Stamp = tuple[int, ...]


class _Bind(torch.autograd.Function):
    """Views of trained weights, as the graph sees them: their gradients go to the sink."""

    @staticmethod
    def forward(ctx: Any, block: PagedBlock, trained: tuple[int, ...], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.block, ctx.trained = block, trained
        ctx.set_materialize_grads(False)
        return tuple(block.views[i].detach() for i in trained)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        refuse_create_graph(ctx.block)
        block = ctx.block
        pairs = zip(ctx.trained, grads, strict=True)
        block.pager.sink.add_all([(block.parameters[i], grad) for i, grad in pairs if grad is not None])
        return None, None, None


class _Gate(torch.autograd.Function):
    """Identity whose backward cannot be differentiated: create_graph raises instead of being wrong."""

    @staticmethod
    def forward(ctx: Any, block: PagedBlock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.block = block
        ctx.run = block.pager.activations.latest()
        ctx.set_materialize_grads(False)
        # Detached, not a view: what a model writes into a block's output in place would be an error then.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph(ctx.block)
        if ctx.block.slot is not None:
            ctx.block.pager.turns.backward(ctx.block)
        ctx.block.pager.activations.approach(ctx.run)
        return None, *grads


def refuse_create_graph(block: PagedBlock) -> None:
    """Raise if the backward pass under way records a graph of its own."""
    if torch.is_grad_enabled():
        raise StateError(
            f"create_graph=True through the paged block {block.name!r}: gradients of gradients are not "
            "supported for paged weights; unwrap the model, or keep this block resident"
        )


_bind = cast(Callable[..., tuple[Tensor, ...]], _Bind.apply)
_gate = cast(Callable[..., tuple[Tensor, ...]], _Gate.apply)


class _Weight:
    """A saved tensor that is a view of a slot, and the state its Parameter was in."""

    __slots__ = ("block", "index", "version", "view")

    def __init__(self, block: PagedBlock, view: Tensor, stamp: _Stamp) -> None:
        self.block, self.view = block, view
        packed: dict[str, Tensor] | None = getattr(view, "packed", None)
        first = view if packed is None else next(iter(packed.values()))
        at = first.storage_offset() * first.dtype.itemsize
        self.index = bisect.bisect_right(block.layout.offsets, at) - 1
        self.version = stamp[self.index]

    def tensor(self) -> Tensor:
        block = self.block
        with torch._C.DisableTorchFunctionSubclass():
            if block.parameters[self.index]._version != self.version:
                raise written_between(block)
        slot, pager = block.slot, block.pager
        # Nearly always the block is there: only the first of its weights need ask the pager.
        if slot is None or slot.owner is not block or slot.arriving or pager.current is not block:
            pager.use(block, backward=True)
        return self.view


def written_between(block: PagedBlock) -> StateError:
    """Say what autograd says of an ordinary weight, which it cannot see here."""
    return _written(block.name)


class PagedBlock:
    """One block of a `WeightPager`.

    Attributes:
        name: Path of the module in the model.
        module: The module.
        parameters: Its paged Parameters, each once.
        policy: ``keep``, ``offload`` or ``recompute``.
        layout: Where each lies in the slot.
        slot: The slot that it always uses; None if none of its Parameters is paged and only its activation
            policy is wanted.
        views: Typed views of the slot that the block computes with.
        runs: How often the original forward ran; 2 per step when it recomputes.
        fills: How often its weights were brought into the slot.
        left: It was detached: only graphs from before use it.
        interior: What block mode knows about it, once it has looked.
        before: Methods that others had put on the module before, by name.
    """

    def __init__(self, pager: WeightPager, name: str, module: nn.Module, policy: str) -> None:
        """Collect the places that hold its Parameters."""
        self.pager, self.name, self.module, self.policy = pager, name, module, policy
        sites = [
            (owner._parameters, key, parameter)
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and pager.pages(parameter)
        ]
        unique = {id(parameter): parameter for _, _, parameter in sites}
        order = {key: index for index, key in enumerate(unique)}
        self.parameters = list(unique.values())
        self._sites = [(place, key, parameter, order[id(parameter)]) for place, key, parameter in sites]
        self._beside = {id(owner._parameters): owner._buffers for owner in module.modules()}
        with torch._C.DisableTorchFunctionSubclass():
            self.seats = [Seat(parameter, pager.device) for parameter in self.parameters]
            self.layout = SlotLayout([seat.like for seat in self.seats])
        self.runs = 0
        self.fills = 0
        self.left = False
        self.slot: Slot | None = None
        self.views: list[Tensor] = []
        self.fill_views: list[Tensor] = []
        self._stamp: _Stamp = ()
        self._inside = False
        self._original: Callable[..., Any] = module.forward
        self.before: dict[str, Any] = {}
        self._stand_ins: dict[str, StandIn] = {}
        self.interior: Interior | None = None

    def attach(self, slot: Slot | None, follows: PagedBlock | None = None) -> None:
        """Take a slot and replace ``forward``; ``.to()`` and the like leave paged Parameters alone.

        Args:
            slot: The slot, or None.
            follows: The block of the same module whose place this one takes: what stands on the module stays
                there, with all that others have put around it since.
        """
        self.slot = slot
        if slot is not None:
            with torch._C.DisableTorchFunctionSubclass():
                pairs = list(zip(self.layout.offsets, self.seats, strict=True))
                regions = [own_view(slot.buffer, offset, seat.like) for offset, seat in pairs]
                seated = zip(self.seats, self.parameters, regions, strict=True)
                self.views = [seat.over(parameter, region) for seat, parameter, region in seated]
                self.fill_views = [own_view(slot.buffer, offset, seat.like) for offset, seat in pairs]
        self._anchor = torch.zeros((), device=self.pager.device, requires_grad=True)
        self._buffers = [
            (owner._buffers, key)
            for owner in self.module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._residents = Residents(self.name, self.module, {id(p) for p in self.parameters})
        runs = {"forward": self._forward, "_apply": self._apply}
        if follows is not None:
            follows.left = True
            self._original, self.before = follows._original, follows.before
            self._stand_ins = follows._stand_ins
            for key, stand_in in self._stand_ins.items():
                stand_in.hand_over(self, runs[key])
            return
        own = self.module.__dict__
        self._original = self.module.forward
        self.before = {key: own[key] for key in runs if key in own}
        self._stand_ins = {key: StandIn(self, key, run) for key, run in runs.items()}
        own.update(self._stand_ins)

    def detach(self) -> None:
        """Give the module its own methods back; what others have put around ours stays."""
        self.left = True
        own = self.module.__dict__
        for key, stand_in in self._stand_ins.items():
            if own.get(key) is not stand_in:
                stand_in.retire()
            elif key in self.before:
                own[key] = self.before[key]
            else:
                del own[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Stand in for the module's ``_apply``: what is paged stays in its place, the rest is converted."""
        self.refuse_conversion(fn)
        with self._without():
            convert: Any = type(self.module)._apply
            convert(self.module, fn, recurse)
        return self.module

    def refuse_conversion(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Look what a conversion would do to the paged weights.

        Raises:
            StateError: It changes their dtype.
        """
        for before in {parameter.dtype for parameter in self.parameters}:
            if fn(torch.empty(0, dtype=before)).dtype != before:
                raise StateError(
                    f"paged block {self.name!r}: its weights cannot change their dtype while the model is "
                    "wrapped; unwrap it first"
                )

    @contextlib.contextmanager
    def _without(self) -> Iterator[None]:
        order = {id(place): list(place) for place, *_ in self._sites}
        for place, key, _, _ in self._sites:
            del place[key]
        try:
            yield
        finally:
            for place, key, parameter, _ in self._sites:
                place[key] = parameter
            for place, *_ in self._sites:  # names keep their order
                for key in order[id(place)]:
                    place[key] = place.pop(key)

    def _reseat(self) -> None:
        """Take over Parameters that were assigned in the place of ours: ``load_state_dict(assign=True)``.

        Raises:
            StateError: What is there now cannot be paged in the same place of the slot.
        """
        found: dict[int, Any] = {}
        for place, key, parameter, index in self._sites:
            now = place.get(key)
            if found.setdefault(index, now) is not now or (
                now is not parameter and not self._fits(now, index)
            ):
                raise StateError(
                    f"paged block {self.name!r}: {key!r} was replaced by something that cannot be paged in "
                    f"its place: expected one CPU Parameter of {tuple(parameter.shape)}, {parameter.dtype} "
                    f"and strides {parameter.stride()} wherever the old one was; unwrap the model before "
                    "changing its weights' shape, dtype or device"
                )
        others = [b for b in (*self.pager.blocks, *self.pager.edges) if b is not self]
        kept = {id(p) for block in others for p in block.parameters}
        for index, now in found.items():
            before = self.parameters[index]
            if now is before:
                continue
            self.parameters[index] = now
            self.pager.sink.renamed(before, now)
            entry = guard_of(before)
            if entry is not None and type(now) in (nn.Parameter, GuardedParameter):
                seated = guard(now, self.pager.sink.divert)
                seated.rank, seated.waits = entry.rank, entry.waits
            if id(before) not in kept:
                release(before)
                self.pager.sink.forget(before)
        self._sites = [(place, key, found[index], index) for place, key, _, index in self._sites]
        self._stamp = ()

    def _fits(self, value: Any, index: int) -> bool:
        if not isinstance(value, nn.Parameter) or value.device.type != "cpu":
            return False
        if not self.seats[index].fits(value):
            return False
        return getattr(value, "packed", None) is not None or value.stride() == self.seats[index].like.stride()

    def stamp(self) -> _Stamp:
        """Return what changes whenever a weight is written outside."""
        return tuple([parameter._version for parameter in self.parameters])

    def stale(self) -> bool:
        """Whether the slot may hold other bytes than the Parameters do now."""
        if self.stamp() != self._stamp:
            return True
        return any((entry := guard_of(p)) is not None and entry.escaped for p in self.parameters)

    def in_files(self) -> bool:
        """Whether any of its weights is read from a file."""
        packed = (getattr(p, "packed", None) for p in self.parameters)
        parts = [tuple(k.values()) if k else (p,) for p, k in zip(self.parameters, packed, strict=True)]
        return any(locate(part) is not None for group in parts for part in group)

    def filled(self) -> None:
        """Note which values were brought."""
        self._stamp = self.stamp()
        self.fills += 1
        for parameter in self.parameters:
            entry = guard_of(parameter)
            if entry is not None:
                entry.note_filled(parameter)

    def comes_at_its_use(self, *, backward: bool) -> bool:
        """Whether its weights are to be brought when they are used, not before.

        One is being updated, or its memory is in hands that could write it until then: forward would bring it
        once more. Backward does not, so that it may be brought ahead.
        """
        entries = [entry for p in self.parameters if (entry := guard_of(p)) is not None]
        return any(entry.pending is not None or (entry.escaped and not backward) for entry in entries)

    def same_weights(self, other: PagedBlock) -> bool:
        """Whether another block has the same Parameters: its slot then holds what ours would."""
        mine, theirs = self.parameters, other.parameters
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))

    def take_over(self, other: PagedBlock) -> None:
        """Go on with what a block of the same weights has brought."""
        self._stamp = other._stamp

    def seated(self) -> PagedBlock:
        """Return itself, once its Parameters are those that the module has now."""
        if not self._inside and any(place.get(key) is not p for place, key, p, _ in self._sites):
            with torch._C.DisableTorchFunctionSubclass():
                self._reseat()
        return self

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seated()
        return self.compute(self._original, args, kwargs)

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function while the module's weights are in the slot, as the block's forward is run.

        Args:
            function: The original forward, or anything else that reads the module's Parameters.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What it returns; its gradients go the way of the block's.
        """
        # In block mode the module's tensors are exchanged too, and recordings have one set of addresses; a
        # second run exchanges buffers.
        exchanges = self.slot is not None or (self._buffers and self.policy == "recompute")
        if not exchanges and self.pager.block_mode is None:
            return self._compute(function, args, kwargs)
        with self.pager.turns.forward(self):
            return self._compute(function, args, kwargs)

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            trained = tuple([i for i, p in enumerate(self.parameters) if p.requires_grad])
        governor = self.pager.governor
        if governor is not None and torch.is_grad_enabled():
            governor.enter(self, args, kwargs)
        mode = self.pager.block_mode
        begin = None if mode is None else mode.moment(self)
        if self.slot is not None:
            self.pager.use(self, fresh=True)
        if not torch.is_grad_enabled():
            self.runs += 1
            with self._bound(self.views):
                return function(*args, **kwargs)
        policy = self.pager.policy_of(self)
        if mode is None or function is not self._original or self in self.pager.edges:
            return self._in_graph_mode(function, args, kwargs, policy, trained)
        with contextlib.suppress(FromOutside):
            run = mode.enter(self, function, args, kwargs, policy, begin)
            if run is not None:
                return run.outer()
        with mode.watched(self, args, kwargs) as came:
            output = self._in_graph_mode(function, args, kwargs, policy, trained)
            came(output)
        return output

    def _in_graph_mode(
        self, function: Callable[..., Any], args: Any, kwargs: Any, policy: str, trained: tuple[int, ...]
    ) -> Any:
        if len(trained) == len(self.views) > 0:
            leaves = list(_bind(self, trained, self._anchor))
        else:
            leaves = [view.detach() for view in self.views]
        if 0 < len(trained) < len(self.views):
            for index, leaf in zip(trained, _bind(self, trained, self._anchor), strict=True):
                leaves[index] = leaf
        if policy == "recompute" and not self._cached(args, kwargs):
            output = self._recomputed(function, leaves, args, kwargs)
        else:
            self.runs += 1
            pack, unpack = self._hooks(args, kwargs, offload=policy == "offload")
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), self._bound(leaves):
                output = function(*args, **kwargs)
        return self._gated(output)

    @contextlib.contextmanager
    def _bound(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        # A module may be used inside its own forward (a tied head read by a loss): the innermost is undone.
        before = [place[key] for place, key, _, _ in self._sites]
        inside, self._inside = self._inside, True
        for place, key, _, index in self._sites:
            place[key] = tensors[index]  # type: ignore[assignment]
        try:
            yield
        finally:
            self._inside = inside
            for (place, key, _, _), value in zip(self._sites, before, strict=True):
                place[key] = value
                # What is no Parameter comes back as a buffer from a parametrization (PEFT's on routers).
                self._beside[id(place)].pop(key, None)

    def _recomputed(
        self, function: Callable[..., Any], leaves: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Run under non-reentrant checkpointing, no hooks of ours inside: torch applies the innermost."""
        once = Once(args, kwargs)
        stamp = self._stamp
        given = [(t, _version(t)) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        buffers = self._buffers_now()
        residents = self._residents
        seen: list[tuple[Tensor | None, int]] = []

        def body(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            first = once.taken()
            if first is not None:
                with self._bound(leaves):
                    output = function(*first[0], **first[1])
                self._expect_constant(buffers)
                seen.extend(residents.now())
                return output
            residents.expect(seen)
            if buffers:
                self.pager.turns.backward(self)
            if any(_version(t) != version for t, version in given):
                raise written_between(self)
            if self.slot is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    if self.stamp() != stamp:
                        raise written_between(self)
                self.pager.use(self)
            # A key-value cache has the first run's keys and values already.
            args, kwargs = as_found(args, kwargs)
            with self._bound(leaves), as_they_were(buffers, self.name):
                return function(*args, **kwargs)

        args, kwargs = as_found(args, kwargs)
        return checkpointed(body, *args, **kwargs)

    def _buffers_now(self) -> list[HeldBuffer]:
        """Copy the module's buffers: a second run starts from the same ones, and its writes are dropped."""
        found = []
        for place, key in self._buffers:
            buffer = place.get(key)
            if buffer is not None:
                small = buffer.numel() * buffer.element_size() <= _SMALL_BUFFER_BYTES
                found.append((place, key, buffer, buffer.clone() if small else None, _version(buffer)))
        return found

    def _expect_constant(self, buffers: list[HeldBuffer]) -> None:
        for place, key, buffer, copied, version in buffers:
            if copied is None and (place.get(key) is not buffer or _version(buffer) != version):
                nbytes = buffer.numel() * buffer.element_size()
                raise StateError(
                    f"paged block {self.name!r}: its forward writes the buffer {key!r} of {nbytes} "
                    f"bytes; a block that recomputes may write buffers of {_SMALL_BUFFER_BYTES} bytes at "
                    "most. Keep or offload the activations of this block"
                )

    def _hooks(
        self, args: Any, kwargs: Any, *, offload: bool
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        start = end = 0
        if self.slot is not None:
            start = self.slot.address
            end = start + self.slot.buffer.numel()
        stamp = self._stamp
        park: Callable[[Tensor], Any] | None = None
        if offload:
            flat = tree_flatten((args, kwargs))[0]
            inputs = frozenset(t.untyped_storage()._cdata for t in flat if type(t) is Tensor)
            park = park_hook(self.pager.activations, inputs, self.pager.min_offload_bytes)

        governor = self.pager.governor
        count = governor.counter(self, args, kwargs) if governor is not None else None

        def pack(tensor: Tensor) -> Any:
            if count is not None:
                count(tensor)
            # A packed weight of a resident block has no storage; it is small, and stays.
            plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
            if not plain and _lies_in(tensor, start, end):
                return _Weight(self, tensor, stamp)
            if plain and tensor.layout is torch.strided:
                if start <= tensor.data_ptr() < end:
                    return _Weight(self, tensor.detach(), stamp)
                if park is not None:
                    parked = park(tensor)
                    if parked is not tensor:
                        return parked
            # Detached: a node that holds its own output would never be freed without a backward pass. Hooks
            # switch autograd's check of versions off, so it is done here.
            return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version

        def unpack(packed: Any) -> Tensor:
            refuse_create_graph(self)
            if type(packed) is tuple:
                tensor, version = packed
                if tensor._version != version:
                    raise written_between(self)
                return tensor  # type: ignore[no-any-return]
            return packed.tensor()  # type: ignore[no-any-return]

        return pack, unpack

    def _layer_index(self) -> int:
        indices = (getattr(module, "layer_idx", None) for module in self.module.modules())
        return next((index for index in indices if isinstance(index, int)), 0)

    def _cached(self, args: Any, kwargs: Any) -> bool:
        """Whether a cache comes in that holds something for this block already, or is of an unknown kind."""
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        index = self._layer_index() if caches else 0
        return any(
            not isinstance(getattr(cache, "layers", None), list) or int(cache.get_seq_length(index)) > 0
            for cache in caches
        )

    def _gated(self, output: Any) -> Any:
        address = -1 if self.slot is None else self.slot.address
        if type(output) is Tensor:
            if output.untyped_storage().data_ptr() == address:
                output = output.clone()  # nothing of a slot leaves its block
            return _gate(self, output)[0] if output.requires_grad else output
        flat, spec = tree_flatten(output)
        places = []
        for index, value in enumerate(flat):
            if isinstance(value, Tensor):
                if type(value) is Tensor and value.untyped_storage().data_ptr() == address:
                    flat[index] = value = value.clone()  # nothing of a slot leaves its block
                if value.requires_grad:
                    places.append(index)
        if places:
            for index, value in zip(places, _gate(self, *[flat[i] for i in places]), strict=True):
                flat[index] = value
        return tree_unflatten(flat, spec)


def _lies_in(tensor: Any, start: int, end: int) -> bool:
    """Whether a packed weight's tensors are views of the slot."""
    packed: dict[str, Tensor] = getattr(tensor, "packed", None) or {}
    return any(start <= part.data_ptr() < end for part in packed.values())
