"""Captured blocks: forward and backward of a block recorded once, and replayed for every block like it.

What is one block's own comes to fixed addresses before a replay: its paged weights to the slot, by the pager;
other Parameters, buffers and inputs by one grouped copy. What a replay computes is copied out before the next
one. So one pair of recordings serves every block of the same structure that uses the same slot. A block whose
weights stay on the device has recordings of its own, on these weights.

A recording is used only after it has given the bits of the eager run, and for another block only after it has
done so there too. What cannot be recorded runs eagerly, and `BlockMode.reasons` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from .block import PagedBlock, _version, written_between
from .blockmode import Interior, Run, _autocast_now
from .calls import Call
from .fixed import Fixed, Pack, copy_all
from .recording import CannotRecord, Recorder, Recording, recorder_for
from .rng import RandomState, as_it_was

__all__ = ["Captures"]

_SEEN = "seen"  # in the place of a recording: once, so far


class _Trial(Run):
    """A run on fixed memory, to be recorded or compared with."""

    def __init__(self, run: Run, leaves: Sequence[Tensor], stand: dict[int, Tensor]) -> None:
        self.__dict__.update(run.__dict__)
        self.call = Call(list(leaves), run.call.spec)
        self.stand = stand
        self.saved: dict[int, Tensor] | None = None

    def _saving(self, leaves: Sequence[Tensor]) -> Any:
        saved = self.saved
        if saved is None:
            return contextlib.nullcontext()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                saved.setdefault(storage.data_ptr(), _bytes_at(storage))
            return tensor if tensor.grad_fn is None else tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class _Memory:
    """Fixed memory of all recordings of one structure and one form of inputs.

    Attributes:
        inputs: For the tensors among the arguments.
        carried: For Parameters that are not paged, and buffers, where several blocks use the recordings.
        given: For the gradients of the outputs.
        outputs: The outputs.
        found: The gradients.
    """

    def __init__(self, inputs: list[Fixed], carried: list[Fixed]) -> None:
        self.inputs, self.carried = inputs, carried
        self.given: list[Fixed] = []
        self.outputs: Pack | None = None
        self.found: Pack | None = None

    def nbytes(self) -> int:
        packs = [pack.nbytes for pack in (self.outputs, self.found) if pack is not None]
        return sum(packs) + sum(each.nbytes for each in (*self.inputs, *self.carried, *self.given))


class _Captured:
    """A pair of recordings.

    Attributes:
        memory: What they read and write.
        flat: The outputs of a run, flat; tensors among them stand for their places.
        spec: How they belong together.
        places: Indices of outputs that need a gradient.
        saved: The bytes that forward leaves for backward, there until the next replay of anything; empty if
            backward computes them again.
        shared: Several blocks use it.
        verified: Names of the blocks that it was compared with.
        addresses: Of the weights that it works on, if these are not in a slot.
    """

    forward: Recording
    backward: Recording
    flat: list[Any]
    spec: TreeSpec
    places: list[int]

    def __init__(self, memory: _Memory, shared: bool) -> None:
        self.memory, self.shared = memory, shared
        self.saved: list[Tensor] = []
        self.verified: set[str] = set()
        self.addresses: list[int] = []

    def load(self, run: Run, leaves: Sequence[Tensor], turn: int, own: Sequence[Tensor]) -> None:
        """Bring a run's inputs, and what is its block's own and not in the slot (see `_carried`)."""
        wanted = set(run.wanted)
        pairs = [
            fixed.pair(leaf)
            for index, (fixed, leaf) in enumerate(zip(self.memory.inputs, leaves, strict=True))
            if index in wanted or fixed.stale(leaf, turn)
        ]
        if self.shared:
            pairs += [f.pair(t) for f, t in zip(self.memory.carried, own, strict=True)]
        copy_all(pairs)


class CapturedRun(Run):
    """One run of a block by replaying."""

    captured: _Captured
    turn: int

    @classmethod
    def of(cls, run: Run, captured: _Captured, turn: int) -> CapturedRun:
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
        self._own = _carried(block, self)
        self._versions = [_version(leaf) for leaf in leaves]
        self._own_versions = [_version(tensor) for tensor in self._own]
        device = block.pager.device
        self._random, self._buffers = RandomState(device), []
        self._cast = _autocast_now(device.type)
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
        captured = self.captured
        return super().changed() or (
            not captured.shared and captured.addresses != _addresses(self, self._own)
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
        captured.load(self, self.call.leaves, self.turn, self._own)
        copies = [each if isinstance(each, Tensor) else each.bring() for each in self._copies]
        copy_all(list(zip(captured.saved, copies, strict=True)))
        copy_all([fixed.pair(grad) for fixed, grad in pairs if grad is not None])
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


class Captures:
    """The recordings of a pager's blocks.

    Attributes:
        max_shapes: Forms of inputs that are recorded for one structure; others run eagerly.
        max_bytes: Nothing more is recorded once recordings hold so much; None: no limit.
        replays: Block name -> forward replays so far.
        generation: How often everything was recorded anew.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_shapes: int = 8,
        max_bytes: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            device: Where blocks compute.
            max_shapes: See above.
            max_bytes: See above.
            recorder: Makes the recordings; None: CUDA graphs on a GPU, their stand-in on the CPU.
        """
        self._device = device
        self.max_shapes, self.max_bytes = max_shapes, max_bytes
        self._recorder = recorder or recorder_for(device)
        self._made: dict[Hashable, _Captured] = {}
        self._memory: dict[Hashable, _Memory] = {}
        self._forms: dict[Hashable, set[Hashable]] = {}
        self.replays: dict[str, int] = {}
        self._latest: dict[str, int] = {}  # block name -> the pass in which it was replayed last
        self.generation = 0

    @property
    def recordings(self) -> int:
        """Pairs of recordings."""
        return len(self._made)

    @property
    def shapes(self) -> int:
        """Different forms of inputs, summed over structures."""
        return sum(map(len, self._forms.values()))

    def replayed(self, turn: int) -> int:
        """How many blocks were replayed in a pass, and in none after it."""
        return sum(latest == turn for latest in self._latest.values())

    def forget(self) -> None:
        """Blocks or slots have changed: what was recorded is not used again."""
        self._made.clear()
        self._memory.clear()
        self._forms.clear()
        self.generation += 1

    def pool_bytes(self) -> int:
        """Bytes that recordings hold: results in between, and the memory at fixed addresses."""
        return self._recorder.pool_bytes() + sum(memory.nbytes() for memory in self._memory.values())

    def enter(self, run: Run) -> Run:
        """Return what replays in the place of an eager run, or the eager run."""
        block, interior = run.block, run.interior
        known = self._known(interior)
        if torch._C._len_torch_dispatch_stack():
            return self._eagerly(run, "a dispatch mode is on")
        form = _form(run)
        found = known.get(form)
        if found is None:
            known[form] = _SEEN
            return run
        if found is _SEEN:
            found = known[form] = self._find(run, form)
        if isinstance(found, str):
            return self._eagerly(run, found)
        if not found.shared and found.addresses != _addresses(run, _carried(block, run)):
            known[form] = _SEEN
            self._made = {key: made for key, made in self._made.items() if made is not found}
            return self._eagerly(run, "its weights have moved")
        self.replays[block.name] = self.replays.get(block.name, 0) + 1
        self._latest[block.name] = run.mode.turn
        return CapturedRun.of(run, found, run.mode.turn)

    def saw(self, run: Run) -> None:
        """Note the form of a run in graph mode: the next one of this form is recorded."""
        self._known(run.interior).setdefault(_form(run), _SEEN)

    def _known(self, interior: Interior) -> dict[Any, Any]:
        if interior.generation != self.generation:
            interior.known, interior.generation = {}, self.generation
        return interior.known

    def _eagerly(self, run: Run, reason: str) -> Run:
        run.mode.note(run.block, reason, "block mode, not captured")
        return run

    def _find(self, run: Run, form: Hashable) -> _Captured | str:
        """Return the recordings for a run, made now if need be, or why there are none."""
        block, interior = run.block, run.interior
        shared = _shared(run)
        kind = (interior.structure.key, tuple(block.layout.offsets), tuple(s[3] for s in block._sites), form)
        key = (kind, block.slot.address if shared and block.slot is not None else block.name)
        captured = self._made.get(key)
        try:
            if captured is None:
                full = self._full(kind[:3], form)
                if full:
                    return full
                captured = self._record(run, kind, shared)
                self._made[key] = captured
                self._forms.setdefault(kind[:3], set()).add(form)
            elif block.name not in captured.verified and not self._same(run, captured):
                interior.alone = True
                return self._find(run, form)
        except CannotRecord as what:
            return str(what)
        except torch.OutOfMemoryError:
            return "there is no room for a recording"
        captured.verified.add(block.name)
        return captured

    def _full(self, structure: Hashable, form: Hashable) -> str:
        forms = self._forms.get(structure, set())
        if form not in forms and len(forms) >= self.max_shapes:
            return f"inputs have more than {self.max_shapes} forms"
        if self.max_bytes is not None and self.pool_bytes() >= self.max_bytes:
            return f"recordings hold {self.pool_bytes()} bytes, of {self.max_bytes} that they may"
        return ""

    def _record(self, run: Run, kind: Hashable, shared: bool) -> _Captured:
        """Run a block eagerly on fixed memory, record it, and compare."""
        memory = self._memory.get(kind)
        fresh = memory is None
        if memory is None:
            carried = [Fixed(tensor) for tensor in _carried(run.block, run)] if shared else []
            memory = _Memory([Fixed(leaf) for leaf in run.call.leaves], carried)
        captured = _Captured(memory, shared)
        own = _carried(run.block, run)
        captured.addresses = [] if shared else _addresses(run, own)
        random, runs = RandomState(self._device), run.block.runs
        for fixed in memory.inputs:
            fixed.forget()
        try:
            captured.load(run, [leaf.detach() for leaf in run.call.leaves], -1, own)
            with _standing(run, memory) as stand:
                trial = _Trial(run, [fixed.value for fixed in memory.inputs], stand)
                expected = self._recorder.warm_up(lambda: _eager(trial))
                if not random.same_on_cpu(RandomState(self._device)) and self._device.type != "cpu":
                    raise CannotRecord("it draws random numbers on the CPU")
                if fresh:
                    _reserve(memory, expected, self._device, _of_residents(run))
                random.put_back()
                self._record_forward(trial, captured)
                self._record_backward(trial, captured)
            _compare(captured, expected, random, run.policy, lambda: _eager(trial))
        finally:
            random.put_back()
            run.block.runs = runs
            for fixed in memory.inputs:
                fixed.forget()
        self._memory[kind] = memory
        return captured

    def _record_forward(self, trial: _Trial, captured: _Captured) -> None:
        memory, recompute = captured.memory, trial.policy == "recompute"
        trial.saved = None if recompute else {}
        outputs = memory.outputs
        assert outputs is not None

        def forward() -> tuple[list[Any], TreeSpec]:
            flat, spec = trial.inner(trial.call.leaves)
            outputs.write([each for each in flat if isinstance(each, Tensor)])
            return flat, spec

        captured.forward, (flat, captured.spec) = self._recorder.record(forward)
        captured.places = trial.places
        captured.flat = [_MARK if isinstance(each, Tensor) else each for each in flat]
        if recompute:
            trial._outputs, trial._node = [], None
            return
        assert trial.saved is not None
        known = _known(trial, memory)
        captured.saved = [data for address, data in trial.saved.items() if address not in known]
        captured.forward.keep(captured.saved)
        trial.saved = None

    def _record_backward(self, trial: _Trial, captured: _Captured) -> None:
        memory, recompute = captured.memory, trial.policy == "recompute"
        found = memory.found
        assert found is not None

        def backward() -> None:
            if recompute:
                trial.inner(trial.call.leaves)
            given = [fixed.value for fixed in memory.given]
            found.write(torch.autograd.grad(trial._outputs, trial.edges(), given, allow_unused=True))

        captured.backward, _ = self._recorder.record(backward)
        # What forward has saved was not free while this was recorded; from now on its memory is used again.
        trial._outputs, trial._node = [], None

    def _same(self, run: Run, captured: _Captured) -> bool:
        """Compare a replay with the eager run of another block."""
        random, runs = RandomState(self._device), run.block.runs
        leaves = [leaf.detach() for leaf in run.call.leaves]
        try:
            captured.load(run, leaves, -1, _carried(run.block, run))
            captured.forward.replay()
            assert captured.memory.outputs is not None
            replayed = captured.memory.outputs.taken()
            random.put_back()
            flat, _ = _Trial(run, leaves, {}).inner(leaves)
            eager = [each.detach() for each in flat if isinstance(each, Tensor)]
            return len(eager) == len(replayed) and all(map(_equal, eager, replayed))
        finally:
            random.put_back()
            run.block.runs = runs


_MARK = torch.empty(0)  # stands for a tensor among outputs


_backends: Any = torch.backends.cuda
_ATTENTION: tuple[Callable[[], bool], ...] = (
    _backends.flash_sdp_enabled, _backends.mem_efficient_sdp_enabled,
    _backends.math_sdp_enabled, _backends.cudnn_sdp_enabled,
)  # fmt: skip


def _form(run: Run) -> Hashable:
    """Return what a recording depends on besides the structure of its block."""
    device = run.block.pager.device.type
    return (
        run.call.spec,
        tuple([(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in run.call.leaves]),
        tuple(run.trained),
        len(run.residents),
        tuple([p.requires_grad for p in run.interior.residents]),
        run.policy == "recompute",
        torch.is_autocast_enabled(device)
        and (torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        *[allowed() for allowed in _ATTENTION],
    )


def _shared(run: Run) -> bool:
    """Whether other blocks can use a block's recordings: its own things come to fixed addresses."""
    slot = run.block.slot
    return slot is not None and not slot.own and run.interior.plain and not run.interior.alone


