"""The streaming writer against the safetensors package and transformers' save_pretrained."""

import json
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import ts_quant
from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.guard import guard, guard_of, release
from ts_core.testing import devices
from ts_hf import load_model, save_model, save_safetensors, saving
from ts_hf.safetensors_reader import STORED_NAMES
from ts_paging.files import FileTensors

DTYPES = list(STORED_NAMES)


def drawn(data, dtype, shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(data.draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@given(data=st.data())
def test_files_are_those_of_the_reference_byte_for_byte(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    names = data.draw(st.lists(st.text(max_size=6), unique=True, max_size=5))
    names = [name for name in names if name != "__metadata__" and name.isprintable()]
    tensors = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        tensors[name] = drawn(data, data.draw(st.sampled_from(DTYPES)), shape)
    key = data.draw(st.sampled_from([None, "format"]))
    metadata = {key: "pt"} if key else None
    size = save_safetensors(tensors, folder / "ours", metadata)
    safetensors.torch.save_file(tensors, folder / "theirs", metadata)
    written = (folder / "ours").read_bytes()
    assert size == len(written)
    assert written == (folder / "theirs").read_bytes()
    loaded = safetensors.torch.load_file(folder / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw_bytes(loaded[name]), raw_bytes(tensor))


@pytest.mark.parametrize("device", devices())
def test_views_packed_mapped_and_guarded_tensors_are_written_as_their_values(tmp_path, device):
    base = torch.arange(24.0, device=device).reshape(4, 6)
    packed = ts_quant.quantize(torch.randn(8, 64, device=device), "nf4")
    files = FileTensors(tmp_path)
    tensors = {
        "transposed": base.t(),
        "columns": torch.arange(24.0, device=device).reshape(4, 6)[:, ::2],
        "expanded": torch.ones(3, 1, device=device).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64, device=device).conj(),
        "scalar": torch.tensor(3, device=device),
        "mapped": files.place(torch.randn(5, 7)),
        "parameter": torch.nn.Parameter(torch.randn(3, device=device)),
        "packed": packed,
    }
    save_safetensors(tensors, tmp_path / "file")
    loaded = safetensors.torch.load_file(tmp_path / "file")
    for name, tensor in tensors.items():
        expected = packed.dequantize() if name == "packed" else tensor.detach().resolve_conj()
        assert torch.equal(loaded[name], expected.cpu()), name
    files.close()


def test_a_guarded_parameter_is_waited_for_and_nothing_else_happens_to_it(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(4))
    entry = guard(parameter, lambda *_: None)
    done = threading.Event()

    def pending():
        done.set()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            parameter.fill_(7)

    entry.pending = pending
    save_safetensors({"w": parameter}, tmp_path / "file")
    assert done.is_set()
    assert not guard_of(parameter).escaped
    assert safetensors.torch.load_file(tmp_path / "file")["w"].tolist() == [7.0] * 4
    release(parameter)


def test_what_cannot_be_written_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "file"
    save_safetensors({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    whole = torch.arange(8.0)
    for tensors, error, says in [
        ({"a": whole, "b": whole}, ArgumentError, "'a' and 'b'"),
        ({"a": whole[:5], "b": whole[4:]}, ArgumentError, "share memory"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, ArgumentTypeError, "complex128"),
        ({"a": torch.ones(2, device="meta")}, ArgumentError, "meta"),
        ({"a": torch.ones(2).to_sparse()}, ArgumentTypeError, "sparse"),
        ({"a": [1.0]}, ArgumentTypeError, "list"),
        ({"__metadata__": torch.ones(2)}, ArgumentError, "__metadata__"),
        ({1: torch.ones(2)}, ArgumentTypeError, "texts"),
    ]:
        with pytest.raises(error, match=says):
            save_safetensors(tensors, path)
    with pytest.raises(ArgumentTypeError, match="metadata"):
        save_safetensors({}, path, {"a": 1})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    save_safetensors({"a": whole[:4], "b": whole[4:]}, path)  # apart from each other
    assert safetensors.torch.load_file(path)["b"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file"
    save_safetensors({"w": torch.ones(2)}, path)
    before = path.read_bytes()

    def full(file, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensor", full)
    with pytest.raises(OSError, match="No space"):
        save_safetensors({"w": torch.zeros(2)}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# --------------------------------------------------------------------------------------- whole models


def folder_content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("shard", ["5GB", "20KB", 9_000])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_models_are_saved_as_save_pretrained_does(tmp_path, kind, shard):
    model = tiny_model(kind)
    written = save_model(model, tmp_path / "ours", max_shard_size=shard)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    ours, theirs = folder_content(tmp_path / "ours"), folder_content(tmp_path / "theirs")
    if kind == "mixtral" and shard != "5GB":  # experts are cut by size here, there by the matrix they came of
        stored = [{}, {}]
        for place, content in zip(("ours", "theirs"), stored, strict=True):
            for path in (tmp_path / place).glob("*.safetensors"):
                content.update(safetensors.torch.load_file(path))
        assert stored[0].keys() == stored[1].keys()
        assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        state = again.state_dict()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        return
    assert ours.keys() == theirs.keys()
    assert [path.name for path in written] == sorted(n for n in ours if n.endswith(".safetensors"))
    for name, content in theirs.items():
        assert ours[name] == content, name


def test_a_loaded_mixture_is_saved_in_its_original_layout(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "original")
    model = load_model(tmp_path / "original", quantize=None, dtype="fp32")
    save_model(model, tmp_path / "again")
    first = safetensors.torch.load_file(tmp_path / "original/model.safetensors")
    again = safetensors.torch.load_file(tmp_path / "again/model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_packed_weights_of_a_model_are_saved_decoded(tmp_path, llama_folder, ids):
    model = load_model(llama_folder, quantize="nf4", dtype="fp32")
    (path,) = save_model(model, tmp_path / "out")
    assert path.name == "model.safetensors"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_tied_weights_are_written_once(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    save_model(model, tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_only_transformers_models_are_taken(tmp_path):
    with pytest.raises(ArgumentTypeError, match="Linear"):
        save_model(torch.nn.Linear(2, 2), tmp_path)


@given(sizes=st.lists(st.integers(0, 9), max_size=8), limit=st.integers(1, 12))
def test_shards_are_cut_as_the_hub_cuts_them(sizes, limit):
    from huggingface_hub import split_state_dict_into_shards_factory

    state = {f"w{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    expected = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor.numel(),
        filename_pattern="m{suffix}.safetensors",
        max_shard_size=limit,
    )
    ours = [set(shard) for shard in saving._split(state, limit) if shard]
    assert ours == [set(names) for names in expected.filename_to_tensors.values() if names]


def test_the_config_says_the_dtype_and_class(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.bfloat16)
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
