"""Reads the next tensors of a checkpoint while the one before is packed.

To RAM tensors are read where they stay, and the system is told early which ones come (`Hints`). To a device
threads read ahead, in order, into a small ring of host memory (`Conveyor`): tensors travel in pieces, so that
reading, copying and what is done on the device overlap, and the host never holds more than the ring. A piece
that is read is copied in the order of the current stream; the thread that reads into its memory next waits
first until that copy is through. All bookkeeping is the caller's thread's; the others know only their queue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import torch

from ts_core.errors import CheckpointError, StateError
from ts_core.memory import host_budget
from ts_paging import pinned_empty

from .checkpoint import Checkpoint
from .safetensors_reader import SafetensorsReader

__all__ = ["Conveyor", "Hints", "carries"]

# What the system reads into its cache while a tensor is packed; less where little RAM is free.
_AHEAD_BYTES = 256 << 20
# One read. Longer ones gain nothing, and the memory is better kept where the processor's cache still has it.
_PIECE_BYTES = 8 << 20
# The ring; less where no tensor is as large: it is what a load to a device takes of RAM.
_RING_BYTES = 128 << 20
_PATIENCE = 5.0  # seconds that an error waits for reads under way
_THREADS = 4
_PAGE = 4096


def carries(device: torch.device) -> bool:
    """Whether tensors go to a device by a conveyor: to RAM they are read where they stay."""
    return device.type == "cuda"


class Hints:
    """Has the system read tensors into its cache shortly before they are read.

    Args:
        checkpoint: The files.
        names: Tensors of the checkpoint, in the order in which they will be read.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Say nothing yet."""
        self._names = list(names)
        self._among = frozenset(self._names)
        self._checkpoint = checkpoint
        self._room = min(_AHEAD_BYTES, host_budget().available_bytes // 8)
        self._next = self._said = self._read = 0

    def reads(self, names: Iterable[str]) -> None:
        """Note that tensors are read now; others than those of the list do not count."""
        self._read += sum(self._checkpoint.info(name).nbytes for name in names if name in self._among)
        while self._next < len(self._names) and self._said < self._read + self._room:
            self._checkpoint.expect(self._names[self._next])
            self._said += self._checkpoint.info(self._names[self._next]).nbytes
            self._next += 1


class _Slot:
    """One piece of the ring's memory, and the last copy out of it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        if on_gpu:
            with torch.cuda.device(device):
                self.memory = pinned_empty(nbytes)
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        # Waiting for it leaves the processor to others.
        self.copied: Any = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]

    def leaves(self) -> None:
        """Note that the copies issued so far are out of this memory."""
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.device))

    def settle(self) -> None:
        """Wait until the memory may be written again."""
        if self.copied is not None:
            with torch.cuda.device(self.device):  # a thread's own is the first one, which may be another's
                self.copied.synchronize()


class _Piece:
    """A part of a tensor, to be read into a slot."""

    def __init__(self, slot: _Slot, reader: SafetensorsReader, name: str, offset: int, nbytes: int) -> None:
        self.slot, self.reader, self.name, self.offset = slot, reader, name, offset
        self.bytes = slot.memory[:nbytes]
        self.answer: SimpleQueue[BaseException | None] = SimpleQueue()

    def read(self) -> None:
        try:
            self.slot.settle()
            # The disk has all of it to do at once, not one stretch of the system's own reading ahead.
            self.reader.expect(self.name, self.offset, self.bytes.numel())
            self.reader.read_part(self.name, self.offset, self.bytes)
        except BaseException as error:
            self.answer.put(error)
        else:
            self.answer.put(None)


