import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import CheckpointError
from ts_core.plan import BlockPlan, Numerics, Plan

blocks = st.builds(
    BlockPlan,
    name=st.text(max_size=9),
    kind=st.sampled_from(["block", "embedding", "head", "norm", "other"]),
    tier=st.sampled_from(["device", "peer", "host", "disk"]),
    codec=st.sampled_from(["none", "int8", "nf4"]),
    policy=st.sampled_from(["keep", "offload", "recompute"]),
    bytes=st.integers(0, 2**50),
)
plans = st.builds(
    Plan,
    device=st.sampled_from(["cpu", "cuda:0"]),
    blocks=st.lists(blocks, max_size=5).map(tuple),
    numerics=st.builds(Numerics, quant_block_size=st.integers(2, 4096)),
    slots=st.integers(0, 4),
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


def test_unknown_fields_are_refused():
    data = json.loads(Plan(device="cpu").to_json())
    with pytest.raises(CheckpointError):
        Plan.from_json(json.dumps({**data, "surprise": 1}))
