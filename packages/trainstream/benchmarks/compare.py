r"""Step time and memory of TrainStream beside its rivals: same shapes, tokens, adapters and learning rate.

Every engine runs in a fresh process, and one that fails costs only its own line. Weights are random in the
real shapes; each engine uses its own best loss (chunked where it has one). Output: one JSON object per run,
also appended to ``--out``.

    python compare.py --scenario lora7b --engines trainstream-nf4,bnb,stock --steps 20 --out lora7b.json
    python compare.py --engines trainstream-stream,stock,bnb --vram-budget 12GiB --steps 20
    python compare.py --engines trainstream,trainstream-stream --vram-budget 12GiB --steps 20 --equality
    python compare.py --scenario full1.5b --clip 1.0 --cap-gb 16 \
        --engines stock,torchao,torchao-grads,deepspeed,trainstream-full,trainstream-full-bf16
    python compare.py --scenario full1.5b --engines trainstream-full --wrap vram_budget=16GiB \
        moment_dtype=int8 --profile 3 --out-trace full.json.gz
    python compare.py --engines trainstream-nf4 --kernels true --fused-lora true --attention auto --profile 3
    python compare.py --scenario lora14b_var --engines trainstream-nf4,bnb-liger  # packed documents
    python compare.py --scenario lora7b --tokens 8192 \
        --engines trainstream,trainstream-offload,trainstream-recompute,stock-ckpt,stock-save-on-cpu

A full fine-tune has fp32 weights under bf16 autocast, as published comparisons do; engines with `bf16` in
their name, and DeepSpeed, have bf16 weights. `--wrap` passes options to `trainstream.wrap`; with vram_budget
the model starts in RAM. `--clip` is `clip_grad_norm_` for rivals and `max_grad_norm` for ours. `--cap-gb` is
what PyTorch's allocator may take while training (GiB), for every engine; ours with a `vram_budget` keeps to
the smaller of both.

Steps are timed once `session.adapting` is False. Where an engine of ours and a rival are within 10 % of each
other, both are run three times; the last line says which is faster by more than its runs differ.
`t_forward_s`, `t_backward_s` (of a micro-batch) and `t_optimizer_s` are medians on the GPU's own timeline.
For ours a full fine-tune is measured in parts too, in a process of their own: the resident model's forward
and backward without any optimizer, and the host AdamW alone. With every update on the host, due between two
backward passes, a step takes `bound_s` = t_bwd + max(t_fwd, t_adamw) at least; `bound_frac` is the step over
it.

`nvml_peak_gb` is the most that the process held while training, CUDA context included.
`host_state_bytes_per_parameter` is what AdamW keeps in RAM (moments and fp32 masters, 12 / 8 / 6 bytes with
fp32 / bf16 / int8 moments), `host_tensor_gb` all CPU tensors of the process. `h2d_gb_per_step` and the like
are ours alone. Engines with `stream` say what the link gives a plain page-locked copy in the same process
(`link_gb_per_s`) and what they moved; with `--vram-budget` the model starts in RAM and
`wrap(vram_budget=...)` decides what is paged, without it every block is paged. `--equality` runs the engines
with deterministic algorithms and eager attention, and adds a line that says whether all losses and the
trained weights are equal bit for bit.

`--profile N` records N more steps after the timed ones; the line gets what `timeline.py` makes of the trace,
and `--out-trace FILE` keeps it (with several engines the name of each comes before the suffixes).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import engines
import measure
import timeline
import verdicts
from scenarios import SCENARIOS, Rows, Scenario, draw

WARMUP = 3
PHASES = {"fwd": "forward", "bwd": "backward"}
SETTLE = 40  # steps after which a session that still adapts is timed all the same
NAMED = ("kernels", "fused_lora", "attention")  # options of wrap() with a flag of their own
PARTS = "parts:"  # before an engine's name: its model and its optimizer, each alone


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario, what the command line says going first."""
    said = {"shape": args.shape, "batch": args.batch, "tokens": args.tokens, "cap": args.cap_gb}
    said["accumulate"] = args.accumulate
    return dataclasses.replace(SCENARIOS[args.scenario], **{key: it for key, it in said.items() if it})


def setting_of(args: argparse.Namespace, engine: str, *, bare: bool = False) -> engines.Setting:
    """What an engine is asked for."""
    import torch

    scenario = scenario_of(args)
    return engines.Setting(
        engine=engine,
        shape=scenario.shape,
        kind=scenario.kind,
        batch=scenario.batch,
        device="cuda" if torch.cuda.is_available() else "cpu",
        wrap=args.wrap,
        clip=args.clip,
        vram_budget=args.vram_budget,
        equality=args.equality,
        bare=bare,
    )


