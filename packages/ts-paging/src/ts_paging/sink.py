"""The sink: gradients of paged weights leave the device as they become final and land in ``p.grad``.

Contributions of one backward pass to one Parameter are summed in the order they arrive, as the engine sums
them for an ordinary leaf, and the sum is added to ``p.grad`` once, at the end of the pass. So after
``backward()`` returns, ``p.grad`` is a real tensor on the host with the bits it would have had.

A gradient can be measured where it is, before it leaves: on a device that costs next to nothing, while
whoever clips by the global norm would have to read all gradients again from host memory.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ts_core import registry
from ts_core.guard import guard_of
from ts_core.registry import CopyTicket

from .disk import DiskTicket
from .files import locate
from .layout import is_dense

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


SquareSum = Callable[[Sequence[Tensor]], Tensor]
_MEASURED = (torch.float32, torch.bfloat16, torch.float16)


class _Squares(NamedTuple):
    """Sums of squares on their device, of which one is meant, and the stream that computes them."""

    values: Tensor
    at: int
    stream: Any


class _Part:
    """A contribution: its host buffer, the copy under way, and its sum of squares if it is measured."""

    __slots__ = ("from_device", "host", "squares", "ticket")

    def __init__(self, host: Tensor, ticket: CopyTicket | DiskTicket | None, from_device: bool) -> None:
        self.host, self.ticket, self.from_device = host, ticket, from_device
        self.squares: _Squares | None = None


_Parts = dict[int, tuple[nn.Parameter, list[_Part]]]


class _Pass:
    """What one backward pass has brought so far; the engine calls it at the end of the pass.

    The engine alone holds it: it goes with a pass that fails, and a pass within another one (reentrant
    checkpointing) has its own.
    """

    __slots__ = ("__weakref__", "_sink", "parts")

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self.parts: _Parts = {}

    def __call__(self) -> None:
        self._sink._land(self.parts)


class GradientSink:
    """Takes gradients during a backward pass and lands them at its end.

    Attributes:
        d2h_bytes: Bytes that left a device so far.
        square_sum: Measures gradients before they leave, or None; see `__init__`.
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
        # With each buffer, how many hold its memory when nobody else does: a view has a base that does, too.
        self._spare: dict[int, list[tuple[Tensor, int]]] = {}
        self.d2h_bytes = 0

    def divert(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take what reached a Parameter directly, by a penalty computed on it; arguments are those of `add`.

        Where the block computes on the CPU too, it is summed as it arrives, as the engine sums for an
        ordinary leaf. Beside a GPU the engine's threads race, and it is always the first.
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
                self._passes[task] = under_way = _Pass(self)
                torch.autograd.Variable._execution_engine.queue_callback(under_way)
            alone = [
                (part, source)
                for parameter, grad in grads
                for part, source in [self._leave(under_way, parameter, grad, first)]
                if source is not None
            ]
            # After the copies have been asked for, so that they need not wait for this.
            self._measure(alone)

    def _leave(
        self, under_way: _Pass, parameter: nn.Parameter, grad: Tensor, first: bool
    ) -> tuple[_Part, Tensor | None]:
        """Start the copy to the host; return the gradient as one dimension, too, if it is to be measured."""
        parts = under_way.parts.setdefault(id(parameter), (parameter, []))[1]
        host = self._buffer(parameter)
        flat = source = host.as_strided((host.numel(),), (1,))
        ticket: CopyTicket | DiskTicket | None = None
        place = None if grad.is_cuda else locate(host)
        if not grad.is_cuda and place is None:
            host.copy_(grad)
        else:
            if grad.stride() != host.stride() or grad.dtype is not host.dtype:
                grad = torch.empty_strided(
                    host.size(), host.stride(), dtype=host.dtype, device=grad.device
                ).copy_(grad)
            source = grad.as_strided((grad.numel(),), (1,))
            if place is not None:
                ticket = place[0].write_async(flat, source)
            else:
                ticket = registry.copy_engine().d2h(flat, source)
                self.d2h_bytes += host.nbytes
        # Only a gradient that may land as it is: no second contribution, nor one added to what is there, and
        # in an order of elements that its optimizer will see too.
        alone = self.square_sum is not None and not parts and parameter.grad is None
        alone = alone and host.dtype in _MEASURED and host.numel() > 0 and is_dense(parameter.detach())
        part = _Part(host, ticket, grad.is_cuda)
        raced = first and any(other.from_device for other in parts)
        parts.insert(0 if raced else len(parts), part)
        return part, source if alone else None

    def _measure(self, alone: Sequence[tuple[_Part, Tensor]]) -> None:
        devices: dict[torch.device, list[tuple[_Part, Tensor]]] = {}
        for part, source in alone:
            devices.setdefault(source.device, []).append((part, source.detach()))
        for device, entries in devices.items():
            if self.square_sum is not None:
                stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
                values = self.square_sum([source for _, source in entries])
                for at, (part, _) in enumerate(entries):
                    part.squares = _Squares(values, at, stream)

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the spare buffers of a Parameter that is paged no more."""
        self._spare.pop(id(parameter), None)

    def _buffer(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer that nobody else holds: one that was ``p.grad`` before, or a new one."""
        dtype = dtype or parameter.dtype
        spare = self._spare.setdefault(id(parameter), [])
        for tensor, alone in spare:
            if tensor.dtype is dtype and _holders(tensor) <= alone and not self._landing(parameter, tensor):
                return tensor
        # As AccumulateGrad does: the Parameter's strides, if its elements are dense.
        like = parameter.detach()
        if not is_dense(like) or like.dtype is not dtype:
            like = torch.empty_like(like, dtype=dtype, device="meta")
        tensor = self._memory.like(like, parameter)
        spare.append((tensor, _holders(tensor)))
        return tensor

    def _wide(self, parameter: Tensor) -> Tensor:
        """Return an fp32 buffer for a sum of gradients; what is handed out is a tensor of its own."""
        return self._buffer(cast(nn.Parameter, parameter), torch.float32).detach()

    def _landing(self, parameter: nn.Parameter, tensor: Tensor) -> bool:
        for under_way in self._passes.values():
            parts = under_way.parts.get(id(parameter))
            if parts is not None and any(part.host is tensor for part in parts[1]):
                return True
        return False

    @torch.no_grad()
    def _land(self, parts: _Parts) -> None:
        """Sum, run the hooks, set or add ``p.grad``: what AccumulateGrad does for an ordinary leaf."""
        values = _measured(parts)
        for key, (parameter, contributions) in parts.items():
            for part in contributions:
                if part.ticket is not None:
                    part.ticket.wait()
            with torch._C.DisableTorchFunctionSubclass():
                buffer = total = contributions[0].host
                for part in contributions[1:]:
                    total += part.host
                # A graph from before its weight returned to the device lands there.
                total = total.to(parameter.device)
                entry = guard_of(parameter)
                version = total._version
                if entry is not None:
                    entry.wide_memory = self._wide
                hooks = list(entry.hooks.values()) if entry else []
                for hook in hooks:
                    changed = hook(total)
                    total = total if changed is None else changed
                # A buffer is handed out through a tensor of its own, so that holders can be counted.
                if parameter.grad is None:
                    parameter.grad = landed = total.detach()
                    # A hook may edit through memory that moves no version; some say that they do not.
                    same = all(getattr(hook, "leaves_gradient", False) for hook in hooks)
                    same = same and total is buffer and total._version == version
                    if entry is not None and key in values and same:
                        entry.note_square_sum(landed, values[key])
                else:
                    if entry is not None:
                        entry.wait()  # a pending update still needs what is there
                    parameter.grad += total
            for done in list(entry.landed_hooks.values()) if entry else ():
                done(parameter)


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
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            line = iter(torch.cat(list(tensors.values())).tolist())
        numbers.update({key: [next(line) for _ in range(t.numel())] for key, t in tensors.items()})
    return {key: numbers[id(squares.values)][squares.at] for key, squares in found.items()}
