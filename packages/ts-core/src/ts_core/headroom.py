"""Refusing in time: an error that says what to do, where the kernel would end the process without a word."""

from __future__ import annotations

import time

from . import memory
from .errors import DoesNotFitError
from .memory import HostBudget, format_bytes
from .usage import release_free_memory

__all__ = ["RamGuard", "least_left", "require_ram"]

_LEAST = 128 << 20
_SHARE = 100  # a look may take 1/100 of the time since the one before


def least_left(budget: HostBudget) -> int:
    """Return the bytes of RAM that should always be left: 128 MiB, in a small container 1/64 of its limit.

    Args:
        budget: What the process may use.

    Example:
        >>> least_left(HostBudget(64 << 30, 1 << 30, 512 << 20, "example")) >> 20
        8
    """
    return min(_LEAST, budget.whole_bytes // 64)


def require_ram(function: str, nbytes: int, advice: str) -> None:
    """Refuse what would take more RAM than this process may still use.

        nbytes <= available - least that is left

    Freed memory that the C library still holds is given back before that is said. Takes about a millisecond.

    Args:
        function: Who needs it, for the message.
        nbytes: Bytes that are about to be used.
        advice: What to do instead, a sentence.

    Raises:
        DoesNotFitError: There is not as much left; with the figures.

    Example:
        >>> require_ram("example", 1024, "Use less.")
    """
    budget = memory.host_budget()
    left = budget.available_bytes - least_left(budget)
    if nbytes <= left:
        return
    release_free_memory(collect=True)
    budget = memory.host_budget()
    left = budget.available_bytes - least_left(budget)
    if nbytes > left:
        raise DoesNotFitError(
            f"[{function}] {format_bytes(nbytes)} of RAM are needed, {format_bytes(max(left, 0))} are left "
            f"for this process ({budget.source}), and the kernel ends it when there is none. {advice}"
        )


class RamGuard:
    """Looks from time to time, in a loop that takes more and more RAM, whether enough is left.

    Example:
        >>> guard = RamGuard("evaluate", "Evaluate in smaller pieces.")
        >>> for _ in range(3):
        ...     guard.check()
    """

    def __init__(self, function: str, advice: str) -> None:
        """Look at the first call.

        Args:
            function: Who needs RAM, for the message.
            advice: What to do instead, a sentence.
        """
        self._function, self._advice = function, advice
        self._last = self._cost = 0.0

    def check(self, nbytes: int = 0) -> None:
        """Look, unless the latest look was so recent that it would cost more than 1/100 of the time.

        Args:
            nbytes: Bytes that are about to be used.

        Raises:
            DoesNotFitError: Less is left.
        """
        now = time.perf_counter()
        if now - self._last < _SHARE * self._cost:
            return
        require_ram(self._function, nbytes, self._advice)
        self._last = time.perf_counter()
        self._cost = self._last - now
