"""How many threads an optimizer uses: what was given, or what there is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.cores import usable_cores
from ts_core.guard import guard
from ts_optim import _C, OffloadAdamW, counts, kernel


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes torch, cores and CUDA look otherwise."""

    def look(cores, threads, cuda):
        class Native:
            def __getattr__(self, name):
                return getattr(_C, name)

            def thread_count(self, asked):
                return asked or min(threads, cores)

        monkeypatch.setattr(counts, "_C", Native())
        monkeypatch.setattr(counts, "usable_cores", lambda: cores)
        monkeypatch.setattr(counts, "_until", 0.0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)

    return look


@pytest.mark.parametrize(
    ("cores", "threads", "cuda", "asked", "want"),
    [
        (16, 16, True, None, 15),
        (16, 16, False, None, 16),
        (16, 16, True, 16, 16),
        (16, 8, True, None, 8),
        (4, 64, True, None, 3),
        (3, 64, True, None, 3),
        (2, 2, True, None, 2),
        (1, 1, True, None, 1),
        (16, 2, True, 3, 3),
    ],
)
def test_one_of_four_or_more_cores_is_left_to_the_launching_thread(
    cores, threads, cuda, asked, want, machine
):
    machine(cores, threads, cuda)
    assert counts.threads_behind(asked) == want


@given(asked=st.integers(1, 4096))
def test_a_given_number_is_taken_as_it_is(asked):
    assert counts.threads_behind(asked) == asked


def test_without_one_it_is_torch_s_and_no_more_than_the_usable_cores():
    for number in (1, 2, 500):
        torch.set_num_threads(number)
        assert counts.threads_behind(None) == min(number, usable_cores())


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("asked", [None, 2])
def test_updates_behind_the_step_take_fewer(asked, guarded, machine, monkeypatch):
    machine(16, 16, True)
    torch.set_num_threads(1)
    seen = []

    class Native:
        def adamw_step_(self, *arguments):
            seen.append(arguments[-1])
            _C.adamw_step_(*arguments)

    monkeypatch.setattr(kernel, "_C", Native())
    p = nn.Parameter(torch.ones(3))
    if guarded:
        guard(p, lambda p, g: None)
    optimizer = OffloadAdamW([p], threads=asked)
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.synchronize()
    assert seen == [asked or (15 if guarded else 1)]


def test_counters_are_the_counting_part_of_the_stats():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = OffloadAdamW([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.synchronize()
    counters, stats = optimizer.counters(), optimizer.stats()
    assert counters["steps"] == 1
    assert counters == {name: stats[name] for name in counters}
