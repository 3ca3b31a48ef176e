"""Host AdamW: parameters and bytes per second beside torch's fused AdamW and a probe with the same traffic.

    python benchmarks/bench_adamw.py --sizes 64M 16M --threads 1 2 --out adamw.jsonl

One JSON line per measurement. The probe reads 4 and writes 3 fp32 streams in place with three
multiplications an element, on the same threads and pieces: what this memory gives to any AdamW step.
Candidates take turns within a round; a figure is the best of the rounds' medians, because other users of a
machine only ever slow it down. `small` is many small tensors (LoRA factors) in one step, Python included.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ts_optim import _C, OffloadAdamW, __version__

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(text: str) -> int:
    """Read "64M" as 64,000,000 elements."""
    return int(float(text[:-1]) * _UNITS[text[-1]]) if text[-1] in _UNITS else int(text)


def hardware() -> dict:
    """Describe the machine and the versions."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "isa": _C.isa(),
        "torch": torch.__version__,
        "ts_optim": __version__,
        "python": platform.python_version(),
    }


def measure(candidates: dict[str, Callable[[], None]], rounds: int, repeat: int) -> dict[str, float]:
    """Return seconds a call: the best over rounds of the median over calls."""
    best = dict.fromkeys(candidates, float("inf"))
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            times = []
            for _ in range(repeat):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            best[name] = min(best[name], statistics.median(times))
    return best


def optimizer(
    make: Callable, shapes: list[tuple[int, ...]], dtype: torch.dtype, **options
) -> Callable[[], None]:
    """Make an optimizer over fresh parameters with gradients, and return its step."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    return make(params, **options).step


def large(numel: int, threads: int, rounds: int, repeat: int) -> list[dict]:
    """One big tensor: the memory's limit."""
    probe = [torch.ones(numel) for _ in range(4)]
    ours = {"threads": threads}
    candidates = {
        "probe": lambda: _C.stream_probe_(*probe, threads=threads),
        "ts_optim fp32": optimizer(OffloadAdamW, [(numel,)], torch.float32, **ours),
        "torch fused fp32": optimizer(torch.optim.AdamW, [(numel,)], torch.float32, fused=True),
        "ts_optim bf16 + master": optimizer(OffloadAdamW, [(numel,)], torch.bfloat16, **ours),
        "ts_optim fp32, clipped": optimizer(
            OffloadAdamW, [(numel,)], torch.float32, max_grad_norm=1.0, **ours
        ),
    }
    # Streams a step needs: gradient, weight, moments in; weight, moments (and the 16-bit weight) out.
    traffic = {"ts_optim bf16 + master": 28, "ts_optim fp32, clipped": 32}
    seconds = measure(candidates, rounds, repeat)
    return [
        {
            "case": "large",
            "what": name,
            "numel": numel,
            "threads": threads,
            "ms": round(s * 1e3, 3),
            "gparam_per_s": round(numel / s / 1e9, 3),
            "gb_per_s": round(numel * traffic.get(name, 28) / s / 1e9, 2),
            "of_probe": round(seconds["probe"] / s * traffic.get(name, 28) / 28, 3),
        }
        for name, s in seconds.items()
    ]


def small(threads: int, rounds: int, repeat: int) -> list[dict]:
    """448 LoRA factors of rank 16: the cost of a step that has little to do."""
    shapes = [(16, 1024), (1024, 16)] * 224
    candidates = {
        "ts_optim": optimizer(OffloadAdamW, shapes, torch.float32, threads=threads),
        "torch fused": optimizer(torch.optim.AdamW, shapes, torch.float32, fused=True),
        "torch foreach": optimizer(torch.optim.AdamW, shapes, torch.float32, foreach=True),
    }
    seconds = measure(candidates, rounds, repeat)
    return [
        {"case": "small", "what": name, "tensors": 448, "threads": threads, "ms": round(s * 1e3, 3)}
        for name, s in seconds.items()
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["64M"], help="elements of the large tensor")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sizes, arguments.rounds, arguments.repeat = ["1M"], 1, 1
    machine = hardware()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        results = [
            r
            for n in arguments.sizes
            for r in large(parse_size(n), threads, arguments.rounds, arguments.repeat)
        ]
        results += small(threads, arguments.rounds, arguments.repeat)
        for result in results:
            line = json.dumps({**result, **machine})
            sys.stdout.write(line + "\n")
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
