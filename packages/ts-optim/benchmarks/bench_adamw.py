"""Host AdamW: parameters and bytes per second beside torch's fused AdamW and a probe with the same traffic.

    python benchmarks/bench_adamw.py --sizes 64M 16M --threads 1 2 --out adamw.jsonl

One JSON line per measurement. The probe reads 4 and writes 3 fp32 streams in place with three
multiplications an element, on the same threads and pieces: what this memory gives to any AdamW step. Each
format of moments has a probe of its own, with their bytes (2 or 1 an element) in place of fp32 ones.
DeepSpeed's CPUAdam takes part where it can be imported.
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


def deepspeed(numel: int) -> Callable[[], None] | None:
    """DeepSpeed's host AdamW, where it is installed and builds."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return optimizer(DeepSpeedCPUAdam, [(numel,)], torch.float32, adamw_mode=True)
    except Exception as error:  # its kernel is built at first use, which fails in many ways
        sys.stderr.write(f"without DeepSpeed CPUAdam: {type(error).__name__}: {error}\n")
        return None


def probe(numel: int, nbytes: int, threads: int) -> Callable[[], None]:
    """A pass over 4 streams, 3 of them written, of which two have `nbytes` bytes an element."""
    a, b = torch.ones(numel), torch.ones(numel)
    if nbytes == 4:
        c, d = torch.ones(numel), torch.ones(numel)
        return lambda: _C.stream_probe_(a, b, c, d, threads=threads)
    c, d = (torch.zeros(numel * nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: _C.stream_probe_bytes_(a, b, c, d, threads=threads)


def large(numel: int, threads: int, rounds: int, repeat: int) -> list[dict]:
    """One big tensor: the memory's limit."""
    numel -= numel % 1024
    # Streams a step needs: gradient, weight, moments in; weight, moments (and the 16-bit weight) out.
    candidates, traffic, ruler = {}, {}, {}

    def add(name: str, run: Callable[[], None] | None, nbytes: float, of: str) -> None:
        if run is not None:
            candidates[name], traffic[name], ruler[name] = run, nbytes, of

    def ours(dtype: torch.dtype = torch.float32, **options) -> Callable[[], None]:
        return optimizer(OffloadAdamW, [(numel,)], dtype, threads=threads, **options)

    fused = optimizer(torch.optim.AdamW, [(numel,)], torch.float32, fused=True)
    add("probe", probe(numel, 4, threads), 28, "probe")
    add("probe, bf16 moments", probe(numel, 2, threads), 20, "probe, bf16 moments")
    add("probe, int8 moments", probe(numel, 1, threads), 16, "probe, int8 moments")
    add("ts_optim fp32", ours(), 28, "probe")
    add("torch fused fp32", fused, 28, "probe")
    add("DeepSpeed CPUAdam fp32", deepspeed(numel), 28, "probe")
    add("ts_optim, bf16 moments", ours(moment_dtype="bf16"), 20, "probe, bf16 moments")
    add("ts_optim, int8 moments", ours(moment_dtype="int8"), 16 + 16 / 256, "probe, int8 moments")
    add("ts_optim bf16 + master", ours(torch.bfloat16), 28, "probe")
    add(
        "ts_optim bf16 + master, int8 moments",
        ours(torch.bfloat16, moment_dtype="int8"),
        16,
        "probe, int8 moments",
    )
    add("ts_optim fp32, clipped", ours(max_grad_norm=1.0), 32, "probe")
    add("ts_optim fp32, average", ours(ema=0.999), 36, "probe")
    add("ts_optim fp32, measured", ours(measure_updates=True), 28, "probe")
    seconds = measure(candidates, rounds, repeat)
    return [
        {
            "case": "large",
            "what": name,
            "numel": numel,
            "threads": threads,
            "ms": round(s * 1e3, 3),
            "gparam_per_s": round(numel / s / 1e9, 3),
            "gb_per_s": round(numel * traffic[name] / s / 1e9, 2),
            "of_probe": round(seconds[ruler[name]] / s * traffic[name] / traffic[ruler[name]], 3),
            "of_fp32_moments": round(seconds["ts_optim fp32"] / s, 3),
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
