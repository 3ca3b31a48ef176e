"""The event file of a run, the meter behind it and the trace: what they say, and faults."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import tiny_llama, toy, train
from hypothesis import given
from hypothesis import strategies as st

import trainstream
from trainstream import _recorder
from trainstream._bound import LIMITERS, Rates, Work, advice, busy, judge, rates_for
from trainstream._meter import products
from trainstream._timeline import analyze, read
from ts_core.errors import OptionError
from ts_core.lines import read_lines

RATES = Rates(h2d=50e9, d2h=40e9, both=80e9, disk=2e9, flops=1e14, measured=True)
amounts = st.integers(0, 10**12)


def steps(model, optimizer, count, width=16):
    for _ in range(count):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(path, monkeypatch, **options):
    monkeypatch.setenv("TRAINSTREAM_EVENTS", str(path))
    model = toy()
    return trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def of_kind(records, kind):
    return [record for record in records if record["event"] == kind]


def test_a_run_is_told_from_its_start_to_its_end(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "events.jsonl"
    model, optimizer = wrapped(path, monkeypatch, param_offload=True)
    session = model._trainstream_session
    steps(model, optimizer, 5)
    session.events.add("something happened")
    report = trainstream.memory_report(model)
    trainstream.unwrap(model)
    records, _ = read_lines(path)
    (run,) = of_kind(records, "run")
    assert (run["format"], run["pid"], run["device"]) == (1, os.getpid(), "cpu")
    assert run["options"] == {"param_offload": "True"}
    assert run["trainable"] == run["parameters"] == sum(p.numel() for p in model.parameters())
    assert {record["run"] for record in records} == {run["run"]}
    assert [record["text"] for record in of_kind(records, "note")] == report["events"]
    assert [record["step"] for record in of_kind(records, "step")] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in of_kind(records, "blocks")] == [1, 2, 4]
    for record in of_kind(records, "step"):
        assert set(record["tiers"]) == {"device", "peer", "host", "disk"}
        assert record["moved"]["disk_read_bytes"] > 0
        assert record["stall_s"]["weights"] > 0.0
        assert record["limiter"] in LIMITERS
        assert record["host_used_bytes"] > 0
    total = sum(record["moved"]["disk_read_bytes"] for record in of_kind(records, "step"))
    assert total == report["moved"]["disk_read_bytes"]
    (end,) = of_kind(records, "end")
    assert records[-1] is end
    assert end["blocks"] == report["blocks"]
    steps(model, optimizer, 1)
    assert read_lines(path)[0] == records  # after unwrap() nothing is added


def test_two_runs_of_a_file_and_ranks_are_told_apart(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        model, optimizer = wrapped(path, monkeypatch)
        steps(model, optimizer, 1)
        trainstream.unwrap(model)
    assert len({record["run"] for record in read_lines(path)[0]}) == 2
    monkeypatch.setenv("RANK", "3")
    model, _ = wrapped(path, monkeypatch)
    trainstream.unwrap(model)
    assert read_lines(tmp_path / "events.rank3.jsonl")[0][0]["rank"] == 3


def test_a_place_that_cannot_be_written_is_refused_and_a_full_disk_is_not(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        wrapped(tmp_path / "file" / "events.jsonl", monkeypatch)
    model, optimizer = wrapped(tmp_path / "events.jsonl", monkeypatch)
    before = read_lines(tmp_path / "events.jsonl")[0]
    with monkeypatch.context() as patched:
        patched.setattr("ts_core.lines.os.write", lambda *_: 0)
        steps(model, optimizer, 3)
    assert sum("no more lines are written" in record.getMessage() for record in caplog.records) == 1
    assert model._trainstream_session.steps == 3
    torn = (tmp_path / "events.jsonl").read_bytes()
    assert torn.endswith(b"\n")
    assert read_lines(tmp_path / "events.jsonl")[0] == before


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import os, signal, torch, trainstream\n"
        "m = torch.nn.Linear(4, 4)\n"
        "m, o = trainstream.wrap(m, torch.optim.AdamW(m.parameters()))\n"
        "for i in range(3):\n"
        "    m(torch.ones(1, 4)).sum().backward(); o.step(); o.zero_grad()\n"
        "    if i == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRAINSTREAM_EVENTS": str(path)}, check=False
    )
    data = path.read_bytes()
    assert data.endswith(b"\n")
    records = [json.loads(line) for line in data.splitlines()]
    assert [record["step"] for record in of_kind(records, "step")] == [1, 2, 3]
    assert not of_kind(records, "end")


def test_bits_do_not_change(tmp_path, monkeypatch, ids):
    plain, recorded = tiny_llama(), tiny_llama()
    found = []
    for model, path in ((plain, ""), (recorded, str(tmp_path / "events.jsonl"))):
        monkeypatch.setenv("TRAINSTREAM_EVENTS", path)
        monkeypatch.setenv("TRAINSTREAM_TRACE", f"{path}.trace" if path else "")
        torch.manual_seed(1)
        model, optimizer = trainstream.wrap(
            model, torch.optim.AdamW(model.parameters()), param_offload=True, ram_budget=None
        )
        found.append((train(model, optimizer, [ids] * 6), model.state_dict()))
        trainstream.unwrap(model)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_bytes_are_counted_seldom(tmp_path, monkeypatch):
    model, optimizer = wrapped(tmp_path / "events.jsonl", monkeypatch)
    (recorder,) = model._trainstream_session.recorders
    counted = []
    monkeypatch.setattr(_recorder.Recorder, "_recount", lambda self, session: counted.append(1))
    recorder._due = float("inf")
    steps(model, optimizer, 3)
    assert counted == []
    model._trainstream_session.plan = dataclasses.replace(model._trainstream_session.plan)
    steps(model, optimizer, 1)
    assert counted == [1]


def test_a_trace_holds_three_settled_steps(tmp_path, monkeypatch):
    path = tmp_path / "trace.json.gz"
    monkeypatch.setenv("TRAINSTREAM_TRACE", str(path))
    model, optimizer = wrapped(tmp_path / "events.jsonl", monkeypatch, param_offload=True)
    steps(model, optimizer, 8)
    assert f"a trace of 3 steps is in {path}" in model._trainstream_session.events.events
    trainstream.unwrap(model)
    found = analyze(read(path))
    assert len(found) == 3
    assert all(step["compute_s"] > 0.0 and step["fetch_s"] > 0.0 for step in found)
    assert all(step["optimizer_s"] > 0.0 for step in found)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_a_trace_under_another_profiler_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_TRACE", str(tmp_path / "trace.json"))
    model, optimizer = wrapped(tmp_path / "events.jsonl", monkeypatch)
    steps(model, optimizer, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        steps(model, optimizer, 2)
    assert not (tmp_path / "trace.json").exists()
    assert any("another profiler is on" in event for event in model._trainstream_session.events.events)


@pytest.mark.parametrize("text", ["[]", '{"traceEvents": 1}', "3"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    if text == "[]":
        assert read(path) == {"traceEvents": []}
    else:
        with pytest.raises(ValueError, match="is no Chrome trace"):
            read(path)


@given(amounts, amounts, amounts, st.floats(0, 100), st.none() | st.floats(0, 1e18))
def test_busy_seconds_are_bytes_over_rates(down, up, disk, optimizer, flops):
    found = busy(Work(down, up, disk, optimizer, flops), RATES, compute="gpu")
    assert found["h2d"] >= down / RATES.h2d
    assert found["d2h"] >= up / RATES.d2h
    assert max(found["h2d"], found["d2h"]) >= (down + up) / RATES.both
    assert found["dram"] == optimizer
    assert found["disk"] == disk / RATES.disk
    assert ("gpu" in found) == (flops is not None)


@given(
    st.dictionaries(st.sampled_from(["gpu", "h2d", "d2h", "dram", "disk"]), st.floats(0, 10)),
    st.floats(0, 10),
)
def test_the_limiter_is_the_longest_of_what_is_busy(seconds, step_s):
    verdict = judge(seconds, step_s)
    assert verdict.limiter in LIMITERS
    assert verdict.bound_s == max(seconds.values(), default=0.0)
    if verdict.share is not None and verdict.share >= 0.5:
        assert seconds[verdict.limiter] == verdict.bound_s
    assert advice(verdict.limiter)


def test_a_step_that_nothing_explains_waits_for_launches_on_a_gpu():
    assert judge({"gpu": 0.1, "h2d": 0.2}, 1.0).limiter == "launch"
    assert judge({"cpu": 0.1}, 1.0).limiter == "cpu"
    assert judge({"h2d": 0.2}, 1.0).limiter == "unknown"
    assert "doctor" in advice("h2d", measured=False)[-1]


def test_a_processor_that_hardly_multiplies_is_not_said_to_be_short_of_products():
    for share in (None, 0.5, 1.0):
        assert "matrix products take the time" in advice("cpu", share=share)[0]
    few = advice("cpu", share=0.49)
    assert "less than half" in few[0]
    assert "trace" in few[1]
    assert not any("take the time" in line for line in few)
    assert advice("h2d", share=0.1) == advice("h2d")


def test_rates_are_assumed_where_no_profile_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    assert not rates_for("cpu", "float32").measured
    assert rates_for("cpu", "float32").flops > rates_for("cpu", "bfloat16").flops


def test_weights_of_products_are_counted_once():
    model, _ = trainstream.wrap(tiny_llama(tie_word_embeddings=True))
    session = model._trainstream_session
    wide = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    assert products(model, session) == (sum(p.numel() for p in wide.values()),) * 2
    model, _ = trainstream.wrap(tiny_llama(tie_word_embeddings=False))
    wide = {name: p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name}
    assert products(model, model._trainstream_session) == (sum(p.numel() for p in wide.values()),) * 2
    model.config.num_experts = 8
    assert products(model, model._trainstream_session) is None


def test_a_run_too_short_for_a_trace_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_TRACE", str(tmp_path / "trace.json"))
    model, optimizer = wrapped(tmp_path / "events.jsonl", monkeypatch)
    steps(model, optimizer, 2)
    trainstream.unwrap(model)
    notes = of_kind(read_lines(tmp_path / "events.jsonl")[0], "note")
    assert "the run ended before its steps settled" in notes[-1]["text"]
    assert not (tmp_path / "trace.json").exists()
