"""The session: everything `wrap()` keeps about a model while it is wrapped."""

from __future__ import annotations

import collections
import logging
import os
import resource
import sys
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from trainstream._reach import ReachCheck
from trainstream._recorder import VARIABLE, Recorder
from trainstream._replay import run_again
from trainstream._snapshots import Snapshot, rolled_back
from trainstream._stepping import train_step
from trainstream._tracer import TRACE_VARIABLE, Tracer
from trainstream._watch import Watch
from ts_core.blocks import BlockMap
from ts_core.memory import format_bytes
from ts_core.plan import Plan, step_seconds
from ts_core.trace import EventLog

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from trainstream._kernels import Kernels
    from trainstream._options import WrapOptions
    from trainstream._paging import Tiers
    from trainstream._places import Places
    from trainstream._rebudget import Size
    from trainstream._relief import Relief
    from trainstream._tuner import Tuner
    from ts_hf.background import BackgroundSave
    from ts_optim.placement import PlacePolicy
    from ts_paging.pager import WeightPager

__all__ = ["Instead", "Session", "converting", "session_of", "zero_grad"]

_Result = TypeVar("_Result")
_HISTORY = 64  # steps whose measurements are kept
#: Anonymous and shared memory of this process just after ``import trainstream``; budgets count from there.
baseline_bytes = 0