# ---- one process ----


def be_deterministic() -> None:
    """The same bits in every run; CUBLAS_WORKSPACE_CONFIG was set before this process began."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def give_up(args: argparse.Namespace) -> None:
    """End this process before the machine runs out of RAM, and say so in place of a result."""
    import torch

    from ts_core.usage import host_usage

    cuda = torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats")
    while True:
        used = host_usage().used_bytes
        if cuda and torch.cuda.is_initialized():
            # What torch page-locks may not count as the process's own memory.
            used = max(used, torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
        if used > args.ram_gb * 2**30:
            line = {"engine": args.worker, "error": f"given up at {used / 2**30:.1f} GiB of RAM"}
            print("\nRESULT " + json.dumps(line), flush=True)
            os._exit(1)
        time.sleep(0.05)


def cap_memory(args: argparse.Namespace, setting: engines.Setting) -> float:
    """Hold PyTorch's allocator to the cap, in GiB; 0 for none.

    Weights are made on the GPU, which is not what is compared: it holds for training.
    """
    import torch

    from ts_core.memory import parse_bytes

    cap = scenario_of(args).cap
    # The resident side of a comparison for equality need not fit.
    if not cap or (args.equality and not engines.is_streamed(setting.engine)):
        return 0.0
    budget = setting.options.get("vram_budget")
    if budget is None or parse_bytes(budget) > cap * 2**30:  # else wrap() holds to what is less
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 2**30 / total))
    return float(cap)


class Loop:
    """Steps of one engine on random tokens, the same in every engine."""

    def __init__(self, engine: engines.Engine, args: argparse.Namespace, device: str) -> None:
        """Begin with the first tokens."""
        import torch

        self.scenario = scenario_of(args)
        self.engine, self.device = engine, device
        self.cuda = device == "cuda"
        self.high = engines.vocabulary(self.scenario.shape)
        self.generator = torch.Generator().manual_seed(1)
        self.clock = measure.StepClock(self.cuda)
        self.losses: list[Any] = []
        self.times: list[float] = []

    def _rows(self) -> list[Rows]:
        """The micro-batches of a step, on the device."""
        drawn = [draw(self.scenario, self.high, self.generator) for _ in range(self.scenario.accumulate)]
        return [rows.to(self.device) for rows in drawn]

    def run(self, name: str = "step") -> None:
        """One step."""
        import torch

        batches = self._rows()
        phase = self.clock.phase
        begin = time.perf_counter()
        total = 0.0
        with phase(name):
            for rows in batches:
                with phase("forward"):
                    loss = self.engine.loss_of(rows.ids, rows.positions, rows.labels)
                    loss = loss / len(batches) if len(batches) > 1 else loss
                with phase("backward"):
                    self.engine.backward(loss)
                total = total + loss.detach()
            with phase("optimizer"):
                self.engine.step()
            if self.cuda:
                torch.cuda.synchronize()
        self.times.append(time.perf_counter() - begin)
        self.losses.append(total)

    def settle(self, args: argparse.Namespace) -> bool:
        """Warm up until the session has adapted; whether it has."""
        for step in range(SETTLE):
            session = getattr(self.engine.model, "_trainstream_session", None)
            adapting = session is not None and session.adapting
            if step >= WARMUP and (args.equality or not adapting):
                return not adapting
            self.run()
        return False


def worker(args: argparse.Namespace) -> list[dict]:
    """Train one engine in this process and return its line, and one for each further number of tokens."""
    import torch

    from ts_core.usage import PeakSampler, host_usage

    setting = setting_of(args, args.worker)
    cuda = setting.device == "cuda"
    if args.ram_gb:
        threading.Thread(target=give_up, args=(args,), daemon=True).start()
    if args.equality:
        be_deterministic()
    if engines.is_ours(args.worker):
        import trainstream  # noqa: F401 -- part of the baseline
    ram = PeakSampler(0.01, baseline_bytes=host_usage().used_bytes)
    started = time.perf_counter()
    engine = engines.make(setting)
    load_s = time.perf_counter() - started
    link = cap = 0.0
    if cuda and moves(engine):
        with contextlib.suppress(torch.OutOfMemoryError):  # a tight budget; the rate is left out
            link = measure.link_rate()
    if cuda:
        torch.cuda.empty_cache()
        cap = cap_memory(args, setting)
        torch.cuda.reset_peak_memory_stats()
    first = timed(args, setting, engine, cap, link, ram)
    first["load_s"] = round(load_s, 2)
    lines = [first]
    for tokens in args.also_tokens:
        args.tokens = tokens
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        lines.append(timed(args, setting, engine, cap, link, ram))
    return lines


def timed(
    args: argparse.Namespace,
    setting: engines.Setting,
    engine: engines.Engine,
    cap: float,
    link: float,
    ram: Any,
) -> dict:
    """Let the engine settle, time its steps, and return the line."""
    cuda = setting.device == "cuda"
    loop, sampler = Loop(engine, args, setting.device), measure.Sampler()
    sampler.start()
    settled = loop.settle(args)
    counters = measure.Counters(engine.model, engine.optimizer)
    loop.run()  # untimed: reading the counters has waited for updates
    first = len(loop.times)
    loop.clock.clear()
    with ram:
        cpu0, wall0 = time.process_time(), time.perf_counter()
        for _ in range(args.steps):
            loop.run()
        cores = (time.process_time() - cpu0) / (time.perf_counter() - wall0)
    moved = counters.per_step(args.steps + 1)
    sampler.halt.set()
    line = {
        "scenario": args.scenario,
        "engine": args.worker,
        "wrap": {key: str(value) for key, value in setting.options.items()},
        "clip": args.clip,
        "cap_gib": cap or None,
        "weights": setting.weight_dtype,
        "settled": settled,
        **time_fields(loop, first),
        "cpu_cores": round(cores, 2),
        **memory_fields(engine, cuda),
        "ram_peak_gb": round(ram.used_bytes / 1e9, 3),
        **moved,
        **plan_fields(engine, moved, statistics.median(loop.times[first:]), link),
        **sampler.fields(),
    }
    return {**line, **ending(args, loop), **measure.machine()}


def time_fields(loop: Loop, first: int) -> dict:
    """Times of the steps from the first timed one."""
    timed = loop.times[first:]
    step_s = statistics.median(timed)
    return {
        "warmup_steps": first,
        "steps": len(timed),
        "batch": loop.scenario.batch,
        "accumulate": loop.scenario.accumulate,
        "tokens": loop.scenario.tokens,
        "step_s": round(step_s, 5),
        "step_min_s": round(min(timed), 5),
        "step_max_s": round(max(timed), 5),
        **loop.clock.fields(),
        "step_times_s": [round(x, 4) for x in loop.times],
        "tokens_per_s": round(
            loop.scenario.batch * loop.scenario.tokens * loop.scenario.accumulate / step_s, 1
        ),
    }


def ending(args: argparse.Namespace, loop: Loop) -> dict:
    """What comes after the timed steps: a trace if asked for, losses, and weights to compare."""
    found: dict[str, Any] = {"timeline": profile(args, loop)} if args.profile else {}
    losses = [loss.item() for loss in loop.losses]
    found["losses"] = [round(x, 5) for x in losses]
    if args.equality:
        loop.engine.optimizer.zero_grad()
        found["losses_exact"] = [x.hex() for x in losses]
        found["trained_sha256"] = measure.digest(loop.engine.trained)
    return found


def moves(engine: engines.Engine) -> bool:
    """Whether weights are paged, or updated on the host: the link matters."""
    session = getattr(engine.model, "_trainstream_session", None)
    return session is not None and (session.pager is not None or session.plan.optimizer != "none")


def memory_fields(engine: engines.Engine, cuda: bool) -> dict:
    """Peaks of the allocator, and bytes in RAM."""
    import torch

    found: dict[str, Any] = {}
    if cuda:
        found["peak_allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        found["peak_reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
        pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        found["torch_pinned_gb"] = round(pinned.get("allocated_bytes.current", 0) / 1e9, 3)
    found["host_tensor_gb"] = round(measure.host_tensor_bytes() / 1e9, 3)
    try:
        return {**found, **measure.host_bytes(engine.model, engine.optimizer)}
    except Exception as error:  # another library's inside, which may have changed
        return {**found, "host_state_error": f"{type(error).__name__}: {error}"[:200]}


def plan_fields(engine: engines.Engine, moved: dict, step_s: float, link: float) -> dict:
    """Where blocks are, and weights that moved to the device beside the link's rate; ours alone."""
    session = getattr(engine.model, "_trainstream_session", None)
    if session is None:
        return {}
    rows = session.plan.to_dict()["blocks"]
    blocks = [row for row in rows if row["kind"] == "block"]
    policies = [row["policy"] for row in blocks]
    tiers = [row["tier"] for row in rows]
    found = {
        "plan": {
            "optimizer": session.plan.optimizer,
            "slots": session.plan.slots,
            "tiers": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
            "predicted_gb": {
                key: round(size / 1e9, 3)
                for key, size in session.plan.predicted.items()
                if key not in ("step_s", "tokens")
            },
        },
        "paged_blocks": sum(row["tier"] != "device" for row in blocks),
        "blocks": len(blocks),
        "paged_gb": round(sum(row["bytes"] for row in rows if row["tier"] != "device") / 1e9, 4),
        "weights_gb": round(sum(row["bytes"] for row in rows) / 1e9, 4),
        "policies": {name: policies.count(name) for name in sorted(set(policies))},
        "events": session.events.events,
    }
    if link:
        rate = moved.get("h2d_gb_per_step", 0.0) / step_s
        found |= {"h2d_gb_per_s": round(rate, 2), "link_gb_per_s": round(link, 2)}
        found["link_frac"] = round(rate / link, 4)
    return found


