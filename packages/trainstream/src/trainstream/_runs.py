"""Reads event files and sums a run up: what `trainstream report` and `trainstream top` show."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from trainstream import _timeline
from trainstream._bound import LIMITERS, advice
from ts_core.errors import OptionError
from ts_core.lines import read_lines
from ts_core.plan import same_step, step_seconds

__all__ = [
    "EVENTS_FILE",
    "TRACE_FILE",
    "Run",
    "Sources",
    "alive",
    "find",
    "group",
    "load",
    "number",
    "numbers",
    "read_forecast",
    "settled",
    "summarize",
]

EVENTS_FILE = "events.jsonl"
TRACE_FILE = "trace.json.gz"
_WARM = 3  # steps that allocate and page in, left out of medians where there are enough others
_HUGE = 1e30
_NUMBERS = (
    "step_s",
    "tokens",
    "bound_s",
    "share_of_bound",
    "device_peak_bytes",
    "host_used_bytes",
    "host_peak_bytes",
)
_TIERS = ("device", "peer", "host", "disk")


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else: a file may hold what it should not."""
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if right and abs(value) < _HUGE else None


def numbers(value: Any) -> dict[str, float]:
    """Return the entries of a dictionary that are numbers."""
    known = {name: number(item) for name, item in _table(value).items()}
    return {name: item for name, item in known.items() if item is not None}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _clean_step(record: dict[str, Any], step: int, when: float) -> dict[str, Any]:
    plain = {name: number(record.get(name)) for name in _NUMBERS}
    nested = {name: numbers(record.get(name)) for name in ("tiers", "moved", "stall_s", "busy_s")}
    limiter, adapting = str(record.get("limiter") or "unknown"), bool(record.get("adapting"))
    return {"step": step, "time": when, "limiter": limiter, "adapting": adapting, **plain, **nested}


@dataclasses.dataclass
class Run:
    """One run of an event file.

    Attributes:
        start: The line "run"; empty if it was lost.
        steps: The lines "step", in order.
        losses: (step, loss).
        notes: (time, text).
        plan: The latest plan, as data; None if there was none.
        blocks: The latest table of blocks.
        replans: Steps after which the plan changed.
        end: The line "end", or None: still running, or ended without saying so.
        last: Time of the latest line.
        earlier: Runs before this one in the same file.
    """

    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    losses: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    notes: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    plan: dict[str, Any] | None = None
    blocks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    replans: list[int] = dataclasses.field(default_factory=list)
    end: dict[str, Any] | None = None
    last: float = 0.0
    earlier: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Take one line of the file; what is unknown or of another type than expected is left out."""
        kind, when = record.get("event"), number(record.get("time")) or 0.0
        step = int(number(record.get("step")) or 0)
        self.last = max(self.last, when)
        blocks = record.get("blocks")
        if isinstance(blocks, list):
            self.blocks = [row for row in blocks if isinstance(row, dict)]
        if kind == "run":
            self.start = {**record, "rates": _table(record.get("rates"))}
        elif kind == "step":
            self.steps.append(_clean_step(record, step, when))
        elif kind == "loss":
            self.losses.append((step, number(record.get("loss"))))
        elif kind == "note":
            self.notes.append((when, str(record.get("text"))))
        elif kind == "plan":
            self.plan = _table(record.get("plan"))
            self.replans.append(step)
        elif kind == "end":
            self.end = {"time": when, "step": step, "tiers": numbers(record.get("tiers"))}


@dataclasses.dataclass(frozen=True)
class Sources:
    """The files of a run.

    Attributes:
        events: The event file, or None if only a trace was given.
        trace: The trace, or None.
        result: What `trainstream finetune` summed up, or None.
    """

    events: Path | None
    trace: Path | None = None
    result: Path | None = None


def _newest(folder: Path) -> Path | None:
    """The event file in a folder, or else that of the newest run below it."""
    if (folder / EVENTS_FILE).is_file():
        return folder / EVENTS_FILE
    below = [path for path in folder.glob(f"*/{EVENTS_FILE}") if path.is_file()]
    return max(below, key=lambda path: path.stat().st_mtime, default=None)


def find(place: str | os.PathLike[str]) -> Sources:
    """Find the files of a run.

    Args:
        place: A run folder, a folder of runs (the newest is taken), an event file, or a trace.

    Returns:
        The files.

    Raises:
        OptionError: There is nothing of a run.
    """
    path = Path(place).expanduser()
    how = "a run writes one with TRAINSTREAM_EVENTS=FILE, and `trainstream finetune` into its folder"
    if path.is_dir():
        events = _newest(path)
        if events is None:
            raise OptionError(f"{path} holds no {EVENTS_FILE}: {how}")
        folder = events.parent
        trace, result = folder / TRACE_FILE, folder / "result.json"
        return Sources(events, trace if trace.is_file() else None, result if result.is_file() else None)
    if not path.exists():
        raise OptionError(f"{path} does not exist; expected a run folder, an event file or a trace: {how}")
    if path.name.endswith((".json", ".json.gz", ".gz")):
        return Sources(None, path)
    trace = path.with_name(TRACE_FILE)
    return Sources(path, trace if path.name == EVENTS_FILE and trace.is_file() else None)


def group(records: list[dict[str, Any]], runs: dict[str, Run]) -> None:
    """Sort lines into runs, in the order in which these began.

    Args:
        records: Lines of the file.
        runs: By their identification; added to.
    """
    for record in records:
        name = record.get("run")
        if isinstance(name, str):
            runs.setdefault(name, Run(earlier=len(runs))).add(record)


def load(events: Path) -> Run:
    """Read the latest run of an event file.

    Raises:
        OptionError: It cannot be read, or holds no run.
    """
    try:
        records, _ = read_lines(events)
    except OSError as error:
        raise OptionError(f"cannot read {events}: {error.strerror}") from error
    runs: dict[str, Run] = {}
    group(records, runs)
    if not runs:
        raise OptionError(f"{events} is no event file: no line of it tells of a run")
    return list(runs.values())[-1]


def alive(run: Run) -> bool | None:
    """Say whether the process of a run goes on; None if it is another machine's."""
    if run.end is not None:
        return False
    pid = run.start.get("pid")
    if run.start.get("host") != platform.node() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def settled(run: Run) -> list[dict[str, Any]]:
    """Return the steps that medians are taken over: after adapting, without the first ones."""
    timed = [step for step in run.steps if step["step_s"] and step["step_s"] > 0.0]
    calm = [step for step in timed if not step["adapting"]] or timed
    return calm[_WARM:] if len(calm) > 2 * _WARM else calm


