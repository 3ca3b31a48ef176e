"""`trainstream top`: a running job by tier, from its event file."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from trainstream import _runs
from trainstream._bound import LIMITERS
from trainstream._page import bytes_text, seconds_text, share_text
from trainstream._runs import Run, numbers
from trainstream.cli.console import Console
from ts_core.errors import OptionError
from ts_core.lines import read_lines

__all__ = ["Watched", "picture", "run"]

_LATEST = 10  # steps that speeds are averaged over
_KEPT = 64  # steps that are held in memory
_NOTES = 4
_BAR = 32


class Watched:
    """Follows an event file.

    Attributes:
        path: The file.
        run: The latest run in it, or None while there is none.
    """

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path
        self.run: Run | None = None
        self._runs: dict[str, Run] = {}
        self._offset = 0

    def look(self) -> Run | None:
        """Read what was appended since the last look.

        Raises:
            OptionError: The file cannot be read.
        """
        try:
            records, self._offset = read_lines(self.path, self._offset)
        except OSError as error:
            raise OptionError(f"cannot read {self.path}: {error.strerror}") from error
        _runs.group(records, self._runs)
        for found in self._runs.values():
            del found.steps[:-_KEPT], found.notes[:-_KEPT], found.losses[:-_KEPT]
        self.run = next(reversed(self._runs.values()), None)
        return self.run


def picture(run: Run) -> dict[str, Any]:
    """Say how a run stands, as JSON-ready data.

    Args:
        run: The run.

    Returns:
        `run` (its identification), `model`, `device`, `state`, `step`, `step_s`, `tokens_per_s`, `age_s`
        (since the last line), `tiers`, `budgets`, `device_peak_bytes`, `host_used_bytes`, `moved_per_s`,
        `stall_share` (of the time), `limiter`, `share_of_bound`, `adapting`, `loss`, `blocks` (how many are
        where, and what becomes of their activations) and the latest `events`.
    """
    latest = [step for step in run.steps if step["step_s"]][-_LATEST:]
    seconds = sum(step["step_s"] for step in latest)
    last: dict[str, Any] = run.steps[-1] if run.steps else {}
    going = _runs.alive(run)
    tokens = [step["tokens"] for step in latest]
    known = [loss for _, loss in run.losses if loss is not None]
    return {
        "run": run.start.get("run"),
        "model": run.start.get("model"),
        "device": run.start.get("device"),
        "state": "ended" if run.end else {True: "running", False: "stopped", None: "unknown"}[going],
        "step": last.get("step", 0),
        "step_s": seconds / len(latest) if latest else None,
        "tokens_per_s": sum(tokens) / seconds if seconds and all(tokens) else None,
        "age_s": max(time.time() - run.last, 0.0),
        "tiers": last.get("tiers", {}),
        "budgets": numbers((run.plan or {}).get("budgets")),
        "device_peak_bytes": last.get("device_peak_bytes"),
        "host_used_bytes": last.get("host_used_bytes"),
        "moved_per_s": _shares(latest, "moved", seconds),
        "stall_share": _shares(latest, "stall_s", seconds),
        "limiter": last.get("limiter"),
        "share_of_bound": last.get("share_of_bound"),
        "adapting": last.get("adapting"),
        "loss": known[-1] if known else None,
        "blocks": _places(run),
        "events": [text for _, text in run.notes[-_NOTES:]],
    }


def _shares(steps: list[dict[str, Any]], key: str, seconds: float) -> dict[str, float]:
    names = sorted({name for step in steps for name in step[key]})
    return {name: sum(step[key].get(name, 0.0) for step in steps) / seconds for name in names}


def _places(run: Run) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"tier": {}, "policy": {}}
    rows = (run.plan or {}).get("blocks")
    for row in rows if isinstance(rows, list) else run.blocks:
        for key, counts in found.items():
            if isinstance(row, dict) and row.get("kind") == "block":
                name = str(row.get(key))
                counts[name] = counts.get(name, 0) + 1
    return found


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    return "#" * full + "." * (_BAR - full)


def _plain(text: Any) -> str:
    """One line without control characters: what a file says must not steer the terminal."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def lines_of(now: dict[str, Any], width: int) -> list[str]:
    """Write a picture for people.

    Args:
        now: What `picture` returned.
        width: Columns of the terminal.
    """
    speed = f", {now['tokens_per_s']:,.0f} tokens/s" if now["tokens_per_s"] else ""
    loss = f", loss {now['loss']:.4f}" if now["loss"] is not None else ""
    adapting = ", still adapting" if now["adapting"] else ""
    lines = [
        f"{now['model']} on {now['device']}: {now['state']}, last heard of {seconds_text(now['age_s'])} ago",
        f"step {now['step']}, {seconds_text(now['step_s'])} a step{speed}{loss}{adapting}",
    ]
    if now["limiter"]:
        text = LIMITERS.get(now["limiter"], now["limiter"])
        lines.append(f"limiter {now['limiter']} ({text}), {share_text(now['share_of_bound'])} of the bound")
    lines.append("")
    most = max([*now["tiers"].values(), 1.0])
    for tier, size in now["tiers"].items():
        budget = now["budgets"].get(tier)
        of = f" of {bytes_text(budget)}" if budget else ""
        if size or tier in ("device", "host"):
            lines.append(f"{tier:8} [{_bar(size / (budget or most))}] {bytes_text(size)}{of}")
    used = [("RAM used", now["host_used_bytes"]), ("device peak", now["device_peak_bytes"])]
    lines.append("         " + ", ".join(f"{name} {bytes_text(size)}" for name, size in used if size))
    moved = {name.removesuffix("_bytes").replace("_", " "): v for name, v in now["moved_per_s"].items() if v}
    if moved:
        lines.append(
            "moving   " + ", ".join(f"{name} {value / 1e9:.2f} GB/s" for name, value in moved.items())
        )
    waits = {name: value for name, value in now["stall_share"].items() if value >= 0.005}
    if waits:
        lines.append(
            "waiting  " + ", ".join(f"{share_text(v)} of the time for {n}" for n, v in waits.items())
        )
    for key, label in (("tier", "blocks"), ("policy", "kept as")):
        counts = ", ".join(f"{count} {name}" for name, count in now["blocks"][key].items())
        if counts:
            lines.append(f"{label:8} {counts}")
    lines += ["", *(f"- {text}" for text in now["events"])]
    return [_plain(line)[: max(width - 1, 20)] for line in lines]


