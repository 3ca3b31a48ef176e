"""Bytes of RAM that AdamW needs for each trained parameter, by the format of its moments.

    python host_bytes.py --scenario full1.5b
    python host_bytes.py --scenario tiny-full --weights fp32

Each format runs a few steps of `compare.py`'s full fine-tune in a fresh process. One JSON line each:
`state_bytes_per_parameter` counts moments and fp32 masters as the optimizer holds them (12 / 8 / 6.03 with
float32 / bfloat16 / int8 moments; an fp32 parameter that is in RAM itself is its own master),
`ram_bytes_per_parameter` is the RAM that the process used at most while stepping, above what it used before
the model was built: buffers of gradients and 16-bit weights in RAM come on top of the state there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compare import emit, run_one
from scenarios import SCENARIOS

ENGINES = {"fp32": "trainstream-full", "bf16": "trainstream-full-bf16"}


def main() -> int:
    """Run every format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    full = sorted(name for name, row in SCENARIOS.items() if row.kind == "full")
    parser.add_argument("--scenario", choices=full, default="full1.5b")
    parser.add_argument("--weights", default="fp32,bf16", help="formats of weights (default %(default)s)")
    parser.add_argument("--moments", default="fp32,bf16,int8", help="and of moments (default %(default)s)")
    parser.add_argument("--wrap", nargs="+", default=[], metavar="KEY=VALUE", help="more options for wrap()")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny: does the script work")
    args = parser.parse_args()
    if args.smoke:
        args.scenario, args.weights, args.moments, args.steps = "tiny-full", "fp32", "int8", 1
    failed = False
    for weights in args.weights.split(","):
        for moments in args.moments.split(","):
            words = ["--scenario", args.scenario, "--steps", str(args.steps)]
            words += ["--wrap", f"moment_dtype={moments}", *args.wrap]
            found = run_one(words, ENGINES[weights], args.timeout)
            line = {"bench": "host_bytes", "scenario": args.scenario, "weights": weights, "moments": moments}
            if "error" in found:
                failed = True
                emit(args.out, {**line, "error": found["error"]})
                continue
            count = found["trained_parameters"]
            kinds = ("host", "device", "disk")
            emit(
                args.out,
                {
                    **line,
                    "state_bytes_per_parameter": sum(
                        found.get(f"{kind}_state_bytes_per_parameter", 0.0) for kind in ("host", "disk")
                    ),
                    **{f"{k}_state_bytes": found.get(f"{k}_state_bytes_per_parameter", 0.0) for k in kinds},
                    "ram_bytes_per_parameter": round(found["ram_peak_gb"] * 1e9 / count, 3),
                    "trained_parameters": count,
                    "step_s": found["step_s"],
                    "device": found["device"],
                    "versions": found["versions"],
                },
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
