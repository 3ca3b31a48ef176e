"""Memory at fixed addresses that recordings read and write, and how values get in and out in few copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .layout import is_dense
from .recording import CannotRecord
from .slots import OwnViews, SlotLayout, own_view

__all__ = ["Fixed", "Pack", "copy_all"]

_ALIGNED = 16  # bytes; kernels choose other code for tensors that start elsewhere


class Fixed:
    """One tensor that a recording reads.

    Attributes:
        value: What the recorded work computes with; same shape, strides and dtype as what comes in.
    """

    def __init__(self, like: Tensor) -> None:
        """Reserve memory for tensors like this one, gaps and repeated elements included.

        Raises:
            CannotRecord: It starts at an odd address.
        """
        if like.data_ptr() % _ALIGNED:
            raise CannotRecord("a tensor that comes in starts at an odd address")
        self._span = _span(like)
        self._flat = torch.empty(self._span, dtype=like.dtype, device=like.device)
        self.value = own_view(self._flat, 0, like)
        self._source: tuple[Tensor, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._flat.nbytes

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same form."""
        value = self.value
        return (
            tensor.shape == value.shape
            and tensor.stride() == value.stride()
            and tensor.dtype is value.dtype
            and tensor.device == value.device
            and not tensor.data_ptr() % _ALIGNED
            and type(tensor) is Tensor
        )

    def pair(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return (target, source) of the copy that brings a tensor's value."""
        return self._flat, tensor.detach().as_strided((self._span,), (1,))

    def stale(self, tensor: Tensor, turn: int) -> bool:
        """Whether a tensor's value is not what was brought last, in this turn; it is taken to be, then."""
        now = (tensor, tensor._version, turn)
        before, self._source = self._source, now
        return before is None or before[0] is not tensor or before[1:] != now[1:]

    def forget(self) -> None:
        """What was brought may be anything from now on."""
        self._source = None


class Pack:
    """Tensors that a recording writes, in one stretch of memory: one copy takes all of them out.

    Attributes:
        views: Where each is written; None for what there is no value of.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], device: torch.device, lasting: Collection[int] = ()
    ) -> None:
        """Reserve memory for tensors like these.

        Args:
            tensors: None where there is no value.
            device: Where.
            lasting: Indices of those that stay when the others are dropped: `taken` gives them memory of
                their own.

        Raises:
            CannotRecord: One has gaps or repeated elements.
        """
        there = [tensor for tensor in tensors if tensor is not None]
        if not all(is_dense(tensor) for tensor in there):
            raise CannotRecord("a result has gaps or repeated elements in memory")
        self._count = len(tensors)
        like = {i: torch.empty_like(t, device="meta") for i, t in enumerate(tensors) if t is not None}
        present = list(like)
        groups = [[i for i in present if i not in lasting], [i for i in present if i in lasting]]
        self._groups: list[tuple[OwnViews, list[int], Tensor]] = []
        for group in filter(None, groups):
            layout = SlotLayout([like[index] for index in group])
            buffer = torch.empty(max(layout.nbytes, 1), dtype=torch.uint8, device=device)
            places = [(offset, like[index]) for index, offset in zip(group, layout.offsets, strict=True)]
            self._groups.append((OwnViews(places), group, buffer))
        self.views = self._views([buffer for *_, buffer in self._groups])

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(buffer.nbytes for *_, buffer in self._groups)

    def _views(self, buffers: Sequence[Tensor]) -> list[Tensor | None]:
        views: list[Tensor | None] = [None] * self._count
        for (made, places, _), buffer in zip(self._groups, buffers, strict=True):
            for index, view in zip(places, made.of(buffer), strict=True):
                views[index] = view
        return views

    def write(self, tensors: Sequence[Tensor | None]) -> None:
        """Write values; part of what is recorded."""
        for view, tensor in zip(self.views, tensors, strict=True):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())

    def taken(self) -> list[Tensor | None]:
        """Return tensors of their own with what was written last."""
        return self._views([buffer.clone() for *_, buffer in self._groups])


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (target, source) pairs of one dimension and one dtype each, in one call where they come out even.

    Bytes are copied as words of 8 where both lie so; others in a call for each dtype.
    """
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        if _even(target) and _even(source):
            target, source = target.view(torch.int64), source.view(torch.int64)
        targets, sources = groups.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in groups.values():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(targets, sources)


def _even(tensor: Tensor) -> bool:
    size = tensor.dtype.itemsize
    # Conjugated tensors have other bytes than values; their own copy knows that.
    return not (tensor.numel() * size % 8 or tensor.storage_offset() * size % 8 or tensor.is_complex())


def _span(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
