"""What a search found, written out: the plan block by block, why it is so, what would fit and would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .errors import DoesNotFitError
from .hardware import HardwareProfile
from .job import PLACES, POLICIES, Job, Prediction, Room
from .live import Live, classes_of
from .memory import format_bytes
from .plan import BlockPlan, Numerics, Plan
from .search import Found, choose, search, smallest
from .spec import ModelSpec

__all__ = ["Help", "Option", "assign", "explain", "helps", "nearest", "plan_of"]

_GAIN = 1.02  # what is worth a change
_ALONE = "none, there is room for a single slot"
#: What more of a resource is tried with, and what it is called.
_RATES = {
    "gpu": (
        "a GPU twice as fast",
        ("matmul_flops_per_s", "decode_weights_per_s"),
        ("device_copy_bytes_per_s",),
    ),
    "h2d": ("a link twice as fast", (), ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s")),
    "disk": ("a disk twice as fast", (), ("disk_read_bytes_per_s", "disk_write_bytes_per_s")),
    "dram": ("host memory twice as fast", ("adamw_params_per_s",), ()),
    "launch": ("half the time of a launch", (), ("launch_s",)),
}


@dataclasses.dataclass(frozen=True)
class Option:
    """A change that makes a plan fit; it was planned with.

    Attributes:
        name: What is changed: ``device``, ``host``, ``disk``, or a name of an alternative.
        room: The budgets with it.
        job: What is trained with it.
        prediction: What the plan then takes.
    """

    name: str
    room: Room
    job: Job
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class Help:
    """A change and what it gains.

    Attributes:
        text: The change, for people.
        step_s: Seconds of a step with it.
        gain: Tokens a second with it, over those without.
    """

    text: str
    step_s: float
    gain: float


def _spread(members: Sequence[int], counts: Sequence[int], names: Sequence[str]) -> dict[int, str]:
    """Divide the members of a class among names, each as evenly as can be."""
    result: dict[int, str] = {}
    owed = [0.0] * len(names)
    left = list(counts)
    for index in members:
        for i, count in enumerate(counts):
            owed[i] += count / max(len(members), 1)
        best = max((i for i in range(len(names)) if left[i]), key=lambda i: owed[i])
        owed[best] -= 1
        left[best] -= 1
        result[index] = names[best]
    return result


def assign(spec: ModelSpec, found: Found, live: Live | None = None) -> tuple[dict[int, str], dict[int, str]]:
    """Say which group has which place, and which block which policy.

    Blocks that are paged are spread over the stack, so that each has resident neighbours to arrive behind; of
    the policies, those that keep are the last blocks, which backward needs first.

    Args:
        spec: The model.
        found: What the search found.
        live: As for the search.

    Returns:
        Places and policies by index; those that `live` fixes among them.
    """
    places: dict[int, str] = {}
    policies: dict[int, str] = {}
    classes = classes_of(spec, found.choice.setting, live)
    for members, counts, kept in zip(classes, found.choice.places, found.choice.policies, strict=True):
        places |= _spread(members, counts, PLACES)
        order = [name for name, count in zip(POLICIES, kept, strict=True) for _ in range(count)]
        policies |= dict(zip(members, reversed(order), strict=False))
    for index, policy in enumerate(live.policies if live is not None else ()):
        if policy is not None and spec.blocks[index].kind == "block":
            policies[index] = policy
    return places, policies


def plan_of(spec: ModelSpec, found: Found, room: Room, *, job: Job, device: str = "cuda") -> Plan:
    """Write a plan in counts out, block by block.

    Args:
        spec: The model.
        found: What the search found.
        room: The budgets of the search.
        job: What is trained.
        device: Where the model computes.

    Returns:
        The plan.
    """
    setting, taken = found.choice.setting, found.prediction
    places, policies = assign(spec, found)
    rows = []
    for index, block in enumerate(spec.blocks):
        place = places[index]
        trained = not job.lora_rank and any(t.trained and t.codec == "none" for t in block.tensors)
        packs = setting.packing.name != "none" and block.kind == "block" and not trained
        stored = block.bytes
        if packs:
            stored = sum(
                round(t.numel * setting.packing.bytes_per_weight)
                if len(t.shape) >= 2 and t.codec == "none"
                else t.bytes
                for t in block.tensors
            )
        codecs = {t.codec for t in block.tensors} - {"none"}
        updated = {"device": "device", "disk": "disk"}.get(place, "host")
        rows.append(
            BlockPlan(
                name=block.name,
                kind=block.kind,
                tier="host" if place == "settled" else place,
                codec=setting.packing.name if packs else codecs.pop() if len(codecs) == 1 else "none",
                policy=policies.get(index, "keep"),
                bytes=stored,
                settled=place == "settled",
                optimizer=updated if trained and block.numel else "",
            )
        )
    paged = any(sum(place[2:]) for place in found.choice.places)
    return Plan(
        device=device,
        blocks=tuple(rows),
        numerics=Numerics(quantize=setting.packing.name, moment_dtype=setting.moments),
        prefetch_depth=setting.slots - 1,
        slots=setting.slots if paged else 0,
        budgets={"device": room.device, "host": room.host or 0, "disk": room.disk},
        predicted={
            "device": taken.device_bytes - taken.activation_bytes,
            "activations": taken.activation_bytes,
            "host": taken.host_bytes,
            "disk": taken.disk_bytes,
            "step_s": taken.step_s,
            "tokens": job.batch * job.seq_len,
        },
    )


def explain(spec: ModelSpec, job: Job, room: Room, found: Found) -> list[str]:
    """Say in one line for each choice what was chosen, and why.

    Args:
        spec: The model.
        job: What could be chosen.
        room: What may be used.
        found: What was chosen.

    Returns:
        The lines.
    """
    setting, taken = found.choice.setting, found.prediction
    blocks = [
        (place, policy)
        for members, place, policy in zip(
            spec.classes(), found.choice.places, found.choice.policies, strict=True
        )
        if spec.blocks[members[0]].kind == "block"
    ]
    there, beside, host, disk = (sum(place[i] for place, _ in blocks) for i in range(4))
    keep, off, again = (sum(policy[i] for _, policy in blocks) for i in range(3))
    total = max(there + beside + host + disk, 1)
    lines = []
    if len(job.packings) > 1:
        why = "the first that fits" if job.prefer == "exact" else "the fastest that fits"
        lines.append(f"quantize=auto: {setting.packing.name}, {why}")
    if len(job.moments) > 1 and not job.lora_rank:
        short = "RAM is not short" if setting.moments == job.moments[0] else "wider ones do not fit"
        lines.append(f"moment_dtype=auto: {setting.moments}, {short}")
    cpu = room.host is None
    here, below = ("in RAM", "") if cpu else ("on the device", f"{host} come from RAM, ")
    lines.append(
        f"param_offload=auto: {there + beside} of {total} blocks {here}, {below}{disk} from files; "
        f"{format_bytes(taken.device_bytes)} of {format_bytes(room.device)} are used"
    )
    away = "" if cpu else f"{off} offload, "
    lines.append(
        f"activation_offload=auto, recompute=auto: {keep} blocks keep, {away}{again} recompute; "
        f"{format_bytes(taken.activation_bytes)} of activations and temporaries {here}"
    )
    if job.batch > 1:
        passes = job.batch // setting.micro
        lines.append(
            f"micro-batch: {setting.micro} of {job.batch} rows, {passes} to a step ({setting.schedule} order)"
        )
    if host + disk:
        through = f"{setting.slots - 1} ahead, through {setting.slots} slots"
        lines.append(f"prefetch_depth=auto: {through if setting.slots > 1 else _ALONE}")
    if job.capture:
        lines.append("capture: blocks are recorded once and replayed, in few launches")
    if not job.lora_rank:
        where = "in RAM, " if cpu else f"on the device, {beside + host} on the host, "
        lines.append(f"optimizer: {there} blocks are updated {where}{disk} from files")
    lines.append(f"limited by {_part(taken.limiter, cpu)}: {_busy(taken, cpu)}")
    return lines


def _part(name: str, cpu: bool) -> str:
    """What a resource is called where the processor computes."""
    return {"gpu": "compute"}.get(name, name) if cpu else name


def _busy(taken: Prediction, cpu: bool) -> str:
    parts = ((_part(name, cpu), seconds) for name, seconds in taken.busy_s.items() if seconds >= 5e-4)
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts)


def _try(spec: ModelSpec, job: Job, hardware: HardwareProfile, room: Room, any_plan: bool) -> Found | None:
    try:
        if not any_plan:
            return choose(spec, job, hardware, room)
        # What a run can start from.
        return search(spec, job, hardware, room, any_plan=True, state_below=room.host is not None)
    except DoesNotFitError:
        return None


def _tightest(job: Job) -> Job:
    """Return the choices of a job that take the least memory; what fits them fits the job."""
    packing = min(job.packings, key=lambda p: p.bytes_per_weight if p.name != "none" else 9.0)
    return dataclasses.replace(
        job,
        micro_batches=(min(job.rows()),),
        schedules=("microbatch",) if "microbatch" in job.schedules else job.schedules,
        packings=(packing,),
        moments=job.moments[-1:],
        slots=(1,),
        spare_files=False,
    )


def nearest(
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    room: Room,
    alternatives: Mapping[str, Job] | None = None,
) -> list[Option]:
    """Say what would fit where nothing does: the least of each budget, and other jobs.

    Args:
        spec: The model.
        job: What does not fit.
        hardware: Rates.
        room: What may be used.
        alternatives: Jobs to try with the same budgets, by name.

    Returns:
        The options that fit, each planned with; budgets are about the least. Where no single one helps, the
        device and RAM are raised together.
    """
    found = []
    tight = _tightest(job)
    names = ["device", *(["host"] if room.host is not None else []), "disk"]
    for name in names:
        wider = smallest(spec, tight, hardware, room, (name,))
        if wider is not None:
            found.append((name, wider, job))
    if not found:
        wider = smallest(spec, tight, hardware, room, names[:2])
        if wider is not None:
            found.append((" and ".join(names[:2]), wider, job))
    for name, other in (alternatives or {}).items():
        found.append((name, room, other))
    options = []
    for name, space, what in found:
        plan = _try(spec, what, hardware, space, True)
        if plan is not None:
            options.append(Option(name, space, what, plan.prediction))
    return options


def helps(
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    room: Room,
    found: Found,
    alternatives: Mapping[str, Job] | None = None,
) -> list[Help]:
    """Say what would make a step faster, the best first: more memory, faster parts, other options.

    Args:
        spec: The model.
        job: What is trained.
        hardware: Rates.
        room: What may be used.
        found: The plan so far.
        alternatives: Jobs to try, by name.

    Returns:
        Changes that gain at least 2 %, planned anew each.
    """
    cpu = room.host is None
    more = "more RAM" if cpu else "more on the device"
    rooms = {f"{format_bytes(room.device)} {more}": dataclasses.replace(room, device=2 * room.device)}
    if room.host:
        rooms[f"{format_bytes(room.host)} more RAM"] = dataclasses.replace(room, host=2 * room.host)
    changes = [(text, job, hardware, space) for text, space in rooms.items()]
    text, tables, figures = _RATES["h2d" if found.prediction.limiter == "d2h" else found.prediction.limiter]
    text = text.replace("a GPU", "a processor") if cpu else text
    faster = {f: getattr(hardware, f) * (0.5 if f == "launch_s" else 2) for f in figures}
    rates = {
        name: {key: rate * (2 if name in tables else 1) for key, rate in table.items()}
        for name, table in hardware.rates.items()
    }
    changes.append((text, job, dataclasses.replace(hardware, rates=rates, **faster), room))
    changes += [(name, other, hardware, room) for name, other in (alternatives or {}).items()]
    result = []
    for text, what, machine, space in changes:
        plan = _try(spec, what, machine, space, False)
        if plan is not None:
            gain = plan.prediction.tokens_per_s / found.prediction.tokens_per_s
            if gain >= _GAIN:
                result.append(Help(text, plan.prediction.step_s, gain))
    return sorted(result, key=lambda help: -help.gain)
