"""`trainstream finetune` on SmolLM2-135M with blocks paged from disk, beside the same command resident.

    python finetune_paged.py --methods lora,full --share 0.5 --runs 5 --steps 6 [--out FILE]

Each run is a fresh process that carries out the command (`finetune max_length=512 batch_size=1 ...`);
resident and paged runs take turns. The first step of a run warms up and does not count for the speed.
Reported: all losses (they must be equal bit for bit), tokens/s of every run with median, least and most,
bytes moved to the slots over paged bytes and steps (forward and backward each bring every paged block, except
those that the turn finds in their slots), and the RAM used above the value after the imports. One JSON line
for each run and one for each method.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARMUP = 1


def words_of(args: argparse.Namespace, method: str, paged: bool, folder: Path) -> list[str]:
    """The command's words."""
    words = [
        f"method={method}",
        f"quantize={args.quantize if method == 'lora' else 'none'}",
        f"max_length={args.tokens}",
        f"batch_size={args.batch}",
        f"max_steps={args.steps}",
        f"output_dir={folder / 'run'}",
        "eval_batches=0",
        "save_steps=0",
        "logging_steps=1",
        *([f"threads={args.threads}"] if args.threads else []),
        *args.word,
    ]
    if paged:
        share = "true" if args.share >= 1 else str(args.share)
        words += [f"wrap.param_offload={share}", f"wrap.disk_offload={folder}", *args.paged_word]
    return words


def worker(words: list[str]) -> dict:
    """Carry out the command in this process and look at its model afterwards."""
    import torch
    import transformers
    from transformers.trainer import Trainer  # noqa: F401 -- lazily imported: part of the baseline

    import trainstream
    from trainstream.cli.console import Console
    from trainstream.cli.finetune import run
    from trainstream.cli.settings import from_words
    from ts_core.blocks import parameter_bytes
    from ts_core.usage import PeakSampler, host_usage

    kept, events, plain = {}, [], trainstream.wrap

    def seen(*positional, **options):
        kept["model"], optimizer = plain(*positional, **options)
        return kept["model"], optimizer

    class Recorder(Console):
        def event(self, kind, **data):
            events.append({"event": kind, **data})

    trainstream.wrap = seen
    settings, explicit = from_words(words)
    baseline = host_usage().used_bytes
    with PeakSampler(0.01, baseline_bytes=baseline) as sampler:
        status = run(settings, explicit, Recorder())
    if status:
        raise SystemExit(f"finetune ended with {status}")
    steps = [event for event in events if event["event"] == "step"]
    tokens = settings.max_length * settings.per_device_train_batch_size
    ends = [tokens * event["step"] / event["tokens_per_s"] for event in steps]
    times = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    timed = times[WARMUP:] or times
    model = kept["model"]
    report = trainstream.memory_report(model)
    session = model._trainstream_session
    blocks = session.pager.blocks if session.pager is not None else []
    paged = [block for block in blocks if block.parameters]
    start = next(event for event in events if event["event"] == "start")
    return {
        "losses": [event["loss"] for event in steps],
        "step_s": [round(value, 4) for value in times],
        "tokens_per_s": round(tokens * len(timed) / sum(timed), 2),
        "peak_used_bytes": sampler.used_bytes,
        "paged_blocks": len(paged),
        "blocks": sum(row["kind"] == "block" for row in report["blocks"]),
        "paged_bytes": sum(parameter_bytes(p) for block in paged for p in block.parameters),
        "moved": report["moved"],
        "tiers": report["tiers"],
        "dtype": start["dtype"],
        "threads": start["threads"],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def run_one(args: argparse.Namespace, method: str, paged: bool) -> dict:
    """One run in a fresh process."""
    folder = Path(tempfile.mkdtemp(prefix="finetune-paged-", dir=args.dir))
    try:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        command.append(json.dumps(words_of(args, method, paged, folder)))
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {args.timeout} s"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            if paged:
                moved = found["moved"]["disk_read_bytes"]
                found["moved_per_paged_byte_and_step"] = round(moved / found["paged_bytes"] / args.steps, 4)
            return found
    return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}


