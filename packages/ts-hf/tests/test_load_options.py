"""What each option of load_model does, by what comes out of it."""

import json

import pytest
import torch
import transformers
from conftest import tiny_config, tiny_model
from test_keep_precise import assert_same_packing, packed_of, uneven

import ts_quant
from ts_core.errors import CheckpointError
from ts_core.testing import assert_bit_equal
from ts_hf import load_model

DTYPES = {
    torch.bfloat16: ("bf16", "bfloat16", torch.bfloat16),
    torch.float16: ("fp16", "float16", torch.float16),
    torch.float32: ("fp32", "float32", torch.float32),
}


@pytest.mark.parametrize(("dtype", "spelled"), [(d, s) for d, names in DTYPES.items() for s in names])
@pytest.mark.parametrize("codec", [None, "nf4", "nvfp4"])
def test_every_floating_weight_has_the_dtype(dtype, spelled, codec, llama_folder):
    model = load_model(llama_folder, codec, dtype=spelled)
    stock = dict(
        transformers.AutoModelForCausalLM.from_pretrained(llama_folder, dtype=dtype).named_parameters()
    )
    packed = packed_of(model)
    assert bool(packed) == (codec is not None)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype, name
        if name in packed:
            want = ts_quant.quantize(stock[name].detach(), codec).dequantize()
            assert want.dtype == dtype
            assert_bit_equal(parameter.dequantize(), want)
        else:
            assert_bit_equal(parameter, stock[name])
    assert model.config.dtype == model.dtype == dtype
    assert parse(model.trainstream_receipt["dtype"]) == dtype


def parse(name):
    return getattr(torch, name)


def test_the_dtype_is_bf16_unless_said_otherwise(llama_folder):
    assert load_model(llama_folder).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [2, 6, 32, 64, 128])
