"""Folders that a crash cannot damage: written beside their place, made durable, then renamed into place.

A folder named `checkpoint-<step>` is always complete. Whatever can be interrupted happens in a folder whose
name starts with `.saving-<process>`; `sweep` removes those of dead processes at the next start.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["discard_folder", "replace_folder", "settle", "sweep", "write_folder"]

_OLD = re.compile(r"^checkpoint-\d+\.old$")
_STAGING = re.compile(r"^\.saving-(\d+)-")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def discard_folder(folder: Path) -> None:
    """Remove a folder, its name before its files: half removed, it must not pass for whole."""
    if folder.exists():
        doomed = folder.with_name(f".saving-{os.getpid()}-removing-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def replace_folder(staged: Path, final: Path, *, hidden: bool = False) -> None:
    """Give a finished folder its name, replacing one that is there already; at no time is neither complete.

    Args:
        staged: The finished folder, on the same file system.
        final: Its name. A folder of that name is kept as `<name>.old` until the new one is in place.
        hidden: Keep it as `.<name>.old`, for names that are not ours: `<name>.old` may be somebody's.
    """
    _sync_tree(staged)
    old = _hidden_old(final) if hidden else final.with_name(final.name + ".old")
    if final.exists():
        discard_folder(old)
        final.rename(old)
    staged.rename(final)
    _sync(final.parent)
    discard_folder(old)


def write_folder(final: Path, write: Callable[[Path], None], *, hidden: bool = False) -> None:
    """Write a folder atomically: `write(temporary folder)`, fsync, rename.

    Args:
        final: The folder to make; its parent is created if needed.
        write: Fills the folder it is given. If it raises, nothing of the attempt remains.
        hidden: As for `replace_folder`.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if hidden:
        settle(final)
    staging = final.parent / f".saving-{os.getpid()}-{final.name}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    try:
        write(staging)
        # Private while half-written; from here on as readable as any folder the user makes.
        mask = os.umask(0)
        os.umask(mask)
        staging.chmod(0o777 & ~mask)
        replace_folder(staging, final, hidden=hidden)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what interrupted saves of dead processes left, and finish an interrupted replacement."""
    if not folder.is_dir():
        return
    for entry in list(folder.iterdir()):
        staging = _STAGING.match(entry.name)
        if staging and entry.is_dir() and not entry.is_symlink() and not _alive(int(staging[1])):
            shutil.rmtree(entry, ignore_errors=True)
        elif _OLD.match(entry.name):
            final = entry.with_suffix("")
            if final.exists():
                discard_folder(entry)
            else:
                entry.rename(final)


def _hidden_old(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def settle(final: Path) -> None:
    """Finish or undo what a dead process left of `replace_folder(..., hidden=True)`, whatever the name.

    Args:
        final: The folder; nothing happens while another process is saving it.
    """
    if not final.parent.is_dir():
        return
    old = _hidden_old(final)
    for entry in list(final.parent.iterdir()):
        staging = _STAGING.match(entry.name)
        if staging and entry.name[staging.end() :] in (final.name, f"removing-{old.name}"):
            if _alive(int(staging[1])):
                return
            shutil.rmtree(entry, ignore_errors=True)
    if old.is_dir() and final.exists():
        discard_folder(old)
    elif old.is_dir():
        old.rename(final)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
