"""Byte budgets: what this process may use of RAM, page-locked RAM, VRAM and disk, and how sizes are written.

All figures are in bytes. Reading a budget allocates nothing, and an unreadable file is never an error: the
next best figure is used, and `HostBudget.source` says which.
"""

from __future__ import annotations

import operator
import os
import re
import shutil
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ._cgroup import CgroupLimit, cgroup_limit, read_text
from .errors import DeviceError, OptionError, StorageError, message
from .options import integer

__all__ = [
    "CgroupLimit",
    "DeviceBudget",
    "HostBudget",
    "cgroup_limit",
    "device_budget",
    "disk_budget",
    "find_device",
    "format_bytes",
    "host_budget",
    "local_ranks",
    "page_lock_limit_bytes",
    "parse_bytes",
]

_PREFIXES = "kmgtp"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgtp])(i?b)?|b)?", re.IGNORECASE)
_DEVICES = '"cpu", "cuda" or "cuda:N"'
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class HostBudget:
    """What this process may use of the machine's RAM.

    Attributes:
        total_bytes: Physical memory of the machine.
        available_bytes: What can be allocated now without swapping or being killed; this rank's share of it.
        limit_bytes: Smallest limit of the control groups that the process is in, None if there is none.
        source: Where `available_bytes` comes from: a file, or the name of the figure.
        ranks: How many processes share the machine; `available_bytes` is divided by it.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    source: str
    ranks: int = 1

    @property
    def whole_bytes(self) -> int:
        """All RAM that the processes here could ever have: physical memory, or a container's limit below it.

        What is a share of "the RAM", such as a floor that stays free, is a share of this: `total_bytes` is
        the machine's, whoever else it is divided among.
        """
        if not self.limit_bytes:
            return self.total_bytes
        return min(self.total_bytes, self.limit_bytes)


@dataclass(frozen=True)
class DeviceBudget:
    """What this process may use of one device's memory.

    Attributes:
        device: "cuda:0", or "cpu".
        total_bytes: Memory of the device.
        available_bytes: What is free on it now, counting every process.
        cached_bytes: What PyTorch's allocator holds without using it; comes on top of `available_bytes`, as
            far as the pieces fit.
    """

    device: str
    total_bytes: int
    available_bytes: int
    cached_bytes: int = 0


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """Read a size.

    "KiB", "MiB", "GiB", "TiB", "PiB" and the bare letters "k", "M", "G", "T", "P" are powers of 1024; "kB",
    "MB", "GB", "TB", "PB" are powers of 1000; case does not matter. A fraction of a byte is dropped.

    Args:
        value: An integer (bytes), or a string such as "20GiB", "1.5G", "512 MB", "4096".
        name: Name of the option, for the message.

    Returns:
        The size in bytes.

    Raises:
        OptionError: Not such an integer or string, negative, or above 2**63 - 1.

    Example:
        >>> parse_bytes("1.5G"), parse_bytes("512MB"), parse_bytes(4096)
        (1610612736, 512000000, 4096)
    """
    result = -1
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        # Long digit strings are refused by int() itself, at a limit that depends on the Python version.
        if match is not None and len(value) <= 64:
            digits, prefix, suffix = match.groups()
            base = 1000 if suffix is not None and suffix.lower() == "b" else 1024
            power = 0 if prefix is None else _PREFIXES.index(prefix.lower()) + 1
            result = int(Fraction(digits.rstrip(".")) * base**power)
    elif not isinstance(value, bool) and not hasattr(value, "requires_grad"):
        try:
            result = operator.index(value)
        except TypeError:
            result = -1
    if not 0 <= result <= _LARGEST:
        raise OptionError(
            f'option {name}: expected a number of bytes or a size such as "20GiB", "1.5G" or "512MB", '
            f"given {value!r}"
        )
    return result


def format_bytes(n: int) -> str:
    """Write a size for people, in powers of 1024.

    Args:
        n: Bytes; may be negative (a difference).

    Returns:
        For instance "1.50 GiB" or "512 B"; within 0.5 % of `n`, and `parse_bytes` reads it.

    Example:
        >>> format_bytes(1610612736)
        '1.50 GiB'
    """
    size = abs(n)
    sign = "-" if n < 0 else ""
    if size < 1024:
        return f"{sign}{size} B"
    power = min((size.bit_length() - 1) // 10, len(_PREFIXES))
    scaled = size / 1024**power
    # 1023.996 KiB would be printed as 1024.00 KiB.
    if scaled >= 1023.995 and power < len(_PREFIXES):
        power, scaled = power + 1, scaled / 1024
    return f"{sign}{scaled:.2f} {_PREFIXES[power - 1].upper()}iB"


def local_ranks() -> int:
    """Count the training processes that share this machine.

    Returns:
        `LOCAL_WORLD_SIZE` (torchrun, accelerate), else `SLURM_NTASKS_PER_NODE`, else 1; a value that is no
        positive integer counts as not set.

    Example:
        >>> local_ranks() >= 1
        True
    """
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        # Slurm may write "4(x2)": four tasks on each of two nodes.
        match = re.match(r"[0-9]{1,9}(?![0-9])", os.environ.get(variable, "").strip())
        if match is not None and int(match.group()) > 0:
            return int(match.group())
    return 1


def _meminfo(root: str | Path) -> dict[str, int]:
    """Read /proc/meminfo; its "kB" are 1024 bytes."""
    values: dict[str, int] = {}
    for line in (read_text(Path(root) / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isascii() and number.isdigit() and len(number) < 20:
            values[name.strip()] = int(number) * (1024 if unit.strip().lower() == "kb" else 1)
    return values


def _machine(root: str | Path) -> tuple[int, int, str]:
    """Return the machine's total and available RAM, and where the second figure comes from."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    if total and "MemAvailable" in info:
        return total, min(info["MemAvailable"], total), "MemAvailable"
    if total and "MemFree" in info:
        # Kernels before 3.14: what is free, and the file cache that can be dropped at once.
        return total, min(info["MemFree"] + info.get("Inactive(file)", 0), total), "MemFree"
    if total:
        return total, total, "MemTotal"
    try:
        import psutil  # here, since it is rarely needed and a third of this package's import time

        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available), "psutil"
    except Exception:  # psutil reads /proc too, and what it raises when it cannot depends on the system
        pass
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total, "sysconf"
    except (AttributeError, ValueError, OSError):
        return 0, 0, "unknown"


