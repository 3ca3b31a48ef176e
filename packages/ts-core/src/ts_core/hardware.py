"""The hardware profile: what this machine can move and compute, measured once and kept on disk.

`profile_hardware` measures; `register_rates` lets the packages that own codecs and optimizers add theirs.
What cannot be measured here is assumed (`ASSUMED`, `ASSUMED_RATES`), and `HardwareProfile.assumed` says so.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from . import __version__
from ._cgroup import read_text
from ._probes import Bench, probes_for
from .cores import usable_cores
from .errors import ArgumentError, message
from .memory import find_device, host_budget, page_lock_limit_bytes
from .options import boolean

__all__ = [
    "ASSUMED",
    "ASSUMED_RATES",
    "HardwareProfile",
    "RateFunction",
    "cache_dir",
    "kept_profile",
    "profile_hardware",
    "register_rates",
    "seconds_per_call",
]

fcntl: Any = None
with suppress(ImportError):  # there is none on Windows
    fcntl = importlib.import_module("fcntl")

_VERSION = 1
_LARGEST_FILE = 1 << 20
_log = logging.getLogger("trainstream")

#: Taken for a figure that could not be measured: a PCIe 4.0 x16 card in a desktop with one NVMe drive.
ASSUMED: dict[str, float] = {
    "h2d_bytes_per_s": 24e9,
    "d2h_bytes_per_s": 24e9,
    "both_bytes_per_s": 40e9,
    "device_copy_bytes_per_s": 600e9,
    "host_copy_bytes_per_s": 20e9,
    "host_triad_bytes_per_s": 20e9,
    "disk_read_bytes_per_s": 2e9,
    "disk_write_bytes_per_s": 1e9,
    "page_lock_bytes_per_s": 2e9,
    "launch_s": 5e-6,
}
_CODECS = ("int8", "nf4", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
#: The same for tables of rates, by type of device.
ASSUMED_RATES: dict[str, dict[str, dict[str, float]]] = {
    "cpu": {
        "matmul_flops_per_s": {"bfloat16/1024": 2e10, "float32/1024": 5e10},
        "decode_weights_per_s": dict.fromkeys(_CODECS, 1e9),
        "adamw_params_per_s": {"float32": 3e8, "bfloat16": 3e8, "int8": 3e8},
    },
    "cuda": {
        "matmul_flops_per_s": {"bfloat16/4096": 1e14, "float16/4096": 1e14, "float32/4096": 2e13},
        "decode_weights_per_s": dict.fromkeys(_CODECS, 2e11),
        "adamw_params_per_s": {"float32": 3e8, "bfloat16": 3e8, "int8": 3e8},
    },
}

#: Given the device and whether to be quick, measures the rates of one table.
RateFunction = Callable[[torch.device, bool], Mapping[str, float]]


@dataclass(frozen=True)
class HardwareProfile:
    """What a machine can move and compute, as plain numbers.

    Attributes:
        device: "cuda:0", or "cpu".
        device_name: What the driver calls it; the processor's name for "cpu".
        quick: Measured with small samples.
        unified_memory: The device computes in the host's own memory (an integrated GPU, or the CPU).
        cores: Cores that this process may keep busy.
        ram_bytes: Physical memory, or the container's limit if that is smaller.
        vram_bytes: Memory of the device; 0 for "cpu".
        page_lock_limit_bytes: `RLIMIT_MEMLOCK`, None for no limit; CUDA's page-locking is rarely bound by it.
        h2d_bytes_per_s: Page-locked memory to the device.
        d2h_bytes_per_s: The device to page-locked memory.
        both_bytes_per_s: Sum of the two ways used at once.
        device_copy_bytes_per_s: Copy within the device's memory, bytes read plus bytes written.
        host_copy_bytes_per_s: Copy within host memory on torch's threads, read plus written.
        host_triad_bytes_per_s: a = b + 2 c in host memory, read plus written.
        disk_read_bytes_per_s: Of the temporary directory, past the page cache where the system lets it.
        disk_write_bytes_per_s: The same, to stable storage.
        page_lock_bytes_per_s: Memory page-locked by CUDA in a second.
        launch_s: What one tiny operation costs the host.
        rates: Tables: "matmul_flops_per_s" by "dtype/n" of an n x n product, "decode_weights_per_s" by codec,
            "adamw_params_per_s" by format of moments on host threads, and what else is registered.
        measured: Names of the figures that were measured; those of tables are "rates/<table>/<key>".
        assumed: Names of those that were not.
        version: Of this format.
    """

    device: str
    device_name: str
    quick: bool
    unified_memory: bool
    cores: int
    ram_bytes: int
    vram_bytes: int
    page_lock_limit_bytes: int | None
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both_bytes_per_s: float
    device_copy_bytes_per_s: float
    host_copy_bytes_per_s: float
    host_triad_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    page_lock_bytes_per_s: float
    launch_s: float
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    version: int = _VERSION

    def to_json(self) -> str:
        """Write it as one JSON object; `from_json` reads it back, equal.

        Returns:
            The text.
        """
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Read what `to_json` wrote.

        Args:
            text: The JSON object.

        Returns:
            The profile.

        Raises:
            ArgumentError: Not such an object, of another version, or with a figure that is no number above 0.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"[HardwareProfile.from_json] text: not JSON ({error})") from error
        problem = _problem(data)
        if problem:
            raise ArgumentError(f"[HardwareProfile.from_json] text: {problem}")
        return cls(**{**data, "measured": tuple(data["measured"]), "assumed": tuple(data["assumed"])})


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _tables(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(table, dict) and all(map(_positive, table.values())) for table in value.values()
    )


def _problem(data: object) -> str:
    """Say what keeps parsed JSON from being a profile; "" for nothing."""
    if not isinstance(data, dict):
        return "not an object"
    if data.get("version") != _VERSION or isinstance(data["version"], bool):
        return f"version: expected {_VERSION}, given {data.get('version')!r}"
    names = {f.name for f in fields(HardwareProfile)}
    if set(data) != names:
        return f"fields that lack or are too many: {sorted(set(data) ^ names)}"
    checks: dict[str, Callable[[object], bool]] = {
        **dict.fromkeys(ASSUMED, _positive),
        **dict.fromkeys(("device", "device_name"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("quick", "unified_memory"), lambda value: isinstance(value, bool)),
        **dict.fromkeys(("cores", "ram_bytes", "vram_bytes"), _count),
        "page_lock_limit_bytes": lambda value: value is None or _count(value),
        "rates": _tables,
        **dict.fromkeys(("measured", "assumed"), _names),
    }
    return next((f"{name}: {data[name]!r}" for name, good in checks.items() if not good(data[name])), "")


_lock = threading.RLock()
_rates: dict[str, RateFunction | str] = {}
# Profiles that could not be written to a file.
_unsaved: dict[str, HardwareProfile] = {}


def register_rates(table: str, function: RateFunction | str) -> None:
    """Have a table of `HardwareProfile.rates` measured; replaces what was registered for it.

    Args:
        table: Its name, such as "decode_weights_per_s".
        function: Called with the device and `quick`, returns rates above 0 by name; or "module:name" of such
            a function, imported when a profile is measured. If it raises, the table stays assumed.

    Raises:
        ArgumentError: The name is empty or holds "/", or the function is neither.
    """
    if not isinstance(table, str) or not table or "/" in table:
        raise ArgumentError(message("register_rates", "table", 'a name without "/"', table))
    if not callable(function) and not (isinstance(function, str) and function.count(":") == 1):
        raise ArgumentError(message("register_rates", "function", 'a function or "module:name"', function))
    with _lock:
        _rates[table] = function


def seconds_per_call(call: Callable[[], object], device: torch.device, quick: bool = True) -> float:
    """Time a call, for the functions that `register_rates` takes.

    Args:
        call: What is timed; it may leave work on the device, which is waited for.
        device: The CPU or a CUDA device.
        quick: Repeat for a tenth of a second, not half a second.

    Returns:
        Seconds of the best of up to twenty calls, after one that is not counted; above 0.

    Example:
        >>> seconds_per_call(lambda: None, torch.device("cpu")) > 0
        True
    """
    return Bench(device, quick, Path()).seconds(call)


def cache_dir() -> Path | None:
    """Say where TrainStream keeps what it measured; nothing is created.

    Returns:
        `TRAINSTREAM_CACHE_DIR`, else ``~/.cache/trainstream``; None where there is no home directory.

    Example:
        >>> cache_dir() is None or cache_dir().is_absolute()
        True
    """
    given = os.environ.get("TRAINSTREAM_CACHE_DIR", "").strip()
    with suppress(RuntimeError, OSError):
        return (Path(given).expanduser() if given else Path.home() / ".cache" / "trainstream").absolute()
    return None


def _disk_folder() -> Path:
    """Return the directory whose disk is measured; one that cannot be written leaves the disk assumed."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path()


