import json
import logging
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import trace
from ts_core.errors import StateError


@given(st.lists(st.text()))
def test_events_are_kept_in_order_and_as_given(texts):
    log = trace.EventLog()
    for text in texts:
        log.add(text)
    assert log.events == texts
    assert len(log) == len(texts)
    log.events.append("not mine")
    assert log.events == texts


@given(st.lists(st.sampled_from("abc")))
def test_once_leaves_repeats_out(texts):
    log = trace.EventLog()
    for text in texts:
        log.add(text, once=True)
    assert log.events == list(dict.fromkeys(texts))


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_events_go_to_the_logger(caplog, level):
    caplog.set_level(logging.INFO, logger="trainstream")
    trace.EventLog(level=level).add("100 % of it: %s stays")
    assert caplog.record_tuples == [("trainstream", level, "100 % of it: %s stays")]


def test_the_logger_has_no_handler_of_its_own():
    assert trace.LOGGER is logging.getLogger("trainstream")
    assert trace.LOGGER.handlers == []
    assert trace.LOGGER.level == logging.NOTSET


def test_threads_may_add_at_the_same_time():
    log = trace.EventLog()
    start = threading.Barrier(4)

    def work(name):
        start.wait()
        for index in range(200):
            log.add(f"{name}{index}")
            log.add("same", once=True)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log.events) == sorted(["same", *(f"{n}{i}" for n in "abcd" for i in range(200))])


def test_a_span_costs_nothing_without_a_profiler():
    assert trace.span("ts/core/a") is trace.span("ts/core/b")
    with trace.span("ts/core/outer"), trace.span("ts/core/inner"):
        pass


@pytest.mark.filterwarnings("ignore")
@given(st.lists(st.from_regex(r"ts/[a-z]{1,8}/[a-z_]{1,8}", fullmatch=True), min_size=1, max_size=3))
def test_spans_show_in_a_profile(names):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for name in names:
            with trace.span(name):
                torch.ones(2) + 1
    assert set(names) <= {event.name for event in profile.events()}
    assert trace.span("ts/core/a") is trace.span("ts/core/b")


def test_a_span_ends_when_its_code_raises():
    with pytest.raises(KeyError), trace.span("ts/core/raises"):
        raise KeyError


@given(st.lists(st.lists(st.text(min_size=1), max_size=4), min_size=1, max_size=3))
def test_a_recorder_keeps_the_spans_of_all_threads(names):
    def work(mine):
        for name in mine:
            with trace.span(name):
                pass

    with trace.SpanRecorder() as recorder:
        threads = [threading.Thread(target=work, args=(mine,), name=f"t{i}") for i, mine in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, mine in enumerate(names):
        found = [each for each in recorder.spans if each.thread_name == f"t{index}"]
        assert [each.name for each in found] == mine
        assert all(each.start_ns <= each.end_ns for each in found)
        assert [each.start_ns for each in found] == sorted(each.start_ns for each in found)
    assert trace.span("ts/core/a") is trace.span("ts/core/b")


def test_one_recorder_at_a_time():
    with trace.SpanRecorder() as first:
        with pytest.raises(StateError), trace.SpanRecorder():
            pass
        with pytest.raises(KeyError), trace.span("ts/core/raises"):
            raise KeyError
    assert [each.name for each in first.spans] == ["ts/core/raises"]
    with trace.SpanRecorder():
        pass


@pytest.mark.filterwarnings("ignore")
def test_recorded_spans_lie_where_the_profiler_saw_them(tmp_path):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
        trace.SpanRecorder() as recorder,
    ):
        for _ in range(5):
            with trace.span("ts/core/both"):
                torch.ones(64, 64) @ torch.ones(64, 64)
        other = threading.Thread(target=lambda: trace.span("ts/core/other").__enter__())
        other.start()
        other.join()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    exported = json.loads((tmp_path / "trace.json").read_text())
    assert recorder.add_to(exported) == 5
    seen = {
        cat: [event for event in exported["traceEvents"] if event.get("cat") == cat]
        for cat in ("ts_span", "user_annotation")
    }
    both = [event for event in seen["user_annotation"] if event["name"] == "ts/core/both"]
    assert len(both) == len(seen["ts_span"]) == 5
    for ours, theirs in zip(seen["ts_span"], both, strict=True):
        assert (ours["pid"], ours["tid"]) == (theirs["pid"], theirs["tid"])
        # Ours lies around theirs; a thread that loses its core in between may lie wider.
        assert ours["ts"] + ours["dur"] >= theirs["ts"]
        assert theirs["ts"] + theirs["dur"] >= ours["ts"]


def test_without_a_common_span_the_time_of_day_is_compared():
    with trace.SpanRecorder() as recorder, trace.span("ts/core/alone"):
        now = time.time_ns()
    exported = {"traceEvents": [], "baseTimeNanoseconds": now - 10_000_000}
    assert recorder.add_to(exported) == 1
    (event,) = (event for event in exported["traceEvents"] if event["ph"] == "X")
    (label,) = (event for event in exported["traceEvents"] if event["ph"] == "M")
    assert event["ts"] - 10_000 < 1e6
    assert event["ts"] + event["dur"] + 1e6 > 10_000
    assert label["tid"] == event["tid"]
    assert "MainThread" in label["args"]["name"]
