"""Page-locked state where nobody said whether: up to a share of the RAM, and what has gone counts no more."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ts_optim.slots
from ts_core.memory import HostBudget
from ts_core.testing import assert_bit_equal
from ts_optim import OffloadAdamW, pinning
from ts_optim.pinning import PinShare
from ts_optim.slots import StateMaker


class Allocator:
    """Counts what it is asked for; the memory is ordinary."""

    def __init__(self):
        self.made = 0

    def empty(self, nbytes):
        self.made += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def locked(monkeypatch):
    """CPU parameters that pretend to be a GPU's, and an allocator in the place of the page-locking one."""
    allocator = Allocator()
    monkeypatch.setattr(ts_optim.slots, "is_remote", lambda p: True)
    monkeypatch.setattr(ts_optim.slots, "host_allocator", lambda: allocator)
    return allocator


def on_host(param):
    return "host"


def parameters(device="cpu", dtype=torch.float32):
    return [nn.Parameter(torch.full((16, 16), float(i), device=device, dtype=dtype)) for i in range(3)]


def train(params, steps=2, **options):
    optimizer = OffloadAdamW(params, place=on_host, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


# A tensor of state takes 1 KiB: two moments and a copy of the weights for each of three parameters.
@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1023, 0), (7 << 10, 7 << 10), (1 << 20, 9 << 10)])
def test_state_is_page_locked_as_far_as_the_share_allows(locked, monkeypatch, limit, expected):
    share = PinShare(limit)
    monkeypatch.setattr(ts_optim.slots, "pin_share", share)
    params, want = parameters(), parameters()
    first = train(params)
    assert locked.made - first.stats()["staging_bytes"] == expected
    assert first.stats()["disk_state_bytes"] == 0
    train(want, pin_moments=False)
    for p, q in zip(params, want, strict=True):
        assert_bit_equal(p.detach(), q.detach())
    # Another optimizer of this process finds what is left, and all of it once the first has gone.
    second = train(parameters())
    left = min(limit - expected, 9 << 10) // 1024 * 1024
    assert locked.made - sum(o.stats()["staging_bytes"] for o in (first, second)) == expected + left
    del first, second
    gc.collect()
    before = locked.made
    third = train(parameters())
    assert locked.made - before - third.stats()["staging_bytes"] == expected


@pytest.mark.parametrize(("pin", "in_place"), [(None, True), (True, False)])
def test_what_a_kernel_works_on_and_what_was_asked_for_are_always_page_locked(
    locked, monkeypatch, pin, in_place
):
    monkeypatch.setattr(ts_optim.slots, "pin_share", PinShare(0))
    maker = StateMaker(on_host, pin, in_place=lambda p: in_place)
    maker.make_state(parameters()[0], {})
    assert locked.made == 2 << 10


def test_nothing_is_page_locked_where_that_was_asked_for(locked):
    StateMaker(on_host, False).make_state(parameters()[0], {})
    assert locked.made == 0


@given(
    total=st.integers(1, 1 << 50),
    limit=st.none() | st.integers(1, 1 << 50),
    ranks=st.integers(1, 16),
)
def test_the_share_is_of_a_container_s_ram_and_of_one_rank(total, limit, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinning, "host_budget", lambda: HostBudget(total, total, limit, "", ranks))
        share = PinShare()
        most = min(total, limit or total) * 2 // 5 // ranks
        assert share.has_room(most - 1)
        assert not share.has_room(most + 2)  # within the rounding of a float


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beyond_the_share_a_gpu_s_state_is_in_ordinary_memory_with_the_same_bits(monkeypatch, dtype):
    want = parameters("cuda", dtype)
    everything = train(want)
    monkeypatch.setattr(ts_optim.slots, "pin_share", PinShare(4 << 10))
    params = parameters("cuda", dtype)
    some = train(params)
    for optimizer, most in ((everything, 9 << 10), (some, 4 << 10)):
        stats = optimizer.stats()
        assert stats["pinned_bytes"] - stats["staging_bytes"] == most
        assert stats["host_state_bytes"] == 9 << 10
    for p, q in zip(params, want, strict=True):
        assert_bit_equal(p.detach(), q.detach())
