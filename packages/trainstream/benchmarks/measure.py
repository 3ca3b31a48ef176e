"""What the benchmark scripts measure with: device memory, the link, phases of a step, bytes on the host."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import hashlib
import mmap
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "Counters",
    "Sampler",
    "StepClock",
    "digest",
    "host_bytes",
    "host_tensor_bytes",
    "launches",
    "link_rate",
    "machine",
    "operators",
    "optimizer_alone",
    "read_rate",
]

VERSIONS = (
    "torch", "transformers", "peft", "bitsandbytes", "liger-kernel", "torchao", "deepspeed", "trainstream"
)  # fmt: skip


class Sampler(threading.Thread):
    """Clock, power and device memory by NVML, the whole device's and this process's, every 20 ms."""

    def __init__(self) -> None:
        """Look for NVML; without it the fields stay empty."""
        super().__init__(daemon=True)
        self.clock_mhz: list[int] = []
        self.power_w: list[float] = []
        self.used_bytes = self.own_bytes = 0
        self.own_source = ""
        self.halt = threading.Event()
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # whatever NVML raises where there is none, and torch without a GPU
            self.nvml = None

    def run(self) -> None:
        """Sample until told to halt."""
        from ts_core.usage import device_usage

        while self.nvml and not self.halt.wait(0.02):
            self.clock_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
            self.power_w.append(self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3)
            self.used_bytes = max(self.used_bytes, self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)
            own = device_usage("cuda:0")
            self.own_bytes, self.own_source = max(self.own_bytes, own.used_bytes), own.source

    def fields(self) -> dict:
        """Medians, the limit and the peak."""
        if not self.clock_mhz:
            return {}
        limit = self.nvml.nvmlDeviceGetPowerManagementLimit(self.handle) / 1e3
        return {
            "clock_mhz": statistics.median(self.clock_mhz),
            "power_w": round(statistics.median(self.power_w), 1),
            "power_limit_w": limit,
            "device_used_gb": round(self.used_bytes / 1e9, 3),
            "nvml_peak_gb": round(self.own_bytes / 1e9, 3),
            "nvml_peak_source": self.own_source,
        }


def link_rate(mib: int = 256, repeat: int = 8) -> float:
    """GB/s of a plain copy from page-locked memory to the GPU, the best of some."""
    import torch

    import ts_paging

    host = ts_paging.pinned_empty(mib << 20)
    there = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (mib << 20) / min(seconds[1:]) / 1e9


def read_rate(folder: Path, mib: int = 512, threads: tuple[int, ...] = (1, 4, 8), repeat: int = 3) -> dict:
    """GB/s of direct reads of a file in a folder, 4 MiB at a time, by number of threads: the best of some."""
    piece = 4 << 20
    nbytes = mib << 20
    path = Path(folder) / f"read-probe-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:  # a file system without direct I/O
        file = os.open(path, flags, 0o600)
    found = {}
    try:
        source = mmap.mmap(-1, piece)  # aligned, as direct I/O wants it
        source.write(os.urandom(piece))
        for offset in range(0, nbytes, piece):
            os.pwritev(file, [source], offset)
        os.fsync(file)
        for count in threads:
            buffers = [mmap.mmap(-1, piece) for _ in range(count)]

            def work(index: int, buffers: list = buffers) -> None:
                for offset in range(index * piece, nbytes, len(buffers) * piece):
                    if os.preadv(file, [buffers[index]], offset) != piece:
                        raise OSError(f"{path}: short read at {offset}")

            seconds = []
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                for _ in range(repeat):
                    start = time.perf_counter()
                    list(pool.map(work, range(count)))
                    seconds.append(time.perf_counter() - start)
            found[str(count)] = round(nbytes / min(seconds) / 1e9, 3)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return found


def digest(parameters) -> str:
    """Hash of the bytes of trained weights."""
    import torch

    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class StepClock:
    """Times the phases of steps: on a GPU by events of the current stream, else by the clock.

    Attributes:
        tracing: Phases are named in the trace of a profiler that is on.
    """

    def __init__(self, cuda: bool) -> None:
        """Time nothing yet."""
        self.cuda = cuda
        self.tracing = False
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        import torch

        with torch.profiler.record_function(f"bench/{name}") if self.tracing else contextlib.nullcontext():
            start = self._now()
            yield
            self._marks.setdefault(name, []).append((start, self._now()))

    def clear(self) -> None:
        """Forget what was timed."""
        self._marks.clear()

    def seconds(self, name: str) -> list[float]:
        """What each run of a phase took; the device must be idle."""
        pairs = self._marks.get(name, [])
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]

    def fields(self) -> dict:
        """Median of every phase, as ``t_<phase>_s``."""
        return {f"t_{name}_s": round(statistics.median(self.seconds(name)), 5) for name in self._marks}


class Counters:
    """What a wrapped model has moved and waited for between two moments, per step; empty for others."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Take the first reading, which waits for pending updates."""
        self.model, self.optimizer = model, optimizer
        self.first = self._read()

    def _read(self) -> dict[str, float]:
        if getattr(self.model, "_trainstream_session", None) is None:
            return {}
        import trainstream

        report = trainstream.memory_report(self.model)
        stats = self.optimizer.stats() if hasattr(self.optimizer, "stats") else {}
        times = {key: value for key, value in stats.items() if key.endswith("_s")}
        return {**report["moved"], **times}

    def per_step(self, steps: int) -> dict:
        """Bytes in GB and seconds per step since the first reading."""
        found = {}
        for key, value in self._read().items():
            each = (value - self.first.get(key, 0)) / steps
            if key.endswith("_bytes"):
                found[f"{key.removesuffix('_bytes')}_gb_per_step"] = round(each / 1e9, 4)
            else:
                found[f"{key}_per_step"] = round(each, 5)
        return found


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _states(optimizer: Any) -> list[Any]:
    import torch

    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


