"""What can be page-locked bounds a plan beside a GPU, by the figures that the arena itself keeps to."""

import importlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_plan import LARGE, answer, ask  # noqa: F401 - a fixture
from test_first_plan import CUDA, config_of, model_of

from trainstream import _copies
from trainstream._budget import Limits
from trainstream._copies import page_lock
from trainstream._decide import decide, moment_formats
from trainstream._inventory import Inventory
from trainstream._options import WrapOptions
from trainstream._paging import asked
from ts_core.blocks import block_map, find_blocks
from ts_core.headroom import arena_growth
from ts_core.job import assumed_profile
from ts_core.memory import HostBudget
from ts_core.planner import Budgets
from ts_paging import arena as arenas
from ts_paging.arena import HostArena

plan = importlib.import_module("trainstream.cli.plan")
GIB = 1 << 30
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def decided(lock, disk=0, **options):
    """Adapters on a base of which little fits the device."""
    model = model_of(config_of(), lora=True)
    checked = WrapOptions.from_kwargs(quantize="none", plan_tokens=16, capture=False, **options)
    blocks = find_blocks(model)
    inventory = Inventory(model, block_map(model), blocks)
    bounds = Limits(Budgets(500 << 10, 64 << 20, disk, lock), None, lambda: 0, 500 << 10)
    want = asked(checked, len(blocks), cpu=False)
    formats = moment_formats(None, checked)
    return decide(
        model, inventory, blocks, CUDA, None, want, bounds, checked, formats[:1], assumed_profile("cuda")
    )


def held(found, tier):
    return sum(s.paged for s, where in zip(found.specs, found.layout.tiers, strict=True) if where == tier)


def test_what_cannot_be_page_locked_goes_to_files():
    free, tight = decided(None, GIB), decided(150 << 10, GIB)
    base = held(free, "host")  # all of the blocks, and the embedding, of which rows are gathered
    assert held(free, "disk") == 0
    assert tight.layout.tiers == ("host", "disk", "disk", "disk", "disk", "device", "device")
    assert held(tight, "host") + held(tight, "disk") == base
    assert not any(line.startswith("page-lock") for line in (*free.why, *tight.why))
    assert decided(GIB, GIB).layout == free.layout


def test_without_files_ordinary_memory_serves_and_a_line_says_so():
    free, tight = decided(None), decided(150 << 10)
    assert tight.layout == free.layout
    (line,) = [line for line in tight.why if line.startswith("page-lock: ")]
    assert "where 150.00 KiB can be page-locked" in line
    assert "host_arena" in line


@pytest.fixture
def ram(monkeypatch):
    """100 GiB of RAM, 50 of them free, and no arena so far."""
    monkeypatch.setattr(arenas, "host_budget", lambda: HostBudget(100 * GIB, 50 * GIB, None, "test", 1))
    monkeypatch.setattr(_copies.registry, "host_allocator", lambda: None)


@pytest.mark.parametrize(
    ("options", "own", "most"),
    [
        ({}, 0, 46 * GIB),  # 4 GiB stay free
        ({}, 8 * GIB, 54 * GIB),
        ({"host_arena": "2GiB"}, 0, 2 * GIB),
        ({"host_arena": "200GiB"}, 0, 46 * GIB),
        ({"ram_budget": "8GiB"}, 0, 8 * GIB),
        ({"ram_budget": "8GiB", "host_arena": "1GiB"}, 0, GIB),
        ({"host_arena": None}, 0, 46 * GIB),
    ],
)
def test_the_limit_is_that_of_the_arena(ram, options, own, most):
    assert page_lock(WrapOptions.from_kwargs(**options), own) == most - arena_growth(most)


def test_tensors_that_are_locked_one_by_one_have_no_limit(ram):
    assert page_lock(WrapOptions.from_kwargs(host_arena=False), 0) is None


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64))
@settings(max_examples=20, deadline=None)
def test_what_an_arena_holds_for_others_is_taken(ceiling, live, own):
    with HostArena(pinned=False, slab_bytes=1 << 16) as arena, pytest.MonkeyPatch.context() as patch:
        kept = arena.empty(live << 16) if live else torch.empty(0)
        patch.setattr(_copies.registry, "host_allocator", lambda: arena)
        found = page_lock(WrapOptions.from_kwargs(host_arena=ceiling << 16), own << 16)
        most = max((ceiling - max(live - own, 0)) << 16, 0)
        assert found == most - arena_growth(most)
        assert kept.numel() == live << 16


WORDS = ("--vram", "12GiB", "--ram", "64GiB", "--quantize", "none", "--json")


def test_the_command_plans_with_it(ask):  # noqa: F811
    free = answer(ask(LARGE, *WORDS, "--disk", "200GiB"))
    assert free["budgets"]["page_lock"] is None
    tight = answer(ask(LARGE, *WORDS, "--disk", "200GiB", "--page-lock", "8GiB"))
    assert tight["budgets"]["page_lock"] == 8 * GIB
    assert free["prediction"]["page_locked_bytes"] > 8 * GIB >= tight["prediction"]["page_locked_bytes"]
    assert tight["prediction"]["disk_bytes"] > free["prediction"]["disk_bytes"]
    loose = answer(ask(LARGE, *WORDS, "--disk", "0", "--page-lock", "8GiB"))
    assert loose["plan"] == answer(ask(LARGE, *WORDS, "--disk", "0"))["plan"]
    assert any(line.startswith("page-lock: ") and "8.00 GiB" in line for line in loose["decisions"])
    assert json.dumps(loose)


def test_it_is_of_a_gpu(ask, monkeypatch):  # noqa: F811
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = ask(LARGE, "--ram", "64GiB", "--page-lock", "8GiB")
    assert refused.exit_code == 2
    assert "--vram" in refused.stderr
