"""Calls of the host kernel, and updates of parameters whose state is where they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _C
from .moments import block_count
from .options import Hyper
from .reference import adamw_
from .slots import Slot
from .transfer import Batch, Columns, Work

__all__ = [
    "Clock",
    "Measures",
    "PlainCall",
    "PlainUpdate",
    "Terms",
    "call_kernel",
    "choose_kernel",
    "is_plain",
    "update_double",
]

#: Spans of a clock that are kept before they are added up.
_SPANS = 64
_NOTHING = torch.empty(0, dtype=torch.float64)


class Clock:
    """Seconds by what they went into, added up from any thread."""

    def __init__(self, *names: str) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(names, 0.0)
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._until = dict.fromkeys(names, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """Add to one of them."""
        with self._lock:
            self._seconds[name] += seconds

    def add_span(self, name: str, start: float) -> None:
        """Add what has passed since `start`, of `time.perf_counter`; what two threads share counts once."""
        span = start, time.perf_counter()
        with self._lock:
            spans = self._spans.setdefault(name, [])
            spans.append(span)
            if len(spans) >= _SPANS:
                self._join(name)

    def _join(self, name: str) -> None:
        """Add up the spans so far, each from where those before it end.

        One that is told later, and began before that, counts from there: a call's time in `_SPANS` at most.
        """
        for start, end in sorted(self._spans.pop(name, ())):
            self._seconds[name] += max(0.0, end - max(start, self._until[name]))
            self._until[name] = max(self._until[name], end)

    def read(self) -> dict[str, float]:
        """Return all of them."""
        with self._lock:
            for name in list(self._spans):
                self._join(name)
            return dict(self._seconds)


class Measures:
    """Sums of squares that kernels found in the last step, added from any thread."""

    def __init__(self) -> None:
        """Hold none."""
        self._lock = threading.Lock()
        self._found: list[tuple[list[int], torch.Tensor]] = []

    def add(self, works: Sequence[Work], sums: torch.Tensor) -> None:
        """Take float64 `[works, 3]`, of gradients, updates and new weights, on any device."""
        with self._lock:
            self._found.append(([work.index for work in works], sums))

    def read(self) -> dict[int, list[float]]:
        """Return them by the parameter's index, in its order."""
        with self._lock:
            found = list(self._found)
        return dict(sorted((i, row) for at, sums in found for i, row in zip(at, sums.tolist(), strict=True)))


@dataclass(frozen=True)
class Terms:
    """What one call of `step()` fixed for all its updates, whenever they run.

    Attributes:
        table: float64 `[groups, 5]`: lr, beta1, beta2, eps, weight_decay.
        scale: Multiplies each gradient: loss scale and clipping.
        threads: Host threads.
        clock: Takes the time in kernels.
        seeds: Of random rounding, by group.
        ema: Decay of the moving average.
        measures: Takes sums of squares; None does not measure.
        behind: Host threads of updates that run behind `step()`; 0: as many.
    """

    table: torch.Tensor
    scale: float
    threads: int
    clock: Clock
    seeds: Sequence[int] = ()
    ema: float = 0.0
    measures: Measures | None = None
    behind: int = 0


def is_plain(slot: Slot, terms: Terms) -> bool:
    """Tell whether an update works element by element, so that parts of tensors can be updated alone."""
    plain = slot.exp_avg.dtype is torch.float32 and slot.ema is None and not slot.in_place
    return plain and terms.measures is None


def choose_kernel(
    batch: Batch, steps: Sequence[torch.Tensor], terms: Terms, reconcile: bool
) -> tuple[Callable[..., None], tuple[Any, ...], torch.Tensor | None]:
    """Choose the kernel of a batch; return it, its arguments and where it leaves sums of squares."""
    columns = batch.columns
    if columns is None:
        works = batch.works
        slots, groups = [work.slot for work in works], [work.group for work in works]
        columns = Columns.of(slots, groups, [work.index for work in works])
    if not is_plain(columns.first, terms):
        sums = partials = _NOTHING
        if terms.measures is not None:
            device = batch.grads[0].device
            blocks = sum(block_count(grad.numel()) for grad in batch.grads)
            partials = torch.empty(3, blocks, dtype=torch.float64, device=device)
            sums = torch.zeros(len(steps), 3, dtype=torch.float64, device=device)
        arguments = (
            batch.params,
            batch.grads,
            columns.exp_avgs,
            columns.exp_avg_sqs,
            *columns.scales,
            steps,
            batch.lows,
            columns.emas,
            terms.table,
            columns.groups,
            [terms.seeds[group] for group in columns.groups],
            columns.numbers,
            partials,
            sums,
            terms.scale,
            terms.ema,
            reconcile,
            terms.threads,
        )
        return _C.adamw_blocks_, arguments, None if terms.measures is None else sums
    return (
        _C.adamw_step_,
        (
            batch.params,
            batch.grads,
            columns.exp_avgs,
            columns.exp_avg_sqs,
            steps,
            batch.lows,
            terms.table,
            columns.groups,
            terms.scale,
            reconcile,
            terms.threads,
        ),
        None,
    )


