"""A private folder that goes away with its process, and the removal of those that could not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ts_core.errors import StorageError

__all__ = ["PrivateFolder", "remove_leftovers"]

_NAME = re.compile(r"trainstream-([1-9][0-9]{0,9})-[0-9a-f]{16}")
_LOCK = "lock"
# A folder without a lock file is being made right now, unless its process is gone and it is this old.
_GRACE_S = 60.0
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A folder `trainstream-<pid>-<random>` of mode 0700, locked while this process lives.

    Making one removes those that killed processes of this user left in the same directory. It is removed by
    `remove`, when it is dropped and at interpreter exit, by the process that made it only.

    Attributes:
        path: Where it is.
        descriptor: Open descriptor of it; files are opened relative to this one.
        owner: Process that made it.

    Example:
        >>> folder = PrivateFolder()
        >>> folder.path.is_dir()
        True
        >>> folder.remove()
        >>> folder.path.exists()
        False
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Make it.

        Args:
            directory: An existing directory; `None` is the system's temporary one.

        Raises:
            StorageError: The directory is missing or cannot be written.
        """
        parent = Path(tempfile.gettempdir() if directory is None else directory).absolute()
        self.owner = os.getpid()
        self.path = parent / f"trainstream-{self.owner}-{secrets.token_hex(8)}"
        try:
            remove_leftovers(parent)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"[DiskStore] directory: expected an existing directory that can be written, given {parent}: "
                f"{error.strerror}",
                str(parent),
            ) from error
        self.descriptor = -1
        self._lock_descriptor = -1
        try:
            self.descriptor = os.open(self.path, _FOLDER_FLAGS)
            self._lock_descriptor = _make_lock(self.descriptor)
        except OSError as error:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            with contextlib.suppress(OSError):
                (self.path / "lock.new").unlink(missing_ok=True)
                self.path.rmdir()
            raise StorageError(
                error.errno, f"[DiskStore] locking {self.path}: {error.strerror}", str(self.path)
            ) from error
        _alive.add(self)
        self._before_removal: list[Callable[[], None]] = []
        # Holds no reference to the folder object; runs when that is dropped, or at interpreter exit.
        self._finalizer = weakref.finalize(
            self,
            _remove_own,
            self.owner,
            self.path,
            (self.descriptor, self._lock_descriptor),
            self._before_removal,
        )

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return os.getpid() != self.owner

    @property
    def removed(self) -> bool:
        """Whether it was removed."""
        return not self._finalizer.alive

    def call_before_removal(self, function: Callable[[], None]) -> None:
        """Have `function` called first when the folder is removed, to end the threads that use it."""
        self._before_removal.append(function)

    def unlink(self, name: str) -> None:
        """Remove one file of the folder."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove(self) -> None:
        """Remove it with its files, if this process made it. May be called again."""
        if not self.foreign:
            self._finalizer()


_alive: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # An orphaned child must not keep the lock of a parent that was killed: leftovers would never go.
    for folder in list(_alive):
        for descriptor in (folder.descriptor, folder._lock_descriptor):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        folder.descriptor = folder._lock_descriptor = -1
        folder._finalizer.detach()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _make_lock(folder: int) -> int:
    """Make the lock file, locked from the moment that its name can be seen."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open("lock.new", flags, 0o600, dir_fd=folder)
    try:
        # Where the file system has no locks, the process id in the folder's name has to do.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename("lock.new", _LOCK, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_own(
    owner: int, path: Path, descriptors: tuple[int, int], before: list[Callable[[], None]]
) -> None:
    if os.getpid() != owner:
        return
    for function in before:
        function()
    folder, lock = descriptors
    _empty(folder)
    with contextlib.suppress(OSError):
        path.rmdir()
    os.close(lock)
    os.close(folder)


def _empty(folder: int) -> None:
    """Remove the files of an open folder, the lock last."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in sorted(names, key=lambda name: name == _LOCK):
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def remove_leftovers(directory: str | os.PathLike[str]) -> list[str]:
    """Remove the folders that killed processes of this user left in a directory.

    A folder goes if its name is ours, it is a real folder (no link) of this user, and nobody holds its lock.

    Args:
        directory: Where to look.

    Returns:
        Names of the folders removed.

    Raises:
        OSError: The directory cannot be read.

    Example:
        >>> import tempfile
        >>> remove_leftovers(tempfile.mkdtemp())
        []
    """
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        names = os.listdir(parent)  # noqa: PTH208 - by descriptor, which no link can redirect
        return [name for name in names if _NAME.fullmatch(name) and _remove_if_dead(parent, name)]
    finally:
        os.close(parent)


def _remove_if_dead(parent: int, name: str) -> bool:
    try:
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except OSError:
        return False  # a link, a file, another user's, or gone
    lock = -1
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return False
        pid = int(name.split("-")[1])
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            if _exists(pid) or time.time() - found.st_mtime < _GRACE_S:
                return False
        except OSError as error:
            # Held; or no locks here, and the process id decides.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or _exists(pid):
                return False
        _empty(folder)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)
            return True
        return False
    finally:
        if lock >= 0:
            os.close(lock)
        os.close(folder)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
