"""Options that were given and find nothing to act on: each is named in an event.

A value outside the accepted ones, and one that contradicts the model, is refused elsewhere. What is here is
right by itself and does nothing in this place: a GPU's option on a CPU, an optimizer's where none is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainstream._options import WrapOptions
from trainstream._paging import Asked, to_offload
from ts_core.memory import format_bytes
from ts_optim import OffloadAdamW

__all__ = ["REPORTED", "Facts", "unused"]

#: Options whose effect, or lack of it, is an event or an error of their own, and limits, which always hold.
REPORTED = frozenset(
    {
        *("quantize", "attention", "kernels", "fused_lora", "outliers", "nvfp4_backward", "fp8_backward"),
        *("keep_precise", "error_rank", "double_quant", "recompute", "offload"),
        *("device", "blocks", "distributed", "moe_paging", "peer", "schedule", "lossless"),
        *("vram_budget", "ram_budget", "disk_budget", "check_memory", "plan_tokens", "profile", "verbose"),
    }
)
_SCALED = ("none", "int8", "nf4")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What `wrap()` has made of a model.

    Attributes:
        options: As they were given.
        cpu: The model computes on the CPU.
        given: The optimizer that was given.
        adopted: The one that is used.
        blocks: Blocks of the stack.
        want: What the options ask for, block by block.
        codec: Codec of frozen block weights.
        packed: Weights that were packed.
        frozen: Weights that a codec could hold.
        paged: Weights that live on another tier.
        fixed: Blocks that `param_offload` names and that hold nothing which can be paged.
        files: Anything lives in files.
        spills: Activations leave by themselves, and the time that costs is measured.
    """

    options: WrapOptions
    cpu: bool
    given: Optimizer | None
    adopted: Optimizer | None
    blocks: int
    want: Asked
    codec: str
    packed: int
    frozen: int
    paged: int
    fixed: int
    files: bool
    spills: bool


def _of_adamw(facts: Facts) -> str:
    if facts.adopted is None:
        return "no parameter requires grad, so there is no optimizer"
    if not isinstance(facts.adopted, OffloadAdamW):
        return f"{type(facts.adopted).__name__} updates in its own way"
    return ""


def _lr(facts: Facts) -> str:
    if facts.given is not None:
        return "the given optimizer has its own, by parameter group"
    return _of_adamw(facts)


def _of_gpu(facts: Facts) -> str:
    return "the model computes on the CPU" if facts.cpu else ""


def _arena(facts: Facts) -> str:
    return "page-locked memory serves a GPU, and the model computes on the CPU" if facts.cpu else ""


def _block_size(facts: Facts) -> str:
    if not facts.packed:
        return "no weight is packed here"
    return "" if facts.codec in _SCALED else f"{facts.codec} has a block size of its own"


def _prefer(facts: Facts) -> str:
    if facts.options.quantize != "auto":
        return f"quantize={facts.options.quantize} names the codec; it decides under quantize='auto'"
    return "" if facts.frozen else "no block holds a frozen weight that could be packed"


def _iterations(facts: Facts) -> str:
    if not facts.options.error_rank:
        return "error_rank=0 fits no error"
    return "" if facts.packed else "no weight is packed here"


def _offload(facts: Facts) -> str:
    wanted = to_offload(facts.options, facts.blocks)
    if not facts.blocks or not facts.options.activation_offload or facts.options.activation_offload == "auto":
        return ""
    if not wanted:
        return (
            "the stack has one block, and the activations of the last one stay: backward needs them at once"
        )
    left = [index for index in wanted if facts.want.policy[index] == "offload"]
    if len(left) == len(wanted):
        return ""
    what = f"recompute={facts.options.recompute} comes first"
    if left:
        return f"for {len(wanted) - len(left)} of {len(wanted)} blocks, which recompute instead: {what}"
    return f"every block that it names recomputes instead: {what}; leave recompute out to offload"


def _pages(facts: Facts) -> str:
    named = sum(paged is True for paged in facts.want.paged)
    return f"for {facts.fixed} of {named} blocks, none of whose weights can be paged" if facts.fixed else ""


def _offloads(facts: Facts) -> str:
    if "offload" in facts.want.policy or "offload" in facts.want.fallback:
        return ""
    return "no block offloads its activations"


def _slowdown(facts: Facts) -> str:
    return "" if facts.spills else "no activations are offloaded by measurement here"


def _streams(facts: Facts) -> str:
    return "" if facts.paged else "no weight is paged, so nothing is fetched ahead or waited for"


def _files(facts: Facts) -> str:
    return "" if facts.files else "nothing has to live in files so far"


def _capture(facts: Facts) -> str:
    if not facts.options.capture:
        return ""
    return "" if facts.blocks else "the model has no stack of blocks; name one with blocks="


_RULES: dict[str, Callable[[Facts], str]] = {
    "optimizer_mode": _of_adamw,
    "moment_dtype": _of_adamw,
    "threads": _of_adamw,
    "max_grad_norm": _of_adamw,
    "accumulation_steps": _of_adamw,
    "lr": _lr,
    "vram_headroom": _of_gpu,
    "max_inflight_bytes": _of_gpu,
    "host_arena": _arena,
    "quant_block_size": _block_size,
    "prefer": _prefer,
    "error_iters": _iterations,
    "activation_offload": _offload,
    "param_offload": _pages,
    "min_offload_bytes": _offloads,
    "max_activation_slowdown": _slowdown,
    "prefetch_depth": _streams,
    "guard_params": _streams,
    "disk_offload": _files,
    "capture": _capture,
}


def _written(value: Any) -> str:
    return format_bytes(value) if type(value) is int and value >= 1 << 20 else str(value)


def unused(facts: Facts) -> list[str]:
    """Return one line for each option that was given a value other than its default and does nothing."""
    lines = []
    for field in dataclasses.fields(WrapOptions):
        name, value = field.name, getattr(facts.options, field.name)
        rule = _RULES.get(name)
        if rule is None or value is None or (type(value) is type(field.default) and value == field.default):
            continue
        reason = rule(facts)
        if reason:
            lines.append(f"{name}={_written(value)} ignored: {reason}")
    return lines
