"""Checkpoints of `trainstream finetune`: weights in the standard format, the rest as JSON and safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from trainstream._folders import discard_folder, sweep
from trainstream._nested import flatten, unflatten
from ts_core.errors import CheckpointError
from ts_hf import save_safetensors

__all__ = [
    "Checkpoint",
    "checkpoints",
    "flatten",
    "latest",
    "prune",
    "read_state",
    "seal",
    "unflatten",
    "write_state",
]

STATE_FILE = "trainstream_state.json"
TENSOR_FILE = "trainstream_state.safetensors"
FORMAT = 1
_NAME = re.compile(r"^checkpoint-(\d+)$")


# ---------------------------------------------------------------------------------- checkpoints


class Checkpoint:
    """What one checkpoint holds besides the weights: JSON data, and nested state with tensors.

    Attributes:
        folder: Where it lies.
        data: The JSON data (`step`, `settings`, ...).
        state: The nested state (`optimizer`, `scheduler`, `rng`, ...).
    """

    def __init__(self, folder: Path, data: dict[str, Any], state: Any) -> None:
        """Keep the three parts."""
        self.folder = folder
        self.data = data
        self.state = state


def write_state(folder: Path, data: dict[str, Any], state: Any) -> None:
    """Write data and state into a folder that already holds the weights; call it last."""
    tree, tensors = flatten(state)
    save_safetensors(tensors, folder / TENSOR_FILE)
    seal(folder, data, tree)


def seal(folder: Path, data: dict[str, Any], tree: Any) -> None:
    """Write the JSON file of a folder that holds everything else.

    It lists every other file with its size, so that a folder which lost a part is recognised.

    Args:
        folder: Of the checkpoint.
        data: As for `write_state`.
        tree: What `flatten` made of the state, beside the tensors.
    """
    files = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    content = {"format": FORMAT, "files": files, "data": data, "state": tree}
    (folder / STATE_FILE).write_text(json.dumps(content), encoding="utf-8")


def read_state(folder: Path) -> Checkpoint:
    """Read a checkpoint that `write_state` finished.

    Args:
        folder: A `checkpoint-<step>` folder.

    Returns:
        Its data and state, tensors on the CPU.

    Raises:
        CheckpointError: No checkpoint is there, a file is missing or has another size, or data is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"[resume] {folder} is no checkpoint: it holds no {STATE_FILE}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"[resume] {folder} has checkpoint format {content['format']}; this release reads {FORMAT}"
            )
        for name, size in content["files"].items():
            found = folder / name
            if not found.is_file() or found.stat().st_size != size:
                raise CheckpointError(f"[resume] {found} is missing or damaged: expected {size} bytes")
        return Checkpoint(
            folder, content["data"], unflatten(content["state"], load_file(folder / TENSOR_FILE))
        )
    except (KeyError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"[resume] {path} is damaged: {type(error).__name__}: {error}") from error


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run folder, oldest step first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _NAME.match(entry.name))]
    return [entry for _, entry in sorted(found) if (entry / STATE_FILE).is_file()]


def latest(folder: Path) -> Path:
    """Return the newest complete checkpoint at or below `folder` (a checkpoint, a run, or a folder of runs).

    Raises:
        CheckpointError: There is none.
    """
    if (folder / STATE_FILE).is_file():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"[resume] {folder}: no such folder")
    sweep(folder)
    here = checkpoints(folder)
    if here:
        return here[-1]
    below = [found[-1] for run in folder.iterdir() if run.is_dir() and (found := checkpoints(run))]
    if not below:
        raise CheckpointError(f"[resume] no complete checkpoint in {folder}")
    return max(below, key=lambda path: (path / STATE_FILE).stat().st_mtime_ns)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of a run folder."""
    for entry in checkpoints(folder)[:-keep]:
        discard_folder(entry)
