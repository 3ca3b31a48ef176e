"""The report as one HTML page that needs nothing else: no network, no files, no library."""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import Any

from trainstream._charts import Lane, Series, chart, lanes
from trainstream._runs import Run, number, numbers
from trainstream._timeline import lanes_of, subtract, union
from ts_core.memory import format_bytes

__all__ = ["page", "seconds_text", "share_text"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_COLUMNS = ("name", "kind", "tier", "codec", "policy", "optimizer", "settled", "bytes", "parameters")
_COUNTS = ("trainable", "runs", "fills")
_BYTES = frozenset({"bytes"})


def seconds_text(value: float | None) -> str:
    """Write seconds for people.

    Example:
        >>> seconds_text(0.0123)
        '12.3 ms'
    """
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1.0:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 120.0 else f"{value / 60.0:.1f} min"


def share_text(value: float | None) -> str:
    """Write a share for people.

    Example:
        >>> share_text(0.5)
        '50 %'
    """
    return "-" if value is None else f"{value * 100.0:.0f} %"


def bytes_text(value: float | None) -> str:
    """Write bytes for people, 0 without a unit."""
    return "-" if value is None else format_bytes(int(value)) if value else "0"


def _e(value: Any) -> str:
    return html.escape(str(value))


def page(
    summary: dict[str, Any], run: Run | None, trace: dict[str, Any] | None, *, title: str = "Run"
) -> str:
    """Write the page.

    Args:
        summary: What `trainstream._runs.summarize` returned.
        run: The run, or None if there is only a trace.
        trace: A Chrome trace of some steps, or None.
        title: Of the page.

    Returns:
        The HTML text.
    """
    parts = [_head(title, summary)]
    if run is not None:
        parts += [_tiles(summary), _limits(summary), _memory(run), _steps(run)]
    parts.append(_timeline(trace))
    if run is not None:
        parts += [_predicted(summary), _blocks(summary), _events(run)]
    files = importlib.resources.files("trainstream") / "assets"
    style = (files / "report.css").read_text(encoding="utf-8")
    script = (files / "report.js").read_text(encoding="utf-8")
    data = json.dumps(summary, allow_nan=False, default=str).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{_e(title)}</title><style>{style}</style></head><body>{''.join(parts)}"
        f'<script type="application/json" id=summary>{data}</script><script>{script}</script></body></html>\n'
    )


def _head(title: str, summary: dict[str, Any]) -> str:
    run = summary.get("run") or {}
    names = ("model", "device_name", "device", "dtype", "version", "host")
    facts = " · ".join(_e(run[name]) for name in names if run.get(name))
    options = ", ".join(f"{name}={value}" for name, value in (run.get("options") or {}).items())
    return (
        f"<header><h1>{_e(title)}</h1><p>{facts}</p>"
        + (f"<p class=note>wrap({_e(options)})</p>" if options else "")
        + "</header>"
    )


def _tiles(summary: dict[str, Any]) -> str:
    peaks, loss = summary["peaks"], summary["loss"]
    speed = summary["tokens_per_s"]
    tiles = [
        ("step", seconds_text(summary["step_s"]), f"{summary['steps']} steps, {_e(summary['state'])}"),
        ("tokens/s", "-" if speed is None else f"{speed:,.0f}", seconds_text(summary["seconds"]) + " in all"),
        ("share of the bound", share_text(summary["share_of_bound"]), _e(summary["limiter_text"])),
        ("peak on the device", bytes_text(peaks["device_peak_bytes"]), "as its allocator saw it"),
        ("peak in RAM", bytes_text(peaks["host_peak_bytes"]), "resident, the whole process"),
    ]
    if loss is not None:
        tiles.append(("loss", f"{loss['last']:.4f}", f"first {loss['first']:.4f}"))
    if not peaks["device_peak_bytes"]:
        del tiles[3]
    cells = "".join(
        f"<div><b>{_e(value)}</b><span>{name}</span><i>{more}</i></div>" for name, value, more in tiles
    )
    return f"<section class=tiles>{cells}</section>"


