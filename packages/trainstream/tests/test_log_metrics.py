"""What the Trainer logs of a wrapped model: all that moves and waits, not what the optimizer does alone."""

from types import SimpleNamespace

import pytest

import ts_paging
from trainstream.integrations import _metrics
from trainstream.integrations._metrics import LogMetrics


class Optimizer:
    def __init__(self):
        self.moved = {"h2d_bytes": 10**9, "d2h_bytes": 2 * 10**9, "wait_s": 1.0}

    def stats(self):
        return {"pinned_bytes": 3 * 10**9, "host_state_bytes": 4 * 10**9, **self.moved}


def session(device):
    pager = SimpleNamespace(
        disk_bytes=0,
        host_bytes=0,
        wait_s=0.0,
        activations=SimpleNamespace(brought_bytes=0, parked_bytes=0),
        sink=SimpleNamespace(d2h_bytes=0),
    )
    return SimpleNamespace(plan=SimpleNamespace(device=device), pager=pager)


class Unbounded:
    """Stands in for the meter, which asks for the rates of a GPU."""

    def __init__(self, session):
        self.verdict = SimpleNamespace(share=None, limiter="unknown")

    def take(self, session, seconds):
        return self


@pytest.mark.parametrize(("device", "counted"), [("cuda:0", 1), ("cpu", 0)])
def test_streamed_weights_gradients_and_activations_count(device, counted, monkeypatch):
    monkeypatch.setattr(_metrics, "Meter", Unbounded)
    optimizer = Optimizer()
    wrapped = session(device)
    metrics = LogMetrics(optimizer, wrapped)
    optimizer.moved = {"h2d_bytes": 2 * 10**9, "d2h_bytes": 4 * 10**9, "wait_s": 1.25}
    pager = wrapped.pager
    pager.host_bytes, pager.activations.brought_bytes = 7 * 10**9, 5 * 10**9
    pager.sink.d2h_bytes, pager.activations.parked_bytes = 11 * 10**9, 13 * 10**9
    pager.wait_s = 0.5
    entries = metrics.take()
    assert entries["ts_h2d_gb"] == pytest.approx(1 + counted * 12)
    assert entries["ts_d2h_gb"] == pytest.approx(2 + counted * 24)
    assert entries["ts_stall_s"] == pytest.approx(0.75)
    assert entries["ts_host_state_gb"] == pytest.approx(4)
    later = metrics.take()  # nothing since
    assert later["ts_h2d_gb"] == later["ts_d2h_gb"] == later["ts_stall_s"] == 0.0


@pytest.mark.parametrize(("arena", "expected"), [(20 * 10**9, 20.0), (10**9, 3.0)])
def test_page_locked_memory_is_the_process_s(arena, expected, monkeypatch):
    monkeypatch.setattr(ts_paging, "pinned_bytes", lambda: arena)
    optimizer = Optimizer()
    assert LogMetrics(optimizer).take()["ts_pinned_gb"] == pytest.approx(expected)
