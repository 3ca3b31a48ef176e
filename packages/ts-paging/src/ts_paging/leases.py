"""Leases: copies in memory of tensors that live in files, for whoever computes with them.

A lease reads by direct I/O, hands out the copies and writes them back by direct I/O; the mapping of the file
sees the new bytes afterwards. Until a write is known to have gone well the copy is the truth: a write that
fails is tried again, and if the disk still refuses, the copy takes the place of the mapping's pages, so that
nobody who holds the tensor loses its value.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ts_core.errors import StorageError
from ts_core.memory import format_bytes

from . import _C
from .disk import DiskTicket
from .layout import flat_bytes, layout_of

if TYPE_CHECKING:
    from .files import FileTensors

__all__ = ["Lease", "LeaseMemory", "Piece"]

_PAGE = _C.direct_align


class LeaseMemory:
    """One buffer a lease, of `limit` bytes together, unless one lease alone needs more.

    Up to a third of the limit all are of one size, so that they can be used again, with huge pages.
    """

    def __init__(self, limit: int) -> None:
        """Hold none."""
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._changed = threading.Condition()
        self._spare: list[Tensor] = []
        self._host = _C.HostPool(0)

    @property
    def held(self) -> int:
        """Bytes of the leases under way, and of buffers that wait for the next one."""
        with self._changed:
            return self.used + sum(spare.numel() for spare in self._spare)

    def _size(self, nbytes: int) -> int:
        return max(nbytes, self.limit // 3 // _PAGE * _PAGE) if nbytes else 0

    def take(self, lease: Lease, wait: bool) -> bool:
        """Reserve room for a lease, noted in its `taken`; returns whether there is."""
        wanted = self._size(lease.nbytes)
        with self._changed:
            while self.used and self.used + wanted > self.limit:
                if not wait:
                    return False
                self._changed.wait()
            # No call in between, so no interrupt either.
            self.used += wanted
            lease.taken = wanted
            self.peak = max(self.peak, self.used)
            return True

    def buffer(self, nbytes: int) -> Tensor:
        """Return page-aligned memory of the `taken` bytes of a lease."""
        with self._changed:
            for index, spare in enumerate(self._spare):
                if spare.numel() == nbytes:
                    return self._spare.pop(index)
            if self.used + sum(spare.numel() for spare in self._spare) > self.limit:
                self._spare.clear()
        memory: Tensor = self._host.empty(nbytes, False, 0)[0]
        return memory

    def give_back(self, nbytes: int, buffer: Tensor | None) -> None:
        """End a reservation; with the last one all memory goes."""
        with self._changed:
            self.used -= nbytes
            if buffer is not None:
                self._spare.append(buffer)
            if not self.used:
                self._spare.clear()
            self._changed.notify_all()


def room_of(nbytes: int) -> int:
    """Whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


class Piece:
    """One tensor of a lease, or the part of one.

    Attributes:
        tensor: What is leased: a mapping, or any tensor that is used as it is.
        written: Whether the holder writes it.
        room: Bytes of the copy; 0 if there is none.
    """

    def __init__(
        self,
        tensor: Tensor,
        written: bool,
        files: FileTensors | None = None,
        key: str = "",
        offset: int = 0,
    ) -> None:
        """Nothing is read yet; without `files` nothing ever is."""
        self.tensor, self.written = tensor, written
        self.files, self.key, self.offset = files, key, offset
        self.room = 0 if files is None else room_of(tensor.nbytes)
        self.copy: Tensor = tensor
        self.reading: DiskTicket | None = None
        self.writing: DiskTicket | None = None
        self.filled = self.settled = False

    def start(self, buffer: Tensor) -> None:
        """Start reading into `room` bytes of memory."""
        self.copy = layout_of(self.tensor).view(buffer[: self.tensor.nbytes])
        self._read()

    def _read(self) -> None:
        assert self.files is not None
        self.reading = self.files.store.read_part(self.key, self.offset, flat_bytes(self.copy))

    def finish_reading(self) -> None:
        """Wait for the read; one that failed can be asked for again."""
        if self.files is None or self.filled:
            return
        if self.reading is None:
            self._read()
        assert self.reading is not None
        try:
            self.reading.wait()
        except StorageError:
            self.reading = None
            raise
        self.reading, self.filled = None, True

    def start_writing(self) -> None:
        """Start writing back."""
        if self.files is not None and self.written and self.writing is None and not self.settled:
            self.writing = self.files.store.write_part(self.key, self.offset, flat_bytes(self.copy))

    def finish_writing(self) -> StorageError | None:
        """Wait for the write; one that failed is tried again, then the copy takes the mapping's place."""
        if self.writing is None:
            return None
        try:
            self.writing.wait()
        except StorageError:
            assert self.files is not None
            self.writing = self.files.store.write_part(self.key, self.offset, flat_bytes(self.copy))
            try:
                self.writing.wait()
            except StorageError as error:
                self._keep_in_memory()
                self.writing, self.settled = None, True
                return error
        self.writing, self.settled = None, True
        return None

    def _keep_in_memory(self) -> None:
        assert self.files is not None
        mapped, copy = flat_bytes(self.tensor), flat_bytes(self.copy)
        if _C.move_to_memory(mapped, copy) != 0:
            mapped.copy_(copy)  # the page cache at least
        self.files.forsake(self.tensor)


