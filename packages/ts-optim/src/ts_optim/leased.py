"""Updates of parameters whose bytes live in files: on copies in memory, a piece at a time.

Through mapped pages an update would read and write every page by page faults, and under a tight limit of
memory each of them several times. Memory that has `lease` (see `LeasedMemory`) lends copies instead, read
ahead and written behind by direct I/O. The bits are the same: AdamW works element by element, so a piece may
be a part of a tensor; where a kernel works in blocks, pieces are whole tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from .kernel import PlainUpdate, Terms, choose_kernel, is_plain
from .transfer import Batch, Work

__all__ = ["LeasedMemory", "LeasedUpdate", "update_of"]

#: Elements of a piece at most, and what the number is a multiple of: whole pages of any dtype.
_PIECE, _GRAIN = 512 << 10, 4096
#: Pieces under way at once, and bytes of an element: weight, gradient and moments.
_PIECES, _WIDTH = 3, 16


class Lease(Protocol):
    """Copies of tensors for a while."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the copies when they are there."""
        ...

    def write_back(self) -> None:
        """Start writing them back."""
        ...

    def close(self) -> None:
        """Wait until they are written, and end."""
        ...


class LeasedMemory(Protocol):
    """State memory whose tensors are better leased than used.

    Attributes:
        lease_bytes: Of all copies at once.
    """

    lease_bytes: int

    def lease(
        self, tensors: Sequence[torch.Tensor], written: Iterable[bool] | None = None, *, wait: bool = True
    ) -> Lease | None:
        """Start lending copies of any tensors; None: not `wait`, and there is no room now."""
        ...


@dataclass
class _Part:
    """Elements [begin, end) of one parameter."""

    place: int  # in the list of works
    work: Work
    begin: int
    end: int

    def tensors(self) -> list[torch.Tensor]:
        """What the kernel uses: weights, gradient, moments, master, average, scales; cut to the part."""
        slot = self.work.slot
        found = [slot.weights, self.work.grad.view(-1), slot.exp_avg, slot.exp_avg_sq]
        found += [t for t in (slot.master, slot.ema) if t is not None]
        return [t[self.begin : self.end] for t in found] + list(slot.scales)

    def copied(self, copies: list[torch.Tensor]) -> Work:
        """Return the work as one on copies, which are taken off the list."""
        slot = self.work.slot
        weights, grad, exp_avg, exp_avg_sq = (copies.pop(0) for _ in range(4))
        made = replace(
            slot,
            weights=weights,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            master=None if slot.master is None else copies.pop(0),
            ema=None if slot.ema is None else copies.pop(0),
            scales=tuple(copies.pop(0) for _ in slot.scales),
        )
        return replace(self.work, slot=made, grad=grad)


@dataclass
class _Piece:
    """Parts that are leased and updated together."""

    parts: list[_Part] = field(default_factory=list)
    lease: Lease | None = None
    steps: list[torch.Tensor] = field(default_factory=list)
    made: tuple[Callable[..., None], tuple[Any, ...], torch.Tensor | None] | None = None
    tried: bool = False
    told: bool = False
    done: bool = False

    def start(self, memory: LeasedMemory, wait: bool) -> None:
        """Start reading, if it has not begun."""
        if self.lease is None and not self.done:
            tensors = [t for part in self.parts for t in part.tensors()]
            written = [i != 1 for part in self.parts for i in range(len(part.tensors()))]
            lease = memory.lease(tensors, written, wait=wait)
            # A signal handler that waited for this update has completed it meanwhile.
            self.lease = None if self.done else self.lease or lease


