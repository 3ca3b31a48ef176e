"""Offloaded activations when the memory for them runs short: fewer offload, and nothing changes."""

import pytest
import torch
from test_weight_pager import batch, build, host, one, page

from ts_core.memory import HostBudget
from ts_core.testing import devices
from ts_paging import activations, arena
from ts_paging.activations import HostActivations


@pytest.mark.parametrize("device", devices())
def test_every_second_block_recomputes_once_memory_is_short(device):
    left = [100]
    store = HostActivations(floor_bytes=50, available=lambda: left[0])
    plain, model = build().to(device), host(build())
    pager = page(model, device, 2, ["offload", "keep", "offload", "offload", "offload"], activations=store)
    told = []
    pager.when_short = lambda: told.append(True)
    for step, (memory, runs) in enumerate([(100, 1), (49, 2), (100, 2)]):  # short once is short for good
        left[0] = memory
        before = [block.runs for block in pager.blocks]
        results = []
        for current in (plain, model):
            current.zero_grad()
            torch.manual_seed(step)
            results.append([one(current, batch(device))[0].item(), *map(torch.Tensor.cpu, grads_of(current))])
        assert results[0][0] == results[1][0]
        for expected, got in zip(results[0][1:], results[1][1:], strict=True):
            assert torch.equal(expected, got)
        ran = [block.runs - n for block, n in zip(pager.blocks, before, strict=True)]
        assert ran == [1, 1, runs, 1, runs]
    assert told == [True]


def grads_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("total", "limit", "ranks", "floor", "lock"),
    [
        (1 << 40, None, 1, (1 << 40) // 10, (100 << 30) - (4 << 30)),
        (1 << 40, None, 8, (1 << 40) // 10 // 8, (100 << 30) - (4 << 30) // 8),
        # A container of 80 GiB in a machine that says it has a TiB.
        (1 << 40, 80 << 30, 1, 8 << 30, (100 << 30) - (4 << 30)),
        (1 << 40, 20 << 30, 1, 4 << 30, (100 << 30) - (2 << 30)),
        (1 << 40, 80 << 30, 4, 2 << 30, (100 << 30) - (1 << 30)),
    ],
)
def test_what_stays_free_is_a_share_of_the_container_s_ram(monkeypatch, total, limit, ranks, floor, lock):
    budget = HostBudget(total, 100 << 30, limit, "test", ranks)
    for module in (activations, arena):
        monkeypatch.setattr(module, "host_budget", lambda: budget)
    assert HostActivations().floor_bytes == floor
    assert arena.lockable_bytes() == lock
