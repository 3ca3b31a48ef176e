"""From files to a device through a small ring of host memory: chunks are read and copied on, several at once.

A block on its way holds no more host memory than the ring, however large it is, and its copy to the device
ends with its last chunk's, not a block later.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ts_core import registry
from ts_core.registry import CopyTicket

from . import _C
from .disk import DiskTicket
from .layout import flat_bytes

__all__ = ["Arrival", "ReadRing", "Source"]

_BLOCK = _C.direct_align


class Source(Protocol):
    """Something on disk, read in parts that begin at whole blocks of its file.

    Attributes:
        lead: Bytes of the first block that come before it.
        room: Bytes of the file from that block on.
    """

    lead: int
    room: int

    def read(self, offset: int, out: Tensor) -> DiskTicket:
        """Start reading `out.numel()` bytes into a uint8 tensor, `offset` counted from the first block."""
        ...


class Arrival:
    """One tensor on its way."""

    def __init__(self, source: Source, target: Tensor) -> None:
        """Nothing is read yet; whoever runs the ring fills this in."""
        self.source, self.target = source, target
        self.ready: Any = None  # event after which the target may be written
        self.tickets: list[CopyTicket] = []
        self.error: BaseException | None = None
        self.issued = threading.Event()

    def wait_stream(self) -> None:
        """Let later work of the current stream start when all of it is there; waits until it is read.

        On the CPU this thread waits until it is there.

        Raises:
            StorageError: It could not be read.
        """
        self.issued.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)
        for ticket in self.tickets:
            ticket.wait_stream()
        if self.target.device.type == "cpu":
            for ticket in self.tickets:
                ticket.wait()


class _Chunk:
    """One buffer of the ring, and the part of an arrival that is read into it."""

    def __init__(self, buffer: Tensor, arrival: Arrival, begin: int, end: int) -> None:
        self.buffer, self.arrival = buffer, arrival
        self.target = arrival.target[begin:end]
        source, first = arrival.source, arrival.source.lead + begin
        self._skipped = first % _BLOCK
        start = first - self._skipped
        # Whole blocks go straight into the buffer, whatever the offset.
        size = min(-(-(self._skipped + end - begin) // _BLOCK) * _BLOCK, source.room - start)
        self.read = source.read(start, buffer[:size])
        self.last = end == arrival.target.numel()

    def content(self) -> Tensor:
        """Return the bytes that were asked for, once they are read."""
        return self.buffer[self._skipped : self._skipped + self.target.numel()]


class ReadRing:
    """Reads through `count` buffers of `chunk_bytes` from the registered host allocator.

    A thread runs while there is something to read, and ends with it.
    """

    def __init__(self, chunk_bytes: int = 4 << 20, count: int = 8) -> None:
        """Make nothing yet."""
        self.chunk_bytes = chunk_bytes
        self._count = count
        self._lock = threading.Lock()
        self._waiting: deque[Arrival] = deque()
        self._running = False
        self._free: list[Tensor] = []
        self._made = 0
        self._copying: deque[tuple[CopyTicket, Tensor]] = deque()
        self._streams: dict[torch.device, Any] = {}

    @property
    def nbytes(self) -> int:
        """Host memory that the ring holds now."""
        return self._made * self.chunk_bytes

    def bring(self, source: Source, target: Tensor) -> Arrival:
        """Start bringing something on disk into a device tensor.

        Args:
            source: What is read.
            target: Dense tensor of as many bytes; it is written after the work that the current stream holds
                now.

        Returns:
            What to wait for.
        """
        arrival = Arrival(source, flat_bytes(target) if target.numel() else target.view(-1))
        if not target.numel():
            arrival.issued.set()
            return arrival
        if target.is_cuda:
            arrival.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.ready.record(torch.cuda.current_stream(target.device))
        with self._lock:
            self._waiting.append(arrival)
            if self._running:
                return arrival
            self._running = True
        try:
            threading.Thread(target=self._run, name="ts-paging-read").start()
        except RuntimeError:  # no more threads allowed, or the interpreter is ending
            self._run()
        return arrival

    def close(self) -> None:
        """Let go of the memory, once nothing is under way."""
        with self._lock:
            if not self._running:
                while self._copying:
                    self._copying.popleft()[0].wait()
                self._free.clear()
                self._made = 0

    def _run(self) -> None:
        reading: deque[_Chunk] = deque()
        pieces = self._pieces()
        left = True
        while True:
            while left and len(reading) < self._count:
                try:
                    buffer = self._buffer(block=not reading)
                except Exception as error:  # no memory at all
                    piece = next(pieces, None)
                    left = piece is not None
                    if piece is not None:
                        self._fail(error, *piece)
                    continue
                if buffer is None:
                    break
                piece = next(pieces, None)
                if piece is None:
                    self._free.append(buffer)
                    left = False
                    break
                self._start(reading, buffer, *piece)
            if reading:
                self._forward(reading.popleft())
                continue
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
            pieces, left = self._pieces(), True

    def _pieces(self) -> Iterator[tuple[Arrival, int, int]]:
        """Go through the parts of what waits, in order."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                arrival = self._waiting.popleft()
            nbytes = arrival.target.numel()
            try:
                if arrival.ready is not None:
                    self._stream(arrival).wait_event(arrival.ready)
            except Exception as error:
                arrival.error = error
            begin = 0
            while begin < nbytes:
                # Later parts begin at blocks of the file.
                end = begin + self.chunk_bytes - (arrival.source.lead + begin) % self.chunk_bytes
                yield arrival, begin, min(end, nbytes)
                begin = end

    def _start(self, reading: deque[_Chunk], buffer: Tensor, arrival: Arrival, begin: int, end: int) -> None:
        try:
            if arrival.error is None:
                reading.append(_Chunk(buffer, arrival, begin, end))
                return
            error: BaseException = arrival.error
        except Exception as refused:
            error = refused
        self._free.append(buffer)
        self._fail(error, arrival, begin, end)

    def _fail(self, error: BaseException, arrival: Arrival, begin: int, end: int) -> None:
        """Let an arrival tell what became of one of its parts."""
        arrival.error = arrival.error or error
        if end == arrival.target.numel():
            arrival.issued.set()

    def _forward(self, chunk: _Chunk) -> None:
        """Wait for a chunk and copy it on."""
        arrival = chunk.arrival
        try:
            chunk.read.wait()
            if arrival.error is None:
                with self._current(arrival):
                    ticket = registry.copy_engine().h2d(chunk.target, chunk.content())
                arrival.tickets.append(ticket)
                self._copying.append((ticket, chunk.buffer))
            else:
                self._free.append(chunk.buffer)
        except Exception as error:
            arrival.error = arrival.error or error
            self._free.append(chunk.buffer)
        if chunk.last:
            arrival.issued.set()

    def _buffer(self, block: bool) -> Tensor | None:
        """Return a free buffer; without `block` only one that is free now or can be made.

        Raises:
            Exception: None can be made, and none will come back.
        """
        if self._free:
            return self._free.pop()
        if self._made < self._count:
            try:
                memory = registry.host_allocator().empty(self.chunk_bytes + _BLOCK)
            except Exception:
                if block and not self._copying:
                    raise
            else:
                self._made += 1
                first = -memory.data_ptr() % _BLOCK
                return memory[first : first + self.chunk_bytes]
        if not self._copying or not block:
            return None
        ticket, buffer = self._copying.popleft()
        with contextlib.suppress(Exception):  # told by the arrival
            ticket.wait()
        return buffer

    def _stream(self, arrival: Arrival) -> Any:
        device = arrival.target.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _current(self, arrival: Arrival) -> Any:
        """Make the ring's own stream the current one: copies must not wait for later work of the caller's."""
        if not arrival.target.is_cuda:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream(arrival))