def _limits(summary: dict[str, Any]) -> str:
    step_s, rows = summary["step_s"], []
    for name, value in sorted(summary["busy_s"].items(), key=lambda item: -item[1]):
        if not value:
            continue
        share = value / step_s if step_s else 0.0
        wide = min(max(share, 0.0), 1.0) * 100.0
        rows.append(
            f"<tr><th>{_e(name)}</th><td>{seconds_text(value)}</td><td>{share_text(share)}</td>"
            f'<td class=meter><i class="{_style(name)}" style="width:{wide:.1f}%"></i></td></tr>'
        )
    for name, value in summary["stall_s_per_step"].items():
        share = share_text(value / step_s if step_s else None)
        rows.append(
            f"<tr><th>waited for {_e(name)}</th><td>{seconds_text(value)}</td><td>{share}</td><td></td></tr>"
        )
    moved = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {bytes_text(value)}"
        for name, value in summary["moved_per_step"].items()
        if value
    )
    helps = "".join(f"<li>{_e(line)}</li>" for line in summary["would_help"])
    rates = "" if summary["rates_measured"] else " The machine's rates are assumed, not measured."
    return (
        f"<section><h2>What limits a step</h2><p>A step takes {seconds_text(step_s)}; the limiter is "
        f"<b>{_e(summary['limiter'])}</b>: {_e(summary['limiter_text'])}.{rates}</p>"
        "<table><thead><tr><th>resource<th>needs<th>of a step<th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><p class=note>A step moves: {_e(moved or 'nothing')}.</p>"
        f"<h3>What would help</h3><ul>{helps}</ul></section>"
    )


def _style(name: str) -> str:
    known = {
        "gpu": "compute",
        "cpu": "compute",
        "dram": "optimizer",
        "h2d": "h2d",
        "d2h": "d2h",
        "disk": "disk",
    }
    return known.get(name, "other")


def _memory(run: Run) -> str:
    began = number(run.start.get("time")) or run.last
    xs = [max(step["time"] - began, 0.0) for step in run.steps]
    tiers = sorted({tier for step in run.steps for tier in step["tiers"]}, key=_order)
    series = [
        Series(
            tier,
            f"t-{tier}" if _order(tier) < 4 else "other",
            [step["tiers"].get(tier, 0.0) for step in run.steps],
        )
        for tier in tiers
    ]
    used = [Series("RAM of the process", "t-host", [step["host_used_bytes"] or 0.0 for step in run.steps])]
    if any(step["device_peak_bytes"] for step in run.steps):
        peak = [step["device_peak_bytes"] or 0.0 for step in run.steps]
        used.insert(0, Series("peak on the device", "t-device", peak))
    budgets = numbers((run.plan or {}).get("budgets"))
    most = max((value for one in used for value in one.values), default=0.0)
    levels = [
        (f"{tier} budget", size) for tier, size in budgets.items() if tier != "disk" and size < 3.0 * most
    ]
    return (
        "<section><h2>Memory by tier</h2>"
        + chart(
            "Weights, gradients and state",
            xs,
            series,
            x_name="s",
            write=bytes_text,
            stacked=True,
            binary=True,
        )
        + chart("In use", xs, used, x_name="s", write=bytes_text, binary=True, levels=levels)
        + "</section>"
    )


def _order(tier: str) -> int:
    known = ("device", "peer", "host", "disk")
    return known.index(tier) if tier in known else len(known)


