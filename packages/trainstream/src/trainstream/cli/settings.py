"""Settings of `trainstream finetune`: one table of keys, read from YAML and from `key=value` words.

Keys have the name that transformers' `TrainingArguments` (or PEFT's `LoraConfig`) gives the same thing; the
short spellings that people type are accepted as well. Unknown keys are refused with the nearest known ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from trainstream.cli.axolotl import is_axolotl, translate
from ts_core.errors import OptionError
from ts_core.memory import parse_bytes
from ts_core.options import boolean, choice, fraction, integer, number

__all__ = ["ALIASES", "FIXED_ON_RESUME", "Settings", "merge", "parse_scalar", "parse_word", "read_config"]

_NONE_WORDS = ("none", "null", "~", "")
_BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_scalar(text: str) -> Any:
    """Turn one word of a command line into the Python value that it spells.

    `none` and `null` give None, `true/false/yes/no/on/off` a bool, then int, float and (in brackets) a list
    of such values; anything else stays a string.

    Args:
        text: The part after `=`.

    Returns:
        None, bool, int, float, list or str.

    Example:
        >>> [parse_scalar(word) for word in ("none", "True", "8", "2e-4", "[0, 1]", "20GiB")]
        [None, True, 8, 0.0002, [0, 1], '20GiB']
    """
    word = text.strip()
    lowered = word.lower()
    if lowered in _NONE_WORDS:
        return None
    if lowered in _BOOL_WORDS:
        return _BOOL_WORDS[lowered]
    if word.startswith("[") and word.endswith("]"):
        return [parse_scalar(part) for part in word[1:-1].split(",")] if word[1:-1].strip() else []
    for number_type in (int, float):
        try:
            return number_type(word)
        except ValueError:
            continue
    return word


# ------------------------------------------------------------------------------------------ converters
# Each takes (key, value as given by YAML or as text) and returns the checked value.


def _as_number(value: Any) -> Any:
    # YAML 1.1 reads 2e-4 as a string, and a command line gives strings anyway.
    return parse_scalar(value) if isinstance(value, str) else value


def _str(key: str, value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None or not str(value).strip():
        raise OptionError(f"option {key}: expected a text, given {value!r}")
    return str(value)


def _strs(key: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise OptionError(f"option {key}: expected one or more texts (a,b,c or a list), given {value!r}")
    cleaned = tuple(part.strip() for part in parts if part.strip())
    if not cleaned:
        raise OptionError(f"option {key}: expected at least one text, given {value!r}")
    return cleaned


def _int(minimum: int) -> Callable[[str, Any], int]:
    return lambda key, value: integer(key, _as_number(value), minimum=minimum)


def _threads(key: str, value: Any) -> int:
    # The bound of wrap().
    return integer(key, _as_number(value), minimum=1, maximum=4096)


def _number(**limits: float) -> Callable[[str, Any], float]:
    return lambda key, value: number(key, _as_number(value), **limits)


def _fraction(key: str, value: Any) -> float:
    return fraction(key, _as_number(value))


def _share(key: str, value: Any) -> float:
    return fraction(key, _as_number(value), 0.0, 0.9)


def _one_of(*accepted: str) -> Callable[[str, Any], str]:
    def convert(key: str, value: Any) -> str:
        return choice(key, value.lower() if isinstance(value, str) else value, accepted)

    return convert


def _dtype(key: str, value: Any) -> str:
    names = {"bf16": "bfloat16", "fp32": "float32"}
    return _one_of("auto", "bfloat16", "float32")(key, names.get(str(value).lower(), value))


def _bool(key: str, value: Any) -> bool:
    return boolean(key, _as_number(value))


def _background(key: str, value: Any) -> bool | int:
    found = _as_number(value)
    return bool(found) if found is None or isinstance(found, bool) else parse_bytes(found, name=key)


_CODECS = ("nf4", "int8", "fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4", "none")


def _codec(key: str, value: Any) -> str | None:
    # Here "none" is a codec; only YAML's null leaves the choice open.
    return None if value is None else _one_of(*_CODECS)(key, value)


def _size(key: str, value: Any) -> int:
    size = parse_bytes(_as_number(value), name=key)
    if size <= 0:
        raise OptionError(f"option {key}: expected a size above 0, such as 8GiB, given {value!r}")
    return size


def _optional(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    def inner(key: str, value: Any) -> Any:
        blank = value is None or (isinstance(value, str) and value.strip().lower() in _NONE_WORDS)
        return None if blank else convert(key, value)

    return inner


def _key(default: Any, convert: Callable[[str, Any], Any], text: str, *aliases: str) -> Any:
    return field(default=default, metadata={"convert": convert, "help": text, "aliases": aliases})


@dataclass(frozen=True)
class Settings:
    """Everything `trainstream finetune` can be told; `None` means: chosen by the rule in the help text."""

    model: str = _key("smollm2", _str, "local folder, hub id, .gguf file, or smollm2", "model_name_or_path")
    data: tuple[str, ...] = _key((), _strs, "files, folders, globs; default: this Python's library source")
    eval_data: tuple[str, ...] = _key((), _strs, "held-out files; default: documents set aside from data")
    held_out: float = _key(
        0.1, _share, "share of the documents set aside for evaluation, 0 for none", "val_set_size"
    )
    method: str = _key("lora", _one_of("lora", "full"), "lora: adapters on a frozen base; full: every weight")
    quantize: str | None = _key(
        None, _codec, "codec of the frozen base: nf4, int8, fp8, nvfp4 or none; default nf4 (full: none)"
    )
    lora_r: int = _key(16, _int(1), "rank of the adapters", "rank", "r")
    lora_alpha: float = _key(32.0, _number(above=0.0), "scale of the adapters", "alpha")
    lora_dropout: float = _key(0.0, _fraction, "dropout in front of the adapters", "dropout")
    target_modules: tuple[str, ...] = _key(("all-linear",), _strs, "which linear layers get an adapter")
    learning_rate: float | None = _key(
        None, _optional(_number(above=0.0)), "default 5e-4 for lora, 2e-5 for full", "lr"
    )
    max_steps: int | None = _key(
        None, _optional(_int(1)), "optimizer steps (default 80 on built-in data)", "steps"
    )
    num_train_epochs: float | None = _key(
        None, _optional(_number(above=0.0)), "passes over the data (default 1 on your own data)", "epochs"
    )
    per_device_train_batch_size: int = _key(4, _int(1), "rows per micro-batch", "batch_size")
    gradient_accumulation_steps: int = _key(1, _int(1), "micro-batches per step", "accumulation_steps")
    max_length: int = _key(256, _int(2), "tokens per row", "seq_len", "max_seq_length")
    packing: bool = _key(
        False, _bool, "fill rows with whole documents, each seeing itself alone", "sample_packing"
    )
    warmup_ratio: float = _key(0.1, _fraction, "share of the steps over which the rate rises", "warmup")
    lr_scheduler_type: str = _key(
        "cosine",
        _one_of("cosine", "linear", "constant", "constant_with_warmup"),
        "rate over time",
        "scheduler",
    )
    weight_decay: float = _key(0.0, _number(minimum=0.0), "AdamW weight decay")
    adam_beta1: float = _key(0.9, _fraction, "AdamW beta1")
    adam_beta2: float = _key(0.999, _fraction, "AdamW beta2")
    adam_epsilon: float = _key(1e-8, _number(above=0.0), "AdamW epsilon")
    max_grad_norm: float | None = _key(1.0, _optional(_number(minimum=0.0)), "clip the gradient norm; 0: off")
    seed: int = _key(0, _int(0), "of the adapters' start, the order of the data and dropout")
    dtype: str = _key("auto", _dtype, "auto (bf16 where it is faster), bf16 or fp32", "torch_dtype")
    device: str = _key("auto", _str, "auto, cpu, cuda, cuda:N")
    eval_batches: int = _key(8, _int(0), "held-out micro-batches before and after; 0: no evaluation")
    output_dir: str | None = _key(None, _optional(_str), "default ./runs/<model>-<time>")
    save_steps: int | None = _key(
        None, _optional(_int(0)), "default 20 for lora, 200 for full; 0: only at the end"
    )
    save_total_limit: int = _key(2, _int(1), "checkpoints kept")
    save_in_background: bool | int = _key(
        False,
        _background,
        "true, or the RAM that steps may copy meanwhile, such as 2GiB: a thread writes the checkpoints",
    )
    resume_from_checkpoint: str | None = _key(
        None, _optional(_str), "a run folder, a checkpoint folder, or latest", "resume"
    )
    logging_steps: int = _key(10, _int(1), "steps between two reports of the loss", "log_steps")
    threads: int | None = _key(
        None, _optional(_threads), "CPU threads, at most 4096; default torch's own choice"
    )
    loss_chunk_size: int = _key(1024, _int(1), "tokens whose logits exist at a time")
    ram: int | None = _key(
        None,
        _optional(_size),
        "RAM to use at most, such as 8GiB; what is beyond it lives in files",
        "ram_budget",
    )
    vram: int | None = _key(
        None, _optional(_size), "GPU memory to use at most; what is beyond it lives in RAM", "vram_budget"
    )
    disk: int | None = _key(None, _optional(_size), "disk space to use at most for that", "disk_budget")
    events: bool = _key(True, _bool, "write events.jsonl into output_dir, for trainstream top and report")
    trace: bool = _key(False, _bool, "write trace.json.gz: a timeline of three settled steps, for report")
    trust_remote_code: bool = _key(False, _bool, "run model code that comes with a hub model")
    export_decoded_base: str | None = _key(
        None, _optional(_str), "folder for the base exactly as trained on (decoded), loadable by transformers"
    )
    wrap: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "wrap.NAME=value: any option of wrap()"}
    )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON data, the inverse of `from_json`."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Rebuild settings that `to_json` wrote; every value is checked again."""
        return merge(changed(data))


