"""What `hardware` measures and how: each probe takes a `Bench` and returns figures by name.

A figure is called as the field of `HardwareProfile` it fills, or ``rates/<table>/<key>``. A probe that cannot
run raises; its figures stay assumed. Rates count bytes read and bytes written, except on the link and the
disk, which are crossed once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import registry
from .dtypes import dtype_name
from .errors import StorageError
from .memory import disk_budget, host_budget

__all__ = ["Bench", "Probe", "probes_for"]

_MIB = 1 << 20
#: Alignment that direct I/O of every common file system accepts.
_DIRECT_CHUNK = 8 * _MIB
_MOST_TIMES = 20

# torch leaves much of its CUDA interface untyped.
_CUDA: Any = torch.cuda


@dataclass(frozen=True)
class Bench:
    """What is measured, how thoroughly, and by which clock.

    Attributes:
        device: The CPU or a CUDA device with its index.
        quick: Small samples and few repetitions.
        folder: Directory whose disk is measured.
        clock: Seconds that only grow.
    """

    device: torch.device
    quick: bool
    folder: Path
    clock: Callable[[], float] = time.perf_counter

    def synchronize(self) -> None:
        """Wait for what the device was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Time a call, after one that is not counted: the best of up to twenty.

        Args:
            call: What is timed; it may leave work on the device.

        Returns:
            Seconds, above zero.
        """
        call()
        self.synchronize()
        limit = 0.1 if self.quick else 0.5
        best = total = 0.0
        for count in range(1, _MOST_TIMES + 1):
            start = self.clock()
            call()
            self.synchronize()
            took = self.clock() - start
            best = took if count == 1 else min(best, took)
            total += took
            if total >= limit and count >= 2:
                break
        return max(best, 1e-9)


Probe = Callable[[Bench], dict[str, float]]


def _sample_bytes(bench: Bench, share: int = 16) -> int:
    """Return how large a sample of host memory is: far beyond the caches, and little of what is free."""
    wanted = 256 * _MIB if bench.quick else 1024 * _MIB
    return max(_MIB, min(wanted, host_budget().available_bytes // share))


def host_memory(bench: Bench) -> dict[str, float]:
    """Copy and triad (a = b + 2 c) of fp32 arrays on torch's threads of this process."""
    numel = _sample_bytes(bench) // 4
    a, b, c = (torch.zeros(numel) for _ in range(3))
    copy = bench.seconds(lambda: a.copy_(b))
    triad = bench.seconds(lambda: torch.add(b, c, alpha=2.0, out=a))
    return {"host_copy_bytes_per_s": 8 * numel / copy, "host_triad_bytes_per_s": 12 * numel / triad}


def matmul(bench: Bench) -> dict[str, float]:
    """Square products by dtype and size, 2 n^3 operations each."""
    on_gpu = bench.device.type == "cuda"
    sizes = (1024, 4096, 8192) if on_gpu else (256, 1024)
    kinds = (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.bfloat16, torch.float32)
    rates: dict[str, float] = {}
    for dtype in kinds:
        for n in sizes[:2] if bench.quick else sizes:
            x, y = (torch.full((n, n), 0.5, dtype=dtype, device=bench.device) for _ in range(2))
            out = torch.empty_like(x)

            def product(x: torch.Tensor = x, y: torch.Tensor = y, out: torch.Tensor = out) -> None:
                torch.mm(x, y, out=out)

            rates[f"rates/matmul_flops_per_s/{dtype_name(dtype)}/{n}"] = 2 * n**3 / bench.seconds(product)
    return rates


def launch(bench: Bench) -> dict[str, float]:
    """Seconds that one tiny operation costs the host, the mean of a row of them."""
    times = 200
    x = torch.zeros(16, device=bench.device)

    def row() -> None:
        for _ in range(times):
            x.add_(1.0)

    return {"launch_s": bench.seconds(row) / times}


