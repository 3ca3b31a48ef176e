"""Builds a causal LM with empty parameters and real buffers, and fills what no file holds.

A parameter moves to the meta device the moment it is registered, so a model of any size is built in no
memory. Buffers are made by the model's own `__init__`, on the CPU, with their true values: rotary tables,
embedding scales and whatever a custom module registers are in no checkpoint, and a buffer built on the meta
device and filled with empty memory would be plausible garbage.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ts_core.errors import CheckpointError, MissingDependencyError, OptionError

__all__ = ["build_model", "empty_parameters", "load_config", "owner_of"]

# Parameters of at most this many elements keep the values of `__init__` when a random model is made.
SMALL_NUMEL = 65536


def import_transformers() -> Any:
    """Return the module transformers, or say what is missing."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "[ts_hf] needs the package 'transformers' >= 5, which is not installed. Run: pip install "
            "'transformers>=5'",
            name="transformers",
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise MissingDependencyError(
            f"[ts_hf] needs transformers >= 5, found {transformers.__version__}. "
            "Run: pip install -U 'transformers>=5'",
            name="transformers",
        )
    return transformers


@contextlib.contextmanager
def empty_parameters(keep_numel: int = 0) -> Iterator[None]:
    """Within this context modules register their parameters on the meta device; buffers stay real.

    Args:
        keep_numel: Parameters of at most this many elements keep their values.

    Yields:
        Nothing.

    Example:
        >>> with empty_parameters():
        ...     layer = nn.BatchNorm1d(4)
        >>> layer.weight.device, layer.running_var.device
        (device(type='meta'), device(type='cpu'))
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta and param.numel() > keep_numel:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            if not keep_numel:
                # It comes from a checkpoint: initializing it takes a millisecond and has no effect.
                empty._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[name] = empty

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter or buffer, and its name there.

    Args:
        model: The model.
        name: Dotted name, as in `state_dict()`.

    Returns:
        The module and the last part of the name.

    Example:
        >>> owner_of(nn.Sequential(nn.Linear(2, 2)), "0.weight")[1]
        'weight'
    """
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _parts(config: Any) -> list[Any]:
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(sub for sub in subs if sub is not None)]


def load_config(source: Any, overrides: dict[str, Any], trust_remote_code: bool) -> Any:
    """Read a model's config and apply the user's changes to it.

    Args:
        source: A folder with `config.json`, or a transformers config (it is copied, not changed).
        overrides: Config attributes to set; each must exist.
        trust_remote_code: Whether code of the checkpoint may run.

    Returns:
        The config.

    Raises:
        OptionError: An override that the config does not have.
        CheckpointError: No usable `config.json`.
    """
    transformers = import_transformers()
    attention = overrides.pop("attn_implementation", None)
    if isinstance(source, transformers.PretrainedConfig):
        config = copy.deepcopy(source)
    else:
        path = Path(source) / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no config.json in this folder")
        try:
            config = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        except (ValueError, KeyError, OSError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    for name, value in overrides.items():
        holders = [part for part in _parts(config) if hasattr(part, name)]
        if not holders or name.startswith("_"):
            raise OptionError(
                f"option {name}: neither an option of load_model nor an attribute of {type(config).__name__}"
            )
        current = getattr(holders[0], name)
        if isinstance(value, dict) and hasattr(current, "to_dict"):
            for key, inner in value.items():
                if not hasattr(current, key):
                    raise OptionError(f"option {name}: {type(current).__name__} has no attribute {key!r}")
                setattr(current, key, inner)
        else:
            setattr(holders[0], name, value)
    if attention is not None:
        config._attn_implementation = attention
    return config


def build_model(
    config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False, keep_numel: int = 0
) -> Any:
    """Build the causal LM of a config: parameters on the meta device, buffers real, weights not tied.

    Args:
        config: A transformers config; it is copied.
        dtype: Dtype of the floating parameters.
        trust_remote_code: Whether code of the checkpoint may run.
        keep_numel: As in `empty_parameters`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: The config's model class is unknown, or is no causal LM.
        OptionError: The model needs remote code and `trust_remote_code` is False.

    Example:
        >>> from transformers import GPT2Config
        >>> build_model(GPT2Config(n_layer=1, n_embd=8, n_head=2), torch.float32).device
        device(type='meta')
    """
    transformers = import_transformers()
    from transformers import initialization

    config = copy.deepcopy(config)
    auto = transformers.AutoModelForCausalLM
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        if not trust_remote_code and type(config) not in auto._model_mapping:
            raise OptionError(
                "option trust_remote_code: this model's code comes with its checkpoint; it runs only with "
                "trust_remote_code=True"
            )
    elif type(config) not in auto._model_mapping:
        # Text and images: a language model that takes both, where there is no class for text alone.
        both = transformers.AutoModelForImageTextToText
        auto = both if type(config) in both._model_mapping else auto
    with empty_parameters(keep_numel), initialization.no_tie_weights():
        try:
            model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):
                known = type(config).__name__
                raise CheckpointError(f"[load_model] {known} belongs to no causal language model") from error
            raise
    return model.eval()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on a device; one on the meta device has no value and is an error."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise CheckpointError(
                    f"[load_model] buffer {path}.{name} has no value: it is in no file, and the model's "
                    "__init__ makes "
                    "it on the meta device"
                )
            module._buffers[name] = buffer.to(device)


def reset_flags(model: nn.Module, names: set[str]) -> None:
    """Let transformers' initialization see the modules that hold these parameters as new."""
    for name in names:
        module: Any = owner_of(model, name)[0]
        module._is_hf_initialized = False


def initialize(model: Any, names: set[str], device: torch.device) -> None:
    """Give parameters that a checkpoint may lack the values transformers gives them."""
    if not names:
        return
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for name in names:
        module, last = owner_of(model, name)
        old = getattr(module, last)
        module._parameters[last] = nn.Parameter(
            torch.zeros_like(old, device=device), requires_grad=old.requires_grad
        )
    reset_flags(model, names)
    with torch.no_grad():
        model.initialize_weights()
