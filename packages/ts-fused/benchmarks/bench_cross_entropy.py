"""Chunked cross-entropy with its gradients, beside `F.cross_entropy` of the full logits.

One JSON line per shape and contender: the best of several runs in milliseconds, the contenders taking
turns; on CUDA the peak memory beyond the inputs. `python bench_cross_entropy.py [--device cuda] [--quick]`
"""

from __future__ import annotations

import argparse
import json
import platform
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
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return found
    if torch.cuda.is_available():
        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger"] = lambda hidden, weight, targets: liger(weight, hidden, targets)
    return found


def step(loss: Loss, tensors: tuple[torch.Tensor, ...], train_head: bool) -> float:
    """Seconds of one loss with its gradients."""
    hidden, weight, targets = tensors
    if hidden.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    wanted = (hidden, weight) if train_head else (hidden,)
    torch.autograd.grad(loss(hidden, weight, targets), wanted)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Run all shapes and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="one small shape, two runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [(512, 576, 49152), (1024, 256, 32000), (2048, 64, 8192)]
    if args.device == "cuda":
        shapes = [(4096, 4096, 32000), (8192, 4096, 128256), (8192, 3584, 152064)]
    if args.quick:
        shapes = [(64, 64, 4096)]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    for rows, size, vocab in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for train_head in (False, True):
                hidden = torch.randn(rows, size, device=args.device).to(dtype).requires_grad_()
                weight = (torch.randn(vocab, size, device=args.device) * 0.05).to(dtype)
                weight.requires_grad_(train_head)
                targets = torch.randint(0, vocab, (rows,), device=args.device)
                best: dict[str, float] = {}
                peak: dict[str, int] = {}
                for _ in range(2 if args.quick else 5):
                    for name, loss in contenders().items():
                        if args.device == "cuda":
                            torch.cuda.reset_peak_memory_stats()
                            before = torch.cuda.memory_allocated()
                        took = step(loss, (hidden, weight, targets), train_head)
                        best[name] = min(took, best.get(name, took))
                        if args.device == "cuda":
                            peak[name] = torch.cuda.max_memory_allocated() - before
                for name, took in best.items():
                    line = {
                        "benchmark": "cross_entropy",
                        "name": name,
                        "rows": rows,
                        "hidden": size,
                        "vocab": vocab,
                        "dtype": str(dtype).removeprefix("torch."),
                        "train_head": train_head,
                        "ms": round(took * 1e3, 3),
                        "peak_bytes": peak.get(name),
                        "device": gpu or platform.processor() or platform.machine(),
                        "threads": torch.get_num_threads(),
                        "isa": _C.isa(),
                        "torch": torch.__version__,
                    }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
