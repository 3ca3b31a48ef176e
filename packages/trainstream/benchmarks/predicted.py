"""What the planner predicts, written down before the model is built, beside what is then measured.

    python predicted.py --out predicted.jsonl --limit-s 500                  # as many configurations as fit
    python predicted.py --out predicted.jsonl --configs 7b-lora-nf4-512-8 --force 6
    python predicted.py --out predicted.jsonl --table
    python predicted.py --out predicted.jsonl --calibrate

A configuration is SHAPE-KIND-CODEC-TOKENS-CAP: the cap in GB is of VRAM (`vram_budget`), on a machine
without a GPU of RAM. Those that `--out` holds already are skipped, so a run goes on where it was stopped. For
each one

1. the parent plans from the shape alone and writes the prediction to a file, `<out>.<configuration>.json`;
2. a fresh process builds the model, wraps it, trains until nothing adapts any more, then measures steps;
3. a line is appended to `--out`: `predicted`, `measured`, `error` (measured / predicted - 1), the plan that
   was predicted and the one that was in use at the end, and `same_plan`, the prediction for the latter.

`--force N` then trains with N other plans, each in a fresh process with everything fixed by options, the
neighbours of the chosen one first; `best_of_forced` is its step over the least of all.

`--calibrate` fits the constants of the cost model (`ts_core.constants`) to all lines and prints them: seconds
to those of steps, bytes of activations to peaks. Each is weighed by what was in use, not by what was planned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import predicted_run

#: Beside those that `engines` has.
MORE_SHAPES = {
    "50m": (768, 2048, 6, 12, 4, 8192, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
}
CONFIGS = (
    "7b-lora-none-512-8", "7b-lora-none-4096-12", "7b-lora-none-2048-24", "7b-lora-nf4-512-8",
    "7b-lora-nf4-2048-12", "7b-lora-int8-1024-12", "7b-lora-none-2048-80", "14b-lora-nf4-512-12",
    "14b-lora-nf4-2048-16", "14b-lora-none-512-16", "14b-lora-int8-4096-24", "32b-lora-nf4-512-24",
    "32b-lora-nf4-2048-80", "1.5b-full-none-512-8", "1.5b-full-none-2048-16", "7b-full-none-512-24",
)  # fmt: skip
SMOKE = ("tiny-lora-none-32-2",)
#: For a machine without a GPU; a cap of 0 is none.
SMALL = (
    "50m-lora-none-64-0", "50m-full-none-64-0", "50m-lora-nf4-64-0", "50m-lora-none-64-0.3",
    "50m-full-none-64-0.7",
)  # fmt: skip
RANK = 16  # of `engines.add_lora`
#: RAM of a process that computes there, beside its tensors, whatever the size of the model: code that
#: libraries make for each shape, and small blocks that the C library keeps. `wrap()` leaves more unplanned.
BESIDE = 20_000_000
TARGETS = {"device": 0.05, "host": 0.02, "step": 0.15}


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration."""

    shape: str
    kind: str
    codec: str
    tokens: int
    cap: float

    @classmethod
    def parse(cls, name: str) -> Config:
        """Read its name."""
        try:
            shape, kind, codec, tokens, cap = name.split("-")
            found = cls(shape, kind, codec, int(tokens), float(cap))
        except ValueError as error:
            raise SystemExit(f"--configs {name}: expected SHAPE-KIND-CODEC-TOKENS-CAP") from error
        if shape not in engines.SHAPES or kind not in ("lora", "full"):
            raise SystemExit(f"--configs {name}: shapes are {', '.join(engines.SHAPES)}; kinds lora and full")
        return found

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.shape}-{self.kind}-{self.codec}-{self.tokens}-{self.cap:g}"

    def setting(self, device: str, forced: dict[str, Any]) -> engines.Setting:
        """What `engines.make` builds."""
        words = {"lora": "trainstream", "full": "trainstream-full-bf16"}[self.kind]
        engine = words if self.codec == "none" else f"{words}-{self.codec}"
        wrap: dict[str, Any] = {"plan_tokens": self.tokens, **forced}
        if self.cap:
            wrap["vram_budget" if device == "cuda" else "ram_budget"] = int(self.cap * 2**30)
        return engines.Setting(engine, self.shape, self.kind, 1, device, wrap=wrap)


