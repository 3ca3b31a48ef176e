"""Step time and memory of TrainStream beside its rivals: same shapes, tokens, adapters and learning rate.

Every engine runs in a fresh process. Weights are random in the real shapes; each engine uses its own best
loss (chunked where it has one). Output: one JSON object per run, also appended to ``--out``.

    python compare.py --scenario lora7b --engines trainstream-nf4,bnb,stock --steps 20 --out lora7b.json
    python compare.py --engines trainstream-stream,stock,bnb --vram-budget 12GiB --steps 20
    python compare.py --engines trainstream,trainstream-stream --vram-budget 12GiB --steps 20 --equality

`nvml_peak_gb` is the most that the process held while training, CUDA context included. Engines with `stream`
say what the link gives a plain page-locked copy in the same process (`link_gb_per_s`) and what they moved;
with `--vram-budget` the model starts in RAM and `wrap(vram_budget=...)` decides what is paged, without it
every block is paged and recomputed. `--equality` runs the engines with deterministic algorithms and eager
attention, and adds a line that says whether all losses and the trained weights are equal bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

#: name -> (shape, kind, batch, tokens per row, VRAM cap in GiB or 0)
SCENARIOS = {
    "tiny": ("tiny", "lora", 1, 64, 0),
    "lora7b": ("7b", "lora", 1, 512, 0),
    "lora7b_12gb": ("7b", "lora", 1, 512, 11.4),  # a 12 GiB card less 0.6 for context and libraries
    "lora14b": ("14b", "lora", 1, 512, 0),
    "lora14b_2k": ("14b", "lora", 1, 2048, 0),
    "full1.5b": ("1.5b", "full", 4, 512, 0),
}
#: Qwen2-family shapes: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, False),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
}
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ENGINES = (
    "trainstream-nf4",
    "trainstream-int8",
    "trainstream",
    "trainstream-stream",
    "trainstream-stream-nf4",
    "stock",
    "stock-ckpt",
    "bnb",
    "bnb-ckpt",
    "bnb-liger",
)
WARMUP = 3


def build(shape: str, dtype, device: str, replace=None, home: str | None = None, attention: str = "sdpa"):
    """Make the model with random weights drawn on `device` and kept on `home` (None: there).

    ``replace(linear)`` swaps each block linear.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(zip(SHAPE_KEYS, SHAPES[shape], strict=True))
    config = Qwen2Config(**sizes, rms_norm_eps=1e-6, max_position_embeddings=32768, use_cache=False)
    config._attn_implementation = attention
    home = home or device
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                value = torch.full(parameter.shape, float(key == "weight"), dtype=dtype, device=device)
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(
                    0, 0.02, generator=generator
                )
            module._parameters[key] = torch.nn.Parameter(value.to(home), requires_grad=True)
        if replace is not None and isinstance(module, torch.nn.Linear) and ".layers." in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, replace(module))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(home)
    return model


def add_lora(model):
    """LoRA r=16 on all seven projections, frozen base."""
    import peft
    import torch

    torch.manual_seed(0)  # the adapters start alike in every engine
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def bnb_linear(linear):
    """The same linear as bitsandbytes' NF4 layer."""
    import bitsandbytes as bnb
    import torch

    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=layer
    )
    if linear.bias is not None:
        layer.bias = torch.nn.Parameter(linear.bias.data, requires_grad=False)
    return layer.to(linear.weight.device)


