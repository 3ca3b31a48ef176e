"""Specs by arithmetic equal those of the models that transformers builds."""

import dataclasses
import json

import pytest
import torch

from ts_core.errors import CheckpointError, OptionError
from ts_core.spec import spec_of
from ts_hf.config_spec import FAMILIES, spec_from_config

transformers = pytest.importorskip("transformers")

VARIANTS = {
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
        {"tie_word_embeddings": True},
    ],
    "qwen2_moe": [{}, {"mlp_only_layers": [0], "decoder_sparse_step": 2}],
    "qwen3": [{"num_key_value_heads": 2, "head_dim": 8}],
    "qwen3_moe": [{}, {"decoder_sparse_step": 2}],
    "deepseek_v3": [{}, {"q_lora_rank": None}, {"first_k_dense_replace": 0}],
    "glm4_moe": [{}, {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}],
    "seed_oss": [{}, {"attention_out_bias": True}],
    "granite": [{"attention_bias": True}],
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "shared_expert_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def config_of(kind, **changes):
    given = dict(SMALL)
    if FAMILIES[kind].moe:
        given |= ROUTED
    if kind == "deepseek_v3":
        given |= LATENT | {"num_key_value_heads": 4}
    return {"model_type": kind, **given, **changes}


def built(config):
    plain = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **plain)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    return made, model


def weights_of(spec):
    """Every weight by its full name: shape, dtype and the share a token takes."""
    return {
        f"{block.name}.{t.name}": (block.kind, t.shape, t.dtype, t.active if t.use == "experts" else 1.0)
        for block in spec.blocks
        for t in block.tensors
    }


CASES = [
    (kind, change) for kind in sorted(FAMILIES) for change in VARIANTS.get(kind, [{}]) if kind != "kimi_k2"
]


@pytest.mark.parametrize(("kind", "change"), CASES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(CASES)])
def test_every_weight_is_that_of_the_model(kind, change):
    made, model = built(config_of(kind, **change))
    by_model = spec_of(model)
    # What transformers writes into config.json, and what a person may have left out.
    for config in (json.loads(made.to_json_string()), config_of(kind, **change)):
        spec = spec_from_config(config)
        assert weights_of(spec) == weights_of(by_model)
        assert [b.name for b in spec.stack] == [b.name for b in by_model.stack]
        assert [b.query for b in spec.stack] == [b.query for b in by_model.stack] or kind == "deepseek_v3"
        assert spec.tied == by_model.tied
        assert [len(c) for c in spec.classes()] == [len(c) for c in by_model.classes()]
    assert spec.numel == sum(p.numel() for p in model.parameters())


def test_a_family_that_is_not_written_out_is_built():
    config = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 8,
    }
    spec = spec_from_config(config | {"bos_token_id": 0, "eos_token_id": 0})
    assert len(spec.stack) == 3
    assert spec.tied
    assert {t.use for t in spec.stack[0].tensors} == {"matmul", "other"}


def test_a_671b_config_in_milliseconds():
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    spec = spec_from_config(config)
    assert spec.numel == pytest.approx(671e9, rel=0.001)
    assert spec.active == pytest.approx(37.5e9, rel=0.02)
    assert spec.bytes == pytest.approx(spec.numel, rel=0.01)
    assert [len(c) for c in spec.classes()] == [1, 3, 58, 1, 1]
    assert "fp8" in spec.notes[0]
    assert spec_from_config({**config, "model_type": "kimi_k2"}).numel == spec.numel


@pytest.mark.parametrize(
    ("stored", "each"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.52),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.54),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": "128"}, 1.02),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, 1.0),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, 0.5625),
        ({"quant_method": "something"}, 2.0),
    ],
)
def test_stored_formats_count_as_stored(stored, each):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 16}
    config = config_of("llama") | sizes | {"num_key_value_heads": 16}
    plain = spec_from_config(config)
    spec = spec_from_config(config | {"quantization_config": stored})
    weights = sum(t.numel for t in plain.stack[0].tensors if t.use == "matmul")
    rest = sum(t.nbytes for t in plain.stack[0].tensors if t.use != "matmul")
    assert (spec.stack[0].bytes - rest) / weights == pytest.approx(each, rel=0.02)
    assert spec.numel == plain.numel
    assert len(spec.notes) == 1


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({}, OptionError, "model_type"),
        ([], CheckpointError, "JSON object"),
        ({"model_type": "llama"}, CheckpointError, "hidden_size is missing"),
        (config_of("llama") | {"num_hidden_layers": "four"}, CheckpointError, "num_hidden_layers"),
        (config_of("llama") | {"vocab_size": -1}, CheckpointError, "vocab_size"),
        ({"model_type": "lama", "hidden_size": 8}, CheckpointError, "lama"),
    ],
)
def test_wrong_configs_are_refused(config, error, text):
    with pytest.raises(error, match=text):
        spec_from_config(config)


def test_windows():
    spec = spec_from_config(
        config_of("gpt_oss")
        | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    )
    assert [b.window for b in spec.stack] == [8, 0, 8, 0]
    assert dataclasses.replace(spec.stack[0], name="") != dataclasses.replace(spec.stack[1], name="")
    assert len(spec.classes()) == 4
