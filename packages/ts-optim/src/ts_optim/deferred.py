"""Updates that `step()` has committed and that run beside whatever comes next, until a parameter is used.

An `Update` is run once, by whoever comes first: the thread that `step()` starts, which takes them in the
order in which the next forward pass needs them, or the first reader that cannot wait for its turn. The thread
ends with its last update; it is no daemon, so the interpreter waits for it at exit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from ts_core.errors import StateError, StorageError
from ts_core.guard import guard_of
from ts_core.trace import span

from .kernel import Clock, PlainUpdate, Terms
from .leased import update_of
from .slots import KEPT
from .transfer import Work

__all__ = ["PendingUpdates", "Update", "await_others", "by_rank", "is_deferrable"]

_unfinished: weakref.WeakValueDictionary[int, Update] = weakref.WeakValueDictionary()


def is_deferrable(work: Work) -> bool:
    """Tell whether the update of a parameter may run after `step()`: whoever uses it will wait.

    float64 ones run in many operations, which an interrupt could split.
    """
    slot = work.slot
    cpu = slot.param.device.type == "cpu"
    return cpu and slot.bucket[0] == "plain" and guard_of(slot.param) is not None


def await_others(params: Sequence[torch.Tensor]) -> None:
    """Wait for what other optimizers left pending on these parameters."""
    for param in params:
        entry = guard_of(param)
        if entry is not None and entry.pending is not None:
            entry.wait()


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _address(param: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return param.data_ptr()


class Update:
    """The pending update of the parameters of one rank; calling it waits until it is done.

    Attributes:
        finished: Nothing is left to do: the parameters are updated, or `error` says why not.
        error: What went wrong; nothing was written then.
        trouble: What the disk refused and nobody was told yet. Nothing is lost: what could not be written is
            in memory, and what could not be read is tried again by the next one who comes.
    """

    def __init__(self, works: Sequence[Work], terms: Terms, name_of: Callable[[torch.Tensor], str]) -> None:
        """Commit to the present gradients and state.

        Args:
            works: One or more, of one rank and one `Slot.bucket`.
            terms: What `step()` fixed.
            name_of: A method that gives a parameter's name for messages; not kept alive.
        """
        self._plain: PlainUpdate | None = update_of(works, terms)
        self._name_of = weakref.WeakMethod(name_of)
        self._clock: Clock = terms.clock
        self._guards = [entry for work in works if (entry := guard_of(work.slot.param)) is not None]
        self._lock = threading.RLock()
        self._seen: list[tuple[Work, str, torch.Tensor, int]] = []
        self.error: Exception | None = None
        self.trouble: StorageError | None = None
        self.finished = False

    def post(self) -> None:
        """Let users of the parameters wait for it from now on."""
        assert self._plain is not None
        works = self._plain.works
        # Now, so that whoever compares versions without reading, as the pager and autograd do, knows at once;
        # and once more when the values are there.
        torch.autograd.graph.increment_version([work.slot.weights for work in works])
        self._seen = [(work, what, t, _version(t)) for work in works for what, t in _watched(work)]
        _unfinished[id(self)] = self
        for entry in self._guards:
            entry.pending = self

    def __call__(self) -> None:
        """Wait for it; run it here if nobody has started it.

        Raises:
            StateError: A gradient, or state, was changed in place after `step()`.
            StorageError: The disk refused something; raised once for each trouble.
        """
        if not self.finished:
            start = time.perf_counter()
            try:
                with self._lock:
                    self._advance()
            finally:
                self._clock.add("wait_s", time.perf_counter() - start)
        if self.error is not None:
            raise self.error.with_traceback(None)
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            if self.finished:
                self.forget()
            raise trouble

    def run(self) -> None:
        """Run it unless somebody else does; errors are kept for those who wait."""
        if self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()

    def forget(self) -> None:
        """Let the parameters be used although it failed."""
        for entry in self._guards:
            if entry.pending is self:
                entry.pending = None

    def _advance(self) -> None:
        """Do what is left; an interrupt leaves the rest to the next one who comes."""
        plain = self._plain
        if self.finished or plain is None:
            return
        try:
            # Only tensors that are not guarded are used, so that a signal handler that comes in between can
            # use those that are.
            with span("ts/optim/update"), torch.no_grad():
                if plain.due:
                    self._check()
                plain.run()
        except StorageError as error:
            self.trouble = error.with_traceback(None)
            return
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold the gradients
        else:
            if self.trouble is None:
                self.forget()
        self.finished = True
        self._plain, self._seen = None, []  # lets go of the gradients
        _unfinished.pop(id(self), None)

    def _check(self) -> None:
        """Refuse to compute with what is not what it was when `step()` committed to it."""
        for work, what, t, version in self._seen:
            moved = what == "value" and _address(work.slot.param) != work.slot.key[0]
            if moved or _version(t) != version:
                name_of = self._name_of()
                name = f"parameter {work.index}" if name_of is None else name_of(work.slot.param)
                raise StateError(
                    f"[OffloadAdamW] {name}: its {what} was {'exchanged' if moved else 'changed in place'} "
                    "after step() and before the update ran, so nothing was written. Do that before step() "
                    "or after synchronize(). To go on without this update, call synchronize(), which raises "
                    "this once more"
                )


def _watched(work: Work) -> list[tuple[str, torch.Tensor]]:
    """What an update reads, under the names of messages; in-place writes to it move version counters."""
    slot = work.slot
    held = [("gradient", work.grad), ("value", slot.weights)]
    return held + [(name, slot.state[name]) for name in KEPT if name in slot.state]


def _work_off(updates: Sequence[Update]) -> None:
    for update in updates:
        update.run()


def by_rank(works: Sequence[Work], terms: Terms, name_of: Callable[[torch.Tensor], str]) -> list[Update]:
    """Group the updates of guarded parameters, next needed first.

    Args:
        works: All of them deferrable.
        terms: What `step()` fixed.
        name_of: A method that gives a parameter's name for messages.

    Returns:
        One update a rank, or two where 16-bit and fp32 parameters meet.
    """
    groups: dict[tuple[int, bool], list[Work]] = {}
    for work in works:
        entry = guard_of(work.slot.param)
        rank = 0 if entry is None else entry.rank
        groups.setdefault((rank, work.slot.low), []).append(work)
    return [Update(groups[key], terms, name_of) for key in sorted(groups)]


class PendingUpdates:
    """The updates of one optimizer that may not have run yet."""

    def __init__(self) -> None:
        """Hold none."""
        self._updates: list[Update] = []

    def commit(self, updates: Sequence[Update]) -> None:
        """Start running updates in this order, and return; `drain` waits for those before, too."""
        self._updates = [old for old in self._updates if not old.finished or old.error is not None]
        self._updates += updates
        for update in updates:
            update.post()
        if updates:
            try:
                threading.Thread(target=_work_off, args=(updates,), name="ts-optim").start()
            except RuntimeError:  # none to be had: no more threads allowed, or the interpreter is ending
                _work_off(updates)

    def drain(self) -> None:
        """Wait for every update.

        Raises:
            StateError: One of them failed; all others are done. It is raised each time until `forget`.
        """
        failed, errors = [], []
        for update in self._updates:
            try:
                update()
            except Exception as error:
                failed.append(update)
                errors.append(error)
        self._updates = failed
        if len(errors) > 1:
            raise StateError("\n".join(map(str, errors))) from errors[0]
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Go on without the updates that failed."""
        for update in self._updates:
            update.forget()
        self._updates = []


def _finish_all() -> None:
    """A forked child has no thread of ours, and must not see half an update."""
    for reference in _unfinished.valuerefs():
        update = reference()
        if update is not None:
            with contextlib.suppress(Exception):  # whoever waits for it gets to know
                update()


os.register_at_fork(before=_finish_all)
