import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(kind="llama", **changes):
    t = transformers
    small = {**SMALL, **changes}
    if kind == "llama":
        return t.LlamaConfig(**{"head_dim": 8, **small})
    if kind == "qwen2":
        return t.Qwen2Config(**small)
    if kind == "gemma2":
        return t.Gemma2Config(**{"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0, **small})
    if kind == "gemma3":
        return t.Gemma3TextConfig(**{"head_dim": 8, "sliding_window": 4, **small})
    if kind == "mistral":
        return t.MistralConfig(**{"sliding_window": 4, **small})
    if kind == "mixtral":
        return t.MixtralConfig(**{"num_local_experts": 4, **small})
    if kind == "qwen3_moe":
        return t.Qwen3MoeConfig(
            **{"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, **small}
        )
    if kind == "phi3":
        return t.Phi3Config(**small)
    if kind == "cohere":
        return t.CohereConfig(**{"logit_scale": 0.3, **small})
    if kind == "granite":
        return t.GraniteConfig(**{"logits_scaling": 4.0, **small})
    if kind == "gpt2":
        dropout = {
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return t.GPT2Config(
            **{"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **dropout}
        )
    raise AssertionError(kind)


def tiny_model(kind="llama", **changes):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        tiny_config(kind, **changes), dtype=torch.float32
    ).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama_folder(tmp_path):
    """A tiny Llama in shards of 20 KB."""
    tiny_model().save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    return tmp_path / "llama"


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer without training data, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made
