"""The event file of a run: one JSON object a line for its start, each step, event and change of plan.

    {"event": "run" | "note" | "plan" | "step" | "loss" | "blocks" | "end", "run": ..., "time": ..., ...}

Writing a line takes some 50 microseconds. Counting bytes by tier looks at every tensor, so it is done when
the plan has changed, and otherwise so seldom that it takes less than 1/200 of the time. `trainstream top` and
`trainstream report` read the file; the page "events" of the documentation has every field.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import platform
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainstream._meter import Meter
from ts_core.errors import OptionError
from ts_core.lines import LineFile
from ts_core.usage import host_usage

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["FORMAT", "VARIABLE", "Recorder", "check_environment", "path_of_rank"]

FORMAT = 1
#: The environment variable that names the file.
VARIABLE = "TRAINSTREAM_EVENTS"
_SELDOM = 200  # a count of all bytes may take one part in this many


def path_of_rank(path: str | os.PathLike[str]) -> Path:
    """Return the file of this process: ranks above 0 have their number before the suffix.

    Example:
        >>> path_of_rank("runs/events.jsonl").name
        'events.jsonl'
    """
    place, rank = Path(path).expanduser(), os.environ.get("RANK", "0")
    return place if rank in ("", "0") else place.with_name(f"{place.stem}.rank{rank}{place.suffix}")


def open_lines(path: Path) -> LineFile:
    """Open an event file.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        return LineFile(path)
    except OSError as error:
        raise OptionError(f"event file {path}: cannot be written: {error.strerror}") from error


def check_environment() -> None:
    """Refuse a file that the environment names and that cannot be written, before anything is changed.

    Raises:
        OptionError: So it is.
    """
    if os.environ.get(VARIABLE):
        open_lines(path_of_rank(os.environ[VARIABLE])).close()


class Recorder:
    """Writes the event file of one session.

    Attributes:
        path: The file.
        run: Identifies the run in it.
    """

    def __init__(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Write the beginning and the events so far, and listen for more.

        Args:
            session: Of the wrapped model.
            path: The file; lines are appended.

        Raises:
            OptionError: It cannot be written.
        """
        self.path = path_of_rank(path)
        self.run = uuid.uuid4().hex[:12]
        self._lines = open_lines(self.path)
        self._session = weakref.ref(session)
        self._plan: Any = None
        self._tiers: dict[str, int] = {}
        self._due = 0.0
        self._meter = Meter(session)
        self._begin(session)
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------- writing

    def _write(self, event: str, **data: Any) -> None:
        self._lines.write({"event": event, "run": self.run, "time": time.time(), **data})

    def note(self, text: str) -> None:
        """Write an event of the session."""
        self._write("note", text=text)

    def tell(self, tokens: int) -> None:
        """Count tokens that are trained on; the next step's line says how many."""
        self._meter.tell(tokens)

    def loss(self, step: int, loss: float) -> None:
        """Write a loss that is on the host anyway."""
        self._write("loss", step=step, loss=loss)

    def _begin(self, session: Session) -> None:
        from trainstream import __version__, _session
        from trainstream._report import block_table

        device, model = session.plan.device, session.model
        cuda = device.startswith("cuda")
        options = {
            field.name: getattr(session.options, field.name)
            for field in dataclasses.fields(session.options)
            if field.name != "blocks" and getattr(session.options, field.name) != field.default
        }
        config: Any = getattr(model, "config", None)
        self._write(
            "run",
            format=FORMAT,
            version=__version__,
            pid=os.getpid(),
            host=platform.node(),
            rank=int(os.environ.get("RANK") or 0),
            device=device,
            device_name=torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
            model=str(getattr(config, "name_or_path", "") or "") or type(model).__name__,
            dtype=self._meter.dtype,
            parameters=sum(p.numel() for p in model.parameters()),
            trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            options={name: str(value) for name, value in options.items()},
            rates=dataclasses.asdict(self._meter.rates),
            baseline_bytes=_session.baseline_bytes,
        )
        for text in session.events.events:
            self.note(text)
        self._recount(session)
        self._changed(session, block_table(session))
        session.events.listeners.append(self.note)

    def step(self, session: Session, entry: dict[str, float]) -> None:
        """Write the line of a step that has ended.

        Args:
            session: Of the model.
            entry: Its measurements, as in `Session.history`.
        """
        from trainstream._report import block_table

        if session.plan is not self._plan:
            self._recount(session)
            self._changed(session, block_table(session))
        elif time.perf_counter() >= self._due:
            self._recount(session)
        reading = self._meter.take(session, entry["step_s"])
        step = int(entry["step"])
        self._write(
            "step",
            step=step,
            step_s=entry["step_s"],
            tokens=reading.tokens or None,
            tiers=self._tiers,
            moved=reading.moved,
            stall_s=reading.stall_s,
            busy_s=reading.busy_s,
            bound_s=reading.verdict.bound_s,
            share_of_bound=reading.verdict.share,
            limiter=reading.verdict.limiter,
            device_peak_bytes=int(entry["device_peak_bytes"]),
            host_used_bytes=host_usage().used_bytes,
            host_peak_bytes=int(entry["host_peak_bytes"]),
            adapting=session.adapting,
        )
        if step & (step - 1) == 0:  # 1, 2, 4, 8, ...: a run that is killed has told of its blocks, too
            self._write("blocks", step=step, blocks=block_table(session))

    def _changed(self, session: Session, blocks: list[dict[str, Any]]) -> None:
        self._plan = session.plan
        self._write("plan", step=session.steps, plan=session.plan.to_dict(), blocks=blocks)

    def _recount(self, session: Session) -> None:
        from trainstream._report import tier_bytes

        start = time.perf_counter()
        self._tiers = tier_bytes(session)
        end = time.perf_counter()
        self._due = end + _SELDOM * (end - start)

    def close(self) -> None:
        """Write the end, with the table of blocks, and write no more; closing twice is fine."""
        atexit.unregister(self.close)
        session = self._session()
        if session is not None and self.note in session.events.listeners:
            session.events.listeners.remove(self.note)
            try:
                self._finish(session)
            except Exception as error:  # at the end of a process anything may be gone already
                self._write("end", step=session.steps, error=f"{type(error).__name__}: {error}")
        self._lines.close()

    def _finish(self, session: Session) -> None:
        from trainstream._report import block_table

        self._recount(session)
        self._write("end", step=session.steps, tiers=self._tiers, blocks=block_table(session))
