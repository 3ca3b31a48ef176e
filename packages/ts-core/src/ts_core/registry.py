"""Where packages find each other's parts without importing each other.

A kernel package registers what it is good at; everybody asks here. Each part has a plain PyTorch default, so
that each package works alone. Registering again replaces.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol, runtime_checkable

import torch

from .errors import ArgumentError, ArgumentTypeError, OptionError, message

__all__ = [
    "Codec",
    "CopyEngine",
    "CopyTicket",
    "HostAllocator",
    "PackedWeight",
    "SlottedWeight",
    "TorchCopyEngine",
    "TorchHostAllocator",
    "codec",
    "codecs",
    "copy_engine",
    "host_allocator",
    "register_codec",
    "set_copy_engine",
    "set_host_allocator",
]

# Typed here because torch leaves the constructors of its streams and events unannotated.
_CUDA: Any = torch.cuda


@runtime_checkable
class Codec(Protocol):
    """Stores the values of a frozen weight in fewer bytes."""

    @property
    def name(self) -> str:
        """The name users write: "nf4"."""

    def encode(self, tensor: torch.Tensor, meta: Any) -> dict[str, torch.Tensor]:
        """Encode a floating tensor of any shape; returns named packed tensors on the same device.

        `meta` is the codec's own small description of the packing (values per scale and the like), which the
        packed tensor keeps and hands back to `decode`; an integer stands for a number of values per scale.
        """

    def decode(
        self,
        packed: dict[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        meta: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode to `shape` and `dtype` on the device of the packed tensors, into `out` if given."""

    def packed_bytes(self, shape: Any, meta: Any) -> int:
        """Return the bytes that a tensor of a shape (or of a number of values) takes when encoded."""


