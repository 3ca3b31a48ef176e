"""Automatic offloading of activations: as much as RAM has room for and time allows, both as the test says."""

import dataclasses

import pytest
import torch
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from test_replay import batches_of, model_of, plant, room

import trainstream
from trainstream import _spill, _tuner
from trainstream._spill import Spill, ram_for_activations
from ts_core import memory, registry
from ts_core.memory import HostBudget
from ts_paging.arena import HostArena

GIB = 1 << 30
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@dataclasses.dataclass
class Stub:
    """A governor of `blocks` blocks without room, each of `each` bytes."""

    blocks: int = 10
    each: int = GIB
    measured: bool = True
    offloads: int | None = None
    ram: int | None = None
    flight: int = 0
    passed: int = 0
    refreshed: int = 0

    @property
    def offerable(self):
        return self.blocks

    @property
    def each_offloaded(self):
        return self.each if self.measured else 0

    def refresh(self):
        self.refreshed += 1


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def budget(free, whole=1 << 40, ranks=1):
    return HostBudget(whole, free, None, "test", ranks)


@pytest.mark.parametrize(
    ("free", "whole", "ranks", "growth", "left", "room"),
    [
        (100 * GIB, 100 * GIB, 1, 0, None, 60 * GIB),
        (100 * GIB, 100 * GIB, 1, 2 * GIB, None, 58 * GIB),
        (10 * GIB, 100 * GIB, 1, 0, None, 0),  # no more than the floor of 10 % is left
        (18 * GIB, 100 * GIB, 1, 0, None, 8 * GIB),
        (8 * GIB, 16 * GIB, 1, 0, None, 4 * GIB),  # 4 GiB stay
        (3 * GIB, 16 * GIB, 1, 0, None, 0),
        (100 * GIB, 100 * GIB, 1, 0, 7 * GIB, 7 * GIB),  # a budget
        (100 * GIB, 100 * GIB, 1, 0, -GIB, 0),
        (10 * GIB, 400 * GIB, 8, 0, None, 5 * GIB),  # a rank's share of what is free, and of the floor
    ],
)
def test_ram_that_activations_may_take(free, whole, ranks, growth, left, room):
    assert ram_for_activations(budget(free, whole, ranks), growth, left) == room


@given(st.integers(0, 1 << 42), st.integers(1, 1 << 42), st.integers(1, 16), st.integers(0, 1 << 34))
def test_the_floor_is_never_touched(free, whole, ranks, growth):
    room = ram_for_activations(budget(free, whole, ranks), growth)
    assert 0 <= room <= 0.6 * free
    if room:
        assert free - growth - room >= max(whole // 10, 4 * GIB) // ranks


def spill(monkeypatch, governor, free=1000 * GIB, slowdown=0.15, **options):
    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: budget(free))
    monkeypatch.setattr(_spill, "arena_growth", lambda: 0)
    told, clock = [], Clock()
    made = Spill(governor, slowdown, told.append, clock=clock, **options)
    return made, told, clock


def play(made, governor, clock, seconds_of):
    """Run steps until the trial is over; `seconds_of` says how long one takes that offloads so many."""
    for steps in range(1, 20):
        if not made.after_step():
            return steps
        clock.now += seconds_of(governor.offloads)
        governor.passed += 1000
    raise AssertionError("it does not come to an end")


def test_before_a_step_was_measured_nothing_is_said_and_nothing_offloads(monkeypatch):
    governor = Stub(measured=False)
    made, told, _ = spill(monkeypatch, governor)
    made.measure_room()
    assert not told
    assert governor.offloads == 0
    governor.measured = True
    made.measure_room()
    made.measure_room()
    assert len(told) == 1
    assert "RAM has room for the activations of 600 blocks" in told[0]
    assert governor.ram == 600 * GIB


@pytest.mark.parametrize(("free", "count"), [(1000, 10), (112, 9), (106, 3), (103, 0)])
def test_as_many_as_ram_has_room_for(monkeypatch, free, count):
    governor = Stub()
    made, told, clock = spill(monkeypatch, governor, free * GIB, flight=7)
    made.measure_room()
    steps = play(made, governor, clock, lambda offloads: 1.0)
    assert governor.offloads == count
    assert governor.flight == (7 if count else 0)
    assert steps == (4 if count else 1)
    assert f"room for the activations of {min(count, 10) if count < 10 else 600} blocks" in told[0]
    if count:
        assert f"{count} blocks offload; a step takes 0% longer" in told[-1]


