"""Build the packages' wheels, once per state of their sources, and print where they are.

    python tools/wheels.py                      # all packages
    python tools/wheels.py ts-core ts-quant     # only these

A wheel lies in `.wheels/<key>/`. The key covers what goes into it: the package's own files, for a package
with native code also ts-core's headers and CMake rules, and what decides how CUDA kernels are compiled
(`TS_WITH_CUDA`, `TS_CUDA_ARCHITECTURES`, the nvcc found). The Python version does not count: native modules
use the stable ABI. Each build runs isolated, as a user's `pip install ./packages/ts-quant` does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".wheels"
PACKAGES = ("ts-core", "ts-quant", "ts-optim", "ts-paging", "ts-fused", "ts-hf", "trainstream")
# What a wheel is made from. Tests and benchmarks are not in it, so editing them builds nothing.
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "src", "csrc")
SHARED = ("include", "cmake")
SWITCHES = (
    "TS_WITH_CUDA",
    "TS_CUDA_ARCHITECTURES",
    "TORCH_CUDA_ARCH_LIST",
    "CXX",
    "CXXFLAGS",
    "CUDACXX",
    "CUDA_HOME",
)


def is_native(package: str) -> bool:
    """Whether the package compiles a module."""
    return (ROOT / "packages" / package / "CMakeLists.txt").is_file()


def source_files(package: str) -> list[Path]:
    """The files whose content decides what the wheel holds, sorted."""
    roots = [ROOT / "packages" / package / name for name in SOURCES]
    if is_native(package):
        roots += [ROOT / "packages/ts-core/src/ts_core" / name for name in SHARED]
    files = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    return sorted(p for p in files if p.is_file() and p.suffix not in {".pyc", ".so"})


def _nvcc_version() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("CUDACXX") or (f"{home}/bin/nvcc" if home else shutil.which("nvcc"))
    if not nvcc or not Path(nvcc).is_file():
        return "none"
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def key(package: str) -> str:
    """Twelve hex digits that change whenever a rebuilt wheel could differ."""
    digest = hashlib.sha256()
    for path in source_files(package):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    if is_native(package):
        switches = [f"{name}={os.environ.get(name, '')}" for name in SWITCHES]
        digest.update("\n".join([*switches, _nvcc_version(), platform.machine()]).encode())
    return digest.hexdigest()[:12]


def build(package: str) -> Path:
    """Return the package's wheel, building it if this state of the sources has none yet."""
    folder = CACHE / key(package)
    stem = package.replace("-", "_")
    found = sorted(folder.glob(f"{stem}-*.whl"))
    if found:
        return found[0]
    CACHE.mkdir(exist_ok=True)
    start = time.monotonic()
    # Built aside and moved, so that a build cut short leaves nothing that looks finished.
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch]
        subprocess.run([*pip, f"./packages/{package}"], cwd=ROOT, check=True)
        wheel = next(Path(scratch).glob(f"{stem}-*.whl"))
        folder.mkdir(exist_ok=True)
        wheel.replace(folder / wheel.name)
    seconds, size = time.monotonic() - start, (folder / wheel.name).stat().st_size
    print(f"built {wheel.name}: {size / 1e6:.2f} MB in {seconds:.0f} s", file=sys.stderr, flush=True)
    return folder / wheel.name


def main() -> int:
    """Build what is asked for and print one path a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", help="default: all of them")
    parser.add_argument("--keys", action="store_true", help="print the keys and build nothing")
    args = parser.parse_args()
    if unknown := set(args.packages) - set(PACKAGES):
        parser.error(f"no such package: {', '.join(sorted(unknown))} (there are {', '.join(PACKAGES)})")
    for package in args.packages or PACKAGES:
        try:
            print(f"{key(package)} {package}" if args.keys else build(package), flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{package}: the build failed (exit status {error.returncode})", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
