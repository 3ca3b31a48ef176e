"""Who updates state in host memory for CUDA parameters: host threads, or a CUDA kernel over the link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ts_core.registry import host_allocator

from . import _C
from .options import OffloadOptions

__all__ = ["ModeChoice", "step_seconds"]

_NUMEL = 4 << 20
_ROUNDS = 3

#: What timed steps take: given a mode, a device, a dtype of weights, the format of moments and the threads.
Timer = Callable[[str, torch.device, torch.dtype, str, int | None], float]
Verdict = tuple[bool, str]

_measured: dict[tuple[object, ...], Verdict] = {}
_lock = threading.RLock()


def step_seconds(
    make: Callable[..., torch.optim.Optimizer],
    mode: str,
    device: torch.device,
    dtype: torch.dtype,
    moments: str,
    threads: int | None,
) -> float:
    """Time a step of a sample: 4 Mi parameters, 32 to 50 MB of state; the best of three.

    Args:
        make: Makes an `OffloadAdamW`.
        mode: "cpu" or "gpu".
        device: Where the sample's weights are.
        dtype: Theirs.
        moments: Format of moments.
        threads: Host threads.

    Returns:
        Seconds.
    """
    param = torch.nn.Parameter(torch.ones(_NUMEL, dtype=dtype, device=device))
    param.grad = torch.full_like(param, 0.5)
    optimizer = make(
        [param], mode=mode, moment_dtype=moments, threads=threads, place=lambda p: "host", lr=1e-3
    )
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ModeChoice:
    """Decides for each kind of parameter whether a CUDA kernel updates its state in host memory.

    The bits are the same either way. What `mode="auto"` measures is kept for the process, by device, format
    of moments, 16-bit or 32-bit weights, and threads.
    """

    def __init__(self, options: OffloadOptions, timer: Timer) -> None:
        """Decide nothing yet.

        Args:
            options: The optimizer's.
            timer: Times a mode; see `step_seconds`.
        """
        self._options = options
        self._timer = timer
        self._made: dict[str, str] = {}

    @property
    def mode(self) -> str:
        """What is in use: "cpu", "gpu", or both where parameters differ."""
        return " and ".join(sorted(self._made)) or ("gpu" if self._options.mode == "gpu" else "cpu")

    @property
    def reason(self) -> str:
        """Why."""
        if self._options.mode != "auto":
            return f"mode={self._options.mode!r} was asked for"
        return (
            "; ".join(reason for _, reason in sorted(self._made.items()))
            or self._fixed()
            or ("no state of a CUDA parameter is in host memory so far")
        )

    def _fixed(self) -> str:
        """Say why it can only be host threads, if so."""
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        if self._options.moments == "int8":
            return "int8 moments are updated by host threads"
        if self._options.pin_moments is False:
            return "pin_moments=False leaves memory that a device cannot reach"
        return ""

    def in_place(self, param: torch.Tensor) -> bool:
        """Tell whether a CUDA kernel is to update the state of a parameter in host memory.

        Args:
            param: A CUDA parameter whose state is on the host.
        """
        if self._options.mode != "auto":
            return self._options.mode == "gpu"
        fixed = self._fixed()
        chosen, reason = (False, fixed) if fixed else self._measure(param)
        self._made["gpu" if chosen else "cpu"] = reason
        return chosen

    def _measure(self, param: torch.Tensor) -> Verdict:
        options = self._options
        dtype = torch.bfloat16 if param.dtype.itemsize == 2 else torch.float32
        threads = _C.thread_count(options.threads or 0)
        key = (param.device, options.moments, dtype, threads)
        with _lock:
            if key not in _measured:
                _measured[key] = self._compare(param.device, dtype, threads)
            return _measured[key]

    def _compare(self, device: torch.device, dtype: torch.dtype, threads: int) -> Verdict:
        try:
            if not host_allocator().empty(_NUMEL * 4).is_pinned():
                return False, "page-locking was refused"
            host, kernel = (
                self._timer(mode, device, dtype, self._options.moments, threads) for mode in ("cpu", "gpu")
            )
        except (MemoryError, OSError, RuntimeError) as error:
            return False, f"the CUDA kernel could not be tried: {error}"
        return kernel < host, (
            f"measured on {device}, {_NUMEL} parameters: host threads {1e3 * host:.1f} ms, CUDA kernel over "
            f"the link {1e3 * kernel:.1f} ms"
        )