def test_what_costs_too_much_time_recomputes_instead(monkeypatch):
    governor = Stub()
    made, told, clock = spill(monkeypatch, governor)
    made.measure_room()
    # Each block adds 3 % from the first one on: 5 of them add what is allowed.
    play(made, governor, clock, lambda offloads: 2.0 * (1 + 0.03 * offloads))
    assert governor.offloads == 5
    assert "5 blocks offload; a step takes 15% longer" in told[-1]


@pytest.mark.parametrize(("slowdown", "count"), [(0.0, 0), (0.1, 3), (0.3, 10), (5.0, 10)])
def test_how_much_may_be_added_is_an_option(monkeypatch, slowdown, count):
    governor = Stub()
    made, _, clock = spill(monkeypatch, governor, slowdown=slowdown)
    made.measure_room()
    play(made, governor, clock, lambda offloads: 1 + 0.03 * offloads)
    assert governor.offloads == count


def test_where_any_number_is_too_slow_none_offloads(monkeypatch):
    governor = Stub()
    made, told, clock = spill(monkeypatch, governor)
    made.measure_room()
    play(made, governor, clock, lambda offloads: 3.0 if offloads else 1.0)
    assert governor.offloads == governor.flight == 0
    assert governor.refreshed
    assert "no block offloads: a step took 200% longer" in told[-1]
    assert "max_activation_slowdown" in told[-1]


def test_steps_of_other_lengths_are_compared_by_what_they_compute(monkeypatch):
    governor = Stub()
    made, _, clock = spill(monkeypatch, governor)
    made.measure_room()
    for rows in (1, 3, 2, 5):  # a step takes a second a thousand bytes, whatever offloads
        if not made.after_step():
            break
        clock.now += rows
        governor.passed += 1000 * rows
    assert governor.offloads == 10


def test_a_step_without_a_pass_says_nothing(monkeypatch):
    governor = Stub()
    made, _, clock = spill(monkeypatch, governor)
    made.measure_room()
    assert made.after_step()
    clock.now += 50.0
    assert made.after_step()
    assert governor.offloads == 0


def test_where_the_link_is_what_a_step_waits_for_nothing_is_tried(monkeypatch):
    governor = Stub()
    made, told, clock = spill(monkeypatch, governor, link=lambda: 0.88)
    made.measure_room()
    offered = set()

    def seconds(offloads):
        offered.add(offloads)
        return 1.0

    assert play(made, governor, clock, seconds) == 2
    assert offered == {0}
    assert governor.offloads == governor.flight == 0
    assert "no block offloads: the link is busy for 88% of a step in which they recompute" in told[-1]


def test_steps_that_record_are_no_measure(monkeypatch):
    """A step that records takes ten times as long, whatever offloads: each change of policy is recorded."""
    governor = Stub()
    now = {"offloads": None, "age": 0}
    made, told, clock = spill(monkeypatch, governor, steady=lambda: now["age"] > 2)
    made.measure_room()

    def seconds(offloads):
        now["age"] = now["age"] + 1 if offloads == now["offloads"] else 1
        now["offloads"] = offloads
        return (1.0 + 0.1 * offloads) * (1.0 if now["age"] > 2 else 10.0)

    play(made, governor, clock, seconds)
    assert governor.offloads == 1
    assert "1 blocks offload; a step takes 10% longer" in told[-1]


def test_steps_that_never_are_a_measure_are_not_waited_for_without_end(monkeypatch):
    governor = Stub()
    made, _, clock = spill(monkeypatch, governor, steady=lambda: False)
    made.measure_room()
    play(made, governor, clock, lambda offloads: 1.0)
    assert governor.offloads == 10


def test_the_arena_s_growth_is_what_is_not_there_yet(monkeypatch):
    before = registry.host_allocator()
    try:
        with HostArena(pinned=False, slab_bytes=1 << 22, step_bytes=1 << 20) as arena:
            registry.set_host_allocator(arena)
            assert _spill.arena_growth() == 1 << 20
            piece = arena.empty(1 << 19)
            assert _spill.arena_growth() == 1 << 19  # half of the slab is free
            del piece
            registry.set_host_allocator(before)
    finally:
        registry.set_host_allocator(before)
    assert _spill.arena_growth() == 0


