"""The data of a run: which files, which rows make a micro-batch, and a hash to know them again.

Reading, tokenizing and splitting are `ts_hf.text_dataset`'s work.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import ts_hf
from trainstream.cli.settings import Settings
from ts_core.errors import ArgumentError
from ts_hf.tokens import Document, Rows, read_documents

__all__ = [
    "Data",
    "Sources",
    "batch",
    "batch_indices",
    "expand",
    "fingerprint",
    "load_data",
    "read_sources",
    "spread",
    "to_device",
]

BUILT_IN_BYTES = 2_000_000
# What a folder is searched for; a file that is named itself is read whatever its name.
_SUFFIXES = frozenset(
    [
        *(
            ".jsonl",
            ".ndjson",
            ".txt",
            ".md",
            ".rst",
            ".py",
            ".pyi",
            ".c",
            ".h",
            ".cpp",
            ".cc",
            ".hpp",
            ".cu",
        ),
        *(".rs", ".go", ".java", ".js", ".ts", ".tex", ".html", ".css", ".sh", ".csv"),
    ]
)


@dataclass
class Data:
    """Training and held-out rows, and a sentence about them."""

    train: Rows
    held_out: Rows
    summary: str

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the training rows."""
        return fingerprint(self.train)


def expand(sources: Iterable[str], key: str = "data") -> list[Path]:
    """Turn files, folders and globs into a list of files, each once.

    Args:
        sources: Paths of files, of folders (searched for text and JSON-lines files, hidden ones left out), or
            patterns with `*`, `?` and `**`.
        key: The option they were given as, for messages.

    Returns:
        The files, those of a folder or pattern sorted.

    Raises:
        ArgumentError: A source matches nothing, or a folder holds no text files.
    """
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if _readable(p.relative_to(path)) and p.is_file()]
            if not inside:
                raise ArgumentError(f"{key}={source}: the folder holds no text or .jsonl files")
        elif path.is_file():
            inside = [path]
        else:
            inside = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
            inside = [p for p in inside if p.is_file()]
            if not inside:
                raise ArgumentError(f"{key}={source}: no such file or folder")
        found.update(dict.fromkeys(inside))
    return list(found)