@runtime_checkable
class PackedWeight(Protocol):
    """A frozen weight that is a `torch.Tensor` subclass over packed tensors.

    Shape, dtype and device are those of the matrix it stands for, `torch.nn.functional.linear` takes it, and
    `__tensor_unflatten__` of its class puts it together again from what `__tensor_flatten__` names, as
    torch.compile asks of every such subclass.
    """

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """The packed tensors by name; the tensors themselves, not copies."""

    def dequantize(
        self, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode to a plain tensor of `dtype` (None: the one presented), into `out` if given."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the attributes that hold the packed tensors, and what else it is made of."""


@runtime_checkable
class SlottedWeight(PackedWeight, Protocol):
    """A packed weight that a device may multiply as it is: a slot then holds packed tensors of it."""

    def slot_parts(self, device: torch.device) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
        """Return dtype and shape of all tensors it computes with on a device; None: it is decoded there.

        Those that `packed` has by the same name are copied; the others are made of them.
        """

    def complete_slot(self, parts: dict[str, torch.Tensor]) -> None:
        """Make what is not copied, on the device: all tensors of `slot_parts`, those copied are there."""

    def with_packed(self, packed: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the same weight over tensors that lie elsewhere."""


@runtime_checkable
class HostAllocator(Protocol):
    """Makes host memory that a GPU can copy from and to."""

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 CPU tensor of `nbytes` elements; the memory lives as long as it."""


@runtime_checkable
class CopyTicket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the copy is complete: the calling host thread waits."""

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream's later work start after the copy, without the host waiting; None: current stream."""


@runtime_checkable
class CopyEngine(Protocol):
    """Copies between host and device beside the computation.

    A copy starts after the work that the current stream holds when it is issued. Source and destination must
    stay alive and unchanged until the ticket is waited for.
    """

    def h2d(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying a host tensor to a device tensor of the same shape."""

    def d2h(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying a device tensor to a host tensor of the same shape."""


class TorchHostAllocator:
    """The plain `HostAllocator`: PyTorch's own, page-locked if CUDA is usable.

    PyTorch rounds page-locked sizes up to powers of two and keeps freed memory; an exact allocator replaces
    it.

    Example:
        >>> TorchHostAllocator(pinned=False).empty(16).shape
        torch.Size([16])
    """

    def __init__(self, pinned: bool | None = None) -> None:
        """Choose the kind of memory.

        Args:
            pinned: Page-lock or not; `None` page-locks if CUDA is usable, found out at the first use.
        """
        self._pinned = pinned

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        if self._pinned is None:
            self._pinned = torch.cuda.is_available()
        return self._pinned

    def empty(self, nbytes: int) -> torch.Tensor:
        """Make uninitialised host memory.

        Args:
            nbytes: Size in bytes, >= 0.

        Returns:
            A uint8 CPU tensor of shape `(nbytes,)`.

        Raises:
            ArgumentError: Negative size.
        """
        if nbytes < 0:
            raise ArgumentError(message("HostAllocator.empty", "nbytes", "an integer >= 0", nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned and nbytes > 0)


class _Done:
    """Ticket of a copy that is complete already."""

    def wait(self) -> None:
        """Do nothing."""

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Do nothing."""


class _EventTicket:
    """Ticket of a copy on a CUDA stream; keeps both tensors alive until it is waited for."""

    def __init__(self, event: torch.cuda.Event, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event = event
        self._tensors = tensors

    def wait(self) -> None:
        """Wait on the host."""
        self._event.synchronize()
        self._tensors = ()

    def wait_stream(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait."""
        self._event.wait(stream if stream is not None else torch.cuda.current_stream())


class TorchCopyEngine:
    """The plain `CopyEngine`: `copy_(non_blocking=True)` on one side stream per direction and device.

    Between CPU tensors the copy is done when the call returns. Copies from or to pageable memory are
    correct, but the driver may make the host wait.

    Example:
        >>> dst, src = torch.zeros(3), torch.ones(3)
        >>> TorchCopyEngine().h2d(dst, src).wait()
        >>> dst
        tensor([1., 1., 1.])
    """

    def __init__(self) -> None:
        """Make no stream yet: they are made at the first copy on each device."""
        self._streams: dict[tuple[str, int], torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def h2d(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying host to device.

        Args:
            dst: Device tensor that is written; a CPU tensor on a machine without a GPU.
            src: CPU tensor of the same shape; page-locked for speed. Another dtype is converted.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: `src` is not on the CPU.
            ArgumentError: Shapes differ.
        """
        if src.device.type != "cpu":
            raise ArgumentTypeError(message("CopyEngine.h2d", "src", "a CPU tensor", f"one on {src.device}"))
        return self._copy("h2d", dst, src, dst.device)

    def d2h(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying device to host.

        Args:
            dst: CPU tensor that is written; page-locked for speed.
            src: Device tensor of the same shape; a CPU tensor on a machine without a GPU.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: `dst` is not on the CPU.
            ArgumentError: Shapes differ.
        """
        if dst.device.type != "cpu":
            raise ArgumentTypeError(message("CopyEngine.d2h", "dst", "a CPU tensor", f"one on {dst.device}"))
        return self._copy("d2h", dst, src, src.device)

    def _stream(self, way: str, device: torch.device) -> torch.cuda.Stream:
        key = (way, torch.cuda.current_device() if device.index is None else device.index)
        with self._lock:
            if key not in self._streams:
                self._streams[key] = _CUDA.Stream(device=key[1])
            return self._streams[key]

    def _copy(self, way: str, dst: torch.Tensor, src: torch.Tensor, device: torch.device) -> CopyTicket:
        if dst.shape != src.shape:
            raise ArgumentError(
                message(f"CopyEngine.{way}", "dst", f"shape {tuple(src.shape)}", str(tuple(dst.shape)))
            )
        with torch.no_grad():
            if device.type != "cuda":
                dst.copy_(src)
                return _Done()
            stream = self._stream(way, device)
            stream.wait_stream(torch.cuda.current_stream(device))
            on_device = dst if way == "h2d" else src
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
                # Freed memory must not be handed out again before the copy is through with it.
                on_device.record_stream(stream)
                event = _CUDA.Event()
                event.record(stream)
        return _EventTicket(event, (dst, src))


_lock = threading.Lock()
_codecs: dict[str, Codec] = {}
_allocator: HostAllocator = TorchHostAllocator()
_engine: CopyEngine = TorchCopyEngine()


def _conforms(function: str, argument: str, value: object, protocol: type, methods: str) -> None:
    # A class has the attributes of its instances, and would pass isinstance against the protocol.
    if isinstance(value, type) or not isinstance(value, protocol):
        raise ArgumentTypeError(message(function, argument, f"an object with {methods}", value))


def register_codec(codec: Codec) -> None:
    """Make a codec known under its name; replaces one of the same name.

    Args:
        codec: An object with `name`, `encode`, `decode` and `packed_bytes`; see `Codec`.

    Raises:
        ArgumentTypeError: It lacks one of them.
        ArgumentError: Its name is empty or not a string.
    """
    _conforms("register_codec", "codec", codec, Codec, "name, encode, decode and packed_bytes")
    if not isinstance(codec.name, str) or not codec.name:
        raise ArgumentError(message("register_codec", "codec.name", "a non-empty string", codec.name))
    with _lock:
        _codecs[codec.name] = codec


def codec(name: str) -> Codec:
    """Find a codec.

    Args:
        name: Name it was registered under, such as "nf4".

    Returns:
        The codec.

    Raises:
        OptionError: No codec of this name; the message lists those there are.
    """
    found = _codecs.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(other) for other in codecs()) or "none (import ts_quant to have some)"
        raise OptionError(f"option codec: expected one of the registered codecs: {known}; given {name!r}")
    return found


def codecs() -> tuple[str, ...]:
    """List the names of the registered codecs.

    Returns:
        The names, sorted.
    """
    with _lock:
        return tuple(sorted(_codecs))


def set_host_allocator(allocator: HostAllocator | None) -> HostAllocator:
    """Replace the host allocator of this process.

    Args:
        allocator: An object with `pinned` and `empty`; None puts the plain one back.

    Returns:
        The one that was there before.

    Raises:
        ArgumentTypeError: It lacks one of them.
    """
    global _allocator
    if allocator is None:
        allocator = TorchHostAllocator()
    _conforms("set_host_allocator", "allocator", allocator, HostAllocator, "pinned and empty(nbytes)")
    with _lock:
        before, _allocator = _allocator, allocator
    return before


def host_allocator() -> HostAllocator:
    """Return the host allocator of this process.

    Returns:
        The one last set, or a `TorchHostAllocator`.

    Example:
        >>> host_allocator().empty(8).dtype
        torch.uint8
    """
    return _allocator


def set_copy_engine(engine: CopyEngine | None) -> CopyEngine:
    """Replace the copy engine of this process.

    Args:
        engine: An object with `h2d` and `d2h`; None puts a plain one back.

    Returns:
        The one that was there before.

    Raises:
        ArgumentTypeError: It lacks one of them.
    """
    global _engine
    if engine is None:
        engine = TorchCopyEngine()
    _conforms("set_copy_engine", "engine", engine, CopyEngine, "h2d(dst, src) and d2h(dst, src)")
    with _lock:
        before, _engine = _engine, engine
    return before


def copy_engine() -> CopyEngine:
    """Return the copy engine of this process.

    Returns:
        The one last set, or a `TorchCopyEngine`.

    Example:
        >>> isinstance(copy_engine(), CopyEngine)
        True
    """
    return _engine
