"""from_pretrained with TrainStreamConfig gives what load_model gives."""

import pytest
import torch
import transformers
from conftest import tiny_model

from ts_core.errors import OptionError
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
    ("option", "words"),
    [
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
    config = TrainStreamConfig("int8", 32)
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
