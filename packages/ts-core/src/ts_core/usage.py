"""Memory that this process uses now, its peak over time, and giving back what is free.

RAM used = anonymous + shared memory. Pages of mapped files are not counted: the kernel drops them when memory
is short. All figures are in bytes; reading one allocates nothing that lasts and never touches a GPU, except
`device_usage` of a CUDA device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from .memory import find_device
from .options import number

__all__ = [
    "CONTEXT_BYTES",
    "DeviceUsage",
    "HostUsage",
    "PeakSampler",
    "device_usage",
    "host_usage",
    "keep_heap_tight",
    "release_free_memory",
]

#: What a CUDA context and the kernels of the libraries take beside PyTorch's allocator, where NVML cannot
#: say: 0.5 to 0.6 GiB with PyTorch on current GPUs.
CONTEXT_BYTES = 600 * 2**20

_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 128 << 10  # bytes; what glibc begins with
_FIELDS = (b"RssAnon:", b"RssFile:", b"RssShmem:")


@dataclass(frozen=True)
class HostUsage:
    """What this process holds in RAM.

    Attributes:
        anon_bytes: Anonymous memory: heaps, stacks, private maps that were written to, and page-locked memory
            that is anonymous memory registered with CUDA (`ts_paging.pinned_empty`).
        shmem_bytes: Shared memory (shared anonymous maps, mapped files of a tmpfs such as /dev/shm).
        file_bytes: Resident pages of mapped files; the kernel takes them back when it needs room.
        source: "status", "statm" (older kernels: shared memory counts as file), or "psutil" (no /proc:
            everything resident counts as anonymous).
    """

    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    source: str = "status"

    @property
    def used_bytes(self) -> int:
        """Bytes that only ending the process, freeing or swapping gives back: anonymous + shared."""
        return self.anon_bytes + self.shmem_bytes

    @property
    def resident_bytes(self) -> int:
        """Everything resident: used + pages of mapped files."""
        return self.used_bytes + self.file_bytes


@dataclass(frozen=True)
class DeviceUsage:
    """What this process holds of one device's memory.

    Attributes:
        device: "cuda:0", or "cpu".
        used_bytes: Bytes, the CUDA context included.
        source: "nvml" (this process by its id), "nvml-alone" (NVML knows no id of ours, as in a container,
            but this is the only process on the device), "estimate" (`torch.cuda.memory_reserved` +
            `CONTEXT_BYTES`), or a source of `HostUsage` for "cpu".
    """

    device: str
    used_bytes: int
    source: str


def _read(path: str) -> bytes:
    # os.open and os.read: half the cost of a file object; one read gives one snapshot.
    try:
        file = os.open(path, os.O_RDONLY)
    except (OSError, ValueError):
        return b""
    try:
        return os.read(file, 8192)
    except OSError:
        return b""
    finally:
        os.close(file)


def _status(text: bytes) -> list[int] | None:
    """RssAnon, RssFile and RssShmem in bytes; None unless all three are there (Linux 4.5)."""
    values = []
    for field in _FIELDS:
        at = text.find(field)
        words = text[at + len(field) : at + len(field) + 32].split(None, 1) if at >= 0 else []
        if not words or not words[0].isdigit():
            return None
        values.append(int(words[0]) * 1024)  # "kB" here means 1024 bytes
    return values


def host_usage(root: str | os.PathLike[str] = "/") -> HostUsage:
    """Say what this process holds in RAM now.

    used = RssAnon + RssShmem of /proc/self/status. Takes about 15 us. The kernel keeps these counters per CPU
    core and, in versions 6.2 to 6.15, reports them without summing: there they may be off by some MB on a
    machine with many cores.

    Page-locked memory that is registered anonymous memory (`cudaHostRegister`, what `ts_paging.pinned_empty`
    does) is in `anon_bytes`. What `cudaHostAlloc` made (`torch.Tensor.pin_memory`) belongs to the driver, and
    whether the kernel counts it depends on the driver: add `torch.cuda.host_memory_stats()` where it matters.

    Args:
        root: Directory that holds `proc`; another one than "/" serves tests.

    Returns:
        The usage; an unreadable file makes it less exact, never an error.

    Example:
        >>> usage = host_usage()
        >>> 0 < usage.used_bytes <= usage.resident_bytes
        True
    """
    base = os.fspath(root).rstrip("/")
    values = _status(_read(f"{base}/proc/self/status"))
    if values is not None:
        return HostUsage(values[0], values[2], values[1])
    words = _read(f"{base}/proc/self/statm").split()
    if len(words) > 2 and words[1].isdigit() and words[2].isdigit():
        page = os.sysconf("SC_PAGE_SIZE")
        resident, shared = int(words[1]) * page, int(words[2]) * page
        return HostUsage(max(resident - shared, 0), 0, shared, "statm")
    import psutil  # here, since it is a third of this package's import time

    return HostUsage(int(psutil.Process().memory_info().rss), 0, 0, "psutil")


def _used() -> int:
    return host_usage().used_bytes


class PeakSampler:
    """Keep the largest of a figure that is read again and again by a daemon thread.

    peak = max over samples of read(). One sample of the RAM in use takes about 20 us, so the default interval
    costs 0.2 % of one core. A peak between two samples is missed: call `sample()` where one is expected.

    Args:
        interval_s: Seconds between two samples.
        read: Function without arguments that returns bytes; `None` reads `host_usage().used_bytes`.
        baseline_bytes: Subtracted from `used_bytes`, not from `peak_bytes`.

    Raises:
        OptionError: `interval_s` is no number above 0.

    Example:
        >>> with PeakSampler() as sampler:
        ...     data = bytearray(2**20)
        >>> sampler.peak_bytes > 0
        True
    """

    def __init__(
        self, interval_s: float = 0.01, read: Callable[[], int] | None = None, *, baseline_bytes: int = 0
    ) -> None:
        """Set up; sampling begins with `start()` or a `with` statement."""
        self.interval_s = number("interval_s", interval_s, above=0)
        self.baseline_bytes = baseline_bytes
        self._read = _used if read is None else read
        self._peak = 0
        self._count = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._halt = threading.Event()
        self._lock = threading.Lock()

    @property
    def peak_bytes(self) -> int:
        """Largest sample since the start or the last `reset()`; 0 before the first one."""
        return self._peak

    @property
    def used_bytes(self) -> int:
        """`peak_bytes` above `baseline_bytes`; never negative."""
        return max(self._peak - self.baseline_bytes, 0)

    @property
    def count(self) -> int:
        """Samples taken since the start or the last `reset()`."""
        return self._count

    def sample(self) -> int:
        """Take one sample now, in the calling thread.

        Returns:
            What was read, in bytes.
        """
        value = self._read()
        with self._lock:
            self._peak = max(self._peak, value)
            self._count += 1
        return value

    def reset(self) -> int:
        """Forget the peak and begin again with a fresh sample.

        Returns:
            The peak until now, in bytes.
        """
        with self._lock:
            peak, self._peak, self._count = self._peak, 0, 0
        self.sample()
        return peak

    def start(self) -> PeakSampler:
        """Take a sample and start the thread; nothing happens if it runs already."""
        if self._thread is None:
            self.sample()
            self._halt.clear()
            self._thread = threading.Thread(target=self._run, name="ts-peak-sampler", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> int:
        """Stop the thread after a last sample.

        Returns:
            The peak, in bytes.

        Raises:
            Exception: What `read` raised in the thread, which ended the sampling.
        """
        if self._thread is not None:
            self._halt.set()
            self._thread.join()
            self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error
            self.sample()
        return self._peak

    def _run(self) -> None:
        try:
            while not self._halt.wait(self.interval_s):
                self.sample()
        except BaseException as error:  # told by stop(), in the thread that asked
            self._error = error

    def __enter__(self) -> PeakSampler:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; an error of the body goes before one of the sampling."""
        with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
            self.stop()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The C library's function that gives free heap pages back; None where there is none (only glibc)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function


