"""The first placement of a live model: the same search as `trainstream plan` makes, over what is there.

The spec comes from the model, bytes from its inventory, and what options have fixed stays fixed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainstream._inventory import Inventory
from trainstream._options import WrapOptions
from trainstream._paging import Asked, captured
from ts_core import registry
from ts_core.advice import assign
from ts_core.blocks import BlockMap
from ts_core.dtypes import parse_dtype
from ts_core.errors import ArgumentError, DoesNotFitError, OptionError
from ts_core.hardware import HardwareProfile, kept_profile, profile_hardware
from ts_core.job import Job, Packing, Prediction, Room, assumed_profile
from ts_core.live import Live, compute_bytes
from ts_core.memory import format_bytes, parse_bytes
from ts_core.planner import Budgets, GroupSpec, Layout
from ts_core.search import choose
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of, spec_of
from ts_quant.codecs import resolve
from ts_quant.functional import meta_for

__all__ = [
    "TOKENS",
    "Planned",
    "Question",
    "first_plan",
    "live_spec",
    "packing_of",
    "planned_job",
    "unlocked",
]

#: Of a micro-batch, where nobody has said how long one is.
TOKENS = 2048
_SIDE = 1024
_ADAPTER = re.compile(r"(^|\.)lora_[AB](\.|$)")
_BASE = re.compile(r"(^|\.)base_layer(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What the search found for a model.

    Attributes:
        codec: Of frozen block weights.
        moments: Format of AdamW's moments.
        layout: Where every group starts.
        fallback: What each block of the stack falls back to where its policy is automatic; else None.
        keeps: Whether every block whose policy is automatic keeps its activations.
        slots: Slots of the stack, whether any are used or not.
        tokens: Of a micro-batch that were planned for.
        prediction: What the plan takes once a run is under way.
        why: A line for each thing that was left open.
    """

    codec: str
    moments: str
    layout: Layout
    fallback: tuple[str | None, ...]
    keeps: bool
    slots: int
    tokens: int
    prediction: Prediction
    why: list[str]


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked about a live model.

    Attributes:
        spec: The model; see `live_spec`.
        live: Bytes of its groups, and what is fixed.
        want: What the options ask for.
        budgets: What may be used.
        device: Where it computes.
        options: All of them.
        hardware: Rates.
    """

    spec: ModelSpec
    live: Live
    want: Asked
    budgets: Budgets
    device: torch.device
    options: WrapOptions
    hardware: HardwareProfile


#: What measuring the machine may take of a `ram_budget`, samples and libraries, with room to spare.
_MEASURING_BYTES = 2 << 30


def rates_of(device: torch.device, options: WrapOptions) -> HardwareProfile:
    """Return the rates of this machine: as measured before, or now beside a GPU; else assumed ones.

    Nothing is measured within a `ram_budget` that the samples could exceed.
    """
    ram = options.ram_budget
    measures = options.profile and device.type == "cuda" and torch.cuda.is_available()
    try:
        if measures and (ram is None or parse_bytes(ram) >= _MEASURING_BYTES):
            return profile_hardware(device)
        return kept_profile(device) or assumed_profile(device.type)
    except (OSError, RuntimeError, ValueError):  # a GPU that is in use to the last byte cannot be measured
        return assumed_profile(device.type)


def live_spec(model: nn.Module, groups: BlockMap) -> tuple[ModelSpec, tuple[tuple[int, int, int], ...]]:
    """Return the spec of a model without its adapters, and for each group what adapters it has.

    Args:
        model: The model.
        groups: Its block map.

    Returns:
        The spec, and (linear layers with an adapter, values a token of their inputs, sum of ranks).
    """
    whole = spec_of(model, groups)
    blocks: list[BlockSpec] = []
    adapters: list[tuple[int, int, int]] = []
    for block in whole.blocks:
        own = [_known(t) for t in block.tensors if _ADAPTER.search(t.name) is None]
        first = [t for t in block.tensors if re.search(r"(^|\.)lora_A(\.|$)", t.name)]
        adapters.append((len(first), sum(t.shape[-1] for t in first), sum(t.shape[0] for t in first)))
        if own != list(block.tensors):
            bare = [dataclasses.replace(t, name=_BASE.sub("", t.name)) for t in own]
            if block.kind == "block":
                block = block_of(block.name, bare, block.hidden, query=block.query, window=block.window)
            else:
                block = dataclasses.replace(block, tensors=tuple(bare))
        blocks.append(block)
    return dataclasses.replace(whole, blocks=tuple(blocks)), tuple(adapters)


def _known(tensor: TensorSpec) -> TensorSpec:
    """Return it with a dtype that the planner knows: what it takes in bytes is the inventory's to say."""
    try:
        parse_dtype(tensor.dtype)
    except OptionError:
        return dataclasses.replace(tensor, dtype="float64")
    return tensor


