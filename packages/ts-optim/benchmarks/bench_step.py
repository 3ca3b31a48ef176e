"""What `step()` costs in Python: guarded parameters, whose updates run behind it.

    python benchmarks/bench_step.py --threads 1 --out step.jsonl

To measure elsewhere, carry along this file. 338 parameters of 16 elements in 28 ranks, as many as a model of
1.5 billion weights has: next to nothing is computed, so what is left is bookkeeping. `first_ms` is the time
from the call of `step()` to the first call of the kernel, `step_ms` to its return, `all_ms` to the end of the
last update. Medians, and the best of the rounds' medians, over calls in one process.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from ts_core.guard import guard
from ts_optim import _C, OffloadAdamW, __version__, kernel

RANKS, PER_RANK = 28, 12


class Noting:
    """Stands where the native module is, and notes when the first call of a step came."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.first = 0.0

    def __getattr__(self, name: str) -> object:
        """Give what the native module has."""
        return getattr(_C, name)

    def adamw_step_(self, *arguments: object) -> None:
        """Note the time, and update."""
        self.first = self.first or time.perf_counter()
        _C.adamw_step_(*arguments)


def build(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Make guarded parameters, and two that come before and after the blocks."""
    params = []
    for rank in range(-1, RANKS + 1):
        for _ in range(PER_RANK if 0 <= rank < RANKS else 1):
            p = torch.nn.Parameter(torch.randn(4, 4).to(dtype))
            guard(p, lambda p, g: None).rank = rank
            params.append(p)
    return params


def measure(dtype: torch.dtype, options: dict, rounds: int, repeat: int) -> dict[str, float]:
    """Return milliseconds."""
    noting = Noting()
    kernel._C = noting  # type: ignore[assignment]
    params = build(dtype)
    optimizer = OffloadAdamW(params, **options)
    found: dict[str, list[list[float]]] = {"first_ms": [], "step_ms": [], "all_ms": []}
    for _ in range(rounds):
        each: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(repeat):
            for p in params:
                p.grad = torch.ones(4, 4, dtype=dtype)
            noting.first = 0.0
            start = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            optimizer.synchronize()
            last = time.perf_counter()
            for name, moment in (("first_ms", noting.first), ("step_ms", end), ("all_ms", last)):
                each[name].append(1e3 * (moment - start))
            optimizer.zero_grad()
        for name, times in each.items():
            found[name].append(times)
    result = {}
    for name, runs in found.items():
        result[name] = round(min(map(statistics.median, runs)), 3)
        result["median_" + name] = round(statistics.median([x for run in runs for x in run]), 3)
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--label", help="a word for the lines, such as the version")
    parser.add_argument("--smoke", action="store_true", help="once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds = arguments.repeat = 1
    torch.set_num_threads(arguments.threads)
    for dtype in (torch.bfloat16, torch.float32):
        for clip in (None, 1.0):
            line = {
                "case": "step",
                "what": f"{RANKS * PER_RANK + 2} guarded parameters, {str(dtype).removeprefix('torch.')}"
                + (", clipped" if clip else ""),
                "label": arguments.label,
                "threads": arguments.threads,
                **measure(dtype, {"max_grad_norm": clip}, arguments.rounds, arguments.repeat),
                "cpu": platform.processor(),
                "torch": torch.__version__,
                "ts_optim": __version__,
                "python": platform.python_version(),
            }
            text = json.dumps(line) + "\n"
            sys.stdout.write(text)
            sys.stdout.flush()
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(text)


if __name__ == "__main__":
    main()
