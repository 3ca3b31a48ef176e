"""Weights in files from the start: the same model as without, and never in RAM as a whole."""

import copy
import gc
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from conftest import tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import CheckpointError, OptionError, StorageError
from ts_core.testing import assert_bit_equal
from ts_hf import load_model, offload
from ts_hf.offload import FileHome, file_bytes, open_files, ram_limit
from ts_paging import _C
from ts_paging.files import FileTensors
from ts_quant import QuantizedTensor

CODECS = ["none", "int8", "nf4"]


def leftovers(folder):
    gc.collect()
    return sorted(path.name for path in folder.glob("trainstream-*"))


def packed_or_plain(parameter):
    if isinstance(parameter, QuantizedTensor):
        return dict(parameter.packed)
    return {"": parameter.detach()}


def assert_same(model, reference, ids):
    with torch.no_grad():
        assert_bit_equal(model(ids).logits, reference(ids).logits)
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert ours[name].requires_grad == parameter.requires_grad, name
        mine, other = packed_or_plain(ours[name]), packed_or_plain(parameter)
        assert mine.keys() == other.keys(), name
        for key in other:
            assert_bit_equal(mine[key], other[key])


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", 4096)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "fp32"), ("llama", "bf16"), ("gpt2", "fp32"), ("gemma2", "fp32"), ("mixtral", "bf16")],
)
def test_a_folder_is_read_into_files(tmp_path, kind, dtype, codec, ids):
    tiny_model(kind).save_pretrained(tmp_path / "model")
    (tmp_path / "files").mkdir()
    reference = load_model(tmp_path / "model", quantize=codec, dtype=dtype)
    model = load_model(tmp_path / "model", quantize=codec, dtype=dtype, disk_offload=tmp_path / "files")
    assert_same(model, reference, ids)
    for name, parameter in model.named_parameters():
        inside = ".layers." in name or ".h." in name
        if inside or parameter.numel() * parameter.dtype.itemsize >= 4096:
            assert file_bytes(parameter) > 0, name
        else:
            assert file_bytes(parameter) == 0, name
    receipt = model.trainstream_receipt
    filed = sum(file_bytes(p) for p in model.parameters())
    assert receipt["file_bytes"] == filed <= receipt["bytes_after"]
    assert filed > 0.9 * receipt["bytes_after"]
    assert reference.trainstream_receipt["file_bytes"] == 0
    files = model.trainstream_files
    assert files.used_bytes + files.adopted_bytes >= filed
    assert receipt["adopted_bytes"] == files.adopted_bytes
    assert reference.trainstream_receipt["adopted_bytes"] == 0
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype] is torch.float32
    assert (files.adopted_bytes > 0) == stored
    del files
    assert len(leftovers(tmp_path / "files")) == 1
    del model, parameter
    assert leftovers(tmp_path / "files") == []


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_random_weights_are_drawn_into_files(tmp_path, kind, codec, ids):
    config = tiny_config(kind, tie_word_embeddings=kind == "gpt2")
    models = []
    for files in (None, tmp_path):
        torch.manual_seed(5)
        models.append(
            load_model(config, quantize=codec, dtype="fp32", random_weights=True, disk_offload=files)
        )
    assert_same(models[1], models[0], ids)
    assert models[1].trainstream_receipt["file_bytes"] > 0
    if kind == "gpt2":
        assert models[1].lm_head.weight is models[1].transformer.wte.weight


@pytest.mark.parametrize("why", ["elsewhere", "no mappings", "no page map"])
def test_a_checkpoint_that_cannot_be_adopted_is_copied(tmp_path, llama_folder, monkeypatch, ids, why):
    def refuse(*_):
        raise StorageError(19, "no mappings here", "file")

    if why == "elsewhere":
        monkeypatch.setattr(FileHome, "_beside", lambda self, path: False)
    elif why == "no mappings":
        monkeypatch.setattr(FileTensors, "adopt", refuse)
    else:
        monkeypatch.setattr(_C, "was_written", lambda tensor: True)
    model = load_model(llama_folder, quantize=None, dtype="fp32", disk_offload=tmp_path)
    receipt = model.trainstream_receipt
    gc.collect()
    assert receipt["adopted_bytes"] == 0 < receipt["file_bytes"] <= model.trainstream_files.used_bytes
    assert_same(model, load_model(llama_folder, quantize=None, dtype="fp32"), ids)


