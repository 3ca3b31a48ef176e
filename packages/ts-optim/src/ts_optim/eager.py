"""Updates during backward: a tensor is updated the moment its gradient is complete."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ts_core.guard import guard_of
from ts_core.trace import span

from .deferred import by_rank
from .gradients import ConsumedGradient, gradient_of
from .kernel import Terms, call_kernel
from .norms import square_sums
from .options import hyper_of
from .stepping import Stepping
from .transfer import Work, depart, settle, update_arrivals

__all__ = ["EagerUpdates"]

# Typed here because torch leaves the constructors of its streams and events unannotated.
_CUDA: Any = torch.cuda


class _Jobs:
    """What goes on beside the backward pass: updates that cross to the host and back, and device kernels."""

    def __init__(self) -> None:
        """Run nothing; the thread is made with the first job and ends with this object."""
        self._pool: ThreadPoolExecutor | None = None
        self._futures: list[Future[int]] = []
        self._events: list[Any] = []
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], int]) -> None:
        """Run it behind those before; here if there is no thread to be had."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="ts-optim-eager")
            try:
                future = self._pool.submit(job)
            except RuntimeError:  # no more threads allowed, or the interpreter is ending
                future = Future()
                future.set_result(job())
            self._futures.append(future)

    def note_launch(self, device: torch.device) -> None:
        """Wait for a kernel on the current stream, too."""
        event = _CUDA.Event()
        event.record(torch.cuda.current_stream(device))
        with self._lock:
            self._events.append(event)

    def join(self) -> int:
        """Wait for all.

        Returns:
            What the jobs returned, added up.

        Raises:
            Exception: What a job raised first; all others are done.
        """
        with self._lock:
            futures, self._futures = self._futures, []
            events, self._events = self._events, []
        for event in events:
            event.synchronize()
        failure, total = None, 0
        for future in futures:
            error = future.exception()
            failure = failure or error
            total += 0 if error is not None else future.result()
        if failure is not None:
            raise failure
        return total


class EagerUpdates(Stepping):
    """The part of `OffloadAdamW` that updates during backward."""

    def _start_eager(self) -> None:
        self._jobs = _Jobs()
        self._landed: list[Work] = []
        self._passes: set[int] = set()
        self._hook_lock = threading.RLock()  # the engine has a thread per device

    def _update_now(self, param: torch.Tensor) -> None:
        """Update a parameter whose gradient is complete, in the thread of the engine that completed it."""
        place = self._places.get(param)
        entry = guard_of(param)
        if place is None:
            return
        if entry is not None:
            entry.wait()
        with self._hook_lock, torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            grad = gradient_of(param)
            if grad is None:
                return
            with span("ts/optim/eager"):
                if not self._begun and self._measures is not None:
                    self._note_measured()
                hyper = [hyper_of(group) for group in self.param_groups]
                work = self._collect([(*place, param, grad, None)])[0]
                if self._options.measure_grad_norm:
                    self._sums[work.index] = square_sums([work], self._options.threads or 0)[0], param
                terms = self._terms(hyper, 1.0)
                self._at_the_end_of_this_pass()
                param.grad = ConsumedGradient(grad)
                if work.waits:
                    self._landed.append(work)
                elif work.slot.bucket[0] == "staged":
                    self._cross(work, terms)
                else:
                    self._update([work], terms, hyper)
                    if work.slot.in_place:
                        self._jobs.note_launch(param.device)

    def _cross(self, work: Work, terms: Terms) -> None:
        """Let the gradient leave now, and the rest follow on the worker."""
        arrivals, down = depart([work], self._maker)
        self._moved["d2h_bytes"] += down
        device = work.slot.param.device
        ready: Any = None
        if device.type == "cuda":
            # The weight may be written when what this pass has launched so far, its own backward, is done.
            ready = _CUDA.Event()
            ready.record(torch.cuda.current_stream(device))

        def job() -> int:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if ready is not None:
                    side = _CUDA.Stream(device)
                    side.wait_event(ready)
                    stack.enter_context(torch.cuda.stream(side))
                leaving, up = update_arrivals(arrivals, self._maker, lambda batch: call_kernel(batch, terms))
                settle(leaving)
            return up

        self._jobs.submit(job)

    def _at_the_end_of_this_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._passes:
            self._passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)

    def _finish_pass(self) -> None:
        """Start what landed, next needed first; all else is complete when backward returns."""
        with self._hook_lock:
            landed, self._landed = self._landed, []
            self._passes.clear()
        if landed:
            hyper = [hyper_of(group) for group in self.param_groups]
            self._pending.commit(by_rank(landed), self._terms(hyper, 1.0), self._name)
        self._moved["h2d_bytes"] += self._jobs.join()

    def _drain(self) -> None:
        """Wait for every update, wherever it runs."""
        self._moved["h2d_bytes"] += self._jobs.join()
        super()._drain()

    def _finish_backward(self) -> None:
        """See to it that a step finds nothing of an earlier one, or of the backward pass, undone."""
        if self._options.in_backward:
            self._finish_pass()  # a pass that failed has not come to it
        else:
            self._note_measured()

    def _unfinished_params(self) -> list[torch.Tensor]:
        """List the parameters that this step has to update; all of them if it is not known."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not self._options.in_backward:
            return params
        with torch._C.DisableTorchFunctionSubclass():
            return [param for param in params if gradient_of(param) is not None]
