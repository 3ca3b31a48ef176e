import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import CheckpointError
from ts_core.memory import format_bytes
from ts_core.plan import BlockPlan, Numerics, Plan, same_step, step_seconds

HEADER = ["group", "kind", "tier", "codec", "activations", "optimizer", "bytes"]
blocks = st.builds(
    BlockPlan,
    name=st.text("abc._0123456789", min_size=1, max_size=9),
    kind=st.sampled_from(["block", "embedding", "head", "norm", "other"]),
    tier=st.sampled_from(["device", "peer", "host", "disk"]),
    codec=st.sampled_from(["none", "int8", "nf4"]),
    policy=st.sampled_from(["keep", "offload", "recompute"]),
    bytes=st.integers(0, 2**50),
    settled=st.booleans(),
    optimizer=st.sampled_from(["", "host", "device", "disk"]),
)
plans = st.builds(
    Plan,
    device=st.sampled_from(["cpu", "cuda:0"]),
    blocks=st.lists(blocks, max_size=5).map(tuple),
    numerics=st.builds(Numerics, quant_block_size=st.integers(2, 4096)),
    slots=st.integers(0, 4),
    budgets=st.dictionaries(st.sampled_from(["device", "host", "disk"]), st.integers(0, 2**50)),
    predicted=st.dictionaries(st.sampled_from(["device", "host", "disk"]), st.integers(0, 2**50)),
)


@given(plans)
def test_json_round_trip(plan):
    assert Plan.from_json(plan.to_json()) == plan


@given(plans)
def test_paged_and_policy_follow_the_blocks(plan):
    assert set(plan.paged) == {b.name for b in plan.blocks if b.tier != "device"}
    assert plan.policy == tuple(b.policy for b in plan.blocks if b.kind == "block")


@pytest.mark.parametrize("text", ["", "3", "{}", "[]", '{"format": 2}', '{"format": 1}', "null"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(CheckpointError):
        Plan.from_json(text)


@pytest.mark.parametrize("place", ["plan", "block", "numerics"])
def test_unknown_fields_are_refused(place):
    data = json.loads(Plan(device="cpu", blocks=(BlockPlan("a"),)).to_json())
    {"plan": data, "block": data["blocks"][0], "numerics": data["numerics"]}[place]["surprise"] = 1
    with pytest.raises(CheckpointError, match="surprise"):
        Plan.from_json(json.dumps(data))


@given(plans, st.sampled_from(["device", "blocks", "numerics", "format"]))
def test_missing_fields_are_refused(plan, field):
    data = plan.to_dict()
    del data[field]
    with pytest.raises(CheckpointError):
        Plan.from_json(json.dumps(data))


def stack(count, tier="disk", start=0):
    return tuple(
        BlockPlan(f"layers.{start + i}", tier=tier, policy="recompute", bytes=1 << 20) for i in range(count)
    )


def test_the_table_folds_alike_blocks_and_adds_up():
    plan = Plan(
        device="cpu",
        blocks=(
            BlockPlan("embed", "embedding", "disk", bytes=3 << 20),
            *stack(3),
            *stack(2, "device", 3),
            BlockPlan("head", "head", "host", "none", "keep", 5 << 20, True, "host"),
        ),
        slots=2,
        budgets={"device": 8 << 30, "host": 8 << 30},
        predicted={"device": 3 << 30, "host": 0, "disk": 6 << 20},
    )
    assert plan.table().splitlines() == [
        "group                      kind       tier       codec  activations  optimizer  bytes",
        "embed                      embedding  disk       none                           3.00 MiB",
        "layers.0 ... layers.2 (3)  block      disk       none   recompute               3.00 MiB",
        "layers.3 ... layers.4 (2)  block      RAM        none   recompute               2.00 MiB",
        "head                       head       host+slot  none                host       5.00 MiB",
        "RAM         3.00 GiB of 8.00 GiB planned",
        "disk        6.00 MiB planned",
        "slots       2",
    ]


def test_the_table_says_how_long_a_step_was_predicted_to_take():
    plan = Plan("cpu", stack(1), predicted={"device": 0, "step_s": 0.01234, "tokens": 2048})
    assert plan.table().splitlines()[2:] == ["step        0.0123 s of 2,048 tokens planned"]
    assert Plan.from_json(plan.to_json()) == plan


@given(st.integers(1, 10**6), st.floats(0.0, 3.0), st.floats(1e-6, 1e3))
def test_a_step_time_is_predicted_for_about_as_many_tokens_only(planned, share, seconds):
    tokens = round(planned * share)
    found = step_seconds({"step_s": seconds, "tokens": planned, "device": 1}, tokens)
    alike = tokens > 0 and 10 * abs(tokens - planned) <= planned
    assert found == (seconds if alike else None)
    assert same_step(planned, tokens) == alike


@pytest.mark.parametrize(
    ("predicted", "tokens"),
    [({}, 8), ({"device": 1}, 8), ({"step_s": 0.0, "tokens": 8}, 8), ({"step_s": 1.0}, 8),
     ({"step_s": 1.0, "tokens": 8}, 0), ({"step_s": 1.0, "tokens": 8}, None)],
)  # fmt: skip
def test_without_a_prediction_or_tokens_there_is_no_time_to_compare(predicted, tokens):
    assert step_seconds(predicted, tokens) is None


@given(plans)
def test_the_table_has_every_block_once_and_every_total(plan):
    lines = plan.table().split("\n")
    assert lines[0].split() == HEADER
    totals = [tier for tier, size in plan.predicted.items() if size]
    rows = len(lines) - 1 - len(totals) - bool(plan.slots)
    keys = [dataclasses.replace(b, name="") for b in plan.blocks]
    assert rows == sum(i == 0 or keys[i - 1] != key for i, key in enumerate(keys))
    for tier in totals:
        word = "RAM" if tier == "device" and plan.device == "cpu" else tier
        line = next(line for line in lines[1 + rows :] if line.split()[0] == word)
        assert format_bytes(plan.predicted[tier]) in line
        assert (
            (f"of {format_bytes(plan.budgets[tier])}" in line) if tier in plan.budgets else " of " not in line
        )
    assert not any(line.endswith(" ") for line in lines)


def test_a_plan_without_blocks_has_a_table_too():
    assert Plan(device="cpu").table().split() == HEADER