def host_budget(root: str | Path = "/", *, ranks: int | None = None) -> HostBudget:
    """Say how much RAM this process may use.

    available = min(MemAvailable, min over control groups of (limit - used + droppable file cache)) / ranks.
    The control groups are those of the process and all their visible ancestors, cgroup v1 and v2.

    Args:
        root: Directory that holds `proc` and `sys`; another one than "/" serves tests and containers that
            mount the host's files elsewhere.
        ranks: Processes that share the machine; `None` asks `local_ranks()`.

    Returns:
        The budget; unreadable files make it less exact, never an error.

    Raises:
        OptionError: `ranks` is not an integer >= 1.

    Example:
        >>> budget = host_budget()
        >>> 0 < budget.available_bytes <= budget.total_bytes
        True
    """
    shared = local_ranks() if ranks is None else integer("ranks", ranks, minimum=1)
    total, available, source = _machine(root)
    group = cgroup_limit(root)
    if group is not None and (group.available_bytes < available or total == 0):
        available, source = group.available_bytes, group.source
    limit = None if group is None else group.limit_bytes
    return HostBudget(total or limit or 0, available // shared, limit, source, shared)


def page_lock_limit_bytes() -> int | None:
    """Say how much memory the system lets this process lock (`RLIMIT_MEMLOCK`, soft limit).

    The limit binds `mlock`; the CUDA driver pins through its own interface, which is not counted on most
    systems.

    Returns:
        Bytes, or None where there is no limit.

    Example:
        >>> limit = page_lock_limit_bytes()
        >>> limit is None or limit >= 0
        True
    """
    if sys.platform == "win32":
        return None
    import resource

    try:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except (AttributeError, OSError, ValueError):
        return None
    return None if soft == resource.RLIM_INFINITY or soft < 0 else int(soft)


def find_device(function: str, device: str | torch.device | Any) -> torch.device:
    """Check a device that a caller named, without setting up CUDA.

    Args:
        function: Who asks, for the message.
        device: "cuda", "cuda:N", "cpu" or a `torch.device`.

    Returns:
        The CPU, or a CUDA device with its index.

    Raises:
        DeviceError: No such device, or no CUDA at all.

    Example:
        >>> find_device("example", "cpu")
        device(type='cpu')
    """
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(message(function, "device", _DEVICES, device)) from error
    if target.type == "cpu":
        return torch.device("cpu")
    if target.type != "cuda":
        raise DeviceError(message(function, "device", _DEVICES, repr(str(target))))
    if not torch.cuda.is_available():
        raise DeviceError(
            f"[{function}] device: {str(target)!r} needs a GPU, its driver and a CUDA build of torch; "
            f'torch {torch.__version__} finds none. Use device="cpu"'
        )
    count = torch.cuda.device_count()
    # Before CUDA is set up the current device is the first.
    cuda: Any = torch.cuda
    current = cuda.current_device() if cuda.is_initialized() else 0
    index = current if target.index is None else target.index
    if index >= count:
        raise DeviceError(message(function, "device", f"one of {count} GPUs", repr(str(target))))
    return torch.device("cuda", index)


def device_budget(device: str | torch.device | Any = "cuda") -> DeviceBudget:
    """Say how much memory of a device is free.

    Args:
        device: "cuda", "cuda:N", a `torch.device`, or "cpu" for the RAM of `host_budget()`.

    Returns:
        The budget.

    Raises:
        DeviceError: No such device, or no CUDA at all.

    Example:
        >>> device_budget("cpu").device
        'cpu'
    """
    target = find_device("device_budget", device)
    if target.type == "cpu":
        host = host_budget()
        return DeviceBudget("cpu", host.total_bytes, host.available_bytes)
    index = int(target.index)
    free, total = torch.cuda.mem_get_info(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return DeviceBudget(f"cuda:{index}", int(total), int(free), int(cached))


def disk_budget(path: str | os.PathLike[str]) -> int:
    """Say how many bytes an unprivileged process can still write where `path` is, or would be created.

    Args:
        path: File or directory; need not exist: the nearest existing parent counts.

    Returns:
        Free bytes of that file system. On a tmpfs they are RAM.

    Raises:
        StorageError: The file system cannot be asked.

    Example:
        >>> disk_budget(".") >= 0
        True
    """
    try:
        place = Path(path).expanduser().absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free
    except (OSError, RuntimeError, ValueError) as error:
        raise StorageError(f"[disk_budget] path: no free space known at {str(path)!r}: {error}") from error
