"""Events that tell what was decided and why, and named spans for profilers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as _profiler

from .errors import StateError

__all__ = ["LOGGER", "EventLog", "RecordedSpan", "SpanRecorder", "span"]

LOGGER = logging.getLogger("trainstream")
"""The logger of all packages. It has no handler: what is shown is up to the program."""

_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class EventLog:
    """An append-only list of sentences about what was decided: "weights of 12 blocks stay on the device".

    Each one also goes to `logging.getLogger("trainstream")`. Threads may add at the same time.

    Attributes:
        level: Level at which each event is logged.
        listeners: Called with each new event, on the thread that adds it.

    Example:
        >>> log = EventLog()
        >>> log.add("optimizer state: host")
        >>> log.events
        ['optimizer state: host']
    """

    def __init__(self, *, level: int = logging.INFO) -> None:
        """Start an empty log.

        Args:
            level: Level at which each event is logged; a verbose session passes `logging.WARNING`.
        """
        self.level = level
        self.listeners: list[Callable[[str], object]] = []
        self._events: list[str] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> list[str]:
        """A copy of the events so far, oldest first."""
        with self._lock:
            return list(self._events)

    def add(self, event: str, *, once: bool = False, level: int | None = None) -> None:
        """Append one event.

        Args:
            event: One sentence; the text is stored as given.
            once: Leave it out if the same text is there already, for events that each step would repeat.
            level: Level at which it is logged; None: the log's own.
        """
        with self._lock:
            if once and event in self._events:
                return
            self._events.append(event)
        LOGGER.log(self.level if level is None else max(level, self.level), "%s", event)
        for listener in list(self.listeners):
            listener(event)

    def __len__(self) -> int:
        """Count the events."""
        return len(self._events)


class RecordedSpan(NamedTuple):
    """One stretch of code that ran while a `SpanRecorder` was on.

    Attributes:
        name: As given to `span`.
        thread: The system's number of the thread.
        thread_name: The name it has in Python.
        start_ns: `time.perf_counter_ns()` when it began.
        end_ns: And when it ended.
    """

    name: str
    thread: int
    thread_name: str
    start_ns: int
    end_ns: int


class SpanRecorder:
    """Keeps the spans of all threads while it is on.

    `torch.profiler` sees only threads that it knows, and a host thread that updates weights is none of them.
    This keeps every `span(...)` that ends between `__enter__` and `__exit__`, at the cost of two readings of
    a clock and an append; `add_to` puts them into the profiler's Chrome trace. One recorder at a time.

    Attributes:
        spans: What was recorded, in the order in which the spans ended.

    Example:
        >>> with SpanRecorder() as recorder, span("ts/core/example"):
        ...     pass
        >>> [found.name for found in recorder.spans]
        ['ts/core/example']
    """

    _CLOCK = "ts/core/clock"

    def __init__(self) -> None:
        """Record nothing yet."""
        self.spans: list[RecordedSpan] = []

    def __enter__(self) -> SpanRecorder:
        """Begin.

        Raises:
            StateError: Another one is on.
        """
        global _recorder
        if _recorder is not None:
            raise StateError("SpanRecorder: another one is on; end it first")
        _recorder = self
        if _profiler._is_profiler_enabled:
            for _ in range(3):  # the profiler's first event may be late
                with span(self._CLOCK):
                    pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; spans that are still open are not kept."""
        global _recorder
        _recorder = None

    def add_to(self, trace: dict[str, Any]) -> int:
        """Add the spans to a Chrome trace that `torch.profiler` exported, on the trace's own clock.

        The clocks are compared by a span that both have seen, which takes a recorder that was begun while the
        profiler was on; failing that by the time of day.

        Args:
            trace: The parsed JSON file; its list "traceEvents" gets complete events of the category
                "ts_span", and a name for each of their threads.

        Returns:
            How many spans were added.
        """
        events = trace["traceEvents"]
        offset = self._offset_us(trace)
        found = [each for each in self.spans if each.name != self._CLOCK]
        process = os.getpid()
        for each in found:
            events.append(
                {
                    "ph": "X",
                    "cat": "ts_span",
                    "name": each.name,
                    "pid": process,
                    "tid": each.thread,
                    "ts": each.start_ns / 1e3 + offset,
                    "dur": (each.end_ns - each.start_ns) / 1e3,
                }
            )
        for thread, name in {each.thread: each.thread_name for each in found}.items():
            label = {"name": f"thread {thread} ({name})"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": label})
        return len(found)

    def _offset_us(self, trace: dict[str, Any]) -> float:
        """What turns microseconds of `perf_counter` into the trace's."""
        theirs = sorted(
            float(event["ts"]) for event in trace["traceEvents"] if event.get("name") == self._CLOCK
        )
        ours = [each.start_ns / 1e3 for each in self.spans if each.name == self._CLOCK]
        if theirs and len(theirs) == len(ours):
            return theirs[-1] - ours[-1]
        since = float(trace.get("baseTimeNanoseconds", 0))
        return (time.time_ns() - time.perf_counter_ns() - since) / 1e3


class _Recorded:
    """A span that a recorder keeps, and that a profiler may see as well."""

    __slots__ = ("_name", "_recorder", "_seen", "_start")

    def __init__(self, name: str, recorder: SpanRecorder, seen: AbstractContextManager[object]) -> None:
        self._name, self._recorder, self._seen = name, recorder, seen

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()
        self._seen.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seen.__exit__(kind, error, trace)
        end = time.perf_counter_ns()
        thread = threading.current_thread()
        self._recorder.spans.append(
            RecordedSpan(self._name, threading.get_native_id(), thread.name, self._start, end)
        )


_recorder: SpanRecorder | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Name a stretch of code in the trace of a running profiler or `SpanRecorder`.

    Args:
        name: "ts/<package>/<what>", such as "ts/optim/adamw_step".

    Returns:
        A context manager: `torch.profiler.record_function(name)` while a profiler records, one that keeps
        the times while a `SpanRecorder` is on, otherwise one that does nothing and costs about 0.1 us.

    Example:
        >>> with span("ts/core/example"):
        ...     pass
    """
    # The flag holds for all threads; emit_nvtx sets only the second, which is per thread.
    profiled = _profiler._is_profiler_enabled or torch.autograd._profiler_enabled()
    if _recorder is not None:
        return _Recorded(name, _recorder, torch.profiler.record_function(name) if profiled else _NOTHING)
    return torch.profiler.record_function(name) if profiled else _NOTHING