def profile(args: argparse.Namespace, loop: Loop) -> dict:
    """Record steps, all threads; what the timeline tool makes of them."""
    import torch

    from ts_core.trace import SpanRecorder

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if loop.cuda else []
    loop.clock.tracing = True
    first = len(loop.times)
    with torch.profiler.profile(activities=activities) as profiler, SpanRecorder() as recorder:
        loop.run("first_step")  # the profiler's own beginnings
        for _ in range(args.profile):
            loop.run()
    loop.clock.tracing = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(), strict=False)  # names of kernels may hold anything
    recorder.add_to(trace)
    ops = measure.operators(profiler, args.profile + 1) if args.profile_ops else {}
    found: dict[str, Any] = {
        "traced_step_s": round(statistics.median(loop.times[first + 1 :]), 5),
        **timeline.summary(timeline.analyze(trace)),
        **measure.launches(trace, args.profile + 1),
        **measure.categories(trace, args.profile + 1),
        **ops,
    }
    if args.out_trace:
        path = args.out_trace
        if len(args.engines.split(",")) > 1:
            path = path.with_name(f"{path.name.split('.')[0]}-{args.worker}{''.join(path.suffixes)}")
        if args.also_tokens:
            path = path.with_name(f"{path.name.split('.')[0]}-{loop.scenario.tokens}{''.join(path.suffixes)}")
        text = json.dumps(trace)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), 6))
        else:
            path.write_text(text)
        found["file"] = str(path)
    return found


