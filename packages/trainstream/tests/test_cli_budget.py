"""`finetune` within byte budgets: the base in files from the start, the plan said, the peak in the limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import json_events, save_tiny_model, write_texts
from typer.testing import CliRunner

from trainstream.cli import app, loop, models
from trainstream.cli.settings import Settings, merge
from trainstream.integrations._plan_file import read_plan
from ts_core.errors import DoesNotFitError, OptionError
from ts_core.plan import Numerics, Plan
from ts_hf.offload import file_bytes

WORDS = [
    "model=tiny", "data=texts", "seq_len=16", "batch_size=2", "dtype=fp32", "threads=1", "device=cpu",
    "lr=5e-3", "eval_batches=1", "steps=4", "log_steps=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("budget")
    save_tiny_model(root / "tiny")
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "head_dim": 64}
    save_tiny_model(root / "middle", **shape)
    write_texts(root / "texts")
    return root


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(place)
    yield
    torch.set_num_threads(threads)


def finetune(*words):
    result = CliRunner().invoke(app, ["finetune", "--json", "--debug", *words])
    assert result.exit_code == 0, result.stderr
    events = json_events(result.stdout)
    return {
        kind: [e for e in events if e["event"] == kind] for kind in ("plan", "step", "result")
    }, result.stderr


def losses(events):
    return [event["loss"] for event in events["step"]]


def test_budgets_are_settings_like_the_others(place, tmp_path):
    assert (merge({"ram": "8GiB"}).ram, merge({"ram_budget": "1GB"}).ram) == (8 << 30, 10**9)
    assert (merge({"vram": 5}).vram, merge({"disk_budget": "none"}).disk) == (5, None)
    with pytest.raises(OptionError, match="ram"):
        merge({"ram": "0"})
    assert Settings.from_json(merge({"disk": "1G"}).to_json()).disk == 1 << 30
    config = tmp_path / "job.yaml"
    config.write_text("model: tiny\ndata: [texts]\nmax_steps: 1\nram: 20GiB\ndisk: 5GiB\n")
    events, said = finetune(str(config), f"output_dir={tmp_path}/run")
    assert events["result"][0]["ram_budget_bytes"] == 20 << 30
    assert "plan:" in said
    assert "layers.1 (2)" in said


def test_the_plan_is_an_event_and_a_resident_run_says_no_table(tmp_path):
    events, said = finetune(*WORDS, f"output_dir={tmp_path}/run")
    (plan,) = events["plan"]
    adapting = plan.pop("adapting")
    plan.pop("event")
    assert adapting is False
    read = Plan.from_json(json.dumps(plan))
    assert read.policy == ("keep", "keep")
    assert "plan:" not in said
    (result,) = events["result"]
    assert result["tiers"]["disk"] == 0
    assert result["paged_groups"] == 0


def test_a_budget_gives_the_same_losses_and_a_table(tmp_path):
    resident, _ = finetune(*WORDS, f"output_dir={tmp_path}/a")
    limited, said = finetune(*WORDS, f"output_dir={tmp_path}/b", "--ram", "64GiB", "--disk", "8GiB")
    assert losses(limited) == losses(resident)
    assert "group" in said
    assert "activations" in said


def test_a_disk_budget_alone_puts_nothing_on_the_disk(monkeypatch):
    assert models._files_for(merge({"disk": "1MiB"})) is None
    monkeypatch.setenv("TRAINSTREAM_DISK", "1MiB")
    assert models._files_for(Settings()) is None


@pytest.mark.parametrize("variable", ["TRAINSTREAM_RAM"])
def test_the_environment_counts_as_well(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "64GiB")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = models._files_for(Settings())
    assert files is not None
    assert files.directory.startswith(str(tmp_path))
    base = models.load_base(merge({"model": "tiny"}), torch.float32, torch.device("cpu"))
    assert sum(file_bytes(p) for p in base.model.parameters()) > 0
    monkeypatch.delenv(variable)
    assert models._files_for(Settings()) is None


def test_a_gpu_with_a_budget_gets_the_base_from_the_cpu():
    settings = merge({"model": "tiny", "vram": "1GiB"})
    base = models.load_base(settings, torch.float32, torch.device("cuda"))
    assert {p.device.type for p in base.model.parameters()} == {"cpu"}


def test_what_the_loss_takes_is_counted_and_never_changed(tmp_path):
    words = {"model": "tiny", "method": "full", "ram": "100KiB", "loss_chunk_size": 8}
    settings = merge(words)
    base = models.load_base(settings, torch.float32, torch.device("cpu"))
    head = base.model.lm_head.weight
    assert loop._loss_bytes(base.model, settings) == 8 * 258 * 4 + 4 * head.numel()
    head.requires_grad_(False)
    assert loop._loss_bytes(base.model, settings) == 8 * 258 * 4
    with pytest.raises(DoesNotFitError, match="loss_chunk_size=8"):
        loop.make_optimizer(base.model, settings, 1, torch.device("cpu"))
    with pytest.raises(DoesNotFitError, match=r"ram=1\.00 KiB: the loss takes"):
        loop.make_optimizer(base.model, merge({**words, "ram": 1024}), 1, torch.device("cpu"))


def test_a_resumed_run_keeps_the_numerics_of_its_checkpoint(place, tmp_path):
    words = [word for word in WORDS if not word.startswith("steps=")]
    # Runs of earlier releases had no fused paths.
    own = "wrap.kernels=false", "wrap.fused_lora=false"
    options = "wrap.quant_block_size=32", "wrap.double_quant=true", *own
    finetune(*words, "steps=3", "save_steps=2", *options, f"output_dir={tmp_path}/run")
    checkpoint = tmp_path / "run/checkpoint-2"
    saved = read_plan(checkpoint)
    assert saved.plan.numerics == Numerics(quantize="nf4", quant_block_size=32, double_quant=True)
    assert (saved.loss_chunk_size, saved.packed) == (1024, 14)
    refused = CliRunner().invoke(app, ["finetune", f"resume={checkpoint}", "wrap.quant_block_size=64"])
    assert refused.exit_code == 2
    assert "option quant_block_size" in refused.stderr
    again, _ = finetune(f"resume={checkpoint}", "wrap.param_offload=true")  # another placement is free
    assert again["result"][0]["steps"] == 3
    # A checkpoint without a plan, of an earlier release, goes on as it did.
    path = checkpoint / "trainstream.json"
    state = checkpoint / "trainstream_state.json"
    content = json.loads(state.read_text())
    del content["files"][path.name]
    state.write_text(json.dumps(content))
    path.unlink()
    older, _ = finetune(f"resume={checkpoint}")
    assert losses(older) == losses(again)


def run_apart(place, *runs):
    """Run in forks of a process that has only imported: what other tests hold must not count."""
    (place / "cases.json").write_text(
        json.dumps([{"kind": "cli", "cwd": str(place), "words": [*words, "--json"]} for words in runs])
    )
    program = Path(__file__).with_name("killed_saves.py")
    ran = subprocess.run(
        [sys.executable, str(program), str(place / "cases.json"), "1"], check=True, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    events, codes = [[]], json.loads(ran.stdout.splitlines()[-1])
    assert codes == [3] * len(runs), ran.stderr
    for event in json_events("\n".join(ran.stdout.splitlines()[:-1])):
        events[-1].append(event)
        if event["event"] == "result":
            events.append([])
    return events[:-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_stays_below_the_budget(place, tmp_path):
    budget = 100 << 20
    words = [*WORDS[1:], "model=middle", "method=full", "save_steps=2", "steps=3"]
    words.remove("steps=4")
    first, again = run_apart(
        place,
        [*words, f"output_dir={tmp_path}/run", f"ram={budget}"],
        [f"resume={tmp_path}/run/checkpoint-2"],  # within the budget, from weights and state that are larger
    )
    (plan,) = [event for event in first if event["event"] == "plan"]
    weights = sum(block["bytes"] for block in plan["blocks"])
    assert 4 * weights > plan["budgets"]["device"]  # with gradients and moments, without activations
    assert plan["adapting"]
    assert {block["tier"] for block in plan["blocks"]} == {"disk"}
    for events in (first, again):
        assert 0 < events[-1]["peak_ram_used_bytes"] <= budget
        assert events[-1]["ram_budget_bytes"] == budget
    assert first[-1]["moved"]["disk_read_bytes"] > weights
    assert first[-1]["tiers"]["disk"] > 0
    resident, _ = finetune(*words, f"output_dir={tmp_path}/resident")
    assert losses({"step": [e for e in first if e["event"] == "step"]}) == losses(resident)
    assert losses({"step": [e for e in again if e["event"] == "step"]}) == losses(resident)[2:]
