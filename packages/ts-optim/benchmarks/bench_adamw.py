"""Host AdamW: parameters and bytes per second beside rivals and a probe with the same traffic.

    python benchmarks/bench_adamw.py --sizes 1M 64M 256M --threads 1 2 4 8 16 --out adamw.jsonl
    python benchmarks/bench_adamw.py --rivals deepspeed bitsandbytes --deepspeed deepspeed-0.18.2.tar.gz

To measure elsewhere, carry along:
    benchmarks/bench_adamw.py
    benchmarks/adamw_rivals.py
    the sdist of DeepSpeed (pip download --no-deps --no-binary :all: deepspeed), for --rivals deepspeed;
        it is compiled there, which needs g++ and Python's headers
    bitsandbytes, installed, for --rivals bitsandbytes

One JSON line per measurement; a rival that cannot take part has a line with the reason. The probe reads 4 and
writes 3 fp32 streams in place with 3 multiplications an element, on the same threads and pieces: what the
memory gives to any AdamW step. Each format of moments has a probe of its own, with their bytes (2 or 1 an
element) in place of fp32 ones; `of_probe` compares bytes per second with it. 16-bit weights are read as well
as written, beside their fp32 masters, because somebody may have edited them: 30 bytes a parameter with fp32
moments. Candidates take turns within a round. `ms` is the best of the rounds' medians, because other users of
a machine only ever slow it down; `median_ms` is over all calls. `small` is many small tensors (LoRA factors)
in one step, Python included. All candidates update the same weights by the same gradients, each with moments
of its own.
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
from adamw_rivals import DeepSpeed, NotAvailable, Step, bitsandbytes_8bit

from ts_optim import _C, OffloadAdamW, __version__

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}
_FORMATS = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / 256}


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


def measure(candidates: dict[str, Step], rounds: int, repeat: int) -> dict[str, tuple[float, float]]:
    """Return seconds a call: the best over rounds of the median over calls, and the median over all calls."""
    best = dict.fromkeys(candidates, float("inf"))
    every: dict[str, list[float]] = {name: [] for name in candidates}
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
            every[name] += times
    return {name: (best[name], statistics.median(every[name])) for name in candidates}


class Tensors:
    """Weights and gradients that all candidates share, by dtype."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        """Take the shapes; tensors are made when asked for."""
        self._shapes = shapes
        self._made: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def pairs(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return weights and gradients."""
        if dtype not in self._made:
            make = [[torch.randn(shape).to(dtype) for shape in self._shapes] for _ in range(2)]
            self._made[dtype] = (make[0], make[1])
        return self._made[dtype]

    def step(self, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: object) -> Step:
        """Make an optimizer over them, and return its step."""
        weights, grads = self.pairs(dtype)
        params = [torch.nn.Parameter(w) for w in weights]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        return make(params, **options).step


class Rivals:
    """Rivals by name, and the reasons of those that are not there."""

    def __init__(self, names: list[str], deepspeed: Path | None) -> None:
        """Prepare what was asked for."""
        self.missing: dict[str, str] = {}
        self._names = names
        self._deepspeed: DeepSpeed | None = None
        if "deepspeed" in names:
            try:
                self._deepspeed = DeepSpeed(deepspeed)
            except NotAvailable as reason:
                self.missing["DeepSpeed CPUAdam"] = str(reason)

    def steps(self, tensors: Tensors) -> dict[str, tuple[Step, str]]:
        """Return steps and their format of moments."""
        found: dict[str, tuple[Step, str]] = {}
        if self._deepspeed is not None:
            found["DeepSpeed CPUAdam"] = (self._deepspeed.step(*tensors.pairs(torch.float32)), "fp32")
        if "bitsandbytes" in self._names and "bitsandbytes AdamW8bit" not in self.missing:
            try:
                run = bitsandbytes_8bit(lambda make, **kw: tensors.step(make, torch.float32, **kw))
                found["bitsandbytes AdamW8bit"] = (run, "int8")
            except NotAvailable as reason:
                self.missing["bitsandbytes AdamW8bit"] = str(reason)
        return found


