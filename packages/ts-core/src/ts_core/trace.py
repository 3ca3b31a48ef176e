"""Events that tell what was decided and why, and named spans for profilers."""

from __future__ import annotations

import contextlib
import logging
import threading
from contextlib import AbstractContextManager

import torch
import torch.autograd.profiler as _profiler

__all__ = ["LOGGER", "EventLog", "span"]

LOGGER = logging.getLogger("trainstream")
"""The logger of all packages. It has no handler: what is shown is up to the program."""

_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class EventLog:
    """An append-only list of sentences about what was decided: "weights of 12 blocks stay on the device".

    Each one also goes to `logging.getLogger("trainstream")`. Threads may add at the same time.

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
        self._events: list[str] = []
        self._lock = threading.Lock()

    @property
    def events(self) -> list[str]:
        """A copy of the events so far, oldest first."""
        with self._lock:
            return list(self._events)

    def add(self, event: str, *, once: bool = False) -> None:
        """Append one event.

        Args:
            event: One sentence; the text is stored as given.
            once: Leave it out if the same text is there already, for events that each step would repeat.
        """
        with self._lock:
            if once and event in self._events:
                return
            self._events.append(event)
        LOGGER.log(self.level, "%s", event)

    def __len__(self) -> int:
        """Count the events."""
        return len(self._events)


def span(name: str) -> AbstractContextManager[object]:
    """Name a stretch of code in the trace of a running profiler.

    Args:
        name: "ts/<package>/<what>", such as "ts/optim/adamw_step".

    Returns:
        A context manager: `torch.profiler.record_function(name)` while a profiler records, otherwise one
        that does nothing and costs about 0.1 us.

    Example:
        >>> with span("ts/core/example"):
        ...     pass
    """
    # The flag holds for all threads; emit_nvtx sets only the second, which is per thread.
    if _profiler._is_profiler_enabled or torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return _NOTHING