_FIELDS = {entry.name: entry for entry in fields(Settings)}
ALIASES = {alias: name for name, entry in _FIELDS.items() for alias in entry.metadata.get("aliases", ())}

# What a resumed run may be told anew; the rest is part of what makes it the same run.
FIXED_ON_RESUME = frozenset(_FIELDS) - {
    "device", "disk", "eval_batches", "events", "export_decoded_base", "logging_steps", "max_steps",
    "num_train_epochs", "ram", "resume_from_checkpoint", "save_in_background", "save_steps",
    "save_total_limit", "threads", "trace", "vram", "wrap",
}  # fmt: skip


def changed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of `Settings.to_json()` that are not the defaults."""
    defaults = Settings().to_json()
    return {key: value for key, value in data.items() if key not in defaults or value != defaults[key]}


def _known(key: str) -> bool:
    return key in _FIELDS or key in ALIASES or key.startswith("wrap.")


def canonical(key: str) -> str:
    """Return the full name of a key, from either spelling.

    Raises:
        OptionError: No such key; the message lists the nearest ones.
    """
    name = ALIASES.get(key, key)
    if name in _FIELDS:
        return name
    if key.startswith("wrap."):
        return key
    known = [*_FIELDS, *ALIASES]
    close = difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known keys: {', '.join(_FIELDS)}"
    raise OptionError(f"unknown option {key!r}; {hint}")


def parse_word(word: str) -> tuple[str, str]:
    """Split one `key=value` word.

    Returns:
        The key as it was typed, and the text after the first `=`.

    Raises:
        OptionError: There is no `=`, or no key before it.

    Example:
        >>> parse_word("wrap.optimizer_mode=cpu")
        ('wrap.optimizer_mode', 'cpu')
    """
    key, equals, value = word.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key:
        raise OptionError(
            f"cannot read {word!r}: expected key=value (such as steps=100) or a config file ending in .yaml"
        )
    return key, value


def merge(*sources: Mapping[str, Any]) -> Settings:
    """Combine sources of keys into checked settings; later sources win.

    Args:
        *sources: Mappings from key (either spelling, or `wrap.NAME`, or `wrap` with a mapping) to value.

    Returns:
        The settings.

    Raises:
        OptionError: An unknown key, a value outside the accepted ones, or one thing given twice in a source.

    Example:
        >>> merge({"lr": "1e-4", "wrap.optimizer_mode": "cpu"}).learning_rate
        0.0001
    """
    values: dict[str, Any] = {}
    wrap_options: dict[str, Any] = {}
    for source in sources:
        seen: dict[str, str] = {}
        for key, value in source.items():
            name = canonical(str(key))
            if name in seen:
                raise OptionError(f"options {seen[name]!r} and {key!r} are the same thing: give one of them")
            seen[name] = str(key)
            if name == "wrap":
                if not isinstance(value, Mapping):
                    raise OptionError(f"option wrap: expected names and values of wrap(), given {value!r}")
                wrap_options.update({str(k): v for k, v in value.items()})
            elif name.startswith("wrap."):
                wrap_options[name[5:]] = parse_scalar(value) if isinstance(value, str) else value
            else:
                values[name] = _FIELDS[name].metadata["convert"](key, value)
    settings = Settings(**values, wrap=wrap_options)
    if settings.method == "full" and settings.quantize not in (None, "none"):
        raise OptionError(
            f"option quantize={settings.quantize!r} with method='full': a codec holds frozen weights only "
            "and a full fine-tune freezes none; use quantize=none, or method=lora"
        )
    return settings


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file of keys.

    Args:
        path: The file.

    Returns:
        The mapping as the file states it, unchecked.

    Raises:
        OptionError: The file is missing, is no YAML, is no mapping, or holds no key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(
            f"the config file {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if content is None or content == {}:
        raise OptionError(
            f"the config file {path} is empty; write lines of `key: value` into it, or leave it out for the "
            "default run"
        )
    if not isinstance(content, dict):
        raise OptionError(
            f"the config file {path}: expected lines of `key: value`, found {type(content).__name__}"
        )
    return content


def from_words(words: Iterable[str]) -> tuple[Settings, dict[str, Any]]:
    """Read the words after `trainstream finetune`: at most one config file, and `key=value` pairs.

    Returns:
        The settings, and the keys that were given explicitly (full names), for a resume to compare.

    Raises:
        OptionError: A word, a key or a value is not understood.
    """
    config: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    config_seen = ""
    for word in words:
        if "=" not in word and word.endswith((".yaml", ".yml")):
            if config_seen:
                raise OptionError(f"two config files given: {config_seen} and {word}")
            config_seen = word
            config = read_config(Path(word))
            if is_axolotl(config):
                config = translate(config, _known)
            continue
        key, value = parse_word(word)
        if key in pairs:
            raise OptionError(f"option {key!r} is given twice")
        pairs[key] = value
    explicit = {canonical(str(key)): value for key, value in {**config, **pairs}.items()}
    return merge(config, pairs), explicit


def describe() -> str:
    """List every key, its other spellings, its default and what it does."""
    lines = []
    for name, entry in _FIELDS.items():
        aliases = entry.metadata.get("aliases", ())
        spelled = f"{name} ({', '.join(aliases)})" if aliases else name
        default = "" if name == "wrap" else entry.default
        shown = ",".join(default) if isinstance(default, tuple) else "" if default is None else default
        lines.append(f"{spelled:58} {shown!s:12} {entry.metadata['help']}")
    return "\n".join(lines)
