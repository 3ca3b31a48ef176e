"""A run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Steps are slices, bytes by tier and what a step moved are counters, events are marks. Where a profiler's trace
of some steps is given, all of it is kept and the run's own tracks are laid beside it, on the same clock.
"""

from __future__ import annotations

from typing import Any

from trainstream._runs import Run, number

__all__ = ["chrome_trace"]

_PID = 1  # no user's process has it
_STEPS, _EVENTS = 1, 2


def chrome_trace(run: Run | None, trace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write a run as a Chrome trace.

    Args:
        run: The run, or None to return the trace alone.
        trace: A trace of some of its steps by `torch.profiler`, or None.

    Returns:
        The trace, as data: times in microseconds since the run began, or since what `trace` counts from.
    """
    events = list(trace["traceEvents"]) if trace is not None else []
    if run is None:
        return {**(trace or {}), "traceEvents": events}
    base = number((trace or {}).get("baseTimeNanoseconds"))
    began = number(run.start.get("time")) or min((s["time"] for s in run.steps), default=run.last)
    zero = base / 1e9 if base is not None else began
    name = f"TrainStream: {run.start.get('model', 'run')}"
    events.append({"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": name}})
    for track, label in ((_STEPS, "steps"), (_EVENTS, "events")):
        events.append({"ph": "M", "name": "thread_name", "pid": _PID, "tid": track, "args": {"name": label}})
    for step in run.steps:
        events += _of_step(step, zero)
    for when, text in run.notes:
        events.append({"ph": "i", "s": "p", "name": text, "pid": _PID, "tid": _EVENTS, "ts": _us(when, zero)})
    return {"displayTimeUnit": "ms", **(trace or {}), "traceEvents": events}


def _us(when: float, zero: float) -> float:
    return round((when - zero) * 1e6, 3)


def _of_step(step: dict[str, Any], zero: float) -> list[dict[str, Any]]:
    seconds, end = step["step_s"] or 0.0, step["time"]
    at = _us(end - seconds, zero)
    told = {key: step[key] for key in ("limiter", "share_of_bound", "tokens", "stall_s", "moved")}
    found: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": f"step {step['step']}",
            "cat": "ts_step",
            "pid": _PID,
            "tid": _STEPS,
            "ts": at,
            "dur": round(seconds * 1e6, 3),
            "args": told,
        }
    ]
    counters = {"bytes by tier": step["tiers"], "bytes moved in a step": step["moved"]}
    counters["seconds waited in a step"] = step["stall_s"]
    for name, values in counters.items():
        if values:
            found.append(
                {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": _us(end, zero), "args": values}
            )
    return found
