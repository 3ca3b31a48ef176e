"""Run benchmark scripts with `--smoke` and check that each prints JSON lines.

Usage: python tools/bench_smoke.py [WORD...]: all scripts in packages/*/benchmarks, or with words those whose
name contains one of them. A file that cannot be run by itself (no `__main__`) holds what scripts share, and
what reads a result instead of measuring (`READERS`) has tests of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300
READERS = {"timeline.py"}


def json_lines(text: str) -> list[dict]:
    """The lines that are JSON objects; a line that starts like one and is none raises ValueError."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def smoke(script: Path) -> str:
    """Run one script; return an empty string, or what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, script, "--smoke"], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {LIMIT_S} s"
    if done.returncode:
        return f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    try:
        return "" if json_lines(done.stdout) else "printed no JSON line"
    except ValueError as error:
        return f"a line is not JSON: {error}"


def main(words: list[str]) -> int:
    """Run the scripts and print a line for each."""
    scripts = sorted(ROOT.glob("packages/*/benchmarks/*.py"))
    scripts = [s for s in scripts if s.name not in READERS and "__main__" in s.read_text("utf-8")]
    scripts = [s for s in scripts if not words or any(w in s.name for w in words)]
    failures = 0
    for script in scripts:
        start = time.monotonic()
        problem = smoke(script)
        failures += bool(problem)
        verdict = f"FAILED: {problem}" if problem else "ok"
        print(f"{script.relative_to(ROOT)} {time.monotonic() - start:.1f} s {verdict}", flush=True)
    if not scripts:
        print("no benchmark script found")
    return int(failures > 0 or not scripts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
