"""What several runs say together: equal bit for bit, or faster by more than the runs differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

__all__ = ["close", "equality", "pairs", "with_bound"]

CLOSE = 0.10  # engines whose steps differ by less are run more often
RUNS = 3


def equality(results: list[dict]) -> dict:
    """Compare the losses and the trained weights of all runs with those of the first."""
    good = [result for result in results if "losses_exact" in result]
    first = good[0]["losses_exact"] if good else []
    steps = [
        next((i for i, (a, b) in enumerate(zip(first, r["losses_exact"], strict=True)) if a != b), None)
        for r in good
    ]
    different = [step for step in steps if step is not None]
    return {
        "what": "equality",
        "engines": [result["engine"] for result in results],
        "steps": len(first),
        "losses_equal": len(good) == len(results) > 1 and not different,
        "weights_equal": len(good) == len(results) > 1 and len({r["trained_sha256"] for r in good}) == 1,
        "first_difference": min(different, default=None),
    }


def _times(results: Iterable[dict]) -> dict[str, list[float]]:
    """Seconds of a step in each run of every engine that ran."""
    found: dict[str, list[float]] = {}
    for result in results:
        if "step_s" in result:
            found.setdefault(result["engine"], []).append(result["step_s"])
    return found


def _compared(results: Iterable[dict]) -> list[tuple[str, list[float], str, list[float]]]:
    """Every engine of ours beside every rival."""
    times = _times(results)
    ours = {name: seconds for name, seconds in times.items() if name.startswith("trainstream")}
    rivals = {name: seconds for name, seconds in times.items() if name not in ours}
    return [(a, ours[a], b, rivals[b]) for a in ours for b in rivals]


def close(results: Iterable[dict]) -> list[str]:
    """Engines that have to run again: one of a pair within 10 % that ran less than three times.

    Args:
        results: Lines of `compare.py`.
    """
    again: dict[str, None] = {}
    for ours, own, rival, others in _compared(results):
        if abs(statistics.median(own) / statistics.median(others) - 1) <= CLOSE:
            again |= {name: None for name, runs in ((ours, own), (rival, others)) if len(runs) < RUNS}
    return list(again)


def pairs(results: Iterable[dict]) -> dict[str, Any]:
    """The line that says which engine of ours is faster than which rival, beyond the spread of their runs.

    Args:
        results: Lines of `compare.py`.
    """
    rows = []
    for ours, own, rival, others in _compared(results):
        spread = max(max(runs) - min(runs) for runs in (own, others))
        ahead = statistics.median(others) - statistics.median(own)
        enough = min(len(own), len(others)) >= RUNS or abs(ahead) > CLOSE * statistics.median(others)
        rows.append(
            {
                "ours": ours,
                "rival": rival,
                "runs_s": [own, others],
                "ratio": round(statistics.median(own) / statistics.median(others), 4),
                "spread_s": round(spread, 5),
                "faster": ahead > spread if enough else None,
            }
        )
    return {"what": "pairs", "pairs": rows}


def with_bound(result: dict, found: dict) -> dict:
    """Add the parts, the bound that follows from them, and the step over it."""
    if "error" in found or "error" in result:
        return {**result, "parts": found}
    bound = found["t_bwd_s"] + max(found["t_fwd_s"], found["t_adamw_s"])
    frac = result["step_s"] / bound
    return {**result, "parts": found, "bound_s": round(bound, 5), "bound_frac": round(frac, 4)}
