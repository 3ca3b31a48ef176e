"""`trainstream doctor`: what this machine gives, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainstream.cli.console import Console
from ts_core.cores import usable_cores
from ts_core.errors import TrainStreamError
from ts_core.hardware import HardwareProfile, cache_dir, profile_hardware
from ts_core.memory import (
    cgroup_limit,
    disk_budget,
    format_bytes,
    host_budget,
    local_ranks,
    page_lock_limit_bytes,
)

__all__ = ["Check", "Machine", "examine", "run"]

_PACKAGES = ("ts_quant", "ts_optim", "ts_paging", "ts_fused")
_LEAST_RAM = 256 << 20
# Below these a part is slower than is usual, and something can often be done.
_SLOW_LINK = 10e9
_SLOW_DISK = 0.5e9
_TORCH = "install a build of torch for your CUDA driver: https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Attributes:
        name: What was looked at.
        status: "ok"; "slow" and "missing" cost speed or a feature; "failed" makes training impossible;
            "unknown" could not be found out.
        value: For people.
        fix: Command or action that mends it, "" for none.
        data: For programs.
    """

    name: str
    status: str
    value: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What the checks look at.

    Attributes:
        root: Directory that holds `proc`, `sys` and `dev`; another one than "/" serves tests.
        profile: What was measured, None if that failed.
        trouble: Why it failed.
    """

    root: Path = Path("/")
    profile: HardwareProfile | None = None
    trouble: str = ""

    def read(self, path: str) -> str:
        """Read a small file of the system, "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def has_card(self) -> bool:
        """Tell whether an NVIDIA card is plugged in, whatever torch sees."""
        if (self.root / "dev/nvidiactl").exists():
            return True
        vendors = (self.root / "sys/bus/pci/devices").glob("*/vendor")
        return any(
            self.read(str(path.relative_to(self.root))) == "0x10de"
            and self.read(str(path.with_name("class").relative_to(self.root))).startswith("0x03")
            for path in vendors
        )


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


def _torch(machine: Machine) -> Iterator[Check]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    fix = _TORCH if not torch.version.cuda and machine.has_card() else ""
    data = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    value = f"{torch.__version__} ({build}), Python {platform.python_version()}"
    yield Check("torch", "missing" if fix else "ok", value, fix, data)


def _gpu(machine: Machine) -> Iterator[Check]:
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1  Release Build ..."
    found = re.search(r"Module.*?\s(\d+(?:\.\d+)+)\s", machine.read("proc/driver/nvidia/version") + " ")
    driver = found.group(1) if found else ""
    if not torch.cuda.is_available():
        value, fix = "none; training runs on the processor", ""
        if machine.has_card() and not torch.version.cuda:
            value, fix = "there is a card, but torch is a CPU build", _TORCH
        elif machine.has_card() and driver:
            value = f"there is a card and driver {driver}, but torch cannot use it"
            fix = "nvidia-smi shows whether the driver works; unset CUDA_VISIBLE_DEVICES; " + _TORCH
        elif machine.has_card():
            value = "there is a card, but no driver"
            fix = "install the NVIDIA driver; start a container with --gpus all"
        yield Check("gpu", "missing" if fix else "ok", value, fix, {"devices": [], "driver": driver})
        return
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": str(properties.name),
                "vram_bytes": int(properties.total_memory),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    torch.ones(1, device="cuda").add_(1.0).item()  # a driver or build that cannot run anything raises here
    names = ", ".join(f"{d['name']} {format_bytes(d['vram_bytes'])} sm_{d['capability']}" for d in devices)
    value = f"{names}; driver {driver or 'unknown'}"
    yield Check("gpu", "ok", value, "", {"devices": devices, "driver": driver})


def _packages(machine: Machine) -> Iterator[Check]:
    for name in _PACKAGES:
        folder = f"./packages/{name.replace('_', '-')}"
        install = f"pip install --no-deps --force-reinstall {folder}"
        try:
            module = importlib.import_module(name)
            cuda = bool(importlib.import_module(f"{name}._C").with_cuda)
        except Exception as error:  # a native module that does not load raises anything
            text = " ".join(str(error).split())
            yield Check(name, "failed", f"cannot be imported: {text}", install, {"cuda": None})
            continue
        wanted = torch.cuda.is_available() and not cuda
        value = (
            f"{getattr(module, '__version__', 'installed')}, CUDA kernels {'built' if cuda else 'not built'}"
        )
        fix = f"CUDA_HOME=/usr/local/cuda TS_WITH_CUDA=ON {install}" if wanted else ""
        yield Check(name, "slow" if wanted else "ok", value, fix, {"cuda": cuda})