def _readable(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not any(part.startswith(".") for part in path.parts)


@dataclass
class Sources:
    """The documents of a run as they were read, not yet tokens."""

    train: list[Document]
    held_out: list[Document] | None


def read_sources(settings: Settings) -> Sources:
    """Read the files of a run. It needs no model, so a fault in the data is found before one is loaded.

    Args:
        settings: `data` and `eval_data` are used. Without `data` it is Python source text.

    Returns:
        The documents; those held out are None if they are still to be set aside from the others.

    Raises:
        ArgumentError: A file is missing, is not what its name says, or all of them are empty.
        StorageError: A file cannot be read.
    """
    if settings.data:
        train = _documents("data", settings.data)
    else:
        train = [Document(text=text) for text in ts_hf.stdlib_text(BUILT_IN_BYTES)]
    return Sources(train, _documents("eval_data", settings.eval_data) if settings.eval_data else None)


def _documents(key: str, sources: Sequence[str]) -> list[Document]:
    files = expand(sources, key)
    try:
        documents = read_documents(files)
    except ArgumentError:
        for path in files:
            _check_texts(key, path)
        raise
    if not documents:
        raise ArgumentError(f"{key}={','.join(sources)}: there is no document in it, every file is empty")
    return documents


def _check_texts(key: str, path: Path) -> None:
    """Name the first entry of a JSON-lines file whose text is something else."""
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # not the fault that was found
    for number, line in enumerate(text.split("\n"), 1):
        try:
            entry = json.loads(line) if line.strip() else None
        except ValueError:
            return  # read_documents has named this line
        if isinstance(entry, dict) and "text" in entry and not isinstance(entry["text"], str):
            if "messages" in entry or {"prompt", "completion"} <= entry.keys():
                continue
            given = json.dumps(entry["text"])[:40]
            raise ArgumentError(f'{key}={path}, line {number}: "text" must be a string, given {given}')


def load_data(settings: Settings, tokenizer: Any, sources: Sources | None = None) -> Data:
    """Tokenize and split the data of a run.

    Args:
        settings: `data`, `eval_data`, `held_out`, `max_length` and `packing` are used. Without `data` it is
            Python source text.
        tokenizer: A transformers tokenizer.
        sources: The documents; None reads them here.

    Returns:
        Rows to train on, and rows of documents that are in no training row (if there is only one short
        document, its last rows).

    Raises:
        ArgumentError: Nothing to read, or too little for one row.
        StorageError: A file cannot be read.
    """
    read = sources or read_sources(settings)
    share = settings.held_out if read.held_out is None else 0.0
    # One split for all seeds: runs that differ in the seed are compared on the same documents.
    tokenize = partial(ts_hf.text_dataset, tokenizer=tokenizer, seq_len=settings.max_length, seed=0)
    tokenize = partial(tokenize, packing=settings.packing)
    made = tokenize(read.train, held_out=share)
    train, held_out = made.train, made.held_out
    if read.held_out is not None:
        held_out = tokenize(read.held_out, held_out=0.0).train
    elif share and not len(held_out) and len(train) > 1:
        cut = len(train) - max(1, round(len(train) * share))
        train, held_out = _part(train, slice(cut)), _part(train, slice(cut, None))
    name = ", ".join(settings.data) or "this Python's library source"
    return Data(
        train,
        held_out,
        f"{name}: {made.documents} documents, {len(train)} rows to train on, {len(held_out)} held out",
    )


def _part(rows: Rows, which: slice | list[int]) -> Rows:
    mask, positions = (None if t is None else t[which] for t in (rows.attention_mask, rows.position_ids))
    return Rows(rows.input_ids[which], rows.labels[which], mask, positions)


def spread(rows: Rows, count: int) -> Rows:
    """Return up to `count` rows, evenly spaced over all of them."""
    if len(rows) <= count:
        return rows
    return _part(rows, [index * len(rows) // count for index in range(count)])


def batch_indices(step: int, batch_size: int, count: int, seed: int) -> list[int]:
    """Return which rows make micro-batch number `step`.

    Each pass over the data has its own order, drawn from the seed and the number of the pass, and the passes
    follow each other without a gap. So the position in the data is the number of the micro-batch alone: a
    resumed run needs nothing else to go on with the right rows.

    Args:
        step: Number of the micro-batch, from 0.
        batch_size: Rows in it.
        count: Rows in the data set.
        seed: Seed of the run.

    Returns:
        `batch_size` indices below `count`.

    Example:
        >>> sorted(batch_indices(0, 2, 4, 0) + batch_indices(1, 2, 4, 0))
        [0, 1, 2, 3]
    """
    picked = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, count)
        picked.append(_order(epoch, count, seed)[offset])
    return picked


@lru_cache(maxsize=3)
def _order(epoch: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator).tolist()


def batch(rows: Rows, indices: Sequence[int]) -> dict[str, torch.Tensor]:
    """Take rows as one micro-batch, without the columns that are padding in all of them.

    Args:
        rows: The data set; padding is on the right.
        indices: Which rows.

    Returns:
        `input_ids` and `labels`, int64 `(B, S)`; `attention_mask` too if any of these rows is padded, or
        `position_ids` if they are packed.
    """
    chosen = _part(rows, list(indices))
    taken = {"input_ids": chosen.input_ids, "labels": chosen.labels}
    if chosen.attention_mask is not None:
        longest = int(chosen.attention_mask.sum(dim=1).max())
        taken = {name: tensor[:, :longest] for name, tensor in taken.items()}
        mask = chosen.attention_mask[:, :longest]
        if not mask.all():
            taken["attention_mask"] = mask
    if chosen.position_ids is not None:
        taken["position_ids"] = chosen.position_ids
    return {name: tensor.contiguous() for name, tensor in taken.items()}


def to_device(micro: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Move a micro-batch to where the model computes; its labels are counted before, on the CPU."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in micro.items()}


def fingerprint(rows: Rows) -> str:
    """Return a hash of the rows, by which a resumed run knows that the data is still the same."""
    digest = sha256()
    for tensor in (rows.input_ids, rows.labels, rows.position_ids):
        if tensor is None:
            continue
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