@functools.lru_cache(maxsize=32)
def packing_of(name: str, block_size: int = 64, double_quant: bool = False) -> Packing:
    """Return what the planner knows of a codec.

    Args:
        name: "none" or a codec's name.
        block_size: Values per scale.
        double_quant: Whether scales are quantized too, where the codec can.
    """
    if name == "none":
        return Packing()
    codec = registry.codec(resolve(name))
    nbytes = codec.packed_bytes((_SIDE, _SIDE), meta_for(codec, block_size, double_quant))
    return Packing(name, nbytes / _SIDE**2)


def planned_job(
    spec: ModelSpec,
    *,
    cpu: bool,
    seq_len: int,
    batch: int = 1,
    lora_rank: int = 0,
    trains: bool = True,
    packings: Sequence[Packing] = (Packing(),),
    moments: Sequence[str] = ("float32",),
    policies: Sequence[str] = ("keep", "offload", "recompute"),
    micro_batches: tuple[int, ...] | None = None,
    depth: int = 1,
    prefer: str = "exact",
    spare_files: bool = True,
    capture: bool = False,
) -> Job:
    """Return the job that `trainstream plan` and `wrap()` ask the search about.

    Args:
        spec: The model.
        cpu: Whether it computes in RAM.
        seq_len: Tokens of a row.
        batch: Rows of a step.
        lora_rank: Of adapters that the model has not got yet; 0 where it is as it will be trained.
        trains: Whether weights that can leave the device are trained.
        packings: Codecs, the preferred one first.
        moments: Formats, likewise.
        policies: What may become of activations; files do not take them on a machine without a GPU.
        micro_batches: Rows at once.
        depth: Blocks that are fetched ahead at least.
        prefer: "exact" or "speed".
        spare_files: Whether files come last.
        capture: Whether blocks are recorded and replayed.
    """
    return Job(
        seq_len=seq_len,
        batch=batch,
        lora_rank=lora_rank,
        micro_batches=micro_batches,
        packings=tuple(packings),
        moments=tuple(moments),
        policies=tuple(p for p in policies if not (cpu and p == "offload")) or ("keep",),
        # With every weight trained there are many more placements, and a third slot gains next to nothing.
        slots=(depth + 1,) if trains or cpu else (depth + 1, depth + 2),
        prefer=prefer,
        dtype_bytes=compute_bytes(spec),
        spare_files=spare_files and not cpu,
        capture=capture,
    )


def first_plan(asked: Question, codecs: Sequence[str], moments: Sequence[str], tokens: int) -> Planned | None:
    """Search, with these numerics.

    Args:
        asked: The model, and what is fixed.
        codecs: Those that frozen block weights may have, the preferred one first.
        moments: Formats, likewise.
        tokens: Of a micro-batch.

    Returns:
        The plan, or None if there is none; also for models that no plan can be made for.
    """
    options, cpu = asked.options, asked.device.type == "cpu"
    trained = any(sizes.pageable and sizes.updated for sizes in asked.live.sizes(codecs[0], moments[0]))
    policies = ["keep"]
    policies += ["offload"] if options.activation_offload == "auto" else []
    policies += ["recompute"] if options.recompute == "auto" else []
    job = planned_job(
        asked.spec,
        cpu=cpu,
        seq_len=tokens,
        trains=trained,
        packings=[packing_of(name, options.quant_block_size, options.double_quant) for name in codecs],
        moments=moments,
        policies=policies,
        depth=options.prefetch_depth,
        prefer=options.prefer if options.quantize == "auto" else "exact",
        spare_files=options.disk_offload is None,
        capture=captured(options, asked.device),
    )
    budgets = asked.budgets
    room = Room(max(budgets.device, 0), budgets.host, max(budgets.disk, 0), budgets.page_lock)
    try:
        found = choose(asked.spec, job, asked.hardware, room, asked.live)
    except (DoesNotFitError, ArgumentError):
        return None
    setting = found.choice.setting
    places, kept = assign(asked.spec, found, asked.live)
    sizes = asked.live.sizes(setting.packing.name, setting.moments)
    layout = _layout(asked, sizes, places, found.prediction, setting.slots)
    if layout is None:
        return None
    stack = [index for index, block in enumerate(asked.spec.blocks) if block.kind == "block"]
    free = [index for index, fallback in zip(stack, asked.want.fallback, strict=True) if fallback is not None]
    fallback = tuple(
        None if default is None else kept[index] if kept[index] != "keep" else default
        for index, default in zip(stack, asked.want.fallback, strict=True)
    )
    return Planned(
        setting.packing.name,
        setting.moments,
        layout,
        fallback,
        all(kept[index] == "keep" for index in free),
        setting.slots,
        tokens,
        found.prediction,
        _why(asked, layout, [kept[index] for index in free], setting.slots, tokens),
    )


