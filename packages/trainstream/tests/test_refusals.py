"""What a refusal names: budgets that help alone, planned with."""

import dataclasses

from trainstream._decide import _wider
from ts_core.memory import parse_bytes
from ts_core.planner import Budgets, GroupSpec, place

MIB = 1 << 20
BLOCKS = [
    GroupSpec(f"layers.{i}", device=100 * MIB, paged=300 * MIB, slot=100 * MIB, scratch=MIB) for i in range(4)
]
EVERY = [True] * 4


def hints(budgets):
    return _wider(BLOCKS, EVERY, frozenset(), budgets, ["vram_budget"])


def test_where_ram_is_short_the_device_is_not_named():
    short = Budgets(device=500 * MIB, host=700 * MIB, disk=MIB)
    found = hints(short)
    assert [text.partition(" of ")[2] for text in found] == ["RAM that may be used", "disk that may be used"]
    for text, name in zip(found, ("host", "disk"), strict=True):
        size = parse_bytes(text.partition(" of ")[0])
        assert place(BLOCKS, dataclasses.replace(short, **{name: size}), forced=EVERY).paged == {0, 1, 2, 3}


def test_where_the_device_is_short_only_that_is_named():
    assert hints(Budgets(device=50 * MIB, host=5000 * MIB, disk=0)) == ["vram_budget"]


def test_where_no_single_budget_helps_the_device_is_named():
    assert hints(Budgets(device=50 * MIB, host=MIB, disk=MIB)) == ["vram_budget"]
