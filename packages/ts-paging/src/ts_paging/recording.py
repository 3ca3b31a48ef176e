"""Recording work once and running it again without its Python: CUDA graphs, and their stand-in on the CPU.

A recording repeats what was computed on the same addresses: it reads what is there now and writes its results
where they were. All recordings of a recorder use the same pool of memory: of what one computes there, nothing
lasts beyond its replay, but for tensors that were named to `keep`, and these until the next replay of any.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["CannotRecord", "CudaRecorder", "Recorder", "Recording", "recorder_for"]

_Result = TypeVar("_Result")


class CannotRecord(Exception):
    """Some of the work cannot be recorded; says what."""


class Recording(Protocol):
    """Work that can be run again."""

    def replay(self) -> None:
        """Run it again, on the current stream of its device."""
        ...

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Name results that are read between its replay and the next one of any recording."""
        ...


class Recorder(Protocol):
    """Makes recordings that share one pool of memory and never run at the same time."""

    def warm_up(self, run: Callable[[], _Result]) -> _Result:
        """Run work as it will be recorded, so that libraries set up what they need."""
        ...

    def record(self, run: Callable[[], _Result]) -> tuple[Recording, _Result]:
        """Record work.

        Raises:
            CannotRecord: It has something in it that cannot be repeated.
        """
        ...

    def pool_bytes(self) -> int:
        """Return the bytes that recordings hold for what they compute in between, now."""
        ...


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def keep(self, tensors: Sequence[Tensor]) -> None:
        pass  # memory of the pool is written by replays only


class CudaRecorder:
    """CUDA graphs of one device, whose memory is one pool.

    A graph is recorded on a stream of its own. Threads that copy go on meanwhile: only the recording thread
    may not call what cannot be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream and a pool."""
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[_CudaRecording] = weakref.WeakSet()

    def warm_up(self, run: Callable[[], _Result]) -> _Result:
        """Run work on the stream that it will be recorded on."""
        with self._aside():
            return run()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], _Result]) -> tuple[Recording, _Result]:
        """Record work as a graph.

        Raises:
            CannotRecord: A call in it cannot be part of a graph.
        """
        torch.cuda.synchronize(self._device)
        if not self._alive:  # the allocator takes no pool again once its last graph has gone
            self._pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        gc.disable()  # what is collected meanwhile may call what the recording thread may not
        graph = torch.cuda.CUDAGraph()
        try:
            with self._aside():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                    graph.capture_end()
                except BaseException:
                    self._give_up(graph)
                    raise
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(str(error).strip().splitlines()[0]) from error
        finally:
            if collects:
                gc.enable()
        recording = _CudaRecording(graph)
        self._alive.add(recording)
        return recording, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that has failed.

        Ending it fails too, before PyTorch's allocator hears of it: as long as that waits for the end, memory
        that several streams have used does not come back, nor does the pool. And the generators of random
        numbers take it to be under way until one ends well.
        """
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        calls: Any = torch._C
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):
            calls._cuda_endAllocateToPool(index, self._pool)
            calls._cuda_releasePool(index, self._pool)
        with contextlib.suppress(RuntimeError):
            something = torch.zeros(1, device=self._device)
            good = torch.cuda.CUDAGraph()
            good.capture_begin(capture_error_mode="thread_local")
            something.zero_()
            good.capture_end()

    def pool_bytes(self) -> int:
        """Return the bytes of the pool's segments."""
        look: Any = torch.cuda.memory_snapshot
        segments: list[dict[str, Any]] = look()
        pool = tuple(self._pool)
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == pool)


def recorder_for(device: torch.device) -> Recorder:
    """Make the recorder of a device."""
    if device.type == "cuda":
        return CudaRecorder(device)
    from .tape import TapeRecorder

    return TapeRecorder()
