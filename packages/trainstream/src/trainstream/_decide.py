"""What `wrap()` does with a model, decided before anything is touched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

import ts_quant
from trainstream._budget import Limits
from trainstream._first import TOKENS, Planned, Question, first_plan, question, unlocked
from trainstream._inventory import Inventory, reserve_for
from trainstream._options import WrapOptions
from trainstream._paging import Asked
from trainstream._staging import frozen_weights
from ts_core.blocks import BlockMap, parameter_bytes
from ts_core.errors import DoesNotFitError
from ts_core.hardware import HardwareProfile
from ts_core.live import compute_bytes
from ts_core.memory import format_bytes
from ts_core.plan import BlockPlan, Numerics, Plan
from ts_core.planner import Budgets, GroupSpec, Layout, least, place
from ts_core.usage import CONTEXT_BYTES
from ts_optim import OffloadAdamW
from ts_optim.placement import place_by_size
from ts_paging.pager import WeightPager
from ts_quant.precision import precise_names

_AGAIN = 1.5  # with frozen weights, backward takes as long as forward, which comes once more

__all__ = ["Decided", "decide", "make_plan", "optimizer_tier"]


@dataclasses.dataclass(frozen=True)
class Decided:
    """The outcome.

    Attributes:
        codec: Codec of frozen block weights.
        packed: ids of the Parameters that are packed with it.
        precise: ids of those of them that move up one codec.
        layout: Where every group goes.
        specs: What every group takes.
        adapts: Whether the session measures and adapts.
        governed: Whether saved activations are part of that.
        hooked: Whether blocks need the runtime even where their weights stay.
        moments: Format of AdamW's moments.
        why: Lines about the ``"auto"`` options that were decided here.
        reserve: Bytes of the device that the layout counts for activations and temporaries.
        settling: Indices of trained groups whose optimizer works on the host until they are wholly resident:
            paged until then, in a slot of their own as soon as there is room.
        want: What the options ask for, with what each block falls back to as planned.
        depth: Blocks that are fetched ahead.
        tokens: Of a micro-batch that was planned for; 0 where a run starts from the least memory.
        step_s: Seconds of a step under the plan, as predicted; 0 likewise.
        gpu_s: Of these, seconds that the device computes; 0 likewise.
        launch_s: Seconds that the host launches its work; 0 likewise.
        token_bytes: Of a token as it comes into a block; 0 likewise.
    """

    codec: str
    packed: frozenset[int]
    layout: Layout
    specs: list[GroupSpec]
    adapts: bool
    hooked: bool
    why: list[str]
    moments: str = "float32"
    reserve: int = 0
    precise: frozenset[int] = frozenset()
    governed: bool = True
    settling: frozenset[int] = frozenset()
    want: Asked | None = None
    depth: int = 1
    tokens: int = 0
    step_s: float = 0.0
    gpu_s: float = 0.0
    launch_s: float = 0.0
    token_bytes: int = 0

    def computing(self, nbytes: int, passes: int) -> float:
        """Return the seconds that a step computes at most in which every block recomputes.

        Args:
            nbytes: Of what came into the first block, in all passes of the step.
            passes: How many there were.

        Returns:
            The longer of what the device takes and of what the host takes to launch that; 0.0 if nothing
            was predicted.
        """
        planned = self.tokens * self.token_bytes
        decodes = passes if self.codec != "none" else 0  # that takes as long for few tokens
        gpu = self.gpu_s * max(nbytes / planned, decodes) if planned else 0.0
        return _AGAIN * max(gpu, self.launch_s * passes) if gpu else 0.0


def decide(
    model: nn.Module,
    inventory: Inventory,
    blocks: Sequence[nn.Module],
    device: torch.device,
    optimizer: Optimizer | None,
    want: Asked,
    bounds: Limits,
    options: WrapOptions,
    formats: list[str],
    hardware: HardwareProfile | None = None,
) -> Decided:
    """Choose codec, moments, placement and policies.

    What the search finds is done, planned for `plan_tokens` tokens at once or, where nobody has said, for
    2,048. If it finds nothing for these, a run starts from the least memory: everything that can be paged is,
    and what returns is decided by measurement.

    `formats` are those that moments may have, best first.

    Raises:
        DoesNotFitError: Not even the least placement fits; with the numbers and what would.
    """
    frozen = frozenset(id(p) for p in frozen_weights(model, blocks))
    wanted = str(options.quantize)
    codecs = ["none", "int8", "nf4"] if wanted == "auto" else [wanted]
    if not frozen:
        codecs = codecs[:1]
    auto = wanted == "auto"
    forced = _forced(inventory, want, options)
    settling = _settling(inventory, device, optimizer)

    size, fit, double = options.quant_block_size, options.error_rank, options.double_quant
    backward = options.fp8_backward, options.nvfp4_backward
    precise: dict[str, frozenset[int]] = {}
    known: dict[tuple[str, str], list[GroupSpec]] = {}

    def specs_of(codec: str, moments: str) -> list[GroupSpec]:
        if (codec, moments) in known:
            return known[codec, moments]
        packed = frozen if codec != "none" else frozenset()
        if codec not in precise:  # measured once, where it is asked for and the codec has one above it
            weights = ((id(p), p) for p in frozen_weights(model, blocks))
            precise[codec] = precise_names(weights, codec, size, options.keep_precise, double)
        kept = precise[codec]
        coded = codec, size, packed, settling, moments, kept, fit, double, backward
        found = inventory.specs(device, optimizer, *coded)
        return known.setdefault((codec, moments), found)

    def decided(found: _Found, adapts: bool, why: list[str], planned: Planned | None = None) -> Decided:
        packed = frozen if found.codec != "none" else frozenset()
        hooked = want.hooked or adapts or bool(found.layout.paged)
        if len(formats) > 1:
            why = [*why, _why_moments(found, formats, specs_of, bounds)]
        held = planned.prediction.activation_bytes if planned is not None else 0
        busy = {} if planned is None else planned.prediction.busy_s
        hidden = max((block.hidden for block in asked.spec.stack), default=0)
        return Decided(
            codec=found.codec,
            packed=packed,
            precise=precise[found.codec],
            layout=found.layout,
            specs=found.specs,
            adapts=adapts,
            hooked=hooked,
            why=why,
            moments=found.moments,
            reserve=held,
            governed=planned is None or _governed(planned, inventory, forced, bounds),
            settling=settling,
            want=want if planned is None else dataclasses.replace(want, fallback=planned.fallback),
            depth=options.prefetch_depth if planned is None else planned.slots - 1,
            tokens=0 if planned is None else planned.tokens,
            step_s=0.0 if planned is None else planned.prediction.step_s,
            gpu_s=busy.get("gpu", 0.0),
            launch_s=busy.get("launch", 0.0),
            token_bytes=0 if planned is None else hidden * compute_bytes(asked.spec),
        )

    slots = options.prefetch_depth + 1
    # Short of RAM under a GPU, smaller moments come before files, unless a directory for them was named.
    dry = device.type != "cpu" and options.disk_offload is None
    groups = BlockMap(tuple(unit.group for unit in inventory.units))
    asked = question(
        model, groups, inventory, device, want, bounds.budgets, options, specs_of, forced, settling, hardware
    )
    everything = [
        force if force else bool(unit.pageable) and (force is None or index in settling)
        for index, (force, unit) in enumerate(zip(forced, inventory.units, strict=True))
    ]
    own = frozenset(index for index in settling if forced[index] is False)

    def least_layout(codec: str, moments: str, budgets: Budgets) -> Layout:
        return place(specs_of(codec, moments), budgets, forced=everything, slots=slots, settled=own)

    # Adapters and other small tensors keep exact moments: they are few.
    tried = formats if any(s.updated for s in specs_of(codecs[0], formats[0])) else formats[:1]
    planned = _planned(asked, codecs, tried, options, least_layout, dry)
    lock = bounds.budgets.page_lock
    if planned is None and lock is not None:  # results are the same with ordinary memory
        loose = dataclasses.replace(asked, budgets=dataclasses.replace(bounds.budgets, page_lock=None))
        planned = _planned(loose, codecs, tried, options, least_layout, dry)
        if planned is not None:
            planned.why.append(unlocked(planned.prediction, lock))
    if planned is not None:
        found = _Found(
            planned.codec, planned.moments, planned.layout, specs_of(planned.codec, planned.moments)
        )
        adapts = _governed(planned, inventory, forced, bounds) or (
            bool(settling) and options.offload == "auto"
        )
        return decided(found, adapts, [*_why_codec(found, auto, bounds), *planned.why], planned)
    least_found, problem = _first(
        [(c, m) for c in codecs for m in tried],
        lambda c, m: least_layout(c, m, bounds.budgets),
        specs_of,
        dry,
    )
    if least_found is not None and options.plan_tokens is None:
        found = least_found
        frees = any(force is None and here for force, here in zip(forced, everything, strict=True))
        why = _why_codec(found, auto, bounds)
        if frees:
            why.append(
                f"param_offload=auto: nothing fits {TOKENS:,} tokens at once for certain, "
                f"{format_bytes(bounds.budgets.device)} may be used: {len(found.layout.paged)} groups start "
                "paged"
            )
        adapts = frees or (bool(own) and options.offload == "auto")
        return decided(found, adapts and bool(inventory.blocks), why)
    if not options.check_memory:
        resident = [bool(force) or index in settling for index, force in enumerate(forced)]
        own = frozenset(index for index in settling if forced[index] is not True)
        specs = specs_of(codecs[0], formats[0])
        unlimited = Budgets(1 << 62, 1 << 62, 1 << 62)
        layout = place(specs, unlimited, forced=resident, settled=own)
        return decided(_Found(codecs[0], formats[0], layout, specs), False, [])
    specs = specs_of(codecs[-1], tried[-1])
    if least_found is not None:
        raise DoesNotFitError(_too_long(least_found.layout, bounds, options))
    raise DoesNotFitError(_refusal(problem, inventory, specs, everything, own, bounds, options))


def _planned(
    asked: Question,
    codecs: Sequence[str],
    formats: Sequence[str],
    options: WrapOptions,
    least_layout: Callable[[str, str, Budgets], Layout],
    dry: bool,
) -> Planned | None:
    """Return what the search finds.

    Where nobody has said how long inputs are, codec and moments are not chosen by what activations may take:
    they are the first that can be trained with at all.
    """
    if options.plan_tokens is not None or (options.prefer == "speed" and len(codecs) > 1):
        return first_plan(asked, codecs, formats, options.plan_tokens or TOKENS)
    budgets = asked.budgets
    spaces = [dataclasses.replace(budgets, disk=0), budgets] if dry and budgets.disk else [budgets]
    for space in spaces:
        here = dataclasses.replace(asked, budgets=space)
        for codec in codecs:
            for moments in formats:
                planned = first_plan(here, [codec], [moments], TOKENS)
                if planned is not None:
                    return planned
                with contextlib.suppress(DoesNotFitError):
                    least_layout(codec, moments, space)
                    return None
    return None


def _governed(planned: Planned, inventory: Inventory, forced: Sequence[bool | None], bounds: Limits) -> bool:
    """Whether saved activations, and what returns, are decided by measurement."""
    layout = planned.layout
    streams = any(
        force is None and tier != "device" and index not in layout.settled
        for index, (force, tier) in enumerate(zip(forced, layout.tiers, strict=True))
    )
    return bool(inventory.blocks) and (bounds.cap is not None or streams or not planned.keeps)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A layout that fits, and the formats that it fits with."""

    codec: str
    moments: str
    layout: Layout
    specs: list[GroupSpec]