def _processor(root: str | Path = "/") -> str:
    """Return the processor's name."""
    for line in (read_text(Path(root) / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model"}:
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "cpu"


def _driver() -> str:
    """Return the NVIDIA driver's version line, "" where there is none."""
    lines = (read_text(Path("/proc/driver/nvidia/version")) or "").splitlines()
    return lines[0] if lines else ""


def _device_facts(device: torch.device) -> tuple[str, int, bool]:
    """Return name, bytes of memory, and whether that is the host's."""
    if device.type == "cpu":
        return _processor(), 0, True
    properties: Any = torch.cuda.get_device_properties(device)
    return (
        str(properties.name),
        int(properties.total_memory),
        bool(getattr(properties, "is_integrated", False)),
    )


def _key(device: torch.device, quick: bool, folder: Path) -> dict[str, Any]:
    """Return all that a profile depends on."""
    name, vram, _ = _device_facts(device)
    host = host_budget()
    return {
        "format": _VERSION,
        "library": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": _driver() if device.type == "cuda" else "",
        "machine": [platform.node(), platform.machine(), _processor(), platform.release()],
        "device": [str(device), name, vram],
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "ram": [host.total_bytes, host.limit_bytes],
        "page_lock": page_lock_limit_bytes(),
        "disk": str(folder),
        "rates": sorted(_rates),
        "quick": quick,
    }


def _path(key: Mapping[str, Any]) -> Path | None:
    folder = cache_dir()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return None if folder is None else folder / f"hardware-{digest}.json"


def _read(path: Path | None, key: Mapping[str, Any]) -> HardwareProfile | None:
    """Read a kept profile; anything wrong with the file means that there is none."""
    if path is None:
        return None
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("key") != key:
            return None
        return HardwareProfile.from_json(json.dumps(data.get("profile")))
    except (OSError, ValueError, RecursionError) as error:
        _log.info("hardware profile %s cannot be used and is measured anew: %s", path, error)
        return None


def _write(path: Path | None, key: Mapping[str, Any], profile: HardwareProfile) -> bool:
    """Keep a profile: whole or not at all, readable by this user only."""
    if path is None:
        return False
    text = json.dumps({"key": key, "profile": asdict(profile)}, indent=1)
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
        return True
    except (OSError, ValueError) as error:  # a path may be one that no system takes
        _log.info("the hardware profile is not kept in %s: %s", path.parent, error)
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        return False


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Wait for other processes that measure with the same cache, a minute at most.

    Ranks that start together and measured at once would each find a share of the machine, and keep that.
    """
    with ExitStack() as stack:
        # A system without flock, or a folder that cannot be locked, leaves everyone to measure as they like.
        with suppress(OSError, ValueError, AttributeError):
            if folder is not None and fcntl is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                for _ in range(1200):
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.05)
        yield


def _measured_rates(bench: Bench) -> Iterator[tuple[str, float]]:
    """Go through what the registered functions measure."""
    for table, function in sorted(_rates.items()):
        try:
            if isinstance(function, str):
                module, _, name = function.partition(":")
                function = getattr(importlib.import_module(module), name)
            for key, rate in function(bench.device, bench.quick).items():
                yield f"rates/{table}/{key}", rate
        except Exception as error:  # it is another package's code, on hardware of any kind
            _log.info("hardware profile: %s is assumed: %s", table, error)


def _figures(bench: Bench) -> dict[str, float]:
    """Measure what can be measured."""
    found: dict[str, float] = {}
    for name, probe in probes_for(bench.device).items():
        try:
            found |= probe(bench)
        except Exception as error:  # a figure less is no reason to fail; drivers raise what they like
            _log.info("hardware profile: %s is assumed: %s", name, error)
    found |= dict(_measured_rates(bench))
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # the samples' memory is others' to use
    return {name: float(rate) for name, rate in found.items() if _positive(rate)}


def _profile(bench: Bench) -> HardwareProfile:
    name, vram, unified = _device_facts(bench.device)
    host = host_budget()
    found = _figures(bench)
    assumed = dict(ASSUMED)
    for table, rates in ASSUMED_RATES[bench.device.type].items():
        assumed |= {f"rates/{table}/{key}": rate for key, rate in rates.items()}
    every = {**assumed, **found}
    single: dict[str, Any] = {figure: every[figure] for figure in ASSUMED}
    tables: dict[str, dict[str, float]] = {}
    for figure, rate in sorted(every.items()):
        if figure not in ASSUMED:
            _, table, key = figure.split("/", 2)
            tables.setdefault(table, {})[key] = rate
    return HardwareProfile(
        device=str(bench.device),
        device_name=name,
        quick=bench.quick,
        unified_memory=unified,
        cores=usable_cores(),
        ram_bytes=host.whole_bytes,
        vram_bytes=vram,
        page_lock_limit_bytes=page_lock_limit_bytes(),
        **single,
        rates=tables,
        measured=tuple(sorted(found)),
        assumed=tuple(sorted(set(assumed) - set(found))),
    )


def profile_hardware(
    device: str | torch.device | None = None, quick: bool = True, force: bool = False
) -> HardwareProfile:
    """Say what this machine can move and compute; measured once, then read from a file.

    The file lies in `cache_dir()`, belongs to machine, driver, versions, threads and container limits, and is
    written whole or not at all. A file that is broken, old or cannot be written is no error. Measuring takes
    seconds (`quick`) to half a minute, writes and removes a file of up to 1 GiB in the temporary directory,
    and does not set up CUDA unless a CUDA device is measured.

    Args:
        device: "cuda", "cuda:N", "cpu" or a `torch.device`; None is the current CUDA device, or the CPU where
            there is none.
        quick: Small samples; each kind of profile is kept on its own.
        force: Measure even if a profile is kept.

    Returns:
        The profile; figures that could not be measured are in its `assumed`.

    Raises:
        DeviceError: No such device.
        OptionError: `quick` or `force` is not a boolean.

    Example:
        >>> profile_hardware("cpu").cores >= 1  # doctest: +SKIP
        True
    """
    boolean("quick", quick)
    boolean("force", force)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = find_device("profile_hardware", device)
    folder = _disk_folder()
    # One at a time: two that measure at once would each find half the machine.
    with _lock:
        key = _key(target, quick, folder)
        path = _path(key)
        name = json.dumps([str(path), key], sort_keys=True)
        kept = None if force else _read(path, key) or _unsaved.get(name)
        if kept is not None:
            return kept
        with _alone(None if path is None else path.parent):
            kept = None if force else _read(path, key)  # another process may have been at it
            if kept is not None:
                return kept
            profile = _profile(Bench(target, quick, folder))
            _unsaved.pop(name, None)
            if not _write(path, key, profile):
                _unsaved[name] = profile
            return profile


def kept_profile(device: str | torch.device, quick: bool = True) -> HardwareProfile | None:
    """Return the profile that `profile_hardware` would read from its file; nothing is measured.

    Args:
        device: As for `profile_hardware`.
        quick: As for `profile_hardware`.

    Returns:
        The profile, or None if there is none that holds for this machine as it is now.

    Raises:
        DeviceError: No such device.

    Example:
        >>> kept_profile("cpu")  # doctest: +SKIP
    """
    folder = _disk_folder()
    key = _key(find_device("kept_profile", device), quick, folder)
    path = _path(key)
    return _read(path, key) or _unsaved.get(json.dumps([str(path), key], sort_keys=True))