def _steps(run: Run) -> str:
    steps = [step for step in run.steps if step["step_s"]]
    xs = [float(step["step"]) for step in steps]
    times = [Series("step", "compute", [step["step_s"] for step in steps])]
    for name, style in (("optimizer", "optimizer"), ("weights", "h2d")):
        times.append(Series(f"waited for {name}", style, [step["stall_s"].get(name, 0.0) for step in steps]))
    names = {"h2d_bytes": "h2d", "d2h_bytes": "d2h", "disk_read_bytes": "disk"}
    moved = [
        Series(label, label, [step["moved"].get(name, 0.0) for step in steps])
        for name, label in names.items()
    ]
    bound = [Series("share of the bound", "compute", [step["share_of_bound"] or 0.0 for step in steps])]
    losses = [(float(step), loss) for step, loss in run.losses if loss is not None]
    parts = [
        chart("Time of a step", xs, times, x_name="step", write=seconds_text),
        chart("Bytes moved in a step", xs, moved, x_name="step", write=bytes_text, binary=True),
        chart("Share of the bound", xs, bound, x_name="step", write=share_text, levels=[("the bound", 1.0)]),
    ]
    if losses:
        line = [Series("loss", "optimizer", [loss for _, loss in losses])]
        parts.append(chart("Loss", [x for x, _ in losses], line, x_name="step", write=lambda v: f"{v:.4g}"))
    return f"<section><h2>Steps</h2>{''.join(parts)}</section>"


def _timeline(trace: dict[str, Any] | None) -> str:
    if trace is None:
        how = (
            "No trace of single steps: <code>trainstream finetune trace=true</code> or "
            "<code>TRAINSTREAM_TRACE=FILE</code> records three of them."
        )
        return f"<section><h2>Timeline</h2><p class=note>{how}</p></section>"
    found = lanes_of(trace)
    busy = union([*found.compute, *found.h2d, *found.d2h, *found.optimizer, *found.fetch])
    whole = [(found.steps[0][0], found.steps[-1][1])] if found.steps else []
    rows = [
        Lane("compute", "compute", subtract(found.compute, found.decode) if found.gpu else found.compute),
        Lane("decode", "decode", found.decode),
        Lane("host to device", "h2d", found.h2d),
        Lane("device to host", "d2h", found.d2h),
        Lane("waits for weights", "disk", found.fetch),
        Lane("optimizer", "optimizer", found.optimizer),
        Lane("nothing", "other", subtract(whole, busy)),
    ]
    return f"<section><h2>Timeline</h2>{lanes('Who works when', rows, found.steps)}</section>"


def _predicted(summary: dict[str, Any]) -> str:
    rows = []
    for row in summary["predicted"]:
        write = bytes_text if row["unit"] == "bytes" else seconds_text
        error = "-" if row["error"] is None else f"{row['error'] * 100.0:+.1f} %"
        rows.append(
            f"<tr><th>{_e(row['what'])}</th><td>{_e(write(row['predicted']))}</td>"
            f"<td>{_e(write(row['measured']))}</td><td>{error}</td></tr>"
        )
    if not rows:
        return ""
    return (
        "<section><h2>Predicted against measured</h2><table><thead><tr><th>what<th>predicted<th>measured"
        f"<th>error</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _blocks(summary: dict[str, Any]) -> str:
    columns = [*_COLUMNS, *_COUNTS]
    heads = "".join(f"<th><button>{name}</button>" for name in columns)
    body = []
    for row in summary["blocks"]:
        cells = []
        for name in columns:
            value = row.get(name, "")
            known = number(value)
            if known is not None and name not in ("name", "kind"):
                text = bytes_text(known) if name in _BYTES else f"{known:,.0f}"
                cells.append(f'<td class=n data-v="{known!r}">{_e(text)}')
            else:
                text = ("yes" if value else "") if isinstance(value, bool) else value
                cells.append(f"<td>{_e(text)}")
        body.append(f"<tr>{''.join(cells)}</tr>")
    replans = ", ".join(str(step) for step in summary["replans"][1:])
    note = (
        f"<p class=note>The plan changed after steps {_e(replans)}; this is the last one.</p>"
        if replans
        else ""
    )
    return (
        f"<section><h2>Blocks</h2>{note}<div class=wide><table class=sortable><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _events(run: Run) -> str:
    began = number(run.start.get("time")) or 0.0
    rows = "".join(
        f"<tr><td class=n>{max(when - began, 0.0):.1f} s</td><td>{_e(text)}</td></tr>"
        for when, text in run.notes
    )
    return f"<section><h2>Events</h2><table><tbody>{rows}</tbody></table></section>"
