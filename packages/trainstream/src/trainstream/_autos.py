"""Every option that is ``"auto"`` has a line of its own; here are those that nothing else decides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

import torch

from trainstream._unused import Facts
from ts_optim import OffloadAdamW

__all__ = ["told_of", "undecided"]


def _mode(facts: Facts) -> str:
    adamw = facts.adopted
    if not isinstance(adamw, OffloadAdamW):
        return _foreign(facts)
    if facts.cpu or not torch.cuda.is_available():
        return "cpu, host threads update where the model computes"
    trained = [p for group in adamw.param_groups for p in group["params"] if p.requires_grad]
    low = any(p.dtype.itemsize == 2 for p in trained)
    like = torch.empty(0, dtype=torch.bfloat16 if low else torch.float32, device="cuda")
    chosen = adamw.works_in_place(like)
    return "gpu, its kernel was faster" if chosen else "cpu, host threads were faster or are all that can"


def _foreign(facts: Facts) -> str:
    if facts.adopted is None:
        return "nothing is trained"
    return f"{type(facts.adopted).__name__} keeps state of its own"


def _moments(facts: Facts) -> str:
    if isinstance(facts.adopted, OffloadAdamW):
        return f"{facts.adopted.moment_format}, as the given optimizer was made"
    return _foreign(facts)


def _arena(facts: Facts) -> str:
    if facts.cpu:
        return "off, page-locked memory serves a GPU"
    return "page-locked memory is reserved by slabs, as much as is needed"


_RULES: dict[str, Callable[[Facts], str]] = {
    "optimizer_mode": _mode,
    "moment_dtype": _moments,
    "host_arena": _arena,
    "quantize": lambda facts: f"{facts.codec}, memory is not checked",
    "peer": lambda facts: "off, memory of other GPUs is not used in this release",
    "schedule": lambda facts: "microbatch, each goes through all blocks before the next",
    "lossless": lambda facts: "off, weights travel as they are stored",
}


def told_of(name: str, lines: Iterable[str]) -> bool:
    """Whether a line says what became of an option: its name is before the colon or "ignored".

    Args:
        name: Of the option.
        lines: Of the events.

    Example:
        >>> told_of("recompute", ["param_offload, recompute: by measurement"]), told_of("peer", ["a peer: b"])
        (True, False)
    """
    head = re.compile(rf"^(\w+(=\w+)?, )*{name}(=[^:]*?)?(, \w+(=\w+)?)*( ignored)?: ")
    return any(head.match(line) for line in lines)


def undecided(facts: Facts, lines: Iterable[str]) -> list[str]:
    """Return a line for each option that is ``"auto"`` and of which the lines so far do not tell."""
    said = list(lines)
    return [
        f"{field.name}=auto: {_RULES[field.name](facts)}"
        for field in dataclasses.fields(facts.options)
        if field.name in _RULES
        and isinstance(value := getattr(facts.options, field.name), str)
        and value == "auto"
        and not told_of(field.name, said)
    ]
