"""What a session makes of its first steps, which record blocks and are slow for reasons of their own."""

import dataclasses
import types

import pytest
import torch
from test_spill import Clock
from test_takeover import CUDA, LOTS, decided_for, model_of

from trainstream import _tuner
from trainstream._budget import Limits
from trainstream._decide import Decided
from trainstream._options import WrapOptions
from trainstream._paging import Tiers, asked
from trainstream._spill import Spill
from trainstream._tuner import Tuner, idle_in_pools
from ts_core.planner import Budgets
from ts_paging.governor import ActivationGovernor
from ts_paging.pager import WeightPager

LINK = 50e9
TOKEN, ROW = 64, 512
FRESH, LOOKED_AT, RECORDED = range(3)


class Recordings:
    """What captures say of themselves; blocks are looked at in one pass and recorded in the next."""

    max_bytes = None

    def __init__(self, blocks):
        self.blocks, self.generation, self.recordings, self.shapes = blocks, 0, 0, 2
        self.state = FRESH

    def undecided(self, mode, blocks):
        return [] if self.state == RECORDED else [b.name for b in blocks if b.name not in mode.reasons]

    def pool_bytes(self):
        return 300 if self.recordings else 0

    def forget(self):
        self.generation, self.recordings, self.state = self.generation + 1, 0, FRESH

    def a_pass(self):
        """Return whether it recorded."""
        self.state = min(self.state + 1, RECORDED)
        fresh, self.recordings = self.state == RECORDED and not self.recordings, 4 * (self.state == RECORDED)
        return fresh


class Run:
    """A tuner beside a GPU that is not there: one that has 10,000 bytes, and steps as the test says."""

    def __init__(self, monkeypatch, *, link, computing, smooth, recorded=True, room=10_000):
        """Take seconds of a step that the link and the device are busy, and of a smooth one in all."""
        decided, inventory = decided_for(model_of(), None, Budgets(LOTS, LOTS, LOTS))
        layout = dataclasses.replace(decided.layout, settled=())
        busy = {"gpu_s": computing * 4 / 1.5, "tokens": 4 * ROW, "token_bytes": TOKEN}
        busy = busy if computing else {"gpu_s": 0.0, "tokens": 0}
        decided = dataclasses.replace(
            decided, layout=layout, settling=frozenset(), governed=True, **busy, codec="none"
        )
        self.clock, self.moved, self.smooth, self.peaks, self.rooms = Clock(), link * LINK, smooth, [], []
        monkeypatch.setattr(_tuner, "link_rate", lambda device: LINK)
        monkeypatch.setattr(_tuner.time, "perf_counter", self.clock)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(_tuner, "keep_to_budget", lambda session, limits, *_: (limits, False))
        monkeypatch.setattr(Tuner, "_peak", lambda tuner: self.peaks[-1])
        monkeypatch.setattr(Tuner, "_write_down", lambda *_: None)
        monkeypatch.setattr(Tuner, "_bring_back", self.bring_back)
        options = WrapOptions.from_kwargs()
        self.pager = WeightPager(torch.device("cpu"))
        blocks = [(f"b{i}", block, "recompute") for i, block in enumerate(model_of().model.layers)]
        self.pager.attach(blocks)
        self.recordings = Recordings(len(blocks)) if recorded else None
        if recorded:
            self.pager.block_mode = types.SimpleNamespace(captures=self.recordings, turn=1, reasons={})
        bounds = Limits(Budgets(LOTS, LOTS, LOTS), None, lambda: 100, room)
        want = asked(options, len(blocks), cpu=False)
        tiers = Tiers(CUDA, None, None)
        self.tuner = Tuner(self.pager, inventory, decided, want, tiers, bounds, options=options)
        self.governor = self.tuner.governor
        self.said, self.returns = [], []
        self.session = types.SimpleNamespace(
            adapting=True,
            decide=self.said.append,
            events=types.SimpleNamespace(add=self.said.append),
        )

    def bring_back(self, session, room):
        self.rooms.append((room, self.recordings.recordings if self.recordings else None))
        found = self.returns.pop(0) if self.returns else 0
        if found and self.recordings:
            self.recordings.forget()
        return found

    def step(self, slow=0.0, peak=1000):
        records = self.recordings.a_pass() if self.recordings else False
        self.governor._begin(ROW * TOKEN)
        self.governor._per_byte = self.governor._per_byte or 0.01
        self.pager.host_bytes += int(self.moved)
        self.clock.now += slow or (5.0 if records else self.smooth)
        self.peaks.append(peak)
        self.tuner.after_step(self.session)

    def to_the_end(self, most=30, **options):
        for steps in range(1, most):
            if not self.session.adapting:
                return steps
            self.step(**options)
        raise AssertionError("it does not come to an end")


def test_what_the_link_is_busy_for_is_compared_with_a_step_that_runs_smoothly(monkeypatch):
    """As measured: 0.3 s of the link in a second step of 1.93 s, which recorded blocks; later: 0.34."""
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34)
    run.step(slow=1.6)
    run.step(slow=1.93)
    assert "weights have the room first" in run.said[0]
    assert "busy for 100% of a step" in run.said[0]
    assert run.governor.hold


def test_where_computation_takes_longer_than_the_link_activations_are_first(monkeypatch):
    run = Run(monkeypatch, link=0.1, computing=0.5, smooth=0.5)
    run.step(slow=1.6)
    run.step(slow=1.93)
    assert "activations have the room first" in run.said[0]
    assert not run.governor.hold


def test_a_short_step_counts_where_more_was_predicted(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=2.0, smooth=0.35)
    run.step(slow=0.35)
    run.step(slow=0.35)
    assert "weights have the room first" in run.said[0]