def host_bytes(model: Any, optimizer: Any) -> dict:
    """Bytes of RAM and of the device that AdamW needs for the trained parameters.

    State is moments and fp32 masters; an fp32 parameter that is in RAM itself is its own master. Gradients
    and a 16-bit copy of the weights are not in it.
    """
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    disk = 0
    if hasattr(optimizer, "stats"):
        stats = optimizer.stats()
        with torch._C.DisableTorchFunctionSubclass():
            masters = [p for p in trained if p.device.type == "cpu" and p.dtype is torch.float32]
        device, disk = stats["device_state_bytes"], stats["disk_state_bytes"]
        host = stats["host_state_bytes"] + _bytes(masters)
    else:
        held: list[Any] = []
        if hasattr(optimizer, "optim_dict"):  # torchao
            held += optimizer.param_d2h_map.values()
            for each in (*optimizer.optim_dict.values(), optimizer.d_opt):
                held += _states(each) if each is not None else []
        elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # DeepSpeed ZeRO 1 and 2
            held += [*optimizer.single_partition_of_fp32_groups, *_states(optimizer.optimizer)]
        else:
            held += _states(optimizer)
        host, device = (_bytes(t for t in held if t.is_cuda is there) for there in (False, True))
    return {
        "trained_parameters": count,
        "host_state_bytes_per_parameter": round(host / count, 3),
        "device_state_bytes_per_parameter": round(device / count, 3),
        **({"disk_state_bytes_per_parameter": round(disk / count, 3)} if disk else {}),
    }


