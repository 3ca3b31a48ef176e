"""Copies between host and device beside the computation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, StateError, message
from ts_core.memory import parse_bytes
from ts_core.options import integer

from . import _C
from .layout import is_wrapper
from .wait import WaitPolicy

__all__ = ["CopyEngine", "CopyTicket", "d2h_many", "h2d_many"]

CopyTicket = _C.Ticket
"""A copy under way: `done()` looks, `wait()` waits on the host and raises what went wrong (`DeviceError`),
`wait_stream(stream=None)` lets a CUDA stream (None: the current one) go on after the copy, without the host
waiting. A copy that is waited for passes those that are still queued; `promote()` has it do so before."""

_H2D, _D2H = 0, 1


class CopyEngine:
    """Asynchronous copies with streams, events and threads of its own; a `ts_core.registry.CopyEngine`.

    On a GPU a copy runs on the engine's stream of that direction and device, after the work that torch's
    current stream holds when it is issued. Between CPU tensors one thread per direction copies. Copies of one
    direction and device run by priority, and of equal priority in the order they were issued; one that shares
    memory with an earlier one never passes it. The device gets `window_bytes` at a time, in pieces of
    `chunk_bytes`, and the rest waits on the host: so what is needed now (a priority above 0, or a ticket that
    is waited for) overtakes what was only fetched ahead. The engine keeps the tensors alive until the copy is
    through, so that their memory is not handed out again too early; their values must stay until then.
    Memory that is not page-locked goes through page-locked buffers of the engine (24 MiB a direction), at the
    pace of a few threads' memcpy.
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
        window_bytes: int | str = 128 << 20,
        wait: WaitPolicy | None = None,
    ) -> None:
        """Make no thread and no stream yet.

        Args:
            max_inflight_bytes: The call that issues a copy that would exceed this waits for earlier ones
                first; one copy alone may be larger, and one of a priority above 0 is not held up.
            chunk_bytes: Longest single transfer handed to the device.
            window_bytes: How much the device is handed at a time, in each direction: what a copy that is
                needed now has to wait for at most.
            wait: How host threads wait; `None` reads the environment (`WaitPolicy.from_env`).

        Raises:
            OptionError: A size is no size or not positive.
        """
        chunk = integer("chunk_bytes", parse_bytes(chunk_bytes, name="chunk_bytes"), minimum=1)
        inflight = parse_bytes(max_inflight_bytes, name="max_inflight_bytes")
        self.max_inflight_bytes = integer("max_inflight_bytes", inflight, minimum=1)
        window = integer("window_bytes", parse_bytes(window_bytes, name="window_bytes"), minimum=1)
        policy = WaitPolicy.from_env() if wait is None else wait
        self._native = _C.Engine(chunk, window, inflight, *policy.native())
        # Runs when the engine is dropped and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._native.close)

    def h2d(self, dst: torch.Tensor, src: torch.Tensor, *, priority: int = 0) -> CopyTicket:
        """Start copying host to device.

        Args:
            dst: Contiguous device tensor that is written; a CPU tensor on a machine without a GPU.
            src: Contiguous CPU tensor of the same shape and dtype; page-locked for speed.
            priority: Higher goes first; above 0 also past what `window_bytes` holds back.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: Not tensors, `src` not on the CPU, dtypes differ.
            ArgumentError: Shapes differ, not contiguous, or the two overlap in memory.
            StateError: The engine is closed, or belongs to the parent of this forked process.
        """
        self._expect_open("h2d")
        _check("h2d", dst, src, src, "src")
        return self._native.submit(_H2D, [dst], [src], priority, [])

    def d2h(self, dst: torch.Tensor, src: torch.Tensor, *, priority: int = 0) -> CopyTicket:
        """Start copying device to host.

        Args:
            dst: Contiguous CPU tensor that is written; page-locked for speed.
            src: Contiguous device tensor of the same shape and dtype; a CPU tensor on a machine without a
                GPU.
            priority: Higher goes first; above 0 also past what `window_bytes` holds back.

        Returns:
            The ticket.

        Raises:
            ArgumentTypeError: Not tensors, `dst` not on the CPU, dtypes differ.
            ArgumentError: Shapes differ, not contiguous, or the two overlap in memory.
            StateError: The engine is closed, or belongs to the parent of this forked process.
        """
        self._expect_open("d2h")
        _check("d2h", dst, src, dst, "dst")
        return self._native.submit(_D2H, [dst], [src], priority, [])

    def h2d_many(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        after: Sequence[CopyTicket] = (),
    ) -> CopyTicket:
        """Start copying several host tensors to one device: one call, one ticket.

        Args:
            dsts: Contiguous tensors of one device, each as `h2d` takes it.
            srcs: As many contiguous CPU tensors of the same shapes and dtypes.
            priority: Higher goes first; above 0 also past what `window_bytes` holds back.
            after: Copies that these wait for, on the device; between CPU tensors this call waits.

        Returns:
            The ticket of all of them. Nothing is copied if one pair is refused.

        Raises:
            ArgumentTypeError: Not plain tensors, one of `srcs` not on the CPU, dtypes or devices differ.
            ArgumentError: Shapes or the numbers of tensors differ, not contiguous, overlap in memory.
            StateError: The engine is closed, or belongs to the parent of this forked process.

        Example:
            >>> dsts, srcs = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
            >>> CopyEngine().h2d_many(dsts, srcs).wait()
            >>> dsts
            [tensor([1., 1.]), tensor([1., 1., 1.])]
        """
        self._expect_open("h2d_many")
        dsts, srcs = list(dsts), list(srcs)
        _check_many("h2d_many", dsts, srcs, srcs, "srcs")
        return self._native.submit(_H2D, dsts, srcs, priority, list(after))

    def d2h_many(
        self,
        dsts: Sequence[torch.Tensor],
        srcs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        after: Sequence[CopyTicket] = (),
    ) -> CopyTicket:
        """Start copying several tensors of one device to the host: one call, one ticket.

        Args:
            dsts: Contiguous CPU tensors that are written, each as `d2h` takes it.
            srcs: As many contiguous tensors of one device, of the same shapes and dtypes.
            priority: Higher goes first; above 0 also past what `window_bytes` holds back.
            after: Copies that these wait for, on the device; between CPU tensors this call waits.

        Returns:
            The ticket of all of them. Nothing is copied if one pair is refused.

        Raises:
            ArgumentTypeError: Not plain tensors, one of `dsts` not on the CPU, dtypes or devices differ.
            ArgumentError: Shapes or the numbers of tensors differ, not contiguous, overlap in memory.
            StateError: The engine is closed, or belongs to the parent of this forked process.
        """
        self._expect_open("d2h_many")
        dsts, srcs = list(dsts), list(srcs)
        _check_many("d2h_many", dsts, srcs, dsts, "dsts")
        return self._native.submit(_D2H, dsts, srcs, priority, list(after))

    def _expect_open(self, name: str) -> None:
        if not self._finalizer.alive:
            raise StateError(f"[CopyEngine.{name}] the engine is closed; make another one")

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


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _check(name: str, dst: torch.Tensor, src: torch.Tensor, host: torch.Tensor, host_name: str) -> None:
    usual = (
        type(dst) in _PLAIN
        and type(src) in _PLAIN
        and host.is_cpu
        and (dst.is_cuda or src.is_cuda)
        and dst.dtype == src.dtype
        and dst.shape == src.shape
        and dst.is_contiguous()
        and src.is_contiguous()
        and not (src.is_neg() or src.is_conj() or dst.is_neg() or dst.is_conj())
    )
    if not usual:
        _check_closely(name, dst, src, host, host_name)


