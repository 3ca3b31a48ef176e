"""What a block saves for backward: kept, or moved out storage by storage and brought back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core import registry
from ts_core.errors import StateError
from ts_core.registry import CopyTicket

from .disk import DiskStore

__all__ = ["ActivationStore", "FileActivations", "HostActivations", "Parked", "park_hook"]


class Parked(Protocol):
    """One storage that left the device."""

    def bring(self) -> Tensor:
        """Return its bytes as a uint8 tensor on the device, valid for the current stream."""
        ...


class ActivationStore(Protocol):
    """Where storages go; counts them and their bytes both ways."""

    parked: int
    parked_bytes: int
    brought_bytes: int

    def park(self, data: Tensor) -> Parked:
        """Move a uint8 device tensor's bytes out; the caller drops the tensor afterwards."""
        ...


class _OnHost:
    """A storage in host memory; the device copy made for one tensor serves the others that share it."""

    __slots__ = ("__weakref__", "_back", "_device", "_host", "_store", "_ticket")

    def __init__(self, store: HostActivations, data: Tensor) -> None:
        self._store = store
        self._device = data.device
        self._host = store.memory(data.numel())
        self._ticket: CopyTicket = registry.copy_engine().d2h(self._host, data)
        self._back: weakref.ref[Tensor] | None = None

    def bring(self) -> Tensor:
        back = self._back() if self._back is not None else None
        if back is None:
            self._ticket.wait()
            back = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            ticket = registry.copy_engine().h2d(back, self._host)
            if self._device.type == "cpu":
                ticket.wait()
            else:
                ticket.wait_stream()
            self._back = weakref.ref(back)
            self._store.brought_bytes += back.numel()
        return back


class HostActivations:
    """Parks storages in host memory.

    Attributes:
        parked: Storages parked so far.
        parked_bytes: Their bytes.
        brought_bytes: Bytes brought back so far.
    """

    def __init__(self, memory: Callable[[int], Tensor] | None = None) -> None:
        """Take host memory from `memory` (nbytes -> uint8 tensor); None: the registered host allocator."""
        self.memory = memory or (lambda nbytes: registry.host_allocator().empty(nbytes))
        self.parked = 0
        self.parked_bytes = 0
        self.brought_bytes = 0

    def park(self, data: Tensor) -> Parked:
        """Start moving the bytes out."""
        self.parked += 1
        self.parked_bytes += data.numel()
        return _OnHost(self, data)


class _InFile:
    """A storage in a file; the file goes with it."""

    __slots__ = ("__weakref__", "_back", "_key", "_owner", "_ticket")

    def __init__(self, owner: FileActivations, key: str, data: Tensor) -> None:
        self._owner = owner
        self._key = key
        self._ticket = owner.store.write_async(key, data)
        self._back: weakref.ref[Tensor] | None = None
        weakref.finalize(self, owner.drop, key)

    def bring(self) -> Tensor:
        back = self._back() if self._back is not None else None
        if back is None:
            self._ticket.wait()
            back = self._owner.store.read(self._key)
            self._back = weakref.ref(back)
            self._owner.brought_bytes += back.numel()
        return back


class FileActivations:
    """Parks storages of a CPU run in files: the tier below RAM.

    Attributes:
        store: The files.
        parked: Storages parked so far.
        parked_bytes: Their bytes.
        brought_bytes: Bytes brought back so far.
    """

    def __init__(self, store: DiskStore) -> None:
        """Use a store; keys start with ``activation``."""
        self.store = store
        self.parked = 0
        self.parked_bytes = 0
        self.brought_bytes = 0

    def park(self, data: Tensor) -> Parked:
        """Start moving the bytes out."""
        self.parked += 1
        self.parked_bytes += data.numel()
        return _InFile(self, f"activation.{self.parked}", data)

    def drop(self, key: str) -> None:
        """Remove the file of a storage that nobody needs any more."""
        with contextlib.suppress(KeyError, StateError):
            self.store.delete(key)


class _View:
    """How one saved tensor lies in a parked storage."""

    __slots__ = ("dtype", "offset", "parked", "size", "stride")

    def __init__(self, parked: Parked, tensor: Tensor) -> None:
        self.parked = parked
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def tensor(self) -> Tensor:
        # Strides are kept: a compacted copy would take another matmul path, with other bits.
        base = self.parked.bring()
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def park_hook(store: ActivationStore, inputs: frozenset[int], least_bytes: int) -> Callable[[Tensor], Any]:
    """Make the function that decides about one saved tensor of one run of a block.

    Parameters, the block's inputs (which the block before holds anyway) and small storages stay. Any other
    storage is parked once, however many saved tensors view it; one changed in place since is parked again.

    Args:
        store: Where storages go.
        inputs: ``_cdata`` of the storages of the block's inputs.
        least_bytes: Smaller storages stay.

    Returns:
        Function from a saved tensor to the tensor itself or a `_View`.
    """
    seen: dict[tuple[int, int], tuple[Parked, StorageWeakRef]] = {}

    def decide(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if (
            isinstance(tensor, nn.Parameter)
            or storage._cdata in inputs
            or storage.nbytes() < max(least_bytes, 1)
        ):
            return tensor
        key = (storage._cdata, tensor._version)
        entry = seen.get(key)
        if entry is None:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            # The weak reference keeps the storage's identity from being given to another one.
            seen[key] = entry = (store.park(data), StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return _View(entry[0], tensor)

    return decide
