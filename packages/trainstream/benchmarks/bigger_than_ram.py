r"""Train a model several times larger than the memory it may use, held to that by a control group.

    python bigger_than_ram.py --budget 128MiB --factor 3 --steps 200 --verify [--kind lora] [--out FILE]
    python bigger_than_ram.py --device cuda --budget 256MiB --vram-budget 1GiB --factor 1.2 --kind lora \
        --steps 200 --seq 512 --probe [--verify]

A child process imports everything and notes its baseline: anonymous + shared memory just after `import
trainstream`, on a GPU with CUDA started. Then it is limited to baseline + budget without swap by a control
group, v1 or v2 (what the kernel had charged for page tables and inodes by then comes on top; where no group
can be made the peak is only measured). It builds a Llama-shaped model of `--factor` x budget bytes of weights
(fp32, on a GPU bf16 and the VRAM budget counted in) that never exists in RAM as a whole, and trains it with
wrap(ram_budget=..., vram_budget=...). `full` trains every weight: gradients and moments are in files too.

RAM used is anonymous + shared memory above the baseline, sampled every 10 ms by the child, and every 20 ms by
the parent from the control group's own count; VRAM by NVML, every 20 ms. The cache of mapped files is charged
to the group as well, but the kernel takes it back when needed; it is reported apart. `--probe` reads a file
in the same folder by direct I/O first: `disk_frac` is the rate at which steps read weights over the probe's.
`--verify` trains the same model again in a child without limit and without options, resident, and compares
all losses bit for bit; on a GPU all runs are deterministic and have eager attention then. With both,
`bound_frac` is the step over max(resident step, bytes read / probe). One JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import read_rate
from memory_group import MemoryGroup

ROWS = 8  # different rows of tokens, in turn: the losses fall as they are learned


def shape_of(model_bytes: int, hidden: int | None, width: int = 4) -> dict:
    """A Llama shape whose weights take at least `model_bytes`, in some two dozen blocks or more.

    `width` is the bytes of a weight.
    """
    for size in [hidden] if hidden else (2048, 1024, 768, 512, 384, 256, 128, 64):
        inner, vocabulary = int(size * 2.75) // 32 * 32, 8 * size
        block = width * (3 * size * size + 3 * size * inner + 2 * size)  # keys and values: half as many heads
        edges = width * (2 * vocabulary * size + size)
        layers = -(-(model_bytes - edges) // block)
        if layers >= 24 or (layers >= 1 and (hidden or size == 64)):
            break
    else:
        raise SystemExit("--budget: too small for any model")
    return {
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": int(layers),
        "num_attention_heads": size // 32,
        "num_key_value_heads": size // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


# ---- the child ----


def build(spec: dict, directory: str | None):
    """The model with random weights, in files of `directory` or (None) in RAM."""
    import torch
    from transformers import LlamaConfig

    from trainstream.integrations.huggingface import load_model

    torch.manual_seed(0)
    config = LlamaConfig(**spec["shape"])
    if spec["exact"]:
        config._attn_implementation = "eager"
    dtype = getattr(torch, spec["dtype"])
    model = load_model(config, quantize=None, dtype=dtype, random_weights=True, disk_offload=directory)
    if spec["kind"] == "lora":
        import peft

        model.requires_grad_(False)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=names))
    return model.train()


def train(model, optimizer, spec: dict, ready) -> dict:
    """Train and return losses, seconds a step, and when each ended."""
    import torch

    from ts_hf.losses import backbone, causal_lm_loss_for

    generator = torch.Generator().manual_seed(1)
    vocabulary = spec["shape"]["vocab_size"]
    rows = torch.randint(0, vocabulary, (ROWS, spec["batch"], spec["seq"]), generator=generator)
    losses, times = [], []
    for step in range(spec["steps"]):
        start = time.perf_counter()
        ids = rows[step % ROWS].to(spec["device"])
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        loss = causal_lm_loss_for(model, hidden, ids, chunk_size=spec["chunk"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        ready(step + 1)
    return {"losses": losses, "times": times}


def process_io() -> dict:
    """Bytes that this process made the disk read and write."""
    try:
        rows = [line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()]
    except OSError:
        return {}
    table = {name: int(value) for name, value in rows}
    return {"disk_read_bytes": table["read_bytes"], "disk_written_bytes": table["write_bytes"]}


def told(step: int, sampler) -> dict:
    """What the parent hears after a step: it is all there is if the child is killed."""
    return {"phase": f"step {step}", "peak_used_bytes": sampler.used_bytes}


def start(spec: dict) -> None:
    """Import everything, and let CUDA take what it takes, before the baseline."""
    import torch
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401 -- lazily imported: part of the baseline
    from transformers.trainer import Trainer  # noqa: F401

    if spec["kind"] == "lora":
        import peft  # noqa: F401
    import trainstream
    import trainstream.integrations.huggingface  # noqa: F401

    transformers.logging.set_verbosity_error()
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    if spec["device"] == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
            (square @ square).sum().backward()
        torch.ones(64).pin_memory()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if spec["exact"]:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def child(spec: dict) -> None:
    """Start, say the baseline, wait for the limit, train, say the result."""
    start(spec)
    import torch

    import trainstream
    from ts_core.usage import PeakSampler, device_usage, host_usage

    baseline = host_usage()
    say({"baseline_bytes": baseline.used_bytes})
    sys.stdin.readline()
    sampler = PeakSampler(0.01, baseline_bytes=baseline.used_bytes)
    cuda = spec["device"] == "cuda"
    vram = PeakSampler(0.02, (lambda: device_usage("cuda").used_bytes) if cuda else (lambda: 0))
    before = process_io()
    limited = spec["mode"] == "limited"
    with sampler:
        begin = time.perf_counter()
        model = build(spec, spec["directory"] if limited else None)
        if cuda and not limited:
            model = model.cuda()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=spec["lr"])
        built_s, built_peak = time.perf_counter() - begin, sampler.used_bytes
        say({"phase": "built", "peak_used_bytes": built_peak})
        options = spec["options"] if limited else {}
        model, optimizer = trainstream.wrap(model, optimizer, **options)
        wrapped_peak = sampler.used_bytes
        say({"phase": "wrapped", "peak_used_bytes": wrapped_peak})
        with vram:
            found = train(model, optimizer, spec, lambda step: say(told(step, sampler)))
    after = process_io()
    say(
        {
            "result": {
                **facts(model, found, spec),
                "peak_used_bytes": sampler.used_bytes,
                "peak_after_build_bytes": built_peak,
                "peak_after_wrap_bytes": wrapped_peak,
                "samples": sampler.count,
                "vram_peak_bytes": vram.peak_bytes,
                "file_bytes_at_end": host_usage().file_bytes - baseline.file_bytes,
                "build_s": round(built_s, 2),
                **{key: after[key] - before[key] for key in before},
            }
        }
    )


def facts(model, found: dict, spec: dict) -> dict:
    """What was trained, how fast, and what moved."""
    import torch
    import transformers

    import trainstream

    report = trainstream.memory_report(model)
    steady = sorted(found["times"][3:] or found["times"])
    step_s = steady[len(steady) // 2]
    read = report["moved"]["disk_read_bytes"] / spec["steps"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "train_s": round(sum(found["times"]), 2),
        "step_s": round(step_s, 4),
        "step_min_s": round(steady[0], 4),
        "step_max_s": round(steady[-1], 4),
        "steps_per_s": round(spec["steps"] / sum(found["times"]), 4),
        "disk_read_gb_per_step": round(read / 1e9, 4),
        "disk_read_gb_per_s": round(read / step_s / 1e9, 3),
        "losses": found["losses"],
        "moved": report["moved"],
        "tiers": report["tiers"],
        "paged_blocks": report["params"]["paged_blocks"],
        "blocks": len(report["blocks"]),
        "events": report["events"],
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def say(message: dict) -> None:
    """One line for the parent."""
    print("CHILD " + json.dumps(message), flush=True)


# ---- the parent ----


class GroupSampler(threading.Thread):
    """Peak of what the control group counts as anonymous and shared memory."""

    def __init__(self, group: MemoryGroup) -> None:
        """Sample nothing yet."""
        super().__init__(daemon=True)
        self.group, self.halt = group, threading.Event()
        self.peak = self.kernel_peak = 0

    def run(self) -> None:
        """Sample until told to halt."""
        while not self.halt.wait(0.02):
            self.peak = max(self.peak, self.group.unreclaimable())
            self.kernel_peak = max(self.kernel_peak, self.group.kernel())


def run_child(spec: dict, group: MemoryGroup | None, timeout: float, verbose: bool) -> dict:
    """Run a child to its end; its result, with what the control group counted."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(spec)]
    env = {**os.environ, **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if spec["exact"] else {})}
    if group is not None:
        command = group.join_command(command)
    # A group of processes of its own, so that a timeout ends all of it.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env
    )
    killer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    sampler = GroupSampler(group) if group is not None else None
    found: dict = {}
    kernel = 0
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if not line.startswith("CHILD "):
                print(line, end="", file=sys.stderr)
                continue
            message = json.loads(line.removeprefix("CHILD "))
            if "baseline_bytes" in message:
                found |= message
                if group is not None and sampler is not None:
                    kernel = group.kernel()
                    if spec["budget"] is not None:
                        group.limit(message["baseline_bytes"] + kernel + spec["budget"])
                    sampler.start()
                process.stdin.write("go\n")
                process.stdin.flush()
            elif "phase" in message:
                found |= message
                if verbose:
                    used = f"{message['peak_used_bytes'] / 2**20:.1f} MiB at most"
                    print(f"# {spec['mode']}: {message['phase']}, {used}", file=sys.stderr, flush=True)
            else:
                found |= message["result"]
        status = process.wait()
    finally:
        killer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if sampler is not None and group is not None and sampler.is_alive():
        sampler.halt.set()
        sampler.join()
        found["cgroup"] = {
            "version": group.version,
            **group.facts(),
            "peak_used_bytes": sampler.peak - found["baseline_bytes"],
            "kernel_baseline_bytes": kernel,
            "kernel_peak_bytes": sampler.kernel_peak,
        }
    if status or "losses" not in found:
        why = "killed: out of memory, or the time was up" if status == -signal.SIGKILL else f"status {status}"
        found["error"] = f"{why}; last heard: {found.get('phase', 'nothing')}"
    return found


