"""Run the tests and benchmarks on a GPU machine that has no network and no compiler.

Here, where the repository and nvcc are:

    python tools/gpu_run.py pack --rivals
    python tools/gpu_run.py pack --rivals torchao,deepspeed
    rsync -a .gpu/ gpu-machine:trainstream-gpu/

There, where a Python with torch and a GPU are (the script travels in the folder):

    python3 trainstream-gpu/gpu_run.py run tests --out results
    python3 trainstream-gpu/gpu_run.py run tests ts-quant --whole --out results -- -k nf4
    python3 trainstream-gpu/gpu_run.py run bench bench_nf4 compare --out results -- --steps 20

`pack` builds or reuses the wheels for one CUDA architecture and gathers them with the tests, the benchmarks
and what the other Python lacks. `run` installs the wheels into a folder of its own, changes nothing else on
the machine, and leaves logs, junit files, JSON lines and a summary in `--out`. A rival that has no wheel
travels as its source and is installed there without its compiled parts, which it makes when first used.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRAVELS = ("tests", "benchmarks", "examples", "pyproject.toml")
# What each rival needs beside torch, transformers, numpy and what comes with them.
RIVALS = {
    "bitsandbytes": ("bitsandbytes==0.50.2",),
    "liger": ("liger-kernel",),
    "cce": ("cut-cross-entropy==25.1.1",),
    "torchao": ("torchao==0.18.0",),
    "deepspeed": (
        "deepspeed==0.19.8",
        "hjson",
        "py-cpuinfo",
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "typing-inspection",
        "annotated-types",
        "msgpack",
        "einops",
        "ninja",
    ),
}
# Published as source alone.
SOURCES = ("deepspeed",)
# The libraries of bitsandbytes that such a machine can load; the others are nine tenths of its wheel.
BITSANDBYTES_KEEPS = re.compile(r"libbitsandbytes_(cpu|cuda130)\.so$")
LIMIT_BYTES = 60 * 2**20


# ---- pack: on the machine with the sources ----


def trim_bitsandbytes(wheel: Path) -> None:
    """Drop the libraries for other devices and CUDA versions, and their lines in the RECORD."""
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as new:
        members = old.namelist()
        kept = [n for n in members if not n.endswith(".so") or BITSANDBYTES_KEEPS.search(n)]
        for name in kept:
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                lines = [line for line in data.decode().splitlines() if line.split(",")[0] in kept]
                data = ("\n".join(lines) + "\n").encode()
            new.writestr(old.getinfo(name), data, zipfile.ZIP_DEFLATED)
    slim.replace(wheel)


def check_record(wheel: Path) -> None:
    """Raise ValueError unless every file of the wheel is in its RECORD with its true hash."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
        for name in archive.namelist():
            digest = (
                base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            )
            if not name.endswith(("/", "/RECORD")) and rows.get(name) != f"sha256={digest}":
                raise ValueError(f"{wheel.name}: {name} does not match its RECORD")


def download(requirement: str, python: str, folder: Path) -> None:
    """Fetch one wheel for another Python, or a source, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    if requirement.partition("==")[0] in SOURCES:
        command += ["--no-binary=:all:", "--dest", str(folder), requirement]
        subprocess.run(command, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        return
    command.append("--only-binary=:all:")
    # pip takes a platform tag literally: the newest glibc first would miss wheels tagged for an older one.
    for glibc in ("2_34", "2_28", "2_27", "2_24", "2_17"):
        command += ["--platform", f"manylinux_{glibc}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--python-version", python, "--implementation", "cp"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)


def git(*words: str) -> str:
    """Output of a git command in the repository, empty where there is none."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.rstrip()


