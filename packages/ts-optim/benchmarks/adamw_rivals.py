"""Rivals of bench_adamw.py that a machine may lack: each is made, or says why it is not there.

DeepSpeed's CPUAdam is compiled on the machine that measures it, from DeepSpeed's own sources with the flags
that its own builder uses: two C++ files, which take a C++ compiler and Python's headers, but neither
network, nor ninja, nor CUDA, nor DeepSpeed's other dependencies. Sources are those of an installed package
(which is not imported), or of an sdist: a folder or a .tar.gz.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Step = Callable[[], None]

_SOURCES = ("csrc/adam/cpu_adam.cpp", "csrc/adam/cpu_adam_impl.cpp")
_HEADERS = "csrc/includes"


class NotAvailable(Exception):
    """Says why a rival does not take part."""


def _in_folder(folder: Path) -> Path | None:
    """Find the root of the sources in a folder, one folder below it, or in an installed package."""
    roots = [folder, folder / "deepspeed" / "ops", folder / "ops"]
    roots += [below for below in folder.iterdir() if below.is_dir()] if folder.is_dir() else []
    return next((root for root in roots if (root / _SOURCES[0]).is_file()), None)


def _deepspeed_sources(given: Path | None, scratch: Path) -> Path:
    if given is not None and given.is_file():
        with tarfile.open(given) as archive:
            wanted = [m for m in archive.getmembers() if "/csrc/adam/" in m.name or f"/{_HEADERS}/" in m.name]
            archive.extractall(scratch, members=wanted, filter="data")
        given = scratch
    if given is None:
        spec = importlib.util.find_spec("deepspeed")
        if spec is None or not spec.submodule_search_locations:
            raise NotAvailable("deepspeed is not installed, and no --deepspeed folder or sdist was given")
        given = Path(next(iter(spec.submodule_search_locations)))
    found = _in_folder(given)
    if found is None:
        raise NotAvailable(f"no {_SOURCES[0]} in {given}")
    return found


def _simd() -> str:
    """DeepSpeed's macro for the vectors this machine has."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "avx512f" in flags:
        return "-D__AVX512__"
    return "-D__AVX256__" if "avx2" in flags else "-D__SCALAR__"


def _compile(root: Path, library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NotAvailable("there is no C++ compiler (g++, c++ or $CXX)")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise NotAvailable(f"Python's headers are missing: no {headers}/Python.h")
    from torch.utils import cpp_extension

    libraries = Path(torch.__file__).parent / "lib"
    includes = [root / _HEADERS, headers, *cpp_extension.include_paths()]
    command = [
        compiler,
        *("-O3", "-std=c++17", "-g", "-Wno-reorder", "-march=native", "-fopenmp", "-fPIC", "-shared"),
        *(
            _simd(),
            "-D__DISABLE_CUDA__",
            "-DTORCH_EXTENSION_NAME=cpu_adam",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
        ),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in includes),
        *(str(root / source) for source in _SOURCES),
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{libraries}"),
        *("-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise NotAvailable(f"it does not compile: {(errors or done.stderr.splitlines() or ['?'])[0][:300]}")


class DeepSpeed:
    """DeepSpeed's CPUAdam, compiled once; its threads are those of torch."""

    def __init__(self, given: Path | None) -> None:
        """Compile and load it; NotAvailable says why that fails."""
        self._scratch = tempfile.TemporaryDirectory()
        scratch = Path(self._scratch.name)
        root = _deepspeed_sources(given, scratch)
        library = scratch / "cpu_adam.so"
        _compile(root, library)
        spec = importlib.util.spec_from_file_location("cpu_adam", library)
        if spec is None or spec.loader is None:
            raise NotAvailable(f"{library} is no module")
        try:
            self._ops = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._ops)
        except ImportError as error:
            raise NotAvailable(f"it does not load: {error}") from None
        self._made = 0

    def step(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Step:
        """Return a step over fp32 tensors, with fp32 moments of its own."""
        # Its OpenMP runtime is the system's; torch has another, so its set_num_threads does not reach it.
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(torch.get_num_threads())
        number = self._made
        self._made += 1
        self._ops.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, 1e-2, True, False)
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        count = 0

        def run() -> None:
            nonlocal count
            count += 1
            for p, g, (m, v) in zip(params, grads, moments, strict=True):
                self._ops.adam_update(number, count, 1e-3, 0.9, 0.999, 1e-8, 1e-2, True, p, g, m, v)

        return run


def bitsandbytes_8bit(make: Callable[..., Step]) -> Step:
    """Return a step of bitsandbytes' AdamW8bit, if it updates CPU tensors; `make` takes class and options."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise NotAvailable(f"bitsandbytes: {error}") from None
    try:
        run = make(bitsandbytes.optim.AdamW8bit, min_8bit_size=0)
        run()
    except Exception as error:  # it has no such kernel in many releases, and says so in many ways
        raise NotAvailable(f"bitsandbytes {bitsandbytes.__version__} has no CPU kernel: {error}") from None
    return run
