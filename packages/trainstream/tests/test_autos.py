"""What became of every option that is "auto" is in the events, by a line of its own."""

import dataclasses

import pytest
import torch
from conftest import toy
from hypothesis import given, settings
from hypothesis import strategies as st

import trainstream
from trainstream._autos import told_of
from trainstream._options import WrapOptions
from ts_core.testing import devices
from ts_optim import OffloadAdamW

AUTO = [f.name for f in dataclasses.fields(WrapOptions) if isinstance(f.default, str) and f.default == "auto"]
NEVER = ("optimizer_mode",)  # "auto" is not its default


def events(model, optimizer=None, **options):
    model, _ = trainstream.wrap(model, optimizer, **options)
    found = trainstream.memory_report(model)["events"]
    trainstream.unwrap(model)
    return found


def given_adamw():
    model = toy()
    return model, OffloadAdamW(model.parameters())


def sgd():
    model = toy()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


MODELS = {
    "trained": lambda: (toy(), None),
    "frozen": lambda: (toy().requires_grad_(False), None),
    "given": given_adamw,
    "sgd": sgd,
    "no stack": lambda: (torch.nn.Linear(4, 4), None),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", [{}, {"check_memory": False}, {"param_offload": True}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_every_auto_has_a_line(kind, options, device):
    model, optimizer = MODELS[kind]()
    if kind == "no stack":
        options = {k: v for k, v in options.items() if k != "param_offload"}
    asked = ({} if kind == "given" else {name: "auto" for name in NEVER}) | options
    if kind != "given":
        model = model.to(device)
    lines = events(model, optimizer, **asked)
    left = [
        name
        for name in (*AUTO, *set(asked).intersection(NEVER))
        if name not in options and not told_of(name, lines)
    ]
    assert left == []
    for name in ("peer", "schedule", "lossless", "host_arena"):
        assert sum(line.startswith(f"{name}=auto: ") for line in lines) == 1


def test_the_lines_say_what_was_chosen():
    lines = events(toy(), None, optimizer_mode="auto")
    assert "schedule=auto: microbatch, each goes through all blocks before the next" in lines
    assert "optimizer_mode=auto: cpu, host threads update where the model computes" in lines
    assert "host_arena=auto: off, page-locked memory serves a GPU" in lines
    (moments,) = [line for line in events(*sgd()) if line.startswith("moment_dtype")]
    assert moments == "moment_dtype=auto: SGD keeps state of its own"


@given(st.sampled_from(AUTO), st.sampled_from(AUTO))
@settings(max_examples=20, deadline=None)
def test_a_line_tells_of_the_options_before_its_colon(name, other):
    for line in (
        f"{name}=auto: x",
        f"{other}, {name}: x",
        f"{other}=auto, {name}=auto: x",
        f"{name}=auto ignored: x",
    ):
        assert told_of(name, [line])
    if name != other:
        assert not told_of(name, [f"{other}=auto: {name}=auto would help", f"{name} is not set"])
