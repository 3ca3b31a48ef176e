"""Slots: fixed memory on the compute device that holds one block's decoded weights while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ts_paging.block import PagedBlock

__all__ = ["OwnViews", "Slot", "SlotLayout", "own_view"]

_ALIGN = 256  # bytes; what CUDA's own allocator gives, and enough for every vector access


def own_view(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """View part of a buffer as a tensor with the dtype, shape and strides of `like`.

    The result shares memory with the buffer but not its version counter: filling the slot again is not a
    write that autograd should hear of, since the same bytes come back before they are used.

    Args:
        buffer: uint8 tensor.
        offset: First byte, a multiple of the element size.
        like: Dense tensor; only its metadata is read.

    Returns:
        The view, without a graph.
    """
    view = torch.empty(0, dtype=like.dtype, device=buffer.device)
    return view.set_(buffer.untyped_storage(), offset // like.dtype.itemsize, like.size(), like.stride())


class OwnViews:
    """What `own_view` makes of several parts of a buffer, for one buffer after another of the same size."""

    def __init__(self, places: Sequence[tuple[int, Tensor]]) -> None:
        """Note where and what they are.

        Args:
            places: First byte and metadata of each, as for `own_view`.
        """
        self._places = [
            (like.dtype, offset // like.dtype.itemsize, like.size(), like.stride()) for offset, like in places
        ]
        self._dtypes = {like.dtype for _, like in places}

    def of(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of a buffer, which is itself a whole storage."""
        storage, device = buffer.untyped_storage(), buffer.device
        whole = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in self._dtypes}
        for tensor in whole.values():
            tensor.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
        # `data` gives each a version counter of its own, and no base: half of what `own_view` takes.
        return [whole[d].as_strided(size, strides, at).data for d, at, size, strides in self._places]


class SlotLayout:
    """Where each of a block's tensors lies in a slot.

    Attributes:
        offsets: First byte of each.
        nbytes: Bytes of the whole, alignment included.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Lay the tensors out one after the other."""
        self.offsets: list[int] = []
        end = 0
        for tensor in tensors:
            self.offsets.append(end)
            nbytes = tensor.numel() * tensor.dtype.itemsize
            end += -(-nbytes // _ALIGN) * _ALIGN
        self.nbytes = end


class Slot:
    """One buffer and who is in it.

    Attributes:
        buffer: uint8 tensor on the compute device.
        address: Its first byte; a tensor is a weight of this slot exactly if its storage starts here.
        owner: The block whose weights it holds or is being filled with, or None.
        arriving: What to call before its weights can be used.
        own: Whether it serves one block alone, or several with the same weights.
    """

    def __init__(self, nbytes: int, device: torch.device, *, own: bool = False) -> None:
        """Reserve the buffer."""
        self.own = own
        self.buffer = torch.empty(max(nbytes, _ALIGN), dtype=torch.uint8, device=device)
        self.address = self.buffer.untyped_storage().data_ptr()
        self.owner: PagedBlock | None = None
        self.arriving: list[Callable[[], None]] = []
