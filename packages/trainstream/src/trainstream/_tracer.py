"""A timeline of some steps of a run: torch's profiler and the spans of all threads, as a Chrome trace.

The steps are the first ones after the session has stopped adapting, so that they show what the rest of the
run is like. Perfetto (ui.perfetto.dev) and chrome://tracing open the file; `trainstream report` draws it.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.profiler as _profiler

from trainstream._recorder import path_of_rank
from ts_core.trace import SpanRecorder

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["TRACE_VARIABLE", "Tracer"]

#: The environment variable that names the file.
TRACE_VARIABLE = "TRAINSTREAM_TRACE"
_FIRST = 3  # steps that are left out: they allocate
_STEPS = 3


class Tracer:
    """Records some steps of one session.

    Attributes:
        path: Where the trace goes.
        done: Whether there is nothing more to do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Record nothing yet.

        Args:
            path: `.json` or `.json.gz`.
        """
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler says on stderr that it begins
        self.path = path_of_rank(path)
        self.done = False
        self._steps = 0
        self._profiler: Any = None
        self._recorder: SpanRecorder | None = None
        self._span: Any = None

    def step(self, session: Session) -> None:
        """Hear that a step has ended: begin, go on, or write the file."""
        if self.done:
            return
        if self._profiler is not None:
            self._end_span()
            self._steps += 1
            if self._steps >= _STEPS:
                self.finish(session)
            else:
                self._begin_span()
        elif not session.adapting and session.steps >= _FIRST:
            self._begin(session)

    def _begin(self, session: Session) -> None:
        if _profiler._is_profiler_enabled:
            session.events.add(f"no trace is written to {self.path}: another profiler is on")
            self.done = True
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if session.plan.device.startswith("cuda"):
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize(session.plan.device)
        self._profiler = torch.profiler.profile(activities=kinds, acc_events=True)
        self._profiler.__enter__()
        self._recorder = SpanRecorder().__enter__()
        self._begin_span()

    def _begin_span(self) -> None:
        self._span = torch.profiler.record_function("ts/step")
        self._span.__enter__()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def finish(self, session: Session) -> None:
        """Write what was recorded, if anything was; calling it again does nothing."""
        if self.done:
            return
        self.done = True
        if self._profiler is None or self._recorder is None:
            session.events.add(f"no trace is written to {self.path}: the run ended before its steps settled")
            return
        self._end_span()
        if session.plan.device.startswith("cuda"):
            torch.cuda.synchronize(session.plan.device)
        self._recorder.__exit__(None, None, None)
        self._profiler.__exit__(None, None, None)
        try:
            self._write()
        except (OSError, ValueError) as error:
            session.events.add(f"no trace is written to {self.path}: {error}")
        else:
            session.events.add(f"a trace of {self._steps} steps is in {self.path}")
        self._profiler = None

    def _write(self) -> None:
        assert self._recorder is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            plain = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            trace = json.loads(plain.read_text(encoding="utf-8", errors="replace"), strict=False)
            self._recorder.add_to(trace)
            data = json.dumps(trace).encode()
            ready = Path(folder) / "ready"
            ready.write_bytes(gzip.compress(data, 5) if self.path.suffix == ".gz" else data)
            ready.replace(self.path)