def _link(machine: Machine) -> Iterator[Check]:
    limit, profile = page_lock_limit_bytes(), machine.profile
    bound = "no limit" if limit is None else f"limit {format_bytes(limit)} (mlock)"
    data: dict[str, Any] = {"limit_bytes": limit, "bytes_per_s": None}
    if profile is None or profile.device == "cpu":
        yield Check("page-lock", "ok", f"{bound}; the rate needs a GPU", "", data)
        yield Check("link", "ok", "none without a GPU", "", {"h2d": None, "d2h": None, "both": None})
        return
    if "page_lock_bytes_per_s" in profile.measured:
        data["bytes_per_s"] = profile.page_lock_bytes_per_s
        yield Check("page-lock", "ok", f"{_rate(profile.page_lock_bytes_per_s)}, {bound}", "", data)
    else:
        fix = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
        yield Check("page-lock", "slow", f"refused; {bound}", fix, data)
    data = {
        "h2d": profile.h2d_bytes_per_s,
        "d2h": profile.d2h_bytes_per_s,
        "both": profile.both_bytes_per_s,
    }
    if "h2d_bytes_per_s" not in profile.measured:
        yield Check("link", "unknown", "could not be measured", "", dict.fromkeys(data))
        return
    slow = min(profile.h2d_bytes_per_s, profile.d2h_bytes_per_s) < _SLOW_LINK and not profile.unified_memory
    fix = "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv shows the slot's"
    yield Check(
        "link",
        "slow" if slow else "ok",
        f"to the GPU {_rate(data['h2d'])}, back {_rate(data['d2h'])}, together {_rate(data['both'])}",
        f"{fix} speed; move the card to a faster one" if slow else "",
        data,
    )


def _memory(machine: Machine) -> Iterator[Check]:
    host, profile = host_budget(machine.root), machine.profile
    value = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} usable"
    data: dict[str, Any] = {
        "total_bytes": host.total_bytes,
        "available_bytes": host.available_bytes,
        "source": host.source,
        "copy_bytes_per_s": None,
    }
    if profile is not None and "host_copy_bytes_per_s" in profile.measured:
        data["copy_bytes_per_s"] = profile.host_copy_bytes_per_s
        value += f", copies at {_rate(profile.host_copy_bytes_per_s)}"
    low = host.available_bytes < _LEAST_RAM
    yield Check(
        "memory",
        "failed" if low else "ok",
        value,
        "end other processes, or raise the container's memory limit" if low else "",
        data,
    )


def _container(machine: Machine) -> Iterator[Check]:
    group = cgroup_limit(machine.root)
    every = os.cpu_count() or 1
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    cores = usable_cores(machine.root)
    limit = None if group is None else group.limit_bytes
    value = "no memory limit" if limit is None else f"memory limit {format_bytes(limit)}"
    value += f"; {cores} of {every} cores"
    value += " (CPU quota)" if cores < mask else " (affinity)" if mask < every else ""
    ranks = local_ranks()
    value += f"; shared by {ranks} ranks" if ranks > 1 else ""
    yield Check("container", "ok", value, "", {"memory_limit_bytes": limit, "cores": cores, "ranks": ranks})
    threads = torch.get_num_threads()
    few = threads < cores and ranks == 1
    yield Check(
        "threads",
        "slow" if few or threads > cores else "ok",
        f"torch uses {threads} of {cores} cores",
        f"export OMP_NUM_THREADS={max(1, cores // ranks)}" if few or threads > cores else "",
        {"threads": threads, "cores": cores},
    )


def _disk(machine: Machine) -> Iterator[Check]:
    folder, profile = tempfile.gettempdir(), machine.profile
    free = disk_budget(folder)
    kinds = [line.split() for line in machine.read("proc/mounts").splitlines()]
    below = [part for part in kinds if len(part) > 2 and Path(folder).is_relative_to(part[1])]
    kind = max(below, key=lambda part: len(part[1]))[2] if below else "unknown"
    value, status, fix = f"{format_bytes(free)} free in {folder} ({kind})", "ok", ""
    data: dict[str, Any] = {"folder": folder, "free_bytes": free, "filesystem": kind}
    data |= {"read_bytes_per_s": None, "write_bytes_per_s": None}
    if profile is not None and "disk_read_bytes_per_s" in profile.measured:
        read, write = profile.disk_read_bytes_per_s, profile.disk_write_bytes_per_s
        data |= {"read_bytes_per_s": read, "write_bytes_per_s": write}
        value += f", reads {_rate(read)}, writes {_rate(write)}"
        if min(read, write) < _SLOW_DISK:
            status, fix = "slow", "export TMPDIR=/a/directory/on/an/NVMe/drive"
    if kind in {"tmpfs", "ramfs"}:
        status, value = "slow", f"{value}; files there take RAM"
        fix = "export TMPDIR=/a/directory/on/a/disk"
    yield Check("disk", status, value, fix, data)


def _io_uring(machine: Machine) -> Iterator[Check]:
    from ts_paging import DiskStore

    with DiskStore() as store:
        direct, usable = store.direct, store.uring
    data = {"usable": usable, "direct": direct}
    if usable:
        yield Check("io_uring", "ok", "usable, with direct I/O", "", data)
    elif not direct:
        fix = "export TMPDIR=/a/directory/on/ext4/or/xfs"
        yield Check("io_uring", "slow", "the temporary directory takes no direct I/O", fix, data)
    else:
        setting = machine.read("proc/sys/kernel/io_uring_disabled")
        fix = "let the container's seccomp profile pass io_uring_setup (kernel 5.6 or newer)"
        if setting not in {"", "0"}:
            fix = "sudo sysctl kernel.io_uring_disabled=0"
        yield Check("io_uring", "slow", "refused; threads read and write instead", fix, data)