def _cut(works: Sequence[Work], whole: bool, lease_bytes: int) -> list[_Piece]:
    most = min(max(lease_bytes // (_PIECES * _WIDTH) // _GRAIN * _GRAIN, _GRAIN), _PIECE)
    pieces, elements = [_Piece()], 0
    for place, work in enumerate(works):
        numel = work.grad.numel()
        size = max(numel, 1) if whole else most
        for begin in range(0, max(numel, 1), size):  # one for a parameter without elements too
            end = min(begin + size, numel)
            if pieces[-1].parts and elements + end - begin > most:
                pieces.append(_Piece())
                elements = 0
            pieces[-1].parts.append(_Part(place, work, begin, end))
            elements += end - begin
    return pieces


class LeasedUpdate(PlainUpdate):
    """The update of parameters whose tensors are leased.

    One piece is updated while the next is read and the one before is written back. `run` may be called again
    after an interrupt or a `StorageError`: it goes on where it stopped, and each element is updated once.
    """

    def __init__(self, works: Sequence[Work], terms: Terms, memory: LeasedMemory) -> None:
        """Note what is to be updated; arguments as for `PlainUpdate`.

        Args:
            works: All of them dense.
            terms: What `step()` fixed.
            memory: Lends the copies.
        """
        super().__init__(works, terms)
        self._memory = memory
        self._pieces = _cut(works, not is_plain(works[0].slot, terms), memory.lease_bytes)
        self._advanced: dict[int, torch.Tensor] = {}

    @property
    def due(self) -> bool:
        """Whether nothing has been updated."""
        return not any(piece.tried for piece in self._pieces)

    def run(self) -> None:
        """Update the parameters, their state and their version counters.

        Raises:
            StorageError: A file cannot be read (call again), or written (its value is in memory now).
        """
        behind: _Piece | None = None
        for index, piece in enumerate(self._pieces):
            if piece.done:
                continue
            piece.start(self._memory, False)
            if piece.lease is None:
                # Who waits for memory holds none, or two could wait for each other.
                if behind is not None:
                    self._settle(behind)
                piece.start(self._memory, True)
            if index + 1 < len(self._pieces):
                self._pieces[index + 1].start(self._memory, False)
            self._compute(piece)
            if behind is not None:
                self._settle(behind)
            behind = piece
        if behind is not None:
            self._settle(behind)
        for place, advanced in self._advanced.items():
            self._steps[place].copy_(advanced)
        self._bump_versions()

    def _compute(self, piece: _Piece) -> None:
        lease = piece.lease
        if lease is None:
            return
        made = piece.made
        if made is None:
            copies = lease.tensors()
            batch = Batch()
            for part in piece.parts:
                work = part.copied(copies)
                master = work.slot.weights if work.slot.master is None else work.slot.master
                batch.add(work, master, work.grad, work.slot.weights if work.slot.low else None)
            steps = [self._steps[part.place].clone() for part in piece.parts]
            made = choose_kernel(batch, steps, self._terms, self.works[0].slot.low)
            # No call in between, so no interrupt either.
            if piece.made is None:
                piece.steps = steps
                piece.made = made
            else:
                made = piece.made
        kernel, arguments, sums = made
        counter, before = piece.steps[0], float(self._steps[piece.parts[0].place])
        start = time.perf_counter()
        # As in `PlainUpdate.run`: the kernel advances the counter, so it runs once.
        piece.tried = True
        if not piece.done and counter == before:
            kernel(*arguments)
        self._terms.clock.add_span("kernel_s", start)
        if piece.done:
            return
        for part, step in zip(piece.parts, piece.steps, strict=True):
            self._advanced[part.place] = step
        if sums is not None and self._terms.measures is not None and not piece.told:
            piece.told = True
            self._terms.measures.add([part.work for part in piece.parts], sums)
        lease.write_back()

    def _settle(self, piece: _Piece) -> None:
        """Wait until a piece is written; one that could not be is complete too, in memory."""
        lease = piece.lease
        if lease is None:
            return
        try:
            lease.close()
        except OSError:
            piece.done, piece.lease, piece.made = True, None, None
            raise
        piece.done, piece.lease, piece.made = True, None, None


def update_of(works: Sequence[Work], terms: Terms) -> PlainUpdate:
    """Make the update of parameters whose state is where they are, by the memory that they live in.

    Args:
        works: One or more, of one `Slot.bucket`.
        terms: What `step()` fixed.
    """
    homes = [work.slot.home for work in works if work.slot.home is not None]
    lenders = [memory for memory in homes if hasattr(memory, "lease")]
    if lenders and all(work.slot.dense for work in works):
        return LeasedUpdate(works, terms, cast(LeasedMemory, lenders[0]))
    return PlainUpdate(works, terms)
