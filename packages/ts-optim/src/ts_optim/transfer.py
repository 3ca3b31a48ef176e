"""Steps of CUDA parameters whose state is on the host: gradient over, update there, weights back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ts_core.registry import CopyTicket, copy_engine

from .slots import Slot, StateMaker

__all__ = ["Batch", "Work", "staged_step"]

_BATCH_BYTES = 32 << 20


@dataclass
class Work:
    """One parameter of one step.

    Attributes:
        index: Position among the optimizer's parameters.
        group: Index of its parameter group.
        slot: Its slot.
        grad: Its gradient, flat, in the element order of the slot.
        square_sum: Of the gradient, if it was measured before it came to the host.
    """

    index: int
    group: int
    slot: Slot
    grad: torch.Tensor
    square_sum: float | None = None


@dataclass
class Batch:
    """Arguments of one kernel call."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    lows: list[torch.Tensor] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def add(self, work: Work, param: torch.Tensor, grad: torch.Tensor, low: torch.Tensor | None) -> None:
        """Append one tensor."""
        self.works.append(work)
        self.params.append(param)
        self.grads.append(grad)
        if low is not None:
            self.lows.append(low)


def _batches(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Cut a list into runs of about _BATCH_BYTES, so that copies overlap updates."""
    run: list[Work] = []
    nbytes = 0
    for work in works:
        run.append(work)
        nbytes += work.grad.numel() * work.grad.element_size()
        if nbytes >= _BATCH_BYTES:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


def _master(slot: Slot) -> torch.Tensor:
    assert slot.master is not None  # every staged slot has one
    return slot.master


def _refresh_master(slot: Slot) -> None:
    """Take over weights that somebody wrote on the device since our last step."""
    if slot.param._version == slot.version:
        return
    target = slot.state.get("master")
    if target is None:
        _master(slot).copy_(slot.weights.reshape(-1))
    else:
        now = slot.param.detach().to("cpu")
        target.copy_(torch.where(target.to(now.dtype) == now, target, now.to(target.dtype)))


def _copy_back(slot: Slot, source: torch.Tensor) -> tuple[CopyTicket, int]:
    """Start the copy of updated weights to the device."""
    ticket = copy_engine().h2d(slot.weights, source.view(slot.weights.shape))
    return ticket, source.numel() * source.element_size()


def staged_step(works: Sequence[Work], maker: StateMaker, update: Callable[[Batch], None]) -> tuple[int, int]:
    """Update parameters whose gradients and weights cross between device and host.

    Gradients are copied to host buffers in batches, all copies queued at once; each batch is updated when it
    has arrived, and its weights start back while the next one is updated. On return every copy is complete.
    A 16-bit weight is written over its gradient in the same buffer.

    Args:
        works: Parameters of one kind (all 16-bit, or all fp32).
        maker: Makes the buffers.
        update: Runs the host kernel.

    Returns:
        Bytes copied device to host, and host to device.
    """
    engine = copy_engine()
    arrivals: list[tuple[list[Work], list[torch.Tensor], list[CopyTicket]]] = []
    down = up = 0
    for run in _batches(works):
        buffers = [maker.staging(work.slot, work.grad) for work in run]
        tickets = [engine.d2h(b, work.grad) for b, work in zip(buffers, run, strict=True)]
        down += sum(b.numel() * b.element_size() for b in buffers)
        arrivals.append((run, buffers, tickets))
    leaving: list[tuple[Slot, CopyTicket]] = []
    for run, buffers, tickets in arrivals:
        batch = Batch()
        for work, buffer, ticket in zip(run, buffers, tickets, strict=True):
            _refresh_master(work.slot)
            ticket.wait()
            # fp32 gradients of 16-bit weights leave no room for the weights in their place.
            same = work.slot.param.dtype is buffer.dtype
            low = buffer if same else torch.empty(buffer.shape, dtype=work.slot.param.dtype)
            batch.add(work, _master(work.slot), buffer, low if work.slot.low else None)
        update(batch)
        for i, work in enumerate(run):
            ticket, nbytes = _copy_back(work.slot, batch.lows[i] if batch.lows else batch.params[i])
            leaving.append((work.slot, ticket))
            up += nbytes
    for slot, ticket in leaving:
        ticket.wait_stream(torch.cuda.current_stream(slot.param.device) if slot.param.is_cuda else None)
        ticket.wait()
        torch.autograd.graph.increment_version(slot.param)
        slot.version = slot.param._version
    return down, up
