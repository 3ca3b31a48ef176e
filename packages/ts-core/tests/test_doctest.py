"""Runs the examples of the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import ts_core

NAMES = sorted(
    module.name
    for module in pkgutil.walk_packages(ts_core.__path__, "ts_core.")
    if not module.ispkg and not module.name.endswith("plugin")
)


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
