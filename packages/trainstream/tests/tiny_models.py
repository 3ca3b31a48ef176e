"""A tiny Llama and a byte tokenizer in a folder, as a user would have a model on disk."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<|end|>", "<|pad|>"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def tiny_config(**changes):
    settings = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
        **changes,
    }
    return LlamaConfig(**settings)


def save_tiny_model(folder, chat=False, **changes):
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(**changes)).float().save_pretrained(folder)
    byte_tokenizer(chat).save_pretrained(folder)
    return folder


def write_texts(folder, count=8, length=400):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(length // 6))
        (folder / f"text{i}.txt").write_text(words)
    return folder


def json_events(output):
    return [json.loads(line) for line in output.splitlines() if line]
