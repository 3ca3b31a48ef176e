"""TrainStream's sessions: `python -m nox` runs lint, types, tests and bench; `python -m nox -l` lists all.

Two rules shape this file. Our packages are installed from files, never by name: some of the names belong to
others on the public index. And torch is large and a matter of choice, so it is installed once (session
`base`) and the other sessions see it through a .pth file; no later install may replace it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
from pathlib import Path

import nox
from nox.project import load_toml

nox.needs_version = ">=2025.11.12"
nox.options.sessions = ["lint", "types", "tests", "bench"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
PACKAGES = ["ts-core", "ts-quant", "ts-optim", "ts-paging", "ts-fused", "ts-hf", "trainstream"]
NATIVE = [p for p in PACKAGES if (ROOT / "packages" / p / "CMakeLists.txt").is_file()]
# Every package's test extra names these; see tools/check_packaging.py.
TEST_TOOLS = ["pytest>=8", "pytest-cov>=5", "pytest-xdist>=3.6", "hypothesis>=6.100", "numpy"]
# Packages whose many short tests are spread over the cores; the others use the cores by themselves.
SPREAD = ["ts-core", "ts-optim", "ts-paging", "ts-hf", "trainstream"]
# Tracing lines costs tests of trainstream, which are Python, up to two thirds of their time again.
# Its coverage is measured where TS_COVERAGE=1 asks for it, that of the other packages always.
UNTRACED = [] if os.environ.get("TS_COVERAGE") == "1" else ["trainstream"]
# Formatters and checkers differ between releases: one release for everybody.
RUFF, CLANG_FORMAT, MYPY = "ruff==0.17.6", "clang-format==23.1.5", "mypy==2.4.1"


def project(package: str) -> dict:
    """The [project] table of a package."""
    return load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]


def name_of(requirement: str) -> str:
    """`ts-core` of `ts-core==0.1.0+src`."""
    return requirement.replace("=", " ").replace(">", " ").replace("[", " ").split()[0]


def with_siblings(package: str) -> list[str]:
    """The package and those of ours that it depends on, directly or not."""
    found = [package]
    for requirement in project(package)["dependencies"]:
        name = name_of(requirement)
        if name in PACKAGES:
            found += [p for p in with_siblings(name) if p not in found]
    return found


def module(package: str) -> str:
    """Import name of a package."""
    return package.replace("-", "_")


def wheels_of(session: nox.Session, *packages: str) -> list[str]:
    """Paths of the packages' wheels, built if this state of the sources has none yet."""
    # Paths are read from stdout; stderr, where the progress shows, stays the terminal's.
    return session.run("python", "tools/wheels.py", *packages, silent=True, stderr=None).split()


def see_base(session: nox.Session) -> list[str]:
    """Let the session import what `base` installed; return the pip options that keep torch as it is."""
    folder = Path(session.virtualenv.location)
    base = next(folder.parent.joinpath("base").glob("lib/python*/site-packages"))
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(f"{base}\n")
    return ["--constraint", str(folder.parent / "base" / "torch.txt")]


@nox.session(default=False, reuse_venv=True)
def base(session: nox.Session) -> None:
    """Install torch and the test tools, once for the other sessions. TS_TORCH_SPEC: pip's words for torch."""
    try:
        default = "torch==" + importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        default = "torch==2.13.0"
    session.install(*shlex.split(os.environ.get("TS_TORCH_SPEC") or default))
    ask = "import importlib.metadata as m; print(m.version('torch'))"
    version = session.run("python", "-c", ask, silent=True).strip()
    constraint = Path(session.virtualenv.location) / "torch.txt"
    constraint.write_text(f"torch=={version}\n")
    session.install("--constraint", str(constraint), *TEST_TOOLS)
    session.log(f"torch {version}")


