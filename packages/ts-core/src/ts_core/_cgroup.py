"""Reader of the memory and CPU limits that Linux control groups (v1, v2, both at once) put on this process.

Facts used, from the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
scheduler/sched-bwc.rst:

* `/proc/self/cgroup` has a line `hierarchy:controllers:path` each; v2 is `0::path`; a path may hold colons.
* In a container the path may be the host's, which its mount does not show: then the root of the mount is the
  container's own group. `mountinfo` tells which part of the path the mount begins at.
* No limit is "max" in v2 and the largest multiple of the page size below 2**63 in v1.
* A limit binds all descendants, so each visible ancestor counts; file cache counts as used, and the kernel
  drops it before anything is killed: the inactive list first, then from the active one, which holds what was
  read more than once. So it goes with files that are read again in each step where direct I/O is refused.
  Half of the active list counts as free, as it does at least in MemAvailable: code is in it too.
* A group may run quota / period cores on average: `cpu.max` holds both in v2, "max" is no quota; v1 has a
  file for each, -1 is no quota.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["CgroupLimit", "cgroup_limit", "cpu_quota", "read_text"]

# Larger "limits" are v1's way to say none: 2**63 less one page, of 4 to 64 KiB.
_NONE = 2**60


@dataclass(frozen=True)
class CgroupLimit:
    """The memory limits of the control groups that this process is in.

    Attributes:
        limit_bytes: The smallest limit of all.
        available_bytes: The smallest (limit - used + file cache that can be dropped) of all; never negative.
        source: Directory of the group that `available_bytes` comes from.
    """

    limit_bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True)
class _Files:
    """How one version of the interface names things."""

    limits: tuple[str, ...]
    used: str
    inactive: tuple[str, ...]
    active: tuple[str, ...]


# Above memory.high the kernel throttles a process almost to a standstill, so it is as hard as memory.max to
# us.
_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file",), ("active_file",))
_V1 = _Files(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes",
    ("total_inactive_file", "inactive_file"), ("total_active_file", "active_file"),
)  # fmt: skip


def read_text(path: Path) -> str | None:
    """Read a small text file; None if that is impossible for any reason."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _groups(root: Path, controller: str) -> tuple[str, str]:
    """Return this process's path in the v1 hierarchy of a controller and in the v2 one; "/" where unknown."""
    v1 = v2 = "/"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        if fields[1] == "" and fields[0] == "0":
            v2 = fields[2]
        elif controller in fields[1].split(","):
            v1 = fields[2]
    return v1, v2


def _unescape(text: str) -> str:
    # mountinfo writes blanks, tabs, newlines and backslashes as three octal digits.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _mounts(root: Path, controller: str) -> Iterator[tuple[bool, str, str]]:
    """Yield (whether v2, mount point, path the mount begins at) of each hierarchy of a controller."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if len(before) < 5 or len(after) < 3:
            continue
        start, point = _unescape(before[3]), _unescape(before[4])
        if after[0] == "cgroup2":
            yield True, point, start
        elif after[0] == "cgroup" and controller in after[2].split(","):
            yield False, point, start
    # The usual places, for a mountinfo that cannot be read.
    yield True, "/sys/fs/cgroup", "/"
    yield True, "/sys/fs/cgroup/unified", "/"
    yield False, f"/sys/fs/cgroup/{controller}", "/"


def _is_dir(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path.is_dir()
    return False


def _chain(mount: Path, start: str, group: str) -> list[Path]:
    """List the directories of a group and its ancestors up to the mount, as far as the mount shows them."""
    relative = group
    if start != "/" and (group == start or group.startswith(start.rstrip("/") + "/")):
        relative = group[len(start.rstrip("/")) :]
    parts = [part for part in PurePosixPath(relative).parts if part != "/"]
    # A path that climbs out of the namespace, or that only the host can see.
    if ".." in parts or not _is_dir(mount.joinpath(*parts)):
        parts = []
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _directories(base: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield (whether v2, directory) of this process's groups and their visible ancestors."""
    v1, v2 = _groups(base, controller)
    for is_v2, point, start in _mounts(base, controller):
        for directory in _chain(base / point.lstrip("/"), start, v2 if is_v2 else v1):
            yield is_v2, directory


def _limit_of(directory: Path, files: _Files) -> tuple[int, int] | None:
    """Return (limit, available) of one group, None if it has no limit."""
    statistics: dict[str, int] = {}
    for line in (read_text(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        parsed = _number(value)
        if parsed is not None:
            statistics[name] = parsed
    limits = [_number(read_text(directory / name)) for name in files.limits]
    if files is _V1:
        # The smallest limit of all ancestors, those outside the container's view included.
        limits.append(statistics.get("hierarchical_memory_limit"))
    real = [limit for limit in limits if limit is not None and limit < _NONE]
    if not real:
        return None
    used = _number(read_text(directory / files.used)) or 0
    inactive, active = (
        next((statistics[name] for name in names if name in statistics), 0)
        for names in (files.inactive, files.active)
    )
    return min(real), max(min(real) - used + min(inactive + active // 2, used), 0)


def cgroup_limit(root: str | Path = "/") -> CgroupLimit | None:
    """Read what the control groups of this process leave it.

    available = min over the group and its visible ancestors of (limit - used + inactive file cache
                                                                 + active file cache / 2).

    Args:
        root: Directory that holds `proc` and `sys`; another one than "/" serves tests.

    Returns:
        The limits, or None if no group has one (or nothing can be read, or the system is not Linux).

    Example:
        >>> limit = cgroup_limit()
        >>> limit is None or limit.available_bytes <= limit.limit_bytes
        True
    """
    base = Path(root)
    found: dict[Path, tuple[int, int]] = {}
    for is_v2, directory in _directories(base, "memory"):
        limit = _limit_of(directory, _V2 if is_v2 else _V1)
        if limit is not None:
            found.setdefault(directory, limit)
    if not found:
        return None
    tightest = min(found, key=lambda directory: found[directory][1])
    return CgroupLimit(min(limit for limit, _ in found.values()), found[tightest][1], str(tightest))


def cpu_quota(root: str | Path = "/") -> float | None:
    """Return how many cores the control groups of this process let it keep busy.

        quota = min over the group and its visible ancestors of quota / period

    Args:
        root: Directory that holds `proc` and `sys`; another one than "/" serves tests.

    Returns:
        Cores, or None if no group has a quota (or nothing can be read, or the system is not Linux).
    """
    quotas = []
    for is_v2, directory in _directories(Path(root), "cpu"):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        fields = " ".join(read_text(directory / name) or "none" for name in names).split()
        numbers = [_number(field) for field in fields]
        if len(numbers) == 2 and numbers[0] and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)
