"""Check that the packages' metadata keep the rules of docs/packaging.md; print every break of them.

The rules: one version for all, with a local label that no public index can hold; siblings pinned to exactly
that version and only in the allowed direction; nothing of ours among build requirements; sdists that carry
ts-core's headers; everything imported is declared; the licence text in each package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from wheels import PACKAGES, is_native

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {"ts-quant", "ts-optim", "ts-paging", "ts-fused"}
MAY_NEED = {
    "ts-core": set(),
    **{package: {"ts-core"} for package in KERNELS},
    "ts-hf": {"ts-core", *KERNELS},
    "trainstream": set(PACKAGES) - {"trainstream"},
}
BUILD_REQUIREMENTS = {"scikit-build-core", "nanobind"}
TEST_TOOLS = {"pytest", "pytest-cov", "hypothesis", "numpy"}
# Import names that differ from the distribution's name.
DISTRIBUTION = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "PIL": "pillow", "liger_kernel": "liger-kernel"}
HEADER_COPIES = {
    "../ts-core/src/ts_core/include": "ts_core/include",
    "../ts-core/src/ts_core/cmake": "ts_core/cmake",
}


def imported(folder: Path) -> set[str]:
    """Top-level names that the Python files below `folder` import, the standard library left out."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"__future__"}


def distributions(modules: set[str]) -> set[str]:
    """The distributions that provide these modules."""
    return {canonicalize_name(DISTRIBUTION.get(name, name)) for name in modules}


def names(requirements: list[str]) -> set[str]:
    """Canonical names of requirements."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def check_version(package: str, project: dict, version: str) -> Iterator[str]:
    """One version, with a local label, for all Pythons from 3.10 on."""
    if project.get("name") != package:
        yield f"project.name is {project.get('name')!r}"
    if project.get("version") != version:
        yield f"project.version is {project.get('version')!r}, ts-core's is {version!r}: all share one"
    if Version(project["version"]).local is None:
        yield f"project.version {project['version']!r} has no local label (+src): an index could hold it"
    if project.get("requires-python") != ">=3.10":
        yield f"project.requires-python is {project.get('requires-python')!r}, expected '>=3.10'"
    if project.get("license") != "Apache-2.0":
        yield f"project.license is {project.get('license')!r}, expected 'Apache-2.0'"


def check_siblings(package: str, project: dict, version: str) -> Iterator[str]:
    """Siblings are pinned exactly, in `dependencies` alone, and only those that lie below."""
    for text in project["dependencies"]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in PACKAGES and str(requirement.specifier) != f"=={version}":
            yield f"{text!r} must be '{name}=={version}'"
        if name in PACKAGES and name not in MAY_NEED[package]:
            yield f"depends on {name}, which does not lie below it"
    for extra, texts in project.get("optional-dependencies", {}).items():
        for name in names(texts) & (set(PACKAGES) - {package}):
            yield f"extra {extra!r} names {name}: a sibling belongs in dependencies or nowhere"


def check_build(package: str, data: dict) -> Iterator[str]:
    """The build needs no sibling, and a native package's sdist carries ts-core's headers."""
    build = data["build-system"]
    if build.get("build-backend") != "scikit_build_core.build":
        yield f"build-backend is {build.get('build-backend')!r}"
    for name in names(build["requires"]) - BUILD_REQUIREMENTS:
        yield f"build-system.requires names {name}: an isolated build would ask an index for it"
    settings = data.get("tool", {}).get("scikit-build", {})
    wheel = settings.get("wheel", {})
    if is_native(package):
        copies = settings.get("sdist", {}).get("force-include", {})
        if copies != HEADER_COPIES:
            yield f"sdist.force-include is {copies}, expected {HEADER_COPIES}"
        if wheel.get("py-api") != "cp310":
            yield "wheel.py-api must be 'cp310': one wheel for all Pythons"
        if "nanobind-backend" not in names(data["project"]["dependencies"]):
            yield "a native module needs nanobind-backend at run time"
    elif wheel.get("cmake") is not False:
        yield "wheel.cmake must be false in a package without native code"


def check_imports(package: str, project: dict) -> Iterator[str]:
    """What is imported is declared: by the sources in any group, by the tests in dependencies or extras."""
    folder = ROOT / "packages" / package
    own = distributions({package.replace("-", "_")})
    run_time = names(project["dependencies"]) | own
    optional = {name for texts in project.get("optional-dependencies", {}).values() for name in names(texts)}
    # ts_core.testing is for tests: the test extra brings what it needs.
    for name in distributions(imported(folder / "src")) - run_time - optional:
        yield f"src imports {name}, which is declared nowhere"
    # `tests` and modules beside the tests are imports of the test folder itself.
    beside = {path.stem for path in (folder / "tests").rglob("*.py")} | {"tests"}
    beside |= {path.name for path in (folder / "tests").rglob("*") if path.is_dir()}
    for name in distributions(imported(folder / "tests") - beside) - run_time - optional:
        yield f"tests import {name}, which is declared nowhere"


def check_tests(package: str, data: dict) -> Iterator[str]:
    """The test extra and the settings of pytest and coverage."""
    missing = TEST_TOOLS - names(data["project"].get("optional-dependencies", {}).get("test", []))
    if missing:
        yield f"the test extra lacks {', '.join(sorted(missing))}"
    tool = data.get("tool", {})
    options = tool.get("pytest", {}).get("ini_options", {}).get("addopts", [])
    if "error" not in options:
        yield "pytest's addopts must hold '-W error': a warning fails the tests"
    if tool.get("coverage", {}).get("report", {}).get("fail_under", 0) < 85:
        yield "coverage's fail_under must be at least 85"
    if tool.get("coverage", {}).get("run", {}).get("source_pkgs") != [package.replace("-", "_")]:
        yield "coverage's source_pkgs must be the package itself"


def check_files(package: str) -> Iterator[str]:
    """Files that every package has."""
    folder = ROOT / "packages" / package
    module = folder / "src" / package.replace("-", "_")
    for path in (folder / "README.md", module / "__init__.py", module / "py.typed", folder / "tests"):
        if not path.exists():
            yield f"{path.relative_to(folder)} is missing"
    licence = folder / "LICENSE"
    if not licence.is_file() or licence.read_bytes() != (ROOT / "LICENSE").read_bytes():
        yield "LICENSE must be a copy of the one at the top: wheels and sdists carry it"
    if is_native(package) and not (module / "_C.pyi").is_file():
        yield "_C.pyi is missing: mypy cannot see into the native module"


def problems() -> Iterator[str]:
    """All breaks of the rules, each with the package's name in front."""
    found = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    for package in sorted(found ^ set(PACKAGES)):
        yield f"{package}: in packages/ and in tools/wheels.py must be the same packages"
    version = None
    for package in (p for p in PACKAGES if p in found):
        data = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))
        project = data["project"]
        version = version or project["version"]
        checks = [
            check_version(package, project, version),
            check_siblings(package, project, version),
            check_build(package, data),
            check_imports(package, project),
            check_tests(package, data),
            check_files(package),
        ]
        yield from (f"{package}: {problem}" for check in checks for problem in check)


if __name__ == "__main__":
    broken = list(problems())
    print("\n".join(broken) or f"packaging rules kept by {len(PACKAGES)} packages")
    sys.exit(bool(broken))