# ------------------------------------------------------------------------------------------------ predict


def spec_of_shape(shape: str) -> Any:
    """The spec, from the config alone."""
    from ts_hf.config_spec import spec_from_config

    sizes = dict(zip(engines.SHAPE_KEYS, engines.SHAPES[shape], strict=True))
    return spec_from_config({"model_type": "qwen2", "dtype": "bfloat16", **sizes})


def job_of(config: Config, spec: Any, cpu: bool, capture: bool) -> Any:
    """What is trained, as `wrap()` asks about it."""
    from trainstream._first import packing_of, planned_job

    lora = config.kind == "lora"
    return planned_job(
        spec,
        cpu=cpu,
        seq_len=config.tokens,
        lora_rank=RANK if lora else 0,
        trains=not lora,
        packings=[packing_of(config.codec)],
        moments=("float32",) if lora else ("float32", "bfloat16", "int8"),
        capture=capture,
    )


def captures(device: str) -> bool:
    """Whether `wrap()` has blocks recorded by itself."""
    import torch

    from trainstream._options import WrapOptions
    from trainstream._paging import captured

    return captured(WrapOptions.from_kwargs(), torch.device(device))


def room_of(config: Config, spec: Any, cpu: bool, others: int) -> Any:
    """What may be used, as `wrap()` counts it; `others` is what a process without a model holds of it."""
    import tempfile

    from ts_core.headroom import arena_growth, unplanned
    from ts_core.job import Room
    from ts_core.memory import device_budget, disk_budget, host_budget

    ram, files = host_budget().available_bytes, disk_budget(tempfile.gettempdir())
    cap = int(config.cap * 2**30)
    if cpu:
        ram = min(ram, cap - others) if cap else ram
        return Room(ram - unplanned(ram, spec.bytes), None, files)
    beside = beside_tensors(config) if cap else 0
    here = device_budget("cuda")
    free = here.available_bytes + here.cached_bytes
    free = min(free, cap - beside) if cap else free
    return Room(int(free * 0.9), ram - arena_growth(ram), files)


@functools.cache
def beside_tensors(config: Config) -> int:
    """What a process holds of the GPU beside tensors when it calls `wrap()`, as that counts it."""
    import torch

    from trainstream._budget import context_bytes
    from ts_core.usage import CONTEXT_BYTES

    predicted_run.warm_up("cuda", config)
    return max(context_bytes(torch.device("cuda", torch.cuda.current_device())) or 0, CONTEXT_BYTES)


def rates(device: str) -> Any:
    """Rates of this machine."""
    from ts_core.hardware import kept_profile, profile_hardware
    from ts_core.job import assumed_profile

    if device == "cuda":
        return profile_hardware(device)
    return kept_profile(device) or assumed_profile(device)


def predict(config: Config, device: str, others: int = 0) -> dict[str, Any]:
    """The plan and what it takes; nothing is built."""
    from ts_core.advice import plan_of
    from ts_core.search import choose

    cpu = device == "cpu"
    spec = spec_of_shape(config.shape)
    capture = captures(device)
    job, room, profile = job_of(config, spec, cpu, capture), room_of(config, spec, cpu, others), rates(device)
    found = choose(spec, job, profile, room)
    plan = plan_of(spec, found, room, job=job, device=device)
    return {
        "prediction": dataclasses.asdict(with_beside(found.prediction, cpu)),
        "choice": dataclasses.asdict(found.choice),
        "room": dataclasses.asdict(room),
        "capture": capture,
        "profile": json.loads(profile.to_json()),
        "policies": list(plan.policy),
        "places": [("settled" if b.settled else b.tier) for b in plan.blocks],
    }


