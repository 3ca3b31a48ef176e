"""One pair of recordings, and runs of a block that replay them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from .autocast import autocast_now
from .block import _version, written_between
from .blockmode import Run
from .fixed import copy_all
from .outside import Names, parts_of
from .recording import CannotRecord, Recording
from .rng import RandomState, as_it_was
from .trial import Expected, Memory, carried_of, equal

__all__ = ["Captured", "CapturedRun", "addresses_of", "compare"]


class Captured:
    """A pair of recordings.

    Attributes:
        memory: What they read and write.
        flat: The outputs of a run, flat; tensors among them stand for their places.
        spec: How they belong together.
        places: Indices of outputs that need a gradient.
        saved: The bytes that forward leaves for backward, there until the next replay of anything; empty if
            backward computes them again.
        shared: Several blocks use it.
        verified: Blocks that it was compared with: name, and how often they had been found changed.
        layout: Shapes, strides and dtypes of what is a block's own.
        addresses: Of the weights that it works on, if these are not in a slot.
        names: What its code looks up outside.
        held: Tensors from elsewhere that it reads.
        used: The pass in which it was replayed last.
        dropped: It is not to be used for another run.
    """

    forward: Recording
    backward: Recording
    flat: list[Any]
    spec: TreeSpec
    places: list[int]
    names: Names
    layout: Hashable

    def __init__(self, memory: Memory, shared: bool) -> None:
        """Begin with where it works."""
        self.memory, self.shared = memory, shared
        self.saved: list[Tensor] = []
        self.verified: set[tuple[str, int]] = set()
        self.addresses: list[int] = []
        self.held: list[Tensor] = []
        self.used = -1
        self.dropped = False

    def load(
        self,
        run: Run,
        leaves: Sequence[Tensor],
        turn: int,
        own: Sequence[Tensor],
        more: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Bring a run's inputs, what is its block's own and not in the slot (see `carried_of`), and more."""
        wanted = set(run.wanted)
        pairs = [
            fixed.pair(leaf)
            for index, (fixed, leaf) in enumerate(zip(self.memory.inputs, leaves, strict=True))
            if index in wanted or fixed.stale(leaf, turn)
        ]
        if self.shared:
            pairs += [f.pair(t) for f, t in zip(self.memory.carried, own, strict=True)]
        copy_all([*pairs, *more])


class CapturedRun(Run):
    """One run of a block by replaying."""

    captured: Captured
    turn: int

    @classmethod
    def of(cls, run: Run, captured: Captured, turn: int) -> CapturedRun:
        """Make one of what was to run eagerly."""
        made = cls.__new__(cls)
        made.__dict__.update(run.__dict__)
        made.captured, made.turn = captured, turn
        made._copies = []
        return made

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay forward."""
        block, captured = self.block, self.captured
        leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in self.call.leaves]
        self.call.leaves = leaves
        self._own = carried_of(block, self)
        self._at = addresses_of(self, self._own)
        self._versions = [_version(leaf) for leaf in leaves]
        self._own_versions = [_version(tensor) for tensor in self._own]
        device = block.pager.device
        self._random, self._buffers = RandomState(device), []
        self._cast = autocast_now(device.type)
        block.runs += 1
        captured.load(self, leaves, self.turn, self._own)
        captured.forward.replay()
        assert captured.memory.outputs is not None
        taken = iter(captured.memory.outputs.taken())
        self.flat = [next(taken) if isinstance(each, Tensor) else each for each in captured.flat]
        self.spec, self.places = captured.spec, captured.places
        self._copies = self._put_away() if captured.saved else []
        self._parked = block.pager.activations.latest()
        return tuple([self.flat[index] for index in self.places])

    def _put_away(self) -> list[Any]:
        """Copy what forward has saved; under ``offload`` the copies leave the device."""
        pager = self.block.pager
        copies: list[Any] = [torch.empty_like(each) for each in self.captured.saved]
        copy_all(list(zip(copies, self.captured.saved, strict=True)))
        if self.policy == "offload":
            store, least = pager.activations, max(pager.min_offload_bytes, 1)
            away = store.begin() if any(copy.numel() >= least for copy in copies) else None
            copies = [store.park(copy, away) if copy.numel() >= least else copy for copy in copies]
        return copies

    def changed(self) -> bool:
        """Whether what a replay reads again was written since forward, or is somewhere else."""
        return super().changed() or self._at != addresses_of(self, self._own)

    def ready(self) -> None:
        """Also look at arguments and resident weights: a replay reads them again, whatever the policy."""
        if self.changed():
            raise written_between(self.block)
        super().ready()

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay backward; where a gradient has another form than in the recording, run eagerly again."""
        captured, policy = self.captured, self.policy
        pairs = list(zip(captured.memory.given, grads, strict=True))
        if not all(grad is not None and fixed.fits(grad) for fixed, grad in pairs):
            self.policy = "recompute"
            try:
                return super().gradients(grads)
            finally:
                self.policy = policy
        copies = [each if isinstance(each, Tensor) else each.bring() for each in self._copies]
        more = list(zip(captured.saved, copies, strict=True))
        more += [fixed.pair(grad) for fixed, grad in pairs if grad is not None]
        captured.load(self, self.call.leaves, self.turn, self._own, more)
        if policy == "recompute":
            self.block.runs += 1
            with as_it_was(self._random, self.block.pager.device):
                captured.backward.replay()
        else:
            captured.backward.replay()
        assert captured.memory.found is not None
        return captured.memory.found.taken()

    def free(self) -> None:
        """Also drop the copies."""
        super().free()
        self._copies = []


def addresses_of(run: Run, own: Sequence[Tensor]) -> list[int]:
    """Return where a block's tensors are that recordings of its own compute with (see `carried_of`)."""
    return [part.data_ptr() for tensor in (*run.block.views, *own) for part in parts_of(tensor)]


def layout_of(own: Sequence[Tensor]) -> Hashable:
    """Return the forms of a block's own tensors, which a recording relies on (see `carried_of`)."""
    plain = Tensor, nn.Parameter
    parts = [part for t in own for part in ((t,) if type(t) in plain else parts_of(t))]
    return tuple([(part.shape, part.stride(), part.dtype) for part in parts])


def compare(
    captured: Captured, expected: Expected, random: RandomState, policy: str, again: Callable[[], Expected]
) -> None:
    """Replay, and compare with the eager run.

    Raises:
        CannotRecord: Something else came out.
    """
    outputs, start, found = expected
    memory = captured.memory
    assert memory.outputs is not None
    assert memory.found is not None
    random.put_back()
    captured.forward.replay()
    replayed = memory.outputs.taken()
    if policy == "recompute":
        random.put_back()
    copy_all([fixed.pair(each) for fixed, each in zip(memory.given, start, strict=True)])
    captured.backward.replay()
    came: list[Tensor | None] = [*replayed, *memory.found.taken()]
    pairs = list(zip(came, [*outputs, *found], strict=True))
    if all(one is two is None or equal(one, two) for one, two in pairs):
        return
    if start[0].is_cuda:  # kernels that add in any order differ from themselves, too
        random.put_back()
        second = again()
        other: list[Tensor | None] = [*second[0], *second[2]]
        spread = [_distance(first, next_one) for (_, first), next_one in zip(pairs, other, strict=True)]
        if all(_distance(*pair) <= 4 * s for pair, s in zip(pairs, spread, strict=True)):
            return
    raise CannotRecord("a replay gave other values than the eager run")


def _distance(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return float((one.double() - two.double()).norm())