def call_kernel(batch: Batch, terms: Terms) -> None:
    """Update a batch; state and step counters of its parameters move together."""
    start = time.perf_counter()
    steps = [work.slot.state["step"] for work in batch.works]
    kernel, arguments, sums = choose_kernel(batch, steps, terms, False)
    kernel(*arguments)
    terms.clock.add_span("kernel_s", start)
    if terms.measures is not None and sums is not None:
        terms.measures.add(batch.works, sums)


class PlainCall:
    """A kernel call on dense parameters whose state is where they are, made ready for every step to come.

    It holds as long as the slots and their state's tensors are the same. It measures nothing.
    """

    def __init__(self, slots: Sequence[Slot], groups: list[int], numbers: list[int]) -> None:
        """Read what does not change.

        Args:
            slots: One or more, of one `Slot.bucket`.
            groups: Their parameter groups' indices.
            numbers: Their positions among the optimizer's parameters.
        """
        self._low = slots[0].low
        self._columns = Columns.of(slots, groups, numbers)
        self._params = [slot.weights if slot.master is None else slot.master for slot in slots]
        self._lows = [slot.weights for slot in slots if slot.low]
        self._steps: list[torch.Tensor] = [slot.state["step"] for slot in slots]
        self._written = [t for slot in slots for t in slot.written]

    def run(self, grads: list[torch.Tensor], terms: Terms) -> None:
        """Update the parameters, their state and their version counters.

        Args:
            grads: One for each slot, contiguous.
            terms: What `step()` fixed.
        """
        batch = Batch(self._params, grads, self._lows, columns=self._columns)
        kernel, arguments, _ = choose_kernel(batch, self._steps, terms, self._low)
        start = time.perf_counter()
        kernel(*arguments)
        torch.autograd.graph.increment_version(self._written)
        terms.clock.add_span("kernel_s", start)


class PlainUpdate:
    """One kernel call on parameters whose state is where they are: in place, or on a copy if they have gaps.

    `run` may be called again after an interrupt, wherever that struck: the kernel runs once.
    """

    def __init__(self, works: Sequence[Work], terms: Terms) -> None:
        """Note what is to be updated.

        Args:
            works: One or more, of one `Slot.bucket`.
            terms: What `step()` fixed.
        """
        self.works = works
        self._terms = terms
        self._steps: list[torch.Tensor] = [work.slot.state["step"] for work in works]
        self._count = float(self._steps[0])
        self._tried = False
        self._batch: Batch | None = None
        self._made: tuple[Callable[..., None], tuple[Any, ...], torch.Tensor | None] | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def due(self) -> bool:
        """Whether the kernel has not run: it advances the step counters, so they tell."""
        return not self._tried or float(self._steps[0]) == self._count

    def _prepared(self) -> Batch:
        batch, copies = Batch(), []
        for work in self.works:
            slot = work.slot
            if slot.dense:
                flat = slot.weights
            else:
                flat = slot.weights.reshape(-1).clone()
                copies.append((slot.weights, flat))
            master = flat if slot.master is None else slot.master
            batch.add(work, master, work.grad, flat if slot.low else None)
        self._batch, self._copies = batch, copies
        return batch

    def run(self) -> None:
        """Update the parameters, their state and their version counters."""
        batch = self._prepared() if self._batch is None else self._batch
        if self._made is None:
            made = choose_kernel(batch, self._steps, self._terms, self.works[0].slot.low)
            self._made = self._made or made  # a signal handler may have been here meanwhile
        kernel, arguments, sums = self._made
        counter = self._steps[0]
        start = time.perf_counter()
        # Neither Ctrl-C nor a signal handler that waits for this very update comes between these lines: the
        # interpreter looks for signals after calls and at jumps back. The kernel advances the counter.
        tried, self._tried = self._tried, True
        # Comparing tensors lets another thread have the interpreter, for milliseconds: only where asked.
        if not tried or counter == self._count:
            kernel(*arguments)
        self._terms.clock.add_span("kernel_s", start)
        for weights, flat in self._copies:
            weights.copy_(flat.view(weights.shape))
        self._bump_versions()
        if sums is not None and self._terms.measures is not None:
            self._terms.measures.add(self.works, sums)

    def _bump_versions(self) -> None:
        torch.autograd.graph.increment_version([t for work in self.works for t in work.slot.written])


def update_double(works: Sequence[Work], hyper: Sequence[Hyper], terms: Terms) -> None:
    """Update float64 parameters, in plain PyTorch.

    Args:
        works: The parameters.
        hyper: lr, beta1, beta2, eps, weight_decay by group.
        terms: What `step()` fixed.
    """
    for work in works:
        slot = work.slot
        lr, beta1, beta2, eps, weight_decay = hyper[work.group]
        param = slot.param.detach()
        grad = work.grad.view(-1)
        flat = slot.weights if slot.dense else param.reshape(-1).clone()
        step = slot.state["step"]
        before = flat.clone() if terms.measures is not None else flat
        adamw_(
            flat,
            grad,
            slot.exp_avg,
            slot.exp_avg_sq,
            int(step) + 1,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=terms.scale,
        )
        if slot.ema is not None:
            slot.ema.lerp_(flat, 1.0 - terms.ema)
        if terms.measures is not None:
            rows = [float(t.double().square().sum()) for t in (grad, flat - before, flat)]
            terms.measures.add([work], torch.tensor([rows], dtype=torch.float64))
        step += 1
        if not slot.dense:
            param.copy_(flat.view(param.shape))
