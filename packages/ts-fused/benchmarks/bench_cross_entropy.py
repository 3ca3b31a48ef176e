"""Chunked cross-entropy with its gradients, beside the full logits, Liger and cut-cross-entropy.

One JSON line per shape and contender: the median, the least and the most of several runs in ms, the
contenders taking turns; on CUDA the peak memory beyond the inputs. `gradient_error` is how far each gradient
of the hidden states is from that of full logits in fp32: cut-cross-entropy leaves small entries out.
`python bench_cross_entropy.py [--device cuda] [--quick] [--dtypes bfloat16] [--shape 8192,5120,152064]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ts_fused import _C, chunked_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def native(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Our loss with the default chunk size."""
    return chunked_cross_entropy(hidden, weight, targets)


def dense(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All logits, raised to fp32 as transformers does."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def contenders() -> dict[str, Loss]:
    """Everything that can be imported."""
    found: dict[str, Loss] = {"ts_fused": native, "dense": dense}
    if not torch.cuda.is_available():
        return found
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger"] = lambda hidden, weight, targets: liger(weight, hidden, targets)
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy

        found["cut_cross_entropy"] = linear_cross_entropy
    return found


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int = 512
) -> torch.Tensor:
    """The gradient of the mean loss by the hidden states, in fp32, some rows at a time."""
    parts = []
    for rows, wanted in zip(hidden.detach().split(chunk), targets.split(chunk), strict=True):
        inner = rows.float().requires_grad_()
        loss = F.cross_entropy(F.linear(inner, weight.detach().float()), wanted, reduction="sum")
        parts.append(torch.autograd.grad(loss / len(targets), inner)[0])
    return torch.cat(parts)


def step(
    loss: Loss, tensors: tuple[torch.Tensor, ...], train_head: bool
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Seconds of one loss with its gradients, and these."""
    hidden, weight, targets = tensors
    if hidden.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    wanted = (hidden, weight) if train_head else (hidden,)
    grads = torch.autograd.grad(loss(hidden, weight, targets), wanted)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, grads


def compare(
    tensors: tuple[torch.Tensor, ...], train_head: bool, runs: int
) -> dict[str, tuple[list[float], int | None, float]]:
    """For every contender: seconds of each run, bytes at the peak, relative error of the gradient."""
    found = contenders()
    times: dict[str, list[float]] = {name: [] for name in found}
    peak: dict[str, int | None] = dict.fromkeys(found)
    reference = exact(*tensors)
    error = {}
    for name, loss in list(found.items()):  # the first call compiles
        try:
            gradient = step(loss, tensors, train_head)[1][0]
        except Exception as problem:
            if name == "ts_fused":
                raise
            print(json.dumps({"benchmark": "cross_entropy", "name": name, "problem": str(problem)[-300:]}))
            del found[name]
            continue
        error[name] = float((gradient.float() - reference).norm() / reference.norm())
        del gradient
    del reference
    for _ in range(runs):
        for name, loss in found.items():
            if tensors[0].is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            times[name].append(step(loss, tensors, train_head)[0])
            if tensors[0].is_cuda:
                peak[name] = torch.cuda.max_memory_allocated() - before
    return {name: (times[name], peak[name], error[name]) for name in found}


def main() -> None:
    """Run all shapes and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="one small shape, two runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default %(default)s")
    parser.add_argument("--shape", action="append", help="ROWS,HIDDEN,VOCABULARY instead of the usual ones")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [(512, 576, 49152), (1024, 256, 32000), (2048, 64, 8192)]
    if args.device == "cuda":
        shapes = [(4096, 4096, 32000), (8192, 4096, 128256), (8192, 3584, 152064)]
    if args.quick:
        shapes = [(64, 64, 4096)]
    if args.shape:
        shapes = [tuple(map(int, shape.split(","))) for shape in args.shape]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    for rows, size, vocab in shapes:
        for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
            for train_head in (False, True):
                hidden = torch.randn(rows, size, device=args.device).to(dtype).requires_grad_()
                weight = (torch.randn(vocab, size, device=args.device) * 0.05).to(dtype)
                weight.requires_grad_(train_head)
                targets = torch.randint(0, vocab, (rows,), device=args.device)
                found = compare((hidden, weight, targets), train_head, 2 if args.quick else 7)
                for name, (took, peak, error) in found.items():
                    line = {
                        "benchmark": "cross_entropy",
                        "name": name,
                        "rows": rows,
                        "hidden": size,
                        "vocab": vocab,
                        "dtype": str(dtype).removeprefix("torch."),
                        "train_head": train_head,
                        "ms": round(statistics.median(took) * 1e3, 3),
                        "min_ms": round(min(took) * 1e3, 3),
                        "max_ms": round(max(took) * 1e3, 3),
                        "peak_bytes": peak,
                        "gradient_error": float(f"{error:.3g}"),
                        "device": gpu or platform.processor() or platform.machine(),
                        "threads": torch.get_num_threads(),
                        "isa": _C.isa(),
                        "torch": torch.__version__,
                    }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
