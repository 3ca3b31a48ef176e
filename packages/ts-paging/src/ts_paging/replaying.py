"""One pair of recordings, and runs of a block that replay them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from .autocast import autocast_now
from .block import written_between
from .blockmode import Run
from .fixed import copy_all
from .outside import Names
from .own import Own, versions_of
from .recording import CannotRecord, Recording
from .rng import RandomState, as_it_was
from .trial import Expected, Memory, equal

__all__ = ["Captured", "CapturedRun", "agree", "compare", "within_spread"]


_TRIES = 3  # replays, where kernels may add in any order
_RUNS = 2  # eager runs more, there
_SPREADS = 4  # how many times as far as these from each other a replay may be from the first


class Captured:
    """A pair of recordings.

    Attributes:
        memory: What they read and write.
        flat: The outputs of a run, flat; tensors among them stand for their places.
        spec: How they belong together.
        places: Indices of outputs that need a gradient.
        saved: The bytes that forward leaves for backward, there until the next replay of anything; empty if
            backward computes them again.
        lasting: They are there until the next replay of this one: nothing else uses their memory.
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
        self.lasting = False
        self._owner: weakref.ref[CapturedRun] | None = None  # the run whose values are there now
        self._as_words: list[Tensor] | None = None

    def load(
        self,
        run: Run,
        leaves: Sequence[Tensor],
        turn: int,
        own: Own,
        more: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Bring a run's inputs, what is its block's own and not in the slot, and more."""
        wanted = set(run.wanted)
        pairs = [
            fixed.pair(leaf)
            for index, (fixed, leaf) in enumerate(zip(self.memory.inputs, leaves, strict=True))
            if index in wanted or fixed.stale(leaf, turn)
        ]
        if self.shared:
            pairs += [f.pair(t) for f, t in zip(self.memory.carried, own.tensors, strict=True)]
        copy_all([*pairs, *more])

    def holds(self, run: CapturedRun) -> bool:
        """Whether what lasts is a run's."""
        return self._owner is not None and self._owner() is run

    def release(self) -> None:
        """Let go of the place of what lasts; the run whose values are there gets a copy if it needs them."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and not owner._spent:
            owner._copies = list(self.copied())
        self._owner = None

    def take(self, run: CapturedRun) -> None:
        """Note that a run's values are there, once they are."""
        self._owner = weakref.ref(run) if self.lasting else None

    def copied(self) -> list[Tensor]:
        """Return copies of what forward has saved: parts of one stretch of memory."""
        words = self._words()
        if words is None:
            copies = [torch.empty_like(each) for each in self.saved]
            copy_all(list(zip(copies, self.saved, strict=True)))
            return copies
        sizes = [each.numel() for each in words]
        memory = torch.empty(sum(sizes), dtype=torch.int64, device=words[0].device)
        parts = list(torch.split_with_sizes(memory, sizes))
        torch._foreach_copy_(parts, words)
        return parts

    def bring_back(self, copies: list[Tensor]) -> None:
        """Write what forward has saved from copies."""
        words = self._words()
        if words is None or any(each.dtype is not torch.int64 for each in copies):
            copy_all([(one, two.view(torch.uint8)) for one, two in zip(self.saved, copies, strict=True)])
        elif words:
            torch._foreach_copy_(words, copies)

    def _words(self) -> list[Tensor] | None:
        """Return what is saved as words of 8 bytes, or None where it is not made of them."""
        if self._as_words is None:
            even = all(not (t.numel() % 8 or t.data_ptr() % 8) for t in self.saved)
            self._as_words = [t.view(torch.int64) for t in self.saved] if even else []
        return self._as_words or None


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
        self._looked = self.interior.own
        self._at = self._looked.addresses(block.views)
        self._versions, self._own_versions = versions_of(leaves), self._looked.versions()
        device = block.pager.device
        self._random, self._buffers = RandomState(device), []
        self._cast = autocast_now(device.type)
        block.runs += 1
        captured.release()
        captured.load(self, leaves, self.turn, self._looked)
        captured.forward.replay()
        assert captured.memory.outputs is not None
        taken = iter(captured.memory.outputs.taken())
        self.flat = [next(taken) if isinstance(each, Tensor) else each for each in captured.flat]
        self.spec, self.places = captured.spec, captured.places
        if captured.lasting and self.policy == "keep":
            captured.take(self)
        elif captured.saved:
            self._copies = self._put_away()
        self._parked = block.pager.activations.latest()
        return tuple([self.flat[index] for index in self.places])

    def _put_away(self) -> list[Any]:
        """Copy what forward has saved; under ``offload`` the copies leave the device."""
        pager = self.block.pager
        if self.policy != "offload":
            return self.captured.copied()
        copies: list[Any] = [torch.empty_like(each) for each in self.captured.saved]
        copy_all(list(zip(copies, self.captured.saved, strict=True)))
        if copies:
            store, least = pager.activations, max(pager.min_offload_bytes, 1)
            away = store.begin() if any(copy.numel() >= least for copy in copies) else None
            copies = [store.park(copy, away) if copy.numel() >= least else copy for copy in copies]
        return copies

    def changed(self) -> bool:
        """Whether what a replay reads again was written since forward, or is somewhere else."""
        self.block._residents.expect(self._standing)
        return (
            versions_of(self.call.leaves) != self._versions
            or self._looked.versions() != self._own_versions
            or self._looked.addresses(self.block.views) != self._at
        )

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
        if captured.saved and not captured.holds(self):
            captured.release()
            captured.bring_back([c if isinstance(c, Tensor) else c.bring() for c in self._copies])
            captured.take(self)
        more = [fixed.pair(grad) for fixed, grad in pairs if grad is not None]
        captured.load(self, self.call.leaves, self.turn, self._looked, more)
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


def compare(
    captured: Captured, expected: Expected, random: RandomState, policy: str, again: Callable[[], Expected]
) -> None:
    """Replay, and compare with the eager run.

    Raises:
        CannotRecord: Something else came out.
    """
    outputs, start, found = expected
    memory = captured.memory

    def replay() -> list[Tensor | None]:
        assert memory.outputs is not None
        assert memory.found is not None
        random.put_back()
        captured.forward.replay()
        replayed = memory.outputs.taken()
        if policy == "recompute":
            random.put_back()
        copy_all([fixed.pair(each) for fixed, each in zip(memory.given, start, strict=True)])
        captured.backward.replay()
        return [*replayed, *memory.found.taken()]

    def eager() -> list[Tensor | None]:
        random.put_back()
        outs, _, grads = again()
        return [*outs, *grads]

    strict = not start[0].is_cuda or torch.are_deterministic_algorithms_enabled()
    if not agree(replay, [*outputs, *found], eager, strict=strict):
        raise CannotRecord("a replay gave other values than the eager run")


def agree(
    replay: Callable[[], list[Tensor | None]],
    first: list[Tensor | None],
    eager: Callable[[], list[Tensor | None]],
    *,
    strict: bool,
) -> bool:
    """Whether a replay gives what an eager run did.

    Args:
        replay: Returns the results of a replay.
        first: Those of the eager run.
        eager: Returns those of another one.
        strict: Only the same bits will do. Otherwise one replay in a few has to give these, or to be as near
            as eager runs are to each other: sums that are added in any order seldom differ where tensors are
            small, and then in one run alone.
    """
    more: list[list[Tensor | None]] = []
    for _ in range(1 if strict else _TRIES):
        came = replay()
        if all(one is two is None or equal(one, two) for one, two in zip(came, first, strict=True)):
            return True
        if not strict:
            more = more or [eager() for _ in range(_RUNS)]
            if within_spread(came, first, more):
                return True
    return False


def within_spread(
    came: Sequence[Tensor | None], first: Sequence[Tensor | None], more: Sequence[Sequence[Tensor | None]]
) -> bool:
    """Whether results differ from those of an eager run no more than eager runs differ from each other.

    Kernels that add in any order differ from themselves. How much is not the same twice, and what one of them
    has made differs in all that comes of it: so the largest spread among the results counts, relative to the
    size of each, four times. Runs that do not differ at all allow nothing.
    """
    spread = [max(_distance(one, each[i]) for each in more) for i, one in enumerate(first)]
    sizes = [0.0 if one is None else float(one.double().norm()) for one in first]
    relative = max((s / size for s, size in zip(spread, sizes, strict=True) if size), default=0.0)
    return all(
        _distance(one, two) <= _SPREADS * max(s, relative * size)
        for one, two, s, size in zip(came, first, spread, sizes, strict=True)
    )


def _distance(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return float((one.double() - two.double()).norm())