def _check_closely(
    name: str, dst: torch.Tensor, src: torch.Tensor, host: torch.Tensor, host_name: str
) -> None:
    """Say what is wrong, if anything is."""
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


def _check_many(
    name: str,
    dsts: list[torch.Tensor],
    srcs: list[torch.Tensor],
    hosts: list[torch.Tensor],
    hosts_name: str,
) -> None:
    """Refuse what `_check` refuses, numbers that differ, and more than one device."""
    if len(dsts) != len(srcs):
        raise ArgumentError(message(f"CopyEngine.{name}", "dsts", f"{len(srcs)} tensors", f"{len(dsts)}"))
    if _all_usual(dsts, srcs, hosts):
        return
    device: torch.device | None = None
    for dst, src, host in zip(dsts, srcs, hosts, strict=True):
        _check(name, dst, src, host, hosts_name)
        there = src.device if host is dst else dst.device
        if device is not None and there != device:
            given = f"one on {there}"
            raise ArgumentTypeError(
                message(f"CopyEngine.{name}", "dsts and srcs", f"tensors on {device}", given)
            )
        device = there


_T: Any = torch.Tensor  # its attributes are untyped
_DTYPE, _CUDA, _CPU, _DEVICE = (
    getattr(_T, name).__get__ for name in ("dtype", "is_cuda", "is_cpu", "device")
)


