import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainstream import _folders
from trainstream._folders import discard_folder, replace_folder, sweep, write_folder
from trainstream.cli import storage
from trainstream.cli.storage import checkpoints, flatten, latest, prune, read_state, unflatten, write_state
from ts_core.errors import CheckpointError

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(torch.tensor),
    st.integers(0, 3).map(lambda n: torch.arange(n, dtype=torch.bfloat16).reshape(1, n)),
)
_KEYS = st.one_of(st.integers(), st.text(max_size=4), st.tuples(st.integers(), st.integers()))
_STATES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(_STATES)
def test_nested_state_survives(state):
    tree, tensors = flatten(state)
    assert same(unflatten(json.loads(json.dumps(tree)), tensors), state)


_TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=6)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=6), x, max_size=2)),
    max_leaves=6,
)


@given(_TREES)
def test_malformed_trees_are_refused_or_harmless(tree):
    with contextlib.suppress(CheckpointError, TypeError, ValueError):
        unflatten(tree, {})


def test_state_that_needs_pickle_is_refused():
    with pytest.raises(CheckpointError, match="pickle"):
        flatten({"a": object()})


def make(folder, step, value):
    final = folder / f"checkpoint-{step}"

    def write(staging):
        (staging / "weights").write_text(value)
        write_state(staging, {"step": step, "value": value}, {"t": torch.ones(3) * step})

    write_folder(final, write)
    return final


def test_checkpoints_are_read_back_and_found(tmp_path):
    for step in (5, 10, 9):
        make(tmp_path, step, f"v{step}")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-9", "checkpoint-10"]
    read = read_state(latest(tmp_path))
    assert (read.data["step"], read.state["t"].tolist()) == (10, [10.0] * 3)
    assert latest(tmp_path / "checkpoint-5") == tmp_path / "checkpoint-5"
    assert latest(tmp_path.parent).name == "checkpoint-10"
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    make(tmp_path, 3, "old")
    make(tmp_path, 3, "new")
    assert read_state(tmp_path / "checkpoint-3").data["value"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_failing_save_leaves_nothing(tmp_path):
    make(tmp_path, 3, "old")

    def write(staging):
        (staging / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder(tmp_path / "checkpoint-4", write)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


# Run in a process that loads nothing but the module under test, and is killed at one moment of a save.
KILLED_SAVE = """
import os, pathlib, runpy, shutil, signal, sys
module, final, made, moment = map(str, sys.argv[1:])
final, made = pathlib.Path(final), pathlib.Path(made)
names = runpy.run_path(module)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

renames = {"before the old one moves": 1, "before the new one moves": 2, "before the old one goes": 3}
real, count = pathlib.Path.rename, [0]

def rename(self, target):
    count[0] += 1
    if count[0] == renames.get(moment):
        die()
    return real(self, target)

pathlib.Path.rename = rename

def write(staging):
    for done, path in enumerate(sorted(made.iterdir())):
        if moment == f"after {done} files":
            die()
        shutil.copyfile(path, staging / path.name)
    if moment == "before syncing":
        die()

names["write_folder"](final, write)
"""
MOMENTS = [
    "after 0 files", "after 1 files", "after 2 files", "before syncing", "before the old one moves",
    "before the new one moves", "before the old one goes",
]  # fmt: skip


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_killed_at_any_moment_keeps_a_complete_checkpoint(tmp_path, moment, same_step):
    run = tmp_path / "run"
    make(run, 3, "old")
    step = 3 if same_step else 4
    made = make(tmp_path / "elsewhere", step, "new")
    final = run / f"checkpoint-{step}"
    arguments = [_folders.__file__, str(final), str(made), moment]
    killed = subprocess.run([sys.executable, "-S", "-c", KILLED_SAVE, *arguments], check=False)
    assert killed.returncode in (-signal.SIGKILL, 0)
    assert read_state(latest(run)).data["value"] in ("old", "new")
    make(run, step, "again")
    assert read_state(latest(run)).data["value"] == "again"
    sweep(run)
    assert all(path.name.startswith("checkpoint-") for path in run.iterdir())


def test_living_processes_keep_their_folders_and_links_are_left_alone(tmp_path):
    alive = tmp_path / f".saving-{os.getppid()}-x"
    dead = tmp_path / ".saving-999999999-x"
    target = tmp_path / "precious"
    for folder in (alive, dead, target):
        folder.mkdir()
    (tmp_path / ".saving-999999998-link").symlink_to(target)
    sweep(tmp_path)
    assert alive.is_dir()
    assert not dead.exists()
    assert target.is_dir()
    sweep(tmp_path / "missing")


def test_an_interrupted_replacement_is_finished(tmp_path):
    (make(tmp_path, 3, "old")).rename(tmp_path / "checkpoint-3.old")
    assert latest(tmp_path).name == "checkpoint-3"
    make(tmp_path, 4, "new")
    (tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-5")
    (tmp_path / "staged").mkdir()
    replace_folder(tmp_path / "staged", tmp_path / "checkpoint-5")
    assert not any((tmp_path / "checkpoint-5").iterdir())
    discard_folder(tmp_path / "checkpoint-5")
    discard_folder(tmp_path / "checkpoint-5")


@pytest.mark.parametrize("damage", ["missing", "truncated", "json", "format", "keys", "tensors", "empty"])
def test_damaged_checkpoints_are_named(tmp_path, damage):
    folder = make(tmp_path, 3, "old")
    state = folder / storage.STATE_FILE
    content = json.loads(state.read_text())
    if damage == "missing":
        (folder / "weights").unlink()
    elif damage == "truncated":
        (folder / "weights").write_text("o")
    elif damage == "json":
        state.write_text('{"format": 1, ')
    elif damage == "format":
        state.write_text(json.dumps({**content, "format": 99}))
    elif damage == "keys":
        state.write_text(json.dumps({"format": 1}))
    elif damage == "tensors":
        path = folder / storage.TENSOR_FILE
        path.write_bytes(b"\xff" * path.stat().st_size)
    else:
        state.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-3"):
        read_state(folder)


def test_no_checkpoint_is_said_plainly(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        latest(tmp_path)
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_hidden_replacement_leaves_folders_of_others(tmp_path):
    for name, text in (("base", "before"), ("base.old", "mine"), (".base.old", "of a save that died")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text)
    write_folder(tmp_path / "base", lambda folder: (folder / "a").write_text("new"), hidden=True)
    found = {path.name: (path / "a").read_text() for path in tmp_path.iterdir()}
    assert found == {"base": "new", "base.old": "mine"}