@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_a_scale_stands_for_so_many_values(codec, size, llama_folder):
    plain = dict(load_model(llama_folder, None).named_parameters())
    for name, weight in packed_of(load_model(llama_folder, codec, quant_block_size=size)).items():
        assert weight.packed["absmax"].numel() == -(-weight.numel() // size), name
        want = ts_quant.quantize(plain[name].detach(), codec, block_size=size)
        assert_bit_equal(weight.dequantize(), want.dequantize())


@pytest.mark.parametrize("codec", ["mxfp8", "fp8_row", "fp8_block", "nvfp4"])
def test_formats_with_scales_of_their_own_leave_the_block_size_aside(codec, llama_folder):
    made = [load_model(llama_folder, codec, quant_block_size=size) for size in (2, 64)]
    assert_same_packing(*made)


@pytest.mark.parametrize("value", [0, 0.0, False, None])
def test_ways_to_ask_for_no_precise_weights(value, llama_folder):
    model = load_model(llama_folder, "nf4", keep_precise=value)
    assert_same_packing(model, load_model(llama_folder, "nf4"))
    assert model.trainstream_receipt["kept_precise"] == 0


@pytest.mark.parametrize("value", [True, "auto"])
def test_the_usual_share_of_precise_weights_is_a_twentieth(value, tmp_path):
    uneven(num_attention_heads=4).save_pretrained(tmp_path)
    model, same = (load_model(tmp_path, "nf4", keep_precise=share) for share in (value, 0.05))
    assert_same_packing(model, same)
    assert model.trainstream_receipt["kept_precise"] > 0


def test_a_fit_lessens_the_error_and_more_rounds_lessen_it_further(tmp_path):
    uneven().save_pretrained(tmp_path)
    plain = dict(load_model(tmp_path, None, "fp32").named_parameters())

    def error(**options):
        lost = 0.0
        for name, weight in packed_of(load_model(tmp_path, "nf4", "fp32", **options)).items():
            first, second = weight.error_factors or (None, None)
            fit = 0.0 if first is None else fitted(first, second, weight.shape)
            lost += float((plain[name].detach() - weight.dequantize() - fit).square().sum())
        return lost

    none, small, large = error(), error(error_rank=2), error(error_rank=8)
    assert large < small < none
    assert error(error_rank=8, error_iters=5) < large


def fitted(first, second, shape):
    """The product of the two factors, whichever way round they are kept."""
    product = first @ second if first.shape[0] == shape[0] else second @ first
    assert product.shape == shape
    return product


@pytest.mark.parametrize(("codec", "bytes_each"), [("int8", 1.016), ("nf4", 0.516)])
def test_quantized_scales_take_a_byte_for_64_values(codec, bytes_each, tmp_path):
    tiny_model(hidden_size=256, intermediate_size=512, head_dim=64).save_pretrained(tmp_path)
    packed = packed_of(load_model(tmp_path, codec, double_quant=True))
    values, stored = (
        sum(count) for count in zip(*((w.numel(), w.packed_bytes) for w in packed.values()), strict=True)
    )
    table = 1024 * len(packed) if codec == "nf4" else 0  # bitsandbytes keeps its code book with each weight
    assert (stored - table) / values == pytest.approx(bytes_each, abs=0.001)


def test_ram_fraction_decides_what_auto_packs(llama_folder, monkeypatch):
    from ts_hf import loading

    whole = load_model(llama_folder, None).trainstream_receipt["bytes_after"]
    monkeypatch.setattr(loading, "_free_bytes", lambda: 2 * whole)
    chosen = {f: load_model(llama_folder, ram_fraction=f).trainstream_receipt for f in (0.85, 0.51, 0.49, 0)}
    assert {f: receipt["quantize"] for f, receipt in chosen.items()} == {
        0.85: None, 0.51: None, 0.49: "int8", 0: "nf4"
    }  # fmt: skip
    assert "only nf4 fits, beyond ram_fraction=0" in chosen[0]["reason"]


CODE = """
import pathlib, transformers
pathlib.Path({mark!r}).touch()
class Config(transformers.LlamaConfig):
    model_type = "own_code"
class Model(transformers.LlamaForCausalLM):
    config_class = Config
"""


@pytest.mark.parametrize("random", [False, True])
def test_code_of_a_checkpoint_runs_if_it_is_trusted(llama_folder, tmp_path, ids, random, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    expected = load_model(llama_folder, None, "fp32")
    path = llama_folder / "config.json"
    config = json.loads(path.read_text())
    config.update(
        model_type="own_code", architectures=["Model"],
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )  # fmt: skip
    path.write_text(json.dumps(config))
    mark = tmp_path / "ran"
    (llama_folder / "own.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_model(llama_folder, None, random_weights=random)
    assert not mark.exists()
    model = load_model(llama_folder, None, "fp32", trust_remote_code=True, random_weights=random)
    assert mark.exists()
    assert (type(model).__name__, model.config.model_type) == ("Model", "own_code")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits) is not random


def test_a_hub_id_is_read_from_the_cache_that_transformers_uses(tmp_path, monkeypatch, ids):
    import huggingface_hub.constants as constants

    folder = tmp_path / "models--some--model"
    model = tiny_model()
    model.save_pretrained(folder / "snapshots" / ("0" * 40), max_shard_size="20KB")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load_model("some/model", None, "fp32")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.trainstream_receipt["source"] == loaded.config.name_or_path == "some/model"


@pytest.mark.parametrize("source", ["folder", "config"])
def test_overrides_reach_weights_that_are_drawn(source, tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    model = load_model(
        tmp_path if source == "folder" else config, "nf4", random_weights=True, intermediate_size=64,
        attn_implementation="eager",
    )  # fmt: skip
    assert model.model.layers[0].mlp.up_proj.weight.shape == (64, 32)
    assert model.config._attn_implementation == "eager"
    assert config.intermediate_size == 48, "the caller's config is the caller's"
