"""Which kernel computes attention: a named one first, or the one that is measured to be fastest."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import choice, integer

from ._stand_in import FusedForward

__all__ = ["BACKENDS", "AttentionChoice", "AttentionTimes", "time_attention"]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = tuple(_BACKENDS)
#: Those that give other bits from run to run, whatever `torch.use_deterministic_algorithms` says.
_NONDETERMINISTIC = ("cudnn",)
#: Products of fewer operations are bound by their launches: nothing to choose, nothing worth other bits.
_SMALL = 1 << 30
#: Share of the time of PyTorch's own choice below which another one is taken: less is noise.
_GAIN = 0.95
#: Shapes of each module that are looked at before "auto" is given up; one where nothing attends.
_PATIENCE = 16
_UNSEEN = "no block calls scaled_dot_product_attention"


class AttentionTimes(NamedTuple):
    """Seconds of one forward and backward pass.

    Attributes:
        own: Of what PyTorch chooses by itself.
        backends: Of each backend that can compute it, by name.
    """

    own: float
    backends: dict[str, float]

    @property
    def fastest(self) -> str | None:
        """The fastest backend, or None if PyTorch's own choice is about as fast."""
        name = min(self.backends, key=self.backends.__getitem__, default=None)
        return name if name is not None and self.backends[name] < _GAIN * self.own else None


def _enabled() -> tuple[bool, ...]:
    flags: Any = torch.backends.cuda
    return (
        flags.cudnn_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.flash_sdp_enabled(),
        flags.math_sdp_enabled(),
    )


def _usable() -> tuple[str, ...]:
    """Names of backends that may run now: enabled, and as deterministic as was asked for."""
    strict = torch.are_deterministic_algorithms_enabled()
    there = (name for name, on in zip(BACKENDS, _enabled(), strict=True) if on)
    return tuple(name for name in there if not (strict and name in _NONDETERMINISTIC))


def _leaf(like: Tensor) -> Tensor:
    """Random values in the shape and strides of a tensor, drawn without touching the process's generators."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    generator = torch.Generator(like.device).manual_seed(0)
    return made.normal_(generator=generator).requires_grad_()


def _once(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    out = scaled_dot_product_attention(q, k, v, **options)
    torch.autograd.grad(out, (q, k, v), out.detach())


def _timed(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], repeats: int) -> float:
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(2):
        _once(q, k, v, options)  # plans are made, memory is found
    for _ in range(repeats):
        if q.device.type == "cuda":
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            _once(q, k, v, options)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        else:
            start = time.perf_counter()
            _once(q, k, v, options)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_attention(
    q: Tensor, k: Tensor, v: Tensor, *, backends: Sequence[str] = BACKENDS, repeats: int = 7, **options: Any
) -> AttentionTimes:
    """Time forward and backward of `scaled_dot_product_attention` with each backend, on this shape.

    The values of the tensors are not read, random numbers of the process are not drawn. A backend that is
    switched off or cannot compute it is left out; with `torch.use_deterministic_algorithms` so are those that
    are not deterministic.

    Args:
        q: `(B, heads, S, D)`, any floating dtype; strides count.
        k: `(B, key heads, S, D)`, of that dtype and on that device.
        v: As `k`.
        backends: Of "cudnn", "efficient", "flash", "math"; on a CPU there are the last two.
        repeats: Passes that are timed, after two that are not; the median counts.
        **options: As for `scaled_dot_product_attention`: `is_causal`, `scale`, `dropout_p`, `enable_gqa`.

    Returns:
        The seconds.

    Raises:
        ArgumentTypeError: No floating tensors.
        ArgumentError: Not four dimensions.
        OptionError: Another backend, or no positive number of repeats.

    Example:
        >>> q = torch.randn(1, 2, 16, 8)
        >>> times = time_attention(q, q, q, repeats=1, is_causal=True)
        >>> sorted(times.backends)
        ['flash', 'math']
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentTypeError(message("time_attention", name, "a floating tensor", given))
        if tensor.dim() != 4:
            shape = f"shape {tuple(tensor.shape)}"
            raise ArgumentError(message("time_attention", name, "(batch, heads, tokens, dim)", shape))
    integer("repeats", repeats, minimum=1)
    names = [choice("backends", name, BACKENDS) for name in backends]
    on_cpu = q.device.type == "cpu"
    there = [name for name in names if name in _usable() and not (on_cpu and name in ("cudnn", "efficient"))]
    found: dict[str, float] = {}
    devices = [] if on_cpu else [q.device]
    # Hooks of whoever called must not see what is saved here.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    quiet = warnings.catch_warnings()  # PyTorch warns of each backend that cannot compute it
    with torch.enable_grad(), unseen, torch.random.fork_rng(devices, device_type=q.device.type), quiet:
        warnings.simplefilter("ignore")
        leaves = _leaf(q), _leaf(k), _leaf(v)
        own = _timed(*leaves, options, repeats)
        for name in there:
            try:
                with sdpa_kernel([_BACKENDS[name]]):
                    found[name] = _timed(*leaves, options, repeats)
            except RuntimeError:
                continue  # it cannot compute this, or there is no memory for it
    return AttentionTimes(own, found)