@nox.session(requires=["base"])
@nox.parametrize("package", [nox.param(p, id=p) for p in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """Run a package's tests with only its own dependencies; coverage, where measured, at least 85 %."""
    ours = with_siblings(package)
    wheel, *siblings = wheels_of(session, *ours)
    keep_torch = see_base(session)
    session.install(*keep_torch, f"{wheel}[test]", *siblings)
    session.run("python", "tools/check_isolation.py", *ours)
    junit = ROOT / "runs" / "junit" / f"{package}.xml"
    data = Path(session.create_tmp()).resolve() / "coverage"
    env = {"COVERAGE_FILE": str(data), "HF_HUB_OFFLINE": "1"}
    session.chdir(ROOT / "packages" / package)
    words = [f"--junitxml={junit}", *session.posargs]
    if package in SPREAD and not session.posargs:
        workers = min(4, os.cpu_count() or 1)
        words += ["-n", str(workers), "--dist", "worksteal"]
        if package not in UNTRACED:
            words += [f"--cov={module(package)}", "--cov-report="]
        session.run("python", "-m", "pytest", *words, env={**env, "OMP_NUM_THREADS": "1"})
    else:
        # coverage starts before pytest: the shared pytest plugin imports ts_core before pytest-cov would.
        session.run("python", "-m", "coverage", "run", "-m", "pytest", *words, env=env)
    if not session.posargs and package not in UNTRACED:
        session.run("python", "-m", "coverage", "report", "--skip-covered", env=env)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Run ruff and clang-format, check the import contract and the packaging rules."""
    session.install(RUFF, CLANG_FORMAT, "import-linter>=2", "packaging", "tomli; python_version < '3.11'")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [*ROOT.glob("packages/*/csrc"), *ROOT.glob("packages/*/src/*/include")]
    sources = [
        str(f.relative_to(ROOT))
        for d in folders
        for f in sorted(d.rglob("*"))
        if f.suffix in {".h", ".cpp", ".cu"}
    ]
    session.run("clang-format", "--dry-run", "--Werror", *sources)
    source_path = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": source_path})
    session.run("python", "tools/check_packaging.py")


@nox.session(requires=["base"], reuse_venv=True)
def types(session: nox.Session) -> None:
    """Run mypy --strict over the sources of all packages."""
    session.install(*see_base(session), MYPY, "typer")  # typer: its decorators decide what they wrap
    source_path = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    names = [word for p in PACKAGES for word in ("--package", module(p))]
    session.run("mypy", *names, env={"MYPYPATH": source_path})


@nox.session(requires=["base"])
def bench(session: nox.Session) -> None:
    """Run every benchmark script once, tiny: proves that the scripts work, measures nothing."""
    wheels = wheels_of(session, *PACKAGES)
    keep_torch = see_base(session)
    session.install(*keep_torch, *wheels)
    session.run("python", "tools/bench_smoke.py", *session.posargs)


@nox.session(requires=["base"])
def wheels(session: nox.Session) -> None:
    """Build and audit wheels and sdists, build native sdists alone, install from files, import."""
    session.install("build", "abi3audit", "check-wheel-contents", "scikit-build-core>=0.11", "nanobind>=3.1")
    files = wheels_of(session, *PACKAGES)
    session.run("check-wheel-contents", *files)
    session.run("abi3audit", "--strict", "--verbose", *[f for f in files if "-abi3-" in f])

    sdists = Path(session.create_tmp()).resolve() / "sdist"
    shutil.rmtree(sdists, ignore_errors=True)
    for package in PACKAGES:
        session.run(
            "python",
            "-m",
            "build",
            "--sdist",
            "--no-isolation",
            "-o",
            str(sdists),
            f"packages/{package}",
            silent=True,
        )
    alone = Path(session.create_tmp()).resolve() / "alone"
    for package in NATIVE:
        # Isolated, outside the tree, no sibling anywhere near; the CPU part is enough to prove it.
        sdist = next(sdists.glob(f"{module(package)}-*.tar.gz"))
        pip = [
            "python",
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--wheel-dir",
            str(alone),
        ]
        session.run(*pip, str(sdist), env={"TS_WITH_CUDA": "OFF"})

    fresh = Path(session.create_tmp()).resolve() / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    python = str(fresh / "bin" / "python")
    base_site = next(
        Path(session.virtualenv.location).parent.joinpath("base").glob("lib/python*/site-packages")
    )
    (next(fresh.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{base_site}\n")
    others = {r for p in PACKAGES for r in project(p)["dependencies"] if name_of(r) not in PACKAGES}
    session.run(python, "-m", "pip", "install", "--quiet", *see_base(session), *sorted(others), external=True)
    session.run(python, "-m", "pip", "install", "--no-index", "--no-deps", *files, external=True)
    session.run(python, "-m", "pip", "check", external=True)
    for package in PACKAGES:
        code = f"import time, torch; t = time.perf_counter(); import {module(package)} as m; "
        code += "print(f'{m.__name__}: imported in {(time.perf_counter() - t) * 1e3:.0f} ms after torch')"
        session.run(python, "-c", code, external=True)
    for file in sorted([*map(Path, files), *sdists.glob("*.tar.gz")]):
        session.log(f"{file.stat().st_size / 1e6:8.2f} MB  {file.name}")


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Check links, Python blocks and that every public name is on a page."""
    session.run("python", "tools/make_reference.py", "--check")
    session.run("python", "tools/check_docs.py")
