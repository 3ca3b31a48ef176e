"""Check the documentation without running it.

Every relative link and anchor of every markdown file leads somewhere; every Python block parses; every name
that a package exports (`__all__` of its top module) occurs in docs/ or in a README.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from wheels import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S
)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.M)


def markdown_files() -> list[Path]:
    """The pages that people read."""
    places = [
        ROOT.glob("*.md"),
        ROOT.glob("docs/**/*.md"),
        ROOT.glob("packages/*/*.md"),
        ROOT.glob("tools/*.md"),
    ]
    return sorted(path for place in places for path in place)


def without_code(text: str) -> str:
    """The page without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def link_problems(page: Path, text: str) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def code_problems(text: str) -> Iterator[str]:
    """Python blocks that do not parse."""
    for block in FENCE.finditer(text):
        if block["language"] not in {"python", "py"}:
            continue
        try:
            ast.parse(textwrap.dedent(block["body"]))
        except SyntaxError as error:
            line = text[: block.start()].count("\n") + 1 + (error.lineno or 0)
            yield f"line {line}: Python block does not parse: {error.msg}"


def exported(module: Path) -> list[str]:
    """`__all__` of a module, read without importing it."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return []


def public_modules(package: str) -> list[Path]:
    """The package's top module, or its other public modules if the top exports nothing."""
    top = ROOT / "packages" / package / "src" / package.replace("-", "_") / "__init__.py"
    if not top.is_file() or exported(top):
        return [top] if top.is_file() else []
    modules = [*top.parent.glob("*.py"), *top.parent.glob("*/__init__.py")]
    return sorted(p for p in modules if p.name[0] != "_" or p.parent != top.parent)


def problems() -> Iterator[str]:
    """Everything wrong, as sentences."""
    pages = {page: page.read_text(encoding="utf-8") for page in markdown_files()}
    for page, text in pages.items():
        for problem in [*link_problems(page, text), *code_problems(text)]:
            yield f"{page.relative_to(ROOT)}: {problem}"
    everything = "\n".join(pages.values())
    for package in PACKAGES:
        for name in (name for module in public_modules(package) for name in exported(module)):
            if not re.search(rf"\b{re.escape(name)}\b", everything):
                yield f"{package}: the public name {name} is on no page"


if __name__ == "__main__":
    broken = list(problems())
    print(
        "\n".join(broken)
        or f"{len(markdown_files())} pages: links, code blocks and public names are in order"
    )
    sys.exit(bool(broken))