def _work(pieces: SimpleQueue[_Piece | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece.read()
        del piece  # its memory may go while this thread waits


class Conveyor:
    """Reads the tensors of a list ahead and hands them out on a device, in the order of the list.

    Use it as a context manager: leaving it ends the threads and lets go of the memory, whatever happened.

    Attributes:
        device: Where the tensors go.
        ring_bytes: Host memory that it takes at most.

    Args:
        checkpoint: The files.
        names: Tensors of the checkpoint, in the order in which they will be asked for; each with a dtype that
            torch has.
        device: Where they go; on the CPU the copy of a piece is a plain one.

    Raises:
        CheckpointError: No such tensor.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str], device: torch.device) -> None:
        """Begin to read."""
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._readers = {name: checkpoint._reader(name) for name in names}
        self._names = deque(self._readers)
        self._pieces = self._plan(list(self._readers.items()))
        sizes = [reader.info(name).nbytes for name, reader in self._readers.items()]
        whole = min(_RING_BYTES, max(sizes, default=0))
        self._piece_bytes = max(min(_PIECE_BYTES, whole // 2) // _PAGE * _PAGE, _PAGE)
        self._slots_left = max(min(whole, sum(sizes)) // self._piece_bytes, 2)
        self.ring_bytes = self._slots_left * self._piece_bytes
        self._free: deque[_Slot] = deque()
        self._reading: deque[_Piece] = deque()
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            if self._names:
                self._start_threads()
                self._send()
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: object) -> bool:
        """Whether a tensor is still to be handed out."""
        return name in self._readers

    def take(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor.

        Args:
            name: The first in the list that was not taken yet.
            dtype: Which it is to have; the device casts.

        Returns:
            A tensor of the stored shape on the device, complete for the current stream.

        Raises:
            CheckpointError: The file is shorter than when it was opened.
            StorageError: It cannot be read.
            StateError: It is not this tensor's turn.
        """
        if not self._names or self._names[0] != name:
            expected = self._names[0] if self._names else None
            raise StateError(f"[Conveyor.take] the next tensor is {expected!r}, not {name!r}")
        reader = self._readers.pop(self._names.popleft())
        info = reader.info(name)
        if info.dtype is None:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r} has dtype {info.stored_dtype}, which torch lacks"
            )
        made = torch.empty(info.shape, dtype=dtype, device=self.device)
        flat, done = made.view(-1), 0
        while done < flat.numel():
            values = self._next().view(info.dtype)
            part = flat[done : done + values.numel()]
            if self.device.type != "cpu" and info.dtype != dtype:
                values = values.to(self.device, non_blocking=True)
            part.copy_(values, non_blocking=True)
            done += part.numel()
            self._release()
        return made

    def close(self, timeout: float | None = None) -> None:
        """End the threads, wait for copies out of the ring, and let go of it; may be called again.

        Args:
            timeout: Seconds to wait for what is being read; None: as long as it takes. A thread that hangs on
                a dead disk is left behind: it ends when its read does, or with the program.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            with contextlib.suppress(Empty):
                while True:
                    self._queue.get_nowait()
        finally:
            for _ in self._threads:
                self._queue.put(None)
            self._end(until)

    def _end(self, until: float | None) -> None:
        """Wait for threads that have been told to end, and let go of all."""
        try:
            for thread in self._threads:
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))
        finally:
            self._threads.clear()
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # the device failed, and has told whoever used it
                    torch.cuda.current_stream(self.device).synchronize()
            self._pieces, self._slots_left = iter(()), 0
            for held in (self._free, self._reading, self._names, self._readers):
                held.clear()

    def __enter__(self) -> Conveyor:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; whoever raised does not wait long for a disk."""
        self.close(None if kind is None else _PATIENCE)

    def _start_threads(self) -> None:
        for number in range(min(_THREADS, self._slots_left)):
            # A daemon: one that hangs on a dead disk must not keep an interrupted program.
            thread = threading.Thread(
                target=_work, args=(self._queue,), name=f"ts-hf-read-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads allowed: those there are, or none, do it
                return
            self._threads.append(thread)

    def _plan(
        self, tensors: list[tuple[str, SafetensorsReader]]
    ) -> Iterator[tuple[SafetensorsReader, str, int, int]]:
        """Go through the pieces of all tensors, in order; a page is whole numbers of any dtype."""
        for name, reader in tensors:
            nbytes = reader.info(name).nbytes
            for offset in range(0, nbytes, self._piece_bytes):
                yield reader, name, offset, min(self._piece_bytes, nbytes - offset)

    def _send(self) -> None:
        """Have as much read ahead as there is room for."""
        while self._free or self._slots_left:
            place = next(self._pieces, None)
            if place is None:
                self._slots_left = 0
                return
            if not self._free:
                slot = _Slot(self._piece_bytes, self.device)
                self._slots_left -= 1
                self._free.append(slot)
            piece = _Piece(self._free.popleft(), *place)
            self._reading.append(piece)
            if self._threads:
                self._queue.put(piece)

    def _next(self) -> torch.Tensor:
        """Return the bytes of the next piece, once they are read."""
        piece = self._reading[0]
        if not self._threads:
            piece.read()
        error = piece.answer.get()
        if error is not None:
            raise error.with_traceback(None)  # its frames hold memory of the ring
        return piece.bytes

    def _release(self) -> None:
        """Give the memory of the first piece, which is on its way to the device, to the next read."""
        slot = self._reading.popleft().slot
        slot.leaves()
        self._free.append(slot)
        self._send()