def _carried(block: PagedBlock, run: Run) -> list[Tensor]:
    """Return what is a block's own and not in the slot: other Parameters, and buffers."""
    buffers = [b for m in block.module.modules() for b in m._buffers.values() if b is not None]
    return [*run.interior.residents, *buffers]


def _addresses(run: Run, own: Sequence[Tensor]) -> list[int]:
    """Return where a block's tensors are that recordings of its own compute with (see `_carried`)."""
    parts: list[Any] = []
    for tensor in (*run.block.views, *own):
        packed: dict[str, Tensor] | None = getattr(tensor, "packed", None)
        parts += packed.values() if packed is not None else [tensor]
    return [part.data_ptr() for part in parts]


@contextlib.contextmanager
def _standing(run: Run, memory: _Memory) -> Iterator[dict[int, Tensor]]:
    """Put fixed memory into the places of buffers; yields what stands for Parameters, by their id."""
    residents = run.interior.residents
    values = [fixed.value for fixed in memory.carried]
    stand = {id(p): value for p, value in zip(residents, values, strict=False)}
    if not values:
        yield {}
        return
    places = [
        (m._buffers, k) for m in run.block.module.modules() for k, b in m._buffers.items() if b is not None
    ]
    before = [place[key] for place, key in places]
    for (place, key), value in zip(places, values[len(residents) :], strict=True):
        place[key] = value
    try:
        yield stand
    finally:
        for (place, key), own in zip(places, before, strict=True):
            place[key] = own


