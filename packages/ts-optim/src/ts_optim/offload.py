"""OffloadAdamW: AdamW with its state in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import ParamsT

from ts_core.errors import ArgumentTypeError, OptionError
from ts_core.guard import guard_of
from ts_core.options import boolean
from ts_core.trace import span

from .auto import ModeChoice, step_seconds
from .averaging import Averaging
from .checkpoint import checked_groups, checked_states
from .deferred import PendingUpdates, await_others
from .eager import EagerUpdates
from .gradients import Arrivals
from .hooks import BackwardCounter
from .kernel import Clock, Measures
from .moments import MOMENT_DTYPES
from .options import OffloadOptions, check_group, hyper_of
from .placement import PlacePolicy, place_by_size
from .reports import decoded
from .roster import Positions, Roster
from .slots import Slot, StateMaker
from .stepping import SEED
from .transfer import Work

if TYPE_CHECKING:
    from types import EllipsisType

__all__ = ["OffloadAdamW"]

_TIMES = ("kernel_s", "norm_s", "wait_s", "average_s")
_COUNTS = ("steps", "skipped_steps", "d2h_bytes", "h2d_bytes")


class OffloadAdamW(EagerUpdates):
    """AdamW whose moments and fp32 weights live in host memory, updated by native host kernels.

        g <- grad * min(1, max_grad_norm / (norm + 1e-6))
        m <- m + (1 - beta1) (g - m);  v <- v + (1 - beta2) (g^2 - v)
        p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    A drop-in for `torch.optim.AdamW`: param groups, schedulers, closures, `clip_grad_norm_`, `GradScaler` and
    state dicts (both ways) work as with it, and fp32 results are within 3e-7 after 20 steps. t counts the
    steps of each parameter on its own; a parameter without a gradient is skipped, a frozen one owns no state.

    Parameters and their state, in bytes of host memory a parameter with float32 / bfloat16 / int8 moments (2
    more for a 16-bit weight itself):

    - CPU, float32: updated in place; 8 / 4 / 2.03.
    - CPU, bfloat16 / float16: an fp32 master is updated and rounded into the parameter in the same pass;
      12 / 8 / 6.03. The parameter stays the truth: an element edited since the last step replaces its master.
    - CUDA, `place(param) == "host"`: the gradient is copied to the host, updated weights are copied back;
      12 / 8 / 6.03, and a buffer for the gradient. Edits through `param.data` are not seen here; edit the
      parameter. With `mode="gpu"` a CUDA kernel reads and writes page-locked host state in place instead
      (float32 weights then need no copy on the host: 8 / 4), and `step()` returns when that is complete.
    - CUDA, `place(param) == "device"`: state beside the parameter, CUDA kernel. The bits are the same.
    - float64: plain PyTorch, float64 moments, where the parameter is.

    **bfloat16 moments** are rounded stochastically: the 16 bits cut off are the chance to go up, so that
    small changes (0.1 % of v a step) are neither lost nor biased. **int8 moments** are one byte each, in
    blocks of 256 elements: s = sqrt(v) as an unsigned small float (32 values an octave down to 2^-4, 16
    down to 2^-12) times the block's largest s, rounded stochastically but never to 0; m / s as a signed one
    (32 an octave down to 2^-3, 8 down to 2^-7) times the largest |m| / s, rounded to nearest
    (stochastically for beta1 >= 0.9375, where nearest would keep it from decaying). m is 0 where v is, and
    its ratio to s never grows, so no update can blow up when gradients stop. Weights miss those of float32
    moments by about 0.4 % (bfloat16) and 1 % (int8) of their movement after 30 steps. Random bits come from
    a counter (Philox: seed, parameter, element; turned by the golden ratio in each step): results do not
    depend on threads, place or resuming.

    `step()` commits all updates: checks, norm, clipping factor, lr and decay are those of its call. Weights
    and state are complete when it returns (for "device" in the order of the current stream), but for guarded
    CPU parameters (`ts_core.guard`: paged weights, except float64). Their updates run on host threads behind
    whatever comes next, first those that the next forward pass needs first, and each is due at the next use
    of its parameters: using one, reading its `.grad`, a checkpoint, evaluation wait for it, and the bits are
    those of an update within `step()`. Until then

    - `zero_grad()` and assigning `p.grad` do not wait: the update holds the gradient it was given;
    - a gradient tensor kept elsewhere must not be changed in place: the update raises `StateError` then, at
      the next use of its parameters, and writes nothing (the same for state tensors kept elsewhere);
    - `optimizer.state`, `state_dict()`, `stats()` and copies of the optimizer wait for everything; tensors
      taken out of them earlier do not.

    All checks of a step come before its first write. Gradients accumulate in `p.grad` as PyTorch does it, in
    the parameter's dtype; they are not consumed by the step. With `accumulate_fp32` the second gradient of a
    16-bit parameter turns `p.grad` into an fp32 tensor, fp32(g1) + fp32(g2), and further ones are added to
    it, in the order of backward passes; the first alone keeps its dtype.

    **eager=True**: a parameter is updated during backward, the moment the last of its `accumulation_steps`
    gradients is complete, with the lr and decay of that moment; guarded ones are started when their gradients
    have landed, at the end of the pass. The bits are those of updates by `step()`, which then finishes what
    is left, and counts. What it costs:

    - a backward pass that fails, or is interrupted, cannot be undone: part of the weights have moved, in
      memory no copy of what they were is kept, and the next `step()` does not bring them back;
    - gradients are used up: `p.grad` holds a stand-in that raises `StateError` when its value is read
      (`clip_grad_norm_` does), and that `zero_grad`, setting None and the next pass do away with. A second
      `step()` is a no-op;
    - a second backward pass over the same graph (`retain_graph`) is refused by autograd, for weights that it
      saved;
    - a `GradScaler` is refused.

    With `max_grad_norm` or `skip_nonfinite` all gradients have to be there first: then `eager=True` updates
    by `step()`, clipped exactly.

    Args:
        params: Parameters, named parameters or dicts of groups, as for any torch optimizer.
        lr: Learning rate; a float or a tensor of one element.
        betas: Decay rates of the moments, in [0, 1).
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        mode: Where state in host memory is updated, for CUDA parameters: "cpu", by host threads; "gpu", by a
            CUDA kernel over the link, where that memory is page-locked (else as "cpu"; not with int8
            moments). CPU parameters are always updated by host threads. "auto": what is faster, measured once
            in the process with a sample of some tens of MB, by device and format of moments; "cpu" without a
            GPU, with int8 moments, or where page-locking is refused; `stats()` says which, and why. The bits
            are the same.
        max_grad_norm: Clip by the global 2-norm of all gradients inside `step()`, computed in float64 in a
            fixed order. None: no clipping.
        accumulation_steps: Backward passes accepted between steps: the next one raises `StateError`.
            `zero_grad()` of this optimizer starts the count again. None: any number.
        eager: True updates during backward; needs a number of `accumulation_steps`. None and False do not.
        pin_moments: Page-lock host state. None: that of CUDA parameters, up to 40 % of the RAM (a
            container's, shared by its ranks), and always what a CUDA kernel works on; the rest is in ordinary
            memory.
        moment_dtype: "float32", "fp32", torch.float32 or "auto"; "bfloat16", "bf16" or torch.bfloat16;
            "int8", "8bit" or torch.int8.
        threads: Host threads; None takes `torch.get_num_threads()`, at most the cores that this process may
            use, and for updates behind `step()` one less of four or more where CUDA is in use. Results do not
            depend on it.
        distributed: Data parallel training: rank 0's weights go to all ranks when the optimizer is made and
            when a group is added, and `step()` replaces every `p.grad` by its average over the ranks of
            `torch.distributed`'s default group, before it clips. Each rank keeps the whole state. All ranks
            make the same calls; with mode "cpu", without eager, and without a `GradScaler`, whose ranks
            would each look for infinities on their own.
        place: Where the state of a CUDA parameter lives; see `place_by_size`.
        measure_grad_norm: Measure `last_grad_norm` without clipping.
        skip_nonfinite: Skip a step whose gradients hold NaN or infinity: nothing is written. False behaves as
            torch does; `stats()["nonfinite"]` says which parameter it was, if the norm is measured.
        ema: Decay d of a moving average of the fp32 weights, e <- d e + (1 - d) p after each step, that
            starts with the weights before the first one. It is updated in the same pass and lives where the
            state does (4 more bytes), in `state[param]["ema"]`; see the method `ema_weights`. A parameter's
            average moves in the steps in which it has a gradient. None: no average.
        measure_updates: Measure gradient, update and weight of every tensor in the same pass; see the method
            `tensor_stats`.
        accumulate_fp32: Sum the gradients of 16-bit parameters in fp32; `p.grad` then has 4 bytes a
            parameter from the second backward pass on. Other optimizers of the same parameters may refuse
            such gradients, as torch's do. None: as `trainstream.wrap` likes it, which does; by itself, no.
        seed: Of stochastic rounding; a number from 0. It is saved in the state dict's groups as
            "rounding_seed", and a loaded one replaces it.

    Raises:
        OptionError: A value outside the accepted ones, or distributed=True without a process group.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = OffloadAdamW([weight], lr=0.1, weight_decay=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.9000, 0.9000], requires_grad=True)

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; block-wise 8-bit states: Dettmers et al.,
    https://arxiv.org/abs/2110.02861; stochastic rounding: Gupta et al., https://arxiv.org/abs/1502.02551.
    """

    # GradScaler then hands us grad_scale and found_inf instead of unscaling in place: fp16 weights work too.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        mode: str = "cpu",
        max_grad_norm: float | None = None,
        accumulation_steps: int | None = 1,
        eager: bool | None = None,
        pin_moments: bool | None = None,
        moment_dtype: str | torch.dtype = "float32",
        threads: int | None = None,
        distributed: bool = False,
        place: PlacePolicy = place_by_size,
        measure_grad_norm: bool = False,
        skip_nonfinite: bool = False,
        ema: float | None = None,
        measure_updates: bool = False,
        accumulate_fp32: bool | None = None,
        seed: int = 0,
    ) -> None:
        """See the class."""
        self._options = OffloadOptions(
            mode=mode,
            max_grad_norm=max_grad_norm,
            accumulation_steps=accumulation_steps,
            eager=eager,
            pin_moments=pin_moments,
            moment_dtype=moment_dtype,
            threads=threads,
            distributed=distributed,
            place=place,
            measure_grad_norm=measure_grad_norm,
            skip_nonfinite=skip_nonfinite,
            ema=ema,
            measure_updates=measure_updates,
            accumulate_fp32=accumulate_fp32,
            seed=seed,
        )
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._start()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        hyper_of(defaults)
        if self._options.moments != "float32":
            defaults[SEED] = seed
        super().__init__(params, defaults)
        self._decode_exports()

    def _start(self) -> None:
        """Set up everything that is neither options nor state."""
        self._choice = ModeChoice(self._options, partial(step_seconds, OffloadAdamW))
        self._maker = StateMaker(
            self._options.place,
            self._options.pin_moments,
            MOMENT_DTYPES[self._options.moments],
            ema=self._options.ema is not None,
            in_place=self._choice.in_place,
        )
        self._slots: dict[torch.Tensor, Slot] = {}
        self._roster: Roster | None = None
        self._numbered: Positions | None = None
        self._names: dict[torch.Tensor, str] = {}
        self._attached = False
        self._norm: float | None = None
        self._nonfinite: tuple[int, str] | None = None
        self._first_nonfinite: tuple[int, str] | None = None
        self._measures = Measures() if self._options.measure_updates else None
        self._averaging = Averaging() if self._options.distributed else None
        self._pending = PendingUpdates()
        self._clock = Clock(*_TIMES)
        self._moved = dict.fromkeys(_COUNTS, 0)
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self._sums: dict[int, tuple[float, torch.Tensor]] = {}
        self._begun = False
        self._start_eager()
        self._counter: BackwardCounter | None = None
        self._arrivals: Arrivals | None = None
        self._start_watching()

    def _start_watching(self) -> None:
        """Set up what listens to backward passes, by the options."""
        self._watched: Positions | None = None
        self._unwatched: list[torch.Tensor] = []
        if self._counter is not None:
            self._counter.close()
        limit = self._options.accumulation_steps
        complete = self._update_now if self._options.in_backward else None
        self._counter = None if limit is None else BackwardCounter(limit, self._name, complete)
        wide = bool(self._options.accumulate_fp32)
        if self._arrivals is not None:
            self._arrivals.wide = wide  # it knows which parameters take fp32 gradients by now
        elif wide or self._options.eager:
            self._arrivals = Arrivals(wide=wide)

    # -- what users call ---------------------------------------------------------------------------------

    @property
    def works_in_backward(self) -> bool:
        """Whether parameters are updated while `backward()` runs."""
        return self._options.in_backward

    @property
    def needs_norm(self) -> bool:
        """Whether a step has to look at all gradients before it updates the first parameter."""
        return self._options.needs_norm

    def reconfigure(
        self,
        *,
        max_grad_norm: float | EllipsisType | None = ...,
        accumulation_steps: int | EllipsisType | None = ...,
        threads: int | EllipsisType | None = ...,
        accumulate_fp32: bool | EllipsisType | None = ...,
    ) -> None:
        """Change options between two steps; what is not named stays. See the class for their meaning.

        Args:
            max_grad_norm: Limit of the norm, or None.
            accumulation_steps: Backward passes accepted between steps, or None; counting starts again.
            threads: Host threads, or None.
            accumulate_fp32: As in the class; a sum that has begun keeps its dtype.

        Raises:
            OptionError: A value outside the accepted ones; nothing is changed then.

        Example:
            >>> optimizer = OffloadAdamW([torch.nn.Parameter(torch.ones(2))])
            >>> optimizer.reconfigure(max_grad_norm=1.0, accumulation_steps=None)
        """
        asked = {
            "max_grad_norm": max_grad_norm,
            "accumulation_steps": accumulation_steps,
            "threads": threads,
            "accumulate_fp32": accumulate_fp32,
        }
        changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not ...}
        options = replace(self._options, **changes)
        self._drain()
        watching = options.accumulation_steps != self._options.accumulation_steps
        watching = watching or bool(options.accumulate_fp32) != bool(self._options.accumulate_fp32)
        watching = watching or options.in_backward != self._options.in_backward
        self._options = options
        if watching:
            self._start_watching()
            self._watch()

    @property
    def accumulate_fp32(self) -> bool | None:
        """Whether gradients of 16-bit parameters add up in fp32; None if nobody has said."""
        return self._options.accumulate_fp32

    def works_in_place(self, param: torch.Tensor) -> bool:
        """Tell whether a CUDA kernel updates the host state of parameters like this one.

        Args:
            param: A CUDA tensor; only its device and dtype count. ``mode="auto"`` measures once for each.
        """
        return self._choice.in_place(param)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """Moments, masters and step counts by parameter, when every pending update has run."""
        self._drain()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._drain()
        self._roster = None
        self._state = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; guarded CPU ones behind what comes next.

        Args:
            closure: Reevaluates the model and returns the loss, run with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            ArgumentTypeError: Sparse or complex gradient, or a dtype that is not trained.
            ArgumentError: A gradient that does not fit its parameter.
            OptionError: A group's lr, betas, eps or weight_decay is out of range.
            StateError: A state tensor that does not fit its parameter, an update of the last step failed, or
                another rank did.
            All are raised before anything is written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_backward()
        await_others(self._unfinished_params())
        # Nothing is pending now on what is updated, and reads of ours are no escapes.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), span("ts/optim/step"):
            hyper = [hyper_of(group) for group in self.param_groups]
            self._average()
            works = self._found()
            scale = self._scale(works)
            later: list[list[Work]] = []
            terms = None
            if scale is None:
                self._moved["skipped_steps"] += 1
            else:
                terms = self._terms(hyper, scale)
                later = self._update(works, terms, hyper)
                self._await_kernels(works)
                self._moved["steps"] += 1
        if terms is not None and later:
            self._pending.commit(later, terms, self._name)
        self._begun, self._sums = False, {}
        if self._counter is not None:
            self._counter.reset()
        self._watch()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients, and start counting backward passes again.

        Args:
            set_to_none: Set `p.grad` to None, which does not wait for pending updates; else wait for them and
                fill it with zeros.
        """
        if set_to_none:
            with torch.profiler.record_function(self._zero_grad_profile_name):
                for group in self.param_groups:
                    for param in group["params"]:
                        if guard_of(param) is None:
                            param.grad = None
                        else:  # not even read: reading waits; and past its class, which has nothing to do
                            with torch._C.DisableTorchFunctionSubclass():
                                param.grad = None
        else:
            self._drain()
            super().zero_grad(set_to_none=False)
        if self._counter is not None:
            self._counter.reset()
        self._watch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, for instance of layers that were just unfrozen.

        Args:
            param_group: "params" and, if they differ from the defaults, lr, betas, eps, weight_decay.

        Raises:
            OptionError: A value is out of range, or asks for arithmetic we do not have (amsgrad, maximize).
        """
        if isinstance(param_group, dict):
            merged = {**self.defaults, **param_group}
            switch = check_group(merged, hyper_of(merged)[-1])
            if switch is not None:
                raise OptionError(
                    f"option {switch}: not supported; this is AdamW without AMSGrad, minimizing, with "
                    "decoupled decay"
                )
        before = len(self._positions().all)
        super().add_param_group(param_group)
        if self._averaging is not None:
            self._averaging.share_weights([param for _, _, param in self._positions().all[before:]])
        self._watch()

    def attach(self, model: torch.nn.Module, guard: bool = True) -> OffloadAdamW:
        """Learn the parameters' names, for error messages and `stats()`.

        Args:
            model: The model that the parameters belong to.
            guard: Block reads until a pending update lands. Updates are pending only on parameters that are
                guarded by who pages them, so there is nothing to do here.

        Returns:
            This optimizer.

        Raises:
            ArgumentTypeError: Not a module.
        """
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(
                f"[OffloadAdamW.attach] model: expected a torch.nn.Module, given {type(model).__name__}"
            )
        boolean("guard", guard)
        self._names = {param: name for name, param in model.named_parameters()}
        self._attached = True
        return self

    def detach(self) -> None:
        """Forget the model's names; state and training are not touched."""
        self.synchronize()
        self._names = {}
        self._attached = False

    def synchronize(self) -> None:
        """Wait until every update is complete.

        Raises:
            StateError: An update failed after `step()`; its parameters and their state are as they were
                before that step. Training can go on after it was raised here.
        """
        try:
            self._drain()
        except Exception:
            self._pending.forget()
            raise
        for device in {s.param.device for s in self._slots.values() if s.param.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    # -- state dict, copies ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class or of `torch.optim.AdamW`.

        Every tensor is copied to where this optimizer keeps it; none moves to a device because its parameter
        is there. A 16-bit parameter without "master" gets one from its present value, and one without "ema"
        starts its average there. Moments are converted to this optimizer's `moment_dtype`, to nearest; those
        that it saved itself come back to the bit, so a resumed run goes on as if it had not stopped.

        Args:
            state_dict: The state dict; not changed and not kept.

        Raises:
            ArgumentTypeError: Not a state dict.
            CheckpointError: It belongs to other parameters, or to another algorithm (amsgrad, maximize,
                coupled decay). Nothing is changed then.
        """
        self._drain()
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        loaded = checked_groups(state_dict, self.param_groups)
        pairs = checked_states(state_dict, loaded, self.param_groups)
        with torch.no_grad():
            states = self._make_states(pairs, copy=True)
        for mine, other in zip(self.param_groups, loaded, strict=True):
            other["params"] = mine["params"]
        self.param_groups = loaded
        for old in self._state.values():
            self._maker.discard(old.values())
        self._maker.discard(slot.master for slot in self._slots.values() if slot.staged)
        self._keep_seed()
        self._roster = None
        self._state.clear()
        self._state.update(states)
        self._slots.clear()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _keep_seed(self) -> None:
        for group in self.param_groups:
            if SEED in self.defaults:
                group.setdefault(SEED, self.defaults[SEED])

    def _decode_exports(self) -> None:
        if self._options.moments == "int8":
            self.register_state_dict_post_hook(decoded, prepend=True)

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy take along: options, groups, state and names; no hooks, no buffers."""
        return {**super().__getstate__(), "_options": self._options, "_copied_names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy and let it watch its own parameters."""
        names = state.pop("_copied_names", {})
        self._state = state.pop("state")
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)
        self._start()
        self._names = names
        self._attached = bool(names)
        self._keep_seed()
        self._decode_exports()
        self._watch()

    def _watch(self) -> None:
        watchers = [each for each in (self._counter, self._arrivals) if each is not None]
        if not watchers:
            return
        positions = self._positions()
        if positions is not self._watched:
            self._places = {param: (index, number) for index, number, param in positions.all}
            self._watched, self._unwatched = positions, list(self._places)
        if self._unwatched:
            for param in self._unwatched:
                for watcher in watchers:
                    watcher.watch(param)
            # One that needs no gradient may need it later.
            self._unwatched = [p for p in self._unwatched if not (p.requires_grad and p.is_leaf)]