def pack(args: argparse.Namespace) -> int:
    """Gather everything in one folder and say what to run."""
    os.environ["TS_CUDA_ARCHITECTURES"] = args.arch
    import wheels  # beside this file; not needed on the other machine

    if not shutil.which("nvcc") and not os.environ.get("CUDA_HOME"):
        print("pack: no nvcc found: put it on PATH or set CUDA_HOME", file=sys.stderr)
        return 1
    target = Path(args.dest)
    shutil.rmtree(target, ignore_errors=True)
    folder = target / "wheels"
    folder.mkdir(parents=True)
    for package in args.packages or wheels.PACKAGES:
        shutil.copy2(wheels.build(package), folder)
        for name in TRAVELS:
            source, copy = ROOT / "packages" / package / name, target / "packages" / package / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.log"))
            elif source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
    rivals = [requirement for name in args.rivals for requirement in RIVALS[name]]
    for requirement in ["nanobind-backend", *rivals, *args.extra]:
        download(requirement, args.python, folder)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        trim_bitsandbytes(wheel)
        check_record(wheel)
    shutil.copy2(__file__, target)
    manifest = {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": git("status", "--porcelain", "--", "packages").splitlines(),
        "cuda_architectures": args.arch,
        "wheels": {w.name: hashlib.sha256(w.read_bytes()).hexdigest()[:16] for w in sorted(folder.iterdir())},
    }
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for wheel in sorted(folder.iterdir()):
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    total = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    print(f"{total / 1e6:8.2f} MB  in all, in {target}")
    print(f"there: python3 {target.name}/gpu_run.py run tests --out results")
    if total > LIMIT_BYTES:
        print(f"pack: more than {LIMIT_BYTES / 2**20:.0f} MiB: leave something out", file=sys.stderr)
        return 1
    return 0


def rivals(text: str) -> list[str]:
    """Names of rivals separated by commas."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(RIVALS)):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(RIVALS)}")
    return names


# ---- run: on the machine with the GPU ----


def install(bundle: Path, site: Path) -> None:
    """Install all wheels of the bundle into `site`, asking no index and no installed package.

    What an earlier call installed from the same files stays.
    """
    files = [*sorted((bundle / "wheels").iterdir()), bundle / "manifest.json"]
    bundled = "".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n" for file in files)
    note = site / "installed.txt"
    if note.is_file() and note.read_text() == bundled:
        return
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-cache-dir", "--target", str(site)]
    wheels = sorted(str(path) for path in (bundle / "wheels").glob("*.whl"))
    subprocess.run([*command, *wheels], check=True)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "DS_BUILD_OPS": "0"}
    for source in sorted((bundle / "wheels").glob("*.tar.gz")):
        # A rival that does not install is missing in the comparison, no more.
        done = subprocess.run([*command, "--no-build-isolation", str(source)], env=env, check=False)
        if done.returncode:
            print(f"warning: {source.name} did not install", file=sys.stderr)
    note.write_text(bundled)


def missing(site: Path) -> list[str]:
    """Requirements of the installed wheels that this machine does not meet, in words."""
    from importlib import metadata

    from packaging.requirements import Requirement

    sys.path.insert(0, str(site))
    found = []
    for dist in metadata.distributions(path=[str(site)]):
        for text in dist.requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                found.append(f"{dist.name} needs {text}: not installed")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{dist.name} needs {text}: here is {version}")
    return found


def machine() -> dict:
    """What the results were measured on."""
    code = (
        "import json, platform, torch; gpu = torch.cuda.is_available(); "
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, "
        "'cuda': torch.version.cuda, 'gpus': [torch.cuda.get_device_name(i) for i in "
        "range(torch.cuda.device_count())] if gpu else []}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        out = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        facts["driver"] = out[0] if out else None
    return {**facts, "cpu_count": os.cpu_count()}


def stream(command: list[str], log: Path, cwd: Path, env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command, show and log its output as it comes; return the exit status and the lines."""
    lines = []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
            lines.append(line)
    return process.wait(), lines


def junit_counts(path: Path) -> dict:
    """Counts and the names of failed tests of a junit file; empty if there is none."""
    if not path.is_file():
        return {}
    counts: dict = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts


