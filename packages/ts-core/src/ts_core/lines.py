"""JSON lines that a running job appends to a file, and that another process reads while it runs.

A line is written by one call of the system to a file opened for appending, so that lines of several writers
do not mix, and a process that dies leaves whole lines. Should the disk fill up in the middle of one, readers
skip the torn line. Writing never fails the job: the first error is logged and writing ends.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

__all__ = ["LineFile", "finite", "read_lines"]

_log = logging.getLogger("trainstream")
_PIECE = 1 << 24  # bytes read at a time


def finite(value: Any) -> Any:
    """Return JSON-ready data in which numbers that are not finite are None: JSON has no others.

    Args:
        value: Dictionaries, lists, tuples and scalars.

    Returns:
        The same with lists for tuples.

    Example:
        >>> finite({"loss": float("nan"), "steps": (1, 2)})
        {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class LineFile:
    """Appends JSON lines to a file.

    Attributes:
        path: The file; parents are made.
        failed: Why nothing is written any more, "" while all is well.

    Example:
        >>> with LineFile("/tmp/events.jsonl") as lines:  # doctest: +SKIP
        ...     lines.write({"event": "step", "step": 1})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file for appending, and go on in a new line if the last one is torn.

        Args:
            path: The file.

        Raises:
            OSError: It cannot be opened.
        """
        self.path = Path(path)
        self.failed = ""
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file: int | None = os.open(self.path, flags, 0o644)
        try:
            end = os.lseek(self._file, 0, os.SEEK_END)
            # The last line of a process that died on a full disk has no end; a pipe cannot be looked at.
            torn = end > 0 and os.pread(self._file, 1, end - 1) != b"\n"
        except OSError:
            torn = False
        if torn:
            os.write(self._file, b"\n")

    def write(self, record: dict[str, Any]) -> bool:
        """Append one object as a line.

        Args:
            record: JSON-ready; numbers that are not finite become null.

        Returns:
            Whether it was written.
        """
        text = json.dumps(finite(record), separators=(",", ":"), allow_nan=False, default=str)
        data = text.encode() + b"\n"
        with self._lock:
            if self._file is None:
                return False
            try:
                written = os.write(self._file, data)
                if written != len(data):
                    raise OSError(f"only {written} of {len(data)} bytes were written")
            except OSError as error:
                self.failed = f"{self.path}: {error}"
                os.close(self._file)
                self._file = None
        if self.failed:
            _log.warning("no more lines are written: %s", self.failed)
            return False
        return True

    def close(self) -> None:
        """Write no more; closing twice is fine."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> LineFile:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def read_lines(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the objects that were appended since `offset`.

    Args:
        path: A file of JSON lines, perhaps still written.
        offset: Where to go on: what the last call returned.

    Returns:
        The objects of whole lines, those that are no JSON object left out; and where to go on.

    Raises:
        OSError: It cannot be read.

    Example:
        >>> records, position = read_lines("/tmp/events.jsonl")  # doctest: +SKIP
    """
    found: list[dict[str, Any]] = []
    with Path(path).open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() < offset:  # it was begun anew
            offset = 0
        file.seek(offset)
        rest = b""
        while piece := file.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                offset += len(line) + 1
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    found.append(record)
    return found, offset
