"""The thread pool under the kernels: cores it may use, several callers at once, idle workers, forks."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.cores import usable_cores
from ts_core.testing import assert_bit_equal
from ts_optim import _C, adamw_step_
from ts_optim.kernel import Clock

HYPER = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64)


def problem(seed, numel=100_000):
    generator = torch.Generator().manual_seed(seed)
    params, grads, m = (torch.randn(numel, generator=generator) for _ in range(3))
    return params, grads, m, m.square(), torch.tensor(0.0)


def step(tensors, threads):
    adamw_step_(*([t] for t in tensors), [], HYPER, [0], threads=threads)


def run_python(code, **kw):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, **kw
    ).stdout.split()


@given(threads=st.integers(1, 4096))
def test_a_given_count_of_threads_is_taken_as_it_is(threads):
    assert _C.thread_count(threads) == threads


def test_without_one_torch_and_the_usable_cores_decide():
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 500):
            torch.set_num_threads(count)
            assert _C.thread_count() == _C.thread_count(0) == min(count, usable_cores())
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_a_process_bound_to_one_core_starts_no_workers():
    found = run_python("""
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import torch
        from ts_optim import _C, adamw_step_
        torch.set_num_threads(8)
        p, g, m, v, step = *(torch.ones(1 << 20) for _ in range(4)), torch.tensor(0.0)
        hyper = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64)
        adamw_step_([p], [g], [m], [v], [step], [], hyper, [0])
        print(_C.thread_count(), _C.pool_workers())
    """)
    assert found == ["1", "0"]


def test_callers_at_once_neither_block_nor_disturb_each_other():
    # Each asks for 3 threads: all of them share the workers that one of them needs.
    callers, turns = 6, 20
    want = [problem(seed) for seed in range(callers)]
    for tensors in want:
        for _ in range(turns):
            step(tensors, 1)
    got = [problem(seed) for seed in range(callers)]
    start = threading.Barrier(callers)

    def work(tensors):
        start.wait()
        for _ in range(turns):
            step(tensors, 3)

    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_bit_equal(a, b)


@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=60),
)
def test_time_that_threads_share_counts_once(spans):
    # Spans are told when they end, as in threads that run side by side.
    spans = sorted(spans, key=lambda span: span[1])
    clock, now = Clock("kernel_s"), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ts_optim.kernel.time.perf_counter", lambda: now[0])
        for start, now[0] in spans:
            clock.add_span("kernel_s", float(start))
    covered = {second for start, end in spans for second in range(start, end)}
    assert clock.read() == {"kernel_s": len(covered)}
    assert clock.read() == {"kernel_s": len(covered)}


def test_workers_are_shared_by_callers_and_sleep_when_idle():
    found = run_python("""
        import threading, time
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        from ts_optim import _C, adamw_step_
        before = {t.name for t in Path("/proc/self/task").iterdir()}
        hyper = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64)
        def work():
            p, g, m, v, step = *(torch.ones(1 << 18) for _ in range(4)), torch.tensor(0.0)
            for _ in range(20):
                adamw_step_([p], [g], [m], [v], [step], [], hyper, [0], threads=3)
        callers = [threading.Thread(target=work) for _ in range(5)]
        [c.start() for c in callers]
        [c.join() for c in callers]
        def states():  # of the threads that are there now, the callers gone
            found = []
            for task in Path("/proc/self/task").iterdir():
                try:
                    found.append((task / "stat").read_text().rsplit(") ", 1)[1][0])
                except (FileNotFoundError, ProcessLookupError):
                    pass
            return sorted(found)
        end = time.monotonic() + 60
        # This thread runs; those from before and two workers sleep.
        want = ["R"] + ["S"] * (len(before) - 1 + 2)
        seen = states()
        while seen != want and time.monotonic() < end:
            seen = states()
        print(_C.pool_workers(), seen == want)
    """)
    assert found == ["2", "True"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads on this system")
def test_a_forked_child_gets_workers_of_its_own():
    found = run_python("""
        import os, warnings
        import torch
        torch.set_num_threads(1)
        from ts_optim import _C, adamw_step_
        hyper = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64)
        def work():
            p, g, m, v, step = *(torch.ones(1 << 18) for _ in range(4)), torch.tensor(0.0)
            adamw_step_([p], [g], [m], [v], [step], [], hyper, [0], threads=4)
            return float(p.double().sum())
        first = work()
        child = os.fork()
        if child == 0:
            os._exit(0 if work() == first and _C.pool_workers() == 3 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert found == ["0"]
