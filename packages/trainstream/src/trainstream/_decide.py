"""What `wrap()` does with a model, decided before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

import ts_quant
from trainstream._budget import Limits
from trainstream._inventory import Inventory, reserve_for
from trainstream._options import WrapOptions
from trainstream._paging import Asked
from trainstream._staging import frozen_weights
from ts_core.blocks import BlockMap, parameter_bytes
from ts_core.errors import DoesNotFitError
from ts_core.memory import format_bytes
from ts_core.plan import BlockPlan, Numerics, Plan
from ts_core.planner import Budgets, GroupSpec, Layout, least, place
from ts_core.usage import CONTEXT_BYTES
from ts_optim import OffloadAdamW
from ts_paging.pager import WeightPager

__all__ = ["Decided", "decide", "make_plan"]


@dataclasses.dataclass(frozen=True)
class Decided:
    """The outcome.

    Attributes:
        codec: Codec of frozen block weights.
        packed: ids of the Parameters that are packed with it.
        layout: Where every group goes.
        specs: What every group takes.
        adapts: Whether the session measures and adapts.
        hooked: Whether blocks need the runtime even where their weights stay.
        why: Lines about the ``"auto"`` options that were decided here.
        reserve: Bytes of the device that the layout counts for activations and temporaries.
    """

    codec: str
    packed: frozenset[int]
    layout: Layout
    specs: list[GroupSpec]
    adapts: bool
    hooked: bool
    why: list[str]
    reserve: int = 0


def decide(
    model: nn.Module,
    inventory: Inventory,
    blocks: Sequence[nn.Module],
    device: torch.device,
    optimizer: Optimizer | None,
    want: Asked,
    bounds: Limits,
    options: WrapOptions,
) -> Decided:
    """Choose codec and placement.

    With room for everything and a generous estimate of activations, nothing is paged. Otherwise, and always
    where a budget is tight, everything that can be paged is, and what returns is decided by measurement.

    Raises:
        DoesNotFitError: Not even the least placement fits; with the numbers and what would.
    """
    frozen = frozenset(id(p) for p in frozen_weights(model, blocks))
    wanted = str(options.quantize)
    codecs = ["none", "int8", "nf4"] if wanted == "auto" else [wanted]
    if not frozen:
        codecs = codecs[:1]
    auto = wanted == "auto"
    reserve = reserve_for(inventory)
    forced = _forced(inventory, want, options)

    def specs_of(codec: str) -> list[GroupSpec]:
        packed = frozen if codec != "none" else frozenset()
        return inventory.specs(device, optimizer, codec, options.quant_block_size, packed)

    def decided(
        codec: str, layout: Layout, specs: list[GroupSpec], adapts: bool, why: list[str], held: int = 0
    ) -> Decided:
        packed = frozen if codec != "none" else frozenset()
        hooked = want.hooked or adapts or bool(layout.paged)
        return Decided(codec, packed, layout, specs, adapts, hooked, why, held)

    first = codecs if auto and options.prefer == "speed" else codecs[:1]
    for codec in first:
        layout = _comfortable(specs_of(codec), bounds.budgets, reserve, forced)
        if layout is not None:
            adapts = bounds.cap is not None and bool(inventory.blocks)
            why = _why_codec(codec, auto, layout, bounds)
            return decided(codec, layout, specs_of(codec), adapts, why, reserve)
    problem: DoesNotFitError | None = None
    everything = [
        unit_forced if unit_forced is not None else bool(unit.pageable)
        for unit_forced, unit in zip(forced, inventory.units, strict=True)
    ]
    for codec in codecs:
        specs = specs_of(codec)
        try:
            layout = place(specs, bounds.budgets, forced=everything)
        except DoesNotFitError as error:
            problem = problem or error
            continue
        adapts = any(force is None and here for force, here in zip(forced, everything, strict=True))
        why = _why_codec(codec, auto, layout, bounds)
        if adapts:
            need = format_bytes(sum(s.device + s.fixed for s in specs) + reserve)
            why.append(
                f"param_offload=auto: {need} for everything at once, {format_bytes(bounds.budgets.device)} "
                f"may be used: {len(layout.paged)} groups start paged"
            )
        return decided(codec, layout, specs, adapts and bool(inventory.blocks), why)
    if not options.check_memory:
        layout = place(specs_of(codecs[0]), Budgets(1 << 62, 1 << 62, 1 << 62), forced=forced)
        return decided(codecs[0], layout, specs_of(codecs[0]), False, [])
    raise DoesNotFitError(_refusal(problem, inventory, specs_of, codecs, everything, bounds, options))


def _forced(inventory: Inventory, want: Asked, options: WrapOptions) -> list[bool | None]:
    """True, False or None for every unit; what is around the stack is paged only where needed."""
    of_blocks = iter(want.paged)
    off = options.param_offload is False
    forced: list[bool | None] = []
    for unit in inventory.units:
        if unit.group.kind != "block":
            forced.append(False if off else None)
            continue
        asked = next(of_blocks)
        forced.append(asked if unit.pageable else False)
    return forced


def _comfortable(
    specs: list[GroupSpec], budgets: Budgets, reserve: int, forced: list[bool | None]
) -> Layout | None:
    """Return the layout that pages nothing beyond what is forced, if it fits with the whole reserve."""
    try:
        layout = place(specs, budgets, reserve=reserve, forced=[bool(force) for force in forced])
    except DoesNotFitError:
        return None
    return layout


def _why_codec(codec: str, auto: bool, layout: Layout, bounds: Limits) -> list[str]:
    if not auto:
        return []
    room = format_bytes(bounds.budgets.device)
    need = format_bytes(layout.device_bytes)
    return [f"quantize=auto: {codec}, {need} of {room} with {len(layout.paged)} groups paged"]


def _refusal(
    problem: DoesNotFitError | None,
    inventory: Inventory,
    specs_of: Callable[[str], list[GroupSpec]],
    codecs: list[str],
    forced: Sequence[bool],
    bounds: Limits,
    options: WrapOptions,
) -> str:
    """Say what is missing, and the nearest options that would fit."""
    specs = specs_of(codecs[-1])
    cpu = bounds.budgets.host is None
    name = "ram_budget" if cpu else "vram_budget"
    smallest = least(specs, forced=list(forced))
    # What is left unplanned grows with the budget; the GPU's context comes on top of what PyTorch holds.
    need = int(smallest * 1.3) + bounds.others + (4 << 20 if cpu else CONTEXT_BYTES)
    hints = [
        f"{name} of at least {format_bytes(need)}, and for activations of 2,048 tokens about "
        f"{format_bytes(reserve_for(inventory))} more"
    ]
    if bounds.cap is not None and bounds.others:
        hints.insert(0, f"{format_bytes(bounds.others)} less of other things that this process holds")
    if options.param_offload != "auto" and not all(forced):
        hints.append("param_offload='auto'")
    if options.quantize in ("none",) and any(
        not p.requires_grad for u in inventory.blocks for p in u.pageable
    ):
        hints.append("quantize='nf4'")
    trained = sum(p.numel() for unit in inventory.units for p in unit.pageable if p.requires_grad)
    if trained:
        hints.append(f"fewer trained parameters than {trained:,} (LoRA)")
    hints.append("disk_offload= and disk_budget= with more room, or check_memory=False to try all the same")
    return f"wrap(model): {problem}. What would help: {'; '.join(hints)}"


def make_plan(
    groups: BlockMap,
    model: nn.Module,
    device: torch.device,
    decided: Decided,
    optimizer: Optimizer | None,
    want: Asked,
    pager: WeightPager | None,
    bounds: Limits,
    options: WrapOptions,
) -> Plan:
    """Write down what was done, as plain data."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = []
    index = -1
    for group, tier in zip(groups.groups, decided.layout.tiers, strict=True):
        block = group.kind == "block"
        index += block
        own = [parameters[name] for name in group.parameters if name in parameters]
        codecs = {p.codec for p in own if isinstance(p, ts_quant.QuantizedTensor)}
        policy = "keep"
        if block:
            policy = (want.fallback[index] if decided.adapts else None) or want.policy[index]
        rows.append(
            BlockPlan(
                name=group.name,
                kind=group.kind,
                tier=tier,
                policy=policy,
                codec=codecs.pop() if len(codecs) == 1 else "mixed" if codecs else "none",
                bytes=sum(parameter_bytes(p) for p in own),
            )
        )
    used = {row.codec for row in rows} - {"none"}
    layout, budgets = decided.layout, bounds.budgets
    return Plan(
        device=str(device),
        blocks=tuple(rows),
        numerics=Numerics(
            quantize=used.pop() if len(used) == 1 else "mixed" if used else decided.codec,
            quant_block_size=options.quant_block_size,
            moment_dtype=options.moment_dtype,
        ),
        optimizer="cpu" if isinstance(optimizer, OffloadAdamW) else "none",
        slots=len(pager.slots) if pager is not None else 0,
        budgets={
            "device": budgets.device,
            "host": budgets.device if budgets.host is None else budgets.host,
            "disk": budgets.disk,
        },
        predicted={
            "device": layout.device_bytes - decided.reserve,
            "activations": decided.reserve,
            "host": layout.host_bytes,
            "disk": layout.disk_bytes,
        },
    )
