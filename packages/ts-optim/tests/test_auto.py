"""mode="auto": what is measured, when it is not, what it says, and that it changes no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW, auto
from ts_optim.options import OffloadOptions


class Memory:
    """An allocator whose memory says of itself whether it is page-locked."""

    def __init__(self, pinned=True, error=None):
        self.pinned, self.error = pinned, error

    def empty(self, nbytes):
        if self.error is not None:
            raise self.error
        made = torch.empty(0, dtype=torch.uint8)
        made.is_pinned = lambda: self.pinned
        return made


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(auto, "_measured", {})


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(auto, "host_allocator", Memory)


def choice(times, **options):
    calls = []

    def timer(mode, device, dtype, moments, threads):
        calls.append((mode, dtype, moments))
        if isinstance(times[mode], Exception):
            raise times[mode]
        return times[mode]

    return auto.ModeChoice(OffloadOptions(mode="auto", **options), timer), calls


@given(
    host=st.floats(1e-4, 1.0),
    kernel=st.floats(1e-4, 1.0),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_the_faster_one_is_taken_and_measured_once(host, kernel, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(auto, "host_allocator", Memory)
        patch.setattr(auto, "_measured", {})
        first, calls = choice({"cpu": host, "gpu": kernel}, moment_dtype="bfloat16")
        assert "so far" in first.reason
        param = torch.ones(3, dtype=dtype)
        assert first.in_place(param) == first.in_place(param) == (kernel < host)
        assert len(calls) == 2
        assert first.mode == ("gpu" if kernel < host else "cpu")
        assert f"{1e3 * host:.1f} ms" in first.reason
        second, again = choice({"cpu": 1.0, "gpu": 1.0}, moment_dtype="bfloat16")
        assert second.in_place(param) == (kernel < host)
        assert again == []
        third, again = choice({"cpu": 1.0, "gpu": 0.5})  # another format is another question
        assert third.in_place(param)
        assert len(again) == 2


def test_kinds_of_weights_may_differ(gpu):
    def timer(mode, device, dtype, moments, threads):
        return (mode == "gpu") == (dtype is torch.float32)

    chosen = auto.ModeChoice(OffloadOptions(mode="auto"), timer)
    assert [chosen.in_place(torch.ones(1, dtype=d)) for d in (torch.float32, torch.bfloat16)] == [False, True]
    assert chosen.mode == "cpu and gpu"


@pytest.mark.parametrize(
    ("options", "memory", "times", "reason"),
    [
        ({"moment_dtype": "int8"}, {}, {}, "int8"),
        ({"pin_moments": False}, {}, {}, "pin_moments=False"),
        ({}, {"pinned": False}, {}, "page-locking was refused"),
        ({}, {"error": MemoryError("limit reached")}, {}, "limit reached"),
        ({}, {}, {"cpu": 1.0, "gpu": torch.cuda.OutOfMemoryError("no room there")}, "no room there"),
    ],
)
def test_host_threads_where_nothing_else_will_do(gpu, monkeypatch, options, memory, times, reason):
    monkeypatch.setattr(auto, "host_allocator", lambda: Memory(**memory))
    chosen, _ = choice(times, **options)
    assert not chosen.in_place(torch.ones(1))
    assert chosen.mode == "cpu"
    assert reason in chosen.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_without_a_gpu_it_says_so():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = OffloadAdamW([p], mode="auto")
    optimizer.step()
    stats = optimizer.stats()
    assert stats["mode"] == "cpu"
    assert "no CUDA device" in stats["mode_reason"]
    assert OffloadAdamW([p]).stats()["mode_reason"] == "mode='cpu' was asked for"


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_the_sample_is_a_step_of_the_optimizer(moments, monkeypatch):
    monkeypatch.setattr(auto, "_NUMEL", 1000)
    seconds = auto.step_seconds(OffloadAdamW, "cpu", torch.device("cpu"), torch.bfloat16, moments, 1)
    assert 0.0 < seconds < 60.0


@pytest.mark.parametrize("device", devices()[1:])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_measures_and_changes_no_bit(device, moments, dtype):
    results = []
    for mode in ("auto", "cpu", "gpu"):
        with seeded(0):
            p = nn.Parameter(torch.randn(1000, 40).to(device, dtype))
        state = torch.get_rng_state()
        optimizer = OffloadAdamW([p], mode=mode, moment_dtype=moments, place=lambda p: "host")
        for step in range(3):
            with seeded(step):
                p.grad = torch.randn(1000, 40).to(device, dtype)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
        stats = optimizer.stats()
        assert ("ms" if mode == "auto" else "asked for") in stats["mode_reason"]
        results.append(p.detach())
    assert_bit_equal(results[0], results[1])
    assert_bit_equal(results[0], results[2])
