"""Updates that `step()` has committed and that run beside whatever comes next, until a parameter is used.

An `Update` is run once, by whoever comes first: the threads that `step()` starts, which take them in the
order in which the next forward pass needs them, or the first reader that cannot wait for its turn. There are
two threads, so that the cores have work while one of them prepares its next call. They end with the last
update; they are no daemons, so the interpreter waits for them at exit.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ts_core.errors import StateError, StorageError
from ts_core.guard import guard_of
from ts_core.trace import span

from .kernel import Clock, PlainUpdate, Terms
from .leased import LeasedUpdate, update_of
from .slots import KEPT
from .transfer import Work

__all__ = ["PendingUpdates", "Update", "await_others", "by_rank"]

#: Threads that start updates.
_THREADS = 2
#: The last large update of a forward pass is cut into pieces of whole tensors, of so many elements or more,
#: and at most so many pieces: its weights then cross to a device while the rest is updated.
_PIECE, _PIECES = 4 << 20, 4

_unfinished: weakref.WeakValueDictionary[int, Update] = weakref.WeakValueDictionary()


def await_others(params: Sequence[torch.Tensor]) -> None:
    """Wait for what other optimizers left pending on these parameters."""
    for param in params:
        entry = guard_of(param)
        if entry is not None and entry.pending is not None:
            entry.wait()


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # inference tensors have none
        return [-1 if t.is_inference() else t._version for t in tensors]


def _addresses(works: Sequence[Work]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [work.slot.param.data_ptr() for work in works]


class Update:
    """The pending update of the parameters of one rank; calling it waits until it is done.

    Attributes:
        finished: Nothing is left to do: the parameters are updated, or `error` says why not.
        error: What went wrong; nothing was written then.
        leases: It works on copies that it leases, of which there is room for those of one update.
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
        self.leases = isinstance(self._plain, LeasedUpdate)
        self._name_of = weakref.WeakMethod(name_of)
        self._clock: Clock = terms.clock
        self._guards = [work.guard for work in works if work.guard is not None]
        self._lock = threading.RLock()
        self._posting = threading.RLock()
        self._seen: list[int] = []
        self.posted = False
        self.error: Exception | None = None
        self.trouble: StorageError | None = None
        self.finished = False

    def post(self) -> None:
        """Let users of the parameters wait for it from now on; once done, do nothing."""
        if self.posted:
            return
        with self._posting:
            plain = self._plain
            if self.posted or plain is None:
                return
            works = plain.works
            # Now, so that whoever compares versions without reading, as the pager and autograd do, knows at
            # once; and once more when the values are there.
            torch.autograd.graph.increment_version([work.slot.weights for work in works])
            self._seen = _versions(_watched(works))
            _unfinished[id(self)] = self
            for entry in self._guards:
                entry.pending = self
            self.posted = True

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

    def complete(self) -> None:
        """Wait for it, or run it; errors are kept for those who use its parameters."""
        with self._lock:
            self._advance()

    @property
    def ready(self) -> bool:
        """Whether it would not have to wait for gradients."""
        plain = self._plain
        return plain is None or all(work.arrived for work in plain.works)

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
            self.post()
            for work in plain.works:
                work.arrive()
            # Only tensors that are not guarded are used, so that a signal handler that comes in between can
            # use those that are.
            with span("ts/optim/update"), torch.no_grad():
                if plain.due:
                    self._check(plain.works)
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

    def _check(self, works: Sequence[Work]) -> None:
        """Refuse to compute with what is not what it was when `step()` committed to it."""
        now, seen, addresses = _versions(_watched(works)), self._seen, _addresses(works)
        if now == seen and addresses == [work.slot.key[0] for work in works]:
            return
        at = 0
        for work, address in zip(works, addresses, strict=True):
            for what in ("gradient", "value", *[name for name in KEPT if name in work.slot.state]):
                exchanged = what == "value" and address != work.slot.key[0]
                if exchanged or now[at] != seen[at]:
                    self._refuse(work, what, "exchanged" if exchanged else "changed in place")
                at += 1

    def _refuse(self, work: Work, what: str, how: str) -> None:
        name_of = self._name_of()
        name = f"parameter {work.index}" if name_of is None else name_of(work.slot.param)
        raise StateError(
            f"[OffloadAdamW] {name}: its {what} was {how} after step() and before the update ran, so nothing "
            "was written. Do that before step() or after synchronize(). To go on without this update, call "
            "synchronize(), which raises this once more"
        )


