"""`trainstream.json` in a checkpoint: the plan of the run, so that a resumed one computes with the same bits.

The Trainer, `trainstream finetune` and `Session.save` all write it.

Placement (what is where) is written down but may differ in the resumed run. Numerics (codec, moment format,
kernels, attention, chunks of the loss) is forced on it: an option that was left open gets the saved value,
one that asks for something else is an error.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import trainstream
from trainstream._options import WrapOptions
from trainstream._session import Session
from ts_core.errors import CheckpointError
from ts_core.plan import Numerics, Plan
from ts_quant import QuantizedTensor

__all__ = ["PLAN_FILE", "SavedPlan", "packed_count", "read_plan", "trained_names", "write_plan"]

PLAN_FILE = "trainstream.json"
_FORMAT = 1
# Numerics that wrap() has an option for, by the same name.
_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(Numerics)
    if field.name in {option.name for option in dataclasses.fields(WrapOptions)}
)


def packed_count(model: nn.Module) -> int:
    """Count the packed weights of a model."""
    return sum(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


def trained_names(model: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group: the order its state is kept in."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in groups]


def write_plan(folder: Path, session: Session, *, loss_chunk_size: int | None) -> None:
    """Write the plan of a session into the folder of a checkpoint.

    Args:
        folder: An existing folder.
        session: Of the wrapped model.
        loss_chunk_size: Tokens whose logits exist at a time, or None if the model's own loss is used.
    """
    content = {
        "format": _FORMAT,
        "version": trainstream.__version__,
        "plan": session.plan.to_dict(),
        "loss_chunk_size": loss_chunk_size,
        "open": ["attention"] if _attention_open(session) else [],
        "packed": packed_count(session.model),
        "parameters": trained_names(session.model, session.optimizer),
    }
    (folder / PLAN_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_plan(folder: Path) -> SavedPlan | None:
    """Read what `write_plan` wrote.

    Args:
        folder: The folder of a checkpoint.

    Returns:
        The plan, or None if there is none: a checkpoint of something else.

    Raises:
        CheckpointError: The file is damaged, or of a later release.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}, written by version {content.get('version')}")
        return SavedPlan(
            folder,
            str(content["version"]),
            Plan.from_json(json.dumps(content["plan"])),
            content["loss_chunk_size"],
            int(content["packed"]),
            content["parameters"],
            tuple(content.get("open", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"[resume] {path} cannot be read by this release (format {_FORMAT}): {type(error).__name__}: "
            f"{error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """The plan that a checkpoint was made under.

    Attributes:
        folder: The checkpoint.
        version: Version of the library that wrote it.
        plan: Placement and numerics.
        loss_chunk_size: As in `write_plan`.
        packed: How many weights were packed.
        parameters: Names of the trained parameters, in the order of the optimizer's groups.
        undecided: Numerics that were still to be measured; they are in a resumed run too.
    """

    folder: Path
    version: str
    plan: Plan
    loss_chunk_size: int | None
    packed: int
    parameters: list[list[str]]
    undecided: tuple[str, ...] = ()

    def _differs(self, name: str, saved: object, given: object, remedy: str = "") -> CheckpointError:
        remedy = remedy or "Leave the option out"
        return CheckpointError(
            f"[resume] option {name}: {self.folder} was made with {saved!r}, given {given!r}; it decides the "
            f"bits of the result, so a resumed run keeps it. {remedy}, or start a new run"
        )

    def force(self, given: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Complete options of `wrap()` with the numerics of the checkpoint.

        Args:
            given: The options, as they were asked for.
            model: The model that is going to be wrapped.

        Returns:
            All options, those that were left open as they were in the run before.

        Raises:
            CheckpointError: An option asks for something else.
        """
        forced = dict(given)
        numerics = self.plan.numerics
        for name in _OPTIONS:
            saved = getattr(numerics, name)
            asked = given.get(name, "auto")
            left_open = isinstance(asked, str) and asked == "auto"
            if not left_open:
                if self._matters(name) and _normal(name, asked) != saved:
                    raise self._differs(name, saved, asked)
            elif name in self.undecided:
                continue
            elif name == "quantize" and (packed_count(model) or saved == "mixed"):
                # What is packed already was packed while it was loaded, and wrap() left the rest alone.
                forced[name] = "none"
            else:
                forced[name] = saved
        return forced

    def _matters(self, name: str) -> bool:
        return name != "quant_block_size" or self.plan.numerics.quantize != "none"

    def chunk_size(self, given: int | None, default: int) -> int:
        """Return the chunk size of the loss to use.

        Args:
            given: What was asked for, or None.
            default: What is used if the checkpoint does not say.

        Raises:
            CheckpointError: Something else was asked for.
        """
        saved = self.loss_chunk_size
        if saved is None:
            return default if given is None else given
        if given is not None and given != saved:
            raise self._differs("loss_chunk_size", saved, given)
        return saved

    def check(self, session: Session) -> None:
        """Compare with the session of the resumed run, once it is wrapped.

        Attention that is still to be measured takes the backend that the checkpoint was made with.

        Raises:
            CheckpointError: Numerics, the number of packed weights or the trained parameters differ.
        """
        now = session.plan.numerics
        for field in dataclasses.fields(Numerics):
            name = field.name
            before, after = getattr(self.plan.numerics, name), getattr(now, name)
            measured = name in self.undecided and session.options.attention == "auto"  # since then
            left_open = name == "attention" and (measured or _attention_open(session))
            if before != after and self._matters(name) and not left_open:
                remedy = f"Load and wrap the model with {name}={before!r} as before"
                raise self._differs(name, before, after, remedy)
        packed = packed_count(session.model)
        if packed != self.packed:
            raise CheckpointError(
                f"[resume] {self.folder} was made with {self.packed} packed weights, the model has {packed}; "
                "load it as it was loaded before, or start a new run"
            )
        names = trained_names(session.model, session.optimizer)
        if names != self.parameters:
            raise CheckpointError(
                f"[resume] {self.folder}: its optimizer's parameters are not those of this run, or in "
                f"another order: {_first_difference(self.parameters, names)}"
            )
        if session.kernels is not None and "attention" not in self.undecided:
            session.kernels.keep_attention(self.plan.numerics.attention, str(self.folder))


def _attention_open(session: Session) -> bool:
    """Whether ``attention="auto"`` waits for a call to measure on."""
    choice = None if session.kernels is None else session.kernels.attention
    return choice is not None and choice.open


def _normal(name: str, value: Any) -> Any:
    """Return an option's value as a plan states it."""
    checked = getattr(WrapOptions.from_kwargs(**{name: value}), name)
    return False if name in ("kernels", "fused_lora") and checked is None else checked


def _first_difference(saved: list[list[str]], now: list[list[str]]) -> str:
    if [len(group) for group in saved] != [len(group) for group in now]:
        sizes = [[len(group) for group in groups] for groups in (saved, now)]
        return f"groups of {sizes[0]} there, of {sizes[1]} here"
    for before, after in zip(chain(*saved), chain(*now), strict=True):
        if before != after:
            return f"{before!r} there, {after!r} here"
    return "none"
