"""`load_model(keep_precise=...)`: what `quantize_model` chooses, of a model that memory never holds."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import tiny_config
from test_loading import PEAK, save, tiny_model

from ts_core.errors import CheckpointError, OptionError
from ts_core.testing import assert_bit_equal, devices
from ts_hf import Checkpoint, load_model
from ts_paging.files import locate
from ts_quant import QuantizedTensor, quantize_model
from ts_quant.codecs import resolve


def uneven(kind="llama", **sizes):
    """A tiny model whose matrices differ in how much they lose: some have outliers."""
    model = tiny_model(kind, num_hidden_layers=3, **sizes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() >= 2):
            spikes = torch.rand(parameter.shape, generator=generator) < 0.2 * torch.rand(
                (), generator=generator
            )
            parameter += spikes * 3 * parameter.abs().max()
    return model


def packed_of(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def assert_same_packing(ours, theirs):
    mine, other = packed_of(ours), packed_of(theirs)
    assert mine.keys() == other.keys()
    for name, weight in other.items():
        assert (mine[name].codec, mine[name].meta) == (weight.codec, weight.meta), name
        for part, tensor in weight.packed.items():
            assert_bit_equal(mine[name].packed[part], tensor)
        for got, want in zip(mine[name].error_factors or (), weight.error_factors or (), strict=True):
            assert_bit_equal(got, want)


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("llama", "nf4", {}),
        ("llama", "nf4", {"error_rank": 2, "error_iters": 2, "double_quant": True}),
        ("llama", "nvfp4", {}),
        ("gpt2", "nf4", {}),
        ("mixtral", "nf4", {}),
        ("qwen3_moe", "nvfp4", {}),
    ],
)
@pytest.mark.parametrize("in_files", [False, True])
def test_equals_quantize_model(kind, codec, options, in_files, tmp_path):
    """The same matrices, bit for bit, and what is chosen needs no more than the bytes granted."""
    # Quantized scales of nf4 come with a table: of tiny matrices it is most of the bytes.
    sizes = {"hidden_size": 64, "intermediate_size": 256} if "double_quant" in options else {}
    folder = save(uneven(kind, **sizes), tmp_path / "model", max_shard_size="20KB")
    theirs = load_model(folder, quantize=None).requires_grad_(False)
    report = quantize_model(theirs, codec, keep_precise=0.3, **options)
    assert 0 < report["kept_precise"] < report["tensors"]
    disk = tmp_path if in_files else None
    ours = load_model(folder, codec, keep_precise=0.3, disk_offload=disk, **options)
    assert_same_packing(ours, theirs)
    packed = packed_of(ours)
    receipt = ours.trainstream_receipt
    assert receipt["kept_precise"] == report["kept_precise"]
    assert receipt["formats"] == dict(Counter(weight.codec for weight in packed.values()))
    above = resolve({"nf4": "int8", "nvfp4": "fp8"}[codec])
    assert receipt["formats"][above] == report["kept_precise"]
    plain = load_model(folder, codec, **options)
    granted = 0.3 * sum(weight.packed_bytes for weight in packed_of(plain).values())
    extra = receipt["bytes_after"] - plain.trainstream_receipt["bytes_after"]
    assert 0 < extra <= granted
    if in_files:
        parts = [part for weight in packed.values() for part in weight.packed.values()]
        assert all(locate(part) is not None for part in parts)
        assert receipt["file_bytes"] >= sum(part.nbytes for part in parts)


@pytest.mark.parametrize("device", devices())
def test_on_each_device(device, tmp_path):
    folder = save(uneven(), tmp_path)
    theirs = load_model(folder, quantize=None).requires_grad_(False)
    quantize_model(theirs, "nf4", keep_precise=0.3)
    assert_same_packing(load_model(folder, "nf4", keep_precise=0.3, device=device).cpu(), theirs)


def test_only_what_moves_up_is_read_again(tmp_path, monkeypatch):
    folder = save(uneven(), tmp_path)
    reads = Counter()
    read = Checkpoint.read

    def counted(self, key, **where):
        reads[key] += 1
        return read(self, key, **where)

    monkeypatch.setattr(Checkpoint, "read", counted)
    model = load_model(folder, "nf4", keep_precise=0.3)
    above = {name for name, weight in packed_of(model).items() if weight.codec == "int8"}
    assert above
    assert {name for name, count in reads.items() if count == 2} == above
    assert max(reads.values()) == 2


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_random_weights_are_drawn_once_more(kind):
    config = tiny_config(kind, num_hidden_layers=3)
    made = []
    for options in ({"quantize": None}, {"quantize": "nf4", "keep_precise": "auto"}):
        torch.manual_seed(3)
        made.append(load_model(config, random_weights=True, **options))
        made.append(torch.rand(1))
    theirs = made[0].requires_grad_(False)
    report = quantize_model(theirs, "nf4", keep_precise="auto")
    assert report["kept_precise"]
    assert_same_packing(made[2], theirs)
    assert torch.equal(made[1], made[3]), "the generator is where it is without the option"


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int8", "keep_precise=0.05 ignored: int8 has no codec above it"),
        ("fp8_row", "keep_precise=0.05 ignored: fp8_row has no codec above it"),
        (None, "keep_precise=0.05 ignored: nothing is packed"),
        ("auto", "keep_precise=0.05 ignored: nothing is packed"),
    ],
)
def test_where_nothing_can_move_up_the_receipt_says_so(codec, words, llama_folder):
    receipt = load_model(llama_folder, codec, keep_precise=True).trainstream_receipt
    assert words in receipt["reason"]
    assert receipt["kept_precise"] == 0


@pytest.mark.parametrize("value", [0.51, -0.1, "some", float("nan"), 1])
def test_bad_shares(value, llama_folder):
    with pytest.raises(OptionError, match="keep_precise"):
        load_model(llama_folder, "nf4", keep_precise=value)


def test_nan_names_the_weight_and_the_file(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    folder = save(model, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors.*layers\.1\.mlp\.up_proj\.weight: expected"
    ):
        load_model(folder, "nf4", keep_precise=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")  # noqa: PTH110
def test_peak_memory_is_the_packed_model_and_a_few_tensors(tmp_path):
    """Measuring takes one tensor in fp32, two encodings and what the allocator leaves between them.

    Without care it is holes as large as a layer decoded for every layer, six times the packed model here.
    """
    small = save(uneven(), tmp_path / "small")
    heads = {"head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 2048}
    torch.manual_seed(0)
    model = load_model(tiny_config(**sizes, **heads), quantize=None, random_weights=True)
    folder = save(model, tmp_path / "large", max_shard_size="70MB")
    del model
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(small), "nf4", "0.2"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["checkpoint_bytes"] > 190e6
    assert result["kept_precise"] > 0
    values = 4096 * 1024
    assert result["peak"] <= 1.1 * result["bytes_after"] + 4 * 4 * values, result
