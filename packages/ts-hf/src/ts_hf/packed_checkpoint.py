"""A checkpoint of quantized weights, presented under the names and shapes that the model has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ts_core.errors import CheckpointError
from ts_core.headroom import require_ram
from ts_quant import QuantizedTensor
from ts_quant.codecs import STACKED_CODEC

from .checkpoint import Checkpoint
from .prequantized import Scheme
from .safetensors_reader import TensorInfo

__all__ = ["PackedCheckpoint", "require_ram_for", "stack_packed"]


def require_ram_for(nbytes: int, packing_home: object, device: torch.device) -> None:
    """Refuse a checkpoint that is kept as it is stored and that RAM cannot hold.

    Args:
        nbytes: Its bytes.
        packing_home: The files that hold the weights instead, or None.
        device: Where the weights go.

    Raises:
        DoesNotFitError: With the figures.
    """
    if packing_home is None and device.type == "cpu":
        advice = "Give disk_offload=DIR to keep the weights in files, free memory, or take a smaller model."
        require_ram("load_model", nbytes, advice)


class PackedCheckpoint(Checkpoint):
    """A `Checkpoint` where the tensors of a quantized weight are one, under the name of the weight.

    `read` decodes such a weight, `read_packed` takes it as it is stored.

    Args:
        folder: As for `Checkpoint`.
        scheme: How the weights are stored.
        dtype: What they present.

    Raises:
        CheckpointError: As for `Checkpoint`; or no weight is stored as the config says.
    """

    def __init__(self, folder: str | os.PathLike[str], scheme: Scheme, dtype: torch.dtype) -> None:
        """Open the files and find out which tensors belong together."""
        self._scheme, self._dtype = scheme, dtype
        super().__init__(folder)
        try:
            self._groups, self.aside = scheme.group(self._where)
        except CheckpointError as error:
            self.close()
            raise CheckpointError(f"{self.folder}: {error}") from error
        if not self._groups:
            self.close()
            raise CheckpointError(
                f"{self.folder}: the config says that weights are stored as {scheme.method}, but no tensor "
                "in the files is; check that config and weights belong together"
            )
        place = {key: index for index, key in enumerate(self._where)}
        self._first = {name: min(p.values(), key=place.__getitem__) for name, p in self._groups.items()}
        self._hidden = {key for pieces in self._groups.values() for key in pieces.values()} | {*self.aside}

    def keys(self) -> list[str]:
        """Return the names of the weights, in the order of their first tensor in the files."""
        named = {first: name for name, first in self._first.items()}
        shown = ((key, named.get(key)) for key in self._where)
        return [key if name is None else name for key, name in shown if name or key not in self._hidden]

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a weight of this name."""
        return name in self._groups or (name in self._where and name not in self._hidden)

    def __iter__(self) -> Iterator[str]:
        """Go through the names, as `keys` does."""
        return iter(self.keys())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, as stored."""
        return sum(self._where[key].info(key).nbytes for key in self._where)

    def is_packed(self, name: str) -> bool:
        """Whether a weight is stored quantized."""
        return name in self._groups

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place; of a quantized weight those it has when decoded."""
        if name not in self._groups:
            return super().info(name)
        shape = self.read_packed(name).shape
        stored = super().info(self._first[name])
        nbytes = shape.numel() * self._dtype.itemsize
        return replace(stored, name=name, dtype=self._dtype, shape=tuple(shape), nbytes=nbytes)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a weight's first tensor."""
        return super().file_of(self._first.get(name, name))

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read one weight; a quantized one is decoded."""
        if name not in self._groups:
            return super().read(name, out=out)
        return self.read_packed(name).dequantize(out=out)

    def read_packed(self, name: str) -> QuantizedTensor:
        """Read a quantized weight as it is stored.

        Args:
            name: Name of the weight.

        Returns:
            The weight over the file's bytes.

        Raises:
            CheckpointError: Its tensors do not fit together.
        """
        read = super().read
        tensors = {
            key if self._scheme.by_name else piece: read(key) for piece, key in self._groups[name].items()
        }
        try:
            return self._scheme.make(name, tensors, self._dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file_of(name)}: {error}") from error


def stack_packed(tensors: Sequence[QuantizedTensor], shape: Sequence[int]) -> QuantizedTensor | None:
    """Put packed matrices together as one tensor, without decoding any.

    Args:
        tensors: The matrices, in order; their packed tensors are copied.
        shape: Shape of the whole, whose rows are theirs, one after the other.

    Returns:
        The tensor, or None if they are not packed alike, or do not make up the shape.
    """
    first = tensors[0]
    alike = (first.codec, first.meta, first.shape, first.dtype)
    rows = len(tensors) * first.shape[0]
    if any((t.codec, t.meta, t.shape, t.dtype) != alike for t in tensors) or first.dim() != 2:
        return None
    if first.shape[1] != shape[-1] or rows * shape[-1] != torch.Size(shape).numel():
        return None
    packed = {name: torch.stack([t.packed[name] for t in tensors]) for name in first.packed}
    meta = STACKED_CODEC.describe(first.codec, first.meta, first.shape[0])
    return QuantizedTensor.from_packed(packed, STACKED_CODEC.name, tuple(shape), first.dtype, meta)
