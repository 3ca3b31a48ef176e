"""Folders of shards that contradict their index, and where a name leads to."""

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.errors import ArgumentTypeError, CheckpointError, StorageError
from ts_hf import load_model
from ts_hf.checkpoint import Checkpoint, resolve

INDEX = "model.safetensors.index.json"


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder, change):
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def delete_shard(folder):
    shards(folder)[1].unlink()
    return shards(folder)[0].name.replace("00001-of", "00002-of")


def truncate_shard(folder):
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-6])
    return path.name


def name_a_tensor_that_is_nowhere(folder):
    name = shards(folder)[0].name
    edit_index(folder, lambda weights: weights.update({"model.layers.9.ghost.weight": name}))
    return name


def forget_a_tensor(folder):
    gone = {}
    edit_index(folder, lambda weights: gone.update([weights.popitem()]))
    return next(iter(gone.values()))


def repeat_a_tensor(folder):
    first, second = shards(folder)[:2]
    tensors = safetensors.torch.load_file(second)
    name, tensor = next(iter(safetensors.torch.load_file(first).items()))
    safetensors.torch.save_file({**tensors, name: tensor}, second)
    return second.name


def move_a_tensor(folder):
    names = [path.name for path in shards(folder)]
    moved = {}

    def change(weights):
        key = next(key for key, file in weights.items() if file == names[0])
        moved[key] = weights[key] = names[1]

    edit_index(folder, change)
    return names[0]


FAULTS = [
    delete_shard,
    truncate_shard,
    name_a_tensor_that_is_nowhere,
    forget_a_tensor,
    repeat_a_tensor,
    move_a_tensor,
]


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("fault", FAULTS)
def test_contradicting_shards_are_refused_by_file_name(fault, quantize, llama_folder):
    named = fault(llama_folder)
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        load_model(llama_folder, quantize=quantize, dtype="fp32")
    with pytest.raises(CheckpointError, match=named.replace(".", r"\.")):
        Checkpoint(llama_folder)


def test_unrelated_files_beside_an_index_are_ignored(llama_folder):
    (llama_folder / "adapter.safetensors").write_bytes(b"garbage")
    safetensors.torch.save_file({"model.norm.weight": torch.zeros(3)}, llama_folder / "other.safetensors")
    with Checkpoint(llama_folder) as checkpoint:
        assert len(checkpoint.files) == len(shards(llama_folder))
        assert checkpoint.info("model.norm.weight").shape == (32,)
    load_model(llama_folder, quantize=None)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "",
    "C:x.safetensors", 5, None,
     "a\0.safetensors", "model.bin", "\ud800.safetensors"],
)  # fmt: skip
def test_shard_names_must_be_plain_file_names(name, llama_folder):
    edit_index(llama_folder, lambda weights: weights.update({next(iter(weights)): name}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint(llama_folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 50_000]
)
def test_index_that_is_no_index(content, llama_folder):
    (llama_folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint(llama_folder)


def test_pickle_is_never_loaded_and_the_message_says_so(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle file"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="pickle"):
        load_model(tmp_path, quantize=None)
    assert not Path("pwned").exists()


def test_folder_without_weights_or_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="neither model"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "none")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_any_division_into_shards_reads_the_same(tmp_path, division):
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors = {f"t{index}": torch.full((index + 1,), float(index)) for index in range(len(division))}
    weight_map = {}
    for shard in set(division):
        mine = {
            name: tensors[name] for name, number in zip(tensors, division, strict=True) if number == shard
        }
        safetensors.torch.save_file(mine, folder / f"part{shard}.safetensors")
        weight_map.update(dict.fromkeys(mine, f"part{shard}.safetensors"))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint(folder) as checkpoint:
        assert set(checkpoint.keys()) == set(checkpoint) == set(tensors)
        assert checkpoint.nbytes == sum(4 * tensor.numel() for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert checkpoint.file_of(name).name == weight_map[name]
            assert name in checkpoint
        with pytest.raises(CheckpointError, match="no tensor"):
            checkpoint.read("absent")


def test_resolve_local_places(tmp_path, monkeypatch):
    assert resolve(tmp_path).kind == "folder"
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    found = resolve(str(gguf))
    assert (found.kind, found.path) == ("gguf", gguf)
    other = tmp_path / "m.bin"
    other.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="neither"):
        resolve(other)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~").path == tmp_path


@pytest.mark.parametrize(
    "name", ["./none", "/none/at/all", "a/b/c", "model.gguf", "sub/model.safetensors", "", "a b"]
)
def test_resolve_what_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name:
        with pytest.raises(CheckpointError, match="no such folder or file"):
            resolve(name)
    with pytest.raises(CheckpointError):
        resolve(tmp_path / "x")
    with pytest.raises(ArgumentTypeError):
        resolve(5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trust=st.booleans(), weights=st.booleans())
def test_hub_download_asks_for_no_code_and_no_pickle(monkeypatch, tmp_path, trust, weights):
    asked = {}

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked.update(name=name, allow=allow_patterns, ignore=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    monkeypatch.chdir(tmp_path)
    found = resolve("some/model", trust_remote_code=trust, weights=weights)
    assert found.path == tmp_path
    assert ("*.py" in asked["allow"]) == trust
    assert ("*.safetensors" in asked["allow"]) == weights
    assert not any(pattern.endswith((".bin", ".pt", ".pth", ".pkl", "*")) for pattern in asked["allow"])


def test_hub_failure_is_named(monkeypatch, tmp_path):
    def snapshot_download(name, **_):
        raise OSError("no route\nmore")

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=r"'some/model' is no folder.*no route$"):
        resolve("some/model")
