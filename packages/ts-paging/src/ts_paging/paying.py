"""Whether replaying a block pays: what launching it takes of the host, beside what it takes of the device.

A GPU that is given its work faster than it does it gains nothing from a replay; one that waits for every
launch gains all that the launches take. Both are measured, for each form of inputs, in a few eager runs.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Meter", "Paying", "Timing", "meter_for"]

_PASSES = 3  # that are measured; the least of each counts, since a first one sets things up
_CLOSE = 0.8  # of the device's time, from which the host's is what a block takes


class Meter(Protocol):
    """Measures stretches of work."""

    def now(self) -> Any:
        """Return this moment, on the host and in the order of the device's work."""
        ...

    def between(self, first: Any, last: Any) -> tuple[float, float] | None:
        """Return the seconds that the host worked and that the device took; None: it is not through yet."""
        ...


class _CudaMeter:
    """Measures with events, and the time that the thread has computed: the host may also wait."""

    def now(self) -> Any:
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record()
        return time.thread_time(), event

    def between(self, first: Any, last: Any) -> tuple[float, float] | None:
        if not last[1].query():
            return None
        return last[0] - first[0], first[1].elapsed_time(last[1]) * 1e-3


class _HostMeter:
    """On a CPU the host is the device: nothing is saved by launching less."""

    def now(self) -> Any:
        return time.thread_time()

    def between(self, first: Any, last: Any) -> tuple[float, float] | None:
        return 0.0, last - first


def meter_for(device: torch.device) -> Meter:
    """Make the meter of a device."""
    return _CudaMeter() if device.type == "cuda" else _HostMeter()


class Timing:
    """Moments of one run: before and after forward, and the same of backward."""

    def __init__(self, meter: Meter, begin: Any) -> None:
        """Start with the moment before forward."""
        self._meter = meter
        self.moments = [begin]

    @property
    def complete(self) -> bool:
        """Whether backward has been through."""
        return len(self.moments) == 4

    def mark(self) -> None:
        """Note this moment; a second backward is not asked about."""
        if not self.complete:
            self.moments.append(self._meter.now())

    def read(self) -> tuple[float, float] | None:
        """Return seconds of host and device, or None where backward has not come or the device is busy."""
        if not self.complete:
            return None
        forward, backward = (self._meter.between(*self.moments[start : start + 2]) for start in (0, 2))
        if forward is None or backward is None:
            return None
        return forward[0] + backward[0], forward[1] + backward[1]


class Paying:
    """What is known about one structure and form of inputs.

    Attributes:
        told: The answer has been said.
    """

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self.told = False
        self._timings: list[Timing] = []
        self._turn = -1

    def timing(self, meter: Meter, begin: Any, turn: int) -> Timing | None:
        """Return what measures the run that begins, where one more is wanted: one in each pass."""
        if turn == self._turn:
            return None
        self._turn = turn
        self._timings = [each for each in self._timings if each.complete]
        if len(self._timings) >= _PASSES:
            return None
        self._timings.append(Timing(meter, begin))
        return self._timings[-1]

    def answer(self) -> tuple[bool, str] | None:
        """Return whether a replay pays, and the figures; None: not enough is known."""
        read = [each.read() for each in self._timings]
        known = [each for each in read if each is not None]
        if len(known) < _PASSES:
            return None
        host, device = min(h for h, _ in known), min(d for _, d in known)
        figures = f"a run takes {1e3 * host:.2f} ms of the host, and {1e3 * device:.2f} ms of the device"
        return host >= _CLOSE * device, figures
