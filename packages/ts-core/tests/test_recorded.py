"""Captured blocks in a plan: what recordings hold is planned, and launches are few."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.constants import constants
from ts_core.errors import DoesNotFitError
from ts_core.job import Choice, Job, Room, Setting, assumed_profile
from ts_core.recorded import recorded
from ts_core.search import choose
from ts_core.spec import ModelSpec, TensorSpec, block_of
from ts_core.step import predict

WIDTH = 256


def model(layers=4):
    weights = [
        TensorSpec("mlp.up_proj.weight", (4 * WIDTH, WIDTH), use="matmul"),
        TensorSpec("mlp.down_proj.weight", (WIDTH, 4 * WIDTH), use="matmul"),
        TensorSpec("norm.weight", (WIDTH,)),
    ]
    return ModelSpec(tuple(block_of(f"layers.{i}", weights, WIDTH) for i in range(layers)))


def choice(layers=4, slots=2, policy=0):
    policies = [0, 0, 0]
    policies[policy] = layers
    return Choice(Setting(slots=slots), ((0, 0, layers, 0),), (tuple(policies),))


@given(
    tokens=st.integers(1, 4096),
    rank=st.integers(0, 64),
    policy=st.integers(0, 2),
    slots=st.integers(1, 4),
    cpu=st.booleans(),
)
@settings(deadline=None)
def test_memory_of_recordings_is_on_top_and_grows_with_what_is_recorded(tokens, rank, policy, slots, cpu):
    if cpu and policy == 1:
        policy = 2
    spec, hardware, plan = model(), assumed_profile("cpu" if cpu else "cuda"), choice(4, slots, policy)
    if cpu:
        plan = dataclasses.replace(plan, places=((0, 0, 0, 4),))
    job = Job(seq_len=tokens, lora_rank=rank)

    def found(**changes):
        return predict(spec, dataclasses.replace(job, **changes), hardware, plan, cpu=cpu)

    plain, captured, longer = found(), found(capture=True), found(capture=True, seq_len=2 * tokens)
    assert captured.device_bytes > plain.device_bytes
    assert captured.host_bytes == plain.host_bytes
    assert longer.device_bytes >= captured.device_bytes
    assert captured.busy_s["launch"] < plain.busy_s["launch"]
    launches = constants().captured + constants().captured_back
    if policy == 2:  # a replay of backward has the second forward pass in
        assert captured.busy_s["launch"] <= 4 * hardware.launch_s * launches * (1 + 1e-9)
        assert captured.busy_s["launch"] <= plain.busy_s["launch"] / 2 * (1 + 1e-9)


@given(device=st.integers(1 << 20, 64 << 20), lora=st.booleans())
@settings(deadline=None, max_examples=15)
def test_a_plan_with_captured_blocks_keeps_the_budget(device, lora):
    job = Job(seq_len=256, lora_rank=8 if lora else 0, capture=True)
    room = Room(device, 1 << 30)
    try:
        found = choose(model(), job, assumed_profile(), room)
    except DoesNotFitError:
        return
    assert found.prediction.fits(room)
    later = predict(model(), job, assumed_profile(), found.choice)
    assert later.device_bytes == found.prediction.device_bytes


def test_what_one_pair_shares_is_the_largest_not_the_sum():
    few, many = (
        predict(model(n), Job(seq_len=64, capture=True), assumed_profile(), choice(n)) for n in (2, 8)
    )
    without = [predict(model(n), Job(seq_len=64), assumed_profile(), choice(n)) for n in (2, 8)]
    assert few.device_bytes - without[0].device_bytes == many.device_bytes - without[1].device_bytes


def test_bytes_of_a_class():
    taken = recorded(hidden=100.0, saved=1000.0, adapters=10.0, grads=20.0, decoded=0.0, tokens=2)
    # Two inputs, output, its gradient and that of the input; adapters with gradients, gradients of weights.
    assert taken.fixed == 5 * 100 + 2 * 16 + 2 * 10 + 20 + 64 * 256
    assert taken.pool == 1000 + 100 + 10 + 20
    assert (taken.forward, taken.backward) == (210, 340)
