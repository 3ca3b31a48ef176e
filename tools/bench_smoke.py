"""Run benchmark scripts with `--smoke` and check that each prints JSON lines.

Usage: python tools/bench_smoke.py [WORD...]: all scripts in packages/*/benchmarks, or with words those whose
name contains one of them. A file that cannot be run by itself (no `__main__`) holds what scripts share, and
what reads a result instead of measuring (`READERS`) has tests of its own.

As many scripts run at once as this process has cores, `AT_ONCE` at most, each with one OpenMP thread unless
`OMP_NUM_THREADS` says otherwise: nothing is measured here. Each has its share of the machine, so the limit of
time grows with their number. Beside a GPU they run one after the other: its memory is shared, and what
`wrap()` measures of the machine is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300  # for a script that has the machine alone
AT_ONCE = 4
READERS = {"timeline.py"}


def json_lines(text: str) -> list[dict]:
    """The lines that are JSON objects; a line that starts like one and is none raises ValueError."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def smoke(script: Path, env: dict[str, str], limit_s: float) -> str:
    """Run one script; return an empty string, or what went wrong."""
    command = [sys.executable, script, "--smoke"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=env)
    except subprocess.TimeoutExpired:
        return f"not finished after {limit_s} s"
    if done.returncode:
        return f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    try:
        return "" if json_lines(done.stdout) else "printed no JSON line"
    except ValueError as error:
        return f"a line is not JSON: {error}"


def timed(script: Path, env: dict[str, str], limit_s: float) -> tuple[str, float]:
    """What `smoke` returns, and the seconds that it took."""
    start = time.monotonic()
    return smoke(script, env, limit_s), time.monotonic() - start


def at_once(scripts: int) -> int:
    """How many scripts run at the same time."""
    if Path("/dev/nvidiactl").exists():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, AT_ONCE, scripts)


def run_all(scripts: list[Path], workers: int, env: dict[str, str]) -> int:
    """Run the scripts, `workers` at once; print a line for each as it ends, return how many failed."""
    failures = 0
    pool = ThreadPoolExecutor(workers)
    try:
        running = {pool.submit(timed, script, env, workers * LIMIT_S): script for script in scripts}
        for done in as_completed(running):
            problem, seconds = done.result()
            failures += bool(problem)
            verdict = f"FAILED: {problem}" if problem else "ok"
            print(f"{running[done].relative_to(ROOT)} {seconds:.1f} s {verdict}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further script starts
    return failures


def main(words: list[str]) -> int:
    """Run the scripts and print a line for each."""
    scripts = sorted(ROOT.glob("packages/*/benchmarks/*.py"))
    scripts = [s for s in scripts if s.name not in READERS and "__main__" in s.read_text("utf-8")]
    scripts = [s for s in scripts if not words or any(w in s.name for w in words)]
    if not scripts:
        print("no benchmark script found")
        return 1
    workers = at_once(len(scripts))
    env = dict(os.environ) if workers == 1 else {"OMP_NUM_THREADS": "1", **os.environ}
    return int(run_all(scripts, workers, env) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
