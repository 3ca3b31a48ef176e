"""Tiny models, tokenizers and texts where transformers' Trainer tests load some from the hub.

A pytest plugin for machines without the hub (`trainer_conformance.py --stand-ins`). The tests ask of them
only that they train: random weights do. What is not listed here is looked for as before.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

#: Name on the hub -> kind of model.
KINDS = {
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "llama",
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": "qwen2",
    "openai-community/gpt2": "gpt2",
    "bert-base-cased": "bert",
    "bert-base-uncased": "bert",
    "google-bert/bert-base-uncased": "bert",
    "google-bert/bert-base-cased-finetuned-mrpc": "bert",
}
TEXTS = "Salesforce/wikitext"


def config_of(kind: str, size: int) -> Any:
    """Return the config of a tiny model with a vocabulary of a size."""
    import transformers

    common = {"vocab_size": size, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind != "bert":
        common["num_key_value_heads"] = 2
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=size, n_embd=16, n_layer=2, n_head=4, n_positions=1024)
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "bert": transformers.BertConfig,
    }
    return classes[kind](intermediate_size=64, max_position_embeddings=2048, **common)


@functools.cache
def _alphabet() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    return {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}


def tokenizer() -> Any:
    """Return a new byte-level tokenizer."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE(vocab=dict(_alphabet()), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    named = {f"{name}_token": token for name, token in special.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def _replace(cls: Any, make: Any) -> None:
    before = cls.from_pretrained

    def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name) not in KINDS or "quantization_config" in kwargs:
            return before(name, *args, **kwargs)
        return make(str(name), **kwargs)

    cls.from_pretrained = from_pretrained


def pytest_configure(config: Any) -> None:
    """Put the stand-ins in."""
    import datasets
    import torch
    import transformers

    _replace(transformers.AutoTokenizer, lambda name, **_: tokenizer())
    for cls in (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification):

        def model(name: str, *, dtype: Any = torch.float32, _cls: Any = cls, **changes: Any) -> Any:
            made = config_of(KINDS[name], len(_alphabet()))
            for key, value in changes.items():
                setattr(made, key, value)
            with torch.random.fork_rng():  # the same weights each time, as from a file
                torch.manual_seed(0)
                return _cls.from_config(made, dtype=dtype)

        _replace(cls, model)
    load = datasets.load_dataset

    def load_dataset(name: str, *args: Any, **kwargs: Any) -> Any:
        if name != TEXTS:
            return load(name, *args, **kwargs)
        lines = (line.strip() for line in Path(functools.__file__).read_text().splitlines())
        return datasets.Dataset.from_list([{"text": line} for line in lines][:200])

    datasets.load_dataset = load_dataset
