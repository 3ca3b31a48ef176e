"""Tensors in private files: the disk tier."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, StateError, StorageError, message
from ts_core.memory import disk_budget, format_bytes, parse_bytes
from ts_core.options import boolean, choice, integer

from . import _C
from .folder import PrivateFolder
from .layout import Layout, copy_exactly, flat_bytes, layout_of, stored_form
from .spans import FileSpan
from .wait import WaitPolicy

__all__ = ["DiskStore", "DiskTicket"]

_PAGE = _C.direct_align
_BACKENDS = {"auto": 0, "uring": 1, "threads": 2}
_CHUNK_BYTES = 1 << 20
_AT_FDCWD = -100


@dataclass
class _Entry:
    """One key: its file and what is in it."""

    name: str
    layout: Layout
    reserved: int
    write: _C.Ticket | None = None
    parts: dict[tuple[int, int], _C.Ticket] = field(default_factory=dict)
    reads: list[_C.Ticket] = field(default_factory=list)


class DiskTicket:
    """A read or write under way.

    Example:
        >>> with DiskStore() as store:
        ...     store.write_async("a", torch.ones(2)).wait()
        ...     store.read_async("a").wait()
        tensor([1., 1.])
    """

    def __init__(
        self, native: _C.Ticket | None, result: torch.Tensor | None, staged: torch.Tensor | None = None
    ) -> None:
        """Made by `DiskStore`: `result` is what `wait` returns, `staged` where its bytes arrive first."""
        self._native = native
        self._result = result
        self._staged = staged
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Look whether it is through, well or not, without waiting."""
        return self._native is None or self._native.done()

    def wait(self) -> torch.Tensor | None:
        """Wait on the host.

        Returns:
            The tensor that was read; None for a write.

        Raises:
            StorageError: The system refused, or the file is shorter than it must be; names file, offset,
                bytes expected and bytes got.
            StateError: The store was closed before.
        """
        if self._native is not None:
            self._native.wait()
        with self._lock:
            if self._staged is not None and self._result is not None:
                copy_exactly(self._result, self._staged)
                self._staged = None
        return self._result


