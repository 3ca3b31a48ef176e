import logging
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import trace


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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for name in names:
            with trace.span(name):
                torch.ones(2) + 1
    assert set(names) <= {event.name for event in profile.events()}
    assert trace.span("ts/core/a") is trace.span("ts/core/b")


def test_a_span_ends_when_its_code_raises():
    with pytest.raises(KeyError), trace.span("ts/core/raises"):
        raise KeyError