def choice_in_use(config: Config, line: dict[str, Any]) -> Any:
    """The plan in counts that a run ended with."""
    from ts_core.job import PLACES, POLICIES, Choice, Setting

    spec = spec_of_shape(config.shape)
    moments = line["moments"]
    setting = Setting(_packing(config), moments, 1, "microbatch", max(line["slots"], 1))
    places, policies = [], []
    stack = [index for index, block in enumerate(spec.blocks) if block.kind == "block"]
    of_stack = dict(zip(stack, line["policies"], strict=True))
    for members in spec.classes():
        names = [line["places"][i] for i in members]
        if spec.blocks[members[0]].kind in ("norm", "other"):
            names = ["device"] * len(names)
        places.append(tuple(names.count(place) for place in PLACES))
        kept = [of_stack[i] for i in members if i in of_stack]
        policies.append(tuple(kept.count(policy) for policy in POLICIES))
    return Choice(setting, tuple(places), tuple(policies))


def _packing(config: Config) -> Any:
    from trainstream._first import packing_of

    return packing_of(config.codec)


def prediction_of(config: Config, line: dict[str, Any], used: dict[str, Any]) -> Any:
    """What the model says of a plan that was in use, on the machine that the line is from."""
    from ts_core.hardware import HardwareProfile
    from ts_core.step import predict as predicted

    spec = spec_of_shape(config.shape)
    cpu = line["device"] == "cpu"
    profile = HardwareProfile.from_json(json.dumps(line["profile"]))
    capture = used.get("captured", 0) > 0
    found = predicted(spec, job_of(config, spec, cpu, capture), profile, choice_in_use(config, used), cpu=cpu)
    return with_beside(found, cpu)


def with_beside(prediction: Any, cpu: bool) -> Any:
    """A prediction of the process, not of tensors alone."""
    return dataclasses.replace(prediction, device_bytes=prediction.device_bytes + BESIDE * cpu)


# ------------------------------------------------------------------------------------------------ measure


def run_worker(config: Config, args: argparse.Namespace, forced: dict[str, Any]) -> dict[str, Any]:
    """Measure in a fresh process."""
    words = [sys.executable, __file__, "--worker", config.name, "--device", args.device]
    words += ["--options", json.dumps(forced)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"not finished after {args.timeout} s"}
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not lines:
        return {"problem": (done.stderr.strip().splitlines() or ["no line"])[-1][:500]}
    return json.loads(lines[-1])


def others_of(config: Config, args: argparse.Namespace) -> int:
    """Bytes of RAM that a process holds that has imported and warmed up everything, but has no model."""
    if args.device != "cpu":
        return 0
    key = dataclasses.replace(config, shape="tiny", cap=0.0).name
    if key not in args.others:
        words = [sys.executable, __file__, "--worker", f"probe:{key}", "--device", "cpu"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout, check=True)
        args.others[key] = json.loads(done.stdout.strip().splitlines()[-1])["others_bytes"]
    return int(args.others[key])


def probe(config: Config) -> dict[str, Any]:
    """Say what this process holds, as `wrap()` counts it."""
    import trainstream  # noqa: F401 -- the baseline
    from trainstream._budget import host_used

    predicted_run.warm_up("cpu", config)
    return {"others_bytes": host_used()}