# -- in a session


def trained(tmp_path, steps=14, **options):
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    model, optimizer = trainstream.wrap(
        model, None, lr=1e-3, quantize="none", disk_offload=tmp_path, min_offload_bytes=0, **options
    )
    session = model._trainstream_session
    losses, policies = [], []
    for step in range(steps):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=ids.to(session.plan.device), labels=ids.to(session.plan.device)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        policies.append(session.plan.policy)
    return model, session, losses, policies


@pytest.mark.parametrize("slow", [False, True])
def test_a_session_finds_out_and_the_losses_stay_the_same(slow, tmp_path, monkeypatch):
    """Under a CPU, where nothing offloads by itself, let it go to RAM as under a GPU."""
    _, _, expected, _ = trained(tmp_path)
    monkeypatch.setattr(_tuner, "offloads_by_itself", lambda device: True)
    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: budget(1000 * GIB))
    real, made = Spill, []

    def timed(governor, *args, **options):
        clock = Clock()
        made.append((real(governor, *args, clock=clock, **options), clock))
        return made[-1][0]

    monkeypatch.setattr(_tuner, "Spill", timed)
    monkeypatch.setattr(_tuner.Tuner, "_peak", lambda self: 1 << 40)  # a step takes all there is

    def tick(self, session, after=_tuner.Tuner.after_step):
        made[0][1].now += 3.0 if slow and self.governor.offloads else 1.0
        after(self, session)

    monkeypatch.setattr(_tuner.Tuner, "after_step", tick)
    model, session, losses, policies = trained(
        tmp_path, ram_budget=trainstream._budget.host_used() + (64 << 20)
    )
    assert losses == expected
    assert not session.adapting
    assert policies[1] == ("recompute",) * 6
    ever = {policy for row in policies for policy in row}
    assert "offload" in ever
    assert ("offload" in policies[-1]) == (not slow)
    said = " ".join(session.decisions)
    assert "activation_offload=auto: RAM has room for the activations of" in said
    assert ("max_activation_slowdown" in said) == slow
    trainstream.unwrap(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_under_a_gpu_blocks_without_room_offload_within_the_budget(tmp_path, monkeypatch):
    """Whatever time says here, so much may be added that they do."""
    _, _, expected, _ = trained(tmp_path, device="cuda")
    monkeypatch.setattr(_tuner.Tuner, "_peak", lambda self: 1 << 40)  # a step takes all there is
    room = trainstream._budget.CONTEXT_BYTES + torch.cuda.memory_allocated() + (256 << 20)
    options = {"device": "cuda", "vram_budget": room, "max_activation_slowdown": 1e6}
    model, session, losses, policies = trained(tmp_path, steps=20, **options)
    assert losses[:14] == expected
    assert not session.adapting
    said = " ".join(session.decisions)
    assert "activation_offload=auto: RAM has room for the activations of" in said
    assert "offload" in policies[-1]
    assert session.pager.activations.parked > 0
    trainstream.unwrap(model)


def test_blocks_that_kept_nothing_when_memory_ran_out_do_not_begin_to():
    """What is measured first is what comes first: the room that blocks waited for was not there."""

    def train(fail):
        torch.manual_seed(1)
        model = model_of()
        fault = plant(model, "early backward")
        model, _ = trainstream.wrap(model, None, lr=1e-2, quantize="none", **room("cpu"))
        session = model._trainstream_session
        torch.manual_seed(2)
        losses, policies = [], []
        for step in range(4):
            session.tuner.governor.hold = step < 3  # as beside a GPU, until weights have returned
            if fail and step == 2:
                fault.arm()
            losses.append(session.train_step(batches_of(step, "cpu")).item())
            policies.append(session.tuner.governor.policies)
        trainstream.unwrap(model)
        return losses, policies, fault.raised

    expected, got = train(False), train(True)
    assert (expected[2], got[2]) == (0, 1)
    assert expected[1][2:] == [["recompute"] * 4, ["keep"] * 4]
    assert got[1][2:] == [["recompute"] * 4] * 2
    assert got[0] == expected[0]
