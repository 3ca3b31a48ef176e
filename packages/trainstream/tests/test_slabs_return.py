"""Page-locked memory that was needed once does not stay for good."""

import pytest
import torch
from conftest import tiny_llama
from test_budgets import MIB, budget_above

import trainstream
from ts_core import registry
from ts_paging import _C
from ts_paging.arena import HostArena

SLAB = 1 << 20


@pytest.fixture
def arena():
    before = registry.host_allocator()
    _C.simulate_pinning(not torch.cuda.is_available())
    made = HostArena(pinned=True, slab_bytes=SLAB, available=lambda: 1 << 40)
    registry.set_host_allocator(made)
    yield made
    registry.set_host_allocator(before)
    made.close()
    _C.simulate_pinning(False)


def steps_of(model, optimizer, count):
    session = model._trainstream_session
    for _ in range(count):
        ids = torch.randint(0, 97, (1, 9), device=session.plan.device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield session


def test_what_was_tried_goes_when_a_session_settles_and_what_is_unused_later(arena):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = trainstream.wrap(model, optimizer, **budget_above("cpu", 200 * MIB))
    lasting = arena.empty(SLAB)
    tried = [arena.empty(SLAB) for _ in range(5)]
    arena.reserve(3 * SLAB)
    adapted = False
    for session in steps_of(model, optimizer, 12):
        tried.clear()
        adapted |= session.adapting
        if not session.adapting:
            break
        assert arena.reserved_bytes >= 6 * SLAB
    assert adapted
    assert not session.adapting
    assert arena.reserved_bytes == SLAB
    assert arena.stats().coming_bytes == 0
    tried.append(arena.empty(3 * SLAB))
    tried.clear()  # as if fewer blocks offloaded from now on
    for _ in steps_of(model, optimizer, 66):
        pass
    assert arena.reserved_bytes == SLAB
    del lasting
    trainstream.unwrap(model)
