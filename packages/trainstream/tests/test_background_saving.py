"""Saves in the background hold the state of the step they were asked at, to the bit, or say why not."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_trainer import InOrder, arguments, build, lora, random_rows
from torch import nn

import trainstream
from trainstream.integrations._background import background_option
from ts_core.errors import CheckpointError, OptionError, StateError
from ts_core.testing import devices
from ts_hf import background
from ts_hf.background import save_in_background

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


class Gate:
    """Lets the writing thread go on tensor by tensor, so that a test decides what a step finds unwritten."""

    def __init__(self, monkeypatch, free=0):
        self.permits = threading.Semaphore(free)
        real = background.write_file

        def slowly(plain, path, metadata, claim):
            def one(name):
                assert self.permits.acquire(timeout=60)
                return claim(name)

            return real(plain, path, metadata, one)

        monkeypatch.setattr(background, "write_file", slowly)

    def open(self, count=10_000):
        self.permits.release(count)


def train(model, optimizer, steps, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 97, (2, 12), generator=generator).to(device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(device="cpu", **options):
    model = build()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trainstream.wrap(model, adamw, device=device, **options)


def state_of(model, optimizer):
    weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return weights, copy.deepcopy(optimizer.state_dict())


def same_state(a, b):
    for index, entry in a["state"].items():
        assert all(torch.equal(value.cpu(), b["state"][index][key].cpu()) for key, value in entry.items())
    return a["state"].keys() == b["state"].keys()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("copies", [0, 30_000, None], ids=["waits", "some", "copies"])
@pytest.mark.parametrize("options", [{}, {"param_offload": True, "offload": True}], ids=["resident", "paged"])
def test_it_holds_the_state_it_was_asked_at(tmp_path, monkeypatch, device, copies, options):
    gate = Gate(monkeypatch)
    model, optimizer = wrapped(device, **options)
    session = model._trainstream_session
    train(model, optimizer, 2, device=device)
    weights, state = state_of(model, optimizer)
    saving = session.save(tmp_path / "saved", background=True, copy_bytes=copies)
    assert not (tmp_path / "saved").exists()
    gate.open(3)  # some tensors are written before the next step, the others are not
    if copies is not None:
        threading.Timer(0.2, gate.open).start()  # the step waits for the thread
    train(model, optimizer, 2, seed=1, device=device)
    gate.open()
    saving.wait()
    assert saving.done
    found = load_file(tmp_path / "saved/model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights.items() if name in found)
    assert len(found) >= len(weights) - 1  # a tied head is in there once
    assert not any(torch.equal(p.detach().cpu(), weights[n]) for n, p in model.named_parameters())
    bound = 1 << 40 if copies is None else copies
    assert saving.copied_bytes <= bound
    assert copies is not None or saving.copied_bytes > 0
    fresh, other = wrapped(device)
    fresh._trainstream_session.load_optimizer(tmp_path / "saved")
    assert same_state(state, other.state_dict())


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 60_000), st.integers(0, 5))
def test_whatever_is_written_when_the_step_comes(tmp_path_factory, written, copies, seed):
    torch.manual_seed(seed)
    folder = tmp_path_factory.mktemp("saves")
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=seed % 2 == 0)

    def step():
        model(torch.randn(3, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = dict(model.named_parameters())
    tensors |= {f"state.{i}": e["exp_avg"] for i, e in enumerate(optimizer.state.values())}
    expected = {name: value.detach().clone() for name, value in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, free=written)
        path = folder / "a.safetensors"
        saving = save_in_background([(path, tensors, None)], optimizers=[optimizer], copy_bytes=copies)
        timer = threading.Timer(0.01, gate.open)
        timer.start()
        step()
        step()
        timer.join()
        saving.wait()
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert saving.copied_bytes <= copies


def test_adapters_and_a_save_that_waits(tmp_path):
    model = lora(build())
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, 1)
    model._trainstream_session.save(tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"} <= names
    assert not list(tmp_path.glob(".saving-*"))


def test_one_that_fails_says_so_at_the_next_step_and_leaves_the_one_before(tmp_path, monkeypatch):
    model, optimizer = wrapped()
    session = model._trainstream_session
    train(model, optimizer, 1)
    session.save(tmp_path / "saved")
    before = (tmp_path / "saved/model.safetensors").read_bytes()
    train(model, optimizer, 1)

    def full(file, tensor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ts_hf.saving.write_tensor", full)
        saving = session.save(tmp_path / "saved", background=True)
        saving._thread.join()
        weights, _ = state_of(model, optimizer)
        with pytest.raises(OSError, match="No space"):
            train(model, optimizer, 1)
        optimizer.zero_grad()
        assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())  # nothing half done
        assert (tmp_path / "saved/model.safetensors").read_bytes() == before
        assert not list(tmp_path.glob(".saving-*"))
        session.save(tmp_path / "saved", background=True)._thread.join()
        with pytest.raises(OSError, match="No space"):
            session.save(tmp_path / "other", background=True)
    train(model, optimizer, 1)
    session.save(tmp_path / "saved", background=True)
    trainstream.unwrap(model)  # waits
    found = load_file(tmp_path / "saved/model.safetensors")
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters() if n in found)


def test_a_folder_of_somebody_else_stays(tmp_path):
    model, _ = wrapped()
    session = model._trainstream_session
    (tmp_path / "saved.old").mkdir()
    (tmp_path / "saved.old/mine").write_text("kept")
    for _ in range(2):  # the second time one is replaced
        session.save(tmp_path / "saved")
        session.load_optimizer(tmp_path / "saved")
    assert (tmp_path / "saved.old/mine").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "saved.old"}


def test_one_that_nobody_asked_about_is_logged_at_the_end(tmp_path, caplog):
    folder = tmp_path / "missing"
    save_in_background([(folder / "a.safetensors", {"w": torch.ones(2)}, None)])._thread.join()
    assert len(background._open) == 1
    background._at_exit()
    assert "failed" in caplog.text
    assert str(folder) in caplog.text
    assert not background._open
    save_in_background([(tmp_path / "a.safetensors", {"w": torch.ones(2)}, None)])._thread.join()
    assert not background._open


def test_weights_that_somebody_else_writes_are_never_saved(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, free=1)
    model, optimizer = wrapped()
    train(model, optimizer, 1)
    saving = model._trainstream_session.save(tmp_path / "saved", background=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    gate.open()
    with pytest.raises(StateError, match="was changed"):
        saving.wait()
    assert not list(tmp_path.iterdir())


def test_blocks_that_leave_wait_for_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    model, optimizer = wrapped(ram_budget="2GiB")
    session = model._trainstream_session
    assert session.copy_bytes() == 0
    train(model, optimizer, 1)
    saving = session.save(tmp_path / "saved", background=True)
    threading.Timer(0.1, gate.open).start()
    session.set_budget(ram="1GiB")
    assert saving.done


def test_optimizers_that_update_during_backward_are_refused(tmp_path):
    model = build()
    optimizer = trainstream.OffloadAdamW(model.parameters(), lr=1e-2, eager=True, accumulation_steps=1)
    with pytest.raises(StateError, match="eager"):
        save_in_background([], optimizers=[optimizer])


def test_damaged_files_are_named(tmp_path):
    model, optimizer = wrapped()
    session = model._trainstream_session
    with pytest.raises(CheckpointError, match=r"no optimizer\.safetensors"):
        session.load_optimizer(tmp_path)
    train(model, optimizer, 1)
    session.save(tmp_path / "a")
    path = tmp_path / "a/optimizer.safetensors"
    path.write_bytes((tmp_path / "a/model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no optimizer state"):
        session.load_optimizer(tmp_path / "a")


PROGRAM = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import test_background_saving as t
import ts_hf.background, ts_hf.saving as saving, trainstream._folders as folders, transformers.models.llama
from pathlib import Path

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def case(name):
    t.torch.set_num_threads(1)
    model, optimizer = t.wrapped()
    session, place = model._trainstream_session, Path({folder!r}) / name
    t.train(model, optimizer, 1)
    session.save(place / "saved")
    t.train(model, optimizer, 1)
    real, count = saving.write_tensor, [0]
    def write(file, tensor):
        count[0] += 1
        if str(count[0]) == name:
            die()
        real(file, tensor)
    saving.write_tensor = write
    if name == "name":
        folders._sync_tree = die
    rename = Path.rename
    if name == "between":
        Path.rename = lambda path, to: die() if to.name == "saved" else rename(path, to)
    session.save(place / "saved", background=True)
    t.train(model, optimizer, 3)

codes = {{}}
for name in {names!r}:
    child = os.fork()
    if not child:
        case(name)
        sys.exit(0)  # which waits
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""
# The number of a tensor, before it gets its name, when the one before has lost it, after the end.
MOMENTS = ["1", "20", "name", "between", "end"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), names=MOMENTS)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return folder, json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_the_middle_the_one_before_is_whole(killed, moment):
    folder, codes = killed
    assert codes[moment] == (0 if moment == "end" else -signal.SIGKILL)
    model, optimizer = wrapped()
    train(model, optimizer, 1)
    if moment == "end":
        train(model, optimizer, 1)
    model._trainstream_session.load_optimizer(folder / moment / "saved")
    found = load_file(folder / moment / "saved/model.safetensors")
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters() if n in found)
    assert [path.name for path in (folder / moment).iterdir()] == ["saved"]


# ------------------------------------------------------------------------------------- the Trainer

SETTINGS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


def trainer_for(folder, background, seed=0, adapters=False, **changes):
    model = lora(build(seed)) if adapters else build(seed)
    rows = random_rows(12)
    return InOrder(
        model=model,
        args=arguments(folder, **{**SETTINGS, **changes}),
        train_dataset=rows,
        eval_dataset=rows[:3],
        trainstream={"save_in_background": background},
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_the_trainers_checkpoints_are_those_it_would_have_waited_for(tmp_path, adapters):
    made = {}
    for how in (False, True, 0):
        trainer = trainer_for(tmp_path / str(how), how, adapters=adapters)
        trainer.train()
        made[how] = trainer
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    for how in (True, 0):
        folder = tmp_path / str(how)
        assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-4", "checkpoint-6"]
        for name in ("checkpoint-4", "checkpoint-6"):
            assert (folder / name / file).read_bytes() == (tmp_path / "False" / name / file).read_bytes()
        again = trainer_for(folder, how, seed=0 if adapters else 5, adapters=adapters)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert losses(again)[-2:] == losses(made[False])[-2:]
        for p, q in zip(again.model.parameters(), made[False].model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, limit):
    changes = {
        "save_total_limit": limit,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # training makes it smaller, so that the first one is the best
    }
    kept = {}
    for how in (False, True):
        trainer = trainer_for(tmp_path / str(how), how, **changes)
        trainer.train()
        kept[how] = (
            sorted(p.name for p in (tmp_path / str(how)).iterdir()),
            Path(trainer.state.best_model_checkpoint).name,
            [p.detach().clone() for p in trainer.model.parameters()],
        )
    assert kept[True][:2] == kept[False][:2]
    assert kept[True][1] == "checkpoint-2"
    assert all(torch.equal(a, b) for a, b in zip(kept[True][2], kept[False][2], strict=True))


def test_a_full_disk_ends_the_training_with_the_one_before_whole(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path, True)
    real, saves = background.write_file, []

    def full(*given):
        saves.append(given)
        if len(saves) > 2:  # a checkpoint is two files
            raise OSError(28, "No space left on device")
        return real(*given)

    monkeypatch.setattr(background, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]
    assert load_file(tmp_path / "checkpoint-2/model.safetensors")


def test_what_the_trainer_cannot_do_in_the_background_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_in_background"):
        trainer_for(tmp_path, "lots")
    arguments = SimpleNamespace(world_size=1, push_to_hub=True)
    with pytest.raises(OptionError, match="push_to_hub"):
        background_option(True).check(arguments)
