"""LoRA steps with every weight streamed, beside the resident step of the same engine and what bounds them.

    python stream_bound.py --shapes 7b,14b --codecs none,nf4 --tokens 512,4096 --steps 10 --out stream.jsonl
    python stream_bound.py --shapes 7b --codecs none --tokens 512 --vram-budget 12GiB --profile 2

For each shape and codec, `compare.py` runs the engine resident and streamed, each in a fresh process with the
same kernels and activations kept, and in it one number of tokens after the other; for each of them both lines
are printed, then one with `"what": "bound"`:

- `bound_s` = max(resident step, least bytes / link), `bound_frac` = streamed step / bound. The link is what a
  plain page-locked copy reaches in the streamed process.
- least bytes: without a budget all blocks are paged, forward and backward each move them once, and what is in
  the slots at either turn need not move: 2 (paged - slots). With `--vram-budget`, the cap on what PyTorch
  may reserve has room for some of the weights beside everything else that the step was measured to need:
  2 (weights - (cap - other)), less the slots.
- `moved_frac` = bytes moved / least bytes; `compute_frac` = resident step / (least bytes / link): from 1.5 on
  compute hides the copies, below 1 the link is the bound.

With `--profile N` the bound line has `copy_under_compute`, the share of copy time during which the GPU
computed, and what `timeline.py` says about the rest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from compare import emit, run_all
from engines import SHAPES


def block_bytes(shape: str) -> int:
    """Bytes of one block in bf16, as it lies in a slot."""
    hidden, inner, _, heads, pairs, _, _ = SHAPES[shape]
    keys = hidden // heads * pairs
    attention = 2 * hidden * hidden + 2 * hidden * keys + hidden + 2 * keys
    return 2 * (attention + 3 * hidden * inner + 2 * hidden)


def least_gb(shape: str, line: dict, cap_gb: float | None) -> float:
    """The fewest GB that a step must bring to the device."""
    count = line["paged_blocks"]
    slots = min(line["plan"]["slots"], count)
    weights, paged = line["weights_gb"], line["paged_gb"]
    if cap_gb is not None:
        inside = weights - paged
        other = line["peak_allocated_gb"] - inside - slots * block_bytes(shape) / 1e9
        paged = max(weights - max(cap_gb - other, 0.0), 0.0)
    carried = slots * line["paged_gb"] / count if count else 0.0
    return max(2 * (paged - carried), 0.0)


def bound_of(shape: str, resident: dict, streamed: dict, cap_gb: float | None) -> dict:
    """The line that compares."""
    errors = {e["engine"]: e["error"] for e in (resident, streamed) if "error" in e}
    if errors:
        return {"errors": errors}
    link = streamed.get("link_gb_per_s")
    least = least_gb(shape, streamed, cap_gb)
    copy_s = least / link if link else 0.0
    bound = max(resident["step_s"], copy_s)
    moved = streamed["h2d_gb_per_step"] or streamed["disk_read_gb_per_step"]
    trace = streamed.get("timeline", {})
    return {
        "resident_s": resident["step_s"],
        "streamed_s": streamed["step_s"],
        "streamed_min_s": streamed["step_min_s"],
        "streamed_max_s": streamed["step_max_s"],
        "link_gb_per_s": link,
        "least_gb": round(least, 4),
        "moved_gb": moved,
        "moved_frac": round(moved / least, 4) if least else None,
        "copy_s": round(copy_s, 5),
        "bound_s": round(bound, 5),
        "bound_frac": round(streamed["step_s"] / bound, 4),
        "compute_frac": round(resident["step_s"] / copy_s, 3) if copy_s else None,
        "paged_blocks": streamed["paged_blocks"],
        "slots": streamed["plan"]["slots"],
        "policies": streamed["policies"],
        "cpu_cores": streamed["cpu_cores"],
        "nvml_peak_gb": [each.get("nvml_peak_gb") for each in (resident, streamed)],
        "copy_under_compute": trace.get("copy_under_compute"),
        "trace": {key: trace.get(key) for key in ("compute_s", "copy_s", "only_copy_s", "nothing_s")},
    }


def main() -> int:
    """Run every combination."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="7b,14b", help=f"of {', '.join(SHAPES)} (default %(default)s)")
    parser.add_argument("--codecs", default="none,nf4", help="of none, nf4 (default %(default)s)")
    parser.add_argument("--tokens", default="512,4096", help="tokens of a row (default %(default)s)")
    parser.add_argument("--vram-budget", metavar="SIZE", help="wrap(vram_budget=SIZE) decides what is paged")
    parser.add_argument("--recompute", action="store_true", help="both engines recompute every block")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="record N steps of streamed runs")
    parser.add_argument("--out-trace", type=Path, metavar="FOLDER", help="keep the traces there")
    parser.add_argument("--wrap", nargs="+", default=[], metavar="KEY=VALUE", help="more options for wrap()")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny: does the script work")
    args = parser.parse_args()
    if args.smoke:
        args.shapes, args.codecs, args.tokens, args.steps, args.profile = "tiny", "nf4", "32", 1, 1
    failed = False
    first, *others = args.tokens.split(",")
    for shape, codec in itertools.product(args.shapes.split(","), args.codecs.split(",")):
        tail = "" if codec == "none" else f"-{codec}"
        streamed = "trainstream-stream" + ("" if args.vram_budget else "-keep") + tail
        words = ["--scenario", "tiny", "--shape", shape, "--tokens", first, "--steps", str(args.steps)]
        words += ["--also-tokens", *others] if others else []
        if options := [*args.wrap, *(["recompute=True"] if args.recompute else [])]:
            words += ["--wrap", *options]
        more = ["--vram-budget", args.vram_budget] if args.vram_budget else []
        if args.profile:
            more += ["--profile", str(args.profile), "--engines", streamed]
            if args.out_trace:
                args.out_trace.mkdir(parents=True, exist_ok=True)
                more += ["--out-trace", str(args.out_trace / f"{shape}{tail}.json.gz")]
        runs = [
            run_all([*words, *extra], engine, args.timeout)
            for engine, extra in ((f"trainstream{tail}", []), (streamed, more))
        ]
        for tokens, *lines in zip([first, *others], *runs, strict=False):
            setting = {"bench": "stream_bound", "shape": shape, "codec": codec, "tokens": int(tokens)}
            for line in lines:
                emit(args.out, {**setting, **{k: v for k, v in line.items() if k != "scenario"}})
            found = bound_of(shape, *lines, cap_of(args.vram_budget))
            failed |= "errors" in found
            emit(args.out, {**setting, "what": "bound", "vram_budget": args.vram_budget, **found})
        failed |= any(len(run) <= len(others) for run in runs)
    return int(failed)


def cap_of(budget: str | None) -> float | None:
    """GB that PyTorch may reserve under a budget."""
    if budget is None:
        return None
    from ts_core.memory import parse_bytes
    from ts_core.usage import CONTEXT_BYTES

    return (parse_bytes(budget) - CONTEXT_BYTES) / 1e9


if __name__ == "__main__":
    sys.exit(main())
