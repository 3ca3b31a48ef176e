"""Calls of the host kernel, and updates of parameters whose state is where they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _C
from .options import Hyper
from .reference import adamw_
from .transfer import Batch, Work

__all__ = ["Clock", "PlainUpdate", "Terms", "call_kernel", "update_double"]


class Clock:
    """Seconds by what they went into, added up from any thread."""

    def __init__(self, *names: str) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(names, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """Add to one of them."""
        with self._lock:
            self._seconds[name] += seconds

    def read(self) -> dict[str, float]:
        """Return all of them."""
        with self._lock:
            return dict(self._seconds)


@dataclass(frozen=True)
class Terms:
    """What one call of `step()` fixed for all its updates, whenever they run.

    Attributes:
        table: float64 `[groups, 5]`: lr, beta1, beta2, eps, weight_decay.
        scale: Multiplies each gradient: loss scale and clipping.
        threads: Host threads.
        clock: Takes the time in kernels.
    """

    table: torch.Tensor
    scale: float
    threads: int
    clock: Clock


def _arguments(batch: Batch, steps: Sequence[torch.Tensor], terms: Terms, reconcile: bool) -> tuple[Any, ...]:
    slots = [work.slot for work in batch.works]
    groups = [work.group for work in batch.works]
    return (
        batch.params,
        batch.grads,
        [slot.exp_avg for slot in slots],
        [slot.exp_avg_sq for slot in slots],
        steps,
        batch.lows,
        terms.table,
        groups,
        terms.scale,
        reconcile,
        terms.threads,
    )


def call_kernel(batch: Batch, terms: Terms) -> None:
    """Update a batch; state and step counters of its parameters move together."""
    start = time.perf_counter()
    _C.adamw_step_(*_arguments(batch, [work.slot.state["step"] for work in batch.works], terms, False))
    terms.clock.add("kernel_s", time.perf_counter() - start)


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
        arguments = _arguments(batch, self._steps, self._terms, self.works[0].slot.low)
        counter = self._steps[0]
        start = time.perf_counter()
        # Neither Ctrl-C nor a signal handler that waits for this very update comes between these lines: the
        # interpreter looks for signals after calls and at jumps back. The kernel advances the counter.
        self._tried = True
        if counter == self._count:
            _C.adamw_step_(*arguments)
        self._terms.clock.add("kernel_s", time.perf_counter() - start)
        for weights, flat in self._copies:
            weights.copy_(flat.view(weights.shape))
        written = [work.slot.weights for work in self.works if work.slot.dense]
        written += [t for work in self.works for t in (work.slot.exp_avg, work.slot.exp_avg_sq)]
        torch.autograd.graph.increment_version(written)


def update_double(works: Sequence[Work], hyper: Sequence[Hyper], scale: float) -> None:
    """Update float64 parameters, in plain PyTorch.

    Args:
        works: The parameters.
        hyper: lr, beta1, beta2, eps, weight_decay by group.
        scale: Multiplies each gradient.
    """
    for work in works:
        slot = work.slot
        lr, beta1, beta2, eps, weight_decay = hyper[work.group]
        param = slot.param.detach()
        grad = work.grad.view(-1)
        flat = slot.weights if slot.dense else param.reshape(-1).clone()
        step = slot.state["step"]
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
            grad_scale=scale,
        )
        step += 1
        if not slot.dense:
            param.copy_(flat.view(param.shape))
