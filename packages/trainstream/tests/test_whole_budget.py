"""A budget of a GPU's memory holds for all that the process takes there, not for tensors alone."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st

import trainstream
from trainstream import _budget
from trainstream._budget import Limits, context_bytes, corrected, keep_to_budget
from trainstream._copies import use_fast_copies
from trainstream._options import WrapOptions
from ts_core import memory
from ts_core.planner import Budgets
from ts_core.testing import gpu
from ts_core.usage import CONTEXT_BYTES, DeviceUsage, device_usage

MIB, GIB = 1 << 20, 1 << 30
GPU = torch.device("cuda:0")


@pytest.fixture
def holds(monkeypatch):
    """Let the process hold so many bytes of a GPU by NVML, so many of them reserved by PyTorch."""

    def say(used, reserved, source="nvml"):
        monkeypatch.setattr(_budget, "device_usage", lambda device: DeviceUsage(str(device), used, source))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved)
        monkeypatch.setattr(_budget, "context_bytes", context_bytes)

    return say


def bounds_of(budget, held, others=0, free=140 * GIB, share=0.9, used=lambda: 0):
    cap = budget - held
    usable = int(min(free, cap - others) * share)
    return Limits(
        Budgets(usable, GIB, GIB), cap, used, usable + others, cap, others,
        vram_budget=budget, free=free, share=share,
    )  # fmt: skip


def test_what_is_beside_the_allocator_is_measured(holds):
    holds(8 * GIB, 7 * GIB)
    assert context_bytes(GPU) == GIB
    holds(8 * GIB, 7 * GIB, "nvml-alone")
    assert context_bytes(GPU) == GIB
    holds(7 * GIB, 8 * GIB)
    assert context_bytes(GPU) == 0
    holds(8 * GIB, 7 * GIB, "estimate")
    assert context_bytes(GPU) is None


@given(
    budget=st.integers(2 * GIB, 80 * GIB),
    held=st.integers(0, 3 * GIB),
    others=st.integers(0, GIB),
    free=st.integers(GIB, 140 * GIB),
    share=st.floats(0.5, 1.0),
)
def test_a_limit_follows_what_is_held(budget, held, others, free, share):
    before = bounds_of(budget, CONTEXT_BYTES, others, free, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_budget, "context_bytes", lambda device: held)
        after = corrected(before, GPU)
        again = corrected(after, GPU)
    assert again is after
    assert abs(after.cap + held - budget) < 4 * MIB or after.cap == 0
    expected = bounds_of(budget, budget - after.cap, others, free, share)
    assert (after.room, after.device_cap, after.budgets) == (expected.room, expected.cap, expected.budgets)
    assert (after is before) == (abs(after.cap - before.cap) == 0)


def test_without_a_budget_or_without_nvml_nothing_changes(holds):
    before = bounds_of(12 * GIB, CONTEXT_BYTES)
    holds(8 * GIB, 7 * GIB, "estimate")
    assert corrected(before, GPU) is before
    holds(8 * GIB, 7 * GIB)
    free = Limits(Budgets(GIB, GIB, GIB), None, lambda: 0, GIB)
    assert corrected(free, GPU) is free
    assert corrected(before, GPU).cap == 11 * GIB


class Adapting:
    """The part of a session that is looked at."""

    def __init__(self):
        self.made, self.said = [], []
        governor = SimpleNamespace(limit=0, room=0, kept=2 * GIB)
        self.tuner = SimpleNamespace(governor=governor)
        self.events = SimpleNamespace(add=self.said.append)
        self.relief = SimpleNamespace(
            places=SimpleNamespace(limits=None),
            make_room=lambda wanted, why: self.made.append(wanted) or (wanted if self.movable else 0),
        )
        self.movable = True


@pytest.fixture
def caps(monkeypatch):
    set_to = []
    monkeypatch.setattr(_budget, "cap_device", lambda device, cap: set_to.append(cap))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: set_to.append("emptied"))
    return set_to


def test_a_session_keeps_to_it(holds, caps):
    session, before = Adapting(), bounds_of(12 * GIB, CONTEXT_BYTES)
    holds(10 * GIB, 9 * GIB)
    after, evicted = keep_to_budget(session, before, GPU, 9 * GIB)
    assert not evicted
    assert after.cap == 11 * GIB < before.cap
    assert caps == [11 * GIB]  # the allocator's own limit follows
    governor = session.tuner.governor
    assert governor.limit == governor.room == after.room == int(11 * GIB * 0.9)
    assert session.relief.places.limits is after
    assert session.made == []
    assert "1.00 GiB" in session.said[0]
    assert keep_to_budget(session, after, GPU, 9 * GIB) == (after, False)
    assert len(session.said) == 1


def test_what_is_cached_beyond_the_limit_is_given_back_first(holds, caps):
    session = Adapting()
    holds(12 * GIB + MIB, 11 * GIB + MIB)
    keep_to_budget(session, bounds_of(12 * GIB, CONTEXT_BYTES), GPU, 9 * GIB)
    assert caps == ["emptied", 11 * GIB]


@pytest.mark.parametrize(
    ("used", "peak", "wanted"),
    [
        (5 * GIB, 9 * GIB, 0),
        (5 * GIB, 11 * GIB, 0),  # activations that are kept make room by themselves
        (10 * GIB, 11 * GIB, 10 * GIB - int(11 * GIB * 0.9)),
        (5 * GIB, 14 * GIB, GIB),
    ],
)
def test_what_has_no_room_leaves(holds, caps, used, peak, wanted):
    session = Adapting()
    holds(10 * GIB, 9 * GIB)
    before = bounds_of(12 * GIB, CONTEXT_BYTES, used=lambda: used)
    assert keep_to_budget(session, before, GPU, peak)[1] == bool(wanted)
    assert session.made == ([wanted] if wanted else [])


def test_where_nothing_can_leave_the_session_goes_on_adapting(holds, caps):
    session = Adapting()
    session.movable = False
    holds(10 * GIB, 9 * GIB)
    before = bounds_of(12 * GIB, CONTEXT_BYTES, used=lambda: 11 * GIB)
    assert not keep_to_budget(session, before, GPU, 11 * GIB)[1]


def test_no_limit_is_negative_or_above_the_cap(holds):
    holds(2 * GIB, 1 * GIB)
    found = corrected(bounds_of(3 * GIB // 2, CONTEXT_BYTES, others=GIB), GPU)
    assert found.cap == GIB // 2
    assert found.budgets.device == 0
    assert found.room == found.cap


@pytest.mark.parametrize(("others", "held"), [(None, CONTEXT_BYTES), (None, GIB), (0, 300 * MIB)])
def test_wrap_counts_what_is_measured_and_no_less_than_is_assumed(monkeypatch, others, held):
    """Before the first step libraries have not loaded all of their code; later what is measured counts."""
    options = WrapOptions.from_kwargs(vram_budget="12GiB")
    here = memory.DeviceBudget("cuda:0", 140 * GIB, 130 * GIB, 0)
    monkeypatch.setattr(memory, "device_budget", lambda device: here)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    measured = 300 * MIB if held == CONTEXT_BYTES else held
    monkeypatch.setattr(_budget, "context_bytes", lambda device: measured)
    found = _budget._device_limits([], GPU, options, GIB, GIB, others)
    assert found.cap == found.device_cap == 12 * GIB - held
    assert found.room == int(found.cap * (1 - options.vram_headroom))


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_process_keeps_to_its_budget(monkeypatch):
    monkeypatch.setattr(_budget, "context_bytes", context_bytes)
    if not device_usage("cuda:0").source.startswith("nvml"):
        pytest.skip("NVML does not say what a process holds here")
    use_fast_copies(GPU, WrapOptions())
    model = tiny_llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, head_dim=128)
    room = context_bytes(GPU) + torch.cuda.memory_reserved(GPU) + 400 * MIB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = trainstream.wrap(model, optimizer, device="cuda", vram_budget=room)
    session = model._trainstream_session
    ids = torch.randint(0, 97, (4, 64), device="cuda")
    for _ in range(12):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    assert device_usage("cuda:0").used_bytes <= room
    assert session.relief.places.limits.cap <= room - context_bytes(GPU) + 4 * MIB
    trainstream.unwrap(model)
