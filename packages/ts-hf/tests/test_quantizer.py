"""from_pretrained with TrainStreamConfig gives what load_model gives."""

import pytest
import torch
import transformers
from conftest import tiny_model
from test_keep_precise import assert_same_packing, uneven

from ts_core.errors import CheckpointError, OptionError
from ts_hf import load_model
from ts_hf.quantizer import TrainStreamConfig
from ts_quant import QuantizedTensor

KINDS = ["llama", "gpt2", "mixtral", "qwen3_moe", "gemma3"]


def same(ours, theirs):
    expected = dict(theirs.named_parameters())
    count = 0
    for name, parameter in ours.named_parameters():
        other = expected.pop(name)
        assert isinstance(parameter, QuantizedTensor) == isinstance(other, QuantizedTensor), name
        assert parameter.dtype == other.dtype
        assert parameter.requires_grad == other.requires_grad, name
        if isinstance(parameter, QuantizedTensor):
            count += 1
            assert parameter.codec == other.codec
            assert all(torch.equal(part, other.packed[key]) for key, part in parameter.packed.items())
        else:
            assert torch.equal(parameter, other), name
    assert not expected
    return count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_what_load_model_gives(tmp_path, ids, kind, dtype):
    tiny_model(kind).save_pretrained(tmp_path)
    words = {"quantize": "nf4", "quant_block_size": 32}
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TrainStreamConfig(**words), dtype=dtype
    )
    theirs = load_model(tmp_path, dtype=dtype, **words)
    assert same(ours, theirs) > 3
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    for key in ("quantize", "share_packed", "bytes_after", "formats", "skipped", "parameters"):
        assert ours.trainstream_receipt[key] == theirs.trainstream_receipt[key], key
    assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize(
    "words",
    [
        {"quantize": "int8", "double_quant": True},
        {"quantize": "nf4", "error_rank": 2, "error_iters": 2},
        {"quantize": "fp8_row"},
        {"quantize": "none"},
        {"quantize": "auto"},
        {"quantize": "nvfp4", "ram_fraction": 0.5},
        {"quantize": "mxfp8"},
        {"quantize": "fp8_block"},
        {"quantize": "fp8"},
    ],
)
def test_every_option_is_taken(tmp_path, words):
    tiny_model().save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TrainStreamConfig(**words)
    )
    count = same(ours, load_model(tmp_path, dtype="fp32", **words))
    assert (count == 0) == (words["quantize"] in ("none", "auto"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", {"quantize": "nf4", "keep_precise": 0.3}),
        ("llama", {"quantize": "nf4", "keep_precise": 0.4, "error_rank": 2, "quant_block_size": 32}),
        ("gpt2", {"quantize": "nvfp4", "keep_precise": "auto"}),
        ("mixtral", {"quantize": "nf4", "keep_precise": 0.3}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_loses_most_moves_up_as_with_load_model(tmp_path, ids, kind, words, dtype):
    uneven(kind, intermediate_size=64).save_pretrained(tmp_path, max_shard_size="20KB")
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TrainStreamConfig(**words), dtype=dtype
    )
    theirs = load_model(tmp_path, dtype=dtype, **words)
    assert same(ours, theirs)
    assert_same_packing(ours, theirs)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    receipt = ours.trainstream_receipt
    assert 0 < receipt["kept_precise"] < receipt["packed_tensors"]
    for key in ("kept_precise", "bytes_after", "formats"):
        assert receipt[key] == theirs.trainstream_receipt[key], key


def test_where_nothing_can_move_up_the_reason_says_so(llama_folder):
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        llama_folder, quantization_config=TrainStreamConfig("int8", keep_precise=True)
    )
    assert "keep_precise=0.05 ignored: int8 has no codec above it" in ours.trainstream_receipt["reason"]


def test_what_cannot_be_read_twice_is_refused_before_it_is_read(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, variant="fp16")
    words = {"quantization_config": TrainStreamConfig("nf4", keep_precise=True)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(OptionError, match=r"keep_precise.*model\.fp16\.safetensors"):
        load(tmp_path, variant="fp16", **words)
    with pytest.raises(OptionError, match=r"keep_precise.*a state_dict"):
        transformers.LlamaForCausalLM.from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), **words
        )


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.uint8])
def test_weights_of_a_method_that_transformers_does_not_know_are_not_taken_for_plain(tmp_path, stored):
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].abs().to(stored)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}.*stored as (F8|U8).*load_model"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=TrainStreamConfig("nf4")
        )


def test_a_shape_that_does_not_fit_is_an_error(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="conversion"):  # transformers' own; its report has the rest
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=TrainStreamConfig("nf4"), intermediate_size=64
        )


@pytest.mark.parametrize("option", ["dtype", "device", "disk_offload", "random_weights", "trust_remote_code"])
def test_what_load_model_takes_besides_is_named_with_its_place(option):
    with pytest.raises(OptionError, match=rf"option {option}: .*(from_pretrained|load_model)\(.*="):
        TrainStreamConfig("nf4", **{option: 1})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("keep_precise", {"keep_precise": 0.6}),
        ("error_iters", {"error_iters": 0}),
        ("ram_fraction", {"ram_fraction": 1.5}),
        ("quantize", {"quantize": "int3"}),
        ("quant_block_size", {"quant_block_size": 3}),
        ("error_rank", {"error_rank": -1}),
        ("double_quant", {"quantize": "fp8_row", "double_quant": True}),
        ("llm_int8", {"llm_int8": True}),
    ],
)
def test_bad_options_name_themselves(option, words):
    with pytest.raises((OptionError, ValueError), match=option):
        TrainStreamConfig(**words)


def test_the_config_goes_through_json():
    config = TrainStreamConfig("int8", 32, keep_precise="auto")
    again = TrainStreamConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_auto_packs_under_a_budget_of_ram(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    monkeypatch.setenv("TRAINSTREAM_RAM", str(int(size * 0.9)))
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TrainStreamConfig("auto", quant_block_size=32), dtype=torch.float32
    )
    receipt = ours.trainstream_receipt
    assert receipt["quantize"] == "int8", receipt["reason"]  # there are no files to hold it
    assert receipt["bytes_after"] < size
