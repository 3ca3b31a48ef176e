"""How long a step was predicted to take, beside how long it took."""

import pytest
import torch
from test_first_plan import config_of, spec_of_config
from transformers import LlamaForCausalLM

import trainstream
from trainstream import _decide, _first
from trainstream._first import planned_job
from trainstream._session import session_of
from ts_core.job import Room, assumed_profile
from ts_core.search import choose

TOKENS = 32


@pytest.fixture
def config():
    return config_of(layers=2, vocabulary=128)


def wrapped(config, monkeypatch, **options):
    monkeypatch.setattr(_first, "rates_of", lambda device, options: assumed_profile("cpu"))
    model = LlamaForCausalLM(config).bfloat16()
    return trainstream.wrap(model, plan_tokens=TOKENS, **options)[0]


def searched(config):
    """Seconds of what the search finds with RAM enough, from the config alone."""
    spec = spec_of_config(config)
    job = planned_job(spec, cpu=True, seq_len=TOKENS, trains=True)
    return choose(spec, job, assumed_profile("cpu"), Room(8 << 30, None, 0)).prediction.step_s


def step(model, tokens):
    ids = torch.zeros(2, tokens // 4, dtype=torch.long)
    session_of(model).train_step([{"input_ids": ids, "labels": ids}] * 2)
    return trainstream.memory_report(model)["plan"]["history"][-1]


def test_the_plan_has_the_time_that_the_search_predicts(config, monkeypatch):
    model = wrapped(config, monkeypatch)
    planned = session_of(model).plan.predicted
    assert planned["step_s"] == pytest.approx(searched(config), rel=1e-12)
    assert planned["tokens"] == TOKENS
    assert f"s of {TOKENS} tokens planned" in session_of(model).plan.table()
    assert trainstream.memory_report(model)["plan"]["predicted"]["step_s"] == planned["step_s"]


def test_the_history_compares_steps_of_as_many_tokens_only(config, monkeypatch):
    model = wrapped(config, monkeypatch)
    planned = session_of(model).plan.predicted["step_s"]
    seen = [(entry["tokens"], entry["predicted_step_s"]) for entry in map(step, [model] * 3, (32, 64, 8))]
    assert seen == [(32, planned), (64, 0.0), (8, 0.0)]


def test_tokens_that_a_loop_tells_itself_count_once(config, monkeypatch):
    model = wrapped(config, monkeypatch)
    session_of(model).tell(30)  # two of them are padding
    assert step(model, 32)["tokens"] == 30
    assert step(model, 32)["tokens"] == 32


def test_an_event_file_has_it_beside_what_was_measured(config, monkeypatch, tmp_path):
    from trainstream._runs import compare, load

    model = wrapped(config, monkeypatch)
    session_of(model).record(tmp_path / "events.jsonl")
    for _ in range(3):
        step(model, TOKENS)
    trainstream.unwrap(model)
    (row,) = [row for row in compare(load(tmp_path / "events.jsonl"), None) if row["what"] == "step time"]
    assert row["predicted"] == pytest.approx(searched(config), rel=1e-12)
    assert row["measured"] > 0


def test_what_was_predicted_is_dropped_with_the_budget_that_it_was_for(config, monkeypatch):
    model = wrapped(config, monkeypatch, param_offload=[0])
    assert session_of(model).plan.predicted["step_s"] > 0
    session_of(model).set_budget(ram="1GiB")
    assert "step_s" not in session_of(model).plan.predicted


def test_a_run_from_the_least_memory_predicts_no_time(config, monkeypatch):
    monkeypatch.setattr(_decide, "first_plan", lambda *_: None)
    model, _ = trainstream.wrap(LlamaForCausalLM(config).bfloat16())
    planned = session_of(model).plan.predicted
    assert "step_s" not in planned
    assert "tokens" not in planned
