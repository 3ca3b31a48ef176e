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

__all__ = [
    "CannotRecord", "CudaRecorder", "Recorder", "Recording", "captures_by_itself", "recorder_for",
]  # fmt: skip

_Result = TypeVar("_Result")


class CannotRecord(Exception):
    """Some of the work cannot be recorded; says what."""


class Recording(Protocol):
    """Work that can be run again."""

    def replay(self) -> None:
        """Run it again, on the current stream of its device."""
        ...

    def keep(self, tensors: Sequence[Tensor], lasting: bool = False) -> None:
        """Name results that are read between its replay and the next one of any recording.

        Args:
            tensors: They.
            lasting: Whoever asks holds their memory, and they are read until its own next replay.
        """
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
    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self._graph, self.pool = graph, tuple(pool)

    def replay(self) -> None:
        self._graph.replay()

    def keep(self, tensors: Sequence[Tensor], lasting: bool = False) -> None:
        pass  # memory of the pool is written by replays only


#: Graphs whose recording failed. PyTorch's allocators may ask them again which stream they were recorded on.
_BROKEN: list[torch.cuda.CUDAGraph] = []
_MOST_BROKEN = 2  # recordings that may fail before no more are made


class CudaRecorder:
    """CUDA graphs of one device, whose memory is one pool.

    A graph is recorded on a stream of its own, where nothing else ever runs: what libraries hold for it (the
    workspace of matrix products) is memory of the pool then, and stays there, whoever else gives workspaces
    back. Threads that copy go on meanwhile: only the recording thread may not call what cannot be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        """Make streams and a pool."""
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._make_stream = make_stream
        self._stream = make_stream(device)  # to run once what is recorded
        self._alive: weakref.WeakSet[_CudaRecording] = weakref.WeakSet()
        self._broken = 0
        self._pools: set[Any] = set()  # all that there have been
        self._renew()

    def _renew(self) -> None:
        if self._pools and not self._pools_of_others():
            # Those of the streams before: nothing that is recorded uses one any more.
            torch._C._cuda_clearCublasWorkspaces()
        self._recording_stream = self._make_stream(self._device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._pools.add(tuple(self._pool))
        self._used = False

    def _pools_of_others(self) -> bool:
        """Whether there is memory of graphs that are not ours, or that still are."""
        found = {tuple(s.get("segment_pool_id", (0, 0))) for s in _segments()}
        return bool(found - self._pools - {(0, 0)}) or bool(len(self._alive))

    def warm_up(self, run: Callable[[], _Result]) -> _Result:
        """Run work on another stream than the current one, as it will be recorded."""
        with self._aside(self._stream):
            return run()

    @contextlib.contextmanager
    def _aside(self, stream: Any) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def record(self, run: Callable[[], _Result]) -> tuple[Recording, _Result]:
        """Record work as a graph.

        Raises:
            CannotRecord: A call in it cannot be part of a graph.
        """
        if self._broken >= _MOST_BROKEN:
            raise CannotRecord("recordings have failed, and no more are tried")
        torch.cuda.synchronize(self._device)
        if self._used and all(each.pool != tuple(self._pool) for each in self._alive):
            self._renew()  # the allocator takes no pool again once its last graph has gone
        torch.cuda.empty_cache()  # while something is recorded nothing that is cached makes room
        collects = gc.isenabled()
        gc.disable()  # what is collected meanwhile may call what the recording thread may not
        self._used = True
        graph = torch.cuda.CUDAGraph()
        try:
            with self._aside(self._recording_stream):
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
            raise CannotRecord((str(error).strip().splitlines() or ["it failed"])[0]) from error
        finally:
            if collects:
                gc.enable()
        recording = _CudaRecording(graph, self._pool)
        self._alive.add(recording)
        return recording, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that has failed.

        Where ending it fails too, PyTorch may not have told its allocators (2.11: neither of them; later: one
        or both), and which of them holds the pool for it is not to be known. So the pool is left to what is
        recorded in it already, and the next recording gets another one. The generators of random numbers take
        the recording to be under way until another one ends well.
        """
        try:
            graph.capture_end()
            return
        except RuntimeError:
            _BROKEN.append(graph)
            self._broken += 1
        calls: Any = torch._C
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):
            calls._cuda_endAllocateToPool(index, self._pool)
        with contextlib.suppress(RuntimeError):
            something = torch.zeros(1, device=self._device)
            good = torch.cuda.CUDAGraph()
            good.capture_begin(capture_error_mode="thread_local")
            something.zero_()
            good.capture_end()
        self._renew()

    def pool_bytes(self) -> int:
        """Return the bytes of the segments of all pools that recordings are in."""
        pools = {each.pool for each in self._alive}
        if not pools:
            return 0
        return sum(s["total_size"] for s in _segments() if tuple(s.get("segment_pool_id", ())) in pools)


def _segments() -> list[dict[str, Any]]:
    look: Any = torch.cuda.memory_snapshot
    found: list[dict[str, Any]] = look()
    return found


def recorder_for(device: torch.device) -> Recorder:
    """Make the recorder of a device."""
    if device.type == "cuda":
        return CudaRecorder(device)
    from .tape import TapeRecorder

    return TapeRecorder()


def captures_by_itself(device: torch.device) -> bool:
    """Whether ``capture="auto"`` may capture blocks on a device."""
    return device.type == "cuda"