def summary(line: dict) -> str:
    """The line for people."""
    if "error" in line:
        return f"# FAILED: {line['error']}"
    budget = line["budget_bytes"]
    weights, budgets = line["weight_bytes"], line["budgets_bytes"]
    text = [
        f"# weights {weights / 2**20:.1f} MiB = {weights / budgets:.2f} x budgets "
        f"({budgets / 2**20:.1f} MiB), {line['steps']} steps of {line['batch']} x {line['seq']} tokens, "
        f"{line['kind']}",
        f"# RAM used at most {line['peak_used_bytes'] / budget:.3f} of the budget ({line['verdict']})",
        f"# {line['steps_per_s']:.3f} steps/s, loss {line['losses'][0]:.4f} -> {line['losses'][-1]:.4f}",
    ]
    if "disk_frac" in line:
        text.append(f"# read {line['disk_read_gb_per_s']} GB/s, {line['disk_frac']} of the probe")
    if "cgroup" in line:
        text.append(f"# control group: {line['cgroup']}")
    if "equal" in line:
        text.append(f"# losses bit-equal to the resident run: {line['equal']}")
    return "\n".join(text)


def spec_of(args: argparse.Namespace, folder: Path) -> dict:
    """What the child is told."""
    from ts_core.memory import parse_bytes

    budget = parse_bytes(args.budget)
    options = {"ram_budget": budget, "disk_offload": str(folder)}
    budgets = budget
    if args.device == "cuda":
        options["device"] = "cuda"
        if args.vram_budget:
            options["vram_budget"] = parse_bytes(args.vram_budget)
            budgets += options["vram_budget"]
    options |= {name: json.loads(text) for name, _, text in (o.partition("=") for o in args.option)}
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    width = 2 if dtype == "bfloat16" else 4
    given = ("kind", "steps", "seq", "batch", "chunk", "lr", "threads", "device")
    return {
        "mode": "limited",
        "shape": shape_of(int(budgets * args.factor), args.hidden, width),
        "budget": budget,
        "budgets": budgets,
        "dtype": dtype,
        "exact": args.verify and args.device == "cuda",
        "directory": str(folder),
        "options": {name: value for name, value in options.items() if value is not None},
        **{key: getattr(args, key) for key in given},
    }


