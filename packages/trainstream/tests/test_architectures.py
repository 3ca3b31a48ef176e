"""Wrapped models of many architectures train as the plain ones do: losses, every gradient, every weight.

Each architecture runs in two ways that hold every value between them; all eight with
HYPOTHESIS_PROFILE=nightly. `docs/support.md` is made of the same runs.
"""

import itertools
import os

import pytest
from architectures import ARCHITECTURES, CODECS, PLACES, TRAININGS, compare, isolated

HELPED = ("gpt-oss",)  # transformers makes its masks without the positions; isolate_documents makes them
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
ALL = list(itertools.product(TRAININGS, CODECS, PLACES))
FEW = (
    [("LoRA", "nf4", "paged"), ("full", "none", "paged")],
    [("full", "nf4", "paged"), ("LoRA", "none", "resident")],
)
CASES = [
    (name, *case) for index, name in enumerate(ARCHITECTURES) for case in (ALL if NIGHTLY else FEW[index % 2])
]
# What PEFT says of names that transformers renamed, of tied heads and of experts without a rank of their own.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*"),
    pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern:RuntimeWarning"),
]


@pytest.mark.parametrize(("name", "training", "codec", "place"), CASES)
def test_it_trains_as_the_plain_model_does(name, training, codec, place):
    count = compare(name, training, codec, place)
    assert (count > 0) == (codec != "none")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_documents_do_not_reach_each_other(name):
    assert isolated(name) == (name not in HELPED)
