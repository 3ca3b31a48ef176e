"""The folder of a run: claimed before anything slow, and by one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from trainstream._runs import EVENTS_FILE, TRACE_FILE
from trainstream.cli.storage import checkpoints
from ts_core.errors import OptionError, StateError, StorageError, TrainStreamError
from ts_core.memory import disk_budget, format_bytes

__all__ = ["EVENTS_FILE", "LOCK_FILE", "RESULT_FILE", "RUNS", "TRACE_FILE", "claim", "storage_errors"]

RUNS = Path("runs")
LOCK_FILE = ".lock"
RESULT_FILE = "result.json"


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the libraries raise when they cannot write `path` into one kind of error.

    Args:
        path: What is written inside; the message names it and the free space where it lies.

    Raises:
        StorageError: It could not be written.
    """
    try:
        yield
    except TrainStreamError:
        raise
    except Exception as error:
        # The tokenizers library raises a bare Exception that names the error of the system.
        if not isinstance(error, (OSError, SafetensorError)) and "(os error " not in str(error):
            raise
        raise StorageError(f"cannot write {path}: {error} ({_free(path)} free there)") from error


def _free(path: Path) -> str:
    try:
        return format_bytes(disk_budget(path))
    except StorageError:
        return "unknown space"


@contextlib.contextmanager
def claim(folder: Path, *, resuming: bool) -> Iterator[None]:
    """Make the folder of a run, prove that it can be written, and keep other runs out of it.

    The lock is the system's (`flock`), so one left by a process that died does not hold. A folder that was
    made here and is still empty at the end is removed again.

    Args:
        folder: The run folder.
        resuming: The run goes on with what the folder holds; otherwise a finished result is refused.

    Raises:
        StorageError: The folder cannot be made or written.
        StateError: Another run is using it.
        OptionError: It holds the result of an earlier run.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with storage_errors(folder):
            lock = _lock(folder)
        try:
            if not resuming and (folder / RESULT_FILE).exists():
                go_on = f", or go on with that run: resume={shlex.quote(str(folder))}"
                raise OptionError(
                    f"option output_dir: {folder} holds the result of an earlier run ({RESULT_FILE}); give "
                    f"another output_dir{go_on if checkpoints(folder) else ''}"
                )
            yield
        finally:
            # Its name goes before the lock does: whoever waits for this file finds that out in _lock.
            (folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(lock)
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def _lock(folder: Path) -> int:
    """Return the open, locked lock file; writing to it also shows that the folder can be written."""
    path = folder / LOCK_FILE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError(
                    f"option output_dir: another run is using {folder} (process {_owner(descriptor)}); wait "
                    "for it to end, or give another output_dir"
                ) from error
            # The run before may have removed the file between our opening and locking it.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    return os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
