"""`trainstream report`: what a run did, as a summary, a page, a trace, or JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trainstream import _runs, _timeline
from trainstream._page import bytes_text, page, seconds_text, share_text
from trainstream._perfetto import chrome_trace
from trainstream.cli.console import Console, tiers_text
from trainstream.cli.output import storage_errors
from ts_core.errors import OptionError

__all__ = ["run"]


def run(
    console: Console,
    place: Path,
    *,
    html: Path | None = None,
    trace: Path | None = None,
    profile: Path | None = None,
    plan: Path | None = None,
) -> int:
    """Answer the command.

    Args:
        console: Where the summary goes; one event "report" for programs.
        place: A run folder, a folder of runs, an event file, or a trace.
        html: Where to write the page.
        trace: Where to write the trace.
        profile: A trace by `torch.profiler`, instead of the run's own.
        plan: A prediction from before the run.

    Returns:
        Exit code 0.

    Raises:
        OptionError: There is no such run, or a file cannot be read.
        StorageError: A file cannot be written.
    """
    sources = _runs.find(place)
    ran = None if sources.events is None else _runs.load(sources.events)
    recorded = _read_trace(profile or sources.trace)
    forecast = None if plan is None else _runs.read_forecast(plan)
    summary = _runs.summarize(ran, recorded, forecast)
    written = {}
    if html is not None:
        name = (sources.events or sources.trace or place).resolve()
        title = name.parent.name if name.name == _runs.EVENTS_FILE else name.name
        _write(html, page(summary, ran, recorded, title=title))
        written["html"] = str(html)
    if trace is not None:
        _write(trace, json.dumps(chrome_trace(ran, recorded), allow_nan=False, default=str))
        written["trace"] = str(trace)
    console.event("report", **summary, written=written)
    if not written:
        for line in _lines(summary):
            console.say(line)
        _hint(console, place)
    for kind, file in written.items():
        console.say(f"{kind:6} {file}" + (" (open it at ui.perfetto.dev)" if kind == "trace" else ""))
    return 0


def _read_trace(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return _timeline.read(path)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise OptionError(f"cannot read the trace {path}: {error}") from error


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path = path.expanduser()
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        staged = Path(temporary)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            staged.chmod(0o666 & ~mask)  # mkstemp makes it for the owner alone
            staged.replace(path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise


def _hint(console: Console, place: Path) -> None:
    console.say(f"\na page with charts: trainstream report {place} --html report.html")


def _lines(summary: dict[str, Any]) -> list[str]:
    if summary["run"] is None:
        return _timeline_lines(summary["timeline"])
    run, peaks = summary["run"], summary["peaks"]
    speed = summary["tokens_per_s"]
    lines = [
        f"model      {run.get('model')}, {run.get('dtype')}, {run.get('device_name')} ({run.get('device')})",
        f"run        {summary['steps']} steps in {seconds_text(summary['seconds'])}, {summary['state']}",
        f"speed      {seconds_text(summary['step_s'])} a step"
        + ("" if speed is None else f", {speed:,.0f} tokens/s"),
        f"limiter    {summary['limiter']}: {summary['limiter_text']}",
        f"bound      a step is at {share_text(summary['share_of_bound'])} of it"
        + ("" if summary["rates_measured"] else " (rates assumed)"),
        f"peak       {bytes_text(peaks['host_peak_bytes'])} RAM"
        + (f", {bytes_text(peaks['device_peak_bytes'])} on the device" if peaks["device_peak_bytes"] else ""),
        "at most    " + (tiers_text(_tiers(peaks)) or "nothing"),
    ]
    if any(summary["moved"].values()):
        lines.append("moved      " + tiers_text({_short(k): v for k, v in summary["moved"].items()}))
    waited = {name: value for name, value in summary["stall_s"].items() if value}
    if waited:
        lines.append("waited     " + ", ".join(f"{seconds_text(v)} for {k}" for k, v in waited.items()))
    if summary["loss"]:
        lines.append(f"loss       {summary['loss']['first']:.4f} -> {summary['loss']['last']:.4f}")
    lines += [f"help       {line}" for line in summary["would_help"]]
    for row in summary["predicted"]:
        write = bytes_text if row["unit"] == "bytes" else seconds_text
        lines.append(
            f"predicted  {row['what']}: {write(row['predicted'])}, measured {write(row['measured'])}"
        )
    return lines + _timeline_lines(summary["timeline"])


def _tiers(peaks: dict[str, int]) -> dict[str, int]:
    return {tier: peaks[f"{tier}_bytes"] for tier in ("device", "peer", "host", "disk")}


def _short(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _timeline_lines(timeline: dict[str, Any] | None) -> list[str]:
    if timeline is None or not timeline["steps"]:
        return []
    names = ("compute", "decode", "h2d", "d2h", "fetch", "optimizer", "nothing")
    told = ", ".join(
        f"{name} {seconds_text(timeline[f'{name}_s'])}" for name in names if timeline[f"{name}_s"]
    )
    return [f"timeline   {timeline['steps']} steps of {seconds_text(timeline['step_s'])}: {told}"]