def _watched(works: Sequence[Work]) -> list[torch.Tensor]:
    """What an update reads; in-place writes to it move version counters."""
    return [t for work in works for t in (work.grad, *work.slot.watched)]


class _Queue:
    """Updates that are still to be started, for several threads."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self._left = list(updates)
        self._lock = threading.Lock()

    def take(self) -> Update | None:
        """The next one in order whose gradients are there.

        Gradients arrive in about the opposite order, so if none is ready the last one will be first.
        """
        with self._lock:
            ready = (at for at, update in enumerate(self._left) if update.ready)
            return self._left.pop(next(ready, -1)) if self._left else None


def _work_off(queue: _Queue) -> None:
    """Run what is left."""
    while (update := queue.take()) is not None:
        update.run()


def by_rank(works: Sequence[Work]) -> list[list[Work]]:
    """Group the works of guarded parameters by updates, next needed first.

    Args:
        works: All of them may wait.

    Returns:
        One list a rank, or two where 16-bit and fp32 parameters meet; several for the last large one.
    """
    groups: dict[tuple[int, bool], list[Work]] = {}
    for work in works:
        rank = 0 if work.guard is None else work.guard.rank
        groups.setdefault((rank, work.slot.low), []).append(work)
    found = [groups[key] for key in sorted(groups)]
    for at in reversed(range(len(found))):
        pieces = _cut(found[at])
        if len(pieces) > 1:
            return [*found[:at], *pieces, *found[at + 1 :]]
    return found


def _cut(works: list[Work]) -> list[list[Work]]:
    """Cut a group into pieces, if it is large enough; not where there is room for one leased update."""
    left = sum(work.grad.numel() for work in works)
    least = max(_PIECE, left // _PIECES)
    if left < 2 * least or any(work.slot.home is not None for work in works):
        return [works]
    pieces: list[list[Work]] = [[]]
    held = 0
    for work in works:
        if held >= least and left >= least:
            pieces.append([])
            held = 0
        pieces[-1].append(work)
        held += work.grad.numel()
        left -= work.grad.numel()
    return pieces


def _post(updates: Sequence[Update]) -> None:
    for update in updates:
        update.post()


class PendingUpdates:
    """The updates of one optimizer that may not have run yet."""

    def __init__(self) -> None:
        """Hold none."""
        self._updates: list[Update] = []

    def commit(
        self, groups: Sequence[Sequence[Work]], terms: Terms, name_of: Callable[[torch.Tensor], str]
    ) -> None:
        """Start updates in this order, and return when all are posted; `drain` waits for those before, too.

        Args:
            groups: The works of each update; see `Update` for the rest.
            terms: What `step()` fixed.
            name_of: A method that gives a parameter's name.
        """
        terms = replace(terms, threads=terms.behind or terms.threads)
        updates = [Update(works, terms, name_of) for works in groups]
        queue = _Queue(updates)
        self._updates = [old for old in self._updates if not old.finished or old.error is not None] + updates
        try:
            # The first one begins while the others are posted; the thread posts those that it comes to.
            updates[0].post()
            for _ in range(_THREADS if not any(update.leases for update in updates) else 1):
                threading.Thread(target=_work_off, args=(queue,), name="ts-optim").start()
            _post(updates)
        except RuntimeError:  # none to be had: no more threads allowed, or the interpreter is ending
            _post(updates)
            _work_off(queue)
        except BaseException:  # an interrupt: a step is committed as a whole
            _post(updates)
            raise

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
            update.complete()


os.register_at_fork(before=_finish_all)