def _all_usual(dsts: list[torch.Tensor], srcs: list[torch.Tensor], hosts: list[torch.Tensor]) -> bool:
    """Whether these are copies between a host and a GPU of which nothing need be looked at more closely.

    One attribute of all tensors at a time: a block's weights or gradients take some microseconds so.
    """
    away = srcs if hosts is dsts else dsts
    return (
        _PLAIN.issuperset(map(type, dsts))
        and _PLAIN.issuperset(map(type, srcs))
        and all(map(_CPU, hosts))
        and all(map(_CUDA, away))
        and len(set(map(_DEVICE, away))) == 1
        and list(map(_DTYPE, dsts)) == list(map(_DTYPE, srcs))
        and list(map(_T.size, dsts)) == list(map(_T.size, srcs))
        and all(map(_T.is_contiguous, dsts))
        and all(map(_T.is_contiguous, srcs))
        and not any(map(_T.is_neg, dsts + srcs))
        and not any(map(_T.is_conj, dsts + srcs))
    )


class _Joined:
    """Tickets of several copies as one."""

    def __init__(self, tickets: list[registry.CopyTicket]) -> None:
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def wait_stream(self, stream: Any = None) -> None:
        for ticket in self._tickets:
            ticket.wait_stream(stream)


def h2d_many(
    dsts: Sequence[torch.Tensor],
    srcs: Sequence[torch.Tensor],
    *,
    priority: int = 0,
    after: Sequence[registry.CopyTicket] = (),
) -> registry.CopyTicket:
    """Start copying several host tensors to one device with the registered copy engine.

    Args:
        dsts: See `CopyEngine.h2d_many`.
        srcs: See there.
        priority: See there; an engine that knows no priorities ignores it.
        after: See there; the current stream waits for them with such an engine.

    Returns:
        One ticket.
    """
    return _many("h2d", dsts, srcs, priority, after)


def d2h_many(
    dsts: Sequence[torch.Tensor],
    srcs: Sequence[torch.Tensor],
    *,
    priority: int = 0,
    after: Sequence[registry.CopyTicket] = (),
) -> registry.CopyTicket:
    """Start copying several tensors of one device to the host with the registered copy engine.

    Args:
        dsts: See `CopyEngine.d2h_many`.
        srcs: See there.
        priority: See there; an engine that knows no priorities ignores it.
        after: See there; the current stream waits for them with such an engine.

    Returns:
        One ticket.
    """
    return _many("d2h", dsts, srcs, priority, after)


def _many(
    way: str,
    dsts: Sequence[torch.Tensor],
    srcs: Sequence[torch.Tensor],
    priority: int,
    after: Sequence[registry.CopyTicket],
) -> registry.CopyTicket:
    engine: Any = registry.copy_engine()
    if isinstance(engine, CopyEngine) and all(isinstance(ticket, CopyTicket) for ticket in after):
        ticket: registry.CopyTicket = getattr(engine, f"{way}_many")(
            dsts, srcs, priority=priority, after=after
        )
        return ticket
    for ticket in after:
        ticket.wait_stream()
    copy = getattr(engine, way)
    return _Joined([copy(dst, src) for dst, src in zip(dsts, srcs, strict=True)])
