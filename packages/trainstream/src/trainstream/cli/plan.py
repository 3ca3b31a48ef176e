"""`trainstream plan`: whether a model fits and how fast a step would be, from its config or headers alone."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainstream.cli.console import Console
    from ts_core.hardware import HardwareProfile
    from ts_core.job import Job, Packing, Prediction, Room
    from ts_core.search import Found
    from ts_core.spec import ModelSpec

__all__ = ["Asked", "command", "run"]

_SIZE = "Bytes or a size such as 24GiB"
_LEAST = 1 << 20  # bytes; what is less was meant in another unit
_RANK = 16


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks for; sizes as they were written, None where nothing was."""

    model: str
    vram: str | None = None
    ram: str | None = None
    disk: str | None = None
    seq: int = 2048
    batch: int = 1
    lora: bool = True
    rank: int = _RANK
    quantize: str = "auto"
    moments: str = "auto"
    prefer: str = "exact"
    micro_batch: int | None = None
    headroom: float = 0.10
    hardware: Path | None = None
    link: float | None = None
    tflops: float | None = None
    capture: bool | None = None
    page_lock: str | None = None


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json, a safetensors or GGUF file, or a model's name on the hub.",
        ),
    ],
    vram: Annotated[
        str | None, typer.Option("--vram", help=f"GPU memory. {_SIZE}. Default: the GPU here.")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="RAM. Default: what is free here.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="Files. Default: what is free here.")] = None,
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a row.", min=1)] = 2048,
    batch: Annotated[int, typer.Option("--batch", help="Rows of an optimizer step.", min=1)] = 1,
    lora: Annotated[
        bool, typer.Option("--lora", help="Adapters on a frozen base; so unless --full is given.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Every weight.")] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", help=f"Rank of the adapters. Default: {_RANK}.", min=1)
    ] = None,
    quantize: Annotated[
        str, typer.Option("--quantize", help="auto, none, or a codec of the frozen base such as nf4.")
    ] = "auto",
    moments: Annotated[
        str, typer.Option("--moments", help="auto, float32, bfloat16 or int8: AdamW's, with --full.")
    ] = "auto",
    prefer: Annotated[
        str, typer.Option("--prefer", help="exact, or speed: auto may pack to be fast.")
    ] = "exact",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Rows at once. Default: what is fastest.", min=1)
    ] = None,
    headroom: Annotated[
        float, typer.Option("--headroom", help="Share of the GPU's memory left unplanned.", min=0.0, max=0.9)
    ] = 0.10,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="Rates: what `trainstream doctor --json` printed there.")
    ] = None,
    link: Annotated[
        float | None, typer.Option("--link", help="GB/s of the link to the GPU, one way.")
    ] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="TFLOP/s of the GPU in bf16.")] = None,
    capture: Annotated[
        bool | None,
        typer.Option(
            help="Blocks recorded once and replayed, or not: wrap()'s capture; it decides by itself."
        ),
    ] = None,
    page_lock: Annotated[
        str | None, typer.Option("--page-lock", help="RAM that may be page-locked: wrap()'s host_arena.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say whether a model fits and how fast a step would be; no weights and no GPU are needed.

    Exit codes: 0 it fits, 1 it does not, 2 something in the request is wrong, 130 stopped by Ctrl-C.
    """
    asked = Asked(
        model, vram, ram, disk, seq, batch, not full, rank or _RANK, quantize, moments, prefer, micro_batch,
        headroom, hardware, link, tflops, capture, page_lock,
    )  # fmt: skip
    from trainstream.cli import _carry_out

    def answer(console: Console) -> int:
        _agree(lora, full, rank)
        return run(console, asked)

    _carry_out(answer, as_json, debug)


def _agree(lora: bool, full: bool, rank: int | None) -> None:
    from ts_core.errors import OptionError

    if lora and full:
        raise OptionError("options lora, full: adapters and every weight exclude each other; give one")
    if full and rank is not None:
        raise OptionError(f"option rank: {rank} is of adapters, and with --full every weight is trained")


def _size(name: str, value: str) -> int:
    from ts_core.errors import OptionError
    from ts_core.memory import parse_bytes

    size = parse_bytes(int(value) if value.isdigit() else value, name=name)
    if size < 0 or (size == 0 and name != "disk"):
        raise OptionError(f"option {name}: expected a size above 0, such as 24GiB, given {value!r}")
    if 0 < size < _LEAST:
        raise OptionError(f"option {name}: {value} is {size} bytes; write the unit too, as in {value}GiB")
    return size


def _room(asked: Asked) -> tuple[Room, bool]:
    """Return what may be used, and whether the model computes in RAM."""
    import torch

    from ts_core.job import Room
    from ts_core.memory import device_budget, disk_budget, host_budget
    from ts_core.usage import CONTEXT_BYTES
    from ts_paging.arena import lockable_bytes

    ram = _size("ram", asked.ram) if asked.ram is not None else host_budget().available_bytes
    files = _size("disk", asked.disk) if asked.disk is not None else disk_budget(tempfile.gettempdir())
    if asked.vram is None and not torch.cuda.is_available():
        return Room(ram, None, files), True
    if asked.vram is not None:
        free = _size("vram", asked.vram) - CONTEXT_BYTES
    else:
        here = device_budget("cuda")
        free = here.available_bytes + here.cached_bytes
    lock = _size("page-lock", asked.page_lock) if asked.page_lock is not None else None
    if lock is None and asked.ram is None:
        lock = max(lockable_bytes(), 0)
    return Room(max(int(free * (1 - asked.headroom)), 0), ram, files, lock), False


def _profile(asked: Asked, cpu: bool) -> tuple[HardwareProfile, str]:
    """Return the rates, and where they are from."""
    import torch

    from ts_core.errors import OptionError
    from ts_core.hardware import HardwareProfile, profile_hardware
    from ts_core.job import assumed_profile

    if asked.hardware is not None:
        try:
            data: Any = json.loads(asked.hardware.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"option hardware: cannot read {asked.hardware}: {error}") from error
        inner = data.get("profile", data) if isinstance(data, dict) else data
        profile = HardwareProfile.from_json(json.dumps(inner))
        source = f"as measured on {profile.device_name}"
    elif torch.cuda.is_available() and asked.vram is None:
        profile = profile_hardware()
        source = f"as measured here on {profile.device_name}"
    else:
        profile = assumed_profile("cpu" if cpu else "cuda")
        source = (
            "assumed, of a desktop's processor" if cpu else "assumed, of a PCIe 4.0 card (100 TFLOP/s bf16)"
        )
    changes: dict[str, Any] = {}
    if asked.link is not None:
        rate = _above("link", asked.link) * 1e9
        changes |= {"h2d_bytes_per_s": rate, "d2h_bytes_per_s": rate, "both_bytes_per_s": 1.65 * rate}
    if asked.tflops is not None:
        rate = _above("tflops", asked.tflops) * 1e12
        changes["rates"] = {**profile.rates, "matmul_flops_per_s": {"bfloat16/4096": rate}}
    if changes:
        source += "; link and TFLOP/s as given" if len(changes) == 4 else f"; {', '.join(changes)} as given"
    return dataclasses.replace(profile, **changes), source


def _above(name: str, value: float) -> float:
    from ts_core.options import number

    return number(name, value, above=0.0)


def _within(room: Room, spec: ModelSpec, *, inverse: bool = False) -> Room:
    """Return what of a room is planned with, as `wrap()` does; `inverse`: the room that leaves as much."""
    from ts_core.headroom import arena_growth, ram_for, unplanned

    if room.host is None:
        device = (
            ram_for(room.device, spec.bytes) if inverse else room.device - unplanned(room.device, spec.bytes)
        )
        return dataclasses.replace(room, device=max(device, 0))
    host = ram_for(room.host) if inverse else room.host - arena_growth(room.host)
    lock = room.page_lock
    if lock is not None:
        lock = ram_for(lock) if inverse else lock - arena_growth(lock)
    return dataclasses.replace(room, host=max(host, 0), page_lock=lock)


def _packings(names: tuple[str, ...]) -> tuple[Packing, ...]:
    import ts_quant  # noqa: F401 - registers its codecs
    from trainstream._first import packing_of

    return tuple(packing_of(name) for name in names)


def _job(asked: Asked, spec: ModelSpec, cpu: bool) -> Job:

    from trainstream._first import planned_job
    from ts_core.errors import OptionError
    from ts_core.options import choice

    wanted = choice("quantize", asked.quantize, ("auto", "none", *_codecs()))
    if not asked.lora and wanted not in ("auto", "none"):
        raise OptionError(f"option quantize={wanted}: packed weights are frozen; leave it out, or use --lora")
    names = ("none", "int8", "nf4") if wanted == "auto" and asked.lora else ("none",)
    formats = ("float32", "bfloat16", "int8")
    chosen = choice("moments", asked.moments, ("auto", *formats))
    if asked.micro_batch is not None and asked.batch % asked.micro_batch:
        raise OptionError(
            f"option micro-batch: expected a divisor of the batch of {asked.batch}, given {asked.micro_batch}"
        )
    return planned_job(
        spec,
        cpu=cpu,
        seq_len=asked.seq,
        batch=asked.batch,
        lora_rank=asked.rank if asked.lora else 0,
        trains=not asked.lora,
        micro_batches=None if asked.micro_batch is None else (asked.micro_batch,),
        packings=_packings(names if wanted in ("auto", "none") else (wanted,)),
        # Adapters stay on the device with all of their state.
        moments=(chosen,) if chosen != "auto" else formats[:1] if asked.lora else formats,
        prefer=choice("prefer", asked.prefer, ("exact", "speed")),
        capture=not cpu if asked.capture is None else asked.capture,
    )


def _codecs() -> tuple[str, ...]:
    """Return the codecs that a frozen base can be packed with here."""
    from trainstream.cli.settings import _CODECS

    return tuple(name for name in _CODECS if name != "none")


def _is_packed(spec: ModelSpec) -> bool:
    """Whether the source stores most of the stack packed."""
    tensors = [t for block in spec.stack for t in block.tensors]
    return 2 * sum(t.numel for t in tensors if t.codec != "none") > sum(t.numel for t in tensors)


def _decoded(spec: ModelSpec) -> ModelSpec:
    """Return the spec with plain weights: what is stored packed is decoded to be trained."""
    if not any(t.codec != "none" for block in spec.blocks for t in block.tensors):
        return spec
    blocks = tuple(
        dataclasses.replace(
            block,
            tensors=tuple(
                dataclasses.replace(t, codec="none", stored_bytes=None, trained=True) for t in block.tensors
            ),
        )
        for block in spec.blocks
    )
    notes = ("stored packed: decoded to 16 bits, as every weight is trained",)
    return dataclasses.replace(spec, blocks=blocks, notes=notes)


def _alternatives(asked: Asked, job: Job, spec: ModelSpec, cpu: bool, *, smaller: bool) -> dict[str, Job]:
    """Return other jobs that are worth a try, by the options that ask for them."""
    found: dict[str, Job] = {}
    if job.lora_rank and job.packings[-1].name in ("none", "int8") and asked.quantize != "auto":
        found["--quantize nf4"] = dataclasses.replace(job, packings=_packings(("nf4",)))
    if not job.lora_rank:
        lora = dataclasses.replace(asked, lora=True, quantize="auto", rank=_RANK)
        found["--lora"] = _job(lora, spec, cpu)
    if smaller:
        if asked.batch > 1 and (asked.micro_batch or asked.batch) > 1:
            found["--batch 1"] = dataclasses.replace(job, batch=1, micro_batches=None)
        if asked.seq > 256:
            length = max(asked.seq // 4, 256)
            found[f"--seq {length}"] = dataclasses.replace(job, seq_len=length)
        return found
    if asked.prefer == "exact" and len(job.packings) > 1:
        found["--prefer speed"] = dataclasses.replace(job, prefer="speed")
    if not (cpu or job.capture):
        found["--capture"] = dataclasses.replace(job, capture=True)
    return found


def run(console: Console, asked: Asked) -> int:
    """Answer the command.

    Args:
        console: Where the answer goes; for programs one event "plan" with `fits`, `model`, `budgets` and,
            where it fits, `prediction`, `plan`, `decisions` and `helps`, else `options`.
        asked: What was asked.

    Returns:
        Exit code: 0 if it fits, else 1.
    """
    from trainstream._first import unlocked
    from ts_core.advice import explain, helps, plan_of
    from ts_core.errors import DoesNotFitError, OptionError
    from ts_hf.header_spec import find_spec

    room, cpu = _room(asked)
    if cpu and asked.page_lock is not None:
        raise OptionError("option page-lock: memory is page-locked for a GPU; say which with --vram")
    if cpu and asked.capture:
        raise OptionError("option capture: recordings are faster on a GPU only; say which with --vram")
    hardware, source = _profile(asked, cpu)
    spec = find_spec(asked.model, dtype="bfloat16")  # as load_model and finetune hold it
    if not asked.lora:
        spec = _decoded(spec)
    job = _job(asked, spec, cpu)
    if job.lora_rank and _is_packed(spec):
        job = dataclasses.replace(job, packings=_packings(("none",)))  # it stays as it is stored
    told = {
        "model": {
            "source": spec.source,
            "parameters": spec.numel,
            "active": round(spec.active),
            "bytes": spec.bytes,
            "blocks": len(spec.stack),
            "notes": list(spec.notes),
        },
        "budgets": dataclasses.asdict(room),
        "hardware": source,
        "seq_len": job.seq_len,
        "batch": job.batch,
    }
    _head(console, spec, room, source, asked)
    limit = room.page_lock
    try:
        given = room
        found, room = _found(spec, job, hardware, given)
        if asked.capture is None and job.capture and _untouched(found):
            job = dataclasses.replace(job, capture=False)
            found, room = _found(spec, job, hardware, given)
    except DoesNotFitError:
        room = dataclasses.replace(room, page_lock=None)
        return _refuse(console, asked, spec, job, hardware, room, told, cpu)
    device = "cpu" if cpu else "cuda"
    plan = plan_of(spec, found, room, job=job, device=device)
    reasons = explain(spec, job, room, found)
    if limit is not None and room.page_lock is None:
        reasons.append(unlocked(found.prediction, limit))
    better = helps(
        spec, job, hardware, _within(room, spec), found, _alternatives(asked, job, spec, cpu, smaller=False)
    )
    console.event(
        "plan",
        fits=True,
        **told,
        prediction=dataclasses.asdict(found.prediction),
        micro_batch=found.choice.setting.micro,
        plan=plan.to_dict(),
        decisions=reasons,
        helps=[dataclasses.asdict(help) for help in better],
    )
    console.say()
    console.say(plan.table())
    console.say()
    _result(console, found.prediction, room, cpu)
    for line in reasons:
        console.say(f"  {line}")
    for help in better[:3]:
        console.say(f"faster     {help.text}: {help.gain:.2f} x as many tokens a second")
    if not better:
        console.say("faster     neither more memory nor a faster part of the kind that limits it gains 2 %")
    return 0


def _untouched(found: Found) -> bool:
    """Whether weights and activations all stay on the device: wrap() captures such a model if asked to."""
    counts = (*found.choice.places, *found.choice.policies)
    return not any(any(count[1:]) for count in counts)


def _found(spec: ModelSpec, job: Job, hardware: HardwareProfile, room: Room) -> tuple[Found, Room]:
    """Search; where not all can be page-locked, with ordinary memory. Return the room of the plan too."""
    from ts_core.errors import DoesNotFitError
    from ts_core.search import choose

    try:
        return choose(spec, job, hardware, _within(room, spec)), room
    except DoesNotFitError:
        if room.page_lock is None:
            raise
    room = dataclasses.replace(room, page_lock=None)
    return choose(spec, job, hardware, _within(room, spec)), room


def _head(console: Console, spec: ModelSpec, room: Room, source: str, asked: Asked) -> None:
    from ts_core.memory import format_bytes

    active = f" ({spec.active / 1e9:.3g} B a token)" if spec.active < 0.9 * spec.numel else ""
    console.say(
        f"model      {spec.source}: {spec.numel / 1e9:.3g} B weights{active}, {len(spec.stack)} blocks, "
        f"{format_bytes(spec.bytes)}"
    )
    for note in spec.notes:
        console.say(f"           {note}")
    kind = f"LoRA of rank {asked.rank}" if asked.lora else "every weight"
    console.say(f"trains     {kind}, {asked.batch} x {asked.seq} tokens a step")
    names = {"device": "VRAM" if room.host is not None else "RAM", "host": "RAM", "disk": "files"}
    sizes = [
        f"{format_bytes(getattr(room, k))} of {v}" for k, v in names.items() if getattr(room, k) is not None
    ]
    console.say(f"may use    {', '.join(sizes)}")
    console.say(f"rates      {source}")


def _result(console: Console, taken: Prediction, room: Room, cpu: bool) -> None:
    from ts_core.memory import format_bytes

    peaks = [f"{format_bytes(taken.device_bytes)} of {'RAM' if cpu else 'VRAM'}"]
    if not cpu:
        peaks.append(f"{format_bytes(taken.host_bytes)} of RAM")
    if taken.disk_bytes:
        peaks.append(f"{format_bytes(taken.disk_bytes)} of files")
    console.say(f"fits       at its peak it takes {', '.join(peaks)}")
    console.say(f"speed      {taken.step_s:.3g} s a step, {_rate(taken.tokens_per_s)} tokens/s")


def _rate(per_second: float) -> str:
    """Spell a rate: whole numbers, and two digits of one below 10."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _refuse(
    console: Console,
    asked: Asked,
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    room: Room,
    told: dict[str, Any],
    cpu: bool,
) -> int:
    """Say that it does not fit, and what would."""
    from ts_core.advice import nearest

    options: list[dict[str, Any]] = []
    for option in nearest(
        spec, job, hardware, _within(room, spec), _alternatives(asked, job, spec, cpu, smaller=True)
    ):
        words = _words(option.name, _within(option.room, spec, inverse=True), asked, cpu)
        options.append({"change": words, "prediction": dataclasses.asdict(option.prediction)})
    console.event("plan", fits=False, **told, options=options)
    console.say("\ndoes not fit")
    for entry in options:
        speed = entry["prediction"]["tokens_per_s"]
        console.say(f"would fit  {entry['change']}: at least {_rate(speed)} tokens/s")
    if not options:
        console.say("nothing that was tried fits: a smaller model, or a machine with more memory")
    return 1


def _words(name: str, room: Room, asked: Asked, cpu: bool) -> str:
    """Return the option of the command line that stands for a change of a budget."""
    from ts_core.usage import CONTEXT_BYTES

    mib = 1 << 20
    parts = []
    for part in name.split(" and "):
        if part == "device" and not cpu:
            size = int(room.device / (1 - asked.headroom)) + CONTEXT_BYTES + mib
            parts.append(f"--vram {-(-size // mib)}MiB")
        elif part in ("device", "host"):
            size = room.device if part == "device" else room.host or 0
            parts.append(f"--ram {-(-size // mib)}MiB")
        elif part == "disk":
            parts.append(f"--disk {-(-room.disk // mib)}MiB")
        else:
            parts.append(part)
    return " ".join(parts)
