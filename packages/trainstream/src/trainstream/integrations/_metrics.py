"""What TrainStream adds to a training log: memory, traffic, waiting and speed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

import ts_paging
from trainstream._meter import Meter
from trainstream._report import moved_bytes
from trainstream._session import Session

__all__ = ["LogMetrics", "takes_numbers_only"]

_GB = 1e9
# They warn at every log about a text among the numbers, and leave it out.
_NUMBERS_ONLY = ("TensorBoardCallback", "MLflowCallback", "ClearMLCallback", "DVCLiveCallback")


def takes_numbers_only(callbacks: Iterable[Any]) -> bool:
    """Whether one of a Trainer's callbacks sends logs to a service that takes no text."""
    return any(cls.__name__ in _NUMBERS_ONLY for each in callbacks for cls in type(each).__mro__)


class LogMetrics:
    """Turns an optimizer's counters into log entries; traffic, waiting and tokens count since the last call.

    Args:
        optimizer: An `OffloadAdamW`, or anything with `stats()`; other optimizers give zeros.
        session: Of the wrapped model, if there is one: paged weights, gradients and activations count too.
            Without it the bound is not known.

    Example:
        >>> metrics = LogMetrics(optimizer)  # doctest: +SKIP
        >>> metrics.count_tokens(512); metrics.take()["ts_tokens_per_s"]  # doctest: +SKIP
        1834.0
    """

    def __init__(self, optimizer: Optimizer, session: Session | None = None) -> None:
        """Start counting now."""
        self.optimizer = optimizer
        self._session = session
        self._meter = Meter(session) if session is not None else None
        self._tokens = 0
        self._time = time.perf_counter()
        self._last = self._counters()

    def count_tokens(self, tokens: int) -> None:
        """Add tokens that were trained on."""
        self._tokens += tokens
        if self._session is not None and self._meter is not None:
            self._meter.tell(tokens)
            self._session.tell(tokens)

    def take(self) -> dict[str, Any]:
        """Return the entries, and start the next interval.

        Returns:
            `ts_pinned_gb` (page-locked host memory), `ts_host_state_gb` (optimizer state in RAM),
            `ts_h2d_gb`, `ts_d2h_gb` (copied between host and device since the last call), `ts_stall_s`
            (seconds the training thread waited for updates or copies since then), `ts_peak_vram_gb`,
            `ts_tokens_per_s`. 1 GB = 1e9 bytes. With a session also `ts_share_of_bound` (the least time that
            its limiter needed, over the time it took) and `ts_limiter`: "gpu", "cpu", "h2d", "d2h", "dram",
            "disk", "launch" or "unknown".
        """
        now, counters = time.perf_counter(), self._counters()
        moved = {key: counters[key] - self._last[key] for key in ("h2d_bytes", "d2h_bytes", "stall_s")}
        elapsed = max(now - self._time, 1e-9)
        tokens, self._tokens = self._tokens, 0
        self._time, self._last = now, counters
        bound: dict[str, Any] = {}
        if self._session is not None and self._meter is not None:
            verdict = self._meter.take(self._session, elapsed).verdict
            bound = {"ts_share_of_bound": verdict.share, "ts_limiter": verdict.limiter}
        return {
            "ts_pinned_gb": counters["pinned_bytes"] / _GB,
            "ts_host_state_gb": counters["host_state_bytes"] / _GB,
            "ts_h2d_gb": moved["h2d_bytes"] / _GB,
            "ts_d2h_gb": moved["d2h_bytes"] / _GB,
            "ts_stall_s": moved["stall_s"],
            "ts_peak_vram_gb": _peak_vram_bytes() / _GB,
            "ts_tokens_per_s": tokens / elapsed,
            **bound,
        }

    def _counters(self) -> dict[str, float]:
        stats: dict[str, Any] = self.optimizer.stats() if hasattr(self.optimizer, "stats") else {}
        moved: dict[str, Any] = stats
        stall_s = float(sum(stats.get(key, 0.0) for key in ("wait_s", "stall_s")))
        if self._session is not None:
            moved = moved_bytes(self._session, stats)
            stall_s += self._session.pager.wait_s if self._session.pager is not None else 0.0
        return {
            # The optimizer's own is among what the arena has, where there is one.
            "pinned_bytes": float(max(stats.get("pinned_bytes", 0), ts_paging.pinned_bytes())),
            "host_state_bytes": float(stats.get("host_state_bytes", 0)),
            "h2d_bytes": float(moved.get("h2d_bytes", 0)),
            "d2h_bytes": float(moved.get("d2h_bytes", 0)),
            "stall_s": stall_s,
        }


def _peak_vram_bytes() -> int:
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated() if used else 0
