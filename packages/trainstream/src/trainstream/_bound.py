"""What a step could not be faster than on this machine, by resource, and what would help. Pure functions.

    busy_s[resource] = what the step moved or computed / what the machine does in a second
    bound_s = the longest of them; share of the bound = bound_s / step_s; the limiter is the longest

A step in which nothing is busy for half of the time waits for something that is not counted: on a GPU the
launches of many small kernels, as a rule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ts_core.hardware import ASSUMED, ASSUMED_RATES, HardwareProfile, kept_profile

__all__ = ["LIMITERS", "Rates", "Verdict", "Work", "advice", "busy", "judge", "rates_for"]

_HALF = 0.5
#: What a limiter is called for people.
LIMITERS = {
    "gpu": "computation on the GPU",
    "cpu": "computation on the processor",
    "h2d": "the link, host to device",
    "d2h": "the link, device to host",
    "dram": "the optimizer in host memory",
    "disk": "the disk",
    "launch": "launches and Python: nothing counted is busy for half of a step",
    "unknown": "nothing that is counted is busy for half of a step",
}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        h2d, d2h, both: Bytes over the link, one way each and both at once.
        disk: Bytes read from files.
        flops: Of a large matrix product in the dtype of the run.
        measured: Whether they were measured here; assumed otherwise.
    """

    h2d: float
    d2h: float
    both: float
    disk: float
    flops: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step did.

    Attributes:
        h2d_bytes, d2h_bytes, disk_read_bytes: Moved.
        optimizer_s: Seconds in the optimizer's host kernels.
        flops: Of its matrix products, or None if not known.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    disk_read_bytes: int = 0
    optimizer_s: float = 0.0
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How near to the bound a step was.

    Attributes:
        bound_s: What it could not be faster than.
        share: bound_s / step_s, or None for a step whose time is not known.
        limiter: A key of `LIMITERS`.
    """

    bound_s: float
    share: float | None
    limiter: str


def _flops(table: dict[str, float], dtype: str) -> float:
    """The rate of the largest product measured in a dtype, or else in any."""
    named = [(key, rate) for key, rate in table.items() if key.partition("/")[0] == dtype]
    return max((rate for _, rate in named or table.items()), default=1e12)


def rates_for(device: str, dtype: str) -> Rates:
    """Read the profile of this machine if one is kept; nothing is measured.

    Args:
        device: "cpu" or "cuda:N".
        dtype: Name of the dtype that is computed in.

    Returns:
        The rates.
    """
    kind = torch.device(device).type
    profile: HardwareProfile | None = kept_profile(device)
    figures: Any = ASSUMED if profile is None else dataclasses.asdict(profile)
    table = (ASSUMED_RATES[kind] if profile is None else profile.rates).get("matmul_flops_per_s", {})
    return Rates(
        h2d=figures["h2d_bytes_per_s"],
        d2h=figures["d2h_bytes_per_s"],
        both=figures["both_bytes_per_s"],
        disk=figures["disk_read_bytes_per_s"],
        flops=_flops(table, dtype),
        measured=profile is not None,
    )


def busy(work: Work, rates: Rates, *, compute: str) -> dict[str, float]:
    """Return the seconds that each resource needs for a step.

    Args:
        work: What the step did.
        rates: Of the machine.
        compute: What computation is called: "gpu" or "cpu".

    Returns:
        Resource -> seconds; computation is left out if its amount is not known.

    Example:
        >>> rates = Rates(h2d=50e9, d2h=50e9, both=80e9, disk=2e9, flops=1e14, measured=True)
        >>> busy(Work(h2d_bytes=10 << 30, flops=1e13), rates, compute="gpu")["gpu"]
        0.1
    """
    found = {} if work.flops is None else {compute: work.flops / rates.flops}
    ways = {"h2d": work.h2d_bytes / rates.h2d, "d2h": work.d2h_bytes / rates.d2h}
    together = (work.h2d_bytes + work.d2h_bytes) / rates.both
    fuller = max(ways, key=lambda way: ways[way])
    ways[fuller] = max(ways[fuller], together)  # both at once share the link
    return {**found, **ways, "dram": work.optimizer_s, "disk": work.disk_read_bytes / rates.disk}


def judge(busy_s: dict[str, float], step_s: float) -> Verdict:
    """Name what bounds a step.

    Args:
        busy_s: What `busy` returned.
        step_s: How long the step took; 0.0 if not known.

    Returns:
        The verdict. If nothing is busy for half of the step, its limiter is "launch" where computation on a
        GPU is counted, "cpu" where computation on the processor is, which runs all the rest too, else
        "unknown".

    Example:
        >>> judge({"h2d": 0.9, "dram": 0.1}, 1.0)
        Verdict(bound_s=0.9, share=0.9, limiter='h2d')
    """
    limiter = max(busy_s, key=lambda name: busy_s[name], default="unknown")
    bound = busy_s.get(limiter, 0.0)
    if step_s <= 0.0:
        return Verdict(bound, None, limiter if bound else "unknown")
    share = bound / step_s
    if share < _HALF:
        limiter = "launch" if "gpu" in busy_s else "cpu" if "cpu" in busy_s else "unknown"
    return Verdict(bound, share, limiter)


_ADVICE = {
    "gpu": [
        "The GPU computes nearly all the time: only less computation or a faster GPU shortens the step.",
        "Blocks that recompute their activations compute them twice: more VRAM, or a smaller micro-batch, "
        "lets more of them keep theirs.",
    ],
    "cpu": [
        "The processor's matrix products take the time: more cores (threads=), bf16 where the processor has "
        "it (doctor shows the rates), or a GPU shorten the step.",
    ],
    "h2d": [
        "Weights cross the link for every pass: more tokens in a step (a larger micro-batch or longer rows) "
        "share one crossing.",
        "A codec for frozen weights moves fewer bytes: nf4 0.56, int8 1.06 bytes a weight instead of 2.",
        "Each GiB of VRAM that vram_budget adds keeps that much of the weights from crossing.",
    ],
    "d2h": [
        "Gradients and offloaded activations cross the link: train fewer parameters (LoRA), or let blocks "
        "recompute (activation_offload=False, recompute=True).",
    ],
    "dram": [
        "The optimizer's state is read and written for every step: moment_dtype='bfloat16' or 'int8' moves "
        "less of it, more accumulation makes fewer steps of the same tokens, more cores (threads=) move it "
        "faster.",
        "With VRAM to spare, optimizer_mode='auto' updates part of it on the GPU.",
    ],
    "disk": [
        "Weights or optimizer state come from files for every pass: a larger ram_budget keeps more of them "
        "in memory, and a codec makes them smaller.",
        "disk_offload= on a faster drive helps as much as the drive is faster.",
    ],
    "launch": [
        "The GPU waits for Python: more tokens in a step cost nothing until it is busy, so enlarge the "
        "micro-batch first.",
    ],
    "unknown": [
        "Nothing that is counted explains the time. A trace of some steps shows where it goes: "
        "`trainstream finetune trace=true`, or TRAINSTREAM_TRACE=FILE for your own loop, then "
        "`trainstream report RUN`.",
    ],
}


#: On a processor that is not at matrix products for half of the time.
_OVERHEAD = [
    "Matrix products take less than half of a step, Python and small operations most of it: more tokens in a "
    "step (a larger micro-batch or longer rows) share them.",
    _ADVICE["unknown"][0].removeprefix("Nothing that is counted explains the time. "),
]


def advice(limiter: str, *, measured: bool = True, share: float | None = None) -> list[str]:
    """Say what would make steps faster, most useful first.

    Args:
        limiter: A key of `LIMITERS`.
        measured: Whether the machine's rates were measured.
        share: Of the bound, if known: a processor whose products take little of a step is not short of them.

    Returns:
        Sentences.
    """
    lines = list(_ADVICE.get(limiter, _ADVICE["unknown"]))
    if limiter == "cpu" and share is not None and share < _HALF:
        lines = list(_OVERHEAD)
    if not measured:
        lines.append("The machine's rates are assumed: `trainstream doctor` measures them once, in seconds.")
    return lines
