"""Attention with each backend of `scaled_dot_product_attention`, on the shapes of real models.

One JSON line per shape: seconds of a forward and backward pass by what PyTorch chooses itself (`own`) and by
each backend that can compute it, the backend that `wrap(attention="auto")` would put first (None: PyTorch's
own order), and the share of the time that it saves.
`python bench_attention.py [--device cuda] [--quick] [--repeats N] [--deterministic]`
"""

from __future__ import annotations

import argparse
import json
import platform

import torch

from ts_fused import time_attention

# Model, query heads, key heads, head dimension.
MODELS = [
    ("7B", 28, 4, 128),
    ("8B", 32, 8, 128),
    ("14B", 40, 8, 128),
    ("27B of 256", 16, 8, 256),
    ("0.5B", 14, 2, 64),
]
# Rows and tokens of a step.
STEPS = [(1, 512), (1, 2048), (2, 2048), (1, 8192)]
SMALL = [("tiny", 4, 2, 32)], [(1, 64)]


def measure(name: str, sizes: tuple[int, int, int], step: tuple[int, int], args: argparse.Namespace) -> dict:
    """Time one model's attention on one step's shape."""
    (heads, keys, dim), (rows, tokens) = sizes, step
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    # Laid out as the projections leave them: (rows, tokens, heads, dim), seen by heads.
    q, k, v = (
        torch.empty(rows, tokens, n, dim, device=args.device, dtype=dtype).transpose(1, 2)
        for n in (heads, keys, keys)
    )
    times = time_attention(q, k, v, repeats=args.repeats, is_causal=True, enable_gqa=heads != keys)
    first = times.fastest
    return {
        "benchmark": "attention",
        "model": name,
        "rows": rows,
        "tokens": tokens,
        "heads": [heads, keys, dim],
        "dtype": str(dtype).removeprefix("torch."),
        "own_us": round(times.own * 1e6, 1),
        "backends_us": {key: round(seconds * 1e6, 1) for key, seconds in times.backends.items()},
        "first": first,
        "saved_frac": round(1.0 - times.backends[first] / times.own, 4) if first else 0.0,
        "n": args.repeats,
        "deterministic": args.deterministic,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="one small shape")
    parser.add_argument("--repeats", type=int, default=20, help="passes that are timed, of each")
    parser.add_argument("--deterministic", action="store_true", help="with deterministic algorithms")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(args.deterministic)
    if args.quick:
        args.repeats = 2
    models, steps = SMALL if args.quick else (MODELS, STEPS)
    for name, *sizes in models:
        for step in steps:
            print(json.dumps(measure(name, (sizes[0], sizes[1], sizes[2]), step, args)), flush=True)


if __name__ == "__main__":
    main()
