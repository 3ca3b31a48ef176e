"""Refusing in time: an error that says what to do, where the kernel would end the process without a word."""

from __future__ import annotations

import time

from . import memory
from .errors import DoesNotFitError
from .memory import HostBudget, format_bytes
from .usage import release_free_memory

__all__ = ["RamGuard", "arena_growth", "least_left", "ram_for", "require_ram", "unplanned"]

_LEAST = 128 << 20
#: A page table takes 1/512 of what it maps; weights come with moments and gradients, four times their bytes.
_PAGE_TABLES = 128
_KERNEL = 8 << 20  # inodes, requests under way and the like, where a control group counts them
_SLAB = 1 << 30
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


def unplanned(ram: int, held: int) -> int:
    """Return the bytes of RAM that a model computing there leaves unplanned.

        ram / 12 + min(8 MiB, ram / 10) + held / 128

    For what the heap loses between blocks, and what the kernel needs for mapped files.

    Args:
        ram: Bytes that may be used.
        held: Bytes of its weights, and of gradients and optimizer state that are there already.

    Example:
        >>> unplanned(1200 << 20, 128 << 20) >> 20
        109
    """
    return max(ram, 0) // 12 + min(_KERNEL, max(ram, 0) // 10) + held // _PAGE_TABLES


def arena_growth(ram: int) -> int:
    """Return the bytes by which page-locked memory may exceed what is used of it: half of its last slab.

    Args:
        ram: Bytes that may be used beside a GPU.

    Example:
        >>> arena_growth(4 << 30) >> 20, arena_growth(1 << 40) >> 20
        (128, 512)
    """
    return min(_SLAB, max(ram, 0) // 16) // 2


def ram_for(planned: int, held: int | None = None) -> int:
    """Return about the least RAM of which so many bytes can be planned with.

    Args:
        planned: Bytes that are planned with.
        held: As for `unplanned` of a model that computes in RAM; None beside a GPU.

    Example:
        >>> size = ram_for(1 << 30, 1 << 28)
        >>> size - unplanned(size, 1 << 28) >= 1 << 30
        True
    """
    if held is None:
        return max(planned, 0) + min(_SLAB // 2, max(planned, 0) // 31 + 1)
    rest = max(planned, 0) + held // _PAGE_TABLES
    return min((rest + _KERNEL) * 12 // 11, rest * 60 // 49) + 64


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