def probe(numel: int, nbytes: int, threads: int) -> Step:
    """A pass over 4 streams, 3 of them written, of which two have `nbytes` bytes an element."""
    a, b = torch.ones(numel), torch.ones(numel)
    if nbytes == 4:
        c, d = torch.ones(numel), torch.ones(numel)
        return lambda: _C.stream_probe_(a, b, c, d, threads=threads)
    c, d = (torch.zeros(numel * nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: _C.stream_probe_bytes_(a, b, c, d, threads=threads)


def large(numel: int, threads: int, rounds: int, repeat: int, rivals: Rivals) -> list[dict]:
    """One big tensor: the memory's limit."""
    numel -= numel % 1024
    tensors = Tensors([(numel,)])
    candidates: dict[str, Step] = {}
    traffic: dict[str, float] = {}
    ruler: dict[str, str] = {}

    def add(name: str, run: Step, moments: str, extra: float = 0.0) -> None:
        # gradient and weight in, weight out; both moments in and out
        candidates[name], traffic[name] = run, 12 + 4 * _FORMATS[moments] + extra
        ruler[name] = f"probe, {moments} moments"

    def ours(dtype: torch.dtype = torch.float32, **options: object) -> Step:
        return tensors.step(OffloadAdamW, dtype, threads=threads, **options)

    for moments, nbytes in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        name = f"probe, {moments} moments"
        add(name, probe(numel, nbytes, threads), moments)
        traffic[name] = 12 + 4 * nbytes
    for moments in _FORMATS:
        add(f"ts_optim, {moments} moments", ours(moment_dtype=moments), moments)
    for moments in _FORMATS:  # a 16-bit gradient; 16-bit weights in and out
        add(
            f"ts_optim bf16 weights, {moments} moments",
            ours(torch.bfloat16, moment_dtype=moments),
            moments,
            2,
        )
    add("torch fused", tensors.step(torch.optim.AdamW, torch.float32, fused=True), "fp32")
    for name, (run, moments) in rivals.steps(tensors).items():
        add(name, run, moments)
    add("ts_optim, fp32 moments, clipped", ours(max_grad_norm=1.0), "fp32", 4)
    add("ts_optim, fp32 moments, average", ours(ema=0.999), "fp32", 8)
    add("ts_optim, fp32 moments, measured", ours(measure_updates=True), "fp32")
    seconds = measure(candidates, rounds, repeat)
    fp32 = seconds["ts_optim, fp32 moments"][0]
    lines = []
    for name, (best, middle) in seconds.items():
        of_probe = seconds[ruler[name]][0] / best * traffic[name] / traffic[ruler[name]]
        lines.append(
            {
                "case": "large",
                "what": name,
                "numel": numel,
                "threads": threads,
                "ms": round(best * 1e3, 3),
                "median_ms": round(middle * 1e3, 3),
                "gparam_per_s": round(numel / best / 1e9, 3),
                "gb_per_s": round(numel * traffic[name] / best / 1e9, 2),
                "of_probe": round(of_probe, 3),
                "of_fp32_moments": round(fp32 / best, 3),
            }
        )
    return lines


def small(threads: int, rounds: int, repeat: int, rivals: Rivals) -> list[dict]:
    """448 LoRA factors of rank 16: the cost of a step that has little to do."""
    tensors = Tensors([(16, 1024), (1024, 16)] * 224)
    candidates = {
        f"ts_optim, {moments} moments": tensors.step(
            OffloadAdamW, torch.float32, threads=threads, moment_dtype=moments
        )
        for moments in _FORMATS
    }
    candidates["torch fused"] = tensors.step(torch.optim.AdamW, torch.float32, fused=True)
    candidates["torch foreach"] = tensors.step(torch.optim.AdamW, torch.float32, foreach=True)
    candidates |= {name: run for name, (run, _) in rivals.steps(tensors).items()}
    return [
        {
            "case": "small",
            "what": name,
            "tensors": 448,
            "threads": threads,
            "ms": round(best * 1e3, 3),
            "median_ms": round(middle * 1e3, 3),
        }
        for name, (best, middle) in measure(candidates, rounds, repeat).items()
    ]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=["64M"], help="elements of the large tensor")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rivals", nargs="*", default=[], choices=["deepspeed", "bitsandbytes"])
    parser.add_argument("--deepspeed", type=Path, help="folder or .tar.gz with DeepSpeed's sources")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sizes, arguments.rounds, arguments.repeat = ["1M"], 1, 1
    return arguments


def main() -> None:
    """Run and print."""
    arguments = parse()
    machine = hardware()
    rivals = Rivals(arguments.rivals, arguments.deepspeed)

    def write(results: list[dict]) -> None:
        lines = "".join(json.dumps({**result, **machine}) + "\n" for result in results)
        sys.stdout.write(lines)
        sys.stdout.flush()
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(lines)

    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for size in arguments.sizes:
            write(large(parse_size(size), threads, arguments.rounds, arguments.repeat, rivals))
        write(small(threads, arguments.rounds, arguments.repeat, rivals))
    write([{"case": "not available", "what": name, "reason": why} for name, why in rivals.missing.items()])


if __name__ == "__main__":
    main()
