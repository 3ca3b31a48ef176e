"""A checkpoint folder: which tensor is in which file, with every contradiction found before loading starts.

A folder holds `model.safetensors`, or shards named by `model.safetensors.index.json`, whose `weight_map` maps
each tensor to a file. `resolve` turns what a user names (folder, GGUF file, hub id) into a local path. Pickle
files are never opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from ts_core.errors import ArgumentTypeError, CheckpointError, StorageError, message

from .safetensors_reader import SafetensorsReader, TensorInfo

__all__ = ["Checkpoint", "SafetensorsReader", "Source", "TensorInfo", "resolve"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# The largest index seen in the wild is about 10 MB.
_MAX_INDEX_BYTES = 256 * 1024 * 1024
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Weights, configs and tokenizer files of the repository's top folder; nothing that is code or pickle.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*", "*.fp16.safetensors", "adapter_model.safetensors"]


@dataclass(frozen=True)
class Source:
    """Where a model is on this machine.

    Attributes:
        kind: "folder" for a folder in the Hugging Face layout, "gguf" for one GGUF file.
        path: The folder or file.
        name: What the user asked for.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(character in name for character in "/\\\0:")
        and not any("\ud800" <= character <= "\udfff" for character in name)
    )


class Checkpoint:
    """The safetensors files of one folder, opened and checked as a whole.

    Args:
        folder: A folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards.
            Other `.safetensors` files in it are not looked at.

    Raises:
        CheckpointError: A missing or damaged shard, an index that disagrees with the shards in either
            direction, a tensor in two shards, a shard name that is not a plain file name, or only pickle
            files; the message names the file.

    Example:
        >>> with Checkpoint("path/to/folder") as checkpoint:  # doctest: +SKIP
        ...     for name in checkpoint.keys():
        ...         tensor = checkpoint.read(name)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open every shard and compare them with the index."""
        self.folder = Path(folder)
        self._readers: list[SafetensorsReader] = []
        self._where: dict[str, SafetensorsReader] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # -- access -------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, sorted by name."""
        return [reader.path for reader in self._readers]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, as stored."""
        return sum(self.info(name).nbytes for name in self._where)

    def keys(self) -> list[str]:
        """Return the names of all tensors, in the order to read in: by file, then by place in it."""
        return list(self._where)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._where

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._where)

    def __iter__(self) -> Iterator[str]:
        """Go through the names, as `keys` does."""
        return iter(self._where)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place of one tensor.

        Args:
            name: Name of the tensor in the checkpoint.

        Returns:
            What the header of its file says.

        Raises:
            CheckpointError: No such tensor.
        """
        return self._reader(name).info(name)

    def file_of(self, name: str) -> Path:
        """Return the file that holds one tensor.

        Args:
            name: Name of the tensor in the checkpoint.

        Returns:
            The path.

        Raises:
            CheckpointError: No such tensor.
        """
        return self._reader(name).path

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read one tensor; see `SafetensorsReader.read`.

        Args:
            name: Name of the tensor in the checkpoint.
            out: Tensor to read into.

        Returns:
            The tensor, on the CPU.

        Raises:
            CheckpointError: No such tensor, or the file changed under us.
        """
        return self._reader(name).read(name, out=out)

    def expect(self, name: str) -> None:
        """Say that a tensor is read soon; see `SafetensorsReader.expect`.

        Args:
            name: Name of the tensor in the checkpoint.

        Raises:
            CheckpointError: No such tensor.
        """
        self._reader(name).expect(name)

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Checkpoint:
        """Return itself; leaving the block closes the files."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _reader(self, name: str) -> SafetensorsReader:
        try:
            return self._where[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r} in this checkpoint") from None

    # -- opening ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        single, index = self.folder / SINGLE_NAME, self.folder / INDEX_NAME
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: there is no such folder")
        if single.is_file():
            reader = SafetensorsReader(single)
            self._readers.append(reader)
            self._where = dict.fromkeys(reader, reader)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise CheckpointError(self._nothing_here())

    def _nothing_here(self) -> str:
        text = f"{self.folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is in this folder"
        pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
        if pickles:
            text += (
                f". {pickles[0]} is a pickle file, which can run any code when it is opened; TrainStream "
                "never "
                "loads pickle. Convert it once, in a place where that does no harm, with "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        return text

    def _weight_map(self, index: Path) -> dict[str, str]:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{index}: the index has {index.stat().st_size} bytes, which no model needs"
            )
        try:
            content: Any = json.loads(index.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{index}: the index is not JSON ({str(error)[:120]})") from None
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: there is no map weight_map of tensors to files in it")
        for name, file in weight_map.items():
            if not _is_plain_name(file):
                raise CheckpointError(
                    f"{index}: tensor {name!r} is said to be in {str(file)[:200]!r}; a shard must be a plain "
                    "file "
                    "name in the same folder"
                )
            if not str(file).endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: shard {file!r} is not a safetensors file; no other kind is loaded"
                )
        return weight_map

    def _open_shards(self, index: Path) -> None:
        weight_map = self._weight_map(index)
        for file in sorted(set(weight_map.values())):
            path = self.folder / file
            if not path.is_file():
                count = sum(value == file for value in weight_map.values())
                raise CheckpointError(
                    f"{path}: the index names this shard for {count} tensors, but it is missing"
                )
            self._readers.append(SafetensorsReader(path))
        for reader in self._readers:
            for name in reader:
                if name in self._where:
                    raise CheckpointError(
                        f"{reader.path}: tensor {name!r} is in this file and in {self._where[name].path.name}"
                    )
                self._where[name] = reader
        for name, reader in self._where.items():
            if weight_map.get(name) != reader.path.name:
                says = f"puts it in {weight_map[name]!r}" if name in weight_map else "does not name it"
                raise CheckpointError(f"{reader.path}: tensor {name!r} is in this file, but the index {says}")
        for name, file in weight_map.items():
            if name not in self._where:
                raise CheckpointError(
                    f"{self.folder / file}: the index puts tensor {name!r} there, but it is not"
                )