def _first(
    formats: Sequence[tuple[str, str]],
    layout_of: Callable[[str, str], Layout],
    specs_of: Callable[[str, str], list[GroupSpec]],
    dry: bool,
) -> tuple[_Found | None, DoesNotFitError | None]:
    """Return the first formats of codec and moments that fit, without the disk if `dry` and possible.

    Returns:
        What was found, or None and the error of the first try.
    """
    problem: DoesNotFitError | None = None
    with_files: _Found | None = None
    for codec, moments in formats:
        try:
            layout = layout_of(codec, moments)
        except DoesNotFitError as error:
            problem = problem or error
            continue
        found = _Found(codec, moments, layout, specs_of(codec, moments))
        if not dry or "disk" not in layout.tiers:
            return found, None
        with_files = with_files or found
    return with_files, problem


def moment_formats(optimizer: Optimizer | None, options: WrapOptions) -> list[str]:
    """Return the formats that moments may have, best first."""
    if isinstance(optimizer, OffloadAdamW):
        return [optimizer.moment_format]
    if options.moment_dtype != "auto":
        return [str(options.moment_dtype)]
    return ["float32", "bfloat16"] + (["int8"] if options.optimizer_mode != "gpu" else [])


def _why_moments(
    found: _Found,
    formats: list[str],
    specs_of: Callable[[str, str], list[GroupSpec]],
    bounds: Limits,
) -> str:
    if found.moments == formats[0]:
        return f"moment_dtype=auto: {found.moments}, RAM is not short"
    paged = found.layout.paged
    exact = sum(s.paged if i in paged else s.host for i, s in enumerate(specs_of(found.codec, formats[0])))
    host = bounds.budgets.host if bounds.budgets.host is not None else bounds.budgets.device
    return (
        f"moment_dtype=auto: {found.moments}; {formats[0]} moments would need {format_bytes(exact)} of RAM "
        f"where {format_bytes(max(host, 0))} may be used"
    )