def test_a_checkpoint_may_be_replaced_under_the_model(tmp_path, ids):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    reference = load_model(folder, quantize=None, dtype="fp32")
    model = load_model(folder, quantize=None, dtype="fp32", disk_offload=tmp_path)
    weight = model.model.layers[0].mlp.up_proj.weight
    key = model.trainstream_files.key_of(weight.detach())
    for path in folder.glob("*.safetensors"):
        other = path.with_suffix(".new")
        other.write_bytes(b"x" * path.stat().st_size)
        other.replace(path)
    assert_same(model, reference, ids)
    out = torch.empty_like(weight)
    model.trainstream_files.read_async(key, out.detach()).wait()
    assert_bit_equal(out.detach(), weight.detach())


def test_a_gguf_file_is_read_into_files(tmp_path, monkeypatch, ids):
    from ts_hf import gguf, loading

    tiny_model().save_pretrained(tmp_path / "model")
    # What a GGUF file becomes is a folder; the decoding has tests of its own.
    monkeypatch.setattr(gguf, "converted_folder", lambda path, dtype: tmp_path / "model")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    model = loading.load_model(path, quantize="none", dtype="fp32", disk_offload=tmp_path)
    assert_same(model, load_model(tmp_path / "model", quantize="none", dtype="fp32"), ids)
    assert model.trainstream_receipt["file_bytes"] > 0


def test_a_copy_of_the_model_is_in_ram_and_shares_nothing(tmp_path, llama_folder, ids):
    model = load_model(llama_folder, quantize=None, dtype="fp32", disk_offload=tmp_path)
    twin = copy.deepcopy(model)
    assert twin.trainstream_files is model.trainstream_files
    assert all(file_bytes(p) == 0 for p in twin.parameters())
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert twin(ids).logits.abs().sum() > 0


def test_it_trains(tmp_path, llama_folder, ids):
    shards = {path: path.read_bytes() for path in llama_folder.glob("*.safetensors")}
    model = load_model(llama_folder, quantize=None, dtype="fp32", disk_offload=tmp_path).train()
    twin = load_model(llama_folder, quantize=None, dtype="fp32").train()
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(ids, labels=ids).loss.backward()
        optimizer.step()
    assert_same(model, twin, ids)
    assert file_bytes(model.lm_head.weight) == 0  # what was written is this process's own
    assert shards == {path: path.read_bytes() for path in shards}


def test_files_of_the_callers_own_and_auto(tmp_path, llama_folder):
    files = FileTensors(tmp_path)
    model = load_model(llama_folder, quantize="auto", ram_fraction=0.0, dtype="fp32", disk_offload=files)
    assert model.trainstream_files is files
    receipt = model.trainstream_receipt
    assert (receipt["quantize"], receipt["reason"]) == (None, "the weights are in files")