def compare(args: argparse.Namespace) -> dict:
    """Run the children; the line."""
    folder = Path(tempfile.mkdtemp(prefix="bigger-than-ram-", dir=args.dir))
    group = None if args.measure_only else MemoryGroup.create(f"trainstream-bench-{os.getpid()}")
    try:
        spec = spec_of(args, folder)
        probe = read_rate(folder) if args.probe else {}
        found = run_child(spec, group, args.timeout, not args.quiet)
        left = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if group is not None:
            group.remove()
    line = {
        "bench": "bigger_than_ram",
        "budget_bytes": spec["budget"],
        "budgets_bytes": spec["budgets"],
        "factor": args.factor,
        **{key: spec[key] for key in ("kind", "dtype", "steps", "seq", "batch", "shape", "options")},
        "enforced": group is not None,
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        **found,
        "files_left_bytes": left,
        **({"probe_gb_per_s": probe} if probe else {}),
    }
    if "error" in found:
        return line
    vram = spec["options"].get("vram_budget")
    within = found["peak_used_bytes"] <= spec["budget"] and (vram is None or found["vram_peak_bytes"] <= vram)
    line["verdict"] = "within" if within else "OVER"
    if probe:
        line["disk_frac"] = round(found["disk_read_gb_per_s"] / max(probe.values()), 4)
    if args.verify:
        resident = run_child({**spec, "mode": "resident", "budget": None}, None, args.timeout, not args.quiet)
        line["resident"] = {k: v for k, v in resident.items() if k not in ("events", "versions", "threads")}
        line["equal"] = resident.get("losses") == found["losses"]
        if "error" not in resident:
            line["speed_frac"] = round(resident["step_s"] / found["step_s"], 4)
            if probe:
                bound = max(resident["step_s"], found["disk_read_gb_per_step"] / max(probe.values()))
                line["bound_frac"] = round(found["step_s"] / bound, 4)
    return line


