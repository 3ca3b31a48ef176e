"""Tensors that live in files: the disk tier of weights, gradients and optimizer state.

Such a tensor is a mapping of a private file: it can be read and written like any other, and its pages are
the kernel's to drop, so it costs no memory that is counted against a budget. The way to a slot does not go
through the mapping: the file is read directly.
"""

from __future__ import annotations

import itertools
import os
import weakref

import torch
from torch import Tensor

from ts_core.errors import ArgumentError, message

from .disk import DiskStore, DiskTicket
from .layout import Layout, copy_exactly, flat_bytes, is_dense, layout_of

__all__ = ["FileTensors", "locate"]

#: Address of a mapping -> (its FileTensors, key).
_mapped: dict[int, tuple[weakref.ref[FileTensors], str]] = {}


def locate(tensor: Tensor) -> tuple[FileTensors, str] | None:
    """Say which file a whole tensor maps.

    Args:
        tensor: Any plain tensor.

    Returns:
        The `FileTensors` that made it and its key there, or None if it lives elsewhere.
    """
    found = _mapped.get(tensor.data_ptr()) if tensor.numel() else None
    files = found[0]() if found is not None else None
    return (files, found[1]) if files is not None and found is not None else None


class FileTensors:
    """Makes tensors that are mapped files of a `DiskStore`.

    Example:
        >>> files = FileTensors()
        >>> weight = files.place(torch.arange(4.0))
        >>> weight
        tensor([0., 1., 2., 3.])
        >>> files.close()
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, budget: int | str | None = None
    ) -> None:
        """Make the private folder; see `DiskStore`.

        Args:
            directory: An existing directory; None is the system's temporary one.
            budget: Bytes of files at most.

        Raises:
            OptionError: A bad option.
            StorageError: The directory is missing or cannot be written.
        """
        self._store = DiskStore(directory, budget=budget)
        self._keys: dict[int, str] = {}
        self._numbers = itertools.count()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved in files."""
        return self._store.used_bytes

    @property
    def store(self) -> DiskStore:
        """The files themselves."""
        return self._store

    @property
    def directory(self) -> str:
        """The private folder."""
        return str(self._store.folder)

    def place(self, tensor: Tensor) -> Tensor:
        """Write a dense CPU tensor to a file and return the mapping of it.

        Args:
            tensor: Any dtype; strides are kept.

        Returns:
            A tensor with the same dtype, shape, strides and bytes.

        Raises:
            ArgumentError: Not dense.
            StorageError: No room on the disk or in the budget.
        """
        if not is_dense(tensor):
            raise ArgumentError(message("FileTensors.place", "tensor", "a dense tensor", "one with gaps"))
        mapped = self.like(tensor)
        if tensor.numel():
            copy_exactly(mapped, tensor)
        return mapped

    def like(self, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Return a tensor of zeros in a file, with the dtype, shape and strides of a dense one.

        Args:
            tensor: The dense one; its values are not read.
            owner: Whose gradient it will hold; all are treated alike.

        Raises:
            StorageError: No room on the disk or in the budget.
        """
        layout = layout_of(tensor)
        if not layout.nbytes:
            return layout.empty()
        return layout.view(self.empty(layout.nbytes))

    def empty(self, nbytes: int) -> Tensor:
        """Return `nbytes` of a file as a uint8 tensor, zeros at first.

        Raises:
            StorageError: No room on the disk or in the budget.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        key = str(next(self._numbers))
        path = self._store.reserve(key, Layout((nbytes,), (1,), torch.uint8))
        mapped = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        self._keys[mapped.data_ptr()] = key
        _mapped[mapped.data_ptr()] = (weakref.ref(self), key)
        return mapped

    def drop(self, tensor: Tensor) -> None:
        """Remove the file of a tensor that is needed no more; what still maps it stays readable."""
        key = self._keys.pop(tensor.data_ptr(), None)
        if key is not None:
            _mapped.pop(tensor.data_ptr(), None)
            self._store.delete(key)

    def key_of(self, tensor: Tensor) -> str | None:
        """Return the key of the file that a whole tensor maps, or None if it lives elsewhere."""
        return self._keys.get(tensor.data_ptr()) if tensor.numel() else None

    def read_async(self, key: str, out: Tensor) -> DiskTicket:
        """Start reading a file into a dense CPU tensor of as many bytes, past the mapping.

        Args:
            key: From `key_of`.
            out: Written; its values are there when the ticket has been waited for.

        Returns:
            The ticket.

        Raises:
            StorageError: Raised by the ticket if the file cannot be read.
        """
        return self._store.read_async(key, flat_bytes(out))

    def __deepcopy__(self, memo: dict[int, object]) -> FileTensors:
        """A copy of a model holds copies in RAM of the tensors, and needs no files of its own."""
        return self

    def close(self) -> None:
        """Remove the files; mappings that are still held stay readable."""
        for address in self._keys:
            _mapped.pop(address, None)
        self._keys.clear()
        self._store.close()
