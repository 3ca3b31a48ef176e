"""RAM that is not there is an error in time."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core import headroom, memory
from ts_core.errors import DoesNotFitError
from ts_core.headroom import RamGuard, least_left, require_ram
from ts_core.memory import HostBudget

MIB = 1 << 20


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45) | st.none())
def test_what_is_left_is_little_of_all_and_never_more_than_128_mib(total, limit):
    least = least_left(HostBudget(total, 0, limit, ""))
    whole = total if limit is None or not limit else min(total, limit)
    assert least == min(128 * MIB, whole // 64)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_it_refuses_exactly_what_does_not_fit(available, wanted):
    budget = HostBudget(64 << 30, available, None, "a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "host_budget", lambda *a, **k: budget)
        patch.setattr(headroom, "release_free_memory", lambda **k: None)
        if wanted <= available - 128 * MIB:
            require_ram("f", wanted, "Do less.")
        else:
            with pytest.raises(
                DoesNotFitError, match=r"\[f\] .* are left for this process \(a test\).*Do less\."
            ):
                require_ram("f", wanted, "Do less.")


def test_memory_that_is_only_held_back_counts_as_left(monkeypatch):
    budget = HostBudget(64 << 30, 0, None, "a test")
    freed = []
    monkeypatch.setattr(
        memory, "host_budget", lambda *a, **k: dataclasses.replace(budget, available_bytes=len(freed) << 30)
    )
    monkeypatch.setattr(headroom, "release_free_memory", lambda **k: freed.append(1))
    require_ram("f", 100 * MIB, "")
    assert freed == [1]


def test_a_guard_looks_seldom_where_a_look_is_dear(monkeypatch):
    looks, now = [], [0.0]
    monkeypatch.setattr(
        headroom, "require_ram", lambda *a: (looks.append(a), now.__setitem__(0, now[0] + 1.0))
    )
    monkeypatch.setattr(headroom.time, "perf_counter", lambda: now[0])
    guard = RamGuard("evaluate", "Less.")
    for _ in range(250):
        guard.check(7)
        now[0] += 1.0
    assert looks == [("evaluate", 7, "Less.")] * 3
