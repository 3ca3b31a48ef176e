"""Config files written for axolotl: their keys as settings of `trainstream finetune`.

A key that means the same is translated, one whose meaning there is none for is refused by name. What the file
leaves out has this command's defaults, but for two things that such a file says by leaving them out: without
`adapter` every weight is trained, and without `load_in_4bit` or `load_in_8bit` the base is not packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ts_core.errors import OptionError
from ts_core.options import boolean, choice, number

__all__ = ["is_axolotl", "translate"]

_RENAMED = {
    "base_model": "model",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "sequence_len": "max_length",
    "lr_scheduler": "lr_scheduler_type",
    "sample_packing": "packing",
    "lora_target_modules": "target_modules",
}
# Keys of which one value, or a few, are what happens here anyway.
_ALREADY: dict[str, tuple[Any, ...]] = {
    "eval_sample_packing": (False,),
    "fp16": (False,),
    "group_by_length": (False,),
    "model_type": ("AutoModelForCausalLM",),
    "optimizer": ("adamw_torch", "adamw_torch_fused"),
    "sdp_attention": (True, False),
    "strict": (False,),
    "tf32": (False,),
    "tokenizer_type": ("AutoTokenizer",),
    "train_on_inputs": (False,),
    "xformers_attention": (False,),
}
_INSTEAD = {
    "warmup_steps": "give warmup_ratio, the share of the steps",
    "saves_per_epoch": "give save_steps",
    "save_strategy": "give save_steps",
    "deepspeed": "give budgets: ram, vram, disk",
    "fsdp": "give budgets: ram, vram, disk",
}
# What a data set of a type has in its entries; the reader finds out by itself, and it must be the same.
_TYPES = {"completion": "text", "chat_template": "messages"}
_DATA_KEYS = ("path", "type", "data_files", "ds_type", "split", "field", "field_messages")


def is_axolotl(config: Mapping[str, Any]) -> bool:
    """Say whether a config file is one of axolotl's: all of them name their `base_model`."""
    return "base_model" in config


def translate(config: Mapping[str, Any], own: Callable[[str], bool]) -> dict[str, Any]:
    """Turn the keys of an axolotl config into those of `trainstream finetune`.

    Args:
        config: What is in the file; a key without a value counts as left out.
        own: Tells whether a key is one of this command's, which may stand in the file too.

    Returns:
        Keys and values for `merge`.

    Raises:
        OptionError: A key or a value without a counterpart, by name, or one thing given twice.

    Example:
        >>> translate({"base_model": "m", "adapter": "lora", "lora_r": 8}, {"lora_r"}.__contains__)
        {'method': 'lora', 'quantize': 'none', 'model': 'm', 'lora_r': 8}
    """
    given = {str(key): value for key, value in config.items() if value is not None}
    made = _base(given)
    for key in ("adapter", "load_in_4bit", "load_in_8bit"):
        given.pop(key, None)
    if "test_datasets" in given and given.get("val_set_size"):
        raise OptionError("options test_datasets and val_set_size: give one of them")
    for key, value in given.items():
        for name, meant in _meaning(key, value, given, own).items():
            if name in made:
                raise OptionError(f"options {key!r} and {name!r} are the same thing: give one of them")
            made[name] = meant
    return made


