"""Saved activations on the host, beside keeping them, recomputing them, and PyTorch's own `save_on_cpu`.

    python activation_offload.py --shape 7b --tokens 2048,8192 --steps 6 --out activations.jsonl
    python activation_offload.py --shape 1.5b --tokens 8192 --engines trainstream,trainstream-offload

LoRA on a bf16 base with `compare.py`, one fresh process an engine; its lines are printed, then one with
`"what": "activations"` for each number of tokens: step, peak of the allocator and bytes moved of each engine,
and steps as multiples of the resident one. `trainstream-offload` is `wrap(activation_offload=True)`,
`trainstream-recompute` `wrap(recompute=True)`, `stock-ckpt` transformers' checkpointing, `stock-save-on-cpu`
the forward pass under `torch.autograd.graph.save_on_cpu(pin_memory=True)`, which takes saved weights along.
`--ram-gb` ends a run that would take more RAM than that, and its line says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compare import emit, run_all
from engines import SHAPES

ENGINES = "trainstream,trainstream-offload,trainstream-recompute,stock,stock-ckpt,stock-save-on-cpu"
KEPT = (
    "step_s",
    "step_min_s",
    "step_max_s",
    "tokens_per_s",
    "peak_allocated_gb",
    "nvml_peak_gb",
    "ram_peak_gb",
)
MOVED = ("torch_pinned_gb", "h2d_gb_per_step", "d2h_gb_per_step", "policies", "cpu_cores", "error")


def row(line: dict, resident_s: float | None) -> dict:
    """What the last line says of one engine."""
    kept = {key: line[key] for key in (*KEPT, *MOVED) if key in line}
    if "error" not in line and resident_s:
        kept["step_frac"] = round(line["step_s"] / resident_s, 3)
    if "timeline" in line:
        kept["copy_under_compute"] = line["timeline"].get("copy_under_compute")
    return kept


def main() -> int:
    """Run every engine for every number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--tokens", default="2048,8192", help="tokens of a row (default %(default)s)")
    parser.add_argument("--engines", default=ENGINES, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="record N steps of each engine")
    parser.add_argument("--ram-gb", type=float, default=100.0, help="GiB (default %(default)s)")
    parser.add_argument("--wrap", nargs="+", default=[], metavar="KEY=VALUE", help="more options for wrap()")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny: does the script work")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.tokens, args.steps = "tiny", "32", 1
        args.engines = "trainstream-offload,stock-save-on-cpu"
    failed = False
    first, *others = args.tokens.split(",")
    words = ["--scenario", "tiny", "--shape", args.shape, "--tokens", first, "--steps", str(args.steps)]
    words += ["--also-tokens", *others] if others else []
    words += ["--ram-gb", str(args.ram_gb)]
    words += ["--profile", str(args.profile)] if args.profile else []
    words += ["--wrap", *args.wrap] if args.wrap else []
    runs = {}
    for engine in args.engines.split(","):
        runs[engine] = run_all(words, engine, args.timeout)
        for line in runs[engine]:
            kept = {key: value for key, value in line.items() if key != "scenario"}
            emit(args.out, {"bench": "activation_offload", "shape": args.shape, **kept})
    for at, tokens in enumerate((first, *others)):
        setting = {"bench": "activation_offload", "shape": args.shape, "tokens": int(tokens)}
        # A process that ends early ends with the line that says why.
        found = {engine: lines[min(at, len(lines) - 1)] for engine, lines in runs.items()}
        failed |= all("error" in line for line in found.values())
        least = next((line["step_s"] for line in found.values() if "error" not in line), None)
        table = {engine: row(line, least) for engine, line in found.items()}
        emit(args.out, {**setting, "what": "activations", "engines": table})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
