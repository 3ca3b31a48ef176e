"""Step time and memory of TrainStream beside its rivals: same shapes, tokens, adapters and learning rate.

Every engine runs in a fresh process. Weights are random in the real shapes; each engine uses its own best
loss (chunked where it has one). Output: one JSON object per run, also appended to ``--out``.

    python compare.py --scenario lora7b --engines trainstream-nf4,bnb,stock --steps 20 --out lora7b.json
"""

from __future__ import annotations

import argparse
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


def build(shape: str, dtype, device: str, replace=None):
    """Make the model with random weights on `device`; ``replace(linear)`` swaps each block linear."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(zip(SHAPE_KEYS, SHAPES[shape], strict=True))
    config = Qwen2Config(**sizes, rms_norm_eps=1e-6, max_position_embeddings=32768, use_cache=False)
    config._attn_implementation = "sdpa"
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
            module._parameters[key] = torch.nn.Parameter(value, requires_grad=True)
        if replace is not None and isinstance(module, torch.nn.Linear) and ".layers." in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, replace(module))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def add_lora(model):
    """LoRA r=16 on all seven projections, frozen base."""
    import peft

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


def make_engine(engine: str, shape: str, kind: str, device: str, lr: float):
    """Return (model, optimizer, loss function of ids)."""
    import torch

    dtype = torch.bfloat16 if kind == "lora" else torch.float32
    if engine == "bnb-liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    model = build(shape, dtype, device, bnb_linear if engine.startswith("bnb") else None)
    if engine.endswith("ckpt") or engine == "bnb-liger":
        model = checkpointed(model)
    if engine.startswith("bnb"):
        model.is_loaded_in_4bit = True
    if kind == "lora":
        model = add_lora(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=device == "cuda")
    model.train()
    if engine.startswith("trainstream"):
        import trainstream
        from ts_hf.losses import backbone, causal_lm_loss_for

        words = engine.split("-")[1:]
        codec = next((word for word in words if word != "stream"), "none")
        placement = {"param_offload": True, "recompute": True} if "stream" in words else {}
        model, optimizer = trainstream.wrap(model, optimizer, quantize=codec, **placement)

        def loss_of(ids):
            return causal_lm_loss_for(model, backbone(model)(input_ids=ids).last_hidden_state, ids)

        return model, optimizer, loss_of
    return model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss


class Sampler(threading.Thread):
    """Clock, power and this process's device memory by NVML, every 20 ms."""

    def __init__(self) -> None:
        """Look for NVML; without it the fields stay empty."""
        super().__init__(daemon=True)
        self.clock_mhz: list[int] = []
        self.power_w: list[float] = []
        self.used_bytes = 0
        self.halt = threading.Event()
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # whatever NVML raises where there is none
            self.nvml = None

    def run(self) -> None:
        """Sample until told to halt."""
        while self.nvml and not self.halt.wait(0.02):
            self.clock_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
            self.power_w.append(self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3)
            self.used_bytes = max(self.used_bytes, self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def fields(self) -> dict:
        """Medians, the limit and the peak."""
        if not self.clock_mhz:
            return {}
        limit = self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle) / 1e3
        return {
            "clock_mhz": statistics.median(self.clock_mhz),
            "power_w": round(statistics.median(self.power_w), 1),
            "power_limit_w": limit,
            "device_used_gb": round(self.used_bytes / 1e9, 2),
        }


def worker(args: argparse.Namespace) -> dict:
    """Train one engine in this process and return its line."""
    import torch

    shape, kind, batch, tokens, cap_gib = SCENARIOS[args.scenario]
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    started = time.perf_counter()
    model, optimizer, loss_of = make_engine(args.engine, shape, kind, device, lr=1e-4)
    load_s = time.perf_counter() - started
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    if cuda:
        # The cap holds for training: random weights are made on the GPU, which is not what is compared.
        torch.cuda.empty_cache()
        if cap_gib:
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
    return {
        "scenario": args.scenario,
        "engine": args.engine,
        "steps": args.steps,
        "batch": batch,
        "tokens": tokens,
        "step_s": round(step_s, 5),
        "step_min_s": round(timed[0], 5),
        "step_max_s": round(timed[-1], 5),
        "tokens_per_s": round(batch * tokens / step_s, 1),
        **memory,
        "load_s": round(load_s, 2),
        "cpu_cores": round(cores, 2),
        "losses": [round(x, 5) for x in losses],
        **streamed(model, args.steps + WARMUP, step_s),
        **sampler.fields(),
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "cpu",
        "versions": versions,
    }


def streamed(model, steps: int, step_s: float) -> dict:
    """Weights that moved to the device, per step and per second; empty if none did."""
    session = getattr(model, "_trainstream_session", None)
    if session is None or session.pager is None:
        return {}
    per_step = session.pager.host_bytes / steps
    return {"h2d_gb_per_step": round(per_step / 1e9, 3), "h2d_gb_per_s": round(per_step / step_s / 1e9, 2)}


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
    ]
    where = {"scenario": args.scenario, "engine": engine}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout, env=dict(os.environ)
        )
    except subprocess.TimeoutExpired:
        return {**where, "error": f"no result within {args.timeout} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {**where, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}


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
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.engine = args.worker
        print("RESULT " + json.dumps(worker(args)), flush=True)
        return 0
    engines = args.engines.split(",")
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown:
        parser.error(f"unknown engines {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    failed = False
    for _ in range(args.repeat):
        for engine in engines:
            result = run_one(args, engine)
            failed |= "error" in result
            print(json.dumps(result), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