def _download(name: str, trust_remote_code: bool, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    allowed = [pattern for pattern in _HUB_FILES if weights or pattern != "*.safetensors"]
    allowed += ["*.py"] if trust_remote_code else []
    try:
        return Path(snapshot_download(name, allow_patterns=allowed, ignore_patterns=_HUB_IGNORED))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"[resolve] {name!r} is no folder or .gguf file here, and it could not be had from the Hugging "
            "Face "
            f"hub: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def resolve(
    name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False, weights: bool = True
) -> Source:
    """Find a model on this machine, downloading it if it is a hub id.

    Args:
        name_or_path: A folder in the Hugging Face layout, a `.gguf` file, or a hub id ("owner/name").
        trust_remote_code: Also fetch the repository's Python files, so that they can be run later. Without it
            no code of a checkpoint is downloaded.
        weights: Fetch the weights; False fetches config and tokenizer only.

    Returns:
        Where it is, and of which kind.

    Raises:
        CheckpointError: A path that does not exist or is neither a folder nor a GGUF file.
        StorageError: The hub cannot be reached, or has no such model.

    Example:
        >>> resolve("path/to/model.gguf").kind  # doctest: +SKIP
        'gguf'
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ArgumentTypeError(message("resolve", "name_or_path", "a path or a hub id", name_or_path))
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return Source("folder", path, name)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF":
            return Source("gguf", path, name)
        raise CheckpointError(
            f"{path}: expected a folder in the Hugging Face layout or a GGUF file; this file is neither"
        )
    if (
        not isinstance(name_or_path, str)
        or not _HUB_ID.fullmatch(name)
        or name.endswith((".gguf", ".safetensors"))
    ):
        raise CheckpointError(f"{path}: there is no such folder or file")
    return Source("folder", _download(name, trust_remote_code, weights), name)
