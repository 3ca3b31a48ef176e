"""How many operations a decoder block with adapters takes, plain and with fused paths, and how much Python.

One JSON line per variant of the model ("plain": transformers and PEFT as they come; "kernels": norms, sums,
rotary embedding and MLP; "lora": adapters; "all"), dtype of the adapters and phase. `operations` is what the
dispatcher runs (views apart, which launch nothing; a grouped one counts once) and, with `--device cuda`,
`launches` what the profiler saw start on the GPU; `us` is processor time of the calling thread, small sizes:
the cost of Python and of dispatching.
`python count_launches.py [--device cuda] [--quick] [--list]`; `--list` adds the operations.
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ts_fused import _checked_lora, checked, patch_fused

VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "kernels": ("rms_norm", "rotary", "gated_mlp", "add_rms_norm"),
    "lora": ("lora",),
    "all": checked.KINDS,
}


class Operations(TorchDispatchMode):
    """Counts what runs; views and questions about a tensor's memory launch nothing."""

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count."""
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in ("_unsafe_view", "empty", "empty_like", "new_empty", "detach"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def build(kinds: tuple[str, ...], adapter: torch.dtype, device: str) -> tuple[Any, Callable[[], Any]]:
    """Make one Llama block with adapters on all its linear layers, and how it is called."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation="sdpa", pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).to(device)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter)
    if kinds:
        patch_fused(model, kinds=kinds)
    inner = model.base_model.model.model
    x = torch.randn(1, 8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    angles = inner.rotary_emb(x, position_ids=torch.arange(8, device=device)[None])
    block = inner.layers[0]
    return block, lambda: block(x, attention_mask=None, position_embeddings=angles)


def launches(run: Callable[[], Any]) -> int:
    """Kernels, copies and fills that the profiler saw on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(1 for event in profile.events() if event.device_type == on_gpu)


def phases(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Forward, and the backward of one that was made before."""
    out = call()
    grad = torch.ones_like(out)
    return {
        "forward": call,
        "backward": lambda: torch.autograd.backward(out, grad, retain_graph=True),
    }


def measure(run: Callable[[], Any], block: Any, device: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Count one phase, its gradients new each time as after `zero_grad`."""

    def once() -> None:
        for parameter in block.parameters():
            parameter.grad = None
        run()

    once()
    with Operations() as seen:
        once()
    found: dict[str, Any] = {"operations": seen.counts.total(), "list": dict(seen.counts.most_common())}
    if device == "cuda":
        found["launches"] = launches(once)
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(repeats):
            once()
        times.append((time.thread_time() - begin) / repeats * 1e6)
    return found | {"us": round(min(times), 1), "median_us": round(statistics.median(times), 1)}


def main() -> None:
    """Print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", "--smoke", action="store_true", help="two rounds of three calls")
    parser.add_argument("--list", action="store_true", help="the operations too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Fused paths at every size: on a CPU small ones run the modules' own code.
    _checked_lora.WORTH_IT, checked.WORTH_IT = 0, {}
    rounds, repeats = (2, 3) if args.quick else (15, 40)
    for adapter in (torch.float32, torch.bfloat16):
        for variant, kinds in VARIANTS.items():
            block, call = build(kinds, adapter, args.device)
            for phase, run in phases(call).items():
                found = measure(run, block, args.device, rounds, repeats)
                listed = found.pop("list")
                line = {
                    "benchmark": "count_launches",
                    "name": variant,
                    "adapters": str(adapter).removeprefix("torch."),
                    "phase": phase,
                    **found,
                    **({"list": listed} if args.list else {}),
                    "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
                    "torch": torch.__version__,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