def _median(values: list[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.median(known) if known else None


def _medians(steps: list[dict[str, Any]], key: str) -> dict[str, float]:
    names = {name for step in steps for name in step.get(key) or {}}
    found = {name: _median([(step.get(key) or {}).get(name) for step in steps]) for name in sorted(names)}
    return {name: value for name, value in found.items() if value is not None}


def _sums(steps: list[dict[str, Any]], key: str) -> dict[str, float]:
    found: collections.Counter[str] = collections.Counter()
    for step in steps:
        found.update(step.get(key) or {})
    return dict(found)


def _peaks(run: Run) -> dict[str, int]:
    """The most of each tier, of the device as its allocator saw it, and of RAM."""
    found = {f"{tier}_bytes": 0 for tier in _TIERS}
    for line in [*run.steps, *([run.end] if run.end else [])]:
        for tier, size in (line.get("tiers") or {}).items():
            found[f"{tier}_bytes"] = max(found.get(f"{tier}_bytes", 0), int(size))
    for name in ("device_peak_bytes", "host_used_bytes", "host_peak_bytes"):
        found[name] = max((int(step.get(name) or 0) for step in run.steps), default=0)
    return found


def _times(run: Run) -> dict[str, float | None]:
    """The median of seconds and of tokens of a settled step."""
    steps = settled(run)
    return {name: _median([step[name] for step in steps]) for name in ("step_s", "tokens")}


def _ram(tiers: dict[str, float]) -> float:
    return tiers.get("device", 0.0) + tiers.get("host", 0.0)


def compare(run: Run, forecast: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Set what was predicted beside what was measured.

    Args:
        run: The run.
        forecast: A prediction from before the run (`trainstream plan --json`), or None.

    Returns:
        Rows of `what`, `predicted`, `measured`, `unit` ("bytes" or "s") and `error` (share), those of the
        run's own plan first. Times are compared only where the tokens of a step are known and about those of
        the prediction.
    """
    peaks, plan = _peaks(run), run.plan or {}
    predicted = numbers(plan.get("predicted"))
    cuda = str(plan.get("device", "")).startswith("cuda")
    taken = _times(run)
    weights, held = "device: weights, buffers, gradients, state", peaks["device_bytes"]
    if not cuda:  # both are RAM there
        held = max((int(_ram(step["tiers"])) for step in run.steps), default=0)
    rows = [
        (weights, predicted.get("device"), held, "bytes"),
        ("host: weights and optimizer state", predicted.get("host"), peaks["host_bytes"], "bytes"),
        ("disk: weights and optimizer state", predicted.get("disk"), peaks["disk_bytes"], "bytes"),
        ("step time", step_seconds(predicted, taken["tokens"]), taken["step_s"], "s"),
    ]
    forecast = numbers(forecast)
    if forecast:
        above = max(peaks["host_used_bytes"] - int(number(run.start.get("baseline_bytes")) or 0), 0)
        device = peaks["device_peak_bytes"] if cuda else above
        # A prediction of `trainstream plan` has its tokens as a rate.
        work = forecast.get("step_s", 0.0) * forecast.get("tokens_per_s", 0.0)
        other = bool(work and taken["tokens"]) and not same_step(work, taken["tokens"])
        rows += [
            ("forecast: device peak", forecast.get("device_bytes"), device, "bytes"),
            ("forecast: host", forecast.get("host_bytes") if cuda else None, above, "bytes"),
            ("forecast: disk", forecast.get("disk_bytes"), peaks["disk_bytes"], "bytes"),
            ("forecast: step time", None if other else forecast.get("step_s"), taken["step_s"], "s"),
        ]
    found = []
    for what, expected, measured, unit in rows:
        if not expected or measured is None:  # a tier that was not planned with is not predicted
            continue
        error = (float(expected) - measured) / measured if measured else None
        found.append(
            {"what": what, "predicted": expected, "measured": measured, "unit": unit, "error": error}
        )
    return found


def _verdict(run: Run, steps: list[dict[str, Any]]) -> dict[str, Any]:
    limiters = collections.Counter(str(step.get("limiter")) for step in steps)
    limiter = limiters.most_common(1)[0][0] if limiters else "unknown"
    measured = bool((run.start.get("rates") or {}).get("measured"))
    share = _median([step.get("share_of_bound") for step in steps])
    return {
        "limiter": limiter,
        "limiter_text": LIMITERS.get(limiter, limiter),
        "share_of_bound": share,
        "rates_measured": measured,
        "busy_s": _medians(steps, "busy_s"),
        "would_help": advice(limiter, measured=measured, share=share),
    }


def summarize(
    run: Run | None, trace: dict[str, Any] | None = None, forecast: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Sum a run up, as JSON-ready data.

    Args:
        run: The run, or None if there is only a trace.
        trace: A Chrome trace of some of its steps, or None.
        forecast: A prediction from before the run, or None.

    Returns:
        `run` (its first line), `state` ("ended", "running", "stopped" or "unknown"), `steps`, `seconds`,
        `step_s`, `tokens_per_s`, `loss`, `limiter`, `share_of_bound`, `would_help` and so on, `peaks`,
        `moved` (in all), `moved_per_step`, `stall_s` (in all), `predicted` (rows), `blocks`, `replans`,
        `events`, and `timeline` (medians of the trace's steps).
    """
    timeline = _timeline.summary(_timeline.analyze(trace)) if trace is not None else None
    if run is None:
        return {"run": None, "timeline": timeline}
    steps = settled(run)
    step_s = _median([step["step_s"] for step in steps])
    per_second = [step["tokens"] / step["step_s"] for step in steps if step["tokens"]]
    known = [(step, loss) for step, loss in run.losses if loss is not None]
    going = alive(run)
    state = "ended" if run.end else {True: "running", False: "stopped", None: "unknown"}[going]
    began = number(run.start.get("time")) or run.last
    return {
        "run": {key: value for key, value in run.start.items() if key != "event"},
        "earlier_runs": run.earlier,
        "state": state,
        "steps": run.steps[-1]["step"] if run.steps else 0,
        "seconds": max(run.last - began, 0.0),
        "step_s": step_s,
        "tokens_per_s": _median(per_second),
        "loss": {"first": known[0][1], "last": known[-1][1]} if known else None,
        **_verdict(run, steps),
        "peaks": _peaks(run),
        "moved": {name: int(value) for name, value in _sums(run.steps, "moved").items()},
        "moved_per_step": _medians(steps, "moved"),
        "stall_s": _sums(run.steps, "stall_s"),
        "stall_s_per_step": _medians(steps, "stall_s"),
        "predicted": compare(run, forecast),
        "plan": run.plan and {key: value for key, value in run.plan.items() if key != "blocks"},
        "blocks": run.blocks,
        "replans": run.replans,
        "events": [text for _, text in run.notes],
        "timeline": timeline,
    }


def read_forecast(path: Path) -> dict[str, Any]:
    """Read the prediction in what `trainstream plan --json` printed.

    Raises:
        OptionError: It cannot be read, or holds none.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"option --plan: cannot read {path}: {error}") from error
    places = [data, *(data.values() if isinstance(data, dict) else ())]
    for place in places:
        if isinstance(place, dict) and "step_s" in place and "device_bytes" in place:
            return place
        inner = place.get("prediction") if isinstance(place, dict) else None
        if isinstance(inner, dict) and "step_s" in inner:
            return inner
    raise OptionError(f"option --plan: {path} holds no prediction; write it with `trainstream plan --json`")
