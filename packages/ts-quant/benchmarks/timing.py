"""How the benchmarks here time: contenders in turns, on a GPU without the host's share.

On a GPU calls are recorded in a CUDA graph, so that launches cost next to nothing, and go round several sets
of buffers, so that no cache holds what they read. A call by itself, which is what eager code pays, is timed
too.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

COLD_BYTES = 220e6
"""What a round of the buffers reads and writes at least: several times an L2 cache."""

AT_LEAST = 12
"""Calls in a graph."""


@dataclass
class Contender:
    """One way to do the work.

    Attributes:
        calls: The same call over each set of buffers.
        moved: Bytes that it has to read and write.
        records: Whether it can be recorded in a CUDA graph; else calls are queued one after the other.
        turns: Rounds, where fewer will do.
    """

    calls: Sequence[Callable[[], object]]
    moved: int = 0
    records: bool = True
    turns: int | None = None


@dataclass
class Taken:
    """Seconds of one call, a number for each round.

    Attributes:
        timed: "graph", "queued" (one after the other) or "call" (by itself: a CPU).
        seconds: On a GPU, time on the device; of queued calls also what the device waits for the host.
        alone: On a GPU: time of a call by itself, from an idle device to an idle device.
    """

    timed: str
    seconds: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def median(self) -> float:
        """Middle of the rounds."""
        return statistics.median(self.seconds)

    def columns(self) -> dict[str, object]:
        """What a line of results says of it."""
        found: dict[str, object] = {
            "timed": self.timed,
            "median_ms": round(1e3 * self.median(), 4),
            "best_ms": round(1e3 * min(self.seconds), 4),
            "spread_ms": round(1e3 * (max(self.seconds) - min(self.seconds)), 4),
            "rounds": len(self.seconds),
        }
        if self.alone:
            found["call_us"] = round(1e6 * statistics.median(self.alone), 1)
        return found


def sets(moved: int, device: str | torch.device) -> int:
    """How many sets of buffers a call that moves so many bytes goes round."""
    if torch.device(device).type == "cpu":
        return 1
    return max(2, min(128, int(-(-COLD_BYTES // max(moved, 1)))))


def own_stream(device: str | torch.device) -> None:
    """Make a stream of one's own current: only such a one can be recorded, backward passes included."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def measure(
    contenders: dict[str, Contender],
    device: str | torch.device,
    rounds: int,
    at_least: int = AT_LEAST,
) -> dict[str, Taken]:
    """Time all contenders in turns, after one round that warms up.

    Args:
        contenders: Who does the work; on a GPU each warms up on the stream that is current.
        device: Where.
        rounds: Times that each has its turn.
        at_least: Calls of a turn on a GPU.

    Returns:
        What each took.
    """
    if torch.device(device).type == "cpu":
        return _on_cpu(contenders, rounds)
    torch.cuda.empty_cache()  # what earlier graphs held
    repeats = {name: _repeat(contender, at_least) for name, contender in contenders.items()}
    taken = {name: Taken(timed) for name, (_run, _count, timed) in repeats.items()}
    for turn in range(rounds + 1):
        for name, (run, count, _timed) in repeats.items():
            contender = contenders[name]
            if turn > (contender.turns or rounds):
                continue
            spent = _queued(run) / count
            alone = _alone(contender.calls[turn % len(contender.calls)])
            if turn:
                taken[name].seconds.append(spent)
                taken[name].alone.append(alone)
    return taken


def _on_cpu(contenders: dict[str, Contender], rounds: int) -> dict[str, Taken]:
    taken = {name: Taken("call") for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            if turn > (contender.turns or rounds):
                continue
            begin = time.perf_counter()
            contender.calls[turn % len(contender.calls)]()
            spent = time.perf_counter() - begin
            if turn:
                taken[name].seconds.append(spent)
    return taken


def _repeat(contender: Contender, at_least: int) -> tuple[Callable[[], object], int, str]:
    """What runs all sets of buffers at least once, how many calls those are, and how they are made."""
    sets_of = len(contender.calls)
    count = -(-at_least // sets_of) * sets_of if contender.records else max(4, min(sets_of, at_least))
    each = list(itertools.islice(itertools.cycle(contender.calls), count))

    def queue() -> None:
        for call in each:
            call()

    if not contender.records:
        return queue, count, "queued"
    for call in contender.calls[:2]:  # warms up what a capture must not do
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()  # not torch.cuda.graph, which gives all unused memory back first
    try:
        queue()
    except RuntimeError:  # it waits for the device, or copies from memory that is not page-locked
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        torch.cuda.synchronize()
        return queue, count, "queued"
    graph.capture_end()
    return graph.replay, count, "graph"


def _queued(run: Callable[[], object]) -> float:
    """Seconds of a run behind another one, so that the device need not wait for the host to begin it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _alone(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
