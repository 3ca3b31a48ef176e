"""Who computes with paged weights now: one thread at a time, and a second one is told.

A slot holds one block's weights, and a module one set of them. Two threads in one paged model would exchange
both under each other, and the results would be wrong without a word. So a thread that enters a paged module
while another one is inside, or in a backward pass through one, gets an error, and so does one whose slot was
taken meanwhile, and one that begins a backward pass beside another thread's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.autograd.graph as _graph

from ts_core.errors import StateError

if TYPE_CHECKING:
    from .block import PagedBlock

__all__ = ["Turns"]

_LINGERS = 2.0  # seconds a thread of the engine may take to let go of a pass that has failed


class _Backward:
    """A backward pass through paged modules; the engine alone holds it, and calls it when the pass ends.

    A pass that fails is not called, but dropped: by a device's thread, perhaps after the caller went on.
    """

    __slots__ = ("__weakref__", "called", "ended", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.called = self.ended = False

    def __call__(self) -> None:
        # Asked first, called last: gradients land in callbacks too.
        if self.called or torch._C._current_graph_task_id() == -1:
            self.ended = True
        else:
            self.called = True
            torch.autograd.Variable._execution_engine.queue_callback(self)


class Turns:
    """Notes which threads are in forward and in backward passes of a pager's modules."""

    def __init__(self) -> None:
        """Nobody is."""
        self._lock = threading.Lock()
        self._inside: dict[int, int] = {}
        self._backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()

    def backward(self, block: PagedBlock | None = None) -> None:
        """Note that the calling thread is in a backward pass, if it is.

        Args:
            block: The one that it has come to, for the message.

        Raises:
            StateError: Another thread is in one, and has not ended it within two seconds.
        """
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._backwards:
            self._begin(task, block)

    def _begin(self, task: int, block: PagedBlock | None) -> None:
        """Let a backward pass begin when no other thread's is under way."""
        me, under_way = threading.get_ident(), _Backward()
        # A GPU's thread of the engine works for all callers: only what one pass has begun is within another.
        nested = _within_a_pass()
        until = time.monotonic() + _LINGERS
        while True:
            with self._lock:
                others = [b for b in list(self._backwards.values()) if not b.ended]
                if not any(b.thread != me or not nested for b in others):
                    self._backwards[task] = under_way
                    break
            # What holds this very thread cannot end while it waits.
            if any(b.thread == me and not nested for b in others) or time.monotonic() > until:
                raise _two_threads(block)
            del others  # one that has failed ends when nobody holds it
            time.sleep(0.001)
        torch.autograd.Variable._execution_engine.queue_callback(under_way)

    @contextlib.contextmanager
    def forward(self, block: PagedBlock) -> Iterator[None]:
        """Let the calling thread compute with a block's weights.

        Raises:
            StateError: Another thread is at it, or has taken the slot meanwhile.
        """
        me = threading.get_ident()
        # A hook, or a checkpoint's second run, computes within a backward pass, on whatever thread that runs.
        nested = torch._C._current_graph_task_id() != -1
        until = 0.0
        while True:
            with self._lock:
                inside = not nested and any(thread != me for thread in self._inside)
                passing = not nested and self._passing(me)
                if not inside and not passing:
                    self._inside[me] = self._inside.get(me, 0) + 1
                    break
            if inside or (until and time.monotonic() > until):
                raise _two_threads(block)
            until = until or time.monotonic() + _LINGERS
            time.sleep(0.001)
        try:
            yield
            slot = block.slot
            if slot is not None and slot.owner is not block and not self._mine(me):
                raise _two_threads(block)
        finally:
            with self._lock:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]

    def _mine(self, me: int) -> bool:
        """Whether nobody but the calling thread can have taken a slot."""
        with self._lock:
            return len(self._inside) == 1 and not self._passing(me)

    def _passing(self, me: int) -> bool:
        """Whether a backward pass is under way on another thread."""
        return any(not b.ended and b.thread != me for b in list(self._backwards.values()))


def _within_a_pass() -> bool:
    """Whether a call of ``backward()`` is under way on this thread, as far as Python's stack tells."""
    code = _graph._engine_run_backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _two_threads(block: PagedBlock | None) -> StateError:
    return StateError(
        f"paged block {getattr(block, 'name', '')!r}: another thread is computing with paged weights of this "
        "model, whose slots serve one thread at a time. Let passes take turns (a lock around each forward "
        "and backward), or evaluate a copy of the model"
    )