class DiskStore:
    """Keeps tensors in files of its own: one per key, readable by this user only, gone when it is closed.

    The folder `trainstream-<pid>-<random>` (0700) is made in `directory` and removed by `close`, when the
    store is dropped and at interpreter exit; folders that killed processes of this user left there go first,
    never through links. A file's blocks are reserved before its first byte is written, so a full disk
    is an error of the call that asks for room, and rewriting a key at its size cannot fail for want of it.
    Bytes move by direct I/O where the file system takes it and mappings of the files see it (`direct`), else
    by plain reads and writes, several chunks of 1 MiB at a time. Direct I/O of page-aligned memory goes
    through io_uring where the kernel and the container let it (`uring`), all else on I/O threads of the
    store; tests choose with the environment variable `TRAINSTREAM_IO`: ``auto``, ``uring`` or ``threads``.
    Bytes come back exactly, with shape, dtype and dense strides; gaps and repeated rows of a view are not
    stored.

    A forked child cannot use its parent's store (`StateError`) and never removes its files.

    Example:
        >>> with DiskStore() as store:
        ...     store.write("w", torch.arange(3))
        ...     store.read("w")
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        budget: int | str | None = None,
        direct: bool = True,
        threads: int = 4,
        wait: WaitPolicy | None = None,
    ) -> None:
        """Make the folder.

        Args:
            directory: An existing directory; `None` is the system's temporary one.
            budget: Bytes of files at most ("100GiB" too); `None`: as much as the disk has.
            direct: Use direct I/O if the file system takes it.
            threads: Chunks under way at once; I/O threads, started with the first read or write that needs
                them.
            wait: How host threads wait; `None` reads the environment (`WaitPolicy.from_env`).

        Raises:
            OptionError: A bad option.
            StorageError: The directory is missing or cannot be written.
        """
        boolean("direct", direct)
        integer("threads", threads, minimum=1, maximum=256)
        self.budget_bytes = None if budget is None else parse_bytes(budget, name="budget")
        policy = WaitPolicy.from_env() if wait is None else wait
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._made = 0
        self._used = 0
        self._folder = PrivateFolder(directory)
        self._tries_direct = direct
        self.direct = direct and _C.takes_direct_io(self._folder.descriptor)
        name = os.environ.get("TRAINSTREAM_IO", "").strip() or "auto"
        backend = _BACKENDS[choice("environment variable TRAINSTREAM_IO", name, tuple(_BACKENDS))]
        self._native = _C.Disk(threads, _CHUNK_BYTES, *policy.native(), backend)
        self._folder.call_before_removal(self._native.close)
        self._host = _C.HostPool(0)

    @property
    def folder(self) -> Path:
        """The private folder."""
        return self._folder.path

    @property
    def used_bytes(self) -> int:
        """Bytes reserved in files."""
        return self._used

    @property
    def descriptor(self) -> int:
        """Open descriptor of the private folder."""
        return self._folder.descriptor

    def nbytes_of(self, key: str) -> int:
        """Return the bytes of a stored tensor; 0 for a key that is not stored."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.layout.nbytes

    @property
    def uring(self) -> bool:
        """Whether direct reads and writes of page-aligned memory go through io_uring."""
        return self.direct and self._native.uses_uring

    def __contains__(self, key: object) -> bool:
        """Whether a key is stored."""
        return key in self._entries

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Go through the keys, oldest first, as they are now."""
        return iter(self.keys())

    def keys(self) -> list[str]:
        """List the keys, oldest first."""
        with self._lock:
            return list(self._entries)

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Store a tensor and wait for it; see `write_async`.

        Args:
            key: Any string; writing it again replaces.
            tensor: A CPU tensor of any shape, strides and dtype.

        Raises:
            StorageError: No room (the key keeps its old value), or the write failed (its value is lost).
            ArgumentTypeError: Not a plain CPU tensor, or the key is no string.
            StateError: Closed, or the parent's store.
        """
        self.write_async(key, tensor).wait()

    def write_async(self, key: str, tensor: torch.Tensor) -> DiskTicket:
        """Start storing a tensor: room is reserved before the call returns, bytes are written after.

        Args:
            key: Any string; writing it again replaces, after reads under way.
            tensor: A CPU tensor of any shape, strides and dtype; its values must stay until it is written.

        Returns:
            The ticket; its `wait()` returns None.

        Raises:
            StorageError: The budget or the disk has no room: names the directory, bytes wanted and bytes
                free. Nothing changed.
            ArgumentTypeError: Not a plain CPU tensor, or the key is no string.
            StateError: Closed, or the parent's store.
        """
        _expect_key("write", key)
        stored = stored_form(tensor, "DiskStore.write")
        layout = layout_of(stored)
        with self._lock:
            self._expect_open("write")
            entry = self._entries.get(key)
            if entry is not None:
                _settle(entry)
            reserved = math.ceil(layout.nbytes / _PAGE) * _PAGE
            entry = self._reserve(key, entry, reserved)
            entry.layout = layout
            entry.parts = {}
            entry.write = self._submit(True, entry, flat_bytes(stored)) if layout.nbytes else None
            self._entries[key] = entry
            return DiskTicket(entry.write, None)

    def reserve(self, key: str, layout: Layout) -> Path:
        """Make the file of a tensor without writing it; it reads as zeros.

        For mappings: room on the disk is there before the first store into a page, so that a full disk is an
        error here and not a signal later.

        Args:
            key: Any string that is not stored yet.
            layout: Of the tensor, at least one byte.

        Returns:
            The path of the file.

        Raises:
            StorageError: No room; nothing changed.
            StateError: Closed, or the parent's store.
            ArgumentError: The key is stored already.
        """
        _expect_key("reserve", key)
        with self._lock:
            self._expect_open("reserve")
            if key in self._entries:
                raise ArgumentError(message("DiskStore.reserve", "key", "one that is not stored yet", key))
            entry = self._reserve(key, None, math.ceil(layout.nbytes / _PAGE) * _PAGE)
            entry.layout = layout
            entry.write = None
            self._entries[key] = entry
            return self.folder / entry.name

    def read(self, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor; see `read_async`.

        Args:
            key: A stored key.
            out: CPU tensor of the stored shape and dtype that is written; any strides.

        Returns:
            `out`, or a new tensor with the stored shape, dtype and strides.

        Raises:
            KeyError: No such key.
            StorageError: The read failed, or the last write of this key did.
            ArgumentError: `out` has another shape.
            ArgumentTypeError: `out` has another dtype or is not on the CPU.
            StateError: Closed, or the parent's store.
        """
        result = self.read_async(key, out).wait()
        assert result is not None  # a read has a result
        return result

    def read_async(self, key: str, out: torch.Tensor | None = None) -> DiskTicket:
        """Start reading a tensor; a write of the same key under way is waited for first.

        Args:
            key: A stored key.
            out: CPU tensor of the stored shape and dtype that is written; any strides. Its values are there
                when the ticket has been waited for.

        Returns:
            The ticket; its `wait()` returns the tensor.

        Raises:
            KeyError: No such key.
            StorageError: The last write of this key failed.
            ArgumentError: `out` has another shape.
            ArgumentTypeError: `out` has another dtype or is not on the CPU.
            StateError: Closed, or the parent's store.
        """
        _expect_key("read", key)
        with self._lock:
            self._expect_open("read")
            entry = self._entries.get(key)
            if entry is None:
                raise KeyError(f"[DiskStore.read] no tensor was stored under {key!r}")
            layout = entry.layout
            if out is not None:
                _expect_out(out, layout)
            _await_writes(entry)
            if not layout.nbytes:
                return DiskTicket(None, layout.empty() if out is None else out)
            plain = None if out is None else out.detach()
            if plain is not None and layout.fits(plain):
                target, staged = plain, None
            else:
                memory, _, _ = self._host.empty(layout.nbytes, False, 0)
                target = layout.view(memory)
                staged = None if plain is None else target
            ticket = self._submit(False, entry, flat_bytes(target))
            _note_read(entry, ticket)
            return DiskTicket(ticket, target if out is None else out, staged)

    def read_part(self, key: str, offset: int, out: torch.Tensor) -> DiskTicket:
        """Start reading some bytes of a tensor, after writes of it under way.

        Args:
            key: A stored key.
            offset: First byte.
            out: uint8 tensor of as many bytes; they are there when the ticket has been waited for.

        Returns:
            The ticket.

        Raises:
            KeyError: No such key.
            StorageError: A write of this key failed.
            StateError: Closed, or the parent's store.
        """
        with self._lock:
            entry = self._part("read_part", key, offset, out)
            _await_writes(entry)
            ticket = self._submit(False, entry, out, offset)
            _note_read(entry, ticket)
            return DiskTicket(ticket, out)

    def write_part(self, key: str, offset: int, data: torch.Tensor) -> DiskTicket:
        """Start writing some bytes of a tensor in place, after reads of it under way; needs no room.

        Args:
            key: A stored key.
            offset: First byte, a multiple of 4096; the end must be one too, or that of the tensor.
            data: uint8 tensor, kept as it is until the ticket has been waited for.

        Returns:
            The ticket. If it fails, these bytes are undefined, and reads of the key raise, until a later
            write of the same key is done: the caller keeps `data` and tries again.

        Raises:
            KeyError: No such key.
            ArgumentError: Not on such a boundary.
            StateError: Closed, or the parent's store.
        """
        with self._lock:
            entry = self._part("write_part", key, offset, data)
            end = offset + data.numel()
            if offset % _PAGE or (end % _PAGE and end != entry.layout.nbytes):
                raise ArgumentError(
                    message(
                        "DiskStore.write_part", "offset", f"a range of whole {_PAGE} bytes", (offset, end)
                    )
                )
            _settle(entry, writes=False)
            ticket = self._submit(True, entry, data, offset)
            entry.parts = {place: part for place, part in entry.parts.items() if not _went_well(part)}
            entry.parts[offset, end] = ticket
            return DiskTicket(ticket, None)

    def read_span(self, span: FileSpan, out: torch.Tensor) -> DiskTicket:
        """Start reading a stretch of somebody else's file.

        Args:
            span: What to read.
            out: uint8 tensor of as many bytes; they are there when the ticket has been waited for.

        Returns:
            The ticket; it raises StorageError if the file was written since the span was made, or cannot be
            read.

        Raises:
            StateError: Closed, or the parent's store.
        """
        with self._lock:
            self._expect_open("read_span")
            native = self._native.submit(
                False,
                _AT_FDCWD,
                span.file.name,
                span.path,
                out,
                span.offset,
                self._tries_direct,  # its file system may be another one; the native half finds out
                span.file.identity,
            )
            return DiskTicket(native, out)

    def _part(self, call: str, key: str, offset: int, data: torch.Tensor) -> _Entry:
        self._expect_open(call)
        entry = self._entries.get(key)
        if entry is None:
            raise KeyError(f"[DiskStore.{call}] no tensor was stored under {key!r}")
        if offset < 0 or offset + data.numel() > entry.layout.nbytes:
            raise ArgumentError(
                message(
                    f"DiskStore.{call}",
                    "offset",
                    f"a part of {entry.layout.nbytes} bytes",
                    (offset, data.numel()),
                )
            )
        return entry

    def delete(self, key: str) -> None:
        """Remove a tensor and its file, after reads and writes of it under way.

        Args:
            key: A stored key.

        Raises:
            KeyError: No such key.
            StateError: Closed, or the parent's store.
        """
        _expect_key("delete", key)
        with self._lock:
            self._expect_open("delete")
            if key not in self._entries:
                raise KeyError(f"[DiskStore.delete] no tensor was stored under {key!r}")
            entry = self._entries[key]
            _settle(entry)
            self._folder.unlink(entry.name)  # first: interrupted here, it is deleted again
            del self._entries[key]
            self._used -= entry.reserved

    def close(self) -> None:
        """Drop what is not read or written yet, end the threads, remove the folder. May be called again."""
        with self._lock:
            if not self._folder.foreign:
                self._entries.clear()
                self._used = 0
            self._folder.remove()

    def __enter__(self) -> DiskStore:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def _expect_open(self, call: str) -> None:
        if self._folder.foreign:
            raise StateError(
                f"[DiskStore.{call}] the store belongs to process {self._folder.owner}, this is its forked "
                "child: make a new one here"
            )
        if self._folder.removed:
            raise StateError(f"[DiskStore.{call}] the store is closed")

    def _submit(self, write: bool, entry: _Entry, data: torch.Tensor, offset: int = 0) -> _C.Ticket:
        path = str(self._folder.path / entry.name)
        return self._native.submit(
            write, self._folder.descriptor, entry.name, path, data, offset, self.direct
        )

    def _reserve(self, key: str, entry: _Entry | None, reserved: int) -> _Entry:
        """Give the key a file of `reserved` bytes, or leave everything as it is and raise."""
        before = 0 if entry is None else entry.reserved
        wanted = reserved - before
        if self.budget_bytes is not None and self._used + wanted > self.budget_bytes:
            free = self.budget_bytes - self._used
            raise self._no_room(errno.EDQUOT, key, wanted, free, "the budget of the store is used up")
        if entry is None:
            self._made += 1
            entry = _Entry(f"{self._made:08d}.bin", Layout((), (), torch.uint8), 0)
            create = True
        else:
            create = False
        if create or wanted:
            path = str(self._folder.path / entry.name)
            try:
                _C.reserve(self._folder.descriptor, entry.name, path, reserved, before, create)
            except StorageError as error:
                free = disk_budget(self._folder.path)
                raise self._no_room(error.errno, key, wanted, free, str(error)) from error
        entry.reserved = reserved
        self._used += wanted
        return entry

    def _no_room(self, code: int | None, key: str, wanted: int, free: int, why: str) -> StorageError:
        return StorageError(
            code,
            f"[DiskStore.write] no room for {key!r} in {self._folder.path.parent}: {wanted} bytes wanted "
            f"({format_bytes(wanted)}), {free} bytes free ({format_bytes(free)}): {why}. "
            + (
                "Raise it (disk_budget=, --disk, TRAINSTREAM_DISK)"
                if code == errno.EDQUOT
                else "Free space, or name another directory"
            ),
            str(self._folder.path.parent),
        )


def _settle(entry: _Entry, *, writes: bool = True) -> None:
    """Wait until no thread touches the file; failures were or will be told by their tickets."""
    for ticket in (*entry.reads, *((*entry.parts.values(), entry.write) if writes else ())):
        while ticket is not None and not ticket.done():
            try:
                ticket.wait()
            except StorageError:
                break
    entry.reads = []


def _await_writes(entry: _Entry) -> None:
    """Wait for writes under way; raises what one that failed raises."""
    for ticket in (entry.write, *entry.parts.values()):
        if ticket is not None:
            ticket.wait()
    entry.parts = {}


def _went_well(ticket: _C.Ticket) -> bool:
    if not ticket.done():
        return False
    try:
        ticket.wait()
    except StorageError:
        return False
    return True


def _note_read(entry: _Entry, ticket: _C.Ticket) -> None:
    entry.reads = [read for read in entry.reads if not read.done()]
    entry.reads.append(ticket)


def _expect_key(call: str, key: object) -> None:
    if not isinstance(key, str):
        raise ArgumentTypeError(message(f"DiskStore.{call}", "key", "a string", key))


def _expect_out(out: object, layout: Layout) -> None:
    if not isinstance(out, torch.Tensor) or out.device.type != "cpu":
        given = f"one on {out.device}" if isinstance(out, torch.Tensor) else repr(out)
        raise ArgumentTypeError(message("DiskStore.read", "out", "a CPU tensor", given))
    if out.dtype != layout.dtype:
        raise ArgumentTypeError(message("DiskStore.read", "out", f"dtype {layout.dtype}", str(out.dtype)))
    if tuple(out.shape) != layout.shape:
        raise ArgumentError(message("DiskStore.read", "out", f"shape {layout.shape}", str(tuple(out.shape))))
