"""Captured blocks: forward and backward of a block recorded once, and replayed for every block like it.

What is one block's own comes to fixed addresses before a replay: its paged weights to the slot, by the pager;
other Parameters, buffers and inputs by one grouped copy. What a replay computes is copied out before the next
one. So one pair of recordings serves every block of the same structure that uses the same slot. A block whose
weights stay on the device has recordings of its own, on these weights.

A recording is used only after it has given the bits of the eager run, and for another block only after it has
done so there too. What cannot be recorded runs eagerly, and `BlockMode.reasons` says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from .block import PagedBlock
from .blockmode import BlockMode, Interior, Run
from .fixed import Fixed
from .outside import FromOutside, Names, Reads, backwards_of
from .paying import Meter, Paying, meter_for
from .recording import CannotRecord, Recorder, recorder_for
from .replaying import Captured, CapturedRun, compare
from .rng import RandomState
from .structure import RANDOM
from .trial import (
    Expected,
    Memory,
    Trial,
    bytes_of,
    eagerly,
    equal,
    known_storages,
    of_residents,
    reserve,
    standing,
)

__all__ = ["Captures"]

_Kind = tuple[Any, ...]  # structure, two layouts, form, and that of what is a block's own
_Key = tuple[_Kind, Hashable]  # a kind, and the slot or the block
_MOVED = "its weights have moved"
_CHANGING = "inputs keep changing their form"
_FORMS = 32  # forms of one block's inputs that are remembered without having been recorded
_IDLE = 64  # passes in which a form does not come, after which another may take its place
_RESTLESS = 3  # times that what code looks up outside may be found changed before that is taken for a habit


class _Later(str):
    """Why something is not recorded before a certain pass."""

    turn: int
    names: Names  # of the run that was looked at

    def __new__(cls, reason: str, turn: int) -> _Later:
        """Say why, and until when."""
        made = super().__new__(cls, reason)
        made.turn = turn
        return made


class Captures:
    """The recordings of a pager's blocks.

    Attributes:
        max_shapes: Forms of inputs that are recorded for one structure. What comes beyond runs eagerly, or
            takes the place of one that has not come for many passes.
        max_bytes: Recordings hold no more than this; None: no limit.
        auto: A block is recorded only where that pays, and where nothing it reads could be missed.
        room: Returns the bytes that the device has left; None: nobody knows.
        meter: Measures whether it pays.
        replays: Block name -> forward replays so far.
        generation: How often everything was recorded anew.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_shapes: int = 8,
        max_bytes: int | None = None,
        auto: bool = False,
        room: Callable[[], int] | None = None,
        recorder: Recorder | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            device: Where blocks compute.
            max_shapes: See above.
            max_bytes: See above.
            auto: See above.
            room: See above.
            recorder: Makes the recordings; None: CUDA graphs on a GPU, their stand-in on the CPU.
            meter: See above; None: that of the device.
        """
        self._device = device
        self.max_shapes, self.max_bytes = max_shapes, max_bytes
        self.auto, self.room, self.meter = auto, room, meter or meter_for(device)
        self._recorder = recorder or recorder_for(device)
        self._made: dict[_Key, Captured] = {}
        self._memory: dict[Hashable, Memory] = {}
        self._failed: dict[Hashable, str] = {}
        self._paying: dict[Hashable, Paying] = {}
        self._stopped = ""
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
        return len({kind for kind, _ in self._made})

    def replayed(self, turn: int) -> int:
        """How many blocks were replayed in a pass, and in none after it."""
        return sum(latest == turn for latest in self._latest.values())

    def undecided(self, mode: BlockMode, blocks: Sequence[PagedBlock]) -> list[str]:
        """Name blocks that were not replayed in the latest pass, though nothing is known against it."""
        idle = {block.name for block in blocks if block.interior is not None and block.interior.idle}
        settled = {name for name, latest in self._latest.items() if latest == mode.turn}
        return [b.name for b in blocks if b.name not in settled | idle and b.name not in mode.reasons]

    def forget(self) -> None:
        """Blocks or slots have changed: what was recorded is not used again.

        What pays goes on to: launching takes the host as long as before, and the device no longer.
        """
        self._made.clear()
        self._memory.clear()
        self._failed.clear()
        self._paying = {kind: paying for kind, paying in self._paying.items() if paying.told}
        self._stopped = ""
        self.generation += 1

    def pool_bytes(self) -> int:
        """Bytes that recordings hold: results in between, and the memory at fixed addresses."""
        return self._recorder.pool_bytes() + sum(memory.nbytes() for memory in self._memory.values())

    def _counted(self) -> int:
        """Bytes that `max_bytes` is about: what takes the place of kept activations is none of them."""
        return self.pool_bytes() - sum(t.nbytes for c in self._made.values() if c.lasting for t in c.saved)

    def enter(self, run: Run, begin: Any = None) -> Run | None:
        """Return what replays in the place of an eager run, or the eager run; None: graph mode, looked at.

        Args:
            run: The eager run.
            begin: The moment before it, if it can be measured.
        """
        block, interior, turn = run.block, run.interior, run.mode.turn
        known = self._known(interior)
        if torch._C._len_torch_dispatch_stack():
            return self._eagerly(run, "a dispatch mode is on")
        form = _form(run)
        found = known.get(form)
        if isinstance(found, _Later) and turn >= found.turn:
            found = found.names
        if isinstance(found, Names) and found.ready:
            outside = found.changed()
            if outside:
                return self._renewed(run, form, outside)
            made = self._find(run, form, found, begin)
            if made is None:
                return run
            if isinstance(made, _Later):
                made.names = found
            known[form] = found = made
        if found is None or isinstance(found, Names):
            return self._first_seen(run, form)
        if not isinstance(found, Captured):
            return self._eagerly(run, str(found))
        own = interior.own
        if found.dropped or found.layout != own.layout():
            del known[form]
            return run
        moved = not found.shared and found.addresses != own.addresses(block.views)
        outside = found.names.changed()
        if moved or outside:
            self._drop(found)
            del known[form]
            return self._renewed(run, form, outside) if outside else self._eagerly(run, _MOVED)
        found.used = turn
        self.replays[block.name] = self.replays.get(block.name, 0) + 1
        self._latest[block.name] = turn
        return CapturedRun.of(run, found, turn)

    def _renewed(self, run: Run, form: Hashable, outside: str) -> Run:
        """Run eagerly what is looked at anew the next time, unless that has come too often."""
        known, interior = self._known(run.interior), run.interior
        known.pop(form, None)
        interior.renewals += 1
        if interior.renewals > _RESTLESS:
            known[form] = f"{outside}, which its code looks up outside, changes from run to run"
            return self._eagerly(run, known[form])
        return self._eagerly(run, f"{outside}, which its code looks up outside, has changed")

    def saw(self, run: Run) -> None:
        """Note the form of a run in graph mode, which is looked at for what it reads from outside."""
        known, form = self._known(run.interior), _form(run)
        found = known.get(form)
        if (found is None or isinstance(found, Names)) and not sys.getprofile():
            self._look(run, form)

    def _first_seen(self, run: Run, form: Hashable) -> Run | None:
        """Have a form's first run looked at in graph mode, or run it if too many were not recorded."""
        if sys.getprofile():
            return self._eagerly(run, "a profiler of Python is on")
        return None if self._look(run, form) else self._eagerly(run, _CHANGING)

    def _look(self, run: Run, form: Hashable) -> bool:
        """Remember a form; returns whether it is not one of too many that came and were not recorded."""
        known = self._known(run.interior)
        open_ones = [each for each, found in known.items() if not isinstance(found, Captured)]
        full = form not in known and len(open_ones) >= _FORMS
        if full:
            del known[open_ones[0]]
        known[form] = run.interior.looking = Names(run.block.module.modules())
        run.interior.measuring = self.auto  # the next run may be the first that is measured
        return not full

    def _known(self, interior: Interior) -> dict[Any, Any]:
        if interior.generation != self.generation:
            interior.known, interior.generation = {}, self.generation
        return interior.known

    def _eagerly(self, run: Run, reason: str) -> Run:
        run.mode.note(run.block, reason, "block mode, not captured")
        return run

    def _find(self, run: Run, form: Hashable, names: Names, begin: Any) -> Captured | _Later | str | None:
        """Return the recordings for a run, made now if need be, or why there are none; None: not yet."""
        block, interior = run.block, run.interior
        interior.measuring = False
        shared = _shared(run)
        lost = names.hidden or interior.structure.lost
        if lost and (self.auto or lost == RANDOM):
            return lost
        layout = interior.own.layout()
        sites = tuple(s[3] for s in block._sites)
        kind = (interior.structure.key, tuple(block.layout.offsets), sites, form, layout)
        key = (kind, block.slot.address if shared and block.slot is not None else block.name)
        captured = self._made.get(key)
        if captured is None:
            against: str | None = self._failed.get(kind) or self._stopped or self._full(kind, run.mode.turn)
            if against:
                return against
            if self.auto:
                against = self._pays(run, kind, begin)
                if against is None or against:
                    return against
        try:
            if captured is None:
                captured = self._record(run, kind, shared)
                self._made[key] = captured
                against = self._beyond()
                if against:
                    self._drop(captured)
                    return against
            elif (block.name, interior.changes) not in captured.verified and not self._same(run, captured):
                interior.alone = True
                return self._find(run, form, names, begin)
        except FromOutside:
            raise
        except torch.OutOfMemoryError:
            self._stopped = "there is no room for a recording" if self.auto else ""
            return "there is no room for a recording"
        except Exception as error:  # the eager run that follows raises what is not of the recording
            what = str(error).strip().splitlines() or [""]
            reason = what[0] if isinstance(error, CannotRecord) else f"{type(error).__name__}: {what[0]}"
            self._failed[kind] = reason
            return reason
        captured.verified.add((block.name, interior.changes))
        return captured

    def _pays(self, run: Run, kind: _Kind, begin: Any) -> str | None:
        """Return why replaying is not worth it; empty: it is; None: that is being measured."""
        paying = self._paying.setdefault(kind, Paying())
        answer = paying.answer()
        run.interior.measuring = answer is None
        if answer is None:
            if begin is not None:
                run.timing = paying.timing(self.meter, begin, run.mode.turn)
            return None
        pays, figures = answer
        if pays and not paying.told:
            paying.told = True
            run.mode.tell(f"capture: block {run.block.name} is recorded, and those like it: {figures}")
        return "" if pays else f"a replay saves too little: {figures}"

    def _full(self, kind: _Kind, turn: int) -> _Later | str:
        """Return why no more is recorded, or empty; may drop a form that has not come for long."""
        latest: dict[Hashable, int] = {}
        for made, captured in self._made.items():
            if made[0][:3] == kind[:3]:
                latest[made[0]] = max(latest.get(made[0], -1), captured.used)
        if kind not in latest and len(latest) >= self.max_shapes:
            oldest = min(latest, key=lambda each: latest[each])
            if turn - latest[oldest] < _IDLE:
                return _Later(f"inputs have more than {self.max_shapes} forms", turn + _IDLE)
            for captured in [c for made, c in self._made.items() if made[0] == oldest]:
                self._drop(captured)
        if self.max_bytes is not None and (held := self._counted()) >= self.max_bytes:
            return f"recordings hold {held} bytes, of {self.max_bytes} that they may"
        if self.room is not None and self.room() <= 0:
            return "the device has no room for recordings"
        return ""

    def _beyond(self) -> str:
        """Return why the latest recording cannot stay, or empty."""
        if self.max_bytes is not None and (held := self._counted()) > self.max_bytes:
            return f"recordings would hold {held} bytes, of {self.max_bytes} that they may"
        if self.room is not None and self.room() < 0:
            self._stopped = "the device has no room for recordings"
        return self._stopped

    def _drop(self, captured: Captured) -> None:
        """Let go of recordings; runs under way go on with them."""
        captured.dropped = True
        self._made = {key: made for key, made in self._made.items() if made is not captured}
        used = {id(made.memory) for made in self._made.values()}
        self._memory = {kind: memory for kind, memory in self._memory.items() if id(memory) in used}

    def _record(self, run: Run, kind: _Kind, shared: bool) -> Captured:
        """Run a block eagerly on fixed memory, record it, and compare."""
        memory = self._memory.get((kind, shared))
        fresh = memory is None
        own = run.interior.own
        for tensor in (*run.call.leaves, *own.tensors):
            if tensor.device.type != self._device.type:
                raise CannotRecord(f"it computes with a tensor on {tensor.device}")
        if memory is None:
            carried = [Fixed(tensor) for tensor in own.tensors] if shared else []
            memory = Memory([Fixed(leaf) for leaf in run.call.leaves], carried)
        captured = Captured(memory, shared)
        captured.used, captured.layout = run.mode.turn, kind[-1]
        # One form of a block's own recordings keeps what it saves where it is: as much as copies would take.
        lasting = [(k, c) for (k, at), c in self._made.items() if at == run.block.name and c.lasting]
        for old in [c for k, c in lasting if k[0] != kind[0]]:
            self._drop(old)  # of a structure that was
        captured.lasting = not shared and run.policy == "keep" and all(k[0] != kind[0] for k, _ in lasting)
        captured.names = Names(run.block.module.modules())
        captured.addresses = [] if shared else own.addresses(run.block.views)
        random, runs = RandomState(self._device), run.block.runs
        for fixed in memory.inputs:
            fixed.forget()
        try:
            captured.load(run, [leaf.detach() for leaf in run.call.leaves], -1, own)
            with standing(run, memory) as stand:
                trial = Trial(run, [fixed.value for fixed in memory.inputs], stand)
                self._recorder.warm_up(lambda: self._watch(trial, captured))
                random.put_back()
                expected = self._recorder.warm_up(lambda: eagerly(trial))
                if not random.same_on_cpu(RandomState(self._device)) and self._device.type != "cpu":
                    raise CannotRecord("it draws random numbers on the CPU")
                if fresh:
                    reserve(memory, expected, self._device, of_residents(run))
                self._recorder.warm_up(lambda: _write_all(memory, expected))
                random.put_back()
                self._record_forward(trial, captured)
                self._record_backward(trial, captured)
            compare(captured, expected, random, run.policy, lambda: eagerly(trial))
        finally:
            random.put_back()
            run.block.runs = runs
            for fixed in memory.inputs:
                fixed.forget()
        self._memory[kind, shared] = memory
        return captured

    def _watch(self, trial: Trial, captured: Captured) -> None:
        """See what the block computes with besides what comes to fixed addresses.

        Raises:
            CannotRecord: Something that a replay could miss.
            FromOutside: Something that would get no gradient.
        """
        names, block = captured.names, trial.block

        def look(outputs: Sequence[Tensor], begin: Any) -> None:
            trial._random = random
            trial.expect_closed()
            for backward in backwards_of(outputs, begin):
                names.note(backward)

        random = RandomState(self._device)
        with names, Reads(known_storages(trial, captured.memory), self._device) as reads:
            eagerly(trial, look)
        if names.hidden and (self.auto or names.hidden == RANDOM):
            raise CannotRecord(names.hidden)
        if reads.strange:
            forms = {f"{tuple(each.shape)} {each.dtype}".replace("torch.", "") for each in reads.strange}
            what = f"it reads tensors that are no argument, Parameter or buffer: {', '.join(sorted(forms))}"
            if self.auto:
                raise CannotRecord(what)
            captured.held = reads.strange  # a replay reads their memory
            line = f"capture: block {block.name}: {what}; a replay reads the same ones again"
            trial.mode.tell_once(what, line)

    def _record_forward(self, trial: Trial, captured: Captured) -> None:
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
        known = known_storages(trial, memory)
        stay, captured.lasting = captured.lasting, False
        storages = [storage for address, storage in trial.saved.items() if address not in known]
        captured.saved = [bytes_of(storage, held=stay) for storage in storages]
        captured.lasting = stay and bool(storages)
        captured.forward.keep(captured.saved, captured.lasting)
        trial.saved = None

    def _record_backward(self, trial: Trial, captured: Captured) -> None:
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

    def _same(self, run: Run, captured: Captured) -> bool:
        """Compare a replay with the eager run of another block."""
        random, runs = RandomState(self._device), run.block.runs
        leaves = [leaf.detach() for leaf in run.call.leaves]
        try:
            captured.release()
            captured.load(run, leaves, -1, run.interior.own)
            captured.forward.replay()
            assert captured.memory.outputs is not None
            replayed = captured.memory.outputs.taken()
            random.put_back()
            flat, _ = Trial(run, leaves, {}).inner(leaves)
            eager = [each.detach() for each in flat if isinstance(each, Tensor)]
            return len(eager) == len(replayed) and all(map(equal, eager, replayed))
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
        _precision(),
        *[allowed() for allowed in _ATTENTION],
    )


def _precision() -> Hashable:
    """Return the precision of fp32 products, as set by the older calls or by the newer ones."""
    newer = [getattr(each.matmul, "fp32_precision", None) for each in (_backends, torch.backends.mkldnn)]
    try:
        return torch.get_float32_matmul_precision(), *newer
    except RuntimeError:  # it refuses to say where the newer ones have been used
        return tuple(newer)


def _write_all(memory: Memory, expected: Expected) -> None:
    """Write results to their places once: no kernel is launched for the first time while recording."""
    for pack, values in ((memory.outputs, expected[0]), (memory.found, expected[2])):
        assert pack is not None
        pack.write(values)


def _shared(run: Run) -> bool:
    """Whether other blocks can use a block's recordings: its own things come to fixed addresses."""
    slot = run.block.slot
    return slot is not None and not slot.own and run.interior.plain and not run.interior.alone
