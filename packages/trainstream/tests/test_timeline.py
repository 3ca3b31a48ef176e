"""The timeline tool of the benchmarks: interval arithmetic against a reference, and a made-up trace."""

import gzip
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "timeline.py"


def _load():
    spec = importlib.util.spec_from_file_location("timeline", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["timeline"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


timeline = _load()
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def points(intervals):
    """Every whole nanosecond in it: what the arithmetic is checked against."""
    return {point for start, end in intervals for point in range(start, end)}


def is_union(intervals):
    """Sorted, none empty, none that overlap or touch."""
    return all(a < b for a, b in intervals) and all(
        before[1] < after[0] for before, after in itertools.pairwise(intervals)
    )


@given(spans)
def test_union_holds_the_points_of_all(intervals):
    found = timeline.union(intervals)
    assert is_union(found)
    assert points(found) == points(intervals)
    assert timeline.total(found) == len(points(intervals))
    assert timeline.union(found) == found


@given(spans, spans)
def test_intersect_and_subtract_split_a_union(a, b):
    left, right = timeline.union(a), timeline.union(b)
    both, rest = timeline.intersect(left, right), timeline.subtract(left, right)
    assert points(both) == points(left) & points(right)
    assert points(rest) == points(left) - points(right)
    assert is_union(rest)
    assert timeline.intersect(right, left) == both
    assert timeline.total(both) + timeline.total(rest) == timeline.total(left)


@given(spans, st.integers(0, 60), st.integers(0, 60))
def test_clip_is_the_part_within(intervals, low, high):
    found = timeline.clip(timeline.union(intervals), low, high)
    assert points(found) == points(intervals) & set(range(low, high))


def event(name, cat, start_us, end_us, *, tid=1, **args):
    return {
        "ph": "X", "name": name, "cat": cat, "pid": 9, "tid": tid,
        "ts": 5e12 + start_us, "dur": end_us - start_us, "args": args,
    }  # fmt: skip


def trace_of(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 9}, *events]}


def example():
    """Two steps of 1,000 us: Python runs ahead of the GPU, copies and an update lie beside and after it."""
    events = []
    for base, number in ((0, 0), (1000, 1)):
        ahead = 100 * number + 1
        events += [
            event("bench/step", "user_annotation", base, base + 990),
            event("bench/forward", "user_annotation", base + 10, base + 100),
            event("bench/backward", "user_annotation", base + 100, base + 200),
            event("bench/optimizer", "user_annotation", base + 900, base + 950),
            event("cudaLaunchKernel", "cuda_runtime", base + 20, base + 21, correlation=ahead),
            event("cudaLaunchKernel", "cuda_runtime", base + 120, base + 121, correlation=ahead + 1),
            event("cudaDeviceSynchronize", "cuda_runtime", base + 960, base + 980, correlation=ahead + 2),
            event("cudaStreamSynchronize", "cuda_runtime", base + 500, base + 600, tid=7),
            event("gemm", "kernel", base + 100, base + 300, tid=70, correlation=ahead),
            event("gemm", "kernel", base + 300, base + 800, tid=70, correlation=ahead + 1),
            event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", base + 200, base + 400, bytes=4000),
            event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", base + 700, base + 900, bytes=8000),
            event("ts/optim/update", "ts_span", base + 850, base + 950, tid=7),
            event("ts/optim/update", "user_annotation", base, base + 1, tid=1),
        ]
    return trace_of(*events)


def test_figures_of_a_step():
    first, second = timeline.analyze(example())
    assert (first["step_s"], second["step_s"]) == (1000e-6, 990e-6)
    assert first["compute_s"] == second["compute_s"] == 700e-6
    assert first["compute_idle_s"] == pytest.approx(300e-6)
    assert (first["forward_s"], first["backward_s"]) == (200e-6, 500e-6)  # the kernels', not Python's
    assert (first["h2d_s"], first["d2h_s"], first["copy_s"]) == (200e-6, 200e-6, 400e-6)
    assert (first["h2d_under_compute"], first["d2h_under_compute"]) == (1.0, 0.5)
    assert first["copy_under_compute"] == 0.75
    assert first["h2d_gb_per_s"] == pytest.approx(4000 / 200e3)
    assert first["d2h_gb"] == pytest.approx(8e-6)
    assert first["optimizer_s"] == 100e-6  # what the recorder saw, once
    assert first["optimizer_under_neither"] == 1.0
    assert first["only_copy_s"] == 100e-6
    assert first["only_optimizer_s"] == 50e-6
    assert first["nothing_s"] == pytest.approx(150e-6)
    assert first["main_waits_s"] == 20e-6  # another thread's waits are not the main one's
    parts = ("compute_s", "only_copy_s", "only_optimizer_s", "nothing_s")
    assert sum(first[key] for key in parts) == pytest.approx(first["step_s"])
    assert first["gaps"] == [
        {"at_s": 0.0, "seconds": 100e-6, "phase": "between"},
        {"at_s": 950e-6, "seconds": 50e-6, "phase": "between"},
    ]


def test_without_kernels_phases_are_pythons_and_operators_compute():
    trace = trace_of(
        event("bench/step", "user_annotation", 0, 100),
        event("bench/forward", "user_annotation", 0, 40),
        event("aten::mm", "cpu_op", 10, 30),
        event("bench/optimizer", "user_annotation", 60, 90),
        event("aten::add_", "cpu_op", 65, 70),
    )
    (step,) = timeline.analyze(trace)
    assert (step["forward_s"], step["compute_s"], step["optimizer_s"]) == (40e-6, 25e-6, 30e-6)
    assert step["copy_under_compute"] is None


def test_steps_of_a_plain_profiler_and_none_at_all():
    steps = [event(f"ProfilerStep#{i}", "user_annotation", 10 * i, 10 * i + 8) for i in range(3)]
    assert [row["step_s"] for row in timeline.analyze(trace_of(*steps))] == [10e-6, 10e-6, 8e-6]
    (whole,) = timeline.analyze(trace_of(event("k", "kernel", 5, 9), event("k", "kernel", 10, 15)))
    assert whole["step_s"] == 10e-6
    assert timeline.analyze({"traceEvents": []}) == []
    assert timeline.summary([]) == {"steps": 0}


@pytest.mark.parametrize("packed", [False, True])
def test_command_line(tmp_path, capsys, monkeypatch, packed):
    path = tmp_path / "trace.json"
    text = json.dumps(example()).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(path), "--html", str(page)])
    assert timeline.main() == 0
    shown = capsys.readouterr().out
    assert "host optimizer (s)" in shown
    assert "0.050 ms" in shown
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(path), "--json"])
    assert timeline.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["median"]["steps"] == len(found["steps"]) == 2
    drawn = page.read_text()
    assert drawn.count("<svg") == 1
    assert "host optimizer" in drawn
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_a_trace_without_events_is_told(tmp_path, capsys, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(path)])
    assert timeline.main() == 1
    assert "no events" in capsys.readouterr().err