def _settling(inventory: Inventory, device: torch.device, optimizer: Optimizer | None) -> frozenset[int]:
    """Return the trained units whose optimizer works on the host while they compute on a GPU.

    That is what `OffloadAdamW` does by itself; asked for another mode, or given a placement of its own, it
    keeps what it was asked for.
    """
    if device.type == "cpu" or not isinstance(optimizer, OffloadAdamW):
        return frozenset()
    if optimizer.mode == "gpu" or optimizer.placement is not place_by_size:
        return frozenset()
    trained = inventory.trained(optimizer)
    if optimizer.mode == "auto" and torch.cuda.is_available():
        low = any(p.dtype.itemsize == 2 for index in trained for p in inventory.units[index].pageable)
        like = torch.empty(0, dtype=torch.bfloat16 if low else torch.float32, device=device)
        if optimizer.works_in_place(like):
            return frozenset()
    return trained


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


def _why_codec(found: _Found, auto: bool, bounds: Limits) -> list[str]:
    if not auto:
        return []
    room = format_bytes(bounds.budgets.device)
    need = format_bytes(found.layout.device_bytes)
    return [f"quantize=auto: {found.codec}, {need} of {room} with {len(found.layout.paged)} groups paged"]


def _too_long(layout: Layout, bounds: Limits, options: WrapOptions) -> str:
    """Say that weights have room, and so many tokens have not."""
    name = "ram_budget" if bounds.budgets.host is None else "vram_budget"
    return (
        f"wrap(model): no placement has room for {options.plan_tokens:,} tokens at once (plan_tokens): with "
        f"everything paged that can be, {format_bytes(layout.device_bytes)} of "
        f"{format_bytes(bounds.budgets.device)} are taken before any activation. What would help: fewer "
        f"plan_tokens, or None to plan for {TOKENS:,} and go by measurement; a larger {name}"
    )


