"""What is said of a plan: block by block, why, what would fit and what would help."""

import dataclasses

import pytest
from hypothesis import assume, given
from test_search import HARDWARE, INT8, MIB, NF4, model, problems, profile

from ts_core.advice import explain, helps, nearest, plan_of
from ts_core.errors import DoesNotFitError
from ts_core.job import Job, Packing, Room
from ts_core.plan import Plan
from ts_core.search import search


@given(problems(most=3))
def test_a_plan_written_out_is_the_plan_in_counts(problem):
    spec, job, _, room = problem
    try:
        found = search(*problem)
    except DoesNotFitError:
        assume(False)
    plan = plan_of(spec, found, room, job=job)
    assert Plan.from_json(plan.to_json()) == plan
    for members, place, policy in zip(
        spec.classes(), found.choice.places, found.choice.policies, strict=True
    ):
        rows = [plan.blocks[i] for i in members]
        settled = sum(r.settled for r in rows)
        tiers = [r.tier for r in rows]
        assert (tiers.count("device"), settled, tiers.count("host") - settled, tiers.count("disk")) == place
        if sum(policy):
            kept = [r.policy for r in rows]
            assert tuple(kept.count(p) for p in ("keep", "offload", "recompute")) == policy
    assert plan.predicted["device"] + plan.predicted["activations"] == found.prediction.device_bytes
    lines = explain(spec, job, room, found)
    assert all("\n" not in line for line in lines)
    assert len({line.partition(":")[0] for line in lines}) == len(lines)


def test_paged_blocks_are_spread_and_the_last_keep():
    spec, job = model((8,), edges=False), Job(seq_len=16, lora_rank=1, slots=(2,))
    room = Room(int(spec.bytes * 1.2), 64 * MIB)
    found = search(spec, job, HARDWARE, room)
    tiers = [row.tier for row in plan_of(spec, found, room, job=job).blocks]
    assert 0 < tiers.count("host") < 8
    if tiers.count("host") <= 4:
        assert "host host" not in " ".join(tiers)
    kept = [row.policy for row in plan_of(spec, found, room, job=job).blocks]
    assert kept == sorted(kept, key=["recompute", "offload", "keep"].index)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize(
    "room", [Room(MIB // 2, 64 * MIB), Room(MIB // 2, 0), Room(1, 1), Room(MIB // 2, None)]
)
def test_the_nearest_options_fit(lora, room):
    spec, hardware = model((4, 2)), HARDWARE
    job = Job(seq_len=16, batch=2, lora_rank=lora, slots=(2,), moments=("float32", "int8"))
    with pytest.raises(DoesNotFitError):
        search(spec, job, hardware, room)
    options = nearest(spec, job, hardware, room, {"nf4": dataclasses.replace(job, packings=(NF4,))})
    assert options
    for option in options:
        again = search(spec, option.job, hardware, option.room)
        assert again.prediction.fits(option.room)
        for name in ("device", "host", "disk"):
            assert (getattr(option.room, name) or 0) >= (getattr(room, name) or 0)


def test_the_nearest_budget_is_the_least():
    spec, job = model((8,)), Job(seq_len=16, lora_rank=4, slots=(2,))
    room = Room(MIB, 64 * MIB)
    (option,) = [o for o in nearest(spec, job, HARDWARE, room) if o.name == "device"]
    with pytest.raises(DoesNotFitError):
        search(spec, job, HARDWARE, dataclasses.replace(room, device=int(option.room.device * 0.97) - MIB))


def test_what_helps_is_what_limits():
    spec = model((8,))
    job = Job(seq_len=8, lora_rank=1, slots=(2,))
    slow = profile(h2d_bytes_per_s=0.02)
    room = Room(int(spec.bytes * 0.9), 64 * MIB)
    found = search(spec, job, slow, room)
    assert found.prediction.limiter == "h2d"
    packed = {"quantize=nf4": dataclasses.replace(job, packings=(NF4,))}
    texts = {help.text: help.gain for help in helps(spec, job, slow, room, found, packed)}
    assert any("on the device" in text for text in texts)
    assert "a link twice as fast" in texts
    assert "quantize=nf4" in texts
    assert not any("RAM" in text for text in texts)
    gains = [help.gain for help in helps(spec, job, slow, room, found, packed)]
    assert gains == sorted(gains, reverse=True)


def test_what_was_chosen_is_explained():
    spec = model((8,))
    job = Job(seq_len=8, batch=2, moments=("float32", "int8"), packings=(Packing(), INT8))
    room = Room(spec.bytes, 64 * MIB)
    text = "\n".join(explain(spec, job, room, search(spec, job, HARDWARE, room)))
    for word in ("quantize=auto", "moment_dtype=auto", "param_offload=auto", "recompute=auto", "micro-batch"):
        assert word in text
    assert "optimizer:" in text
    assert "limited by" in text


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_what_is_fetched_ahead_is_one_less_than_there_are_slots(slots):
    spec, room = model((8,)), Room(MIB, 64 * MIB)
    job = Job(seq_len=8, lora_rank=1, slots=(slots,))
    room = dataclasses.replace(room, device=int(spec.bytes * 0.9))
    found = search(spec, job, HARDWARE, room)
    assert found.choice.setting.slots == slots
    plan = plan_of(spec, found, room, job=job)
    assert (plan.slots, plan.prefetch_depth) == (slots, slots - 1)
    (line,) = [line for line in explain(spec, job, room, found) if line.startswith("prefetch_depth")]
    assert ("none, there is room for a single slot" if slots == 1 else f"{slots - 1} ahead") in line


def test_where_the_processor_computes_no_other_device_is_spoken_of():
    spec, job = model((8,)), Job(seq_len=8, lora_rank=1)
    room = Room(int(spec.bytes * 0.9), None, 64 * MIB)
    found = search(spec, job, HARDWARE, room)
    said = explain(spec, job, room, found)
    said += [help.text for help in helps(spec, job, HARDWARE, room, found)]
    text = "\n".join([*said, plan_of(spec, found, room, job=job, device="cpu").table()])
    for word in ("device", "GPU", "gpu", "from RAM"):
        assert word not in text
    assert "blocks in RAM" in text