def main() -> int:
    """Run the children."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="128MiB", help="RAM above the baseline (default %(default)s)")
    parser.add_argument("--factor", type=float, default=3.0, help="weights / budget (default %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vram-budget", metavar="SIZE", help="with --device cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--probe", action="store_true", help="measure the disk by direct reads")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=128, help="tokens of the loss at a time")
    parser.add_argument("--kind", choices=["full", "lora"], default="full")
    parser.add_argument("--hidden", type=int, help="hidden size; default: the largest with 24 blocks or more")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: its default")
    parser.add_argument("--dir", help="existing folder for the files (default: the system's temporary one)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="more for wrap()")
    parser.add_argument("--verify", action="store_true", help="compare with a resident run")
    parser.add_argument("--measure-only", action="store_true", help="no control group")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one child")
    parser.add_argument("--out", type=Path, help="append the line to this file too")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does the script work")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    if args.smoke:
        args.budget, args.steps, args.seq, args.chunk, args.verify = "256MiB", 3, 16, 16, True
        args.factor, args.hidden, args.quiet = 0.01, 64, True
    line = compare(args)
    text = json.dumps(line)
    print(text, flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(text + "\n")
    print(summary(line))
    return int("error" in line or line.get("verdict") == "OVER" or line.get("equal") is False)


if __name__ == "__main__":
    sys.exit(main())
