"""Block discovery on the models people train; skipped where transformers (or peft) is not installed."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

from ts_core.blocks import block_map, find_blocks

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **options))


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**LLAMA), image_token_index=3
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS = {
    "llama": (llama, "model.layers"),
    "llama_tied": (lambda: llama(tie_word_embeddings=True), "model.layers"),
    "classifier": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA)),
        "model.layers",
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=16, n_layer=3, n_head=2, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2
            )
        ),
        "transformer.h",
    ),
    "gemma2": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA, head_dim=8)),
        "model.layers",
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
        "model.layers",
    ),
    "bart": (
        lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
        "model.decoder.layers",
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                vocab_size=64,
            )
        ),
        "bert.encoder.layer",
    ),
    "llava": (llava, "model.language_model.layers"),
}


def check(model, stack):
    assert find_blocks(model) == list(model.get_submodule(stack))
    mapped = block_map(model)
    names = [name for group in mapped.groups for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert mapped.total_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert [g.name for g in mapped.blocks] == [f"{stack}.{i}" for i in range(3)]
    assert len(mapped.of_kind("head")) == 1
    assert mapped.of_kind("embedding")
    return mapped


@pytest.mark.parametrize("name", MODELS)
def test_stack_and_groups_of_a_model(name):
    make, stack = MODELS[name]
    check(make(), stack)


def test_tied_head_names_its_owner():
    mapped = check(llama(tie_word_embeddings=True), "model.layers")
    assert mapped.of_kind("head")[0].tied_to == (("lm_head.weight", "model.embed_tokens.weight"),)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ],
)
def test_peft_wrapping_changes_nothing(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, **options))
    mapped = check(model, "base_model.model.model.layers")
    assert [g.name for g in mapped.of_kind("head")] == ["base_model.model.lm_head"]
    assert [g.name for g in mapped.of_kind("embedding")] == ["base_model.model.model.embed_tokens"]


def test_encoder_decoder_with_shared_embedding():
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=2, vocab_size=64
    )
    mapped = check(transformers.T5ForConditionalGeneration(config), "decoder.block")
    assert mapped.group_of("encoder.embed_tokens.weight").name == "shared"
    assert [g.kind for g in mapped.groups if g.name == "encoder"] == ["other"]
