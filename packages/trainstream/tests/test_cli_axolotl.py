"""Config files written for axolotl: each key has a counterpart or is refused by name."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_cli_finetune import equal, finetune, invoke, quick, weights
from tiny_models import byte_tokenizer, json_events, save_tiny_model

from trainstream.cli.axolotl import _ALREADY, _INSTEAD, _RENAMED, translate
from trainstream.cli.data import load_data
from trainstream.cli.settings import ALIASES, Settings, from_words, merge
from ts_core.errors import OptionError

WHOLE = """
base_model: tiny
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_4bit: true
load_in_8bit: false
strict: false
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules:
datasets:
  - path: notes.jsonl
    type: completion
    field: text
test_datasets:
  - path: json
    ds_type: json
    split: train
    data_files: [held.jsonl]
    type: completion
output_dir: out
sequence_len: 64
sample_packing: true
pad_to_sequence_len: true
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 2
optimizer: adamw_torch
lr_scheduler: linear
learning_rate: 0.0002
weight_decay: 0.01
warmup_ratio: 0.05
max_grad_norm: 0.5
bf16: auto
fp16: false
tf32: false
gradient_checkpointing: true
flash_attention: true
val_set_size: 0
seed: 7
logging_steps: 1
save_steps: 5
save_total_limit: 3
wandb_project:
deepspeed:
ram: 8GiB
"""
MEANT = {
    "model": "tiny", "method": "lora", "quantize": "nf4", "lora_r": 8, "lora_alpha": 16.0,
    "lora_dropout": 0.05, "target_modules": ("all-linear",),
    "data": ("notes.jsonl",), "eval_data": ("held.jsonl",),
    "output_dir": "out", "max_length": 64, "packing": True, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3, "num_train_epochs": 2.0, "lr_scheduler_type": "linear",
    "learning_rate": 0.0002, "weight_decay": 0.01, "warmup_ratio": 0.05, "max_grad_norm": 0.5,
    "dtype": "auto", "held_out": 0.0, "seed": 7, "logging_steps": 1, "save_steps": 5, "save_total_limit": 3,
    "ram": 8 << 30,
    "wrap": {"recompute": True, "attention": "flash"},
}  # fmt: skip


def known(key):
    return key in Settings.__dataclass_fields__ or key in ALIASES or key.startswith("wrap.")


def of(**more):
    return merge(translate({"base_model": "m", "adapter": "lora", **more}, known))


def test_a_whole_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "c.yaml").write_text(WHOLE)
    settings, explicit = from_words(["c.yaml", "epochs=1"])
    assert settings == Settings(**{**MEANT, "num_train_epochs": 1.0})
    assert from_words(["c.yaml"])[0] == Settings(**MEANT)
    assert {"model", "max_length", "wrap.attention"} <= explicit.keys()


@pytest.mark.parametrize(
    ("given", "method", "codec"),
    [
        ({"adapter": None}, "full", "none"),
        ({}, "lora", "none"),
        ({"load_in_8bit": True}, "lora", "int8"),
        ({"load_in_4bit": True, "load_in_8bit": False}, "lora", "nf4"),
        ({"adapter": "qlora", "load_in_4bit": True}, "lora", "nf4"),
        ({"quantize": "nvfp4"}, "lora", "nvfp4"),
    ],
)
def test_what_is_trained_and_how_the_base_is_kept(given, method, codec):
    settings = of(**given)
    assert (settings.method, settings.quantize) == (method, codec)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"special_tokens": {"pad_token": "x"}}, "option special_tokens .* no counterpart"),
        ({"smaple_packing": False}, "option smaple_packing"),
        ({"warmup_steps": 10}, "option warmup_steps .* give warmup_ratio"),
        ({"deepspeed": "zero3.json"}, "option deepspeed .* give budgets"),
        ({"wandb_project": "p"}, "option wandb_project"),
        ({"adapter": "ia3"}, "option adapter"),
        ({"adapter": "qlora"}, "option adapter='qlora': .* load_in_4bit"),
        ({"adapter": None, "load_in_4bit": True}, "load_in_4bit .* give adapter: lora"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "give one of them"),
        ({"load_in_4bit": True, "quantize": "nf4"}, "give one of them"),
        ({"load_in_4bit": "perhaps"}, "load_in_4bit"),
        ({"model": "other"}, "'model' are the same thing"),
        ({"lora_target_linear": True, "lora_target_modules": ["q_proj"]}, "same thing"),
        ({"optimizer": "adamw_bnb_8bit"}, "option optimizer: 'adamw_bnb_8bit' has .*adamw_torch"),
        ({"fp16": True}, "option fp16: True"),
        ({"tf32": 0}, "option tf32: 0"),
        ({"train_on_inputs": True}, "option train_on_inputs"),
        ({"pad_to_sequence_len": True}, "option pad_to_sequence_len"),
        ({"test_datasets": [{}], "val_set_size": 0.1}, "test_datasets and val_set_size"),
        ({"val_set_size": 100}, "val_set_size"),
        ({"lr_scheduler": "one_cycle"}, "lr_scheduler"),
        ({"datasets": []}, "option datasets: expected a list"),
        ({"datasets": [{"type": "completion"}]}, r"option datasets\[0\]: expected path"),
        ({"datasets": [{"path": "x"}]}, r"datasets\[0\].type"),
        ({"datasets": [{"path": "x", "type": "alpaca"}]}, r"datasets\[0\].type.*'alpaca'"),
        ({"datasets": [{"path": "x", "type": "completion", "shards": 2}]}, r"datasets\[0\].shards"),
        ({"datasets": [{"path": "x", "type": "completion", "field": "body"}]}, r"datasets\[0\].field"),
        ({"datasets": [{"path": "x", "type": "completion", "split": "test"}]}, r"datasets\[0\].split"),
        ({"datasets": [{"path": "x", "type": "completion", "data_files": 3}]}, "data_files"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given, words):
    with pytest.raises(OptionError, match=words):
        of(**given)


@pytest.mark.parametrize(
    ("kind", "entry", "found"),
    [
        ("completion", {"messages": []}, "messages"),
        ("completion", {"prompt": "a", "completion": "b"}, "prompt and completion"),
        ("chat_template", {"text": "a"}, "text"),
        ("completion", {"text": "a"}, None),
        ("chat_template", {"messages": []}, None),
    ],
)
def test_a_file_of_another_type_is_refused(tmp_path, kind, entry, found):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(entry))
    data = {"datasets": [{"path": str(path), "type": kind}]}
    if found is None:
        assert of(**data).data == (str(path),)
    else:
        with pytest.raises(OptionError, match=f"has entries with {found}"):
            of(**data)


@given(st.from_regex(r"[a-z]{3}_[a-z]{2,8}", fullmatch=True), st.sampled_from([1, True, "x", [2], {"a": 1}]))
def test_no_key_is_ignored(key, value):
    if known(key) or key in {*_RENAMED, *_ALREADY}:
        return
    with pytest.raises(OptionError, match=key):
        of(**{key: value})


def test_the_tables_name_real_settings():
    assert all(name in Settings.__dataclass_fields__ for name in _RENAMED.values())
    assert not {key for key in (*_INSTEAD, *_ALREADY) if known(key)}


def test_a_file_of_ones_own_keys_is_read_as_before(tmp_path):
    (tmp_path / "own.yaml").write_text("model: m\nepochs: 2\n")
    assert from_words([str(tmp_path / "own.yaml")])[0] == Settings(model="m", num_train_epochs=2.0)
    (tmp_path / "own.yaml").write_text("model: m\nmicro_batch_size: 2\n")
    with pytest.raises(OptionError, match="micro_batch_size"):
        from_words([str(tmp_path / "own.yaml")])


@pytest.mark.parametrize(("share", "held"), [(0.0, 0), (0.5, 2), (0.1, 1)])
def test_the_share_that_is_held_out(tmp_path, share, held):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text("abcdefg")
    data = load_data(merge({"data": str(tmp_path), "seq_len": 8, "val_set_size": share}), byte_tokenizer())
    assert (len(data.train), len(data.held_out)) == (4 - held, held)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_it_trains_what_the_same_settings_in_our_names_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny")
    lines = [json.dumps({"text": "the quick brown fox jumps over it"[i:]}) for i in range(12)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    config = {
        "base_model": "tiny", "adapter": "qlora", "load_in_4bit": True, "lora_r": 4, "lora_alpha": 8,
        "datasets": [{"path": "notes.jsonl", "type": "completion"}], "sequence_len": 40,
        "micro_batch_size": 2, "num_epochs": 1, "sample_packing": True, "val_set_size": 0.0,
        "learning_rate": 5e-3,
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    rest = ["dtype=fp32", "threads=1", "device=cpu"]
    result = invoke("--json", "--debug", "c.yaml", *rest, "output_dir=theirs")
    assert result.exit_code == 0, result.stderr
    assert not [event for event in json_events(result.stdout) if event["event"] == "eval"]
    ours = quick("model=tiny", "data=notes.jsonl", "seq_len=40", "epochs=1", "packing=true", "held_out=0")
    finetune(*ours, "rank=4", "alpha=8", "output_dir=ours")
    assert equal(weights(tmp_path / "theirs/adapter"), weights(tmp_path / "ours/adapter"))
