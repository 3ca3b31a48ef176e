"""A Linux control group with a memory limit, for benchmarks that must stay within one; cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["MemoryGroup"]

# (version, where it is mounted, limit, most used)
_V1 = (1, "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2 = (2, "sys/fs/cgroup", "memory.max", "memory.peak")
_REFAULT = "workingset_refault_file"


class MemoryGroup:
    """One group, a child of the process's own where that is allowed.

    Attributes:
        path: Its directory.
        version: 1 or 2.
    """

    def __init__(self, path: Path, version: int, limit_file: str, peak_file: str) -> None:
        """Use `create`."""
        self.path, self.version = path, version
        self._limit_file, self._peak_file = limit_file, peak_file

    @classmethod
    def create(cls, name: str, root: str | os.PathLike[str] = "/") -> MemoryGroup | None:
        """Make a group; None where control groups cannot be made (no rights, no memory controller)."""
        base = Path(root)
        own = {1: "/", 2: "/"}
        with contextlib.suppress(OSError):
            for line in (base / "proc/self/cgroup").read_text().splitlines():
                number, controllers, path = line.split(":", 2)
                if "memory" in controllers.split(","):
                    own[1] = path
                elif number == "0":
                    own[2] = path
        for version, mount, limit_file, peak_file in (_V1, _V2):
            for parent in dict.fromkeys((base / mount / own[version].lstrip("/"), base / mount)):
                path = parent / name
                try:
                    if version == 2:
                        (parent / "cgroup.subtree_control").write_text("+memory")
                    path.mkdir()
                except OSError:
                    continue
                if (path / limit_file).is_file():
                    return cls(path, version, limit_file, peak_file)
                with contextlib.suppress(OSError):
                    path.rmdir()
        return None

    def join_command(self, command: list[str]) -> list[str]:
        """Return a command that enters the group before it becomes `command`."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def limit(self, nbytes: int) -> None:
        """Set the limit, no swap beside it, and let the kernel's peak begin anew."""
        (self.path / self._limit_file).write_text(str(nbytes))
        swap = {1: ("memory.memsw.limit_in_bytes", nbytes), 2: ("memory.swap.max", 0)}[self.version]
        with contextlib.suppress(OSError):  # kernels without swap accounting have no such file
            (self.path / swap[0]).write_text(str(swap[1]))
        with contextlib.suppress(OSError):
            (self.path / self._peak_file).write_text("0")

    def _number(self, name: str) -> int | None:
        try:
            return int((self.path / name).read_text())
        except (OSError, ValueError):
            return None

    def _table(self, name: str) -> dict[str, int]:
        try:
            rows = [line.split() for line in (self.path / name).read_text().splitlines()]
        except OSError:
            return {}
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}

    def unreclaimable(self) -> int:
        """Anonymous and shared memory charged to the group now."""
        table = self._table("memory.stat")
        return table.get("total_rss", table.get("anon", 0)) + table.get("total_shmem", table.get("shmem", 0))

    def kernel(self) -> int:
        """Memory of the kernel charged to the group now: page tables, inodes, stacks."""
        known = self._number("memory.kmem.usage_in_bytes")
        return known if known is not None else self._table("memory.stat").get("kernel", 0)

    def facts(self) -> dict[str, int | None]:
        """What the kernel counted: peak (with file cache), refused charges, kills, and the cache now."""
        table = self._table("memory.stat")
        events = self._table("memory.events") | self._table("memory.oom_control")
        return {
            "limit_bytes": self._number(self._limit_file),
            "peak_with_cache_bytes": self._number(self._peak_file),
            "limit_hits": events.get("max", self._number("memory.failcnt")),
            "oom_kills": events.get("oom_kill"),
            "cache_bytes": table.get("total_cache", table.get("file")),
            "file_pages_read_again": table.get("total_" + _REFAULT, table.get(_REFAULT)),
            "mapped_file_bytes": table.get("total_mapped_file", table.get("file_mapped")),
        }

    def remove(self) -> None:
        """Remove the group once it is empty; its file cache goes to the parent."""
        with contextlib.suppress(OSError):
            (self.path / "memory.force_empty").write_text("0")
        for _ in range(50):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return
