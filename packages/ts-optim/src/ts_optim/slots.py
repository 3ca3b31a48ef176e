"""What the optimizer keeps for one parameter: state of the right dtype, place and layout, and flat views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, StateError
from ts_core.registry import host_allocator

from .moments import block_count, flat, is_dense, pack, unpack
from .pinning import pin_share
from .placement import MemoryProvider, Place, PlacePolicy, StateMemory

__all__ = ["KEPT", "Slot", "State", "StateMaker", "check_param", "flat_gradient", "fresh_step", "is_dense"]

State = dict[str, Any]
Bucket = tuple[str, bool, torch.device]

#: What an entry of `optimizer.state` may hold: scales beside int8 moments, "master" for 16-bit parameters
# only.
KEPT = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "master", "ema")

_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
_SCALE_NAMES = ("exp_avg_scale", "exp_avg_sq_scale")

_LOW = (torch.bfloat16, torch.float16)
_SUPPORTED = (torch.float32, torch.float64, *_LOW)


def is_remote(param: torch.Tensor) -> bool:
    """Tell whether a parameter lives elsewhere than in host memory."""
    return param.device.type != "cpu"


def check_param(param: torch.Tensor, grad: torch.Tensor, name: str) -> None:
    """Refuse what cannot be updated.

    Args:
        param: The parameter.
        grad: Its gradient.
        name: For the message.

    Raises:
        ArgumentTypeError: Sparse or complex gradient, or a dtype that is not trained.
        ArgumentError: The gradient's shape differs, or elements of the parameter share memory.
    """
    where = f"[OffloadAdamW.step] {name}"
    if grad.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{where}: expected a dense gradient, given layout {grad.layout}. Use sparse=False in the "
            "embedding, or torch.optim.SparseAdam for it"
        )
    if grad.is_complex() or param.is_complex():
        raise ArgumentTypeError(
            f"{where}: expected a real parameter, given {dtype_name(param.dtype)}. Train torch.view_as_real "
            "of it"
        )
    if param.dtype not in _SUPPORTED or grad.dtype not in _SUPPORTED:
        names = ", ".join(dtype_name(dtype) for dtype in _SUPPORTED)
        raise ArgumentTypeError(
            f"{where}: expected one of {names}, given a parameter of {dtype_name(param.dtype)} with a "
            f"gradient of {dtype_name(grad.dtype)}"
        )
    if grad.shape != param.shape or grad.device != param.device:
        raise ArgumentError(
            f"{where}: expected a gradient of shape {tuple(param.shape)} on {param.device}, given "
            f"{tuple(grad.shape)} on {grad.device}"
        )


@dataclass
class Slot:
    """One parameter ready for the kernels; valid while `key` and the state's tensors stay what they were.

    Attributes:
        param: The parameter.
        place: "host" or "device"; a CPU parameter counts as "host".
        staged: Its gradient and weights cross to the host and back in each step.
        dense: Its memory can be used as it is; else the step works on a copy.
        weights: The parameter as one dimension, in the order of its memory; the parameter if not dense.
        master: state["master"] as one dimension, or for a staged fp32 parameter a copy on the host. None
            where the parameter itself is what the kernel updates.
        exp_avg, exp_avg_sq: Flat views of the moments.
        scales: Scales of int8 moments, of the first and the second; else empty.
        ema: Flat view of the moving average of the weights, or None.
        in_place: The parameter is on a device, and kernels there reach its state in host memory.
        state: The entry of `optimizer.state` that the views belong to.
        low: The parameter is a 16-bit one with an fp32 master.
        bucket: What can share one kernel call with it: kind, `low`, device.
        direct: Kernels take its contiguous gradients as they are; it is contiguous itself.
        home: Where the memory of the moments is from; None is the default memory.
        watched: What the kernels read beside the gradient: weights, then the state's tensors in the order of
            `KEPT`.
        written: What host kernels write, apart from masters.
        staging: Host buffer of the gradient (flat), for staged ones; made at the first step.
        leaving: Host buffer of updated 16-bit weights, where gradients are wider.
        version: Version counter of the parameter after our last write, for staged ones.
    """

    param: torch.Tensor
    key: tuple[Any, ...]
    place: Place
    staged: bool
    dense: bool
    state: State
    tensors: tuple[Any, ...]
    weights: torch.Tensor
    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: tuple[torch.Tensor, ...] = ()
    ema: torch.Tensor | None = None
    in_place: bool = False
    low: bool = False
    bucket: Bucket = ("plain", False, torch.device("cpu"))
    direct: bool = False
    home: StateMemory | None = None
    watched: tuple[torch.Tensor, ...] = ()
    written: tuple[torch.Tensor, ...] = ()
    staging: torch.Tensor | None = None
    leaving: torch.Tensor | None = None
    version: int = -1

    @property
    def deferrable(self) -> bool:
        """Whether its update may run after `step()`, if its users wait for that.

        float64 ones run in many operations, which an interrupt could split.
        """
        return self.bucket[0] == "plain" and self.bucket[2].type == "cpu"

    def current(self, key: tuple[Any, ...], state: State) -> bool:
        """Tell whether nobody has exchanged the parameter's memory or the state's tensors since."""
        return self.key == key and self.state is state and self.tensors == _identity(state)


def _identity(state: State) -> tuple[Any, ...]:
    return tuple(id(state.get(name)) for name in KEPT)


def is_reachable(t: torch.Tensor) -> bool:
    """Tell whether kernels on a device can read and write a host tensor."""
    return t.numel() == 0 or t.is_pinned()


def _tensors(state: State) -> list[torch.Tensor]:
    return [state[name] for name in KEPT[1:] if name in state]


def _scales_of(state: State) -> tuple[torch.Tensor, ...]:
    return tuple(state[name].detach() for name in _SCALE_NAMES if name in state)


def _same_layout(t: torch.Tensor, param: torch.Tensor) -> bool:
    return t.stride() == param.stride() if is_dense(param) else t.is_contiguous()


def only_in(state: State, other: State) -> list[torch.Tensor]:
    """List the tensors of one entry that the other does not hold."""
    kept = {id(t) for t in other.values()}
    return [t for t in state.values() if id(t) not in kept]


def key_of(param: torch.Tensor) -> tuple[Any, ...]:
    """What a slot's views depend on."""
    return param.data_ptr(), param.dtype, param.device, param.shape, param.stride()


