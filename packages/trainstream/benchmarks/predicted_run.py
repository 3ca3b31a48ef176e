"""One run of `predicted.py`, in its own process: train until nothing adapts any more, then measure.

A run has settled when its session adapts no more and two steps have passed in which nothing was said of
blocks that are recorded: while they are, steps are slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from typing import TYPE_CHECKING, Any

import engines

if TYPE_CHECKING:
    from predicted import Config

SETTLE, CALM, STEPS = 24, 2, 5


def measured(config: Config, device: str, forced: dict[str, Any]) -> dict[str, Any]:
    """Build, wrap, train until nothing adapts, and measure; in this process."""
    import torch

    import trainstream  # noqa: F401 -- part of the baseline
    from ts_core.usage import PeakSampler, device_usage, host_usage

    cuda = device == "cuda"
    warm_up(device, config)
    base = host_usage().used_bytes
    engine = engines.make(config.setting(device, forced))
    session = engine.model._trainstream_session
    high = engines.vocabulary(config.shape)
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        ids = torch.randint(0, high, (1, config.tokens), generator=generator).to(device)
        begin = time.perf_counter()
        loss = engine.loss_of(ids)
        engine.backward(loss)
        engine.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    rows = [ram_row(base)]
    gc.collect()
    rows.append(ram_row(base))  # less than before: something stood in a cycle
    steps = calm = 0
    while steps < 3 or (calm < CALM and steps < SETTLE):
        before = recorded(session)
        step()
        steps += 1
        calm = 0 if session.adapting or recorded(session) != before else calm + 1
        rows.append(ram_row(base))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with PeakSampler(0.002) as ram, PeakSampler(0.02, read=lambda: arena_row()[2]) as live:
        times = [step() for _ in range(STEPS)]
        synchronize = getattr(engine.optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
        ram.sample()
    peak = ram.peak_bytes - base
    line = {
        "step_s": statistics.median(times),
        "spread_s": [min(times), max(times)],
        "steps_to_settle": steps,
        "host_bytes": peak if cuda else 0,
        "device_bytes": torch.cuda.max_memory_allocated() if cuda else peak,
        "base_bytes": base,
        "calm": calm,
        "arena": {"live_peak_bytes": live.peak_bytes, **arena_stats()},
        "ram_by_step": rows,
        **plan_in_use(session),
    }
    if cuda:
        line["reserved_bytes"] = torch.cuda.max_memory_reserved()
        line["nvml_bytes"] = device_usage("cuda:0").used_bytes
        line["nvml_source"] = device_usage("cuda:0").source
        with contextlib.suppress(Exception):  # not in every version
            line["torch_pinned_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    told = ("=auto", "settled", "capture:", "vram_budget:")
    line["events"] = [str(event) for event in session.events.events if any(word in event for word in told)]
    return line


def recorded(session: Any) -> int:
    """How often anything was said of blocks that are recorded."""
    return sum(str(event).startswith("capture:") for event in session.events.events)


def arena_row() -> tuple[int, int, int]:
    """Bytes that the page-locked arena has reserved, has coming, and has handed out."""
    from ts_core import registry

    arena = registry.host_allocator()
    if not hasattr(arena, "stats"):
        return 0, 0, 0
    stats = arena.stats()
    return stats.reserved_bytes, stats.coming_bytes, stats.live_bytes


def arena_stats() -> dict[str, int]:
    """What the arena holds, for the result."""
    from ts_core import registry

    row = dict(zip(("reserved_bytes", "coming_bytes", "live_bytes"), arena_row(), strict=True))
    arena = registry.host_allocator()
    if hasattr(arena, "stats"):
        row["slabs"] = len(arena.stats().slabs)
        row["pageable_bytes"] = arena.pageable_bytes
    return row


def ram_row(base: int) -> list[int]:
    """RAM of this process beyond `base`, and `arena_row`: a row of `ram_by_step`.

    That has one after `wrap()`, one after garbage was collected, and one after each step.
    """
    from ts_core.usage import host_usage

    return [host_usage().used_bytes - base, *arena_row()]


def warm_up(device: str, config: Config) -> None:
    """Let libraries make what they keep: it is no part of a model.

    On a CPU that is 12 MB once steps of the same kind have run. And there the C library's heap keeps what is
    free between tensors, as much as activations take at the most, unless it is told not to, as `wrap()` does
    under a `ram_budget`: so it is told here.
    """
    import peft  # noqa: F401
    import torch
    import transformers

    from ts_core.usage import keep_heap_tight, release_free_memory

    tiny = transformers.Qwen2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(tiny).to(device).bfloat16()
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
        return
    keep_heap_tight()
    small = dataclasses.replace(config, shape="tiny", cap=0.0)
    engine = engines.make(small.setting(device, {}))
    ids = torch.zeros(1, config.tokens, dtype=torch.long)
    for _ in range(3):
        engine.backward(engine.loss_of(ids))
        engine.step()
    import trainstream

    trainstream.unwrap(engine.model)
    del engine, model
    release_free_memory(collect=True)


def plan_in_use(session: Any) -> dict[str, Any]:
    """Where everything is, and what becomes of activations."""
    plan = session.plan
    return {
        "places": ["settled" if block.settled else block.tier for block in plan.blocks],
        "policies": list(plan.policy),
        "moments": plan.numerics.moment_dtype,
        "slots": plan.slots,
        "prefetch_depth": plan.prefetch_depth,
        "captured": captured_blocks(session),
    }


def captured_blocks(session: Any) -> int:
    """How many blocks were replayed in the latest pass."""
    mode = session.pager.block_mode if session.pager is not None else None
    recordings = None if mode is None else mode.captures
    return 0 if recordings is None else recordings.replayed(mode.turn)
