"""Times contenders that take turns, and writes one JSON line for each: what the benchmarks here share."""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ts_fused import _C

REPLAYED = 20


@dataclass
class Case:
    """One shape and dtype, and who computes it."""

    name: str
    dtype: torch.dtype
    inputs: tuple[torch.Tensor, ...]
    moved_bytes: int  # the least the forward must read and write; 0: bound by something else
    backward_bytes: int  # the same of the backward alone
    contenders: dict[str, Callable[..., Any]]


def liger(device: str, module: str, name: str, *more: object) -> dict[str, Callable[..., Any]]:
    """Return Liger's autograd function, further arguments bound, where it is installed and there is a GPU."""
    if device != "cuda":
        return {}
    try:
        found = getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    except (ImportError, AttributeError):
        return {}
    return {"liger": lambda *inputs: found.apply(*inputs, *more)}


def graphed(call: Callable[[], object], times: int) -> Callable[[], object]:
    """Record calls in a CUDA graph, so that the launches' own time on the host does not count."""
    stream = torch.cuda.current_stream()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    return graph.replay


def seconds(call: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Times of single calls; on a GPU `call` is a replay of REPLAYED of them."""
    call()
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for event in events[:-1]:
            event.record()
            call()
        events[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / REPLAYED for a, b in itertools.pairwise(events)]
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def phases(case: Case, device: str) -> dict[tuple[str, str], tuple[Callable[[], object], int]]:
    """Every (contender, phase) with its call and the bytes it must move."""
    found: dict[tuple[str, str], tuple[Callable[[], object], int]] = {}
    for name, function in case.contenders.items():
        if name == "liger":
            try:
                function(*case.inputs)
            except Exception as error:  # of another version, with other arguments
                print(json.dumps({"name": name, "case": case.name, "error": repr(error)[:300]}), flush=True)
                continue
        found[name, "forward"] = (
            torch.no_grad()(functools.partial(function, *case.inputs)),
            case.moved_bytes,
        )
        trained = tuple(x for x in case.inputs if x.requires_grad)
        if not trained:
            continue
        outs = function(*case.inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = tuple(torch.randn_like(out) for out in outs)
        found[name, "backward"] = (
            functools.partial(
                torch.autograd.grad, outs, trained, grads, retain_graph=True, allow_unused=True
            ),
            case.backward_bytes,
        )
    for phase, moved in (("forward", case.moved_bytes), ("backward", case.backward_bytes)):
        if moved:
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            found["copy", phase] = (functools.partial(torch.empty_like(source).copy_, source), moved)
    return found


def main(benchmark: str, doc: str | None, cases: Callable[[str, bool], list[Case]]) -> None:
    """Run all cases and print JSON lines."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="one small shape, two rounds")
    parser.add_argument("--first", action="store_true", help="one shape")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds, repeats = (2, 3) if args.quick else (5, 10 if args.device == "cpu" else 50)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    if args.device == "cuda":
        # Backward runs on the stream of its forward, and only a stream of one's own can be recorded.
        torch.cuda.set_stream(torch.cuda.Stream())
    for case in cases(args.device, args.quick or args.first):
        calls = phases(case, args.device)
        if args.device == "cuda":
            calls = {key: (graphed(call, REPLAYED), moved) for key, (call, moved) in calls.items()}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key, (call, _moved) in calls.items():
                times[key] += seconds(call, args.device, repeats)
        for (name, phase), taken in times.items():
            moved = calls[name, phase][1]
            line = {
                "benchmark": benchmark,
                "case": case.name,
                "dtype": str(case.dtype).removeprefix("torch."),
                "name": name,
                "phase": phase,
                "us": round(min(taken) * 1e6, 1),
                "median_us": round(statistics.median(taken) * 1e6, 1),
                "gb_per_s": round(moved / statistics.median(taken) / 1e9, 1) if moved else None,
                "n": len(taken),
                "device": gpu or platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
                "isa": _C.isa(),
                "torch": torch.__version__,
            }
            print(json.dumps(line), flush=True)
