"""Blocks are captured by themselves where that pays, where there is room, and while forms of inputs recur."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_outside import Block, one, step

from ts_core.testing import devices
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.governor import ActivationGovernor
from ts_paging.pager import WeightPager
from ts_paging.paying import Paying, Timing, meter_for
from ts_paging.recording import captures_by_itself, recorder_for

CPU = torch.device("cpu")


class Clock:
    """A meter that tells what it is told to; a stretch is not through while `busy`."""

    def __init__(self, host, device):
        self.host, self.device, self.busy, self.count = host, device, False, 0

    def now(self):
        self.count += 1
        return self.count

    def between(self, first, last):
        assert first < last
        return None if self.busy else (self.host, self.device)


def make(meter=None, policy="keep", blocks=3, **options):
    torch.manual_seed(0)
    stack = torch.nn.Sequential(*[Block(one) for _ in range(blocks)])
    pager = WeightPager(CPU)
    pager.attach([(f"block {index}", block, policy) for index, block in enumerate(stack)])
    captures = Captures(CPU, auto=True, meter=meter or Clock(1.0, 1.0), **options)
    events = []
    pager.block_mode = BlockMode(captures, events.append)
    pager.block_mode.events, pager.block_mode.pager = events, pager
    return stack, pager.block_mode


def x_of(length):
    return torch.linspace(-1, 1, length * 8).view(length, 8)


def steps(stack, count, length=4):
    for _ in range(count):
        step(stack, x_of(length))


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_a_block_that_waits_for_its_launches_is_captured(policy):
    stack, mode = make(Clock(2e-3, 2.1e-3), policy)
    plain, _ = make(Clock(0.0, 1.0), policy)
    found = [(step(stack, x_of(4)), step(plain, x_of(4))) for _ in range(8)]
    for first, second in found:
        assert all(map(torch.equal, [*first[:2], *first[2]], [*second[:2], *second[2]]))
    report = mode.report()
    assert (report["blocks"], report["fallbacks"]) == (3, {})
    said = [line for line in mode.events if "is recorded, and those like it" in line]
    assert len(said) == 1
    assert "4.00 ms of the host, and 4.20 ms of the device" in said[0]  # forward and backward


def test_a_block_that_keeps_the_device_busy_is_not():
    stack, mode = make(Clock(1e-3, 2e-3))
    steps(stack, 8)
    assert mode.captures.recordings == 0
    assert list(mode.report()["fallbacks"]) == [
        "a replay saves too little: a run takes 2.00 ms of the host, and 4.00 ms of the device"
    ]
    assert sum("saves too little" in line for line in mode.events) == 1
    count = mode.captures.meter.count
    steps(stack, 4)
    assert mode.captures.meter.count == count  # measured once


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("kind", ["measured", "hooked"])
def test_a_reason_that_passes_leaves_no_block_out(kind, auto):
    stack, mode = make()
    plain, _ = make(Clock(0.0, 1.0))
    mode.captures.auto = auto
    pager = mode.pager
    if kind == "hooked":
        passes, hook = 2, stack[0].register_forward_hook(lambda *_: None)
    else:  # until it is known what the first block saves
        passes, hook = 1, None
        pager.governor = ActivationGovernor(pager.blocks, ["recompute"] * 3, lambda: 0, 1 << 40)
    for count in range(10):
        if count == passes and hook is not None:
            hook.remove()
        first, second = step(stack, x_of(4)), step(plain, x_of(4))
        assert all(map(torch.equal, [*first[:2], *first[2]], [*second[:2], *second[2]]))
        assert len(mode.reasons) == (count < passes)
        if hook is None:
            pager.governor.learn(0)
    assert (mode.report()["blocks"], mode.report()["fallbacks"]) == (3, {})


def test_blocks_are_undecided_until_they_are_measured_and_recorded():
    stack, mode = make()
    blocks, captures = mode.pager.blocks, mode.captures
    for _ in range(4):  # looked at, and measured three times
        steps(stack, 1)
        assert len(captures.undecided(mode, blocks)) == 3
    steps(stack, 1)
    assert captures.undecided(mode, blocks) == []
    count = captures.meter.count
    captures.forget()
    steps(stack, 1)
    assert len(captures.undecided(mode, blocks)) == 3
    steps(stack, 1)
    assert captures.undecided(mode, blocks) == []  # that it pays is known
    assert captures.meter.count - count <= 3


def test_blocks_with_nothing_to_replay_are_decided():
    stack, mode = make(Clock(1e-3, 2e-3))  # does not pay, besides
    blocks, captures = mode.pager.blocks, mode.captures
    stack[0].requires_grad_(False)
    for _ in range(8):
        stack(x_of(4)).sum().backward()
    assert stack[0].linear.weight.requires_grad is False
    assert blocks[0].name not in mode.reasons
    assert captures.undecided(mode, blocks) == []


def test_nothing_is_decided_while_the_device_is_busy_or_before_backward_has_come():
    meter = Clock(1.0, 1.0)
    stack, mode = make(meter)
    meter.busy = True
    steps(stack, 8)
    assert mode.captures.recordings == 0
    assert mode.reasons == {}
    for _ in range(8):
        stack(x_of(4).requires_grad_())
    meter.busy = False
    steps(stack, 1)
    assert mode.report()["blocks"] == 3


def test_the_least_of_several_passes_counts():
    """The first run of all sets things up: it takes the host longer than the others do."""
    meter = Clock(9.0, 2.0)
    paying = Paying()
    for turn in range(3):
        timing = paying.timing(meter, meter.now(), turn)
        assert paying.timing(meter, meter.now(), turn) is None  # one in each pass
        for _ in range(5):
            timing.mark()
    meter.host = 1.0
    assert paying.answer()[0] is False
    assert paying.timing(meter, meter.now(), 3) is None


@given(host=st.floats(0, 2), device=st.floats(0.01, 2))
def test_it_pays_exactly_where_the_host_is_close_to_the_device(host, device):
    meter = Clock(host, device)
    paying = Paying()
    for turn in range(3):
        timing = paying.timing(meter, 0, turn)
        for _ in range(3):
            timing.mark()
    assert paying.answer()[0] == (2 * host >= 0.8 * (2 * device))


@pytest.mark.parametrize("device", devices())
def test_meters_measure_what_they_say(device):
    meter = meter_for(torch.device(device))
    a = torch.randn(256, 256, device=device)
    timing = Timing(meter, meter.now())
    for _ in range(3):
        a @ a
        timing.mark()
    if device != "cpu":
        torch.cuda.synchronize()
    host, on_device = timing.read()
    assert host >= 0
    assert on_device > 0
    if device == "cpu":
        assert host == 0  # nothing can be saved


@pytest.mark.parametrize("auto", [True, False])
def test_what_recordings_hold_beyond_the_limit_is_given_back(auto):
    stack, mode = make(max_bytes=1000)
    mode.captures.auto = auto
    steps(stack, 10)
    assert mode.captures.recordings == 0
    assert mode.captures.pool_bytes() == 0
    assert all("of 1000 that they may" in reason for reason in mode.reasons.values())


def test_nothing_is_recorded_where_the_device_has_no_room():
    room = [1]
    stack, mode = make(room=lambda: room[0])
    steps(stack, 4)
    assert mode.captures.recordings == 0  # not yet
    room[0] = 0
    steps(stack, 3)
    assert mode.captures.recordings == 0
    assert set(mode.reasons.values()) == {"the device has no room for recordings"}


def test_a_recording_that_takes_the_last_room_is_given_back():
    stack, mode = make(room=lambda: 1 - 2 * mode.captures.recordings)
    steps(stack, 10)
    assert mode.captures.recordings == 0
    assert set(mode.reasons.values()) == {"the device has no room for recordings"}


class Failing:
    """A recorder that fails, otherwise the stand-in."""

    def __init__(self, error):
        self.error, self.tries, self.real = error, 0, recorder_for(CPU)

    def warm_up(self, run):
        return self.real.warm_up(run)

    def record(self, run):
        self.tries += 1
        raise self.error

    def pool_bytes(self):
        return self.real.pool_bytes()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("no memory"), "there is no room for a recording"),
        (RuntimeError("CUDA error: unknown"), "RuntimeError: CUDA error: unknown"),
        (KeyError("anything"), "KeyError: 'anything'"),
    ],
)
def test_a_recording_that_fails_costs_nothing_but_speed(error, why, policy):
    recorder = Failing(error)
    stack, mode = make(recorder=recorder, policy=policy)
    plain, _ = make(Clock(0.0, 1.0), policy)
    for _ in range(10):
        first, second = step(stack, x_of(4)), step(plain, x_of(4))
        assert all(map(torch.equal, [*first[:2], *first[2]], [*second[:2], *second[2]]))
    assert recorder.tries == 1  # blocks like it are not tried
    assert set(mode.reasons.values()) == {why}
    assert sum(why in line for line in mode.events) == 1


def test_lengths_that_never_come_again_are_not_recorded_and_said_once():
    stack, mode = make()
    for length in range(1, 60):
        step(stack, x_of(length))
    assert mode.captures.recordings == 0
    assert set(mode.reasons.values()) == {"inputs keep changing their form"}
    assert sum("keep changing their form" in line for line in mode.events) == 1
    steps(stack, 9, 61)  # one that stays after all; its first run is forgotten, its second looked at
    assert mode.report()["blocks"] == 3


def test_what_is_remembered_of_forms_is_bounded():
    stack, _ = make()
    for length in range(1, 50):
        step(stack, x_of(length))
    interiors = [block.forward._block.interior for block in stack]
    assert max(len(interior.known) for interior in interiors) <= 32


@pytest.mark.parametrize("auto", [True, False])
def test_a_form_that_has_not_come_for_long_makes_room_for_another(auto):
    stack, mode = make(max_shapes=2)
    mode.captures.auto = auto
    for length in (3, 4):
        steps(stack, 8, length)
    held = mode.captures.pool_bytes()
    assert mode.captures.shapes == 2
    steps(stack, 8, 5)
    assert set(mode.reasons.values()) == {"inputs have more than 2 forms"}
    for _ in range(70):  # 3 does not come any more
        step(stack, x_of(4))
        step(stack, x_of(5))
    assert mode.report()["blocks"] == 3
    assert mode.captures.shapes == 2
    assert mode.captures.pool_bytes() <= 2 * held
    steps(stack, 1, 3)
    assert mode.report()["blocks"] == 0  # it runs eagerly again
    assert step(stack, x_of(3))[0] == step(make(Clock(0.0, 1.0))[0], x_of(3))[0]


def test_a_form_that_is_let_go_between_forward_and_backward_is_still_replayed():
    stack, mode = make()
    steps(stack, 8)
    x = x_of(4).requires_grad_()
    expected = step(stack, x)
    stack.zero_grad()
    loss = stack(x).square().sum()
    for captured in list(mode.captures._made.values()):
        mode.captures._drop(captured)
    loss.backward()
    found = [p.grad for p in stack.parameters()]
    assert all(map(torch.equal, found, expected[2]))
    assert mode.captures.recordings == 0


def test_auto_captures_on_gpus_alone():
    assert captures_by_itself(torch.device("cuda", 0))
    assert not captures_by_itself(CPU)
