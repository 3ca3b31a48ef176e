"""Checkpoints through the session: weights in the standard format, the optimizer's state in safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainstream._folders import replace_folder, settle
from trainstream._nested import flatten, unflatten
from trainstream.integrations._plan_file import PLAN_FILE, read_plan, write_plan
from ts_core.errors import CheckpointError
from ts_hf.background import BackgroundSave, save_in_background
from ts_hf.safetensors_reader import SafetensorsReader
from ts_hf.saving import METADATA, model_files

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = [
    "OPTIMIZER_FILE",
    "load_optimizer",
    "optimizer_file",
    "plain_optimizer",
    "read_optimizer",
    "save",
    "weight_files",
]

OPTIMIZER_FILE = "optimizer.safetensors"
_TREE = "trainstream.state"
_File = tuple[Path, Mapping[str, torch.Tensor], Mapping[str, str] | None]


def plain_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer itself, where accelerate has put something around it."""
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def optimizer_file(optimizer: Any, folder: Path) -> _File:
    """Return the file that holds an optimizer's state: its tensors, and the rest as JSON in the header."""
    tree, tensors = flatten(optimizer.state_dict())
    return folder / OPTIMIZER_FILE, tensors, {_TREE: json.dumps(tree)}


def read_optimizer(folder: Path) -> Any:
    """Read what `optimizer_file` describes, out of a mapped file.

    Args:
        folder: Of the checkpoint.

    Returns:
        The state dict.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"[resume] {folder}: there is no {OPTIMIZER_FILE}")
    try:
        with SafetensorsReader(path) as reader:
            text = reader.metadata.get(_TREE)
            if text is None:
                raise CheckpointError(f"[resume] {path} holds no optimizer state of this library")
            return unflatten(json.loads(text), {name: reader.read(name) for name in reader})
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"[resume] {path} is damaged: {type(error).__name__}: {error}") from error


def weight_files(model: nn.Module, folder: Path) -> list[_File]:
    """Return the files of a model's weights; adapters and configs, which are small, are written at once.

    Buffers are copied: a forward pass may change them.
    """
    from transformers import PreTrainedModel

    if hasattr(model, "peft_config"):
        saved: Any = model
        saved.save_pretrained(folder, save_embedding_layers=False)
        return []
    if isinstance(model, PreTrainedModel):
        found: Sequence[tuple[Path, dict[str, torch.Tensor]]] = model_files(model, folder)
    else:
        state = model.state_dict(keep_vars=True)
        tied = {id(state[name]): name for name in reversed(state)}
        kept = {name: value for name, value in state.items() if tied.get(id(value)) == name}
        found = [(folder / "model.safetensors", kept)]
    buffers = dict(model.named_buffers())
    return [
        (path, {n: t.detach().clone() if n in buffers else t for n, t in tensors.items()}, METADATA)
        for path, tensors in found
    ]


def save(
    session: Session, folder: str | os.PathLike[str], background: bool, copy_bytes: int | str | None
) -> BackgroundSave:
    """Do what `Session.save` says."""
    session.settle_save()
    final = Path(folder).expanduser()
    settle(final)
    staging = final.parent / f".saving-{os.getpid()}-{final.name}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    discard = partial(shutil.rmtree, staging, ignore_errors=True)
    optimizers = [] if session.optimizer is None else [plain_optimizer(session.optimizer)]
    try:
        files = [optimizer_file(optimizer, staging) for optimizer in optimizers]
        files += weight_files(session.model, staging)
        write_plan(staging, session, loss_chunk_size=None)
        saving = save_in_background(
            files,
            partial(replace_folder, staging, final, hidden=True),
            optimizers=optimizers,
            copy_bytes=session.copy_bytes() if copy_bytes is None else copy_bytes,
            failed=discard,
        )
    except BaseException:
        discard()
        raise
    session.saving = saving
    if not background:
        session.settle_save()
    return saving


def load_optimizer(session: Session, folder: str | os.PathLike[str]) -> None:
    """Do what `Session.load_optimizer` says."""
    session.settle_save()
    place = Path(folder).expanduser()
    settle(place)
    if session.optimizer is None:
        return
    state = read_optimizer(place)
    saved = read_plan(place)
    if saved is None:
        session.events.add(
            f"{place} has no {PLAN_FILE}: written by an earlier release, so codec, moments, kernels and "
            "attention could not be compared with those of this run"
        )
    else:
        saved.check(session)
    session.optimizer.load_state_dict(state)
