"""Host memory that is page-locked once, by slabs, and handed out in pieces."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

import torch

from ts_core.errors import ArgumentError, DoesNotFitError, OptionError, message
from ts_core.memory import format_bytes, host_budget, page_lock_limit_bytes, parse_bytes
from ts_core.options import integer
from ts_core.trace import EventLog

from . import _C
from .pinned import locking_device

__all__ = ["ArenaStats", "HostArena", "SlabStats", "lockable_bytes", "slab_bytes_from_env"]

_SLAB = "TRAINSTREAM_HOST_ARENA_SLAB"
_LEAST_SLAB = 64 << 10
#: Of slabs that are made because a request finds no room; what was reserved ahead comes in whole slabs.
_STEP = 128 << 20
#: Calls of `trim_unused` for which a slab may hold nothing.
_UNUSED = 64
_UNLIMITED = 2**62
# What page-locking leaves to the rest of the machine, unless a tenth of its RAM is less.
_KEEP_FREE = 4 << 30


@dataclass(frozen=True)
class SlabStats:
    """One slab.

    Attributes:
        nbytes: Its size.
        live_bytes: What is handed out of it.
        free_extents: Stretches that are free; 1 when all is.
        largest_free_bytes: The longest of them.
        pinned: Whether it is page-locked.
    """

    nbytes: int
    live_bytes: int
    free_extents: int
    largest_free_bytes: int
    pinned: bool


@dataclass(frozen=True)
class ArenaStats:
    """What an arena holds.

    Attributes:
        reserved_bytes: Of all slabs that are there.
        coming_bytes: Of slabs that are being made or wait for it.
        live_bytes: Handed out, in multiples of 256 bytes.
        pieces: Number of these.
        lock_s: Seconds that making slabs took so far, beside the program.
        slabs: Each slab, in the order they were made.
    """

    reserved_bytes: int
    coming_bytes: int
    live_bytes: int
    pieces: int
    lock_s: float
    slabs: tuple[SlabStats, ...]


def slab_bytes_from_env(environ: Mapping[str, str] | None = None) -> int:
    """Read `TRAINSTREAM_HOST_ARENA_SLAB`.

    Args:
        environ: Where to look; `None` is `os.environ`.

    Returns:
        Bytes of a slab; 1 GiB if it is not set.

    Raises:
        OptionError: No size, or less than 64 KiB; the message names the variable.

    Example:
        >>> slab_bytes_from_env({"TRAINSTREAM_HOST_ARENA_SLAB": "256M"})
        268435456
    """
    environ = os.environ if environ is None else environ
    nbytes = parse_bytes(environ.get(_SLAB, "").strip() or "1G", name=_SLAB)
    if nbytes < _LEAST_SLAB:
        raise OptionError(f"option {_SLAB}: expected at least {format_bytes(_LEAST_SLAB)}, given {nbytes} B")
    return nbytes


class HostArena:
    """Page-locked memory, reserved slab by slab and handed out in pieces; a `ts_core.registry.HostAllocator`.

    Locking pages runs at a few GB/s, so it is done once, by a thread of the arena: `reserve` returns at once,
    and `empty` waits only if no piece of that size is free, and then for one slab. Slabs are registered
    exactly, in whole pages. Where a request finds no room, a slab of 128 MiB is made, or one of its own size
    if it is larger than half of that (with slabs of 128 MiB or less: larger than a slab), so that little is
    reserved beyond what is used. A piece starts at a multiple of 256 bytes, is found by best fit, and goes
    back with the last reference to its tensor, from any thread; neighbours that are free become one. Slabs
    stay until `trim`, `trim_unused` or `close`.

    Where page-locking is refused, or the ceiling or the RAM does not allow more, `empty` returns ordinary
    memory: results are the same, copies are slower, and one warning and one event say so. Without a usable
    GPU all memory is ordinary and nothing is said.

    A piece that a `CopyEngine` copies from or to is kept until the copy is through. PyTorch itself does not
    know of these pieces: whoever calls `copy_(non_blocking=True)` on one must hold the tensor until that copy
    is through (`torch.cuda.Event.synchronize`), or the next owner of the memory writes what is still read.

    A forked child cannot use its parent's arena (`StateError`). Page-locked slabs are not even mapped there:
    a tensor in one must not be touched by a child, which may drop it.

    Example:
        >>> with HostArena(pinned=False, slab_bytes=1 << 20) as arena:
        ...     piece = arena.empty(5000)
        ...     arena.live_bytes, arena.reserved_bytes
        (5120, 1048576)
    """

    def __init__(
        self,
        *,
        pinned: bool | None = None,
        ceiling: int | str | None = None,
        slab_bytes: int | str | None = None,
        step_bytes: int | str = _STEP,
        log: EventLog | None = None,
        available: Callable[[], int] | None = None,
    ) -> None:
        """Reserve nothing yet.

        Args:
            pinned: Page-lock or not; `None` page-locks if CUDA is usable, found out at the first use.
            ceiling: Bytes of all slabs at most ("20GiB" too); `None`: as much as the RAM allows.
            slab_bytes: Size of a slab; `None` reads `TRAINSTREAM_HOST_ARENA_SLAB`.
            step_bytes: Size of slabs that are made because a request finds no room; at most a slab.
            log: Where events go; `None` makes a log.
            available: Bytes that page-locking may still take; `None`: the RAM that this process may still
                use, less 4 GiB or a tenth of all of it, whichever is less.

        Raises:
            OptionError: A size is no size.
        """
        self.ceiling_bytes = None if ceiling is None else parse_bytes(ceiling, name="ceiling")
        if slab_bytes is None:
            self.slab_bytes = slab_bytes_from_env()
        else:
            self.slab_bytes = integer("slab_bytes", parse_bytes(slab_bytes, name="slab_bytes"), minimum=1)
        step = integer("step_bytes", parse_bytes(step_bytes, name="step_bytes"), minimum=1)
        self.step_bytes = min(step, self.slab_bytes)
        self.log = EventLog() if log is None else log
        self._wanted = pinned
        self._available = available or lockable_bytes
        self._told = False
        self._lock = Lock()
        self._pool = _C.HostPool(_UNLIMITED)
        self._native = _C.Arena(self._pool, self.slab_bytes, self.step_bytes)
        # Runs when the arena is dropped and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._native.close)

    @property
    def pinned(self) -> bool:
        """Whether new memory is page-locked: wanted, and not refused so far."""
        return self._wants() and self._native.info()["refused_bytes"] > self.step_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs that are there."""
        return self.stats().reserved_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the slabs that are handed out, in multiples of 256."""
        return self.stats().live_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that this arena has page-locked now."""
        return self._pool.pinned_bytes

    @property
    def pageable_bytes(self) -> int:
        """Bytes that are not page-locked: slabs without a GPU, and what exceeded the limits."""
        return self._pool.pageable_bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        """Hand out uninitialised host memory.

        Args:
            nbytes: Size in bytes, >= 0.

        Returns:
            A uint8 CPU tensor of shape `(nbytes,)` that starts at a multiple of 256 bytes.

        Raises:
            OptionError: Not an integer.
            ArgumentError: Negative size.
            DoesNotFitError: The system has no memory of this size at all.
            StateError: The arena is closed, or belongs to the parent of this forked process.
        """
        nbytes = _size("empty", nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        found = self._native.find(nbytes)
        if found is not None:
            return found
        device = self._device()
        if device < 0 and self._wants():
            return self._ordinary(nbytes, "CUDA cannot be used in this process")
        made = self._native.empty(nbytes, self._limit(), device)
        return self._ordinary(nbytes) if made is None else made

    def reserve(self, nbytes: int) -> int:
        """Have slabs made until there are `nbytes`, by the arena's thread; returns at once.

        Args:
            nbytes: Bytes that the slabs shall have together, >= 0.

        Returns:
            What they will have: less where the ceiling or the RAM does not allow it.

        Raises:
            OptionError: Not an integer.
            ArgumentError: Negative size.
            StateError: The arena belongs to the parent of this forked process.
        """
        nbytes = _size("reserve", nbytes)
        device = self._device()
        if device < 0 and self._wants():
            return self.reserved_bytes
        return self._native.reserve(nbytes, self._limit(), device)

    def synchronize(self) -> None:
        """Wait until what was reserved is there, or was refused."""
        self._native.synchronize()

    def trim(self, keep_bytes: int = 0) -> int:
        """Give slabs that hold nothing back to the system; page-locking that was refused is tried again.

        What was reserved and is not there yet no longer comes either, unless a request waits for it.

        Args:
            keep_bytes: Stop when the slabs have this much or less.

        Returns:
            Bytes given back.

        Raises:
            OptionError: Not an integer.
            ArgumentError: Negative size.
        """
        return self._native.trim(_size("trim", keep_bytes, "keep_bytes"))

    def trim_unused(self, calls: int = _UNUSED) -> int:
        """Give slabs back that have held nothing during the latest calls of this; one a step, for instance.

        Args:
            calls: How many.

        Returns:
            Bytes given back.

        Raises:
            OptionError: Not an integer.
            ArgumentError: A negative one.
        """
        return self._native.trim_unused(_size("trim_unused", calls, "calls"))

    def stats(self) -> ArenaStats:
        """Look at all of it.

        Returns:
            The figures of one moment.
        """
        info = self._native.info()
        return ArenaStats(
            info["reserved_bytes"],
            info["coming_bytes"],
            info["live_bytes"],
            info["pieces"],
            info["lock_seconds"],
            tuple(SlabStats(*slab) for slab in info["slabs"]),
        )

    def close(self) -> None:
        """Give everything back that holds nothing; a slab with live pieces goes with the last of them.

        `empty` fails from then on. May be called again.
        """
        self._finalizer()

    def __enter__(self) -> HostArena:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def _wants(self) -> bool:
        if self._wanted is None:
            self._wanted = _C.with_cuda and torch.cuda.is_available()
        return self._wanted

    def _device(self) -> int:
        return locking_device() if self._wants() else -1

    def _limit(self) -> int:
        ceiling = _UNLIMITED if self.ceiling_bytes is None else self.ceiling_bytes
        return min(ceiling, self.reserved_bytes + max(self._available(), 0))

    def _ordinary(self, nbytes: int, reason: str = "") -> torch.Tensor:
        try:
            tensor, _, _ = self._pool.empty(nbytes, False, 0)
        except RuntimeError as error:
            raise DoesNotFitError(f"{error}. Free memory, or ask for less") from error
        if self._wants():
            self._tell(nbytes, reason)
        return tensor

    def _tell(self, nbytes: int, reason: str) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        reason = reason or self._native.info()["refused"]
        if not reason:
            reason = "it would take more than the RAM allows"
            if self.ceiling_bytes is not None and self._limit() >= self.ceiling_bytes:
                reason = f"the ceiling is {format_bytes(self.ceiling_bytes)}"
        allowed = page_lock_limit_bytes()
        help_ = "more RAM or a higher ceiling helps"
        if allowed is not None:
            help_ += f"; `ulimit -l` is {format_bytes(allowed)} here"
        text = (
            f"page-locking {format_bytes(nbytes)} failed ({reason}): {format_bytes(self.pinned_bytes)} are "
            f"page-locked, {format_bytes(self.pageable_bytes)} are not. Results are the same, copies of the "
            f"rest are slower; {help_}"
        )
        self.log.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def lockable_bytes() -> int:
    """Return the RAM that page-locking may still take.

        available - min(4 GiB, RAM / 10)

    `RLIMIT_MEMLOCK` does not count: CUDA page-locks past it.

    Returns:
        Bytes; negative where less than that is free.

    Example:
        >>> from ts_core.memory import host_budget
        >>> lockable_bytes() < host_budget().whole_bytes
        True
    """
    budget = host_budget()
    # The machine keeps it free once, whatever number of ranks share what is left.
    return budget.available_bytes - min(_KEEP_FREE, budget.whole_bytes // 10) // budget.ranks


def _size(function: str, nbytes: int, name: str = "nbytes") -> int:
    nbytes = integer(name, nbytes)
    if nbytes < 0:
        raise ArgumentError(message(f"HostArena.{function}", name, "an integer >= 0", nbytes))
    return nbytes
