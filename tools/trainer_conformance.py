"""Run transformers' own Trainer tests with `TrainStreamTrainer` in the place of `Trainer`.

Usage:
    python tools/trainer_conformance.py CHECKOUT        # a transformers source tree
    python tools/trainer_conformance.py                 # downloads the tag of the installed release
    ... --stock                                         # transformers' own Trainer: what fails here anyway
    ... --stand-ins                                     # without the model hub: see trainer_stand_ins.py
    ... --report stock.jsonl ours.jsonl                 # writes docs/trainer.md from two runs

Needs transformers, pytest, parameterized and datasets beside trainstream. Every test has one line of output
and, with --out, one line of JSON; a summary follows. The exit status is 1 if a test fails that is not in
trainer_conformance.txt: the list of those that are expected not to pass, each with the reason.

The tests are read where they are: nothing of them is kept here. Only their folder is linked into an empty
one, so that neither the checkout's own `src` nor its conftest.py is imported. As `-p trainer_conformance`
this file is the plugin that puts the class in its place before any test is imported.
"""

from __future__ import annotations

import argparse
import collections
import configparser
import fnmatch
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = ROOT / "tools" / "trainer_conformance.txt"
PAGE = ROOT / "docs" / "trainer.md"
ARCHIVE = "https://github.com/huggingface/transformers/archive/refs/tags/v{}.tar.gz"
#: Where the plugin writes a line per test, and which class it puts in.
OUT, STOCK = "TRAINER_CONFORMANCE_OUT", "TRAINER_CONFORMANCE_STOCK"


# ----------------------------------------------------------------------------------------------- the plugin


def pytest_configure(config: Any) -> None:
    """Replace `Trainer`, and put ours in front of `Seq2SeqTrainer`, before a test imports them."""
    if OUT not in os.environ or os.environ.get(STOCK):
        return
    import transformers
    import transformers.trainer
    import transformers.trainer_seq2seq

    from trainstream.integrations.huggingface import TrainStreamTrainer

    behind = transformers.trainer_seq2seq.Seq2SeqTrainer
    seq2seq = type("Seq2SeqTrainer", (TrainStreamTrainer, behind), {"__module__": __name__})
    for module in (transformers, transformers.trainer):
        module.Trainer = TrainStreamTrainer
    for module in (transformers, transformers.trainer_seq2seq):
        module.Seq2SeqTrainer = seq2seq


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how a test ended: its call, or what kept it from being called."""
    place = os.environ.get(OUT)
    if place is None or (report.when != "call" and report.passed):
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr)
    name = report.nodeid[report.nodeid.index("tests/") :]
    line = {"test": name, "outcome": report.outcome, "seconds": round(report.duration, 2), "reason": reason}
    with Path(place).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"\n{line['outcome']:8} {name}  {reason.splitlines()[0][:200] if reason else ''}", flush=True)


# ------------------------------------------------------------------------------------------------- the script


def tests_of(checkout: Path) -> list[Path]:
    """Return the files with the Trainer's tests."""
    found = sorted((checkout / "tests" / "trainer").glob("test_trainer*.py"))
    if not found:
        raise SystemExit(f"{checkout} has no tests/trainer/test_trainer*.py: give the root of a source tree")
    return found