def _base(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is trained, and how the base is kept."""
    adapter = given.get("adapter")
    if adapter is not None:
        choice("adapter", adapter, ("lora", "qlora"))
    four, eight = (boolean(key, given.get(key, False)) for key in ("load_in_4bit", "load_in_8bit"))
    if four and eight:
        raise OptionError("options load_in_4bit and load_in_8bit: give one of them")
    if adapter == "qlora" and not four:
        raise OptionError("option adapter='qlora': it goes with load_in_4bit: true")
    if adapter is None and (four or eight):
        raise OptionError(
            "options load_in_4bit and load_in_8bit: a packed base is frozen; give adapter: lora"
        )
    if "quantize" in given:
        if four or eight:
            raise OptionError("options load_in_4bit / load_in_8bit and quantize: give one of them")
        return {"method": "full" if adapter is None else "lora"}
    codec = "nf4" if four else "int8" if eight else "none"
    return {"method": "full" if adapter is None else "lora", "quantize": codec}


def _meaning(key: str, value: Any, given: Mapping[str, Any], own: Callable[[str], bool]) -> dict[str, Any]:
    """Return one key's settings; none where its value is what happens anyway."""
    if key in _RENAMED:
        return {_RENAMED[key]: value}
    if key in ("datasets", "test_datasets"):
        return {"data" if key == "datasets" else "eval_data": _paths(key, value)}
    if key == "val_set_size":
        return {"held_out": number(key, value, minimum=0.0, maximum=0.9)}
    if key in ("bf16", "bfloat16"):
        return {"dtype": "auto" if value == "auto" else "bfloat16" if boolean(key, value) else "float32"}
    if key == "gradient_checkpointing":
        return {"wrap.recompute": True} if boolean(key, value) else {}
    if key == "flash_attention":
        return {"wrap.attention": "flash"} if boolean(key, value) else {}
    if key == "lora_target_linear":
        return {"target_modules": "all-linear"} if boolean(key, value) else {}
    if key == "pad_to_sequence_len":
        # Packed rows are full anyway; others are padded to the longest, which changes no result.
        if boolean(key, value) and given.get("sample_packing") is not True:
            raise OptionError(f"option {key}: only rows with sample_packing: true are; leave it out")
        return {}
    if key in _ALREADY:
        if not any(
            value is known or (type(value) is type(known) and value == known) for known in _ALREADY[key]
        ):
            accepted = " or ".join(json.dumps(known) for known in _ALREADY[key])
            raise OptionError(f"option {key}: {value!r} has no counterpart here, {accepted} has")
        return {}
    if own(key):
        return {key: value}
    instead = _INSTEAD.get(key, "leave it out; `trainstream finetune --keys` lists what there is")
    raise OptionError(f"option {key} of a config with base_model has no counterpart here: {instead}")


def _paths(key: str, value: Any) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise OptionError(f"option {key}: expected a list of data sets with path and type, given {value!r}")
    found: list[str] = []
    for index, entry in enumerate(value):
        found += _data_set(f"{key}[{index}]", entry)
    return found


def _data_set(name: str, entry: Any) -> list[str]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise OptionError(f"option {name}: expected path and type, given {entry!r}")
    given = {str(key): value for key, value in entry.items() if value is not None}
    for key in given:
        if key not in _DATA_KEYS:
            raise OptionError(f"option {name}.{key} has no counterpart here: leave it out")
    kind = choice(f"{name}.type", given.get("type"), tuple(_TYPES))
    for key, accepted in (
        ("ds_type", ("json", "text")),
        ("split", ("train",)),
        ("field", ("text",)),
        ("field_messages", ("messages",)),
    ):
        if key in given:
            choice(f"{name}.{key}", given[key], accepted)
    files = given.get("data_files", given["path"])
    paths = [files] if isinstance(files, str) else files
    if not isinstance(paths, Sequence) or not all(isinstance(path, str) for path in paths):
        raise OptionError(f"option {name}.data_files: expected paths, given {files!r}")
    for path in paths:
        _check_kind(name, kind, Path(path).expanduser())
    return list(paths)


def _check_kind(name: str, kind: str, path: Path) -> None:
    """Refuse a file whose first entry would be read as something else than the type says."""
    if not path.is_file():
        return  # folders and patterns hold many; what is missing is named when it is read
    jsonl = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    found = "text"
    if jsonl:
        try:
            with path.open(encoding="utf-8") as file:
                entry = json.loads(next((line for line in file if line.strip()), "{}"))
        except (OSError, ValueError):
            return  # the reader names file and line
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            found = "messages"
        elif isinstance(entry, dict) and {"prompt", "completion"} <= entry.keys():
            found = "prompt and completion"
    if found != _TYPES[kind]:
        raise OptionError(f"option {name}.type={kind!r}: {path} has entries with {found}, not {_TYPES[kind]}")