class Lease:
    """Copies of tensors, from `FileTensors.lease`; a context manager that gives them.

    Leaving it after an exception writes nothing: the files hold what they held. Its calls may be interrupted
    anywhere, and made again.

    Attributes:
        nbytes: Of the copies, in whole pages.
        taken: Bytes that are reserved for it now.

    Example:
        >>> import torch
        >>> from ts_paging.files import FileTensors
        >>> files = FileTensors()
        >>> weight = files.place(torch.zeros(3))
        >>> with files.lease([weight]) as (copy,):
        ...     copy += 1
        >>> weight
        tensor([1., 1., 1.])
        >>> files.close()
    """

    def __init__(self, memory: LeaseMemory, pieces: Sequence[Piece]) -> None:
        """Nothing is read yet."""
        self._memory = memory
        self._pieces = pieces
        self._buffer: Tensor | None = None
        self.nbytes = sum(piece.room for piece in pieces)
        self.taken = 0

    def begin(self, wait: bool) -> bool:
        """Start reading, once there is room; returns whether there is."""
        if not self._memory.take(self, wait):
            return False
        try:
            if self.taken:
                self._buffer = self._memory.buffer(self.taken)
                begin = 0
                for piece in self._pieces:
                    if piece.room:
                        piece.start(self._buffer[begin : begin + piece.room])
                        begin += piece.room
        except BaseException:
            self.release()
            raise
        return True

    def tensors(self) -> list[Tensor]:
        """Wait for the reads and return the copies.

        Raises:
            StorageError: A file cannot be read; called again, it is read again.
        """
        for piece in self._pieces:
            piece.finish_reading()
        return [piece.copy for piece in self._pieces]

    def write_back(self) -> None:
        """Start writing back what is written; the copies must stay as they are from now on."""
        if not self.taken:
            return
        for piece in self._pieces:
            piece.start_writing()

    def close(self) -> None:
        """Wait until everything is written back, and give the memory back. May be called again.

        Raises:
            StorageError: Something could not be written. Its value is in memory now, in the place of the
                mapping: nothing is lost, and whoever holds the tensor sees it.
        """
        failed = [(piece, error) for piece in self._pieces if (error := piece.finish_writing()) is not None]
        self.release()
        if failed:
            nbytes = sum(piece.tensor.nbytes for piece, _ in failed)
            first = failed[0][1]
            raise StorageError(
                first.errno or errno.EIO,
                f"[FileTensors.lease] {format_bytes(nbytes)} could not be written back and are kept in "
                f"memory from now on, nothing is lost: {first}. Save a checkpoint to another disk, or make "
                "room and go on",
                str(first.filename),
            ) from first

    def release(self) -> None:
        """Give the memory back without writing."""
        taken, self.taken = self.taken, 0
        if not taken:
            return
        # A read or write that is under way still uses the buffer, and keeps it alive.
        idle = all(piece.reading is None and piece.writing is None for piece in self._pieces)
        buffer, self._buffer = self._buffer, None
        self._memory.give_back(taken, buffer if idle else None)

    def __enter__(self) -> list[Tensor]:
        """Return the copies."""
        try:
            return self.tensors()
        except BaseException:
            self.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Write back, unless something went wrong."""
        if kind is None:
            self.write_back()
            self.close()
        else:
            self.release()

    def __del__(self) -> None:
        """A lease that nobody ended leaves the files as they are."""
        self.release()