def download(folder: Path) -> Path:
    """Bring the source tree of the installed release."""
    with urllib.request.urlopen(ARCHIVE.format(version("transformers"))) as answer:
        content = io.BytesIO(answer.read())
    with tarfile.open(fileobj=content) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def run(checkout: Path, out: Path, *, stock: bool, stand_ins: bool, only: str, timeout: float) -> None:
    """Run every file in a process of its own; what it found is added to `out`."""
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "tests").symlink_to(checkout.resolve() / "tests")
        environment = {**os.environ, OUT: str(out.resolve()), "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
        if stock:
            environment[STOCK] = "1"
        if stand_ins:
            environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        plugins = ["trainer_conformance", *(["trainer_stand_ins"] if stand_ins else [])]
        words = [word for plugin in plugins for word in ("-p", plugin)]
        words += [
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            empty,
            "-q",
            "--tb=no",
            "-W",
            "ignore",
        ]
        for file in tests_of(checkout):
            if only not in file.name:
                continue
            place = str(Path("tests") / "trainer" / file.name)
            try:
                command = [sys.executable, "-m", "pytest", *words, place]
                subprocess.run(command, cwd=empty, env=environment, timeout=timeout, check=False)
            except subprocess.TimeoutExpired:
                print(f"stopped   {place} after {timeout:g} s", flush=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a run found, by test."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["test"].removeprefix("tests/trainer/"): line for line in lines}


def expected() -> dict[str, dict[str, str]]:
    """Return the reasons of trainer_conformance.txt: section -> pattern of a test -> reason."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(EXPECTED.read_text(encoding="utf-8"))
    return {name: dict(parser[name]) for name in parser.sections()}


def reason_of(test: str, reasons: dict[str, str]) -> str:
    """Return the reason that a list has for a test, or nothing."""
    return next((why for pattern, why in reasons.items() if fnmatch.fnmatchcase(test, pattern)), "")


def summary(found: dict[str, dict[str, Any]]) -> int:
    """Print how the tests ended; return how many failed that are not expected to."""
    reasons = {pattern: why for section in expected().values() for pattern, why in section.items()}
    counts = collections.Counter(line["outcome"] for line in found.values())
    surprises = [t for t, line in found.items() if line["outcome"] == "failed" and not reason_of(t, reasons)]
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    for test in surprises:
        print(f"not expected: {test}: {found[test]['reason'].splitlines()[0][:200]}")
    return len(surprises)


HEAD = """# transformers' own Trainer tests

Made by `python tools/trainer_conformance.py --report`, from runs of the tests under transformers
{transformers} and PyTorch {torch} on a CPU: as they are, and with `TrainStreamTrainer` in the place of
`Trainer` (in front of `Seq2SeqTrainer`), no option set. Models and texts of the hub were stood in for by
tiny ones. The tests are those of {tests}.

| file | tests | pass with `Trainer` | pass with `TrainStreamTrainer` |
|---|---|---|---|
"""


def report(tests: str, stock: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> str:
    """Write the page."""
    versions = {package: version(package).split("+")[0] for package in ("transformers", "torch")}
    page = HEAD.format(tests=tests, **versions)
    passed = [{t for t, line in run.items() if line["outcome"] == "passed"} for run in (stock, ours)]
    files = sorted({test.split("::")[0] for test in stock})
    for name in [*files, ""]:
        counts = [sum(test.startswith(name) for test in tests) for tests in (stock, *passed)]
        page += f"| {f'`{name}`' if name else 'all'} | {' | '.join(map(str, counts))} |\n"
    page += "\n## Pass with `Trainer`, not with `TrainStreamTrainer`\n\n| test | why |\n|---|---|\n"
    lists = expected()
    for test in sorted(passed[0] - passed[1]):
        page += (
            f"| `{test}` | {reason_of(test, lists['ours']) or 'NOT KNOWN: ' + ours[test]['reason'][:80]} |\n"
        )
    page += "\n## Do not run here, with either\n\n| why | tests |\n|---|---|\n"
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for test in sorted(stock.keys() - passed[0]):
        own = stock[test]["reason"] if stock[test]["outcome"] == "skipped" else ""
        own = re.sub(r"^@\w+: ", "", own)
        groups[own or reason_of(test, lists["here"]) or "fails"].append(test.split("::")[-1])
    for why, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        page += f"| {why} | {', '.join(f'`{name}`' for name in names)} |\n"
    return page


def main() -> int:
    """Run, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", help="a transformers source tree; else downloaded")
    parser.add_argument("--stock", action="store_true", help="transformers' own Trainer")
    parser.add_argument("--stand-ins", action="store_true", help="tiny models in the place of the hub's")
    parser.add_argument("--only", default="", help="files whose names have this in them")
    parser.add_argument("--out", type=Path, help="file for JSON lines, added to")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for a file")
    parser.add_argument(
        "--report", type=Path, nargs=2, metavar=("STOCK", "OURS"), help="write docs/trainer.md"
    )
    parser.add_argument("--tests", default="the same release", help="for --report: where the tests are from")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(report(options.tests, *map(read, options.report)), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        checkout = options.checkout or download(Path(scratch))
        out = options.out or Path(scratch) / "out.jsonl"
        words = {"stock": options.stock, "stand_ins": options.stand_ins, "only": options.only}
        run(checkout, out, timeout=options.timeout, **words)
        return int(summary(read(out)) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
