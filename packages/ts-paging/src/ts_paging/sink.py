"""The sink: gradients of paged weights leave the device as they become final and land in ``p.grad``.

Contributions of one backward pass to one Parameter are summed in the order they arrive, as the engine sums
them for an ordinary leaf, and the sum is added to ``p.grad`` once, at the end of the pass. So after
``backward()`` returns, ``p.grad`` is a real tensor on the host with the bits it would have had.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from ts_core import registry
from ts_core.guard import guard_of
from ts_core.registry import CopyTicket

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


_Parts = dict[int, tuple[nn.Parameter, list[tuple[Tensor, CopyTicket | None]]]]


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
    """

    def __init__(self, memory: HostMemory | None = None) -> None:
        """Hold nothing yet; buffers come from `memory` and are used again."""
        self._memory = memory or PlainMemory()
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
        with self._lock:
            self._take(parameter, grad, first=True)

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Take one contribution; called by the engine's threads during a backward pass.

        Args:
            parameter: The guarded Parameter.
            grad: Its gradient, on any device, with the Parameter's shape and dtype.
        """
        with self._lock:
            self._take(parameter, grad, first=False)

    def _take(self, parameter: nn.Parameter, grad: Tensor, first: bool) -> None:
        task = torch._C._current_graph_task_id()
        under_way = self._passes.get(task)
        if under_way is None:
            self._passes[task] = under_way = _Pass(self)
            torch.autograd.Variable._execution_engine.queue_callback(under_way)
        with torch._C.DisableTorchFunctionSubclass():
            host = self._buffer(parameter)
            ticket = None
            if not grad.is_cuda:
                host.copy_(grad)
            else:
                if grad.stride() != host.stride():
                    grad = torch.empty_strided(
                        host.size(), host.stride(), dtype=host.dtype, device=grad.device
                    ).copy_(grad)
                flat = host.as_strided((host.numel(),), (1,))
                ticket = registry.copy_engine().d2h(flat, grad.as_strided((grad.numel(),), (1,)))
                self.d2h_bytes += host.nbytes
        parts = under_way.parts.setdefault(id(parameter), (parameter, []))[1]
        raced = first and any(other is not None for _, other in parts)
        parts.insert(0 if raced else len(parts), (host, ticket))

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the spare buffers of a Parameter that is paged no more."""
        self._spare.pop(id(parameter), None)

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        """Return a buffer that nobody else holds: one that was ``p.grad`` before, or a new one."""
        spare = self._spare.setdefault(id(parameter), [])
        for tensor, alone in spare:
            if _holders(tensor) <= alone and not self._landing(parameter, tensor):
                return tensor
        # As AccumulateGrad does: the Parameter's strides, if its elements are dense.
        like = parameter.detach()
        like = like if is_dense(like) else torch.empty_like(like, device="meta")
        tensor = self._memory.like(like, parameter)
        spare.append((tensor, _holders(tensor)))
        return tensor

    def _landing(self, parameter: nn.Parameter, tensor: Tensor) -> bool:
        for under_way in self._passes.values():
            parts = under_way.parts.get(id(parameter))
            if parts is not None and any(host is tensor for host, _ in parts[1]):
                return True
        return False

    @torch.no_grad()
    def _land(self, parts: _Parts) -> None:
        """Sum, run the hooks, set or add ``p.grad``: what AccumulateGrad does for an ordinary leaf."""
        for parameter, contributions in parts.values():
            for _, ticket in contributions:
                if ticket is not None:
                    ticket.wait()
            with torch._C.DisableTorchFunctionSubclass():
                total = contributions[0][0]
                for part, _ in contributions[1:]:
                    total += part
                # A graph from before its weight returned to the device lands there.
                total = total.to(parameter.device)
                entry = guard_of(parameter)
                for hook in list(entry.hooks.values()) if entry else ():
                    changed = hook(total)
                    total = total if changed is None else changed
                # A buffer is handed out through a tensor of its own, so that holders can be counted.
                if parameter.grad is None:
                    parameter.grad = total.detach()
                else:
                    if entry is not None:
                        entry.wait()  # a pending update still needs what is there
                    parameter.grad += total
            for landed in list(entry.landed_hooks.values()) if entry else ():
                landed(parameter)