_Expected = tuple[list[Tensor], list[Tensor], list[Tensor | None]]


def _eager(trial: _Trial) -> _Expected:
    """Return the outputs, gradients to start from, and the gradients that come of these."""
    flat, _ = trial.inner(trial.call.leaves)
    outs = trial._outputs
    if not outs:
        raise CannotRecord("none of its outputs needs a gradient")
    start = [out.detach().clone() for out in outs]
    found = torch.autograd.grad(outs, trial.edges(), start, allow_unused=True)
    outputs = [each.detach().clone() for each in flat if isinstance(each, Tensor)]
    trial._outputs, trial._node = [], None
    return outputs, start, [None if each is None else each.clone() for each in found]


def _of_residents(run: Run) -> range:
    """Indices of the gradients that become some Parameter's ``.grad`` as they are."""
    return range(len(run.wanted), len(run.wanted) + len(run.residents))


def _reserve(memory: _Memory, expected: _Expected, device: torch.device, lasting: range) -> None:
    outputs, start, found = expected
    memory.outputs, memory.found = Pack(outputs, device), Pack(found, device, lasting)
    memory.given = [Fixed(each) for each in start]


def _known(trial: _Trial, memory: _Memory) -> set[int]:
    """Addresses of storages that are not of a run's own making."""
    tensors: list[Any] = [fixed.value for fixed in (*memory.inputs, *memory.carried)]
    tensors += [*trial.block.views, *trial.interior.residents, *trial.block.module.buffers()]
    parts: list[Tensor] = []
    for tensor in tensors:
        parts += tensor.packed.values() if getattr(tensor, "packed", None) is not None else [tensor]
    return {part.untyped_storage().data_ptr() for part in parts}


def _compare(
    captured: _Captured, expected: _Expected, random: RandomState, policy: str, again: Callable[[], _Expected]
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
    if all(one is two is None or _equal(one, two) for one, two in pairs):
        return
    if start[0].is_cuda:  # kernels that add in any order differ from themselves, too
        random.put_back()
        second = again()
        other: list[Tensor | None] = [*second[0], *second[2]]
        spread = [_distance(first, next_one) for (_, first), next_one in zip(pairs, other, strict=True)]
        if all(_distance(*pair) <= 4 * s for pair, s in zip(pairs, spread, strict=True)):
            return
    raise CannotRecord("a replay gave other values than the eager run")


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or one.dtype is not two.dtype or one.shape != two.shape:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
    )


def _distance(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return float((one.double() - two.double()).norm())


def _bytes_at(storage: torch.UntypedStorage) -> Tensor:
    """Return bytes of a recording's pool without holding them: others of its recordings may use them too."""
    make: Any = torch._C._construct_storage_from_data_pointer
    view = make(storage.data_ptr(), storage.device, storage.nbytes())
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(view)