def neighbours(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Other plans as options of `wrap()`, those nearest to the plan in use first."""
    policies, places = line["policies"], line["stack"]
    count = len(policies)
    paged = sum(place in ("host", "disk") for place in places)
    again, off = policies.count("recompute"), policies.count("offload")
    near = sorted({1, max(count // 8, 1), max(count // 4, 1), count // 2, count})
    seen = {(paged, again, off)}
    for way in near:
        for streams, recomputes, offloads in (
            (paged + way, again, off),
            (paged - way, again, off),
            (paged, again + way, off),
            (paged, again - way, off),
            (paged, again - way, off + way),
            (paged + way, again - way, off),
            (paged - way, again + way, off),
        ):
            wanted = streams, recomputes, offloads
            fine = all(0 <= n <= count for n in wanted) and recomputes + offloads <= count
            if not fine or wanted in seen:
                continue
            seen.add(wanted)
            evenly = [i * count // streams for i in range(streams)]
            yield {
                "param_offload": evenly or False,
                "recompute": list(range(recomputes)) or False,
                "activation_offload": offloads / count if offloads else False,
            }


def measure(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Predict, run, compare; one line."""
    from ts_core.errors import DoesNotFitError

    line: dict[str, Any] = {"config": config.name, "device": args.device}
    try:
        planned = predict(config, args.device, others_of(config, args) if config.cap else 0)
    except DoesNotFitError as error:
        return {**line, "problem": f"no plan: {error}"}
    # On disk before anything is built.
    before = Path(f"{args.out}.{config.name}.json")
    before.write_text(json.dumps({**line, "written_at": time.time(), **planned}))
    line |= {"predicted": planned["prediction"], "choice": planned["choice"], "profile": planned["profile"]}
    line["predicted_file"] = before.name
    used = run_worker(config, args, {})
    if "problem" in used:
        return {**line, **used}
    line["measured"] = used
    line["same_places"] = used["places"] == planned["places"]
    line["error"] = errors(used, planned["prediction"])
    same = dataclasses.asdict(prediction_of(config, line, used))
    line["same_plan"] = {**same, "error": errors(used, same)}
    if args.force:
        line |= force(config, args, used)
    return line


def errors(used: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """Measured over predicted, less 1."""
    pairs = {"device": "device_bytes", "host": "host_bytes", "step": "step_s"}
    return {
        name: round(used[key] / predicted[key] - 1, 4)
        for name, key in pairs.items()
        if predicted[key] and (used[key] or name != "host")
    }


def force(config: Config, args: argparse.Namespace, used: dict[str, Any]) -> dict[str, Any]:
    """Train with other plans."""
    stack = [
        place
        for place, block in zip(used["places"], spec_of_shape(config.shape).blocks, strict=True)
        if block.kind == "block"
    ]
    tried = []
    for options in neighbours({**used, "stack": stack}):
        if len(tried) >= args.force or time.monotonic() > args.end:
            break
        found = run_worker(config, args, options)
        keys = ("problem", "step_s", "device_bytes")
        tried.append({"options": options, **{key: found[key] for key in keys if key in found}})
    least = min([t["step_s"] for t in tried if "step_s" in t], default=math.inf)
    return {"forced": tried, "best_of_forced": round(used["step_s"] / min(least, used["step_s"]), 4)}


# ------------------------------------------------------------------------------------- results and constants


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines() if text.startswith("{")]


def table(lines: list[dict[str, Any]]) -> str:
    """A table for the documentation."""
    head = (
        "| configuration | peak predicted / measured, GB | error | RAM predicted / measured, GB | error | "
        "step predicted / measured, s | error | over best forced |\n|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for line in lines:
        if "measured" not in line:
            rows.append(f"| {line['config']} | {line.get('problem', '')} | | | | | | |")
            continue
        planned, used, error = line["predicted"], line["measured"], line["error"]
        cells = [line["config"]]
        for key, name in (("device_bytes", "device"), ("host_bytes", "host")):
            cells.append(f"{planned[key] / 1e9:.2f} / {used[key] / 1e9:.2f}")
            cells.append(f"{error[name]:+.1%}" if name in error else "")
        cells += [f"{planned['step_s']:.3f} / {used['step_s']:.3f}", f"{error['step']:+.1%}"]
        forced = [t for t in line.get("forced", []) if "step_s" in t]
        cells.append(f"{line['best_of_forced']:.3f} of {len(forced)}" if forced else "")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([head, *rows])


def calibrate(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the constants: the least sum of squared logarithms of measured over predicted."""
    from ts_core.constants import Constants, constants, using

    good = [line for line in lines if "measured" in line]
    if not good:
        raise SystemExit("--calibrate: the result file has no measured line")

    def loss(those: Constants) -> tuple[float, float]:
        seconds = nbytes = 0.0
        with using(those):
            for line in good:
                used = line["measured"]
                found = prediction_of(Config.parse(line["config"]), line, used)
                seconds += math.log(used["step_s"] / found.step_s) ** 2
                nbytes += math.log(used["device_bytes"] / max(found.device_bytes, 1)) ** 2
        return seconds, nbytes

    best = constants()
    before = loss(best)
    for which, names in ((1, ("saved", "work")), (0, seconds_of(good))):
        least = loss(best)[which]
        for width in (1.0, 0.5, 0.25, 0.1, 0.05, 0.02):
            improved = True
            while improved:
                improved = False
                for name in names:
                    for factor in (1 + width, 1 / (1 + width)):
                        trial = dataclasses.replace(best, **{name: getattr(best, name) * factor})
                        value = loss(trial)[which]
                        if value < least * (1 - 1e-6):
                            least, best, improved = value, trial, True
    after = loss(best)
    count = len(good)
    return {
        "what": "constants",
        "lines": count,
        "constants": {key: float(f"{value:.4g}") for key, value in dataclasses.asdict(best).items()},
        "step_error": [round(math.expm1(math.sqrt(v[0] / count)), 4) for v in (before, after)],
        "peak_error": [round(math.expm1(math.sqrt(v[1] / count)), 4) for v in (before, after)],
    }


def seconds_of(lines: list[dict[str, Any]]) -> tuple[str, ...]:
    """Constants that the seconds of these lines depend on."""
    if all(line["device"] == "cpu" for line in lines):
        return "traffic", "host_work", "adapter_kernels", "beside"
    return "gpu_traffic", "gpu_host_work", "adapter_kernels", "beside", "captured", "captured_back", "outside"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("predicted.jsonl"))
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no configuration after that")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one process")
    parser.add_argument("--force", type=int, default=0, help="other plans to try by force")
    parser.add_argument("--again", action="store_true", help="also those that --out has with a problem")
    parser.add_argument("--table", action="store_true", help="print the results as a table")
    parser.add_argument("--calibrate", action="store_true", help="fit the constants of the cost model")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    args = arguments()
    args.others = {}
    engines.SHAPES.update(MORE_SHAPES)
    if args.device is None or args.smoke:
        import torch

        args.device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
    if args.configs is None:
        args.configs = ",".join(CONFIGS if args.device == "cuda" else SMALL)
    if args.worker:
        if args.worker.startswith("probe:"):
            line = probe(Config.parse(args.worker.removeprefix("probe:")))
        else:
            line = predicted_run.measured(Config.parse(args.worker), args.device, json.loads(args.options))
        print(json.dumps(line), flush=True)
        return
    with contextlib.ExitStack() as stack:
        if args.smoke:
            import tempfile

            args.out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "predicted.jsonl"
            args.configs, args.force = ",".join(SMOKE), 0
        if args.table:
            print(table(read(args.out)))
            return
        if not args.calibrate:
            run_all(args)
        if args.calibrate or args.smoke:
            print(json.dumps(calibrate(read(args.out))))


def run_all(args: argparse.Namespace) -> None:
    """Run what is not in the result file yet, while there is time."""
    args.end = time.monotonic() + args.limit_s
    had = {line["config"] for line in read(args.out) if not (args.again and "problem" in line)}
    for name in args.configs.split(","):
        config = Config.parse(name)
        if config.name in had:
            continue
        if time.monotonic() > args.end:
            print(f"# --limit-s: {name} and what follows is left for another run", file=sys.stderr)
            return
        line = measure(config, args)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
