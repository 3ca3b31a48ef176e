"""Runs the examples of the docstrings."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import ts_core

NAMES = sorted(
    module.name
    for module in pkgutil.walk_packages(ts_core.__path__, "ts_core.")
    if not module.ispkg and not module.name.endswith("plugin")
)
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_a_module(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0


def test_most_modules_have_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = [
        name
        for name in NAMES
        if any(test.examples for test in finder.find(importlib.import_module(name), name))
    ]
    assert len(with_examples) >= 10


@pytest.mark.skipif(not README.is_file(), reason="the tests lie elsewhere")
def test_examples_of_the_readme(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
    assert "tensor([2., 2., 2.])" in capsys.readouterr().out
