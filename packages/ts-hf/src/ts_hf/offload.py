"""Weights that go to private mapped files while a model is read, so that RAM never holds the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ts_core.errors import OptionError, StorageError
from ts_core.memory import parse_bytes
from ts_paging.files import FileTensors, locate
from ts_quant import QuantizedTensor

__all__ = ["FileHome", "file_bytes", "open_files", "ram_limit"]

# Smaller tensors outside the blocks stay in RAM: a file each would cost more than it saves.
_LEAST_BYTES = 1 << 20


def ram_limit() -> int | None:
    """Return the RAM budget that the environment sets (`TRAINSTREAM_RAM`), in bytes, or None.

    Raises:
        OptionError: It is no size.
    """
    return _size_from("TRAINSTREAM_RAM")


def _size_from(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    return parse_bytes(text, name=f"environment variable {variable}") if text else None


def open_files(value: object) -> FileTensors | None:
    """Turn the option `disk_offload` into files.

    Args:
        value: None, an existing directory, or a `FileTensors` made by the caller.

    Returns:
        The files, within the budget that the environment sets (`TRAINSTREAM_DISK`).

    Raises:
        OptionError: Neither of these.
        StorageError: The directory is missing or cannot be written.
    """
    if value is None or isinstance(value, FileTensors):
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"option disk_offload: expected None or a directory, given {value!r}")
    return FileTensors(Path(value).expanduser(), budget=_size_from("TRAINSTREAM_DISK"))


class FileHome:
    """Decides which Parameters live in files, and puts them there.

    In files are all floating Parameters of the blocks, and elsewhere those of at least 1 MiB (embedding,
    output head). What a checkpoint on the same file system holds as it is wanted stays there and is not
    copied; on another one (a network, a slower disk) it is: the folder was chosen for its speed.

    Attributes:
        files: The files; they live as long as this object or a model that keeps it.

    Args:
        files: Where the tensors go.
        outside: Names of the Parameters outside the blocks.
    """

    def __init__(self, files: FileTensors, outside: frozenset[str]) -> None:
        """Remember which are which."""
        self.files = files
        self._outside = outside

    def wants(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the Parameter `name` lives in a file."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        least = _LEAST_BYTES if name in self._outside else 1
        return dtype.is_floating_point and nbytes >= least

    def reserve(
        self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a tensor of zeros in a file for the Parameter `name`, or None if it stays in RAM."""
        if not self.wants(name, shape, dtype):
            return None
        return self.files.like(torch.empty(shape, dtype=dtype, device="meta"))

    def adopt(
        self, name: str, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the Parameter `name` as a stretch of the checkpoint's own file, or None if it is copied.

        Args:
            name: The Parameter.
            path: The file.
            offset: First byte.
            shape: Of the tensor, in the file and wanted.
            dtype: The same.
        """
        if not self.wants(name, shape, dtype) or offset % dtype.itemsize or not self._beside(path):
            return None
        try:
            tensor = self.files.adopt(path, offset, dtype, shape)
        except StorageError:  # no mappings there, or a damaged file: reading it tells
            return None
        # Where the system does not say which pages were written, nothing can be told apart.
        return tensor if locate(tensor) is not None else None

    def _beside(self, path: Path) -> bool:
        """Whether a file is on the file system of our own files."""
        return path.stat().st_dev == Path(self.files.directory).stat().st_dev

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of the Parameter `name` in its place; one that is in a file already is kept."""
        if isinstance(tensor, QuantizedTensor):
            factors = tensor.error_factors or ()
            if all(locate(part) is not None for part in (*tensor.packed.values(), *factors)):
                return tensor
            packed = {key: self.files.place(part.contiguous()) for key, part in tensor.packed.items()}
            made = tensor.with_packed(packed)
            return made.with_error(*map(self.files.place, factors)) if factors else made
        if not self.wants(name, tensor.shape, tensor.dtype) or locate(tensor) is not None:
            return tensor
        return self.files.place(tensor.contiguous())

    def gather(self, model: nn.Module) -> None:
        """Place what came by another way than the reading: values that the model's class initializes."""
        moved: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for last, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in moved:
                    value = parameter.detach()
                    placed = self.place(f"{path}.{last}" if path else last, value)
                    trained = parameter.requires_grad
                    moved[id(parameter)] = parameter if placed is value else nn.Parameter(placed, trained)
                module._parameters[last] = moved[id(parameter)]


def file_bytes(tensor: Any) -> int:
    """Return how many bytes of a tensor (packed or not) are in files."""
    packed: dict[str, torch.Tensor] | None = getattr(tensor, "packed", None)
    parts = [tensor.detach()] if packed is None else list(packed.values())
    return sum(part.nbytes for part in parts if locate(part) is not None)
