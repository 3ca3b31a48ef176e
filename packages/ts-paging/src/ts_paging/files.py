"""Tensors that live in files: the disk tier of weights, gradients and optimizer state.

Such a tensor is a mapping of a file, a private one or a stretch of a checkpoint of the user's: it can be read
and written like any other, and its pages are the kernel's to drop, so it costs no memory that is counted
against a budget. What is done over and over does not go through the mapping: slots are filled by direct
reads (`FileTensors.read_async`), gradients leave by direct writes (`FileTensors.write_async`), and who
updates such tensors leases copies of them in memory (`FileTensors.lease`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ts_core.errors import ArgumentError, StorageError, message
from ts_core.memory import parse_bytes

from . import _C
from .disk import DiskStore, DiskTicket
from .layout import Layout, copy_exactly, flat_bytes, is_dense, layout_of
from .leases import Lease, LeaseMemory, Piece
from .ring import Arrival, ReadRing
from .spans import FileSpan

__all__ = ["FileSpan", "FileTensors", "locate"]

#: Number of a mapping -> (its FileTensors, key). Numbers are never used again, addresses are.
_mapped: dict[int, tuple[weakref.ref[FileTensors], str]] = {}
_WRITING_BYTES = 4 << 20


def locate(tensor: Tensor) -> tuple[FileTensors, str] | None:
    """Say which file a whole tensor maps.

    Args:
        tensor: Any plain tensor.

    Returns:
        The `FileTensors` that made it and its key there, or None if it lives elsewhere: it is no mapping, or
        one of an adopted file that was written since, whose true value is in memory.
    """
    found = _find(tensor)
    if found is None or found[2]:
        return None
    files, key, _ = found
    return (files, key) if files.nbytes_of(key) == tensor.nbytes and files.holds(key, tensor) else None


def _find(tensor: Tensor) -> tuple[FileTensors, str, int] | None:
    """Return the files, key and first byte of a tensor that lies in a mapping."""
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    number, offset = _C.find_mapping(tensor.data_ptr())
    found = _mapped.get(number) if number else None
    files = found[0]() if found is not None else None
    return (files, found[1], offset) if files is not None and found is not None else None


class _Source:
    """A key's bytes, for the ring."""

    def __init__(self, store: DiskStore, key: str, span: FileSpan | None) -> None:
        self._store, self._key, self._span = store, key, span
        self.lead = 0 if span is None else span.offset % _C.direct_align
        self.room = (
            store.nbytes_of(key) if span is None else span.file.identity.nbytes - span.offset + self.lead
        )

    def read(self, offset: int, out: Tensor) -> DiskTicket:
        if self._span is None:
            return self._store.read_part(self._key, offset, out)
        span = self._span
        return self._store.read_span(FileSpan(span.file, span.offset - self.lead + offset, out.numel()), out)


