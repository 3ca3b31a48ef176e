"""Stretches of files that are not ours: which file it is, and that it is still what it was."""

from __future__ import annotations

import errno
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from ts_core.errors import ArgumentError, StorageError, message

from . import _C

__all__ = ["FileSpan", "OpenFile"]

_DESCRIPTORS = Path("/proc/self/fd")


class OpenFile:
    """A file of somebody else, held open for reading: replaced or removed, it can be read all the same.

    Attributes:
        path: Where it was found, links resolved.
        name: Under which this very file can be opened again.
        identity: Which one it is, of which size and last change: one that was written in place is refused.
    """

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            StorageError: It cannot be opened.
        """
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StorageError(
                error.errno, f"[FileSpan.of] opening {path}: {error.strerror}", path
            ) from error
        self.name = str(_DESCRIPTORS / str(self._descriptor)) if _DESCRIPTORS.is_dir() else path
        self.identity = _C.identify(self.name)

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """What two of the same file in the same state share."""
        found = self.identity
        return self.path, found.device, found.inode, found.nbytes, found.modified_ns

    def __del__(self) -> None:
        """Let the file go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)


_open: weakref.WeakValueDictionary[tuple[str, int, int, int, int], OpenFile] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class FileSpan:
    """A stretch of a file that is not ours: read, and never written.

    Attributes:
        file: The file.
        offset: First byte.
        nbytes: Bytes.
    """

    file: OpenFile
    offset: int
    nbytes: int

    @property
    def path(self) -> str:
        """Where the file was found, links resolved."""
        return self.file.path

    @staticmethod
    def of(path: str | os.PathLike[str], offset: int, nbytes: int) -> FileSpan:
        """Open a file, or use what is open.

        Args:
            path: The file, or a link to it.
            offset: First byte.
            nbytes: Bytes, at least 1.

        Raises:
            StorageError: It is missing or shorter.
            ArgumentError: A negative offset, or no bytes.
        """
        if offset < 0 or nbytes < 1:
            raise ArgumentError(
                message("FileSpan.of", "offset, nbytes", "an offset >= 0 and bytes >= 1", (offset, nbytes))
            )
        file = OpenFile(os.path.realpath(path))
        file = _open.setdefault(file.key, file)
        if offset + nbytes > file.identity.nbytes:
            raise StorageError(
                errno.EIO,
                f"[FileSpan.of] {file.path}: expected {nbytes} bytes at offset {offset}, the file ends at "
                f"{file.identity.nbytes}",
                file.path,
            )
        return FileSpan(file, offset, nbytes)