@pytest.mark.parametrize("recorded", [False, True])
def test_where_nothing_was_predicted_steps_that_record_say_nothing(recorded, monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.0, smooth=0.5, recorded=recorded)
    run.step(slow=1.9)
    run.step(slow=1.9)
    assert run.governor.hold == recorded
    assert any("activations have the room first" in line for line in run.said) != recorded


def test_blocks_recompute_where_the_link_is_what_a_step_waits_for(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34)
    run.returns = [5, 1]
    run.to_the_end()
    assert len(run.rooms) >= 3
    assert set(run.governor.policies) == {"recompute"}
    assert run.governor.offloads == 0
    assert any("blocks recompute, as the link is busy" in line for line in run.said)
    # Twice the computation is as long as the link, in backward too; of longer inputs blocks keep again.
    assert run.governor.idle_to == 2 * ROW * TOKEN
    for rows in (2, 3):
        run.governor._begin(rows * ROW * TOKEN)
        assert ("keep" in run.governor.policies) == (rows > 2)


def test_blocks_keep_where_recomputing_would_take_as_long_as_the_link(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.28, smooth=0.34)
    run.to_the_end()
    run.governor._begin(ROW * TOKEN)
    assert run.governor.idle_to == 0
    assert "keep" in run.governor.policies


def test_a_prediction_that_is_not_seen_does_not_count(monkeypatch):
    """The device takes far longer than was predicted, for whatever reason."""
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=2.0)
    run.to_the_end()
    assert run.governor.idle_to == 0


def test_weights_return_by_peaks_of_steps_that_had_their_recordings(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34)
    run.returns = [5, 4]
    peaks = iter([1000, 2000, 500, 2600, 700, 2900])
    for peak in peaks:
        run.step(peak=peak)
    # The first step of each round looks at blocks, the second one records them, and takes more for that;
    # recordings of a block that has its weights to itself were none before the first.
    assert run.rooms[:3] == [(8000 - 150, 4), (7400 - 150, 4), (7100 - 150, 4)]


def test_without_recordings_no_step_is_waited_for(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34, recorded=False)
    run.returns = [5, 4]
    for _ in range(4):
        run.step()
    assert [room for room, _ in run.rooms] == [9000] * 3


def test_recordings_are_not_waited_for_where_everything_returns_and_none_stays(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34, room=LOTS)
    run.recordings.undecided = lambda mode, blocks: ["b0"]
    run.tuner.governor = run.tuner._spill = None
    run.returns = [6]
    run.step()
    run.step()
    assert run.rooms == []
    run.step()
    assert len(run.rooms) == 1
    run.tuner._paged.clear()
    run.step()
    assert not run.session.adapting


def test_blocks_that_are_never_recorded_are_waited_for_a_few_steps_only(monkeypatch):
    run = Run(monkeypatch, link=0.3, computing=0.1, smooth=0.34)
    run.recordings.undecided = lambda mode, blocks: ["b0"]
    assert run.to_the_end() <= 24
    assert run.rooms
    assert run.governor.idle_to == 0  # no step was a measure


def test_recordings_of_blocks_that_keep_have_room_set_aside_until_they_are_there(monkeypatch):
    run = Run(monkeypatch, link=0.1, computing=0.5, smooth=0.5)
    run.step()
    run.step()
    assert run.governor.aside == 300
    run.recordings.forget()
    run.step()
    assert run.governor.aside == 300
    run.step()
    assert run.governor.aside == 0


@pytest.mark.parametrize(("tokens", "passes", "expected"), [(512, 1, 0.375), (512, 4, 0.6), (2048, 1, 1.5)])
def test_computing_is_predicted_for_as_many_tokens_as_came(tokens, passes, expected):
    decided = Decided(
        "none", frozenset(), None, [], True, True, [], tokens=2048, token_bytes=8, gpu_s=1.0, launch_s=0.1
    )
    assert decided.computing(tokens * 8, passes) == pytest.approx(expected)
    packed = dataclasses.replace(decided, codec="nf4")  # decoding takes as long for few tokens
    assert packed.computing(tokens * 8, passes) == pytest.approx(1.5 * passes)
    assert dataclasses.replace(decided, tokens=0).computing(tokens * 8, passes) == 0.0


def test_pools_that_lie_idle_count():
    def segment(pool, size, active, blocks=1, device=0):
        return {
            "segment_pool_id": pool,
            "device": device,
            "total_size": size,
            "active_size": active,
            "blocks": [{}] * blocks,
        }

    found = [
        segment((0, 0), 1, 0),  # given back where memory is short
        segment((0, 1), 2, 0),
        segment((0, 1), 4, 4),  # counted as allocated
        segment((0, 1), 8, 3, 2),  # the rest is counted as between tensors
        segment((1, 0), 16, 0),
        segment((0, 1), 32, 0, device=1),
    ]
    assert idle_in_pools(found, 0) == 18


def test_the_tuner_tells_whether_a_step_is_a_measure(monkeypatch):
    run = Run(monkeypatch, link=0.1, computing=0.5, smooth=0.5)
    spill = run.tuner._spill
    assert isinstance(spill, Spill)
    assert isinstance(run.governor, ActivationGovernor)
    steady = []
    for _ in range(4):
        run.step()
        steady.append(spill.steady())
    assert steady == [False, False, True, True]


def test_what_was_predicted_of_computation_is_kept_with_what_was_decided():
    model = model_of()
    decided, _ = decided_for(model, None, Budgets(LOTS, LOTS, LOTS))
    assert decided.tokens > 0
    assert decided.gpu_s > 0
    assert decided.launch_s > 0
    assert decided.token_bytes == model.config.hidden_size * 4