def _huge_pages(machine: Machine) -> Iterator[Check]:
    place = "sys/kernel/mm/transparent_hugepage/enabled"
    setting = machine.read(place).partition("[")[2].partition("]")[0]
    never = setting == "never"
    yield Check(
        "huge pages",
        "slow" if never else "ok" if setting else "unknown",
        f"transparent: {setting or 'not told'}",
        f"echo madvise | sudo tee /{place}" if never else "",
        {"transparent": setting or None},
    )


def _compilers(machine: Machine) -> Iterator[Check]:
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [os.environ.get("CUDACXX", ""), *(f"{home}/bin/nvcc" for home in homes if home), "nvcc"]
    nvcc = next(filter(None, map(shutil.which, filter(None, places))), None)
    named = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    cxx = next(filter(None, map(shutil.which, filter(None, named))), None)
    gpu = torch.cuda.is_available() or machine.has_card()
    if cxx is None:
        fix = "install a C++17 compiler (apt install g++); only building the packages needs it"
        yield Check("C++ compiler", "missing", "none", fix, {"path": None})
    else:
        yield Check("C++ compiler", "ok", cxx, "", {"path": cxx})
    if nvcc is None:
        fix = "install the CUDA toolkit and set CUDA_HOME; only building CUDA kernels needs it" if gpu else ""
        yield Check("CUDA compiler", "missing" if gpu else "ok", "none", fix, {"path": None})
    else:
        yield Check("CUDA compiler", "ok", nvcc, "", {"path": nvcc})


def _cache(machine: Machine) -> Iterator[Check]:
    folder = cache_dir()
    fix = "export TRAINSTREAM_CACHE_DIR=/a/directory/that/can/be/written"
    if folder is None:
        yield Check("cache", "slow", "no home directory; nothing is kept", fix, {"folder": None})
        return
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    good = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    value = str(folder) if good else f"{folder} cannot be written; the machine is measured at every start"
    yield Check("cache", "ok" if good else "slow", value, "" if good else fix, {"folder": str(folder)})


_CHECKS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "torch": _torch,
    "gpu": _gpu,
    "packages": _packages,
    "link": _link,
    "memory": _memory,
    "container": _container,
    "disk": _disk,
    "io_uring": _io_uring,
    "huge pages": _huge_pages,
    "compilers": _compilers,
    "cache": _cache,
}


def examine(machine: Machine) -> list[Check]:
    """Look at everything.

    Args:
        machine: What was measured, and where the system's files are.

    Returns:
        The checks, in the order in which they are shown; one that cannot be made is "unknown".
    """
    found: list[Check] = []
    for name, check in _CHECKS.items():
        try:
            found.extend(check(machine))
        except Exception as error:  # whatever is broken here is what the user wants to hear about
            text = " ".join(str(error).split()) or type(error).__name__
            found.append(Check(name, "unknown", f"{type(error).__name__}: {text}"))
    if machine.trouble:
        found.append(Check("profile", "unknown", f"could not be measured: {machine.trouble}"))
    return found


def _measure(force: bool) -> tuple[HardwareProfile | None, str]:
    """Measure the GPU, else the processor; say what went wrong."""
    trouble = ""
    for device in (None, "cpu"):
        try:
            return profile_hardware(device, force=force), trouble
        except (TrainStreamError, RuntimeError, OSError) as error:
            trouble = trouble or " ".join(str(error).split()) or type(error).__name__
    return None, trouble


def _show(console: Console, checks: list[Check]) -> None:
    """Print the table, and under each line what mends it."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.say(f"{check.name:<{width}}  {check.status:<7}  {check.value}")
        if check.fix:
            console.say(f"{'':<{width}}           -> {check.fix}")
    failed = [check.name for check in checks if check.status == "failed"]
    mend = sum(bool(check.fix) for check in checks)
    if failed:
        console.say(f"\ntraining is impossible here: {', '.join(failed)}")
    else:
        console.say(f"\nready to train{f'; {mend} of the above can be mended' if mend else ''}")


def run(console: Console, *, force: bool = False) -> int:
    """Answer the command.

    Args:
        console: Where the answer goes; one event "doctor" with `ok`, `checks` and `profile` for programs.
        force: Measure even if a profile is kept.

    Returns:
        Exit code: 0, or 1 if something makes training impossible.
    """
    if sys.stderr.isatty():
        console.note("looking at this machine; the first time takes some seconds")
    profile, trouble = _measure(force)
    checks = examine(Machine(profile=profile, trouble=trouble))
    ok = all(check.status != "failed" for check in checks)
    console.event(
        "doctor",
        ok=ok,
        checks=[asdict(check) for check in checks],
        profile=None if profile is None else json.loads(profile.to_json()),
    )
    _show(console, checks)
    return 0 if ok else 1
