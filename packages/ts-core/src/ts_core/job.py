"""What the planner is asked and what it answers, as plain frozen data.

`Job` says what is trained and what may be chosen, `Room` what may be used of each tier; a `Choice` is one
plan in counts, and a `Prediction` what it takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .errors import ArgumentError, OptionError, message
from .hardware import ASSUMED, ASSUMED_RATES, HardwareProfile
from .options import choice, integer

__all__ = [
    "MOMENT_BYTES",
    "PLACES",
    "POLICIES",
    "Choice",
    "Job",
    "Packing",
    "Prediction",
    "Room",
    "Setting",
    "assumed_profile",
]

PLACES = ("device", "settled", "host", "disk")
POLICIES = ("keep", "offload", "recompute")
#: Bytes of both moments a parameter; int8 ones have an fp32 scale for each of every 256.
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 2 * 4 / 256}


@dataclasses.dataclass(frozen=True)
class Packing:
    """A codec that frozen block weights may be stored in.

    Attributes:
        name: Its name in the registry, or "none".
        bytes_per_weight: Scales included; ignored for "none".
    """

    name: str = "none"
    bytes_per_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and what a plan may choose.

    Attributes:
        seq_len: Tokens of a row.
        batch: Rows of an optimizer step.
        lora_rank: Rank of adapters on every linear layer, the base frozen; 0 trains what the spec says.
        micro_batches: Rows that may go through at once; None for every divisor of `batch`.
        schedules: ``microbatch`` (weights come once for each) and ``block`` (once a step).
        packings: Codecs that frozen block weights may have, the preferred one first.
        moments: Formats that AdamW's moments may have, the preferred one first.
        policies: What may become of a block's saved activations.
        slots: Numbers of shared slots that may be tried.
        prefer: ``exact`` takes the first codec and format that fit; ``speed`` the fastest.
        loss_chunk: Rows of logits at once.
        dtype_bytes: Of a value that computes.
        spare_files: Whether files are used only where nothing fits without.
        capture: Whether blocks are recorded once and replayed.
    """

    seq_len: int = 2048
    batch: int = 1
    lora_rank: int = 0
    micro_batches: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("microbatch",)
    packings: tuple[Packing, ...] = (Packing(),)
    moments: tuple[str, ...] = ("float32",)
    policies: tuple[str, ...] = POLICIES
    slots: tuple[int, ...] = (2, 3)
    prefer: str = "exact"
    loss_chunk: int = 1024
    dtype_bytes: int = 2
    spare_files: bool = True
    capture: bool = False

    def __post_init__(self) -> None:
        """Check what was given.

        Raises:
            OptionError: A number out of range, an unknown word, or nothing to choose from.
        """
        for name, least in (("seq_len", 1), ("batch", 1), ("lora_rank", 0), ("loss_chunk", 1)):
            integer(name, getattr(self, name), minimum=least)
        choice("prefer", self.prefer, ("exact", "speed"))
        words = (
            ("schedules", ("microbatch", "block")),
            ("policies", POLICIES),
            ("moments", tuple(MOMENT_BYTES)),
        )
        for name, accepted in words:
            for value in getattr(self, name):
                choice(name, value, accepted)
        for name in ("schedules", "policies", "moments", "packings", "slots"):
            if not getattr(self, name):
                raise OptionError(f"option {name}: expected at least one, given none")
        for rows in self.micro_batches or ():
            integer("micro_batches", rows, minimum=1)
            if self.batch % rows:
                raise OptionError(f"option micro_batches: expected divisors of {self.batch}, given {rows}")
        for count in self.slots:
            integer("slots", count, minimum=1)

    def rows(self) -> tuple[int, ...]:
        """Return the micro-batches that may be tried, largest first."""
        every = self.micro_batches or [n for n in range(1, self.batch + 1) if self.batch % n == 0]
        return tuple(sorted(set(every), reverse=True))


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that may be used; none is ever exceeded by a plan.

    Attributes:
        device: Memory that the model computes in.
        host: RAM under a GPU, or None on a machine that computes in RAM.
        disk: Files.
        page_lock: Page-locked bytes of `host`; None for all of it.
    """

    device: int
    host: int | None = None
    disk: int = 0
    page_lock: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """The choices of a plan that hold for all blocks."""

    packing: Packing = Packing()
    moments: str = "float32"
    micro: int = 1
    schedule: str = "microbatch"
    slots: int = 2


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan in counts: blocks of a class are interchangeable.

    Attributes:
        setting: What holds for all blocks.
        places: For each class of groups how many are on ``device``, ``settled`` (their weights there in a
            slot of their own, the optimizer on the host), ``host`` and ``disk``.
        policies: For each class of blocks how many ``keep``, ``offload`` and ``recompute``.
    """

    setting: Setting
    places: tuple[tuple[int, int, int, int], ...]
    policies: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a plan takes.

    Attributes:
        step_s: Seconds of an optimizer step.
        tokens_per_s: Tokens of it in a second.
        limiter: ``gpu``, ``launch``, ``h2d``, ``d2h``, ``disk`` or ``dram`` (the optimizer on the host).
        busy_s: Seconds that each of them is busy in a step.
        device_bytes: Peak on the device.
        activation_bytes: Of these, for activations and temporaries.
        host_bytes: Peak in RAM under a GPU.
        page_locked_bytes: Of these, page-locked.
        disk_bytes: In files.
    """

    step_s: float
    tokens_per_s: float
    limiter: str
    busy_s: dict[str, float]
    device_bytes: int
    activation_bytes: int
    host_bytes: int
    page_locked_bytes: int
    disk_bytes: int

    def fits(self, room: Room) -> bool:
        """Whether no tier holds more than may be used of it."""
        host = room.host if room.host is not None else 0
        lock = host if room.page_lock is None else room.page_lock
        return (
            self.device_bytes <= room.device
            and self.host_bytes <= host
            and self.page_locked_bytes <= lock
            and self.disk_bytes <= room.disk
        )


def assumed_profile(device: str = "cuda", **figures: float) -> HardwareProfile:
    """Return a profile of figures that nobody measured, for machines that are not at hand.

    Args:
        device: "cuda" or "cpu".
        **figures: Those that are known, by the names of `HardwareProfile`.

    Returns:
        The profile; what is assumed is in its `assumed`.

    Example:
        >>> assumed_profile(h2d_bytes_per_s=50e9).h2d_bytes_per_s
        50000000000.0
    """
    unknown = set(figures) - set(ASSUMED)
    if unknown:
        names = ", ".join(sorted(ASSUMED))
        raise ArgumentError(message("assumed_profile", "figures", f"some of {names}", sorted(unknown)))
    known: dict[str, Any] = {**ASSUMED, **figures}
    return HardwareProfile(
        device=device,
        device_name="assumed",
        quick=True,
        unified_memory=device == "cpu",
        cores=1,
        ram_bytes=0,
        vram_bytes=0,
        page_lock_limit_bytes=None,
        **known,
        rates=ASSUMED_RATES[device],
        measured=tuple(sorted(figures)),
        assumed=tuple(sorted(set(ASSUMED) - set(figures))),
    )