def checkpointed(model):
    """Non-reentrant activation checkpointing, as transformers switches it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def make_engine(args: argparse.Namespace, shape: str, kind: str, device: str, lr: float):
    """Return (model, optimizer, loss function of ids)."""
    import torch

    engine = args.engine
    dtype = torch.bfloat16 if kind == "lora" else torch.float32
    planned = args.vram_budget is not None and is_streamed(engine)
    if engine == "bnb-liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    model = build(
        shape,
        dtype,
        device,
        bnb_linear if engine.startswith("bnb") else None,
        home="cpu" if planned else None,
        attention="eager" if args.equality else "sdpa",
    )
    if engine.endswith("ckpt") or engine == "bnb-liger":
        model = checkpointed(model)
    if engine.startswith("bnb"):
        model.is_loaded_in_4bit = True
    if kind == "lora":
        model = add_lora(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=device == "cuda" and not planned)
    model.train()
    if engine.startswith("trainstream"):
        import trainstream
        from ts_hf.losses import backbone, causal_lm_loss_for

        words = engine.split("-")[1:]
        codec = next((word for word in words if word != "stream"), "none")
        placement = {"param_offload": True, "recompute": True} if "stream" in words else {}
        if planned:
            if device == "cuda":
                torch.cuda.empty_cache()  # weights were drawn there
            placement = {"vram_budget": args.vram_budget, "device": device}
        model, optimizer = trainstream.wrap(model, optimizer, quantize=codec, **placement)

        def loss_of(ids):
            return causal_lm_loss_for(model, backbone(model)(input_ids=ids).last_hidden_state, ids)

        return model, optimizer, loss_of
    return model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss


def is_streamed(engine: str) -> bool:
    """Whether an engine pages weights."""
    return "stream" in engine.split("-")[1:]


class Sampler(threading.Thread):
    """Clock, power and device memory by NVML, the whole device's and this process's, every 20 ms."""

    def __init__(self) -> None:
        """Look for NVML; without it the fields stay empty."""
        super().__init__(daemon=True)
        self.clock_mhz: list[int] = []
        self.power_w: list[float] = []
        self.used_bytes = self.own_bytes = 0
        self.own_source = ""
        self.halt = threading.Event()
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # whatever NVML raises where there is none
            self.nvml = None

    def run(self) -> None:
        """Sample until told to halt."""
        from ts_core.usage import device_usage

        while self.nvml and not self.halt.wait(0.02):
            self.clock_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
            self.power_w.append(self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3)
            self.used_bytes = max(self.used_bytes, self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)
            own = device_usage("cuda:0")
            self.own_bytes, self.own_source = max(self.own_bytes, own.used_bytes), own.source

    def fields(self) -> dict:
        """Medians, the limit and the peak."""
        if not self.clock_mhz:
            return {}
        limit = self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle) / 1e3
        return {
            "clock_mhz": statistics.median(self.clock_mhz),
            "power_w": round(statistics.median(self.power_w), 1),
            "power_limit_w": limit,
            "device_used_gb": round(self.used_bytes / 1e9, 3),
            "nvml_peak_gb": round(self.own_bytes / 1e9, 3),
            "nvml_peak_source": self.own_source,
        }


def link_rate(mib: int = 256, repeat: int = 8) -> float:
    """GB/s of a plain copy from page-locked memory to the GPU, the best of some."""
    import torch

    import ts_paging

    host = ts_paging.pinned_empty(mib << 20)
    there = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (mib << 20) / min(seconds[1:]) / 1e9


def be_deterministic() -> None:
    """The same bits in every run; CUBLAS_WORKSPACE_CONFIG was set before this process began."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def digest(parameters) -> str:
    """Hash of the bytes of trained weights."""
    import torch

    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def worker(args: argparse.Namespace) -> dict:
    """Train one engine in this process and return its line."""
    import torch

    shape, kind, batch, tokens, cap_gib = SCENARIOS[args.scenario]
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if args.equality:
        be_deterministic()
    streamed_engine = is_streamed(args.engine)
    started = time.perf_counter()
    model, optimizer, loss_of = make_engine(args, shape, kind, device, lr=1e-4)
    load_s = time.perf_counter() - started
    link = link_rate() if cuda and streamed_engine else 0.0
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    if cuda:
        # The cap holds for training: random weights are made on the GPU, which is not what is compared.
        torch.cuda.empty_cache()
        # The resident side of a comparison for equality need not fit, and a budget is wrap()'s own to keep.
        if cap_gib and not (args.equality and not streamed_engine) and args.vram_budget is None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total))
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler()
    sampler.start()
    times, losses = [], []
    cpu0 = wall0 = 0.0
    for step in range(args.steps + WARMUP):
        if step == WARMUP:
            cpu0, wall0 = time.process_time(), time.perf_counter()
        ids = torch.randint(
            0, SHAPES[shape][SHAPE_KEYS.index("vocab_size")], (batch, tokens), generator=generator
        ).to(device)
        sync()
        begin = time.perf_counter()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    cores = (time.process_time() - cpu0) / (time.perf_counter() - wall0)
    sampler.halt.set()
    timed = sorted(times[WARMUP:])
    step_s = statistics.median(timed)
    memory = {}
    if cuda:
        memory["peak_allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
        memory["peak_reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
    versions = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "trainstream"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    exact = {}
    if args.equality:
        optimizer.zero_grad()
        trained = [p for p in model.parameters() if p.requires_grad]
        exact = {"losses_exact": [x.hex() for x in losses], "trained_sha256": digest(trained)}
    return {
        "scenario": args.scenario,
        "engine": args.engine,
        "vram_budget": args.vram_budget if streamed_engine else None,
        "steps": args.steps,
        "batch": batch,
        "tokens": tokens,
        "step_s": round(step_s, 5),
        "step_min_s": round(timed[0], 5),
        "step_max_s": round(timed[-1], 5),
        "step_times_s": [round(x, 4) for x in times],
        "tokens_per_s": round(batch * tokens / step_s, 1),
        **memory,
        "load_s": round(load_s, 2),
        "cpu_cores": round(cores, 2),
        "losses": [round(x, 5) for x in losses],
        **exact,
        **streamed(model, args.steps + WARMUP, step_s, link),
        **sampler.fields(),
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "cpu",
        "versions": versions,
    }


def streamed(model, steps: int, step_s: float, link: float) -> dict:
    """Weights that moved to the device, per step and per second beside the link's rate; empty if none did."""
    session = getattr(model, "_trainstream_session", None)
    if session is None or session.pager is None:
        return {}
    per_step = session.pager.host_bytes / steps
    rate = per_step / step_s / 1e9
    found = {"h2d_gb_per_step": round(per_step / 1e9, 3), "h2d_gb_per_s": round(rate, 2)}
    if link:
        found |= {"link_gb_per_s": round(link, 2), "link_frac": round(rate / link, 4)}
    rows = [row for row in session.plan.to_dict()["blocks"] if row["kind"] == "block"]
    policies = [row["policy"] for row in rows]
    return {
        **found,
        "paged_blocks": sum(row["tier"] != "device" for row in rows),
        "blocks": len(rows),
        "policies": {name: policies.count(name) for name in sorted(set(policies))},
    }


def equality(results: list[dict]) -> dict:
    """Compare the losses and the trained weights of all runs with those of the first."""
    good = [result for result in results if "losses_exact" in result]
    first = good[0]["losses_exact"] if good else []
    steps = [
        next((i for i, (a, b) in enumerate(zip(first, r["losses_exact"], strict=True)) if a != b), None)
        for r in good
    ]
    different = [step for step in steps if step is not None]
    return {
        "what": "equality",
        "engines": [result["engine"] for result in results],
        "steps": len(first),
        "losses_equal": len(good) == len(results) > 1 and not different,
        "weights_equal": len(good) == len(results) > 1 and len({r["trained_sha256"] for r in good}) == 1,
        "first_difference": min(different, default=None),
    }


def run_one(args: argparse.Namespace, engine: str) -> dict:
    """Run one engine in a fresh process; its line, or one that says what went wrong."""
    command = [
        sys.executable,
        __file__,
        "--scenario",
        args.scenario,
        "--worker",
        engine,
        "--steps",
        str(args.steps),
        *(["--vram-budget", args.vram_budget] if args.vram_budget else []),
        *(["--equality"] if args.equality else []),
    ]
    env = dict(os.environ)
    if args.equality:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    where = {"scenario": args.scenario, "engine": engine}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=env)
    except subprocess.TimeoutExpired:
        return {**where, "error": f"no result within {args.timeout} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {**where, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}


def emit(args: argparse.Namespace, line: dict) -> None:
    """Print a line and append it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(text + "\n")


def main() -> int:
    """Run the engines in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="lora7b")
    parser.add_argument("--engines", default="trainstream-nf4,bnb,stock", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--steps", type=int, default=10, help=f"timed steps, after {WARMUP} for warming up")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each engine, taken in turn")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="file that JSON lines are appended to")
    parser.add_argument(
        "--vram-budget", metavar="SIZE", help="wrap(vram_budget=SIZE) for engines that stream"
    )
    parser.add_argument("--equality", action="store_true", help="deterministic; compare losses and weights")
    parser.add_argument("--smoke", action="store_true", help="tiny, two steps: does the script work")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.scenario, args.steps, args.equality = "tiny", 2, True
        args.engines = "trainstream,trainstream-stream"
    if args.worker:
        args.engine = args.worker
        print("RESULT " + json.dumps(worker(args)), flush=True)
        return 0
    engines = args.engines.split(",")
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    failed, results = False, []
    for _ in range(args.repeat):
        for engine in engines:
            result = run_one(args, engine)
            failed |= "error" in result
            results.append(result)
            emit(args, result)
    if args.equality:
        verdict = equality(results)
        failed |= not (verdict["losses_equal"] and verdict["weights_equal"])
        emit(args, {"scenario": args.scenario, "vram_budget": args.vram_budget, **verdict})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