def run(console: Console, place: Path, *, once: bool = False, interval: float = 1.0) -> int:
    """Answer the command: show the newest run of a file until it ends.

    Args:
        console: Where it goes; one event "top" a look for programs.
        place: An event file, a run folder or a folder of runs.
        once: Show it once.
        interval: Seconds between two looks.

    Returns:
        Exit code 0, also when Ctrl-C ended the watching.

    Raises:
        OptionError: There is no event file.
    """
    sources = _runs.find(place)
    if sources.events is None:
        raise OptionError(f"{place} is a trace; give the event file of a run")
    watched = Watched(sources.events)
    screen = not once and not console.as_json and sys.stdout.isatty()
    try:
        while True:
            found = watched.look()
            if found is None and once:
                raise OptionError(f"{sources.events} tells of no run yet")
            if found is not None:
                now = picture(found)
                console.event("top", **now)
                size = shutil.get_terminal_size((100, 30))
                lines = lines_of(now, size.columns if sys.stdout.isatty() else 200)
                if screen:  # home, each line cleared to its end, and what is below
                    lines = [f"{line}\x1b[K" for line in lines[: size.lines - 1]]
                    console.say("\x1b[H" + "\n".join(lines) + "\x1b[J")
                else:
                    console.say("\n".join([*lines, ""]))
                if once or now["state"] in ("ended", "stopped"):
                    return 0
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0
