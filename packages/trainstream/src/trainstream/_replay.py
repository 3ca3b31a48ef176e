"""Running a micro-batch again, from its start, after memory ran out in it.

A pass that fails must leave nothing behind. Gradients of paged weights land when backward ends, so that a
failed pass has none; gradients of resident ones arrive one by one. Those that were None are None again. One
that had the sum of earlier micro-batches, and has got this one's share already, keeps it: while the
micro-batch runs again it is set aside, and what the second run brings for it is dropped. So nothing is
copied, and every bit is that of a run in which nothing happened.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ts_core.errors import DoesNotFitError
from ts_core.guard import guard_of
from ts_optim.gradients import ConsumedGradient

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["RandomState", "explain", "out_of_memory", "run_again"]

_Result = TypeVar("_Result")
_MOST = 4  # times that one micro-batch runs again
_LOW = (torch.bfloat16, torch.float16)
_HOST = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | DoesNotFitError):
        return True
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _HOST)


def explain(error: BaseException, text: str) -> None:
    """Add a sentence to an exception that is under way; its type and traceback stay."""
    message = f"{error}\n{text}"
    error.args = (message, *error.args[1:])


def refusal(session: Session) -> str:
    """Return why a micro-batch of this session cannot run again, or an empty text."""
    if getattr(session.optimizer, "works_in_backward", False):
        return "with eager=True weights change during backward, which cannot be undone"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "the other ranks would wait for this one"
    return ""


def run_again(
    session: Session, run: Callable[[], _Result], undo: Callable[[], object] = lambda: None
) -> _Result:
    """Run forward and backward of one micro-batch; where memory runs out, make room and run it again.

    Args:
        session: The session.
        run: Runs both; must hold no tensor of the pass beside what it returns.
        undo: Takes back what else `run` has changed, before it runs again.

    Returns:
        What `run` returns.

    Raises:
        Exception: The error of the last try; where memory ran out, with what was tried.
    """
    before = _Before(session)
    tried: list[str] = []
    session.relief.replaying = True
    try:
        while True:
            try:
                return run()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                why = refusal(session) or before.refusal()
                why = why or ("" if len(tried) < _MOST else "it has run often enough")
                first = str(error).partition("\n")[0]
                if why or not (session.relief.possible() or not tried):
                    _say_what_was_tried(error, tried, why)
                    raise
                # Its frames hold tensors of the failed pass.
                traceback.clear_frames(error.__traceback__)
            undo()
            before.roll_back()
            tried.append(session.relief.relieve(hard=len(tried) > 1))
            session.events.add(
                f"out of memory in micro-batch {session.steps + 1} ({first}): {tried[-1]}; it runs again"
            )
            before.prepare()
    finally:
        session.relief.replaying = False
        before.finish()


def _say_what_was_tried(error: BaseException, tried: list[str], why: str) -> None:
    done = f"Tried before: {'; '.join(tried)}. " if tried else ""
    why = f"The micro-batch cannot run again: {why}. " if why else "Nothing is left that could make room. "
    explain(
        error,
        f"{done}{why}Use a smaller micro-batch or shorter rows (and more accumulation), quantize= for frozen "
        "weights, or a larger budget",
    )


class _Before:
    """What a micro-batch found, so far as it has to find it again."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._random = RandomState(session.plan.device)
        self._buffers = session.relief.buffers()
        self._grads: dict[int, _Known] = {}
        self._aside: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._landed: dict[int, nn.Parameter] = {}
        self._counts: dict[int, int] | None = None
        counter: Any = getattr(session.optimizer, "_counter", None)
        if counter is not None:
            self._counts = dict(counter._counts)
        self._look()

    def _look(self) -> None:
        """Note the gradients that are there."""
        self._grads = {
            id(parameter): _Known(
                TensorWeakRef(grad) if grad.dtype in _LOW else grad, grad._version, grad.dtype
            )
            for parameter, grad in _gradients(self._session.relief.trained())
        }

    def refusal(self) -> str:
        """Return why the failed pass cannot be undone, or an empty text."""
        for place, key, buffer, copy, version in self._buffers:
            if copy is None and (place.get(key) is not buffer or buffer._version != version):
                nbytes = buffer.numel() * buffer.element_size()
                return f"it wrote the buffer {key!r} of {nbytes} bytes, of which no copy is kept"
        return ""

    def roll_back(self) -> None:
        """Undo what the failed pass has done."""
        self._put_back()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in self._session.model.parameters():
                now, known = parameter.grad, self._grads.get(id(parameter))
                if now is None or id(parameter) in self._landed:
                    continue
                if known is None:
                    parameter.grad = None
                elif known.has_changed(parameter, now):
                    self._landed[id(parameter)] = parameter
        self._grads.clear()
        for place, key, buffer, copy, _ in self._buffers:
            place[key] = buffer
            if copy is not None:
                with torch.no_grad():
                    buffer.copy_(copy)
        self._random.restore()
        counter: Any = getattr(self._session.optimizer, "_counter", None)
        if counter is not None and self._counts is not None:
            counter._counts = dict(self._counts)

    def prepare(self) -> None:
        """Get ready to run again: the gradients that have this micro-batch's share are set aside."""
        with torch._C.DisableTorchFunctionSubclass():
            for key, parameter in self._landed.items():
                if parameter.grad is not None:
                    self._aside[key] = parameter, parameter.grad
                    parameter.grad = None
        self._buffers = self._session.relief.buffers()
        self._look()

    def _put_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, grad in self._aside.values():
                parameter.grad = None
                parameter.grad = grad
        self._aside.clear()

    def finish(self) -> None:
        """The micro-batch is done, or has failed for good: what was set aside is in its place again."""
        self._put_back()


def _gradients(parameters: Iterator[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and not isinstance(grad, ConsumedGradient):
                yield parameter, grad


class _Known(NamedTuple):
    """A gradient that was there: a 16-bit one is not kept alive, for an fp32 sum may take its place."""

    grad: Tensor | TensorWeakRef
    version: int
    dtype: torch.dtype

    def has_changed(self, parameter: Tensor, now: Tensor) -> bool:
        """Whether a share was added since.

        A 16-bit sum is widened to fp32 just before its second share is added; failing in between it has none.
        """
        before = self.grad() if isinstance(self.grad, TensorWeakRef) else self.grad
        if now is before:
            return now._version != self.version
        # That of a resident weight is made, filled and added to; that of a paged one lands as a whole.
        return now.dtype is self.dtype or guard_of(parameter) is not None or now._version > 1


class RandomState:
    """The state of every random number generator that a forward pass may use."""

    def __init__(self, device: str) -> None:
        """Take it."""
        self._cpu = torch.get_rng_state()
        self._device = torch.device(device) if device.startswith("cuda") else None
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device is not None else None
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            with contextlib.suppress(AttributeError):
                sys.modules["numpy"].random.set_state(self._numpy)
