"""Where the time of training steps goes: lanes of a Chrome trace, and figures of each step.

A step is a span `ts/step`, `bench/step` or `ProfilerStep#...` and lasts until the next one begins. In it

- compute: kernels and copies within the GPU; of a run without a GPU, the operators;
- h2d, d2h: copies to and from the GPU, with their bytes and GB/s while they ran;
- decode: the part of compute that unpacks weights; on the CPU, spans `ts/paging/decode`;
- optimizer: spans `ts/optim/...` of all threads (`ts_core.trace.SpanRecorder` puts those of host threads into
  the trace); where there are none, the phase `bench/optimizer`;
- fetch: where a thread that computes waits for weights (`ts/paging/wait`);
- forward, backward: from the first to the last kernel that was launched in that phase, so that they are what
  the GPU does, not what Python does ahead of it; without kernels, the phase itself.

Every moment of a step belongs to one of four: the GPU computes; else the link copies; else the host optimizer
works; else nothing of the three does, and the longest stretches of that are listed. Overlaps are exact: each
lane is a union of intervals in whole nanoseconds.
"""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "Interval",
    "Lanes",
    "analyze",
    "clip",
    "intersect",
    "lanes_of",
    "read",
    "step_figures",
    "subtract",
    "summary",
    "total",
    "union",
]

Interval = tuple[int, int]
OPTIMIZER = "ts/optim/"
STEPS = ("bench/step", "ts/step")
_DECODE = re.compile(r"decode|dequant", re.IGNORECASE)
GAPS = 8  # longest idle stretches that are listed
SHORT_NS = 20_000  # idle stretches below this are launches


# ---- intervals: sorted, apart from each other, [start, end) ----


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch; empty ones vanish."""
    found: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What two unions have in common."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What is in one union and not in another."""
    found, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                found.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def total(a: list[Interval]) -> int:
    """Length of a union."""
    return sum(end - start for start, end in a)


def clip(a: list[Interval], low: int, high: int) -> list[Interval]:
    """The part of a union within [low, high)."""
    return intersect(a, [(low, high)]) if low < high else []


# ---- from the trace to lanes ----


@dataclasses.dataclass
class Lanes:
    """What a trace holds, in nanoseconds since its first event.

    Attributes:
        steps: One window a step.
        phases: Name -> spans of the main thread.
        gpu_phases: Name -> per step, from the first to the last kernel launched in that phase.
        compute, h2d, d2h, decode, optimizer: Unions; decode is a part of compute.
        fetch: Where a thread that computes waits for weights.
        waits: Where the thread that steps waits for the GPU.
        copies: "h2d" and "d2h" -> (start, end, bytes) of each copy.
        gpu: Whether there are kernels.
    """

    steps: list[Interval]
    phases: dict[str, list[Interval]]
    gpu_phases: dict[str, list[Interval]]
    compute: list[Interval]
    h2d: list[Interval]
    d2h: list[Interval]
    decode: list[Interval]
    optimizer: list[Interval]
    fetch: list[Interval]
    waits: list[Interval]
    copies: dict[str, list[tuple[int, int, int]]]
    gpu: bool


def _direction(name: str) -> str:
    for text, direction in (("HtoD", "h2d"), ("DtoH", "d2h")):
        if text in name:
            return direction
    return "compute"  # within the device