def fresh_step(value: float) -> torch.Tensor:
    """Make a step counter: a 0-d float32 CPU tensor, as torch's AdamW has it."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


class StateMaker:
    """Makes and repairs state entries and slots; writes nothing to the optimizer."""

    def __init__(
        self,
        place: PlacePolicy,
        pin: bool | None,
        moments: torch.dtype = torch.float32,
        *,
        ema: bool = False,
        in_place: Callable[[torch.Tensor], bool] = lambda param: False,
    ) -> None:
        """Remember the policy.

        Args:
            place: Where the state of a CUDA parameter lives.
            pin: Page-lock host state: None does so for CUDA parameters, as far as `pin_share` allows.
            moments: float32, bfloat16, or uint8 for packed ones.
            ema: Keep a moving average of the weights.
            in_place: Whether device kernels work on the page-locked host state of a parameter.
        """
        self._moments = moments
        self._ema = ema
        self._in_place = in_place
        #: Where the state of a CUDA parameter lives.
        self.policy = place
        self._pin = pin
        #: Gives memory for the state of some parameters; None for all is the default.
        self.provider: MemoryProvider | None = None
        # State tensor -> where its memory is from; those from the default memory are not here.
        self._homes: MutableMapping[torch.Tensor, StateMemory] = WeakTensorKeyDictionary()

    def place_of(self, param: torch.Tensor) -> Place:
        """Ask the policy, for parameters that are not in host memory.

        Raises:
            ArgumentError: The policy answered something else than "host" or "device".
        """
        if not is_remote(param):
            return "host"
        if param.dtype is torch.float64:
            return "device"
        place = self.policy(param)
        if place not in ("host", "device"):
            raise ArgumentError(
                f"[OffloadAdamW] place: expected 'host' or 'device' for a parameter of shape "
                f"{tuple(param.shape)}, given {place!r}"
            )
        return place

    def memory_of(self, param: torch.Tensor, place: Place) -> StateMemory | None:
        """Ask the provider for the memory of a parameter's state; None is the default memory.

        Raises:
            ArgumentTypeError: It gave something that makes no memory.
        """
        memory = self.provider(param) if self.provider is not None and place == "host" else None
        if memory is not None and not hasattr(memory, "empty"):
            raise ArgumentTypeError(
                f"[OffloadAdamW.set_memory] provider: expected None or an object with empty(nbytes), given "
                f"{memory!r}"
            )
        return memory

    def home(self, t: torch.Tensor) -> StateMemory | None:
        """Say where the memory of a state tensor is from; None is the default memory."""
        return self._homes.get(t)

    def discard(self, tensors: Iterable[Any]) -> None:
        """Tell provided memory which state tensors are needed no more."""
        for t in tensors:
            memory = self._homes.pop(t, None) if isinstance(t, torch.Tensor) else None
            drop = getattr(memory, "drop", None)
            if drop is not None:
                drop(t)

    def _empty(
        self, param: torch.Tensor, dtype: torch.dtype, place: Place, *, scales: bool = False
    ) -> torch.Tensor:
        """Make memory with the parameter's strides where it is dense, contiguous where not; or for scales."""
        on_host = place == "host"
        device = torch.device("cpu") if on_host else param.device
        numel = block_count(param.numel()) if scales else param.numel()
        shape = torch.Size((numel,)) if scales else param.shape
        dense = not scales and is_dense(param)
        memory = self.memory_of(param, place) if numel else None
        pin = memory is None and on_host and numel > 0 and self._locks(param, numel * dtype.itemsize)
        if memory is None and not pin:
            if not dense:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, param.stride(), dtype=dtype, device=device)
        line = (memory or host_allocator()).empty(numel * dtype.itemsize).view(dtype)
        made = line.as_strided(shape, param.stride()) if dense else line.view(shape)
        if memory is not None:
            self._homes[made] = memory
        elif self._pin is None:
            pin_share.note(made, numel * dtype.itemsize)
        return made

    def _locks(self, param: torch.Tensor, nbytes: int) -> bool:
        """Tell whether so much state of a parameter is page-locked."""
        if self._pin is not None or not is_remote(param):
            return bool(self._pin)
        # What a kernel on the device works on has to be.
        return self._in_place(param) or pin_share.has_room(nbytes)

    def _zeros(
        self, param: torch.Tensor, dtype: torch.dtype, place: Place, *, scales: bool = False
    ) -> torch.Tensor:
        """Make zeros; what is zeros already (a new file) is not written through its pages."""
        made = self._empty(param, dtype, place, scales=scales)
        return made if getattr(self.home(made), "gives_zeros", False) else made.zero_()

    def _fit(
        self,
        t: Any,
        param: torch.Tensor,
        dtype: torch.dtype,
        place: Place,
        copy: bool,
        rehouse: bool = False,
        *,
        scales: bool = False,
    ) -> torch.Tensor:
        """Give a state tensor the dtype, device and layout it must have; itself when it has them."""
        device = torch.device("cpu") if place == "host" else param.device
        good = t.dtype is dtype and t.device == device
        good = good and (t.is_contiguous() if scales else _same_layout(t, param))
        if rehouse and t.numel():
            good = good and self.home(t) is self.memory_of(param, place)
        if good and not copy:
            plain = type(t) is torch.Tensor and not t.requires_grad
            return t if plain else t.detach()  # type: ignore[no-any-return]
        out = self._empty(param, dtype, place, scales=scales)
        try:
            return out.copy_(t.detach())
        except BaseException:
            self.discard([out])
            raise

    def rehouse(self, param: torch.Tensor, state: State) -> State:
        """Move a state entry to where it belongs now, each tensor on its own; the bytes stay the same.

        Returns:
            The new entry; the old memory is given up.
        """
        place = self.place_of(param)
        for name in KEPT[1:]:
            if name in state:
                old, scales = state[name], name in _SCALE_NAMES
                state[name] = self._fit(old, param, old.dtype, place, False, rehouse=True, scales=scales)
                if state[name] is not old:
                    self.discard([old])
        return state

    def make_state(self, param: torch.Tensor, old: State, *, copy: bool = False) -> State:
        """Make a complete state entry, out of an empty, foreign or outdated one.

        Args:
            param: The parameter.
            old: Its entry so far; {} makes fresh zeros.
            copy: Copy every tensor, for entries that belong to somebody else.

        Returns:
            `old` itself if nothing is to be changed, else a new dict.

        Raises:
            StateError: Shapes do not match.
        """
        new: State = {}
        try:
            self._fill(new, param, old, copy)
        except BaseException:
            self.discard(only_in(new, old))
            raise
        same = old.keys() == new.keys() and all(old[name] is new[name] for name in new)
        return old if same else new

    def _fill(self, new: State, param: torch.Tensor, old: State, copy: bool) -> None:
        place = self.place_of(param)
        dtype = torch.float64 if param.dtype is torch.float64 else torch.float32
        if not old:
            new["step"] = fresh_step(0.0)
            moments = dtype if dtype is torch.float64 else self._moments
            for name in _MOMENT_NAMES:
                new[name] = self._zeros(param, moments, place)
            if moments is torch.uint8:
                for name in _SCALE_NAMES:
                    new[name] = self._zeros(param, torch.float32, place, scales=True)
        else:
            missing = {"step", "exp_avg", "exp_avg_sq"} - old.keys()
            if missing:
                raise StateError(f"[OffloadAdamW] state: expected step, exp_avg, exp_avg_sq; lacks {missing}")
            step = old["step"]
            good = isinstance(step, torch.Tensor) and step.dtype is torch.float32 and step.dim() == 0
            keep = good and step.device.type == "cpu" and not copy
            new["step"] = step if keep else fresh_step(float(step))
            for name in _MOMENT_NAMES:
                if old[name].shape != param.shape:
                    raise StateError(
                        f"[OffloadAdamW] state {name}: expected shape {tuple(param.shape)} as its parameter, "
                        f"given {tuple(old[name].shape)}"
                    )
            self._fill_moments(new, param, old, copy)
        if param.dtype in _LOW:
            source = old.get("master")
            keep = source is not None and source.shape == param.shape
            new["master"] = self._fit(source if keep else param, param, dtype, place, copy)
        if self._ema:
            source = old.get("ema")
            keep = source is not None and source.shape == param.shape
            weights = new.get("master", param)
            # A copy in any case: it goes its own way from here.
            new["ema"] = self._fit(source if keep else weights, param, dtype, place, copy or not keep)

    def _fill_moments(self, new: State, param: torch.Tensor, old: State, copy: bool) -> None:
        """Take over moments of any format."""
        place = self.place_of(param)
        target = torch.float64 if param.dtype is torch.float64 else self._moments
        packed = all(name in old for name in _SCALE_NAMES)
        if packed and (target is not torch.uint8 or not _same_layout(old["exp_avg"], param)):
            codes = (old["exp_avg"].detach(), old["exp_avg_sq"].detach())
            old = {**old, **dict(zip(_MOMENT_NAMES, unpack(codes, _scales_of(old)), strict=True))}
            packed = False
        if target is not torch.uint8 or packed:
            for name in _MOMENT_NAMES:
                new[name] = self._fit(old[name], param, target, place, copy)
            for name in _SCALE_NAMES if packed else ():
                new[name] = self._fit(old[name], param, torch.float32, place, copy, scales=True)
            return
        for name in _MOMENT_NAMES:
            new[name] = self._empty(param, torch.uint8, place)
        for name in _SCALE_NAMES:
            new[name] = self._empty(param, torch.float32, place, scales=True)
        like = new["exp_avg"]
        given = [
            torch.empty_strided(like.shape, like.stride(), dtype=torch.float32).copy_(old[name].detach())
            for name in _MOMENT_NAMES
        ]
        pack(given[0], given[1], [new[name] for name in _MOMENT_NAMES], _scales_of(new))

    def make_slot(self, param: torch.Tensor, state: State, key: tuple[Any, ...]) -> Slot:
        """Make the views that the kernels use.

        Raises:
            ArgumentError: Elements of the parameter share memory.
        """
        dense = is_dense(param)
        if not dense and torch._debug_has_internal_overlap(param) == 1:
            raise ArgumentError(
                f"[OffloadAdamW] expected parameters whose elements do not share memory, given one of shape "
                f"{tuple(param.shape)} and strides {param.stride()}. Train the tensor it was expanded from"
            )
        place = self.place_of(param)
        remote = is_remote(param) and place == "host"
        in_place = remote and dense and all(map(is_reachable, _tensors(state))) and self._in_place(param)
        staged = remote and not in_place
        master = None
        if "master" in state:
            master = flat(state["master"])
        elif staged:
            made = self._empty(param, torch.float32, place)
            master = flat(made.copy_(param.detach()))
            if made in self._homes:  # the view is what is kept, counted and discarded
                self._homes[master] = self._homes[made]
            pin_share.follow(made, master)
        weights = flat(param) if dense else param.detach()
        exp_avg, exp_avg_sq, scales = flat(state["exp_avg"]), flat(state["exp_avg_sq"]), _scales_of(state)
        ema = (flat(state["ema"]),) if "ema" in state else ()
        low = param.dtype in _LOW
        kind = "double" if param.dtype is torch.float64 else "staged" if staged else "plain"
        kind = "in_place" if in_place else kind
        return Slot(
            param=param,
            key=key,
            place=place,
            staged=staged,
            dense=dense,
            state=state,
            tensors=_identity(state),
            weights=weights,
            master=master,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            scales=scales,
            ema=ema[0] if ema else None,
            in_place=in_place,
            low=low,
            bucket=(kind, low, param.device),
            direct=kind in ("plain", "in_place") and param.is_contiguous(),
            home=self._homes.get(state["exp_avg"]),
            watched=(weights, *[state[name] for name in KEPT if name in state]),
            written=(*([weights] if dense else []), exp_avg, exp_avg_sq, *scales, *ema),
            version=param._version,
        )

    def staging(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """Return the slot's host buffer for a gradient like `grad` (flat), making it once."""
        if slot.staging is None or slot.staging.dtype is not grad.dtype:
            slot.staging = self._buffer(slot, grad.numel(), grad.dtype)
        return slot.staging

    def leaving(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Return a buffer for the slot's updated 16-bit weights: its gradient's, where that is as wide."""
        dtype = slot.param.dtype
        if gradient.dtype is dtype:
            return gradient
        if slot.leaving is None or slot.leaving.dtype is not dtype:
            slot.leaving = self._buffer(slot, gradient.numel(), dtype)
        return slot.leaving

    def _buffer(self, slot: Slot, numel: int, dtype: torch.dtype) -> torch.Tensor:
        pinned = self._pin is not False and is_remote(slot.param) and numel > 0
        nbytes = numel * dtype.itemsize
        raw = host_allocator().empty(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)
        return raw.view(dtype)


def flat_gradient(slot: Slot, grad: torch.Tensor) -> torch.Tensor:
    """View or copy a gradient as one dimension, in the element order of the slot's state.

    Args:
        slot: The parameter's slot.
        grad: Its gradient, in any layout.

    Returns:
        A flat tensor; shares the gradient's memory where the layouts agree.
    """
    grad = grad.detach()
    if grad.dtype is torch.float64 and slot.param.dtype is not torch.float64:
        grad = grad.float()
    if not slot.dense:
        return grad.reshape(-1)
    if slot.param.is_contiguous() and grad.is_contiguous():
        return grad.view(-1)
    if grad.stride() != slot.param.stride():
        shape, strides = slot.param.shape, slot.param.stride()
        grad = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
    return flat(grad)