def _refusal(
    problem: DoesNotFitError | None,
    inventory: Inventory,
    specs: list[GroupSpec],
    forced: Sequence[bool],
    own: frozenset[int],
    bounds: Limits,
    options: WrapOptions,
) -> str:
    """Say what is missing, and the nearest options that would fit."""
    cpu = bounds.budgets.host is None
    name = "ram_budget" if cpu else "vram_budget"
    smallest = least(specs, forced=list(forced), settled=own)
    # What is left unplanned grows with the budget; the GPU's context comes on top of what PyTorch holds.
    told = bounds.vram_budget is not None and bounds.cap is not None
    beside = (bounds.vram_budget or 0) - (bounds.cap or 0) if told else CONTEXT_BYTES
    need = int(smallest * 1.3) + bounds.others + (4 << 20 if cpu else beside)
    hints = [
        f"{name} of at least {format_bytes(need)}, and for activations of 2,048 tokens about "
        f"{format_bytes(reserve_for(inventory))} more"
    ]
    hints = _wider(specs, forced, own, bounds.budgets, hints)
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


def _wider(
    specs: list[GroupSpec],
    forced: Sequence[bool],
    own: frozenset[int],
    budgets: Budgets,
    of_device: list[str],
) -> list[str]:
    """Return hints about single budgets, each planned with: one that alone does not help is not named."""

    def planned(**more: int) -> Layout | None:
        try:
            space = dataclasses.replace(budgets, **more)
            return place(specs, space, forced=list(forced), slots=1, settled=own)
        except DoesNotFitError:
            return None

    unlimited = 1 << 62
    # What is written is rounded, by less than 1 %.
    hints = of_device if planned(device=unlimited) else []
    if budgets.host is not None and (layout := planned(host=unlimited)) is not None:
        hints = [*hints, f"{format_bytes(int(layout.host_bytes * 1.01))} of RAM that may be used"]
    if (layout := planned(disk=unlimited)) is not None:
        hints = [*hints, f"{format_bytes(int(layout.disk_bytes * 1.01))} of disk that may be used"]
    return hints or of_device


