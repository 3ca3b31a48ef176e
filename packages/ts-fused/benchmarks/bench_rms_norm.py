"""RMSNorm, forward and backward, beside the PyTorch expression and `torch.nn.functional.rms_norm`.

One JSON line per shape and contender: the best time of a call in microseconds, the contenders taking turns
for several rounds. Bytes over time, beside a copy: `bench_add_rms_norm.py`.
`python bench_rms_norm.py [--device cuda] [--quick]`
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ts_fused import _C, reference, rms_norm

EPS = 1e-6


def native(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Our kernel."""
    return rms_norm(x, weight, EPS)


def expression(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the modules of transformers compute."""
    return reference.rms_norm(x, weight, EPS)


def functional(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's own operation: another rounding order for 16-bit inputs."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def contenders() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Everything that can be imported."""
    found = {"ts_fused": native, "expression": expression, "F.rms_norm": functional}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return found
    if torch.cuda.is_available():
        found["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    return found


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Best time of one call."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Run all shapes and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="one small shape, two rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [(512, 576), (2048, 2048), (1024, 4096), (8192, 128)]
    if args.device == "cuda":
        shapes += [(4096, 5120), (8192, 4096), (8192, 8192)]
    rounds, repeats = (2, 3) if args.quick else (5, 15)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    for rows, hidden in shapes[:1] if args.quick else shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, hidden, device=args.device).to(dtype).requires_grad_()
            weight = torch.randn(hidden, device=args.device).to(dtype).requires_grad_()
            grad = torch.randn(rows, hidden, device=args.device).to(dtype)
            best: dict[tuple[str, str], float] = {}
            peak: dict[str, int] = {}
            for _ in range(rounds):
                for name, function in contenders().items():

                    def both(function: Callable = function, x=x, weight=weight, grad=grad) -> object:
                        return torch.autograd.grad(function(x, weight), (x, weight), grad)

                    forward = torch.no_grad()(functools.partial(function, x, weight))
                    if args.device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    for phase, call in (("forward", forward), ("both", both)):
                        call()
                        took = seconds(call, args.device, repeats)
                        best[name, phase] = min(took, best.get((name, phase), took))
                    if args.device == "cuda":
                        peak[name] = torch.cuda.max_memory_allocated()
            for (name, phase), took in best.items():
                line = {
                    "benchmark": "rms_norm",
                    "name": name,
                    "phase": phase,
                    "rows": rows,
                    "hidden": hidden,
                    "dtype": str(dtype).removeprefix("torch."),
                    "us": round(took * 1e6, 1),
                    "peak_bytes": peak.get(name),
                    "device": gpu or platform.processor() or platform.machine(),
                    "threads": torch.get_num_threads(),
                    "isa": _C.isa(),
                    "torch": torch.__version__,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
