"""The watchdog: looks at memory once a step, and at each input, and makes room before it is too late.

Three things can end a run that has been going well: another process takes memory of the device, a control
group or another process leaves less RAM, and inputs grow. The first two are looked at after each step, where
asking takes less than 1/100 of the time; the third before a pass begins, from what was learned about the
largest input so far.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trainstream._replay import explain, out_of_memory
from ts_core import memory
from ts_core.errors import DoesNotFitError
from ts_core.headroom import least_left
from ts_core.memory import format_bytes
from ts_core.usage import host_usage, release_free_memory

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from trainstream._session import Session

__all__ = ["Watch"]

_SHARE = 100  # a look may take 1/100 of the time since the one before
_MARGIN = 64 << 20  # of the device that other things in this process may need at once
_RESULTS = 4  # tensors of an output that are looked at: the loss, logits, and a few more
_GROWN = 1.05  # inputs that are larger by this factor than all before


class Entrance:
    """What is called when a wrapped model, or what holds its stack, begins and ends a forward pass.

    A copy or pickle of the model has one that does nothing.
    """

    def __init__(self, enter: Callable[..., None] | None = None) -> None:
        """Call `enter`, or nothing."""
        self._enter = enter

    @torch._disable_dynamo  # as torch.compiler.disable, which would import the compiler here and now
    def __call__(self, *given: Any) -> None:
        """Pass it on."""
        if self._enter is not None:
            self._enter(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entrance:
        """A copy does nothing."""
        return Entrance()

    def __reduce__(self) -> tuple[type[Entrance], tuple[()]]:
        """The same for a pickled one."""
        return Entrance, ()


class _Graph:
    """The graph of one pass: the hooks in it hold this, and nobody else."""

    def __init__(self) -> None:
        self.reached = False

    # Who saves an output need not hear of it.
    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def reach(self, grad: Tensor) -> None:
        """A backward pass comes through."""
        self.reached = True


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_listening: list[bool] = []


def _listen(watch: Watch) -> None:
    """Hear of memory of a GPU that runs out where no code of ours can catch it: in the engine."""
    _watches.add(watch)
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and not _listening:
        _listening.append(True)
        attach(_ran_out)


def _ran_out(*_: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        for watch in list(_watches):
            watch.ran_out()


class Watch:
    """Looks after the memory of one session."""

    def __init__(self, session: Session) -> None:
        """Watch nothing yet."""
        self._session = session
        self._cuda = session.plan.device.startswith("cuda")
        self._handles: list[RemovableHandle] = []
        self._last = self._cost = 0.0
        self._largest = 0
        self._inside: list[nn.Module] = []
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._shrunk = False
        self._freed = 0

    # -- passes ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look at every pass from now on, if anything of the model can make room."""
        session = self._session
        if self._cuda:
            _listen(self)
        if session.pager is None or self._handles:
            return
        for module in _around(session.model, [block.module for block in session.pager.blocks]):
            self._handles += [
                module.register_forward_pre_hook(Entrance(self._enter), with_kwargs=True),
                module.register_forward_hook(Entrance(self._leave), always_call=True),
            ]

    def stop(self) -> None:
        """Look no more."""
        _watches.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside = [m for m in self._inside if m is not module]
        if not self._inside:
            self._before_pass(args, kwargs)
        self._inside.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = [m for m in self._inside if m is not module]
        if self._inside:
            return
        if output is not None:
            self._follow_graph(output)
            return
        error = sys.exc_info()[1]
        if error is None or not out_of_memory(error) or self._session.relief.replaying:
            return
        self._session.relief.due = "memory ran out in a forward pass"
        explain(
            error,
            "Room is made before the next pass of this model: call it again with the same micro-batch. "
            "session.train_step(batches) and TrainStreamTrainer do so by themselves",
        )

    def _follow_graph(self, output: Any) -> None:
        """Note a graph that a backward pass may still come to: until then no weight that it uses may move."""
        results = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.grad_fn is not None]
        if not results:
            return
        graph = _Graph()
        for tensor in results[:_RESULTS]:
            tensor.register_hook(graph.reach)  # type: ignore[no-untyped-call]
        self._graphs.add(graph)

    def ran_out(self) -> None:
        """The device's memory ran out in a backward pass that is not ours: make room before the next one."""
        if not self._session.relief.replaying:
            self._session.relief.due = "memory ran out in a backward pass"

    def _before_pass(self, args: Any, kwargs: Any) -> None:
        session = self._session
        relief = session.relief
        if torch._C._current_graph_task_id() != -1:
            return  # within a backward pass nothing can move
        if any(not graph.reached for graph in self._graphs):
            return  # two passes before one backward: nor between them
        if relief.due:
            why, relief.due = relief.due, ""
            session.events.add(f"{why}: {relief.relieve()}")
        if not torch.is_grad_enabled():
            return
        size = _elements(args, kwargs)
        if self._largest and size > _GROWN * self._largest:
            self._make_room_for(size / self._largest)
        elif not self._largest:
            self._make_room_as_planned(_tokens(args, kwargs))
        self._largest = max(self._largest, size)

    def _make_room_for(self, growth: float) -> None:
        """An input is larger than all before: let units stream as far as its pass will need their room."""
        session = self._session
        governor = session.tuner.governor if session.tuner is not None else None
        needed = governor.need(growth) if governor is not None else None
        if governor is None or needed is None:
            return
        used = session.relief.places.limits.used()
        over = used + needed - governor.room
        if over > 0:
            why = f"an input {growth:.3g} times as large as any before"
            session.relief.make_room(over, f"{why} needs {format_bytes(needed)} beside {format_bytes(used)}")

    def _make_room_as_planned(self, tokens: int) -> None:
        """The first input is larger than what was planned for: let units stream until all is measured."""
        session = self._session
        places, decided = session.relief.places, session.relief.places.decided
        governor = session.tuner.governor if session.tuner is not None else None
        if governor is None or not decided.tokens or tokens <= _GROWN * decided.tokens:
            return
        needed = int(decided.reserve * (tokens / decided.tokens))
        over = places.limits.used() + needed - governor.room
        candidates = places.removable()
        if over > 0 and candidates:
            done = session.relief.stream(places.enough_of(candidates, over))
            places.write_down(session)
            session.events.add(
                f"the first input has {tokens:,} tokens, {decided.tokens:,} were planned for: {done}"
            )

    # -- steps -------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Look whether there is less memory than there was."""
        now = time.perf_counter()
        if now - self._last < _SHARE * self._cost:
            return
        if self._cuda:
            self._look_at_device()
        self._look_at_ram()
        self._last = time.perf_counter()
        self._cost = self._last - now

    def _look_at_device(self) -> None:
        """Others may have taken memory of the device that this run has needed before."""
        session = self._session
        device = torch.device(session.plan.device)
        free = int(torch.cuda.mem_get_info(device)[0])
        reserved = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_reserved(device)
        self._follow(reserved + max(free - _MARGIN, 0), peak, "the device")

    def _look_at_ram(self) -> None:
        """Less RAM may be left than was planned with, and none at all is the end of the process."""
        session = self._session
        places = session.relief.places
        budget = memory.host_budget()
        available, least = budget.available_bytes, least_left(budget)
        if not self._cuda:
            used = places.limits.used()
            governor = session.tuner.governor if session.tuner is not None else None
            if governor is not None:
                more = governor.kept + (governor.need(1.0) or 0)
            else:  # what it has taken at its peak, loading included
                peak = int(session.history[-1]["host_peak_bytes"]) if session.history else 0
                more = max(peak - self._freed - host_usage().resident_bytes, 0)
            self._follow(used + available, used + more, "RAM")
            available = memory.host_budget().available_bytes
        if available < least:
            release_free_memory(collect=True)
            available = memory.host_budget().available_bytes
        if available < least:
            self._save_from_the_kernel(available, least)

    def _follow(self, room: int, peak: int, what: str) -> None:
        """Plan with what there is now; make room if what a step took before would not fit any more."""
        session = self._session
        governor = session.tuner.governor if session.tuner is not None else None
        most = session.relief.places.limits.room
        over = peak - room
        if governor is not None:
            governor.room = min(most, room)
            over -= governor.kept  # these give way by themselves
        # Once there is less, it stays so until what was planned with is there again.
        less = room < most and (governor is not None or over > 0 or self._shrunk)
        if less and not self._shrunk:
            session.events.add(
                f"less of {what} is left: {format_bytes(max(room, 0))} can be used where "
                f"{format_bytes(most)} were planned with"
            )
        elif self._shrunk and not less:
            session.events.add(f"{what} has room again: {format_bytes(most)} can be used, as planned")
        self._shrunk = less
        if less and over > 0:
            freed = session.relief.make_room(over, f"a step takes {format_bytes(peak)}")
            # A step needs less from now on: a peak of before would say again and again that it does not fit.
            if self._cuda:
                torch.cuda.reset_peak_memory_stats(session.plan.device)
            else:  # that of a process cannot be reset
                self._freed += freed

    def _save_from_the_kernel(self, available: int, least: int) -> None:
        """Move what can be moved to files; refuse to go on if that is not enough.

        Raises:
            DoesNotFitError: With what to do.
        """
        session = self._session
        moved = session.relief.to_files(least - available)
        if moved:
            return
        raise DoesNotFitError(
            f"after step {session.steps}: {format_bytes(max(available, 0))} of RAM are left for this process "
            f"({memory.host_budget().source}), and the kernel ends it when there is none. Free what else it "
            "holds, raise the limit of its control group, use ram_budget= and disk_offload= so that state "
            "lives in files, moment_dtype='int8', or LoRA. The step is done and whole: save, then resume"
        )


def _around(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the modules with a forward of their own that the stack is part of, the model first."""
    first = blocks[0] if blocks else None
    return [
        module
        for module in model.modules()
        if module is model
        or (
            first is not None
            and module is not first
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
            and any(part is first for part in module.modules())
        )
    ]


def _tokens(args: Any, kwargs: Any) -> int:
    """Tokens of an input: ids as they are, other values by their last dimension."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    ids = [t.numel() for t in tensors if not t.is_floating_point() and t.dim() > 1]
    return max(ids or [t.numel() // max(t.shape[-1], 1) for t in tensors if t.dim()], default=0)


def _elements(args: Any, kwargs: Any) -> int:
    """Elements of the largest input."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    return max((t.numel() for t in tensors), default=0)
