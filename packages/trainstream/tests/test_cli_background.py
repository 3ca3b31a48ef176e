"""`trainstream finetune save_in_background=...`: the checkpoints of a run that waits for them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli_finetune import QUICK, equal, finetune, invoke, last, ok, weights
from tiny_models import json_events, save_tiny_model, write_texts

from trainstream.cli.settings import merge
from trainstream.cli.storage import STATE_FILE, TENSOR_FILE, checkpoints, read_state
from ts_core.errors import OptionError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    save_tiny_model(root / "tiny", chat=True)
    write_texts(root / "texts")
    return root


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(place)
    yield
    torch.set_num_threads(threads)


def content(folder):
    """Everything a checkpoint holds, but for the settings that were typed differently."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    state = json.loads(files.pop(STATE_FILE))
    del state["data"]["settings"]
    state["files"].pop(TENSOR_FILE)  # a header may be padded otherwise
    return files.keys(), state, {path.name: load_file(path) for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("true", ["dropout=0.3"]),
        ("0", ["method=full"]),
        ("1KiB", ["method=full", "wrap.param_offload=true"]),
    ],
)
def test_checkpoints_are_those_of_a_run_that_waits(tmp_path, bound, words):
    common = [
        "model=tiny",
        "data=texts",
        "steps=6",
        "save_steps=2",
        "log_steps=1",
        "save_total_limit=9",
        *words,
    ]
    runs = {
        kind: finetune(*common, f"save_in_background={kind}", f"output_dir={tmp_path}/{kind}")
        for kind in ("false", bound)
    }
    one, two = (tmp_path / kind for kind in runs)
    for name in ("checkpoint-2", "checkpoint-4"):
        names, state, tensors = content(one / name)
        names_too, state_too, tensors_too = content(two / name)
        assert (names, state) == (names_too, state_too)
        assert tensors.keys() == tensors_too.keys()
        assert all(equal(tensors[file], tensors_too[file]) for file in tensors)
        assert [step for step, _ in read_state(two / name).data["losses"]] == list(
            range(1, state["data"]["step"] + 1)
        )
    told = [[e["step"] for e in events if e["event"] == "checkpoint"] for events in runs.values()]
    assert told == [[2, 4], [2, 4]]
    result, result_too = (Path(last(events, "result")["saved"]) for events in runs.values())
    assert equal(weights(result), weights(result_too))
    assert not list(two.glob(".saving-*"))

    expected = weights(result_too)
    shutil.rmtree(result_too)
    again = json_events(
        ok(invoke("--json", "resume=latest", f"output_dir={two}", "save_in_background=false"))
    )
    assert again[0]["step"] == 4
    assert equal(weights(result_too), expected)


def test_old_ones_go_and_the_newest_is_whole_when_the_run_ends(tmp_path):
    finetune(
        "model=tiny", "data=texts", "steps=6", "save_steps=1", "save_total_limit=2", "save_in_background=yes",
        f"output_dir={tmp_path}/run",
    )  # fmt: skip
    found = checkpoints(tmp_path / "run")
    assert [path.name for path in found] == ["checkpoint-4", "checkpoint-5"]
    assert [read_state(path).data["step"] for path in found] == [4, 5]


@pytest.mark.parametrize("bound", ["true", "0"])
def test_a_full_disk_is_named_and_the_one_before_is_whole(tmp_path, monkeypatch, bound):
    from ts_hf import background

    write, calls = background.write_file, []

    def full(tensors, path, *args):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(tensors, path, *args)

    monkeypatch.setattr(background, "write_file", full)
    run = tmp_path / "run"
    words = ["model=tiny", "data=texts", "steps=6", "save_steps=1", f"save_in_background={bound}"]
    result = invoke(*QUICK, *words, f"output_dir={run}")
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert f"cannot write {run}/checkpoint-2" in result.stderr
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1"]
    read_state(run / "checkpoint-1")
    assert not list(run.glob(".saving-*"))


def test_what_it_accepts():
    given = {"true": True, "no": False, "2GiB": 2 << 30, "0": 0, 4096: 4096, None: False, True: True}
    for value, wanted in given.items():
        found = merge({"save_in_background": value}).save_in_background
        assert (found, type(found)) == (wanted, type(wanted))
    for value in ("later", -1, [1]):
        with pytest.raises(OptionError, match="save_in_background"):
            merge({"save_in_background": value})
