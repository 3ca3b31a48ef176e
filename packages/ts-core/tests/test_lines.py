"""JSON lines: whole lines only, whatever the values, the writers and the faults."""

import errno
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core import lines, trace

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5))
def test_what_is_written_is_read_back_with_finite_numbers(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "deep" / "events.jsonl"
    with lines.LineFile(path) as file:
        assert all(file.write(record) for record in records)
    found, position = lines.read_lines(path)
    assert found == [lines.finite(record) for record in records]
    assert position == path.stat().st_size
    assert path.read_bytes().count(b"\n") == len(records)
    assert lines.read_lines(path, position) == ([], position)


@given(JSON)
def test_finite_data_is_strict_json(value):
    json.loads(json.dumps(lines.finite(value), allow_nan=False))


def test_a_torn_line_is_skipped_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":')
    found, position = lines.read_lines(path)
    assert (found, position) == ([{"a": 1}], 8)  # it may still be completed
    with lines.LineFile(path) as file:
        file.write({"c": 3})
    assert lines.read_lines(path)[0] == [{"a": 1}, {"c": 3}]


def test_what_is_no_object_is_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"[1]\n\n\xff\xfe\n" + b"[" * 100_000 + b'\n{"a":1}\n')
    assert lines.read_lines(path)[0] == [{"a": 1}]


def test_a_file_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":2}\n')
    position = lines.read_lines(path)[1]
    path.write_bytes(b'{"c":3}\n')
    assert lines.read_lines(path, position) == ([{"c": 3}], 8)


def test_lines_of_many_writers_do_not_mix(tmp_path):
    path = tmp_path / "events.jsonl"

    def work(name):
        with lines.LineFile(path) as file:
            for index in range(100):
                file.write({"name": name, "index": index, "text": name * 500})

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines.read_lines(path)[0]
    assert len(found) == 400
    for name in "abcd":
        assert [row["index"] for row in found if row["name"] == name] == list(range(100))


@pytest.mark.parametrize("fault", ["full", "short"])
def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path, monkeypatch, caplog, fault):
    file = lines.LineFile(tmp_path / "events.jsonl")
    write = os.write

    def full(descriptor, data):
        if fault == "short":
            return write(descriptor, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lines.os, "write", full)
        assert not file.write({"a": 1})
    assert not file.write({"a": 2})
    assert "events.jsonl" in file.failed
    assert len(caplog.records) == 1
    file.close()


def test_a_listener_hears_each_event_once():
    log, heard = trace.EventLog(), []
    log.add("before")
    log.listeners.append(heard.append)
    log.add("one")
    log.add("one", once=True)
    assert heard == ["one"]
