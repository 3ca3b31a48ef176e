"""What an optimizer tells about itself: bytes, counts, norms, and moments as others know them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from ts_core.errors import StateError

from .auto import ModeChoice
from .deferred import PendingUpdates
from .kernel import Clock, Measures
from .moments import unpack
from .options import OffloadOptions
from .roster import Positions, Roster
from .slots import Slot, StateMaker

__all__ = ["Reports", "decoded"]


def decoded(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace int8 moments in a state dict by the float32 values they stand for."""
    entries = {}
    for key, entry in state_dict["state"].items():
        if "exp_avg_scale" in entry:
            codes, scales = ([entry[f"exp_avg{a}{b}"] for a in ("", "_sq")] for b in ("", "_scale"))
            first, second = unpack(codes, scales)
            entry = {name: t for name, t in entry.items() if not name.endswith("_scale")}
            entry.update(exp_avg=first, exp_avg_sq=second)
        entries[key] = entry
    return {**state_dict, "state": entries}


class Reports(torch.optim.Optimizer):
    """The part of `OffloadAdamW` that only reads."""

    _options: OffloadOptions
    _names: dict[torch.Tensor, str]
    _state: defaultdict[torch.Tensor, Any]
    _maker: StateMaker
    _slots: dict[torch.Tensor, Slot]
    _pending: PendingUpdates
    _choice: ModeChoice
    _clock: Clock
    _moved: dict[str, int]
    _norm: float | None
    _nonfinite: tuple[int, str] | None
    _first_nonfinite: tuple[int, str] | None
    _measures: Measures | None
    #: Positions of the parameters in the groups as they were, and what holds for works from step to step.
    _numbered: Positions | None
    _roster: Roster | None

    def _drain(self) -> None:
        """Wait for every update, wherever it runs."""
        self._pending.drain()

    def _positions(self) -> Positions:
        """Number the parameters, each once; the same object while the groups hold the same ones."""
        known = self._numbered
        if known is None or not known.current(self.param_groups):
            known = self._numbered = Positions(self.param_groups)
        return known

    def _name(self, param: torch.Tensor) -> str:
        if param in self._names:
            return f"parameter {self._names[param]!r}"
        index = 0
        for group in self.param_groups:
            for i, other in enumerate(group["params"]):
                if other is param:
                    names = group.get("param_names")
                    return f"parameter {names[i]!r}" if names else f"parameter {index}"
                index += 1
        return "a parameter"

    @property
    def last_grad_norm(self) -> float | None:
        """Global 2-norm of the last step's gradients before clipping, after unscaling by a GradScaler.

        None if it was not measured; that takes `max_grad_norm`, `measure_grad_norm` or `skip_nonfinite`.
        """
        return self._norm

    @property
    def moment_format(self) -> str:
        """How moments are stored: "float32", "bfloat16" or "int8"."""
        return self._options.moments

    def stats(self) -> dict[str, Any]:
        """Count what the optimizer holds and did.

        Returns:
            host_state_bytes, device_state_bytes, disk_state_bytes (moments, masters and host copies of
            weights; disk: in memory from `set_memory` that is not page-locked), pinned_bytes (page-locked
            ones of them and of the buffers), staging_bytes, d2h_bytes and h2d_bytes (copied so far), steps,
            skipped_steps, kernel_s and norm_s (time in host kernels; launches on a device), wait_s (time that
            users of parameters and state waited for pending updates, those they ran themselves included),
            average_s (time that averaging over ranks took),
            mode ("cpu" or "gpu": who updates host state of CUDA parameters) and mode_reason,
            nonfinite (index and name of the first parameter with a non-finite gradient in the last step, or
            None), first_nonfinite (number of the first step with one, skipped steps counted, and the name).
        """
        self._note_measured()
        host = device = disk = 0
        held: list[torch.Tensor] = []
        for entry in self.state.values():
            held += [t for name, t in entry.items() if name != "step"]
        held += [s.master for s in self._slots.values() if s.staged and not s.low and s.master is not None]
        for t in held:
            nbytes = t.numel() * t.element_size()
            if t.is_cuda:
                device += nbytes
            elif self._maker.home(t) is not None and not t.is_pinned():
                disk += nbytes
            else:
                host += nbytes
        buffers = [t for s in self._slots.values() for t in (s.staging, s.leaving)]
        staging = [t for t in buffers if t is not None]
        pinned = [t for t in (*held, *staging) if not t.is_cuda and t.is_pinned()]
        return {
            "host_state_bytes": host,
            "device_state_bytes": device,
            "disk_state_bytes": disk,
            "pinned_bytes": sum(t.numel() * t.element_size() for t in pinned),
            "staging_bytes": sum(t.numel() * t.element_size() for t in staging),
            "mode": self._choice.mode,
            "mode_reason": self._choice.reason,
            "nonfinite": self._nonfinite,
            "first_nonfinite": self._first_nonfinite,
            **self.counters(),
        }

    def counters(self) -> dict[str, Any]:
        """Return those entries of `stats()` that only count: cheap enough for every step.

        Returns:
            d2h_bytes, h2d_bytes, steps, skipped_steps, kernel_s, norm_s, wait_s, average_s; see `stats`.
        """
        return {**self._moved, **self._clock.read()}

    def tensor_stats(self) -> dict[str, dict[str, float]]:
        """Return what `measure_updates` found in the last step, for each parameter that was updated.

            grad_norm = |g|, update_norm = |p_new - p_old|, weight_norm = |p_new|,
            ratio = update_norm / weight_norm

        in 2-norms, summed in float64 in a fixed order; gradients as they were given, before clipping and
        unscaling.

        Returns:
            By name (its index where it has none): grad_norm, update_norm, weight_norm, ratio.

        Raises:
            StateError: The optimizer was made without `measure_updates`.
        """
        if self._measures is None:
            raise StateError(
                "[OffloadAdamW.tensor_stats] expected an optimizer made with measure_updates=True, given one "
                "without"
            )
        self._note_measured()
        params = {index: param for index, _, param in self._positions().all}
        result = {}
        for index, sums in self._measures.read().items():
            grad, update, weight = map(math.sqrt, sums)
            ratio = update / weight if weight != 0.0 else math.inf if update > 0.0 else 0.0
            row = {"grad_norm": grad, "update_norm": update, "weight_norm": weight, "ratio": ratio}
            result[self._name(params[index]).removeprefix("parameter ").strip("'")] = row
        return result

    def _note_measured(self) -> None:
        """See which gradient was not finite, from the sums that kernels left."""
        self._drain()
        if self._measures is not None and self._nonfinite is None:
            params = {index: param for index, _, param in self._positions().all}
            for index, sums in self._measures.read().items():
                if not math.isfinite(sums[0]):
                    self._report_nonfinite(
                        index, params[index], self._moved["steps"] + self._moved["skipped_steps"]
                    )
                    break

    def _report_nonfinite(self, index: int, param: torch.Tensor, step: int) -> None:
        name = self._name(param)
        self._nonfinite = (index, name)
        if self._first_nonfinite is None:
            self._first_nonfinite = (step, name)

    def ema_weights(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the moving averages (float32, the tensors themselves) of all parameters that were stepped.

        Raises:
            StateError: The optimizer was made without `ema`.
        """
        if self._options.ema is None:
            raise StateError(
                "[OffloadAdamW.ema_weights] expected an optimizer made with ema=decay, given one without"
            )
        return {param: entry["ema"] for param, entry in self.state.items() if "ema" in entry}