def lanes_of(trace: dict[str, Any]) -> Lanes:
    """Sort the events of a trace into lanes."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    base = min((float(e["ts"]) for e in events), default=0.0)

    def span(event: dict[str, Any]) -> Interval:
        start = round((float(event["ts"]) - base) * 1000)
        return start, start + round(float(event["dur"]) * 1000)

    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(str(event.get("cat", "")).lower(), []).append(event)
    named = [e for cat in ("user_annotation", "cpu_op") for e in by_kind.get(cat, ())]
    steps = [e for e in named if e["name"] in STEPS]
    steps = steps or [e for e in named if str(e["name"]).startswith("ProfilerStep#")]
    main = {(e.get("pid"), e.get("tid")) for e in steps}
    phases: dict[str, list[Interval]] = {}
    for event in named:
        name = str(event["name"])
        if name.startswith("bench/") and name != "bench/step":
            phases.setdefault(name.removeprefix("bench/"), []).append(span(event))
    lanes: dict[str, list[Interval]] = {"compute": [], "h2d": [], "d2h": []}
    copies: dict[str, list[tuple[int, int, int]]] = {"h2d": [], "d2h": []}
    kernels = [*by_kind.get("kernel", ()), *by_kind.get("gpu_memset", ())]
    for event in by_kind.get("gpu_memcpy", ()):
        direction = _direction(str(event["name"]))
        lanes[direction].append(span(event))
        if direction in copies:
            copies[direction].append((*span(event), int(event.get("args", {}).get("bytes", 0))))
    lanes["compute"] += [span(event) for event in kernels]
    if not kernels:
        lanes["compute"] += [span(e) for e in by_kind.get("cpu_op", ()) if not e["name"].startswith("bench/")]
    runtime = [*by_kind.get("cuda_runtime", ()), *by_kind.get("cuda_driver", ())]
    waits = [span(e) for e in runtime if "Synchronize" in e["name"] and (e.get("pid"), e.get("tid")) in main]
    spans = by_kind.get("ts_span", named)
    ours = [e for e in spans if str(e["name"]).startswith(OPTIMIZER)]
    decoding = [e for e in kernels if _DECODE.search(str(e["name"]))]
    decoding = decoding or [e for e in spans if e["name"] == "ts/paging/decode"]
    windows = _windows(sorted(map(span, steps)), [span(e) for e in events])
    starts = {e.get("args", {}).get("correlation"): span(e)[0] for e in runtime}
    work = [(starts.get(e.get("args", {}).get("correlation")), span(e)) for e in kernels]
    return Lanes(
        steps=windows,
        phases={name: sorted(found) for name, found in phases.items()},
        gpu_phases=_gpu_phases(windows, phases, work),
        compute=union(lanes["compute"]),
        h2d=union(lanes["h2d"]),
        d2h=union(lanes["d2h"]),
        decode=union(map(span, decoding)),
        optimizer=union([span(e) for e in ours] or phases.get("optimizer", [])),
        fetch=union([span(e) for e in spans if e["name"] == "ts/paging/wait"]),
        waits=union(waits),
        copies={name: sorted(found) for name, found in copies.items()},
        gpu=bool(kernels),
    )


def _windows(steps: list[Interval], events: list[Interval]) -> list[Interval]:
    """Each step until the next one begins; the whole trace where no step is named."""
    if not steps:
        return [(min(s for s, _ in events), max(e for _, e in events))] if events else []
    ends = [start for start, _ in steps[1:]] + [steps[-1][1]]
    return [(start, end) for (start, _), end in zip(steps, ends, strict=True)]


def _gpu_phases(
    windows: list[Interval], phases: dict[str, list[Interval]], work: list[tuple[int | None, Interval]]
) -> dict[str, list[Interval]]:
    """From the first to the last kernel that each phase launched, step by step; else the phase itself."""
    known = sorted((launch, each) for launch, each in work if launch is not None)
    times = [launch for launch, _ in known]
    found: dict[str, list[Interval]] = {}
    for name, spans in phases.items():
        hulls = []
        for low, high in windows:
            for start, end in clip(union(spans), low, high):
                mine = known[bisect.bisect_left(times, start) : bisect.bisect_left(times, end)]
                kernels = [each for _, each in mine]
                if kernels:
                    hulls.append((min(s for s, _ in kernels), max(e for _, e in kernels)))
                elif not known:
                    hulls.append((start, end))
        found[name] = union(hulls)
    return found


# ---- from lanes to figures ----


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def step_figures(lanes: Lanes, low: int, high: int) -> dict[str, Any]:
    """The figures of one step; seconds, bytes and shares."""
    window = high - low
    compute, h2d, d2h, host = (
        clip(lane, low, high) for lane in (lanes.compute, lanes.h2d, lanes.d2h, lanes.optimizer)
    )
    link = union([*h2d, *d2h])
    copying, updating = subtract(link, compute), subtract(host, union([*compute, *link]))
    nothing = subtract([(low, high)], union([*compute, *link, *host]))
    forward, backward = (clip(lanes.gpu_phases.get(name, []), low, high) for name in ("forward", "backward"))
    elsewhere = subtract([(low, high)], union([*forward, *backward]))
    row: dict[str, Any] = {
        "step_s": window / 1e9,
        "compute_s": total(compute) / 1e9,
        "compute_idle_s": (window - total(compute)) / 1e9,
        "forward_s": total(forward) / 1e9,
        "backward_s": total(backward) / 1e9,
        "copy_s": total(link) / 1e9,
        "copy_both_ways_s": total(intersect(h2d, d2h)) / 1e9,
        "copy_under_compute": _share(total(intersect(link, compute)), total(link)),
        "decode_s": total(clip(lanes.decode, low, high)) / 1e9,
        "fetch_s": total(clip(lanes.fetch, low, high)) / 1e9,
        "optimizer_s": total(host) / 1e9,
        "optimizer_under_compute": _share(total(intersect(host, compute)), total(host)),
        "optimizer_under_forward": _share(total(intersect(host, forward)), total(host)),
        "optimizer_under_backward": _share(total(intersect(host, backward)), total(host)),
        "optimizer_under_neither": _share(total(intersect(host, elsewhere)), total(host)),
        "main_waits_s": total(clip(lanes.waits, low, high)) / 1e9,
        "only_copy_s": total(copying) / 1e9,
        "only_optimizer_s": total(updating) / 1e9,
        "nothing_s": total(nothing) / 1e9,
    }
    for name, lane in (("h2d", h2d), ("d2h", d2h)):
        sizes = sum(_within(copy, low, high) for copy in lanes.copies[name])
        row[f"{name}_s"] = total(lane) / 1e9
        row[f"{name}_gb"] = sizes / 1e9
        row[f"{name}_gb_per_s"] = sizes / total(lane) if lane else None
        row[f"{name}_under_compute"] = _share(total(intersect(lane, compute)), total(lane))
    row["gaps"] = _gaps(lanes, nothing, low)
    return row


def _within(copy: tuple[int, int, int], low: int, high: int) -> float:
    """Bytes of a copy that fall into a window, as if it ran evenly."""
    start, end, nbytes = copy
    if end <= start:
        return float(nbytes) if low <= start < high else 0.0
    return nbytes * max(min(end, high) - max(start, low), 0) / (end - start)


def _gaps(lanes: Lanes, nothing: list[Interval], low: int) -> list[dict[str, Any]]:
    """The longest stretches in which nothing works, and what Python was doing when they began."""
    longest = sorted((each for each in nothing if each[1] - each[0] >= SHORT_NS), key=lambda e: e[0] - e[1])
    found = []
    for start, end in sorted(longest[:GAPS]):
        inside = [
            (b - a, name)
            for name, spans in lanes.phases.items()
            for a, b in spans
            if a <= start < b and name != "first_step"
        ]
        found.append(
            {
                "at_s": round((start - low) / 1e9, 6),
                "seconds": round((end - start) / 1e9, 6),
                "phase": min(inside)[1] if inside else "between",
            }
        )
    return found


def analyze(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of each step of a trace, as plain data."""
    lanes = lanes_of(trace)
    return [step_figures(lanes, low, high) for low, high in lanes.steps]


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps; the gaps are those of the step whose time is the median."""
    if not steps:
        return {"steps": 0}
    found: dict[str, Any] = {"steps": len(steps)}
    for key in steps[0]:
        values = [step[key] for step in steps if step[key] is not None]
        if key != "gaps":
            found[key] = round(statistics.median(values), 6) if values else None
    middle = min(steps, key=lambda step: abs(step["step_s"] - found["step_s"]))
    return {**found, "gaps": middle["gaps"]}


def read(path: Path) -> dict[str, Any]:
    """Parse a trace, compressed or not.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no trace.
    """
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, strict=False)
    if isinstance(trace, list):  # the bare form of the format
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path} is no Chrome trace: it has no list traceEvents")
    return trace
