"""The sink: gradients of paged weights leave the device as they become final and land in ``p.grad``.

Contributions of one backward pass to one Parameter are summed in the order they arrive, as the engine sums
them for an ordinary leaf, and the sum is added to ``p.grad`` once, at the end of the pass. So after
``backward()`` returns, ``p.grad`` is a real tensor on the host with the bits it would have had.

Where an optimizer waits for gradients itself, `late` lets ``backward()`` return before they are there:
``p.grad`` is then an `ArrivingGradient`, an ordinary tensor to whoever reads it. Where every value of a
gradient has a 16-bit form, as autocast makes them for fp32 weights, `narrow` sends that.

Contributions to a Parameter that several modules use, such as a tied embedding, wait on the device for each
other and leave as one: the last of them comes at the very end, and a sum on the host would come on top.

A gradient can be measured where it is, before it leaves: on a device that costs next to nothing, while
whoever clips by the global norm would have to read all gradients again from host memory.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ts_core.arriving import ArrivingGradient, Landing, settled_gradient
from ts_core.guard import Guard, guard_of
from ts_core.registry import CopyTicket

from .copy import d2h_many
from .disk import DiskTicket
from .files import locate
from .layout import is_dense
from .narrow import Flags, NarrowBy, SquareSum, narrow_by_torch

__all__ = ["GradientSink", "HostMemory", "PlainMemory"]


class HostMemory(Protocol):
    """Gives host tensors for gradients: page-locked, ordinary, or files mapped into memory."""

    def like(self, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return an uninitialised host tensor with the dtype, shape and strides of a dense one.

        Args:
            tensor: The dense one; may be a meta tensor.
            owner: The Parameter whose gradient it will hold.
        """
        ...