def run_tests(args: argparse.Namespace, bundle: Path, env: dict[str, str], out: Path) -> list[dict]:
    """Run the tests marked `gpu` of the named packages, or their whole suites."""
    results = []
    for package in args.names or sorted(p.parent.name for p in bundle.glob("packages/*/tests")):
        junit = out / f"{package}.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={junit.resolve()}"]
        command += [] if args.whole else ["-m", "gpu"]
        start = time.monotonic()
        log = out / f"{package}.log"
        status, _ = stream([*command, *args.rest], log, bundle / "packages" / package, env)
        result = {"tests": package, "status": status, "seconds": round(time.monotonic() - start, 1)}
        # pytest's 5: nothing was selected, which is no failure of a package without GPU tests.
        result["ok"] = status in (0, 5)
        results.append({**result, **junit_counts(junit)})
    return results


def run_benchmarks(args: argparse.Namespace, bundle: Path, env: dict[str, str], out: Path) -> list[dict]:
    """Run the named benchmark scripts and collect the JSON lines that they print."""
    scripts = {path.stem: path for path in sorted(bundle.glob("packages/*/benchmarks/*.py"))}
    results = []
    for name in args.names:
        script = scripts.get(name) or scripts.get(f"bench_{name}")
        if script is None:
            print(f"no benchmark {name}; there are {', '.join(scripts)}", file=sys.stderr)
            results.append({"bench": name, "ok": False, "error": "no such script"})
            continue
        start = time.monotonic()
        status, lines = stream(
            [sys.executable, script.name, *args.rest], out / f"{script.stem}.log", script.parent, env
        )
        (out / f"{script.stem}.jsonl").write_text("".join(line for line in lines if line.startswith("{")))
        seconds = round(time.monotonic() - start, 1)
        results.append({"bench": name, "ok": status == 0, "status": status, "seconds": seconds})
    return results


def run(args: argparse.Namespace) -> int:
    """Install, run what was asked for, and write the summary."""
    bundle = HERE if (HERE / "wheels").is_dir() else ROOT / ".gpu"
    if not (bundle / "wheels").is_dir():
        print(f"run: no wheels in {bundle}: `gpu_run.py pack` comes first", file=sys.stderr)
        return 1
    if args.what == "bench" and not args.names:
        print("run bench: name at least one script", file=sys.stderr)
        return 1
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    site = Path(args.site).resolve()
    install(bundle, site)
    for problem in missing(site):
        print(f"warning: {problem}", file=sys.stderr)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    summary = {"machine": machine(), "manifest": json.loads((bundle / "manifest.json").read_text())}
    work = run_tests if args.what == "tests" else run_benchmarks
    summary["results"] = results = work(args, bundle, env, out)
    (out / f"{args.what}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary["machine"]))
    for result in results:
        print(json.dumps(result))
    return int(not all(result["ok"] for result in results))


def main() -> int:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    halves = parser.add_subparsers(required=True)
    one = halves.add_parser("pack", help="gather wheels, tests and benchmarks in a folder")
    one.add_argument("packages", nargs="*", help="default: all")
    one.add_argument("--arch", default="90a", help="CUDA architecture (default %(default)s: H100, H200)")
    one.add_argument("--python", default="3.12", help="Python of the GPU machine (default %(default)s)")
    one.add_argument(
        "--rivals",
        type=rivals,
        nargs="?",
        const=list(RIVALS),
        default=[],
        metavar="NAME,...",
        help=f"bring what is compared with, all or some of {', '.join(RIVALS)}",
    )
    one.add_argument(
        "--extra", action="append", default=[], metavar="REQUIREMENT", help="bring one more wheel"
    )
    one.add_argument("--dest", default=str(ROOT / ".gpu"), help="folder, made anew (default .gpu)")
    one.set_defaults(call=pack)
    two = halves.add_parser("run", help="install the wheels and run tests or benchmarks")
    two.add_argument("what", choices=["tests", "bench"])
    two.add_argument("names", nargs="*", help="packages or benchmark scripts")
    two.add_argument("--whole", action="store_true", help="all tests, not only those marked gpu")
    two.add_argument("--out", default="results", help="folder for logs and results (default %(default)s)")
    two.add_argument("--site", default="/tmp/trainstream-site", help="where to install (default %(default)s)")
    two.set_defaults(call=run)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    return args.call(args)


if __name__ == "__main__":
    sys.exit(main())