def optimizer_tier(tier: str, trained: bool, device: torch.device, settling: bool) -> str:
    """Say where the state of a group's trained weights is, for the plan."""
    if not trained:
        return ""
    return tier if tier != "device" or settling or device.type == "cpu" else "host"


def make_plan(
    inventory: Inventory,
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
    ours = isinstance(optimizer, OffloadAdamW)
    trained = inventory.trained(optimizer) if ours else frozenset()
    rows = []
    index = -1
    for number, (group, tier) in enumerate(zip(groups.groups, decided.layout.tiers, strict=True)):
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
                settled=number in decided.layout.settled,
                optimizer=optimizer_tier(tier, number in trained, device, number in decided.settling),
            )
        )
    # Weights that moved up one codec are part of the codec asked for.
    used = {decided.codec} if decided.precise else {row.codec for row in rows} - {"none"}
    layout, budgets = decided.layout, bounds.budgets
    step = {"step_s": decided.step_s, "tokens": decided.tokens} if decided.step_s else {}
    return Plan(
        device=str(device),
        blocks=tuple(rows),
        numerics=Numerics(
            quantize=used.pop() if len(used) == 1 else "mixed" if used else decided.codec,
            quant_block_size=options.quant_block_size,
            moment_dtype=decided.moments,
            keep_precise=options.keep_precise,
            error_rank=options.error_rank,
            error_iters=options.error_iters,
            double_quant=options.double_quant,
        ),
        optimizer=optimizer.mode if isinstance(optimizer, OffloadAdamW) else "none",
        prefetch_depth=options.prefetch_depth,
        slots=sum(not slot.own for slot in pager.slots) if pager is not None else 0,
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
            **step,
        },
    )