def host_tensor_bytes() -> int:
    """Bytes of all CPU tensors that Python knows in this process, each storage once."""
    import torch

    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            # type(), for isinstance asks objects that would rather not be asked
            if issubclass(type(each), torch.Tensor):
                with contextlib.suppress(Exception):  # tensors without storage
                    if each.device.type == "cpu":
                        storage = each.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def optimizer_alone(parameters: Any, device: str, options: dict[str, Any], lr: float, steps: int = 8) -> dict:
    """Seconds of a host AdamW step and of a norm of all gradients, with nothing else running."""
    import torch

    from ts_optim import OffloadAdamW

    host = []
    for parameter in parameters:
        weight = torch.nn.Parameter(parameter.detach().cpu())
        weight.grad = (torch.randn(weight.shape, device=device) * 1e-3).to(weight.dtype).cpu()
        host.append(weight)
    settings = {key: options[key] for key in ("moment_dtype", "threads") if options.get(key) is not None}
    clip = float(options.get("max_grad_norm") or 0.0)
    optimizer = OffloadAdamW(host, lr=lr, max_grad_norm=clip or None, accumulation_steps=None, **settings)
    times, norms = [], []
    before = 0.0
    for _ in range(steps + 2):
        start = time.perf_counter()
        optimizer.step()
        optimizer.synchronize()
        times.append(time.perf_counter() - start)
        total = optimizer.stats()["norm_s"]
        norms.append(total - before)
        before = total
    alone = [a - b for a, b in zip(times, norms, strict=True)][2:]
    return {
        "t_adamw_s": round(statistics.median(alone), 5),
        "t_adamw_min_s": round(min(alone), 5),
        "t_norm_s": round(statistics.median(norms[2:]), 5),
        "adamw_parameters_per_s": round(sum(p.numel() for p in host) / statistics.median(alone)),
        "adamw_threads": options.get("threads") or torch.get_num_threads(),
    }


def launches(trace: dict, steps: int) -> dict:
    """What the host launches for a step: kernels, captured graphs and copies; and the kernels that ran."""
    calls = [e["name"] for e in trace["traceEvents"] if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    kernels = sum(e.get("cat") == "kernel" for e in trace["traceEvents"])
    found = {
        "kernel_launches": sum("LaunchKernel" in name for name in calls),
        "graph_launches": sum("GraphLaunch" in name for name in calls),
        "copy_launches": sum("Memcpy" in name or "Memset" in name for name in calls),
        "kernels": kernels,
    }
    return {"launches_per_step": {key: round(count / steps, 1) for key, count in found.items()}}


#: Kinds of kernels by their names, the first that matches.
CATEGORIES = {
    "attention": r"flash|fmha|attention|cudnn.*sdpa|softmax_warp",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv",
    "loss": r"cross_entropy|label_counts|loss_total|nll_loss|log_softmax|cunn_softmax",
    "dtype of small matrices": r"copy_each",
    "optimizer, grouped copies": r"adamw|multi_tensor|sumsq|foreach",
    "decode": r"ts_quant|decode_|dequantize|gguf|gptq|awq",
    "norm": r"rms|layer_norm|weight_gradient",
    "rotary": r"rotary|rope",
    "gated MLP": r"gated|swiglu|geglu|silu|gelu",
    "copy": r"memcpy|memset|copy_|CatArray|direct_copy",
    "reduction": r"reduce_kernel|reduction",
    "elementwise": r"elementwise|fill|index|scatter|gather|embedding",
}


def categories(trace: dict, steps: int) -> dict:
    """Milliseconds that kernels of each kind took in a step, added up, and how many there were."""
    spent: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = event["name"]
        if event["cat"] != "kernel":
            kind = "host copy" if "HtoD" in name or "DtoH" in name else "copy"
        else:
            matches = (kind for kind, words in CATEGORIES.items() if re.search(words, name, re.IGNORECASE))
            kind = next(matches, "other")
        entry = spent.setdefault(kind, [0.0, 0])
        entry[0] += event.get("dur", 0.0) / 1e3
        entry[1] += 1
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])
    return {
        "kernels_ms_per_step": {kind: round(ms / steps, 3) for kind, (ms, _) in ranked},
        "kernels_per_step": {kind: round(count / steps, 1) for kind, (_, count) in ranked},
    }


def operators(profiler: Any, steps: int, most: int = 30) -> dict:
    """The costliest operators of a profile, by their own time on the device, or on the CPU without one.

    Args:
        profiler: A `torch.profiler.profile` that has ended.
        steps: How many it recorded.
        most: How many to name.
    """
    rows = [
        {
            "name": row.key[:120],
            "calls": round(row.count / steps, 1),
            "device_us": round(getattr(row, "self_device_time_total", 0.0) / steps, 1),
            "host_us": round(row.self_cpu_time_total / steps, 1),
        }
        for row in profiler.key_averages()
    ]
    rows.sort(key=lambda row: (row["device_us"], row["host_us"]), reverse=True)
    return {"operators_per_step": rows[:most]}


def machine() -> dict:
    """What the line was measured on."""
    import torch

    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "cpu",
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }
