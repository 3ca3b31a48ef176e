"""Offloaded activations when the memory for them runs short: fewer offload, and nothing changes."""

import pytest
import torch
from test_weight_pager import batch, build, host, one, page

from ts_core.testing import devices
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
