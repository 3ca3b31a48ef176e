"""Event files and traces as `finetune` and the Trainer write them, read back by `report` and `top`."""

import json
import math

import pytest
import torch
from test_trainer import arguments, build
from tiny_models import save_tiny_model, write_texts
from typer.testing import CliRunner

from trainstream import _runs
from trainstream._bound import LIMITERS
from trainstream.cli import app
from trainstream.integrations.huggingface import TrainStreamTrainer
from ts_core.errors import OptionError
from ts_core.lines import read_lines

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = [
    "model=tiny", "data=texts", "seq_len=16", "batch_size=2", "dtype=fp32", "threads=1", "device=cpu",
    "eval_batches=0", "log_steps=2", "save_steps=0", "method=full",
]  # fmt: skip


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("records")
    save_tiny_model(root / "tiny")
    write_texts(root / "texts")
    return root


def test_a_finetune_is_recorded_and_reported(place, monkeypatch):
    monkeypatch.chdir(place)
    words = ["steps=7", "trace=true", "wrap.param_offload=true", "output_dir=runs/one"]
    result = invoke("finetune", *WORDS, *words)
    assert result.exit_code == 0, result.output
    run = _runs.load(place / "runs/one/events.jsonl")
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step["tokens"] for step in run.steps] == [32.0] * 7
    assert all("cpu" in step["busy_s"] for step in run.steps)
    assert [step for step, _ in run.losses] == [2, 4, 6, 7]
    assert run.end is not None
    result = invoke("report", "--json", "--html", "r.html", "--trace", "t.json")  # ./runs is looked at
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["state"], summary["timeline"]["steps"]) == ("ended", 3)
    assert summary["timeline"]["compute_s"] > 0.0
    assert {row["tier"] for row in summary["blocks"] if row["kind"] == "block"} == {"disk"}
    assert sum(row["fills"] for row in summary["blocks"]) > 0
    assert summary["written"] == {"html": "r.html", "trace": "t.json"}
    now = json.loads(invoke("top", "--json").stdout)  # it has ended, so there is one look
    assert (now["state"], now["step"], now["blocks"]["tier"]) == ("ended", 7, {"disk": 2})


def test_a_finetune_can_leave_it(place, monkeypatch):
    monkeypatch.chdir(place)
    assert invoke("finetune", *WORDS, "steps=1", "events=false", "output_dir=two").exit_code == 0
    assert not (place / "two/events.jsonl").exists()


def test_a_trainer_writes_the_file_and_logs_the_bound(tmp_path):
    rows = [{"input_ids": torch.arange(8) % 97, "labels": torch.arange(8) % 97} for _ in range(4)]
    trainer = TrainStreamTrainer(
        model=build(),
        args=arguments(tmp_path, max_steps=4),
        train_dataset=rows,
        trainstream={"events": tmp_path / "events.jsonl"},
    )
    trainer.train()
    for entry in (entry for entry in trainer.state.log_history if "loss" in entry):
        assert entry["ts_limiter"] in LIMITERS
        assert math.isfinite(entry["ts_share_of_bound"])
    records = read_lines(tmp_path / "events.jsonl")[0]
    told = [record["tokens"] for record in records if record["event"] == "step"]
    assert told == [8, 8, 8, 8]
    losses = [record["loss"] for record in records if record["event"] == "loss"]
    assert losses == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_refuses_what_is_no_path(tmp_path):
    with pytest.raises(OptionError, match="option events"):
        TrainStreamTrainer(model=build(), args=arguments(tmp_path), trainstream={"events": 3})