def _layout(
    asked: Question,
    sizes: Sequence[GroupSpec],
    places: dict[int, str],
    prediction: Prediction,
    slots: int,
) -> Layout | None:
    """Write a placement as a layout that a run can start from; None if it cannot.

    What will be on the device with the state of its optimizer starts with that on the host.
    """
    budgets = asked.budgets
    below = {i for i, place in places.items() if place in ("host", "disk")}
    links = asked.live.linked if isinstance(asked.live, LinkedLive) else ()
    for index in list(below):
        if any(other not in below for other in (links[index] if links else ())):
            return None  # one Parameter cannot be in two places
    settling = asked.live.settling
    settled = {i for i, place in places.items() if i in settling and i not in below}
    host = prediction.host_bytes
    device = prediction.device_bytes
    for index in sorted(i for i in settled if places[i] == "device"):
        more = sizes[index].paged - sizes[index].host
        if budgets.host is not None and host + more > budgets.host:  # a norm: the search leaves them there
            settled.discard(index)
            continue
        host += more
        device += sizes[index].slot - sizes[index].device
    stack = sum(asked.spec.blocks[i].kind == "block" for i in below)
    tiers = tuple(
        "host" if i in settled else places[i] if i in below else "device" for i in range(len(sizes))
    )
    used = min(slots, stack)
    return Layout(tiers, used, device, host, prediction.disk_bytes, tuple(sorted(settled)))


@dataclasses.dataclass(frozen=True)
class LinkedLive(Live):
    """A live model whose groups may have Parameters in common.

    Attributes:
        linked: For each group those that have.
    """

    linked: tuple[frozenset[int], ...] = ()


def unlocked(taken: Prediction, limit: int) -> str:
    """Say that not all can be page-locked that a plan counts on."""
    return (
        f"page-lock: {format_bytes(taken.page_locked_bytes)} of RAM are copied from and to, where "
        f"{format_bytes(limit)} can be page-locked: the rest is ordinary memory, its copies are slower than "
        "predicted. A larger host_arena or ram_budget, or disk_offload= for files, would help"
    )


def _why(asked: Question, layout: Layout, kept: list[str], slots: int, tokens: int) -> list[str]:
    """Say what was chosen of what was left open."""
    lines = []
    streams = [i for i, tier in enumerate(layout.tiers) if tier != "device" and i not in layout.settled]
    if any(asked.live.paged[i] is None for i in streams):
        where = ", ".join(
            f"{count} from {tier}"
            for tier in ("host", "disk")
            if (count := sum(layout.tiers[i] == tier for i in streams))
        )
        lines.append(
            f"param_offload=auto: {len(streams)} of {len(layout.tiers)} groups start paged ({where}); "
            f"{format_bytes(layout.device_bytes)} of {format_bytes(asked.budgets.device)}, planned for "
            f"{tokens:,} tokens at once"
        )
    if any(policy != "keep" for policy in kept):
        counts = ", ".join(f"{kept.count(name)} {name}" for name in ("keep", "offload", "recompute"))
        lines.append(f"activation_offload, recompute: {counts} as planned; then by measurement")
    if layout.slots and slots != asked.options.prefetch_depth + 1:
        through = f"{slots} slots" if slots > 1 else "one slot, nothing is brought ahead"
        lines.append(f"prefetch_depth={slots - 1}: {through}, as planned")
    return lines


def question(
    model: nn.Module,
    groups: BlockMap,
    inventory: Inventory,
    device: torch.device,
    want: Asked,
    budgets: Budgets,
    options: WrapOptions,
    sizes: Callable[[str, str], Sequence[GroupSpec]],
    forced: Sequence[bool | None],
    settling: frozenset[int],
    hardware: HardwareProfile | None = None,
) -> Question:
    """Put together what is asked.

    Args:
        model: The model.
        groups: Its block map.
        inventory: Its groups.
        device: Where it computes.
        want: What the options ask for, block by block.
        budgets: What may be used.
        options: All of them.
        sizes: As for `Live`.
        forced: True, False or None for every group.
        settling: Groups whose optimizer works on the host until they are wholly resident.
        hardware: Rates; None for those of this machine.
    """
    spec, adapters = live_spec(model, groups)
    left = iter(zip(want.policy, want.fallback, strict=True))
    policies = []
    for block in spec.blocks:
        policy, fallback = next(left) if block.kind == "block" else ("keep", None)
        policies.append(policy if fallback is None else None)
    live = LinkedLive(
        sizes=sizes,
        paged=tuple(forced),
        policies=tuple(policies),
        settling=settling,
        returns=options.offload == "auto",
        adapters=adapters,
        fused=None if options.kernels == "auto" else options.kernels is True,
        logit_copies=2.0 if options.plan_tokens is None else None,
        linked=tuple(inventory.linked()),
    )
    rates = hardware if hardware is not None else rates_of(device, options)
    return Question(spec, live, want, budgets, device, options, rates)
