"""Page-locked host memory of exactly the size asked for."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from ts_core.errors import ArgumentError, DoesNotFitError, message
from ts_core.memory import format_bytes, host_budget, parse_bytes
from ts_core.options import integer
from ts_core.trace import EventLog

from . import _C

__all__ = ["PinnedAllocator", "pinned_bytes", "pinned_empty"]

_UNLIMITED = 2**62
# Below this, asking the system how much RAM is left takes longer than the page lock itself.
_ASK_RAM_FROM = 64 << 20


class PinnedAllocator:
    """Host memory that a GPU copies from and to at full speed; a `ts_core.registry.HostAllocator`.

    A buffer of n bytes locks ceil(n / page) pages, where PyTorch's own allocator rounds up to a power of two,
    and unlocks them when its last reference goes. Where page-locking is refused (a limit, no driver, the
    budget) the buffer is ordinary memory: results are the same, copies are slower, and one warning and one
    event per allocator say so. Without a usable GPU all memory is ordinary and nothing is said.

    Hold a buffer until copies that PyTorch started on it (`copy_(non_blocking=True)`) are through.

    Example:
        >>> PinnedAllocator(pinned=False).empty(5000).shape
        torch.Size([5000])
    """

    def __init__(
        self,
        *,
        pinned: bool | None = None,
        budget: int | str | None = None,
        log: EventLog | None = None,
    ) -> None:
        """Choose what is locked, and how much at most.

        Args:
            pinned: Page-lock or not; `None` page-locks if CUDA is usable, found out at the first use.
            budget: Bytes page-locked at a time at most ("20GiB" too); `None`: no limit of our own.
            log: Where the event about a refusal goes; `None` makes a log.

        Raises:
            OptionError: `budget` is no size.
        """
        self._wanted = pinned
        self.budget_bytes = None if budget is None else parse_bytes(budget, name="budget")
        self._pool = _C.HostPool(_UNLIMITED if self.budget_bytes is None else self.budget_bytes)
        self.log = EventLog() if log is None else log
        self._told = False
        self._lock = threading.Lock()

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked: wanted, and not refused so far."""
        if self._wanted is None:
            self._wanted = _C.with_cuda and torch.cuda.is_available()
        return self._wanted and not self._told

    @property
    def pinned_bytes(self) -> int:
        """Bytes this allocator has page-locked now, in whole pages."""
        return self._pool.pinned_bytes

    @property
    def pageable_bytes(self) -> int:
        """Bytes of this allocator's live buffers that are not page-locked, in whole pages."""
        return self._pool.pageable_bytes

    def empty(self, nbytes: int) -> torch.Tensor:
        """Make uninitialised host memory.

        Args:
            nbytes: Size in bytes, >= 0.

        Returns:
            A uint8 CPU tensor of shape `(nbytes,)` that starts on a page; `is_pinned()` tells whether it is
            page-locked.

        Raises:
            OptionError: Not an integer.
            ArgumentError: Negative size.
            DoesNotFitError: The system has no memory of this size at all.

        Example:
            >>> PinnedAllocator(pinned=False).empty(0).numel()
            0
        """
        nbytes = integer("nbytes", nbytes)
        if nbytes < 0:
            raise ArgumentError(message("PinnedAllocator.empty", "nbytes", "an integer >= 0", nbytes))
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        wanted = self.pinned or self._told
        refused = self._foreseen(nbytes) if wanted else ""
        device = locking_device() if wanted and not refused else -1
        try:
            tensor, locked, reason = self._pool.empty(nbytes, device >= 0, max(device, 0))
        except RuntimeError as error:
            raise DoesNotFitError(f"{error}. Free memory, or ask for less") from error
        if wanted and not locked:
            self._tell(nbytes, refused or reason or "CUDA cannot be used in this process")
        return tensor

    def _foreseen(self, nbytes: int) -> str:
        # Locking more than there is would not fail: the kernel would kill a process to make room.
        if nbytes < _ASK_RAM_FROM:
            return ""
        available = host_budget().available_bytes
        return "" if nbytes <= available else f"only {format_bytes(available)} of RAM are available"

    def _tell(self, nbytes: int, reason: str) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        text = (
            f"page-locking {format_bytes(nbytes)} failed ({reason}): {format_bytes(self.pinned_bytes)} are "
            f"page-locked, {format_bytes(self.pageable_bytes)} are not. Results are the same, copies of the "
            "rest are slower; more RAM, a higher budget or `ulimit -l unlimited` helps"
        )
        self.log.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def locking_device() -> int:
    """The device whose context locks the pages; -1 where CUDA cannot be used, as in a forked child."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        # Only a test simulates page-locking without a GPU.
        return 0
    try:
        return int(cuda.current_device())
    except RuntimeError:
        return -1


_default: PinnedAllocator | None = None


def pinned_empty(nbytes: int) -> torch.Tensor:
    """Make page-locked memory of exactly `nbytes` bytes, released with the tensor.

    Args:
        nbytes: Size in bytes, >= 0.

    Returns:
        A uint8 CPU tensor of shape `(nbytes,)`, page-locked if CUDA is usable and allows it; see
        `PinnedAllocator`, of which the process has one for this function.

    Raises:
        OptionError: Not an integer.
        ArgumentError: Negative size.
        DoesNotFitError: The system has no memory of this size at all.

    Example:
        >>> pinned_empty(12).view(torch.float32).shape
        torch.Size([3])
    """
    global _default
    if _default is None:
        _default = PinnedAllocator()
    return _default.empty(nbytes)


def pinned_bytes() -> int:
    """Count the bytes that this process has page-locked through this package, in whole pages.

    Returns:
        Bytes, now; 0 again when every tensor is gone.

    Example:
        >>> pinned_bytes() >= 0
        True
    """
    return _C.pinned_bytes()
