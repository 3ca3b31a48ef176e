"""A fine-tune that is killed between a step and the end of its save goes on exactly, in any placement."""

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import InOrder, arguments, build, lora, random_rows
from tiny_models import json_events, save_tiny_model, write_texts
from typer.testing import CliRunner

import trainstream
from trainstream.cli import app
from trainstream.cli.storage import STATE_FILE, TENSOR_FILE, checkpoints, read_state

WORDS = [
    "model=tiny", "data=texts", "seq_len=16", "batch_size=2", "dtype=fp32", "threads=1", "device=cpu",
    "lr=5e-3", "eval_batches=1", "steps=6", "save_steps=2", "log_steps=1",
]  # fmt: skip
METHODS = {"lora": ["dropout=0.3", "accumulation_steps=2"], "full": ["method=full"]}
WRITE = "ts_hf.saving:write_tensor"
MOMENTS = {
    "before the first file": ["trainstream.cli.models:save_weights", 1, "before"],
    "inside the weights": [WRITE, 5, "before"],
    "after the weights": ["trainstream.cli.models:save_weights", 1, "after"],
    "inside the optimizer's state": [WRITE, 40, "before"],
    "after the last file": ["trainstream.cli.storage:write_state", 1, "after"],
    "before it gets its name": ["trainstream._folders:_sync_tree", 1, "after"],
    "before old ones go": ["trainstream.cli.storage:prune", 1, "before"],
}
# A save of adapters writes its weights with PEFT; our writer writes the optimizer's state alone.
LORA = ["before the first file", "inside the weights", "after the last file", "before old ones go"]
OURS = "trainstream.integrations.huggingface:"
TRAINER_MOMENTS = {
    "before the first file": [f"{OURS}TrainStreamTrainer._save_checkpoint", 1, "before"],
    "inside the weights": [WRITE, 5, "before"],
    "after the weights": [f"{OURS}TrainStreamTrainer._save", 1, "after"],
    "after the optimizer": ["transformers:Trainer._save_optimizer_and_scheduler", 1, "after"],
    "after the last file": [f"{OURS}write_plan", 1, "after"],
    "before old ones go": [f"{OURS}TrainStreamTrainer._rotate", 1, "before"],
}
TRAINER_LORA = ["after the optimizer", "before old ones go"]
TRAINER_CASES = [("full trainer", moment) for moment in TRAINER_MOMENTS]
TRAINER_CASES += [("lora trainer", moment) for moment in TRAINER_LORA]
TRAINER_ARGUMENTS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
CASES = [("full", moment) for moment in MOMENTS] + [("lora", moment) for moment in LORA]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    save_tiny_model(root / "tiny")
    write_texts(root / "texts")
    return root


def finetune(*words):
    result = CliRunner().invoke(app, ["finetune", "--json", "--debug", *words])
    assert result.exit_code == 0, result.stderr
    events = json_events(result.stdout)
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return losses, events[-1]


def folder_of(method, moment):
    return f"{method} {moment}".replace(" ", "-").replace("'", "")