def device_copy(bench: Bench) -> dict[str, float]:
    """Copy within the device's own memory; on the CPU that is host memory."""
    nbytes = _sample_bytes(bench)
    if bench.device.type == "cuda":
        nbytes = max(_MIB, min(nbytes, torch.cuda.mem_get_info(bench.device)[0] // 8))
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return {"device_copy_bytes_per_s": 2 * nbytes / bench.seconds(lambda: target.copy_(source))}


def link(bench: Bench) -> dict[str, float]:
    """Page-locked memory to the device, back, and both at once on two streams."""
    if bench.device.type != "cuda":
        raise RuntimeError("the CPU has no link")
    nbytes = min(_sample_bytes(bench), 64 * _MIB if bench.quick else 256 * _MIB)
    if nbytes < 8 * _MIB:
        raise RuntimeError("too little RAM is free to measure the link")
    down, up = (registry.host_allocator().empty(nbytes) for _ in range(2))
    if not (down.is_pinned() and up.is_pinned()):
        raise RuntimeError("no page-locked memory to measure the link with")
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    # The allocator hands out memory that work of the current stream may still be reading.
    bench.synchronize()
    with torch.cuda.device(bench.device):
        streams = [_CUDA.Stream(bench.device) for _ in range(2)]

        def h2d() -> None:
            with torch.cuda.stream(streams[0]):
                there.copy_(down, non_blocking=True)

        def d2h() -> None:
            with torch.cuda.stream(streams[1]):
                up.copy_(back, non_blocking=True)

        def both() -> None:
            h2d()
            d2h()

        # Every call ends with the device idle, so nothing of these tensors is under way when they are freed.
        return {
            "h2d_bytes_per_s": nbytes / bench.seconds(h2d),
            "d2h_bytes_per_s": nbytes / bench.seconds(d2h),
            "both_bytes_per_s": 2 * nbytes / bench.seconds(both),
        }


def page_lock(bench: Bench) -> dict[str, float]:
    """Page-lock and release memory that is already there."""
    if bench.device.type != "cuda":
        raise RuntimeError("page-locking needs a CUDA device")
    # A multiple of the page size, in memory of its own pages, so that no neighbour is locked with it.
    nbytes = _sample_bytes(bench, share=32) // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, nbytes) as memory:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        view.zero_()
        address, runtime = view.data_ptr(), _CUDA.cudart()
        del view
        best = 0.0
        with torch.cuda.device(bench.device):
            for count in range(2 if bench.quick else 4):
                start = bench.clock()
                code = int(runtime.cudaHostRegister(address, nbytes, 0))
                took = bench.clock() - start
                if code:
                    # The error stays pending and would be raised by some later kernel; this one takes it.
                    with suppress(RuntimeError):
                        torch.zeros(1, device=bench.device)
                    raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with code {code}")
                runtime.cudaHostUnregister(address)
                best = took if count == 0 else min(best, took)
    return {"page_lock_bytes_per_s": nbytes / max(best, 1e-9)}


def _open(path: Path, flags: int) -> int:
    """Open for direct I/O where the file system takes it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, flags)


def _through(bench: Bench, step: Callable[[int], int], most: int) -> tuple[int, float]:
    """Move chunks until `most` bytes are through or the time is up; return bytes and when it began."""
    done, start = 0, bench.clock()
    limit = 0.5 if bench.quick else 5.0
    while done < most:
        moved = step(done)
        if moved <= 0:
            break
        done += moved
        if bench.clock() - start >= limit:
            break
    return done, start


def disk(bench: Bench) -> dict[str, float]:
    """Write a file and read it back, in chunks of 8 MiB, past the page cache where the system lets it."""
    most = (128 if bench.quick else 1024) * _MIB
    if disk_budget(bench.folder) < 4 * most:
        raise StorageError(f"[profile_hardware] too little is free in {bench.folder} to measure its disk")
    with ExitStack() as stack:
        handle, name = tempfile.mkstemp(prefix="trainstream-probe-", dir=bench.folder)
        os.close(handle)
        stack.callback(os.unlink, name)
        chunk = stack.enter_context(mmap.mmap(-1, _DIRECT_CHUNK))  # page-aligned, as direct I/O asks
        # Bytes that no file system or drive compresses away.
        chunk.write(os.urandom(_MIB) * (_DIRECT_CHUNK // _MIB))
        descriptor = _open(Path(name), os.O_RDWR)
        stack.callback(os.close, descriptor)
        written, start = _through(bench, lambda at: os.pwrite(descriptor, chunk, at), most)
        os.fsync(descriptor)
        wrote = max(bench.clock() - start, 1e-9)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read, start = _through(bench, lambda at: os.preadv(descriptor, [chunk], at), written)
        took = max(bench.clock() - start, 1e-9)
    if not written or not read:
        raise StorageError(f"[profile_hardware] nothing could be written in {bench.folder}")
    return {"disk_write_bytes_per_s": written / wrote, "disk_read_bytes_per_s": read / took}


def probes_for(device: torch.device) -> dict[str, Probe]:
    """List what can be measured with a device.

    Args:
        device: The CPU or a CUDA device.

    Returns:
        Probes by name, in the order in which they run.
    """
    found: dict[str, Probe] = {
        "host memory": host_memory,
        "matmul": matmul,
        "launch": launch,
        "device copy": device_copy,
        "disk": disk,
    }
    if device.type == "cuda":
        found |= {"link": link, "page lock": page_lock}
    return found
