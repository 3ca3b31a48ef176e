"""The plan: plain frozen data that says where every block lives and how it is stored.

A plan has two parts. Placement (tier, activation policy, prefetch depth, slots, optimizer place) never
changes a bit of the result. Numerics (codec, moment format, kernels) is chosen once and saved with every
checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ts_core.errors import CheckpointError
from ts_core.memory import format_bytes

__all__ = ["BlockPlan", "Numerics", "Plan", "same_step", "step_seconds"]

_FORMAT = 1
#: Steps are compared where their tokens differ by no more than this share.
_ALIKE = 0.1


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """One block's line of the plan.

    Attributes:
        name: Path of the group in the model (``model.layers.0``), as in the block map.
        kind: ``block`` (of the stack), ``embedding``, ``head``, ``norm`` or ``other``.
        tier: ``device``, ``peer``, ``host`` or ``disk``: where its weights live between uses.
        codec: How frozen weights are stored: ``none`` or a registered codec's name.
        policy: ``keep``, ``offload`` or ``recompute`` of its saved activations.
        bytes: Bytes of its weights as stored under this plan.
        settled: Whether it has a slot of its own: a copy of its weights stays on the device, and is brought
            again only after an update.
        optimizer: Where the state of its trained weights is updated: ``host``, ``device`` or ``disk`` (on
            the host, from files); empty if nothing of it is trained.
    """

    name: str
    kind: str = "block"
    tier: str = "device"
    codec: str = "none"
    policy: str = "keep"
    bytes: int = 0
    settled: bool = False
    optimizer: str = ""


def same_step(planned: float, tokens: float | None) -> bool:
    """Whether two optimizer steps are of about as many tokens, so that their times can be compared.

    Args:
        planned: Tokens of the one that was predicted.
        tokens: Of the one that was measured; None or 0 where nobody has said.

    Example:
        >>> same_step(2048, 2000), same_step(2048, 512), same_step(2048, None)
        (True, False, False)
    """
    return bool(planned and tokens) and abs((tokens or 0) - planned) <= _ALIKE * planned


def step_seconds(predicted: Mapping[str, float], tokens: float | None) -> float | None:
    """Return the seconds that a step of so many tokens was predicted to take.

    Args:
        predicted: Of a plan.
        tokens: Of the step; None or 0 where nobody has said.

    Returns:
        Seconds, or None where there is no prediction, or one for another number of tokens.

    Example:
        >>> step_seconds({"step_s": 0.5, "tokens": 2048}, 2048)
        0.5
    """
    seconds = predicted.get("step_s")
    return seconds if seconds and same_step(predicted.get("tokens", 0), tokens) else None


def _alike(block: BlockPlan) -> BlockPlan:
    return dataclasses.replace(block, name="")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What decides the bits of a run; saved in every checkpoint and forced on resume.

    Attributes:
        quantize: Codec of frozen block weights.
        quant_block_size: Values per scale.
        moment_dtype: Format of AdamW's moments.
        kernels: Whether fused kernels replace the model's own modules.
        fused_lora: Whether LoRA layers are one function each.
        attention: SDPA backend that is tried first, or None for torch's own order.
        keep_precise: Share of extra bytes for weights that move up one codec.
        error_rank: Rank of the fit of the quantization error that adapters start from.
        error_iters: How often it was made anew.
        double_quant: Whether scales are quantized too, where the codec can.
        outliers: nvfp4 on tensor cores: share of the input channels that stay in bf16.
        fp8_backward: fp8 on tensor cores: input gradients from packed operands.
        nvfp4_backward: The same for nvfp4.
    """

    quantize: str = "none"
    quant_block_size: int = 64
    moment_dtype: str = "float32"
    kernels: bool = False
    fused_lora: bool = False
    attention: str | None = None
    keep_precise: float = 0.0
    error_rank: int = 0
    error_iters: int = 1
    double_quant: bool = False
    outliers: float = 0.0
    fp8_backward: bool = False
    nvfp4_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where everything lives: one line per block, and the global choices.

    Attributes:
        device: Where the model computes, as ``str(torch.device)``.
        blocks: One entry per block, in the order of use.
        numerics: The part that decides bits.
        optimizer: Where optimizer state is updated: ``cpu``, ``gpu`` or ``none`` (a foreign optimizer).
        prefetch_depth: Blocks fetched ahead.
        slots: Device slots that paged blocks share; 0 when none does.
        budgets: Bytes that may be used of ``device``, ``host`` and ``disk``; on a CPU run device and host are
            the same RAM.
        predicted: Bytes that the placement takes of each, and of ``activations`` beside ``device``: a guess
            before anything was measured, then what is kept. Where the step was predicted too, ``step_s``
            (seconds of an optimizer step once a run is under way) and ``tokens`` (of that step).

    Example:
        >>> plan = Plan(device="cpu", blocks=(BlockPlan("layers.0"),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    device: str
    blocks: tuple[BlockPlan, ...] = ()
    numerics: Numerics = dataclasses.field(default_factory=Numerics)
    optimizer: str = "cpu"
    prefetch_depth: int = 1
    slots: int = 0
    budgets: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def policy(self) -> tuple[str, ...]:
        """Activation policy of every block of the stack, by index."""
        return tuple(block.policy for block in self.blocks if block.kind == "block")

    @property
    def paged(self) -> tuple[str, ...]:
        """Names of the blocks whose weights do not stay on the device."""
        return tuple(block.name for block in self.blocks if block.tier != "device")

    def table(self) -> str:
        """Return the plan as a table for people: one line per run of alike blocks, then the totals."""
        rows = [("group", "kind", "tier", "codec", "activations", "optimizer", "bytes")]
        # What computes in RAM has no other device.
        words = {"device": "RAM"} if self.device.startswith("cpu") else {}
        run: list[BlockPlan] = []
        for block in [*self.blocks, None]:
            if run and (block is None or _alike(run[-1]) != _alike(block)):
                name = run[0].name if len(run) == 1 else f"{run[0].name} ... {run[-1].name} ({len(run)})"
                policy = run[0].policy if run[0].kind == "block" else ""
                size = format_bytes(sum(entry.bytes for entry in run))
                first = run[0]
                tier = words.get(first.tier, first.tier) + ("+slot" if first.settled else "")
                updated = words.get(first.optimizer, first.optimizer)
                rows.append((name, first.kind, tier, first.codec, policy, updated, size))
                run = []
            if block is not None:
                run.append(block)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for tier, predicted in self.predicted.items():
            if predicted and tier not in ("step_s", "tokens"):
                of = f" of {format_bytes(self.budgets[tier])}" if tier in self.budgets else ""
                lines.append(f"{words.get(tier, tier):11} {format_bytes(int(predicted))}{of} planned")
        if self.predicted.get("step_s"):
            tokens = int(self.predicted.get("tokens", 0))
            lines.append(f"step        {self.predicted['step_s']:.3g} s of {tokens:,} tokens planned")
        if self.slots:
            lines.append(f"slots       {self.slots}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Return the plan as a JSON string that `from_json` reads back."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`.

        Args:
            text: JSON text.

        Returns:
            The plan, equal to the one written.

        Raises:
            CheckpointError: Not JSON, an unknown format, or missing and unknown fields.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise ValueError("unknown format")
            blocks = tuple(BlockPlan(**block) for block in data.pop("blocks"))
            return cls(blocks=blocks, numerics=Numerics(**data.pop("numerics")), **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"Plan.from_json: expected a plan of format {_FORMAT}, given: {error}"
            ) from error
