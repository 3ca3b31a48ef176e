"""A stand-in for CUDA graphs on the CPU: the operations of a piece of work, run again on the same memory.

No Python of the work runs again: only the list of operations, each with the tensors that it had, and each
writing its result where that was. As with graphs that share a pool, results in between do not last: they are
spoilt after each replay, also those that other recordings have kept, so that whatever relies on one is found
out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .recording import CannotRecord, Recording

__all__ = ["TapeRecorder"]

_Result = TypeVar("_Result")
_REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNDEFINED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
_SPOILT = 0xFF  # a NaN in every floating dtype, -1 in every integer


class _Step:
    """One operation: its function, its arguments, and where the results go."""

    __slots__ = ("args", "function", "kwargs", "results")

    def __init__(self, function: Any, args: Any, kwargs: Any, results: list[tuple[int, Tensor]]) -> None:
        self.function, self.args, self.kwargs, self.results = function, args, kwargs, results

    def run(self) -> None:
        made = self.function(*self.args, **self.kwargs)
        if self.results:
            flat = tree_flatten(made)[0]
            for index, place in self.results:
                place.copy_(flat[index])


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations while they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.made: dict[int, Tensor] = {}  # address of a storage -> a tensor that holds it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if any(tag in func.tags for tag in _REFUSED):
            raise CannotRecord(f"{name} gives a result whose size or value the host has to know")
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in given):
            kind = next(type(t).__name__ for t in given if type(t) not in (Tensor, torch.nn.Parameter))
            raise CannotRecord(f"{name} works on a {kind}")
        made = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in given if t.numel()}
        results = []
        for index, each in enumerate(tree_flatten(made)[0]):
            if isinstance(each, Tensor) and each.numel():
                address = each.untyped_storage().data_ptr()
                if address in known:
                    continue
                self.made.setdefault(address, each.data)
                if not name.startswith(_UNDEFINED):
                    results.append((index, each.data))
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if results or writes:
            # Through tensors of their own, whose versions nobody watches, and that hold no graph.
            args, kwargs = tree_map(lambda v: v.data if isinstance(v, Tensor) else v, (args, kwargs))
            self.steps.append(_Step(func, args, kwargs, results))
        return made


class _TapeRecording:
    def __init__(self, recorder: TapeRecorder, tape: _Tape) -> None:
        self._recorder = recorder
        self._steps, self._made = tape.steps, tape.made
        self._kept: set[int] = set()
        self._lasting: set[int] = set()

    def replay(self) -> None:
        with torch.no_grad(), torch._C._DisableAutocast():
            for step in self._steps:
                step.run()
            self._recorder.spoil(self)

    def keep(self, tensors: Sequence[Tensor], lasting: bool = False) -> None:
        names = self._lasting if lasting else self._kept
        names.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def spoil(self, mine: bool) -> None:
        """Spoil what does not outlast a replay of this recording, or what does not outlast one of another."""
        for address, tensor in self._made.items():
            if address not in self._lasting and (address in self._kept) != mine:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_SPOILT)

    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())


class TapeRecorder:
    """Makes recordings of CPU work."""

    def __init__(self) -> None:
        """Nothing is recorded yet."""
        self._recordings: list[weakref.ref[_TapeRecording]] = []

    def warm_up(self, run: Callable[[], _Result]) -> _Result:
        """Run work."""
        return run()

    def record(self, run: Callable[[], _Result]) -> tuple[Recording, _Result]:
        """Record work.

        Raises:
            CannotRecord: An operation reads values on the host, or works on a tensor of another class.
        """
        tape = _Tape()
        try:
            with tape:
                result = run()
        except RuntimeError as error:
            raise CannotRecord(str(error).strip().splitlines()[0]) from error
        recording = _TapeRecording(self, tape)
        self._recordings.append(weakref.ref(recording))
        self.spoil(recording)
        return recording, result

    def spoil(self, replayed: _TapeRecording) -> None:
        """Do to memory what a pool does that recordings share."""
        for recording in self._alive():
            recording.spoil(mine=recording is replayed)

    def _alive(self) -> list[_TapeRecording]:
        alive = [recording for reference in self._recordings if (recording := reference()) is not None]
        self._recordings = list(map(weakref.ref, alive))
        return alive

    def pool_bytes(self) -> int:
        """Return the bytes of all results, in between and kept; no memory is used twice here."""
        return sum(recording.nbytes() for recording in self._alive())