@pytest.fixture(scope="module")
def whole(place):
    """Return the uninterrupted, resident run of each method: losses, result event, folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return {
            method: (*finetune(*WORDS, *words, f"output_dir={method}"), place / method)
            for method, words in METHODS.items()
        }


@pytest.fixture(scope="module")
def killed(place):
    """Run and kill every case, in forks of one process; return its exit codes by case."""
    cases = []
    for method, moment in CASES:
        name = folder_of(method, moment)
        (place / f"files-{name}").mkdir()
        paging = ["wrap.param_offload=true", f"wrap.disk_offload=files-{name}", "wrap.recompute=[0]"]
        cases.append(
            {
                "kind": "cli",
                "cwd": str(place),
                "words": [*WORDS, *METHODS[method], f"output_dir={name}", *paging],
                "armed_by": "trainstream._folders:write_folder",
                "kill": MOMENTS[moment],
            }
        )
    for method, moment in TRAINER_CASES:
        name = folder_of(method, moment)
        (place / f"files-{name}").mkdir()
        cases.append(
            {
                "kind": "trainer",
                "folder": str(place / name),
                "lora": method.startswith("lora"),
                "arguments": TRAINER_ARGUMENTS,
                "options": {"param_offload": True, "disk_offload": str(place / f"files-{name}")},
                "armed_by": f"{OURS}TrainStreamTrainer._save_checkpoint",
                "kill": TRAINER_MOMENTS[moment],
            }
        )
    (place / "cases.json").write_text(json.dumps(cases))
    program = Path(__file__).with_name("killed_saves.py")
    ran = subprocess.run(
        [sys.executable, str(program), str(place / "cases.json")], check=True, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    codes = json.loads(ran.stdout.splitlines()[-1])
    everything = [*CASES, *TRAINER_CASES]
    return {case: (code, ran.stderr) for case, code in zip(everything, codes, strict=True)}


@pytest.mark.parametrize(("method", "moment"), CASES)
def test_it_goes_on_exactly(place, whole, killed, monkeypatch, method, moment):
    monkeypatch.chdir(place)
    code, said = killed[method, moment]
    assert code == -signal.SIGKILL, said
    name = folder_of(method, moment)
    losses, result, reference = whole[method]
    # The save before is whole, and is what the uninterrupted run saved.
    found = checkpoints(place / name)
    assert [path.name for path in found] == ["checkpoint-2"] + ["checkpoint-4"] * (
        moment == "before old ones go"
    )
    for file in ("model.safetensors" if method == "full" else "adapter_model.safetensors", TENSOR_FILE):
        assert (found[0] / file).read_bytes() == (reference / "checkpoint-2" / file).read_bytes()
    assert read_state(found[-1]).data["step"] == len(found) * 2
    files = place / f"files-{name}"
    assert len(list(files.glob("trainstream-*"))) == 1  # what the killed process left
    # Every second case goes on resident; the others paged, as they were.
    resident = CASES.index((method, moment)) % 2 == 1
    placement = ["wrap.param_offload=false", "wrap.recompute=false"] if resident else []
    again, end = finetune("resume=latest", f"output_dir={name}", *placement)
    assert again == {step: losses[step] for step in again}
    assert max(again) == 6
    assert end["loss_after"] == result["loss_after"]
    assert (end["moved"]["disk_read_bytes"] == 0) == resident
    ours, theirs = Path(end["saved"]), Path(result["saved"])
    (file,) = [path.name for path in theirs.glob("*model.safetensors")]
    mine, other = load_file(ours / file), load_file(theirs / file)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[key], other[key]) for key in other)
    # The interrupted save was done again, and nothing is left of the first attempt.
    kept = sorted(
        path.name for path in (place / name).iterdir() if not path.name.startswith(("adapter", "model"))
    )
    assert kept == ["checkpoint-2", "checkpoint-4", "events.jsonl", "result.json"]
    if not resident:
        gc.collect()
        assert not list(files.iterdir())


def test_the_same_step_is_saved_again(place, whole, monkeypatch):
    monkeypatch.chdir(place)
    losses, _, _ = whole["full"]
    finetune(*WORDS, *METHODS["full"], "output_dir=again")
    before = (place / "again/checkpoint-4" / STATE_FILE).stat().st_mtime_ns
    again, _ = finetune("resume=again/checkpoint-2", f"wrap.disk_offload={place}", "wrap.param_offload=true")
    assert again == {step: losses[step] for step in (3, 4, 5, 6)}
    assert (place / "again/checkpoint-4" / STATE_FILE).stat().st_mtime_ns > before
    assert read_state(place / "again/checkpoint-4").data["step"] == 4


def trainer_for(method, folder, options, seed=0):
    torch.set_num_threads(1)
    model = lora(build(), lora_dropout=0.2) if method.startswith("lora") else build(seed)
    return InOrder(
        model=model,
        args=arguments(folder, **TRAINER_ARGUMENTS),
        train_dataset=random_rows(12),
        trainstream=options,
    )


def losses_of(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.fixture(scope="module")
def whole_trainer(place):
    """Return the losses and weights of the uninterrupted, resident run of each method."""
    found = {}
    for method in ("full trainer", "lora trainer"):
        trainer = trainer_for(method, place / method.replace(" ", "-"), {})
        trainer.train()
        found[method] = (
            losses_of(trainer),
            {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        )
    return found


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("method", "moment"), TRAINER_CASES)
def test_a_trainer_goes_on_exactly(place, whole_trainer, killed, method, moment):
    code, said = killed[method, moment]
    assert code == -signal.SIGKILL, said
    name = folder_of(method, moment)
    losses, expected = whole_trainer[method]
    found = sorted(path.name for path in (place / name).glob("checkpoint-*"))
    assert found == ["checkpoint-2"] + ["checkpoint-4"] * (moment == "before old ones go")
    reference = place / method.replace(" ", "-")
    files = place / f"files-{name}"
    assert len(list(files.glob("trainstream-*"))) == 1
    resident = TRAINER_CASES.index((method, moment)) % 2 == 1
    options = {} if resident else {"param_offload": True, "disk_offload": str(files)}
    trainer = trainer_for(method, place / name, options, seed=7)
    trainer.train(resume_from_checkpoint=True)
    assert losses_of(trainer) == losses
    assert bool(trainer.model._trainstream_session.plan.paged) != resident
    for parameter, value in trainer.model.named_parameters():
        assert torch.equal(value, expected[parameter]), parameter
    kept = sorted(path.name for path in (place / name).iterdir())
    assert kept == sorted(path.name for path in reference.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    if not resident:
        trainstream.unwrap(trainer.model)
        assert not list(files.iterdir())
