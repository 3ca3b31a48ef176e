"""One step: which gradients there are, what they are scaled with, and the calls that update."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from ts_core.arriving import ArrivingGradient
from ts_core.errors import StateError
from ts_core.guard import guard_of

from . import _C
from .averaging import Averaging
from .counts import threads_behind
from .deferred import by_rank
from .gradients import posted_gradient
from .housing import Housing
from .kernel import Measures, PlainUpdate, Terms, call_kernel, update_double
from .norms import square_sums
from .options import Hyper
from .roster import Prompt, Roster
from .slots import State, check_param, flat_gradient, key_of, only_in
from .transfer import Batch, Work, staged_step

__all__ = ["SEED", "Stepping"]

#: The key of a group's seed of random rounding.
SEED = "rounding_seed"


class Stepping(Housing):
    """The part of `OffloadAdamW` that updates."""

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None
    _averaging: Averaging | None
    #: Something of the step to come has been updated already.
    _begun: bool
    #: By index: sums of squares of gradients that are gone already, with their parameters.
    _sums: dict[int, tuple[float, torch.Tensor]]
    #: Index and group of each parameter.
    _places: dict[torch.Tensor, tuple[int, int]]

    def _make_states(
        self, pairs: list[tuple[torch.Tensor, State]], *, copy: bool
    ) -> list[tuple[torch.Tensor, State]]:
        """Make state entries, all or none."""
        made: list[tuple[torch.Tensor, State]] = []
        try:
            for param, old in pairs:
                made.append((param, self._maker.make_state(param, old, copy=copy)))
        except BaseException:
            for (_, new), (_, old) in zip(made, pairs, strict=False):
                self._maker.discard(only_in(new, old))
            raise
        return made

    def _found(self) -> Sequence[Work]:
        """List the works of a step: of every parameter that has a gradient, checked."""
        positions, roster = self._positions(), self._roster
        fits = roster is not None and roster.positions is positions
        if roster is not None and fits and roster.current(self._slots, self._state):
            works = roster.works(self._options.needs_norm)
            if works is not None:
                return works
        else:
            roster = None
        works = self._collect(
            [
                (i, g, p, grad, arriving)
                for i, g, p in positions.all
                for grad, arriving in [posted_gradient(p)]
                if grad is not None
            ]
        )
        if roster is None and not self._options.in_backward:  # there gradients come one by one
            self._roster = Roster(positions, self._slots, self._state)
        return works

    def _collect(
        self, found: list[tuple[int, int, torch.Tensor, torch.Tensor, ArrivingGradient | None]]
    ) -> list[Work]:
        """Check every gradient, then make missing state; the state is stored when all of it is there.

        Args:
            found: Index, group, parameter and gradient of each, and what tells when it is there.
        """
        stale: list[tuple[torch.Tensor, State]] = []
        for _, _, param, grad, _ in found:
            slot, old = self._slots.get(param), self._state.get(param)
            fits = slot is not None and old is not None and slot.current(key_of(param), old)
            # Layout, dtype and device of the gradient differ from step to step at the user's will.
            alike = grad.dtype is param.dtype and grad.layout is torch.strided and grad.shape == param.shape
            if not fits or not alike:
                check_param(param, grad, self._name(param))
            if not fits:
                stale.append((param, old or {}))
        states = self._make_states(stale, copy=False)
        slots = {param: self._maker.make_slot(param, state, key_of(param)) for param, state in states}
        works = []
        for index, group, param, grad, arriving in found:
            slot, guard = slots.get(param) or self._slots[param], guard_of(param)
            known = None if guard is None else guard.square_sum_of(grad if arriving is None else arriving)
            works.append(Work(index, group, slot, flat_gradient(slot, grad), known, guard, arriving))
        for (param, new), (_, old) in zip(states, stale, strict=True):
            self._maker.discard(only_in(old, new))
            before = self._slots.get(param)
            if before is not None and before.staged and before.master is not slots[param].master:
                self._maker.discard([before.master])
        self._state.update(states)
        self._slots.update(slots)
        return works

    def _average(self) -> None:
        """Average gradients over all ranks, where there are several."""
        if self._averaging is None:
            return
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            self.found_inf = self.grad_scale = None  # the scaler leaves them there when this raises
            raise StateError(
                "[OffloadAdamW.step] a GradScaler cannot be used with distributed=True: each rank would look "
                "for infinities in its own gradients, and scales would part. Take bfloat16 without a scaler"
            )
        start = time.perf_counter()
        self._averaging.average([param for _, _, param in self._positions().all], self._name)
        self._clock.add("average_s", time.perf_counter() - start)

    def _scale(self, works: Sequence[Work]) -> float | None:
        """What gradients are multiplied with (loss scale and clipping); None: skip this step."""
        self._norm = self._nonfinite = None
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        scale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        if self._options.eager and not (found_inf is None and grad_scale is None):
            self.found_inf = self.grad_scale = None  # the scaler leaves them there when this raises
            raise StateError(
                "[OffloadAdamW.step] a GradScaler cannot be used with eager=True, which updates during "
                "backward, with scaled gradients and before infinities are known. If it has done so, go back "
                "to a checkpoint. Take eager=False, or bfloat16 without a scaler"
            )
        if found_inf is not None and float(found_inf) != 0.0:
            return None
        if not self._options.needs_norm:
            return scale
        start = time.perf_counter()
        for work in works:
            if work.square_sum is None:
                work.arrive()
        known = dict(self._sums)
        for work, value in zip(works, square_sums(works, self._options.threads or 0), strict=True):
            known[work.index] = value, work.slot.param
        # In the order of parameters, so that placement does not change the rounding.
        sums = sorted((index, value, param) for index, (value, param) in known.items())
        total = 0.0
        for _, value, _ in sums:
            total += value
        self._norm = math.sqrt(total) * scale
        self._clock.add("norm_s", time.perf_counter() - start)
        for index, value, param in sums:
            if not math.isfinite(value):
                done = self._moved["steps"] + self._moved["skipped_steps"]
                self._report_nonfinite(index, param, done + 1)
                if self._options.skip_nonfinite:
                    return None
                break
        limit = self._options.max_grad_norm
        if limit is None:
            return scale
        # As torch.nn.utils.clip_grad_norm_ does it: a NaN norm makes every gradient NaN.
        factor = limit / (self._norm + 1e-6)
        return scale if factor > 1.0 else scale * factor

    def _terms(self, hyper: list[Hyper], scale: float) -> Terms:
        """Fix what holds for updates committed now; the first of a step starts its measures."""
        if self._measures is not None and not self._begun:
            self._measures = Measures()
        self._begun = True
        return Terms(
            torch.tensor(hyper, dtype=torch.float64),
            scale,
            # Asked here: another thread may have another number.
            _C.thread_count(self._options.threads or 0),
            self._clock,
            [group.get(SEED, 0) for group in self.param_groups],
            self._options.ema or 0.0,
            self._measures,
            threads_behind(self._options.threads),
        )

    def _update(self, works: Sequence[Work], terms: Terms, hyper: list[Hyper]) -> list[list[Work]]:
        """Update what cannot wait; return what can, in the order of its updates."""
        if isinstance(works, Prompt) and terms.measures is None:
            works.run(terms)
            return []
        buckets: dict[tuple[str, bool, torch.device], list[Work]] = {}
        later: list[Work] = []
        for work in works:
            if work.waits:
                later.append(work)
            else:
                work.arrive()
                buckets.setdefault(work.slot.bucket, []).append(work)

        def run(batch: Batch) -> None:
            call_kernel(batch, terms)

        for (kind, _, _), members in buckets.items():
            if kind == "double":
                update_double(members, hyper, terms)
            elif kind == "staged":
                down, up = staged_step(members, self._maker, run)
                self._moved["d2h_bytes"] += down
                self._moved["h2d_bytes"] += up
            else:
                PlainUpdate(members, terms).run()
        return by_rank(later)

    def _await_kernels(self, works: Sequence[Work]) -> None:
        """Wait for kernels that write state in host memory, which the host may read next."""
        if isinstance(works, Prompt):
            return  # their state is beside them
        devices = {work.slot.param.device for work in works if work.slot.in_place}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