class Session:
    """State of one wrapped model.

    Attributes:
        model: The wrapped model.
        optimizer: The optimizer `wrap()` returned, or None when nothing is trained.
        options: The checked options.
        block_map: Which parameters form which block.
        plan: Where every block lives; ``plan.policy[b]`` is block b's activation policy.
        pager: Brings paged weights; None if nothing is paged, offloaded or recomputed.
        tiers: Where paged weights live.
        tuner: Adapts placement to what was measured; None if everything was decided at `wrap()`.
        events: What happened and what was decided, as lines of text.
        decisions: The lines that decided an ``"auto"`` option.
        adapting: True while the session still tunes itself.
        placement: Where the optimizer kept state of CUDA parameters before; None if that was not changed.
        relief: Makes room where memory is short.
        kernels: Which modules run fused paths.
        watch: Looks at memory once a step and at every input.
        told: Tokens that `tell` was told of since the last step.
        saving: The latest save in the background, perhaps under way, or None.
        undo: What `unwrap()` calls beside taking back what it knows of.
        recorders: The event files that are written.
        tracer: Records some steps for a timeline, if that was asked for.
        history: Measurements of the latest steps: ``step``, ``step_s`` (seconds since the previous step, 0.0
            for the first),
            ``device_peak_bytes`` (0 on the CPU) and ``host_peak_bytes`` (peak resident size of the process);
            ``predicted_device_bytes`` and ``predicted_host_bytes`` (what the plan of that step reckons with:
            weights, gradients, state, slots and activations of this model alone); ``tokens`` of the step as
            far as `tell` was told, and ``predicted_step_s`` for a step of as many (0.0: none was predicted).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        options: WrapOptions,
        block_map: BlockMap,
        plan: Plan,
        pager: WeightPager | None,
        tiers: Tiers,
        tuner: Tuner | None = None,
    ) -> None:
        """Keep the parts together; `start` begins measuring."""
        self.pager = pager
        self.tiers = tiers
        self.tuner = tuner
        self.model = model
        self.optimizer = optimizer
        self.options = options
        self.block_map = block_map
        self.plan = plan
        self.events = EventLog(level=logging.WARNING if options.verbose else logging.INFO)
        self.decisions: list[str] = []
        self.adapting = tuner is not None
        self.history: collections.deque[dict[str, float]] = collections.deque(maxlen=_HISTORY)
        self.steps = 0
        self.placement: PlacePolicy | None = None
        self.undo: list[Callable[[], None]] = []
        self.recorders: list[Recorder] = []
        self.tracer: Tracer | None = None
        self._last: float | None = None
        self.told = 0
        self._hooks: list[RemovableHandle] = []
        self._reach: ReachCheck | None = None
        self.relief: Relief
        self.kernels: Kernels | None = None
        self._snapshot: Snapshot | None = None
        self.saving: BackgroundSave | None = None
        self.watch = Watch(self)

    def adopt(self, places: Places) -> None:
        """Take over what is known about the model's units."""
        if self.tuner is not None:
            self.tuner.share(places)
        from trainstream._relief import Relief  # here: it needs this module

        self.relief = Relief(self, places)

    def replayed(self, run: Callable[[], _Result], undo: Callable[[], object] = lambda: None) -> _Result:
        """Run forward and backward of one micro-batch; where memory runs out, make room and run it again.

        Every bit is that of a run in which nothing happened: random numbers, buffers, gradients and counts
        of accumulation are what they were. It runs again four times at most. Not with an optimizer that
        updates during backward (``eager=True``), and not in a group of several ranks.

        Args:
            run: Runs both; holds no tensor of the pass beside what it returns.
            undo: Takes back what else `run` has changed, before it runs again.

        Returns:
            What `run` returns.

        Raises:
            Exception: What `run` raised; where memory ran out, with what was tried.

        Example:
            >>> loss = session.replayed(lambda: forward_and_backward(batch))  # doctest: +SKIP
        """
        return run_again(self, run, undo)

    def train_step(self, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] | None = None) -> Tensor:
        """Run one optimizer step over micro-batches: forward, backward, step.

            gradient = sum over micro-batches of d(loss / number of micro-batches)

        Gradients are set to None first, and stay readable after the step. Where memory runs out in a
        micro-batch, room is made and that micro-batch runs again; see `replayed`.

        Args:
            batches: The micro-batches: a mapping is given to the model as keyword arguments, a tuple or list
                as positional ones, anything else as the only one.
            loss: Given what the model returned and the micro-batch, returns the loss; None takes ``loss`` of
                the output, or an output that is a single number.

        Returns:
            The mean of the losses, without a graph, where they are.

        Raises:
            ArgumentError: No micro-batch, or an output without a loss (also a ``ValueError``).
            StateError: Nothing is trained (also a ``RuntimeError``).
            torch.OutOfMemoryError: Memory ran out, and nothing could make room; with what was tried.

        Example:
            >>> loss = session.train_step([{"input_ids": ids, "labels": ids}])  # doctest: +SKIP
        """
        return train_step(self, batches, loss)

    def set_budget(self, *, vram: Size = ..., ram: Size = ..., disk: Size = ...) -> None:
        """Give this run other limits while it is under way; between two steps.

        What does not fit any more leaves for its tier at once; what fits again returns when the next steps
        have been measured. None of this changes a bit of the result.

        Args:
            vram: What ``vram_budget`` of `wrap()` says: bytes, or a size such as "12GiB"; None lifts the
                limit. What is not given stays as it is.
            ram: Likewise, ``ram_budget``.
            disk: Likewise, ``disk_budget``.

        Raises:
            OptionError: No size (also a ``ValueError``).
            DoesNotFitError: The least placement takes more; nothing is changed (also a ``MemoryError``).

        Example:
            >>> session.set_budget(vram="8GiB")  # doctest: +SKIP
        """
        from trainstream._rebudget import set_budget  # here: it needs this module

        self.settle_save()
        set_budget(self, vram, ram, disk)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        background: bool = False,
        copy_bytes: int | str | None = None,
    ) -> BackgroundSave:
        """Save the weights (or adapters) and the optimizer's state as they are now, between two steps.

        The folder gets its name when everything is in it and on the disk; one that is there already stays
        whole until then. In the background training goes on meanwhile: the next step copies what it changes
        and what is not written yet, up to `copy_bytes`, and waits for the rest. One save at a time: another
        one, `unwrap()`, and blocks that leave for another tier wait for it. What goes wrong is raised by the
        next step or save, by `wait()` of what is returned, and logged at the end of the process.

        Args:
            folder: Made, or replaced: ``model.safetensors`` (or shards), or PEFT's adapter files, and
                ``optimizer.safetensors`` and ``trainstream.json`` (the plan) for `load_optimizer`.
            background: Return at once.
            copy_bytes: Bound of the copies, such as "2GiB"; None: 1 GiB or a tenth of the free RAM if less,
                and nothing under a RAM budget.

        Returns:
            The save: ``wait()``, ``done``, ``copied_bytes``, ``waited_s``.

        Raises:
            OSError: It cannot be written.

        Example:
            >>> saving = session.save("run/step-100", background=True)  # doctest: +SKIP
            >>> saving.wait()  # doctest: +SKIP
        """
        from trainstream._saves import save  # here: ts_hf need not be imported before

        return save(self, folder, background, copy_bytes)

    def load_optimizer(self, folder: str | os.PathLike[str]) -> None:
        """Take over the optimizer's state that `save` wrote, if this run computes with the same bits.

        Codec, moments, kernels and attention must be those that were saved, wherever things are now;
        attention that is still to be measured takes the saved backend. A refusal changes nothing.
        Where a process died while it gave a new folder the name of one that was there, that one is put back.

        Args:
            folder: As for `save`.

        Raises:
            CheckpointError: The file is missing, damaged, or of other parameters, or the run is of other
                numerics; the message names both values.
        """
        from trainstream._saves import load_optimizer  # as in save()

        load_optimizer(self, folder)

    def settle_save(self) -> None:
        """Wait for a save under way in the background; what went wrong with it is raised."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()

    def copy_bytes(self) -> int | None:
        """What a save in the background may copy: nothing where RAM has a budget."""
        limits = self.relief.places.limits
        return 0 if self.plan.device == "cpu" and limits.cap is not None else None

    def snapshot(self) -> None:
        """Keep what training changes, to come back to it with `rollback`; the one kept before is given up.

        Trained weights, the optimizer's state and hyperparameters, buffers and random numbers are copied to
        RAM, or to files where that is short; between two steps. A learning-rate scheduler is the caller's.

        Raises:
            DoesNotFitError: Neither has room (also a ``MemoryError``); nothing is changed.

        Example:
            >>> session.snapshot()  # doctest: +SKIP
        """
        if self._snapshot is not None:
            self._snapshot.discard()
            self._snapshot = None
        self._snapshot = taken = Snapshot.take(self)
        size = format_bytes(taken.nbytes)
        self.events.add(f"snapshot after step {taken.step}: {size} in {taken.where}")

    def rollback(self) -> None:
        """Go back to the latest `snapshot`, to the bit; gradients are dropped. May be called again.

        Raises:
            StateError: There is none (also a ``RuntimeError``).

        Example:
            >>> session.rollback()  # doctest: +SKIP
        """
        self.settle_save()
        self.events.add(rolled_back(self, self._snapshot))

    def decide(self, line: str) -> None:
        """Record how an ``"auto"`` option was decided."""
        self.decisions.append(line)
        self.events.add(line)

    def start(self) -> None:
        """Measure every optimizer step from now on."""
        if self.optimizer is not None:
            self._reach = ReachCheck(self.model, self.optimizer)
            self._hooks = [
                self.optimizer.register_step_pre_hook(self._before_step),
                self.optimizer.register_step_post_hook(self._after_step),
            ]
        if self.tuner is not None:
            self.tuner.start()
        self.watch.start()
        if os.environ.get(VARIABLE):
            self.record(os.environ[VARIABLE])
        if os.environ.get(TRACE_VARIABLE):
            self.trace(os.environ[TRACE_VARIABLE])

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Write an event file from now on: a JSON line for every step and event.

        Args:
            path: The file; lines are appended. Ranks above 0 write one of their own beside it.

        Returns:
            What writes it; it is closed by `unwrap()` and at the end of the process.

        Raises:
            OptionError: It cannot be written.
        """
        recorder = Recorder(self, path)
        self.recorders.append(recorder)
        return recorder

    def tell(self, tokens: int) -> None:
        """Tell of tokens that are trained on, before the step ends; `train_step` does it by itself."""
        self.told += tokens
        for recorder in self.recorders:
            recorder.tell(tokens)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Record the first settled steps with torch's profiler, as a Chrome trace.

        Args:
            path: The file, `.json` or `.json.gz`; it is written when the steps are over.
        """
        self.tracer = Tracer(path)

    def stop(self) -> None:
        """Drain pending work and remove the session's hooks."""
        synchronize = getattr(self.optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
        self.settle_save()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.watch.stop()
        if self._snapshot is not None:
            self._snapshot.discard()
            self._snapshot = None
        self.end_records()
        if self.tuner is not None:
            self.tuner.stop()

    def end_records(self) -> None:
        """Complete the trace and the event files."""
        if self.tracer is not None:
            self.tracer.finish(self)
        for recorder in self.recorders:
            recorder.close()
        self.recorders.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._reach is not None:
            self._reach.before(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        self.steps += 1
        cuda = self.plan.device.startswith("cuda")
        self.history.append(
            {
                "step": self.steps,
                "step_s": now - self._last if self._last is not None else 0.0,
                "device_peak_bytes": torch.cuda.max_memory_allocated(self.plan.device) if cuda else 0,
                "host_peak_bytes": host_peak_bytes(),
                "predicted_device_bytes": self.plan.predicted.get("device", 0)
                + self.plan.predicted.get("activations", 0),
                "predicted_host_bytes": self.plan.predicted.get("host", 0),
                "tokens": self.told,
                "predicted_step_s": step_seconds(self.plan.predicted, self.told) or 0.0,
            }
        )
        self.told = 0
        self._last = now
        if self.tuner is not None:
            self.tuner.after_step(self)
        self.watch.after_step()
        for recorder in self.recorders:
            recorder.step(self, self.history[-1])
        if self.tracer is not None:
            self.tracer.step(self)
        if self._reach is not None and self._reach.after(optimizer):
            reach, self._reach = self._reach, None
            idle = reach.finish()
            if idle:
                self.events.add(idle)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a wrapped model is a plain model: session, hooks and optimizer stay behind."""
        return

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None, for the same reason."""
        return type(None), ()


class Instead:
    """Stands in the place of a method on a wrapped model; copies and pickles get the class's own again."""

    def __init__(self, model: nn.Module, name: str, run: Callable[..., Any]) -> None:
        """Stand in for `name` of `model`; `run` is called with the model first."""
        self._model = weakref.ref(model)
        self._name = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run`."""
        return self._run(self._model(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has the class's own method."""
        model = self._model()
        return types.MethodType(getattr(type(model), self._name), memo[id(model)])

    def __reduce__(self) -> Any:
        """The same for a pickled one, whose own dictionary is still empty when this is looked up."""
        return getattr, (self._model(), self._name)


def zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Do what ``Module.zero_grad`` does without reading the gradients, which would wait for updates."""
    if not set_to_none:
        nn.Module.zero_grad(model, set_to_none=False)
        return
    for parameter in model.parameters():
        parameter.grad = None


def converting(pager: WeightPager) -> Callable[..., Any]:
    """Return what looks at every paged block before the first part of a model is converted."""

    def apply(model: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        for block in (*pager.blocks, *pager.edges):
            block.refuse_conversion(fn)
        convert: Any = type(model)._apply
        return convert(model, fn, recurse)

    return apply


def host_peak_bytes() -> int:
    """Return the peak resident size of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes, macOS bytes


def session_of(model: nn.Module) -> Session | None:
    """Return the session of a wrapped model, or None."""
    session = getattr(model, "_trainstream_session", None)
    return session if isinstance(session, Session) and session.model is model else None