def spread(values: list[float]) -> dict:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 2), "min": min(values), "max": max(values)}


def compare(args: argparse.Namespace, method: str, report) -> bool:
    """Take turns; report every run and the comparison; whether all is well."""
    runs: dict[str, list[dict]] = {"resident": [], "paged": []}
    setting = {"bench": "finetune_paged", "method": method, "tokens": args.tokens, "batch": args.batch}
    for number in range(args.runs):
        for engine, done in runs.items():
            found = run_one(args, method, engine == "paged")
            report({**setting, "engine": engine, "run": number, **found})
            if "error" in found:
                return False
            done.append(found)
    losses = [run["losses"] for done in runs.values() for run in done]
    equal = all(each == losses[0] for each in losses)
    speeds = {engine: [run["tokens_per_s"] for run in done] for engine, done in runs.items()}
    ratios = [p / r for p, r in zip(speeds["paged"], speeds["resident"], strict=True)]
    paged = runs["paged"][-1]
    line = {
        **setting,
        "what": "comparison",
        "runs": args.runs,
        "steps": args.steps,
        "dtype": paged["dtype"],
        "threads": paged["threads"],
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "losses_equal": equal,
        "losses": losses[0],
        "tokens_per_s": {engine: spread(values) for engine, values in speeds.items()},
        "speed_frac": {key: round(value, 4) for key, value in spread(ratios).items()},
        "peak_used_bytes": {
            engine: max(run["peak_used_bytes"] for run in done) for engine, done in runs.items()
        },
        "paged_blocks": f"{paged['paged_blocks']} of {paged['blocks']}",
        "paged_bytes": paged["paged_bytes"],
        "moved_bytes": paged["moved"]["disk_read_bytes"],
        "moved_per_paged_byte_and_step": paged["moved_per_paged_byte_and_step"],
        "versions": paged["versions"],
    }
    report(line)
    moved = f"{line['moved_bytes'] / 2**20:.0f} MiB = {line['moved_per_paged_byte_and_step']}"
    resident, streamed = (line["tokens_per_s"][engine] for engine in ("resident", "paged"))
    print(
        f"# {method}: {line['paged_blocks']} blocks paged, losses equal: {equal}; tokens/s resident "
        f"{resident['median']} ({resident['min']} - {resident['max']}), paged {streamed['median']} "
        f"({streamed['min']} - {streamed['max']}), ratio {line['speed_frac']['median']}; moved "
        f"{moved} x paged bytes x steps",
        flush=True,
    )
    return equal


def main() -> int:
    """Run the methods."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="lora,full")
    parser.add_argument("--share", type=float, default=0.5, help="share of the blocks that is paged")
    parser.add_argument(
        "--quantize", choices=["none", "nf4", "int8"], default="none", help="of the LoRA base"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step")
    parser.add_argument("--runs", type=int, default=5, help="runs of each engine, taken in turn")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run; the first is not timed")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: its default")
    parser.add_argument("--word", action="append", default=[], metavar="KEY=VALUE", help="for both engines")
    parser.add_argument(
        "--paged-word", action="append", default=[], metavar="KEY=VALUE", help="for the paged engine"
    )
    parser.add_argument("--dir", help="existing folder for the files (default: the system's temporary one)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="one short run each: does the script work")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("\nRESULT " + json.dumps(worker(json.loads(args.worker))), flush=True)
        return 0
    if args.smoke:
        args.methods, args.runs, args.steps, args.tokens, args.batch = "lora", 1, 2, 32, 1
        if not have_model():
            print(json.dumps({"bench": "finetune_paged", "skipped": "SmolLM2-135M is not installed"}))
            return 0

    def report(line: dict) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")

    results = [compare(args, method, report) for method in args.methods.split(",")]
    return int(not all(results))


def have_model() -> bool:
    """Whether the model is here, without asking the network."""
    from ts_core.errors import TrainStreamError
    from ts_hf import smollm2_path

    try:
        return smollm2_path(download=False).is_file()
    except TrainStreamError:
        return False


if __name__ == "__main__":
    sys.exit(main())
