"""Steps of CUDA parameters whose state is on the host: gradient over, update there, weights back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ts_core.arriving import ArrivingGradient
from ts_core.guard import Guard
from ts_core.registry import CopyTicket, copy_engine

from .slots import Slot, StateMaker

__all__ = ["Arrival", "Batch", "Columns", "Work", "depart", "settle", "staged_step", "update_arrivals"]

_BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Work:
    """One parameter of one step.

    Attributes:
        index: Position among the optimizer's parameters.
        group: Index of its parameter group.
        slot: Its slot.
        grad: Its gradient, in the element order of the slot: flat, or contiguous if the slot is `direct`.
        square_sum: Of the gradient, if it was measured before it came to the host.
        guard: The parameter's guard, if it has one.
        arriving: What tells when the gradient is there, if it may not be yet.
    """

    index: int
    group: int
    slot: Slot
    grad: torch.Tensor
    square_sum: float | None = None
    guard: Guard | None = None
    arriving: ArrivingGradient | None = None

    @property
    def arrived(self) -> bool:
        """Whether the gradient can be read without waiting."""
        return self.arriving is None or self.arriving.arrived

    def arrive(self) -> None:
        """Wait for the gradient."""
        if self.arriving is not None:
            self.arriving.wait()

    @property
    def waits(self) -> bool:
        """Whether its update may run after `step()`: whoever uses the parameter will wait."""
        return self.guard is not None and self.slot.deferrable


@dataclass(slots=True)
class Columns:
    """What a kernel call takes from slots of one bucket, as one list each.

    Attributes:
        first: One of the slots.
        groups: Indices of parameter groups.
        numbers: Positions among the optimizer's parameters.
        exp_avgs, exp_avg_sqs: Flat views of the moments.
        scales: Scales of int8 moments, of the first ones and of the second ones; else empty lists.
        emas: Flat views of averages of the weights; empty without them.
    """

    first: Slot
    groups: list[int]
    numbers: list[int]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    scales: tuple[list[torch.Tensor], list[torch.Tensor]]
    emas: list[torch.Tensor]

    @classmethod
    def of(cls, slots: Sequence[Slot], groups: list[int], numbers: list[int]) -> Columns:
        """Read one or more slots."""
        scaled = [slot.scales for slot in slots if slot.scales]
        return cls(
            slots[0],
            groups,
            numbers,
            [slot.exp_avg for slot in slots],
            [slot.exp_avg_sq for slot in slots],
            ([first for first, _ in scaled], [second for _, second in scaled]),
            [slot.ema for slot in slots if slot.ema is not None],
        )


@dataclass
class Batch:
    """Arguments of one kernel call; `columns` are read from the works unless they are known already."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    lows: list[torch.Tensor] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    columns: Columns | None = None

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


@dataclass
class Arrival:
    """Gradients on their way to host buffers."""

    works: list[Work]
    buffers: list[torch.Tensor]
    tickets: list[CopyTicket]


Leaving = list[tuple[Slot, CopyTicket]]


def depart(works: Sequence[Work], maker: StateMaker) -> tuple[list[Arrival], int]:
    """Queue the copies of gradients to the host, in batches.

    Args:
        works: Parameters of one kind (all 16-bit, or all fp32).
        maker: Makes the buffers.

    Returns:
        What arrives, and its bytes.
    """
    engine = copy_engine()
    arrivals, down = [], 0
    for run in _batches(works):
        buffers = [maker.staging(work.slot, work.grad) for work in run]
        tickets = [engine.d2h(b, work.grad) for b, work in zip(buffers, run, strict=True)]
        down += sum(b.numel() * b.element_size() for b in buffers)
        arrivals.append(Arrival(run, buffers, tickets))
    return arrivals, down


def update_arrivals(
    arrivals: Sequence[Arrival], maker: StateMaker, update: Callable[[Batch], None]
) -> tuple[Leaving, int]:
    """Update each batch when it has arrived, and start its weights back while the next one is updated.

    A 16-bit weight is written over its gradient in the same buffer, if that is a 16-bit one too.

    Args:
        arrivals: What `depart` returned.
        maker: Makes the buffers.
        update: Runs the host kernel.

    Returns:
        The copies under way, and their bytes.
    """
    leaving: Leaving = []
    up = 0
    for arrival in arrivals:
        batch = Batch()
        for work, buffer, ticket in zip(arrival.works, arrival.buffers, arrival.tickets, strict=True):
            _refresh_master(work.slot)
            ticket.wait()
            low = maker.leaving(work.slot, buffer) if work.slot.low else None
            batch.add(work, _master(work.slot), buffer, low)
        update(batch)
        for i, work in enumerate(arrival.works):
            ticket, nbytes = _copy_back(work.slot, batch.lows[i] if batch.lows else batch.params[i])
            leaving.append((work.slot, ticket))
            up += nbytes
    return leaving, up


def settle(leaving: Leaving) -> None:
    """Wait until updated weights are there."""
    for slot, ticket in leaving:
        ticket.wait_stream(torch.cuda.current_stream(slot.param.device) if slot.param.is_cuda else None)
        ticket.wait()
        torch.autograd.graph.increment_version(slot.param)
        slot.version = slot.param._version


def staged_step(works: Sequence[Work], maker: StateMaker, update: Callable[[Batch], None]) -> tuple[int, int]:
    """Update parameters whose gradients and weights cross between device and host; all is complete on return.

    Args:
        works: Parameters of one kind (all 16-bit, or all fp32).
        maker: Makes the buffers.
        update: Runs the host kernel.

    Returns:
        Bytes copied device to host, and host to device.
    """
    arrivals, down = depart(works, maker)
    leaving, up = update_arrivals(arrivals, maker, update)
    settle(leaving)
    return down, up