def _large(q: Tensor, k: Tensor) -> bool:
    return 4 * q.shape[:-1].numel() * k.shape[-2] * q.shape[-1] >= _SMALL


class _Watch(TorchFunctionMode):
    """Looks for the first call of `scaled_dot_product_attention` that may decide."""

    def __init__(self, decides: AttentionChoice) -> None:
        super().__init__()
        self._decides = decides

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        self._decides.seen = True
        self._decides.consider(*args, **kwargs)
        with self._decides.first():
            return func(*args, **kwargs)


class AttentionChoice:
    """The kernel that attention of some modules tries first, while they run.

    Attributes:
        backend: Its name; None for PyTorch's own order.
        open: It is still to be measured.
        times: What was measured, if anything was.
        seen: A call of `scaled_dot_product_attention` was seen.
        why: Why it is PyTorch's own order, or "".
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        decided: Callable[[AttentionChoice], None] = lambda choice: None,
    ) -> None:
        """Name a backend, or "auto" to measure on the first call that trains without a mask.

        Args:
            backend: "auto" or one of `BACKENDS`.
            device: Where the modules compute.
            decided: Called once "auto" is decided.
        """
        choice("attention", backend, ("auto", *BACKENDS))
        self.backend: str | None = None if backend == "auto" else backend
        self.times: AttentionTimes | None = None
        self.seen = False
        self.why = ""
        self._decided = decided
        self._looked: set[tuple[int, torch.Size]] = set()
        self._flags = _enabled()
        self._cpu = device.type == "cpu"
        self.open = backend == "auto" and not self._cpu
        if self._cpu and backend == "auto":
            self.why = "a CPU has one fused kernel"
        elif self._cpu and backend in ("cudnn", "efficient"):
            self.backend, self.why = None, f"a CPU has no {backend} kernel"
        self._stand_ins: list[FusedForward] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let the backend be tried first; nothing else changes."""
        if self.backend is None or self.backend not in _usable():
            yield
        elif self._cpu:
            # There only what is allowed counts, not the order: flash comes before math, which takes the rest.
            allowed = [name for name in (self.backend, "math") if name in _usable()]
            with sdpa_kernel([_BACKENDS[name] for name in allowed]):
                yield
        else:
            # What sdpa_kernel(set_priority=True) does, without setting every switch: it runs for each block.
            native: Any = torch._C
            before = native._get_sdp_priority_order()
            mine = int(_BACKENDS[self.backend].value)
            native._set_sdp_priority_order([mine, *(each for each in before if each != mine)])
            try:
                yield
            finally:
                native._set_sdp_priority_order(before)

    def consider(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Measure on a call, if it is one that trains, has no mask and is large enough to matter."""
        if not self.open or attn_mask is not None or not torch.is_grad_enabled():
            return
        if not _large(query, key) or torch.cuda.is_current_stream_capturing():
            return
        options = {**dict(zip(("dropout_p", "is_causal"), args, strict=False)), **kwargs}
        q, k, v = (t.detach() for t in (query, key, value))
        # math is never the fastest here, and would take memory for every pair of tokens.
        try:
            self.times = time_attention(q, k, v, backends=("cudnn", "efficient", "flash"), **options)
        except torch.OutOfMemoryError:  # copies of the inputs and their gradients: the call itself may fit
            self._close("there was no memory to measure in")
            return
        self.backend = self.times.fastest
        self._close("" if self.backend else "no other kernel is faster")

    def _close(self, why: str) -> None:
        self.open, self.why = False, why
        self._decided(self)

    def put(self, modules: Sequence[nn.Module]) -> None:
        """Let modules that call attention, themselves or inside, use it."""
        if self.backend is None and not self.open:
            return
        for module in modules:
            stand_in = FusedForward(module, _running(self, module))
            stand_in.put()
            self._stand_ins.append(stand_in)

    def undo(self) -> None:
        """Give every module its own code back."""
        for stand_in in reversed(self._stand_ins):
            stand_in.take_away()
        self._stand_ins.clear()

    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's code."""
        if torch.compiler.is_compiling() or (self.backend is None and not self.open):
            return function(*args, **kwargs)
        # Whoever has switched backends on or off around the call has chosen already.
        if _enabled() != self._flags:
            return function(*args, **kwargs)
        if self.backend is not None:
            with self.first():
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        shapes = (value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        key = id(module), next(shapes, torch.Size())
        if key in self._looked:
            return function(*args, **kwargs)
        self._looked.add(key)
        with _Watch(self):
            output = function(*args, **kwargs)
        if self.open and len(self._looked) >= (_PATIENCE if self.seen else 1) * len(self._stand_ins):
            self._close("no call without a mask was large enough" if self.seen else _UNSEEN)
        return output


def _running(decides: AttentionChoice, module: nn.Module) -> Callable[..., Any]:
    inner = module.forward
    names = list(inspect.signature(inner).parameters)
    masks = [index for index, name in enumerate(names) if "mask" in name]

    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        masked = any(args[index] is not None for index in masks if index < len(args))
        if masked or any(value is not None for key, value in kwargs.items() if "mask" in key):
            return inner(*args, **kwargs)
        return decides.run(module, inner, args, kwargs)

    return run
