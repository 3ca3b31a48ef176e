"""`capture="auto"`: what it will do on a GPU, with the stand-in for graphs and a meter that is told.

It stays off until graphs have run on a GPU; then it is switched on in one place.
"""

import pytest
import torch
from grid_models import (
    LAYERS,
    WRAP_POLICIES,
    adamw,
    build,
    cached,
    compare,
    offload_adamw,
    one,
    resident,
    train,
)

import trainstream
from trainstream._options import WrapOptions
from trainstream._paging import captured

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
GPU = torch.device("cuda", 0)


class Clock:
    def __init__(self, host, device):
        self.seconds = host, device

    def now(self):
        return 0

    def between(self, first, last):
        return self.seconds


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let a CPU count as a device where graphs are proven, and where a block takes so long."""

    def pretend(host, device):
        monkeypatch.setattr("trainstream._paging.captures_by_itself", lambda device: True)
        monkeypatch.setattr("ts_paging.captured.meter_for", lambda at: Clock(host, device))

    return pretend


def wrapped_run(kind, policy, count, **options):
    model = build(kind)
    options = {**WRAP_POLICIES[policy], "param_offload": True, **options}
    model, optimizer = trainstream.wrap(model, offload_adamw(list(model.parameters())), **options)
    found = train(model, optimizer, one, count=count)
    report = trainstream.memory_report(model)
    trainstream.unwrap(model)
    return found, report["captured"], report["events"]


@pytest.mark.parametrize(("kind", "policy"), [("lora", "offload"), *[("llama", p) for p in WRAP_POLICIES]])
def test_auto_captures_what_waits_for_its_launches(kind, policy, as_on_a_gpu):
    as_on_a_gpu(1.0, 1.0)
    found, report, events = wrapped_run(kind, policy, 12)
    compare(found, resident(kind, one, "none", "cpu", offload_adamw, count=12))
    assert (report["blocks"], report["fallbacks"]) == (LAYERS, {})
    assert any("is recorded, and those like it" in line for line in events)


@pytest.mark.parametrize("capture", [True, "auto"])
def test_what_is_asked_for_and_cannot_be_is_a_warning(capture, caplog):
    model = build("llama")
    model, optimizer = trainstream.wrap(
        model, offload_adamw(list(model.parameters())), param_offload=True, capture=capture
    )
    with caplog.at_level("INFO"):
        train(model, optimizer, cached, count=3)
    trainstream.unwrap(model)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("pass use_cache=False" in line for line in said) == (capture is True)
    assert len(said) == (capture is True)


def test_auto_leaves_alone_what_keeps_the_device_busy(as_on_a_gpu):
    as_on_a_gpu(0.1, 1.0)
    found, report, events = wrapped_run("llama", "recompute", 12)
    compare(found, resident("llama", one, "none", "cpu", offload_adamw, count=12))
    assert report["recordings"] == 0
    assert sum("a replay saves too little" in line for line in events) == 1


def test_auto_makes_no_pager_for_a_model_that_needs_none(as_on_a_gpu):
    """Gradients of gradients, and several threads, go on working there."""
    as_on_a_gpu(1.0, 1.0)
    model = build("llama")
    model, _ = trainstream.wrap(model, adamw(list(model.parameters())), param_offload=False, recompute=False)
    assert trainstream.memory_report(model)["captured"] == {}
    trainstream.unwrap(model)


def test_auto_is_on_for_gpus_alone():
    auto, asked, never = (WrapOptions.from_kwargs(capture=value) for value in ("auto", True, False))
    cpu = torch.device("cpu")
    found = [[captured(options, device) for device in (GPU, cpu)] for options in (auto, asked, never)]
    assert found == [[True, False], [True, True], [False, False]]
    assert any("captured where that pays" in line for line in auto.notes())
    assert not any("captured where that pays" in line for line in auto.notes(on_cpu=True))
