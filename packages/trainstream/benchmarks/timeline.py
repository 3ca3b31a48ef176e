"""Where the time of training steps goes: what a Chrome trace says about GPU, link and host optimizer.

    python timeline.py trace.json.gz                         # a table
    python timeline.py trace.json.gz --json --html steps.html

Takes a trace that `torch.profiler` exported, such as `compare.py --profile 3 --out-trace trace.json.gz`
writes. A step is a span `bench/step` (or `ProfilerStep#...`) and lasts until the next one begins. In it

- compute: kernels and copies within the GPU; of a run without a GPU, the operators;
- h2d, d2h: copies to and from the GPU, with their bytes and GB/s while they ran;
- optimizer: spans `ts/optim/...` of all threads (`ts_core.trace.SpanRecorder` puts those of host threads into
  the trace); where there are none, the phase `bench/optimizer`;
- forward, backward: from the first to the last kernel that was launched in that phase, so that they are what
  the GPU does, not what Python does ahead of it; without kernels, the phase itself.

Every moment of a step belongs to one of four: the GPU computes; else the link copies; else the host optimizer
works; else nothing of the three does, and the longest stretches of that are listed. Overlaps are exact: each
lane is a union of intervals in whole nanoseconds.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainstream._timeline import (
    Interval,
    Lanes,
    analyze,
    clip,
    intersect,
    lanes_of,
    read,
    step_figures,
    subtract,
    summary,
    total,
    union,
)

__all__ = [
    "Interval",
    "Lanes",
    "analyze",
    "clip",
    "draw",
    "intersect",
    "lanes_of",
    "subtract",
    "summary",
    "total",
    "union",
]

# ---- for people ----

ROWS = (
    ("step", "step_s", "s"),
    ("GPU computes", "compute_s", "s"),
    ("  forward / first to last kernel", "forward_s", "s"),
    ("  backward / first to last kernel", "backward_s", "s"),
    ("else the link copies", "only_copy_s", "s"),
    ("else the host optimizer works", "only_optimizer_s", "s"),
    ("else nothing", "nothing_s", "s"),
    ("copies", "copy_s", "s"),
    ("  under compute", "copy_under_compute", "share"),
    ("  both ways at once", "copy_both_ways_s", "s"),
    ("h2d", "h2d_s", "s"),
    ("  moved", "h2d_gb", "GB"),
    ("  rate while copying", "h2d_gb_per_s", "GB/s"),
    ("  under compute", "h2d_under_compute", "share"),
    ("d2h", "d2h_s", "s"),
    ("  moved", "d2h_gb", "GB"),
    ("  rate while copying", "d2h_gb_per_s", "GB/s"),
    ("  under compute", "d2h_under_compute", "share"),
    ("weights are unpacked", "decode_s", "s"),
    ("computing threads wait for weights", "fetch_s", "s"),
    ("host optimizer", "optimizer_s", "s"),
    ("  under compute", "optimizer_under_compute", "share"),
    ("  under forward", "optimizer_under_forward", "share"),
    ("  under backward", "optimizer_under_backward", "share"),
    ("  under neither", "optimizer_under_neither", "share"),
    ("main thread waits for the GPU", "main_waits_s", "s"),
)


def table(steps: list[dict[str, Any]]) -> str:
    """One column a step, and the median."""
    columns = [*steps, summary(steps)]
    heads = [f"step {index}" for index in range(len(steps))] + ["median"]
    lines = ["".ljust(36) + "".join(head.rjust(12) for head in heads)]
    for label, key, unit in ROWS:
        if all(column.get(key) is None for column in columns):
            continue
        cells = ["-" if c.get(key) is None else f"{c[key]:.4f}" for c in columns]
        lines.append(f"{label} ({unit})".ljust(36) + "".join(cell.rjust(12) for cell in cells))
    gaps = columns[-1].get("gaps") or []
    if gaps:
        lines.append("longest stretches in which nothing works, in the median step:")
        lines += [
            f"  {gap['seconds'] * 1e3:8.3f} ms at {gap['at_s'] * 1e3:9.3f} ms, {gap['phase']}" for gap in gaps
        ]
    return "\n".join(lines)


COLORS = {
    "python": "#8a8f98",
    "gpu": "#c9ced6",
    "compute": "#3d7a4f",
    "h2d": "#2b6cb0",
    "d2h": "#b7791f",
    "optimizer": "#9b2c5e",
    "nothing": "#d64545",
}
PHASE_COLORS = {"forward": "#6b8fb5", "backward": "#b58a6b", "optimizer": "#9b6b9b"}


def _bars(intervals: list[Interval], color: str, y: int, scale: float, low: int, label: str) -> Iterable[str]:
    """Rectangles of one lane; what is nearer than half a pixel is drawn as one."""
    near = 0.5 / scale
    joined: list[list[int]] = []
    for start, end in intervals:
        if joined and start - joined[-1][1] < near:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    for start, end in joined:
        told = html.escape(f"{label} {(end - start) / 1e6:.3f} ms at {(start - low) / 1e6:.3f} ms")
        yield (
            f'<rect x="{150 + (start - low) * scale:.2f}" y="{y}" '
            f'width="{max((end - start) * scale, 0.3):.2f}" height="18" fill="{color}">'
            f"<title>{told}</title></rect>"
        )


def draw(trace: dict[str, Any], *, width: int = 1800, title: str = "Timeline") -> str:
    """Return an HTML page with one drawing of all steps; it needs nothing else."""
    lanes = lanes_of(trace)
    if not lanes.steps:
        return "<!doctype html><p>no steps"
    low, high = lanes.steps[0][0], lanes.steps[-1][1]
    scale = (width - 170) / max(high - low, 1)
    busy = union([*lanes.compute, *lanes.h2d, *lanes.d2h, *lanes.optimizer])
    rows: list[tuple[str, list[tuple[str, str, list[Interval]]]]] = []
    for label, source in (("Python", lanes.phases), ("GPU phases", lanes.gpu_phases)):
        rows.append(
            (label, [(name, color, union(source.get(name, []))) for name, color in PHASE_COLORS.items()])
        )
    rows += [
        ("compute", [("compute", COLORS["compute"], lanes.compute)]),
        ("host to device", [("h2d", COLORS["h2d"], lanes.h2d)]),
        ("device to host", [("d2h", COLORS["d2h"], lanes.d2h)]),
        ("host optimizer", [("optimizer", COLORS["optimizer"], lanes.optimizer)]),
        ("nothing", [("nothing", COLORS["nothing"], subtract([(low, high)], busy))]),
    ]
    height = 40 + 26 * len(rows)
    body = []
    for index, (label, layers) in enumerate(rows):
        y = 24 + 26 * index
        body.append(f'<text x="4" y="{y + 14}">{html.escape(label)}</text>')
        for name, color, intervals in layers:
            body += _bars(clip(intervals, low, high), color, y, scale, low, name)
    for number, (start, _) in enumerate(lanes.steps):
        x = 150 + (start - low) * scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 14}" stroke="#444"/>')
        body.append(f'<text x="{x + 3:.1f}" y="14">step {number}, {(start - low) / 1e6:.1f} ms</text>')
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">{"".join(body)}</svg>'
    )
    text = html.escape(table([step_figures(lanes, *window) for window in lanes.steps]))
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<h3>{html.escape(title)}</h3>{drawing}<pre>{text}</pre>"
    )


def main() -> int:
    """Read the trace and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="*.json or *.json.gz")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the drawing")
    args = parser.parse_args()
    trace = read(args.trace)
    steps = analyze(trace)
    if not steps:
        print(f"{args.trace}: no events", file=sys.stderr)
        return 1
    print(json.dumps({"steps": steps, "median": summary(steps)}) if args.json else table(steps))
    if args.html:
        args.html.write_text(draw(trace, title=args.trace.name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
