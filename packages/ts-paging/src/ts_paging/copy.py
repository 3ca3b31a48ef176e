"""Copies between host and device beside the computation."""

from __future__ import annotations

import weakref

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.memory import parse_bytes
from ts_core.options import integer

from . import _C
from .layout import is_wrapper
from .wait import WaitPolicy

__all__ = ["CopyEngine", "CopyTicket"]

CopyTicket = _C.Ticket
"""A copy under way: `done()` looks, `wait()` waits on the host and raises what went wrong (`DeviceError`),
`wait_stream(stream=None)` lets a CUDA stream (None: the current one) go on after the copy, without the host
waiting."""

_H2D, _D2H = 0, 1


class CopyEngine:
    """Asynchronous copies with streams, events and threads of its own; a `ts_core.registry.CopyEngine`.

    On a GPU a copy runs on the engine's stream of that direction and device, after the work that torch's
    current stream holds when it is issued. Between CPU tensors one thread per direction copies. Copies of one
    direction and device run in the order they were issued. The engine keeps both tensors alive until the copy
    is through, so that their memory is not handed out again too early; their values must stay until then.
    Memory that is not page-locked is handled by a thread of the engine, correctly but at the driver's pace.
    Version counters of the destination are not moved.

    A forked child cannot use its parent's engine (`StateError`) and leaves it alone when it exits.

    Example:
        >>> engine = CopyEngine()
        >>> dst, src = torch.zeros(3), torch.ones(3)
        >>> engine.h2d(dst, src).wait()
        >>> dst
        tensor([1., 1., 1.])
    """

    def __init__(
        self,
        *,
        max_inflight_bytes: int | str = 1 << 30,
        chunk_bytes: int | str = 32 << 20,
        wait: WaitPolicy | None = None,
    ) -> None:
        """Make no thread and no stream yet.

        Args:
            max_inflight_bytes: A copy that would exceed this waits for earlier ones first; one copy alone may
                be larger.
            chunk_bytes: Longest single transfer handed to the device.
            wait: How host threads wait; `None` reads the environment (`WaitPolicy.from_env`).

        Raises:
            OptionError: A size is no size or not positive.
        """
        chunk = integer("chunk_bytes", parse_bytes(chunk_bytes, name="chunk_bytes"), minimum=1)
        inflight = parse_bytes(max_inflight_bytes, name="max_inflight_bytes")
        self.max_inflight_bytes = integer("max_inflight_bytes", inflight, minimum=1)
        policy = WaitPolicy.from_env() if wait is None else wait
        self._native = _C.Engine(chunk, inflight, *policy.native())
        # Runs when the engine is dropped and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._native.close)

    def h2d(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying host to device.

        Args:
            dst: Contiguous device tensor that is written; a CPU tensor on a machine without a GPU.
            src: Contiguous CPU tensor of the same shape and dtype; page-locked for speed.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: Not tensors, `src` not on the CPU, dtypes differ.
            ArgumentError: Shapes differ, not contiguous, or the two overlap in memory.
            StateError: The engine belongs to the parent of this forked process.
        """
        _check("h2d", dst, src, src, "src")
        return self._native.submit(_H2D, dst, src)

    def d2h(self, dst: torch.Tensor, src: torch.Tensor) -> CopyTicket:
        """Start copying device to host.

        Args:
            dst: Contiguous CPU tensor that is written; page-locked for speed.
            src: Contiguous device tensor of the same shape and dtype; a CPU tensor on a machine without a
                GPU.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: Not tensors, `dst` not on the CPU, dtypes differ.
            ArgumentError: Shapes differ, not contiguous, or the two overlap in memory.
            StateError: The engine belongs to the parent of this forked process.
        """
        _check("d2h", dst, src, dst, "dst")
        return self._native.submit(_D2H, dst, src)

    @property
    def inflight_bytes(self) -> int:
        """Bytes of copies issued and not yet seen to be through."""
        return self._native.inflight_bytes

    def synchronize(self) -> None:
        """Wait on the host for every copy issued so far; what failed is told by its own ticket."""
        self._native.synchronize()

    def close(self) -> None:
        """Finish the copies issued, then end threads and streams. Later copies fail. May be called again."""
        self._finalizer()

    def __enter__(self) -> CopyEngine:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


def _check(name: str, dst: torch.Tensor, src: torch.Tensor, host: torch.Tensor, host_name: str) -> None:
    op = f"CopyEngine.{name}"
    for argument, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(message(op, argument, "a tensor", tensor))
        if is_wrapper(tensor):
            kind = type(tensor).__name__
            raise ArgumentTypeError(
                message(op, argument, "a plain tensor", kind, "Copy the tensors that it holds, one by one")
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(message(op, argument, "a CPU or CUDA tensor", f"one on {tensor.device}"))
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            given = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise ArgumentError(message(op, argument, "a contiguous tensor", given, "Use contiguous()"))
    if host.device.type != "cpu":
        raise ArgumentTypeError(message(op, host_name, "a CPU tensor", f"one on {host.device}"))
    if dst.dtype != src.dtype:
        raise ArgumentTypeError(message(op, "dst", f"dtype {src.dtype}", str(dst.dtype), "Convert first"))
    if dst.shape != src.shape:
        raise ArgumentError(message(op, "dst", f"shape {tuple(src.shape)}", str(tuple(dst.shape))))
    if dst.device == src.device and src.nbytes:
        apart = dst.data_ptr() - src.data_ptr()
        if abs(apart) < src.nbytes:
            raise ArgumentError(message(op, "dst", "memory apart from src", f"overlap, {apart} bytes off"))
