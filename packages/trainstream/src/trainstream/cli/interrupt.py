"""Ctrl-C as a request: the first asks the loop to stop at the next safe place, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While active, SIGINT and SIGTERM set `requested`; a second one ends the process.

    Args:
        announce: Called with a line of text at the first signal.

    Attributes:
        requested: The number of the signal that came, or 0.

    Example:
        >>> with Interrupt(print) as interrupt:
        ...     while not interrupt.requested:
        ...         break
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        """Remember whom to tell; nothing is installed yet."""
        self.requested = 0
        self._announce = announce
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """The code a shell expects of a process that this signal ended: 130 for Ctrl-C."""
        return 128 + self.requested

    def __enter__(self) -> Interrupt:
        """Take the signals over; outside the main thread Python does not allow it, and nothing changes."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)  # no clean-up: checkpoints are safe at every instant
        self.requested = number
        self._announce("stopping at the next safe place; press Ctrl-C again to stop at once")