def parts(args: argparse.Namespace, engine: str) -> dict:
    """Forward and backward of the resident model without an optimizer, and the host AdamW alone."""
    import torch

    setting = setting_of(args, engine, bare=True)
    made = engines.make(setting)
    trained = made.trained

    def step() -> None:
        for parameter in trained:
            parameter.grad = None

    loop = Loop(dataclasses.replace(made, step=step), args, setting.device)
    for _ in range(WARMUP):
        loop.run()
    loop.clock.clear()
    for _ in range(args.steps):
        loop.run()
    found = {f"t_{key}_s": loop.clock.fields()[f"t_{name}_s"] for key, name in PHASES.items()}
    del made, loop
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return {**found, **measure.optimizer_alone(trained, setting.device, setting.options, setting.lr)}


# ---- all of them ----


def run_one(words: list[str], engine: str, timeout: float, *, equal: bool = False) -> dict:
    """Run one engine in a fresh process; its first line, or one that says what went wrong.

    Arguments are those of `run_all`.
    """
    return run_all(words, engine, timeout, equal=equal)[0]


def run_all(words: list[str], engine: str, timeout: float, *, equal: bool = False) -> list[dict]:
    """Run one engine in a fresh process; its lines, and one that says what went wrong, if anything did.

    Args:
        words: The command line, which the process reads again.
        engine: Its name, or that of its parts.
        timeout: Seconds.
        equal: Deterministic matrix products.
    """
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--worker", engine]
    env = dict(os.environ)
    if equal:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
        lines = results_of(said.decode() if isinstance(said, bytes) else said)
        return [*lines, {"engine": engine, "error": f"no result within {timeout} s"}]
    lines = results_of(done.stdout)
    if lines and not done.returncode:
        return lines
    said = [line for line in done.stderr.splitlines() if line.strip()]
    why = next((line for line in reversed(said) if "Error" in line), (said or ["no output"])[-1])
    return [*lines, {"engine": engine, "error": why.strip()[:500], "status": done.returncode}]


def results_of(printed: str) -> list[dict]:
    """The lines that a worker printed."""
    head = "RESULT "
    return [json.loads(line.removeprefix(head)) for line in printed.splitlines() if line.startswith(head)]