def test_the_environments_budget_is_respected(tmp_path, llama_folder, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_RAM", "1KiB")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = load_model(llama_folder, quantize=None, dtype="fp32")
    assert model.trainstream_receipt["file_bytes"] > 0
    assert model.trainstream_files.directory.startswith(str(tmp_path))
    monkeypatch.setenv("TRAINSTREAM_RAM", "1GiB")
    assert not hasattr(load_model(llama_folder, quantize=None, dtype="fp32"), "trainstream_files")
    monkeypatch.setenv("TRAINSTREAM_DISK", "20KB")
    with pytest.raises(StorageError, match="budget"):
        load_model(llama_folder, quantize=None, dtype="bf16", disk_offload=tmp_path)
    model = load_model(llama_folder, quantize=None, dtype="fp32", disk_offload=tmp_path)
    assert model.trainstream_files.adopted_bytes > 20_000 > model.trainstream_files.used_bytes
    monkeypatch.setenv("TRAINSTREAM_RAM", "much")
    with pytest.raises(OptionError, match="TRAINSTREAM_RAM"):
        ram_limit()


def test_bad_values_and_damaged_checkpoints_leave_no_files(tmp_path, llama_folder, monkeypatch):
    (tmp_path / "files").mkdir()
    with pytest.raises(OptionError, match="disk_offload"):
        load_model(llama_folder, disk_offload=3)
    with pytest.raises(StorageError, match="nowhere"):
        load_model(llama_folder, disk_offload=tmp_path / "nowhere")
    shard = sorted(llama_folder.glob("*.safetensors"))[-1]
    content = safetensors.torch.load_file(shard)
    name = next(iter(content))
    content[name] = torch.zeros(3, 3)
    safetensors.torch.save_file(content, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match="shape"):
        load_model(llama_folder, quantize=None, disk_offload=tmp_path / "files")
    assert leftovers(tmp_path / "files") == []
    monkeypatch.setattr("ts_hf.loading._device_option", lambda value: torch.device("cuda"))
    with pytest.raises(OptionError, match="disk_offload with device"):
        load_model(llama_folder, disk_offload=tmp_path, device="cuda")


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    outside=st.booleans(),
)
def test_what_lives_in_files(shape, dtype, outside, tmp_path_factory):
    files = open_files(tmp_path_factory.mktemp("files"))
    home = FileHome(files, frozenset(["w"] if outside else []))
    tensor = torch.ones(shape, dtype=dtype)
    placed = home.place("w", tensor)
    expected = dtype.is_floating_point and tensor.numel() > 0 and (not outside or tensor.nbytes >= 4096)
    assert (file_bytes(placed) == tensor.nbytes > 0) == expected == home.wants("w", tensor.shape, dtype)
    assert torch.equal(placed, tensor)
    assert home.place("w", placed) is placed
    reserved = home.reserve("w", tensor.shape, dtype)
    assert (reserved is not None) == expected
    assert reserved is None or not reserved.any()
    files.close()


MEMORY = """
import gc, json, sys, torch
from transformers import LlamaConfig
from ts_core.usage import PeakSampler, host_usage
from ts_hf import load_model, save_model

torch.set_num_threads(1)
(folder,) = sys.argv[1:]
config = LlamaConfig(vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
                     num_attention_heads=8, num_key_value_heads=8)
import transformers.models.llama.modeling_llama, transformers.core_model_loading
gc.collect()
peaks = {}
def measure(name, act):
    base = host_usage().used_bytes
    with PeakSampler(0.001) as sampler:
        result = act()
    peaks[name] = sampler.peak_bytes - base
    return result
model = measure("random", lambda: load_model(
    config, random_weights=True, dtype="fp32", quantize=None, disk_offload=folder))
peaks["model"] = sum(p.numel() * 4 for p in model.parameters())
peaks["tensor"] = max(p.numel() * 4 for p in model.parameters())
measure("save", lambda: save_model(model, folder + "/model", max_shard_size="50MB"))
del model
gc.collect()
model = measure("read", lambda: load_model(
    folder + "/model", dtype="fp32", quantize=None, disk_offload=folder))
del model
gc.collect()
for codec in ("none", "nf4"):
    model = measure("bf16 " + codec, lambda: load_model(
        folder + "/model", dtype="bf16", quantize=codec, disk_offload=folder))
    del model
    gc.collect()
print(json.dumps(peaks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ram_never_holds_the_model(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    peaks = json.loads(ran.stdout.splitlines()[-1])
    assert peaks["model"] > 200e6
    for name in ("random", "read", "save"):
        assert peaks[name] < 8 << 20, peaks  # straight into the files, and out of them
    # One tensor as it is stored; packing holds its cast and its packed form too.
    assert peaks["bf16 none"] < peaks["tensor"] + (8 << 20), peaks
    assert peaks["bf16 nf4"] < 3 * peaks["tensor"], peaks