def keep_heap_tight() -> bool:
    """Let the C library return every large block to the system at once; glibc only.

    By itself glibc learns from the blocks that are freed to keep such of up to 32 MiB. Between tensors that
    live longer they become holes, and a training step can take twice its bytes. Call it early: blocks that
    were kept before stay until `release_free_memory`. It holds for the process and cannot be taken back.

    Returns:
        Whether it had an effect.

    Example:
        >>> keep_heap_tight() in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK))
    except (OSError, AttributeError):
        return False


def release_free_memory(*, collect: bool = False) -> int:
    """Give memory that was freed, but kept by the C library's allocator, back to the system.

    The allocator keeps freed blocks of up to 32 MiB, CPU tensors among them, for the next caller; they count
    as used. Takes about a millisecond per GiB of heap and more where much is given back; the next
    allocations are slower by their page faults. The GIL is released meanwhile.

    Args:
        collect: Run Python's garbage collector first (0.1 s and more with large libraries loaded).

    Returns:
        Bytes by which the RAM in use fell; 0 where the C library is not glibc or nothing was free.

    Example:
        >>> release_free_memory() >= 0
        True
    """
    before = _used()
    if collect:
        gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    return max(before - _used(), 0)


def _nvml_bytes(index: int) -> tuple[int, str] | None:
    """This process's bytes on a CUDA device by NVML, and the source; None if NVML does not tell."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        # By its UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        for process in running:
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory), "nvml"
        if len(running) == 1:
            known = running[0].usedGpuMemory
            if known:
                return int(known), "nvml-alone"
    except Exception:  # whatever NVML raises: not installed, no driver, no permission, a MIG slice
        pass
    return None


def device_usage(device: str | torch.device | Any = "cuda") -> DeviceUsage:
    """Say what this process holds of a device's memory, the CUDA context included.

    By NVML where nvidia-ml-py is installed (`pynvml`) and the driver tells, else reserved by PyTorch's
    allocator + `CONTEXT_BYTES`; `DeviceUsage.source` says which. A process that has not used CUDA holds
    nothing, and asking does not change that. Takes 0.1 to 1 ms.

    Args:
        device: "cuda", "cuda:N", a `torch.device`, or "cpu" for the RAM of `host_usage()`.

    Returns:
        The usage.

    Raises:
        DeviceError: No such device, or no CUDA at all.

    Example:
        >>> device_usage("cpu").used_bytes > 0
        True
    """
    target = find_device("device_usage", device)
    if target.type == "cpu":
        host = host_usage()
        return DeviceUsage("cpu", host.used_bytes, host.source)
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return DeviceUsage(str(target), 0, "estimate")
    index = int(target.index)
    found = _nvml_bytes(index)
    if found is not None:
        return DeviceUsage(f"cuda:{index}", *found)
    return DeviceUsage(f"cuda:{index}", int(torch.cuda.memory_reserved(index)) + CONTEXT_BYTES, "estimate")
