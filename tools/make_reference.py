"""Write docs/reference.md: every public name with its signature and the first line of its documentation.

Usage: python tools/make_reference.py [--check]. With --check nothing is written; exit status 1 says that the
page is not what the sources say now. The sources are read, not imported, so this needs no torch.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from check_docs import exported, public_modules
from wheels import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

Every public name of every package, with the first line of its documentation; `help(name)` shows the rest:
shapes, dtypes, units, errors, an example. This page is made by `python tools/make_reference.py`.
"""
WIDTH = 90
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def module_file(name: str) -> Path | None:
    """The file of one of our modules, such as `ts_core.errors`."""
    top, *rest = name.split(".")
    folder = ROOT / "packages" / top.replace("_", "-") / "src" / top
    for path in (folder.joinpath(*rest, "__init__.py"), folder.joinpath(*rest).with_suffix(".py")):
        if path.is_file():
            return path
    return None


def find(module: str, name: str) -> tuple[str, Definition] | None:
    """Module and node that define a name, followed through `from ... import`."""
    path = module_file(module)
    if path is None:
        return None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    is_package = path.name == "__init__.py"
                    parent = module.split(".")[: len(module.split(".")) - node.level + is_package]
                    source = (
                        ".".join([*parent, *filter(None, [node.module])]) if node.level else node.module or ""
                    )
                    return find(source, alias.name)
    return None


def signature(node: Definition) -> str:
    """Call signature without annotations, short enough to read in a table."""
    function = node
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            return node.name
        function = inits[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = ast.parse(ast.unparse(function)).body[0].args  # type: ignore[attr-defined]
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in filter(None, every):
        argument.annotation = None
    if isinstance(node, ast.ClassDef):
        arguments.args = arguments.args[1:]
    text = f"{node.name}({ast.unparse(arguments)})"
    if len(text) <= WIDTH:
        return text
    return text[: text.rindex(", ", 0, WIDTH)] + ", ...)"


def row(package: str, module: str, name: str) -> str:
    """One line of a table."""
    found = find(module, name)
    if found is None:
        return f"| `{name}` | |"
    source, node = found
    first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    home = source.split(".")[0].replace("_", "-")
    origin = "" if home == package else f" (from {home})"
    return f"| `{signature(node)}` | {first}{origin} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for package in PACKAGES:
        parts.append(f"## {package}\n")
        for path in public_modules(package):
            tail = path.relative_to(ROOT / "packages" / package / "src").with_suffix("").parts
            module = ".".join(part for part in tail if part != "__init__")
            rows = [row(package, module, name) for name in sorted(exported(path), key=str.lower)]
            if rows:
                parts.append("\n".join([f"| {module} | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        print(
            "docs/reference.md is "
            + ("current" if text == current else "not current: make_reference.py makes it")
        )
        sys.exit(text != current)
    PAGE.write_text(text, encoding="utf-8")