def emit(out: Path | None, line: dict) -> None:
    """Print a line and append it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


def option(text: str) -> tuple[str, Any]:
    """``key=value`` with the value as Python would read it, a word or a size as it is."""
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"expected key=value, given {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "; ".join(f"{name}: {what}" for name, what in engines.ENGINES.items())
    made.add_argument("--scenario", choices=sorted(SCENARIOS), default="lora7b")
    made.add_argument("--engines", default="trainstream-nf4,bnb,stock", help=f"of {names}")
    made.add_argument("--steps", type=int, default=10, help=f"timed steps, after {WARMUP} and more to settle")
    made.add_argument("--shape", choices=list(engines.SHAPES), help="of the model (default: the scenario's)")
    made.add_argument("--tokens", type=int, help="tokens of a row (default: the scenario's)")
    made.add_argument(
        "--also-tokens", type=int, nargs="*", default=[], help="then these, in the same process"
    )
    made.add_argument("--batch", type=int, help="rows of a micro-batch (default: the scenario's)")
    made.add_argument("--accumulate", type=int, help="micro-batches of a step (default: the scenario's)")
    made.add_argument("--repeat", type=int, default=1, help="runs of each engine, taken in turn")
    made.add_argument("--once", action="store_true", help="never run engines again that are within 10 %%")
    made.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    made.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    made.add_argument(
        "--wrap", type=option, nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for wrap()"
    )
    for name in NAMED:  # beside --wrap, which may say the same
        value, flag = (lambda text: option(f"value={text}")[1]), f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=value, default=argparse.SUPPRESS, help=f"wrap({name}=...)")
    made.add_argument("--clip", type=float, help="largest norm of the gradients")
    made.add_argument("--cap-gb", type=float, default=0.0, help="GiB that PyTorch may take on the GPU")
    made.add_argument("--ram-gb", type=float, default=0.0, help="GiB of RAM at which a run is given up")
    made.add_argument("--vram-budget", metavar="SIZE", help="wrap(vram_budget=SIZE) for engines that stream")
    made.add_argument("--no-parts", action="store_true", help="do not measure the parts of the bound")
    made.add_argument("--equality", action="store_true", help="deterministic; compare losses and weights")
    made.add_argument(
        "--profile", type=int, default=0, metavar="N", help="record N steps after the timed ones"
    )
    made.add_argument("--profile-ops", action="store_true", help="with --profile: costliest operators too")
    made.add_argument("--out-trace", type=Path, metavar="FILE", help="keep the trace: *.json or *.json.gz")
    made.add_argument("--smoke", action="store_true", help="tiny, two steps: does the script work")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the engines in turn."""
    words = sys.argv[1:]
    args = parser().parse_args(words)
    args.wrap = {name: vars(args)[name] for name in NAMED if name in vars(args)} | dict(args.wrap)
    if args.smoke:
        args.scenario, args.steps, args.equality, args.profile = "tiny", 2, True, 1
        args.engines = "trainstream,trainstream-stream"
    if args.worker:
        engine = args.worker.removeprefix(PARTS)
        for line in worker(args) if engine == args.worker else [parts(args, engine)]:
            print("\nRESULT " + json.dumps(line), flush=True)
        return 0
    names = args.engines.split(",")
    if unknown := sorted(set(names) - set(engines.ENGINES)):
        parser().error(f"unknown engines {', '.join(unknown)}; known: {', '.join(engines.ENGINES)}")
    bounded = scenario_of(args).kind == "full" and not args.no_parts and not args.equality
    results: list[dict] = []
    firsts: list[dict] = []  # of each process: with the scenario's own number of tokens
    measured: dict[bool, dict] = {}
    waiting = names * args.repeat
    while waiting:
        engine = waiting.pop(0)
        result, *more = run_all(words, engine, args.timeout, equal=args.equality)
        if bounded and engines.is_ours(engine):
            low = engine.endswith("-bf16")
            if low not in measured:
                measured[low] = run_one(words, PARTS + engine, args.timeout)
            result = verdicts.with_bound(result, measured[low])
        for line in (result, *more):
            results.append({"scenario": args.scenario, **line})
            emit(args.out, results[-1])
        firsts.append(result)
        if not waiting and not args.once and not args.equality:
            waiting = verdicts.close(firsts)
    if not args.equality and (line := verdicts.pairs(firsts))["pairs"]:
        emit(args.out, {"scenario": args.scenario, **line})
    failed = any("error" in result for result in results)
    if args.equality:
        verdict = verdicts.equality(results)
        failed |= not (verdict["losses_equal"] and verdict["weights_equal"])
        emit(args.out, {"scenario": args.scenario, "vram_budget": args.vram_budget, **verdict})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