class FileTensors:
    """Makes tensors that are mapped files of a `DiskStore`, or stretches of other files.

    Attributes:
        adopted_bytes: Bytes of other files that are used where they are.
        gives_zeros: What `empty` returns is zeros, without a write.

    Example:
        >>> files = FileTensors()
        >>> weight = files.place(torch.arange(4.0))
        >>> weight
        tensor([0., 1., 2., 3.])
        >>> files.close()
    """

    gives_zeros = True

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        budget: int | str | None = None,
        lease_bytes: int | str = 12 << 20,
    ) -> None:
        """Make the private folder; see `DiskStore`.

        Args:
            directory: An existing directory; None is the system's temporary one.
            budget: Bytes of files at most.
            lease_bytes: Of memory for the copies of all leases at once.

        Raises:
            OptionError: A bad option.
            StorageError: The directory is missing or cannot be written.
        """
        self._store = DiskStore(directory, budget=budget)
        self._keys: dict[int, str] = {}
        self._spans: dict[str, FileSpan] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the writes under way
        self._table_lock = threading.RLock()
        self._writing: deque[tuple[DiskTicket, int]] = deque()
        self._leased = LeaseMemory(parse_bytes(lease_bytes, name="lease_bytes"))
        self._ring = ReadRing()
        self.adopted_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes reserved in files."""
        return self._store.used_bytes

    @property
    def lease_bytes(self) -> int:
        """Bytes of memory for the copies of all leases at once."""
        return self._leased.limit

    @lease_bytes.setter
    def lease_bytes(self, nbytes: int) -> None:
        self._leased.limit = nbytes

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that the copies of leases have now."""
        return self._leased.held

    @property
    def store(self) -> DiskStore:
        """The files themselves."""
        return self._store

    @property
    def directory(self) -> str:
        """The private folder."""
        return str(self._store.folder)

    def place(self, tensor: Tensor) -> Tensor:
        """Write a dense CPU tensor to a file and return the mapping of it.

        Args:
            tensor: Any dtype; strides are kept.

        Returns:
            A tensor with the same dtype, shape, strides and bytes.

        Raises:
            ArgumentError: Not dense.
            StorageError: No room on the disk or in the budget, or the write failed.
        """
        if not is_dense(tensor):
            raise ArgumentError(message("FileTensors.place", "tensor", "a dense tensor", "one with gaps"))
        mapped = self.like(tensor)
        if tensor.numel():
            copy_exactly(mapped, tensor)
        return mapped

    def like(self, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return a tensor of zeros in a file, with the dtype, shape and strides of a dense one.

        Args:
            tensor: The dense one; its values are not read.
            owner: Whose gradient it will hold; all are treated alike.

        Raises:
            StorageError: No room on the disk or in the budget.
        """
        layout = layout_of(tensor)
        if not layout.nbytes:
            return layout.empty()
        return layout.view(self.empty(layout.nbytes))

    def empty(self, nbytes: int) -> Tensor:
        """Return `nbytes` of a file as a uint8 tensor, zeros at first.

        Files of tensors that nobody holds any more are removed first.

        Raises:
            StorageError: No room on the disk or in the budget.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        self._sweep()
        key = str(next(self._numbers))
        path = self._store.reserve(key, Layout((nbytes,), (1,), torch.uint8))
        try:
            mapped = _C.map_own_file(self._store.descriptor, path.name, str(path), nbytes)
        except BaseException:
            self._store.delete(key)
            raise
        self._remember(mapped, key)
        return mapped

    def adopt(
        self, path: str | os.PathLike[str], offset: int, dtype: torch.dtype, shape: Sequence[int]
    ) -> Tensor:
        """Return a stretch of a file that is not ours as a tensor, without copying it.

        The file is never written: what is written to the tensor goes to copies of its pages in memory, and
        from then on the tensor is an ordinary one (`locate` says None). Move what is trained into a file of
        its own with `own`. The file must stay as it is while the tensor is used, which direct reads check by
        its size and time of change; it may be removed, or another one may take its name.

        Args:
            path: The file, or a link to it.
            offset: First byte, a multiple of the dtype's size.
            dtype: Of the tensor.
            shape: Of the tensor; its rows are contiguous.

        Returns:
            The tensor.

        Raises:
            ArgumentError: An offset that does not fit the dtype.
            StorageError: The file is missing or shorter.
        """
        layout = layout_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        if offset % dtype.itemsize:
            raise ArgumentError(
                message(
                    "FileTensors.adopt", "offset", f"a multiple of {dtype.itemsize}", offset, "Copy it: place"
                )
            )
        if not layout.nbytes:
            return layout.empty()
        span = FileSpan.of(path, offset, layout.nbytes)
        self._sweep()
        mapped = _C.map_file(span.path, offset, layout.nbytes, span.file.identity)
        key = f"adopted.{next(self._numbers)}"
        with self._table_lock:
            self._spans[key] = span
            self.adopted_bytes += span.nbytes
            self._remember(mapped, key)
        return layout.view(mapped)

    def span_of(self, tensor: Tensor) -> FileSpan | None:
        """Return the stretch of somebody else's file that a tensor is, written since or not, or None."""
        found = _find(tensor)
        return None if found is None or found[2] else found[0]._spans.get(found[1])

    def own(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one of a private file: itself unless it is adopted or lives in memory.

        Args:
            tensor: A dense CPU tensor.

        Raises:
            StorageError: No room on the disk or in the budget.
        """
        return tensor if locate(tensor) is not None and self.span_of(tensor) is None else self.place(tensor)

    def drop(self, tensor: Tensor) -> None:
        """Remove the file of a tensor that is needed no more; what still maps it stays readable."""
        number = _C.find_mapping(tensor.data_ptr())[0] if tensor.numel() else 0
        with self._table_lock:
            if number in self._keys:
                self._forget(number)

    def key_of(self, tensor: Tensor) -> str | None:
        """Return the key of the file that a whole tensor maps, or None if it lives elsewhere."""
        found = locate(tensor)
        return found[1] if found is not None and found[0] is self else None

    def nbytes_of(self, key: str) -> int:
        """Return the bytes of a key's tensor."""
        span = self._spans.get(key)
        return span.nbytes if span is not None else self._store.nbytes_of(key)

    def holds(self, key: str, tensor: Tensor) -> bool:
        """Whether a key's file holds what the tensor mapping it does: the adopted ones must be unwritten."""
        return key not in self._spans or not _C.was_written(flat_bytes(tensor))

    def read_async(self, key: str, out: Tensor) -> DiskTicket:
        """Start reading a file into a dense CPU tensor of as many bytes, past the mapping.

        Args:
            key: From `key_of`.
            out: Written; its values are there when the ticket has been waited for.

        Returns:
            The ticket.

        Raises:
            StorageError: Raised by the ticket if the file cannot be read, or was written by somebody else.
        """
        span = self._spans.get(key)
        if span is not None:
            return self._store.read_span(span, flat_bytes(out))
        return self._store.read_async(key, flat_bytes(out))

    def bring(self, key: str, target: Tensor) -> Arrival:
        """Start bringing a file to a device, through a ring of 32 MiB of host memory at most.

        Args:
            key: From `key_of`.
            target: Dense tensor of as many bytes, on a device; it is written after the work that the current
                stream holds now.

        Returns:
            What to wait for; raises StorageError then if the file cannot be read.
        """
        return self._ring.bring(_Source(self._store, key, self._spans.get(key)), target)

    def write_async(self, target: Tensor, value: Tensor) -> DiskTicket:
        """Start giving a tensor of a file a new value, past the mapping; waits while much is under way.

        Args:
            target: A tensor of this object.
            value: A CPU tensor of the same shape and dtype; it must stay as it is until the ticket has been
                waited for.

        Returns:
            The ticket; when it has been waited for, the file and its mapping hold the value.

        Raises:
            StorageError: Raised by the ticket; the target's value is undefined then.
        """
        found = locate(target)
        layout = layout_of(target)
        if found is None or found[0]._spans.get(found[1]) is not None:
            copy_exactly(target, value)
            return DiskTicket(None, None)
        if not (is_dense(value) and layout.fits(value)):
            value = copy_exactly(layout.empty(), value)
        with self._lock:
            while self._writing and (
                self._writing[0][0].done()
                or sum(nbytes for _, nbytes in self._writing) + target.nbytes > _WRITING_BYTES
            ):
                with contextlib.suppress(StorageError):  # told by the ticket to its holder
                    self._writing[0][0].wait()
                self._writing.popleft()
            ticket = found[0]._store.write_part(found[1], 0, flat_bytes(value))
            self._writing.append((ticket, target.nbytes))
        return ticket

    def lease(
        self, tensors: Sequence[Tensor], written: Iterable[bool] | None = None, *, wait: bool = True
    ) -> Lease | None:
        """Take copies in memory of tensors, or parts of them, that live in files; reading starts at once.

        Tensors that live elsewhere, and parts that do not begin and end at multiples of 4096 bytes, are
        leased as they are. Copies of all leases take `lease_bytes` at most, unless one alone takes more.

        Args:
            tensors: Dense CPU tensors.
            written: Which of them the holder writes; None: all.
            wait: Wait for other leases to end if memory is short; else None is returned then.

        Returns:
            The lease: a context manager that gives the copies and, if all goes well, writes them back.

        Raises:
            StorageError: A write of one of the files failed before.
        """
        flags = [True] * len(tensors) if written is None else list(written)
        pieces = [self._piece(tensor, flag) for tensor, flag in zip(tensors, flags, strict=True)]
        lease = Lease(self._leased, pieces)
        return lease if lease.begin(wait) else None

    def _piece(self, tensor: Tensor, written: bool) -> Piece:
        found = _find(tensor) if is_dense(tensor) else None
        if found is None:
            return Piece(tensor, written)
        files, key, offset = found
        end, page = offset + tensor.nbytes, _C.direct_align
        fits = offset % page == 0 and (end % page == 0 or end == files.nbytes_of(key))
        if key in files._spans or not fits:
            return Piece(tensor, written)
        return Piece(tensor, written, files, key, offset)

    def forsake(self, tensor: Tensor) -> None:
        """Take the mapping for the truth from now on: the file could not be written."""
        number = _C.find_mapping(tensor.data_ptr())[0]
        _mapped.pop(number, None)

    def _remember(self, mapped: Tensor, key: str) -> None:
        number = _C.find_mapping(mapped.data_ptr())[0]
        with self._table_lock:
            self._keys[number] = key
            _mapped[number] = (weakref.ref(self), key)

    def _forget(self, number: int) -> None:
        key = self._keys.pop(number)
        _mapped.pop(number, None)
        span = self._spans.pop(key, None)
        if span is not None:
            self.adopted_bytes -= span.nbytes
        else:
            self._store.delete(key)

    def _sweep(self) -> None:
        with self._table_lock:
            for number in [number for number in self._keys if not _C.is_mapped(number)]:
                self._forget(number)

    def __deepcopy__(self, memo: dict[int, object]) -> FileTensors:
        """A copy of a model holds copies in RAM of the tensors, and needs no files of its own."""
        return self

    def close(self) -> None:
        """Remove the files; mappings that are still held stay readable."""
        with self._table_lock:
            for number in self._keys:
                _mapped.pop(number, None)
            self._keys.clear()
            self._spans.clear()
            self.adopted_bytes = 0
        self._store.close()
        self._ring.close()