class PlainMemory:
    """Ordinary memory."""

    def like(self, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return an uninitialised tensor of the same dtype, shape and strides on the CPU."""
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


#: Of gradients on a device of which is not known yet whether their narrow form will do.
_HELD_BYTES = 512 << 20
_guards_see: Any = torch._C._EnableTorchFunction  # within DisableTorchFunctionSubclass
_MEASURED = (torch.float32, torch.bfloat16, torch.float16)


class _Squares(NamedTuple):
    """Sums of squares on their device, of which one is meant, and the stream that computes them."""

    values: Tensor
    at: int
    stream: Any


class _Part:
    """A contribution: its host buffer, the copy under way, and its sum of squares if it is measured.

    The buffer is a tensor of its own on that memory, which so counts as held. One that waits on the device
    has none yet, but the gradient and the stream that it was made on.
    """

    __slots__ = ("from_device", "held", "host", "squares", "stream", "thread", "ticket")

    def __init__(self, host: Tensor | None, ticket: CopyTicket | DiskTicket | None) -> None:
        self.host, self.ticket = host, ticket
        self.from_device = False
        self.thread = threading.get_ident()
        self.held: Tensor | None = None
        self.stream: Any = None
        self.squares: _Squares | None = None


_Parts = dict[int, tuple[nn.Parameter, list[_Part]]]
_Batch = list[tuple[_Part, Tensor, Tensor]]  # a part, where it goes, and what leaves the device


class _Wide(NamedTuple):
    """A gradient that leaves in a narrower format, where that goes, and what it is on the device.

    Both are of one dimension, in the order of the buffer.
    """

    parameter: nn.Parameter
    part: _Part
    flat: Tensor
    grad: Tensor


class _Narrow(NamedTuple):
    """Gradients that have left in a narrower format; whether that lost anything arrives on the host later."""

    grads: list[_Wide]
    nbytes: int  # of the gradients, which are held until then
    lost: Flags


class _Leaving:
    """The gradients of one call: what is copied from a GPU, made narrow before that, or measured."""

    __slots__ = ("alone", "batch", "narrow")

    def __init__(self) -> None:
        self.batch: _Batch = []
        self.narrow: list[_Wide] = []
        self.alone: list[tuple[_Part, Tensor]] = []


class _Pass:
    """What one backward pass has brought so far; the engine calls it at the end of the pass.

    The engine alone holds it: it goes with a pass that fails, and a pass within another one (reentrant
    checkpointing) has its own.
    """

    __slots__ = ("__weakref__", "_sink", "_task", "narrow", "parts")

    def __init__(self, sink: GradientSink, task: int) -> None:
        self._sink, self._task = sink, task
        self.parts: _Parts = {}
        self.narrow: list[_Narrow] = []

    def __call__(self) -> None:
        self._sink._land(self)
        self.parts, self.narrow = {}, []  # whoever holds this holds no buffer
        # Else the dictionary hears of our end in a callback, where a Ctrl-C that comes then is lost.
        self._sink._passes.pop(self._task, None)


class GradientSink:
    """Takes gradients during a backward pass and lands them at its end.

    Attributes:
        d2h_bytes: Bytes that left a device so far.
        shared: ids of Parameters that several modules use.
        square_sum: Measures gradients before they leave, or None; see `__init__`.
        late: A pass may end before its gradients are there.
        narrow: fp32 gradients of fp32 Parameters leave as bfloat16 where that has the same values.
        narrow_by: Given flat fp32 gradients on one device, returns their bfloat16 forms, which may share a
            storage, and on that device one number each: not 0 where an element is not equal to its form, and
            the sum of squares with the bits of `square_sum`. None: several calls of PyTorch.
    """

    def __init__(self, memory: HostMemory | None = None, square_sum: SquareSum | None = None) -> None:
        """Hold nothing yet.

        Args:
            memory: Where buffers come from; they are used again.
            square_sum: Given flat gradients on one device, returns the sum of squares of each, float64, on
                that device. What it finds is noted on the guard of a Parameter whose ``.grad`` is exactly the
                gradient that was measured; the same bits must come of measuring ``.grad`` later.
        """
        self._memory = memory or PlainMemory()
        self.square_sum = square_sum
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        # The engine has a thread per device: a penalty on host Parameters runs beside the CUDA backward.
        self._lock = threading.Lock()
        # Held while a gradient lands, one for each Parameter: passes of several threads may end together.
        # AccumulateGrad has one, too; a hook may call backward itself.
        self._landings: dict[int, threading.RLock] = {}
        # With each buffer, how many hold its memory when nobody else does: a view has a base that does, too.
        self._spare: dict[int, list[tuple[Tensor, int]]] = {}
        self.shared: set[int] = set()
        self.d2h_bytes = 0
        self.late = self.narrow = False
        self.narrow_by: NarrowBy | None = None
        self._no_narrow: set[int] = set()  # ids of Parameters whose gradients have shown other values

    def divert(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take what reached a Parameter directly, by a penalty computed on it; arguments are those of `add`.

        Where one thread computes both, it is summed as it arrives, as the engine sums for an ordinary leaf.
        Beside a GPU the engine's threads race, and it is always the first.
        """
        self._take([(parameter, grad)], first=True)

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take one contribution; called by the engine's threads during a backward pass.

        Args:
            parameter: The guarded Parameter.
            grad: Its gradient, on any device, with the Parameter's shape and dtype.
        """
        self._take([(parameter, grad)], first=False)

    def add_all(self, grads: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Take what is there at the same time, such as the gradients of a block: measured in one call.

        Args:
            grads: Arguments of `add`.
        """
        self._take(grads, first=False)

    def _take(self, grads: Sequence[tuple[nn.Parameter, Tensor]], first: bool) -> None:
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            task = torch._C._current_graph_task_id()
            under_way = self._passes.get(task)
            if under_way is None:
                self._passes[task] = under_way = _Pass(self, task)
                torch.autograd.Variable._execution_engine.queue_callback(under_way)
            self._settle_narrow(under_way, _HELD_BYTES)
            leaving = _Leaving()
            for parameter, grad in grads:
                self._leave(under_way, parameter, grad, first, leaving)
            if leaving.narrow:
                self._make_narrow(under_way, leaving)
            self._depart(leaving.batch)
            # After the copies have been asked for, so that they need not wait for this.
            self._measure(leaving.alone)

    def _depart(self, batch: _Batch, priority: int = 0) -> None:
        """Start the copies of gradients that are on a GPU, those of a device in one call."""
        devices: dict[torch.device, _Batch] = {}
        for entry in batch:
            devices.setdefault(entry[2].device, []).append(entry)
        for entries in devices.values():
            ticket = d2h_many(
                [flat for _, flat, _ in entries], [source for _, _, source in entries], priority=priority
            )
            for part, flat, _ in entries:
                part.ticket = ticket
                self.d2h_bytes += flat.nbytes

    def _leave(
        self, under_way: _Pass, parameter: nn.Parameter, grad: Tensor, first: bool, leaving: _Leaving
    ) -> None:
        """Put a gradient on its way to the host, or in `leaving`, or let it wait for others."""
        key = id(parameter)
        parts = under_way.parts.setdefault(key, (parameter, []))[1]
        away = _is_away(grad)
        if away and key in self.shared and grad.dtype is parameter.dtype:
            part = _Part(None, None)
            part.held, part.stream = grad.detach(), _stream_of(grad)
            part.from_device = True
            parts.append(part)
            return
        # Only a gradient that may land as it is: no second contribution, nor one added to what is there.
        alone = not parts and parameter.grad is None
        dense = alone and (parameter.is_contiguous() or is_dense(parameter))
        narrow = dense and away and self._narrows(parameter, grad)
        host = self._buffer(parameter, torch.bfloat16 if narrow else None)
        part = _Part(host, None)
        part.from_device = away
        raced = first and any(other.from_device and other.thread != part.thread for other in parts)
        parts.insert(0 if raced else len(parts), part)
        flat = host.as_strided((host.numel(),), (1,))
        if narrow:
            leaving.narrow.append(_Wide(parameter, part, flat, _flat_as(grad, host, torch.float32)))
            return
        place = None if away else locate(host)
        if not away and place is None:
            host.copy_(grad)
            source = flat
        else:
            source = _flat_as(grad, host, host.dtype)
            if place is not None:
                part.ticket = place[0].write_async(flat, source)
            else:
                leaving.batch.append((part, flat, source))
        if dense and self._measures(host):
            leaving.alone.append((part, source))

    def _narrows(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Whether to try a narrower format."""
        wide = parameter.dtype is torch.float32 and grad.dtype is torch.float32
        return self.narrow and wide and id(parameter) not in self._no_narrow

    def _make_narrow(self, under_way: _Pass, leaving: _Leaving) -> None:
        """Have gradients rounded and measured where they are, and whether that lost anything come here."""
        devices: dict[torch.device, list[_Wide]] = {}
        for entry in leaving.narrow:
            devices.setdefault(entry.grad.device, []).append(entry)
        narrow_by = self.narrow_by or partial(narrow_by_torch, self.square_sum)
        for entries in devices.values():
            forms, lost, sums = narrow_by([entry.grad for entry in entries])
            stream = _stream_of(sums)
            for at, (entry, form) in enumerate(zip(entries, forms, strict=True)):
                leaving.batch.append((entry.part, entry.flat, form))
                if self._measures(entry.flat):
                    entry.part.squares = _Squares(sums, at, stream)
            nbytes = sum(entry.grad.nbytes for entry in entries)
            under_way.narrow.append(_Narrow(entries, nbytes, Flags(lost)))

    def _settle_narrow(self, under_way: _Pass, held_bytes: int) -> None:
        """Let go of gradients whose narrow form will do, and send the others as they are.

        Args:
            under_way: The pass.
            held_bytes: On the device of gradients of which is not known yet; what is above is waited for.
        """
        held = sum(each.nbytes for each in under_way.narrow)
        batch: _Batch = []
        while under_way.narrow and (held > held_bytes or under_way.narrow[0].lost.done()):
            each = under_way.narrow.pop(0)
            held -= each.nbytes
            for wide, lost in zip(each.grads, each.lost.read(), strict=True):
                if lost:
                    self._no_narrow.add(id(wide.parameter))
                    wide.part.host = host = self._buffer(wide.parameter)
                    batch.append((wide.part, host.as_strided((host.numel(),), (1,)), wide.grad))
        self._depart(batch)

    def _measures(self, host: Tensor) -> bool:
        """Whether a gradient is measured, if its Parameter is dense.

        Only then does its optimizer see the elements in the same order.
        """
        return self.square_sum is not None and host.dtype in _MEASURED and host.numel() > 0

    def _gather(self, parts: _Parts) -> None:
        """Let what has waited on the device leave: the sum, or each by itself where the host has a share."""
        for parameter, contributions in parts.values():
            held = [part for part in contributions if part.held is not None]
            if not held:
                continue
            with torch._C.DisableTorchFunctionSubclass(), _on(held[-1].stream):
                joined = len(held) == len(contributions) and len({part.stream for part in held}) == 1
                if joined:
                    while len(held) > 1:
                        _add_to(held[0], held.pop(1))
                    del contributions[1:]
                batch: _Batch = []
                for part in held:
                    with self._lock:
                        part.host = self._buffer(parameter)
                    grad, part.held = part.held, None
                    assert grad is not None
                    source = _flat_as(grad, part.host, part.host.dtype)
                    batch.append((part, part.host.as_strided((part.host.numel(),), (1,)), source))
                # Not held up by those before: nothing comes after it, and the pass ends sooner.
                self._depart(batch, priority=1)
                alone = joined and parameter.grad is None and is_dense(parameter)
                if alone and self._measures(batch[0][1]):
                    self._measure([(batch[0][0], batch[0][2])])

    def _measure(self, alone: Sequence[tuple[_Part, Tensor]]) -> None:
        devices: dict[torch.device, list[tuple[_Part, Tensor]]] = {}
        for part, source in alone:
            devices.setdefault(source.device, []).append((part, source.detach()))
        for entries in devices.values():
            if self.square_sum is not None:
                stream = _stream_of(entries[0][1])
                values = self.square_sum([source for _, source in entries])
                for at, (part, _) in enumerate(entries):
                    part.squares = _Squares(values, at, stream)

    def renamed(self, before: nn.Parameter, now: nn.Parameter) -> None:
        """Another Parameter stands in the place of one from now on."""
        if id(before) in self.shared:
            self.shared.add(id(now))

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the spare buffers of a Parameter that is paged no more."""
        self._spare.pop(id(parameter), None)
        self._landings.pop(id(parameter), None)
        self.shared.discard(id(parameter))
        self._no_narrow.discard(id(parameter))

    def _buffer(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer that nobody else holds: one that was ``p.grad`` before, or a new one.

        What is returned is a tensor of its own, so that holders can be counted; a copy under way is one.
        Called under the lock.
        """
        dtype = dtype or parameter.dtype
        spare = self._spare.setdefault(id(parameter), [])
        for tensor, alone in spare:
            if tensor.dtype is dtype and _holders(tensor) <= alone:
                return tensor.detach()
        # As AccumulateGrad does: the Parameter's strides, if its elements are dense.
        like = parameter.detach()
        if not is_dense(like) or like.dtype is not dtype:
            like = torch.empty_like(like, dtype=dtype, device="meta")
        tensor = self._memory.like(like, parameter)
        spare.append((tensor, _holders(tensor)))
        return tensor.detach()

    def _wide(self, parameter: Tensor) -> Tensor:
        """Return an fp32 buffer for a sum of gradients."""
        with self._lock:
            return self._buffer(cast(nn.Parameter, parameter), torch.float32)

    @torch.no_grad()
    def _land(self, under_way: _Pass) -> None:
        """Sum, run the hooks, set or add ``p.grad``: what AccumulateGrad does for an ordinary leaf.

        The host waits for the device as late as can be: most gradients land while it still computes.
        """
        parts = under_way.parts
        self._gather(parts)
        unknown = {id(wide.parameter) for each in under_way.narrow for wide in each.grads}
        guards = {key: guard_of(parameter) for key, (parameter, _) in parts.items()}
        hooks = {key: _hooks_of(parameter, guards[key]) for key, (parameter, _) in parts.items()}
        # What is run on a Parameter once its gradient has landed may ask for the sum of squares, and other
        # people's hooks may read or edit what has landed before, which spoils its sum.
        ours = all(not after and _leave_gradient(before.values()) for before, after in hooks.values())
        values = None if ours else _measured(parts)
        landed: list[tuple[int, Guard, Tensor]] = []
        for key, (parameter, contributions) in parts.items():
            if key in unknown:  # those came last
                with self._lock:
                    self._settle_narrow(under_way, 0)
                unknown.clear()
            with self._landings.setdefault(key, threading.RLock()):
                entry = guards[key] if ours else guard_of(parameter)  # others may have released it
                before, after = hooks[key]
                with torch._C.DisableTorchFunctionSubclass():
                    known = list(before.values())
                    alone = ours or _leave_gradient(known)
                    grad = self._land_one(parameter, contributions, entry, known, alone, not after)
                    if grad is not None and entry is not None:
                        entry.note_square_sum(grad, None if values is None else values.get(key))
                        landed.append((key, entry, grad))
                for done in list(after.values()):
                    done(parameter)
        if values is None:
            values = _measured(parts)
            for key, entry, grad in landed:
                if key in values:
                    entry.complete_square_sum(grad, values[key])

    def _land_one(
        self,
        parameter: nn.Parameter,
        contributions: list[_Part],
        entry: Guard | None,
        hooks: list[Any],
        left_alone: bool,
        quiet: bool,
    ) -> Tensor | None:
        """Land the gradient of one Parameter.

        Args:
            parameter: The Parameter.
            contributions: What came for it.
            entry: Its guard.
            hooks: What is run on the gradient before it lands.
            left_alone: All of them say that they edit nothing.
            quiet: Nothing is run once it has landed.

        Returns:
            What stands in ``p.grad``, if it is what left the device and nothing else.
        """
        # A hook may edit through memory that moves no version; some say that they do not.
        late = self._arriving(parameter, contributions, entry) if left_alone and quiet else None
        buffer = total = self._total(parameter, contributions) if late is None else late
        # A graph from before its weight returned to the device lands there.
        total = total.to(parameter.device) if late is None else total
        version = total._version
        if entry is not None:
            entry.wide_memory = self._wide
        for hook in hooks:
            # Others' code reads other Parameters past nobody: their guards have to see it.
            if left_alone or _leave_gradient([hook]):
                changed = hook(total)
            else:
                with _guards_see():
                    changed = hook(total)
            total = total if changed is None else changed
        # A buffer is handed out through a tensor of its own, so that holders can be counted.
        if parameter.grad is None:
            parameter.grad = landed = total.detach() if late is None else total
            return landed if left_alone and total is buffer and total._version == version else None
        if entry is not None:
            entry.wait()  # a pending update still needs what is there
        settled_gradient(parameter)
        parameter.grad += total
        return None

    def _arriving(
        self, parameter: nn.Parameter, contributions: list[_Part], entry: Guard | None
    ) -> ArrivingGradient | None:
        """Make what stands for a gradient until it is there; None: it has to be waited for."""
        part = contributions[0]
        usual = self.late and len(contributions) == 1 and parameter.grad is None
        if not usual or not part.from_device or part.host is None or not hasattr(part.ticket, "done"):
            return None
        if entry is None or not parameter.is_cpu:
            return None
        reference, me = weakref.ref(parameter), weakref.ref(self)

        def memory() -> Tensor:
            owner, sink = reference(), me()
            if owner is not None and sink is not None and id(owner) in sink._spare:
                with sink._lock:
                    return sink._buffer(owner)
            return torch.empty_strided(payload.size(), payload.stride(), dtype=dtype)

        payload, dtype = part.host, parameter.dtype
        return ArrivingGradient(payload, cast(Landing, part.ticket), dtype, memory)

    def _total(self, parameter: nn.Parameter, contributions: list[_Part]) -> Tensor:
        """Wait for contributions and return their sum, in a buffer."""
        for part in contributions:
            if part.ticket is not None:
                part.ticket.wait()
        buffers = [part.host for part in contributions if part.host is not None]
        total = buffers[0]
        if total.dtype is not parameter.dtype:
            narrow = total
            with self._lock:
                total = self._buffer(parameter)
            total.copy_(narrow)
        for more in buffers[1:]:
            total += more
        return total


def _hooks_of(parameter: nn.Parameter, entry: Guard | None) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return what is run on a gradient before it lands, and on the Parameter after that."""
    if entry is not None:
        return entry.hooks, entry.landed_hooks
    native: Any = parameter  # released meanwhile: its hooks are its own again
    return native._backward_hooks or {}, native._post_accumulate_grad_hooks or {}


def _leave_gradient(hooks: Iterable[Any]) -> bool:
    """Whether all of them say that they edit nothing."""
    return all(getattr(hook, "leaves_gradient", False) for hook in hooks)


def _is_away(grad: Tensor) -> bool:
    """Whether a gradient is on a device that it leaves for the host."""
    return grad.is_cuda


def _stream_of(grad: Tensor) -> Any:
    return torch.cuda.current_stream(grad.device) if grad.is_cuda else None


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _flat_as(grad: Tensor, host: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient as one dimension, with a dtype and in the order of memory of its host buffer."""
    if grad.stride() != host.stride() or grad.dtype is not dtype:
        made = torch.empty_strided(host.size(), host.stride(), dtype=dtype, device=grad.device)
        grad = made.copy_(grad)
    return grad.as_strided((grad.numel(),), (1,))


def _add_to(part: _Part, other: _Part) -> None:
    """Add one held gradient to another, in its memory if nobody else can see that."""
    one, two = part.held, other.held
    assert one is not None
    assert two is not None
    # Ours alone: this tensor, which nobody was given, and the storage object that is asked.
    if is_dense(one) and _holders(one) == 2:
        one += two
    else:
        part.held = one + two


def _measured(parts: _Parts) -> dict[int, float]:
    """Bring to the host what was measured of gradients that are the only one of their Parameter."""
    found = {
        key: squares
        for key, (_, contributions) in parts.items()
        if len(contributions) == 1 and (squares := contributions[0].squares) is not None
    }
    streams: dict[Any, dict[int, Tensor]] = {}
    for squares in found.values():
        streams.setdefault(squares.stream, {})[id(squares.values)] = squares.values
    numbers: dict[int, list[float]] = {}
    for stream, tensors in streams.items():
        # On the stream that they were measured on: the one that is current here may be another.
        with _on(stream):
            line = iter(torch.cat(list(tensors.values())).tolist())
        numbers.update({key: [next(line) for _ in range(t.numel())] for key, t in tensors.items()})
    return {key: numbers[id(squares.values)][squares.at] for key, squares in found.items()}
