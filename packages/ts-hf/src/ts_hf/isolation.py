"""Keeps documents of a packed row apart in models that would not do so by themselves.

Two kinds of models need it. Some (gpt-oss of transformers 5.24) make their masks without the positions; they
take masks that are made before, so these are made here. And where rotary frequencies depend on the length
("longrope"), transformers chooses them by the longest document of the whole batch; here each document gets
those of its own length, as it would alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import OptionError

from .losses import backbone
from .packing import ISOLATING, check_isolation

__all__ = ["isolate_documents"]

_MARK = "_ts_isolated"
_KINDS = ("full_attention", "sliding_attention")


def _lengths(positions: Tensor) -> Tensor:
    """Return for each token the length of its document: `(rows, S)` int64."""
    rows, size = positions.shape
    starts = positions == 0
    starts[:, 0] = True
    number = starts.reshape(-1).cumsum(0) - 1
    return torch.bincount(number)[number].reshape(rows, size)


def _packed(positions: Any) -> bool:
    return isinstance(positions, Tensor) and positions.dim() == 2 and bool((positions[:, 1:] == 0).any())


# ------------------------------------------------------------------------------------------------ masks


def _with_masks(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a backbone the masks of packed rows, where it is called with positions and without a mask."""
    positions = kwargs.get("position_ids")
    given: Any = kwargs.get("inputs_embeds")
    given = kwargs.get("input_ids", args[0] if args else None) if given is None else given
    if kwargs.get("attention_mask") is not None or len(args) > 1 or not _packed(positions):
        return None
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    like = torch.empty(1, dtype=module.dtype, device=given.device)
    words: dict[str, Any] = {
        "config": module.config,
        "inputs_embeds": like.expand(*given.shape[:2], 1),
        "attention_mask": None,
        "position_ids": positions,
    }
    masks = {kind: None for kind in _KINDS if kind in module.config.layer_types}
    makers = (create_causal_mask, create_sliding_window_causal_mask)
    for kind, make in zip(_KINDS, makers, strict=True):
        if kind in masks:
            words.setdefault(_cache_word(make), None)
            masks[kind] = make(**words)
    return args, {**kwargs, "attention_mask": masks}


def _cache_word(make: Any) -> str:
    """The name of the argument for a cache, which has changed."""
    names = inspect.signature(make).parameters
    return "cache" if "cache" in names else "past_key_values"


def _takes_masks(module: nn.Module) -> bool:
    """Whether a backbone's layers say which mask they use, and its forward lets them be given."""
    config: Any = module.config
    kinds = set(getattr(config, "layer_types", None) or ())
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return bool(kinds) and kinds <= set(_KINDS) and "create_sliding_window_causal_mask" in names


# --------------------------------------------------------------------------------------------- rotary


def _long_rope(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Give the tokens of each document the frequencies of its own length."""
    positions: Any = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not _packed(positions):
        return None
    original = int(module.config.rope_parameters["original_max_position_embeddings"])
    long = _lengths(positions) > original
    if bool(long.all()) or int(positions.max()) < original:
        return None  # all of one kind, and the output is of that kind
    # Positions of long documents hidden, the module takes the frequencies of short ones.
    hidden = kwargs.get("x", args[0] if args else kwargs.get("hidden_states"))
    short = module.forward(hidden, position_ids=positions.masked_fill(long, 0))
    return tuple(torch.where(long[..., None], a, b) for a, b in zip(output, short, strict=True))


def _dynamic_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions: Any = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    original = int(getattr(module, "original_max_seq_len", 0))
    if original and _packed(positions) and int(positions.max()) >= original:
        raise OptionError(
            f"option packing: a document of {int(positions.max()) + 1} tokens is longer than {original}, and "
            'this model\'s rotary frequencies ("dynamic") then depend on the longest document of the batch; '
            "cut the documents, or train them without packing"
        )


def _isolate_rotary(model: nn.Module) -> None:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            if {"longrope", "dynamic"} & set(kind.values()):
                raise OptionError(
                    f"option packing: {type(module).__name__} has several kinds of rotary frequencies, some "
                    "of which depend on the length of the batch; train it without packing"
                )
        elif kind == "longrope" and not hasattr(module, _MARK):
            module.register_forward_hook(_long_rope, with_kwargs=True)
            setattr(module, _MARK, True)
        elif isinstance(kind, str) and "dynamic" in kind and not hasattr(module, _MARK):
            module.register_forward_pre_hook(_dynamic_rope, with_kwargs=True)
            setattr(module, _MARK, True)


def isolate_documents(model: nn.Module) -> None:
    """See to it that documents of packed rows do not reach each other, or refuse the model.

    For most models nothing is to be done. A model whose masks are made without the positions gets them
    before each forward pass over packed rows, and rotary frequencies that depend on the length ("longrope")
    become those of each document's own length, as if it were alone. Call it before `trainstream.wrap`; the
    Trainer's `packing` does. In a mixture of experts another document may change the last bits of its
    neighbours, since experts then multiply another number of rows; with
    `model.set_experts_implementation("batched_mm")`, which takes more memory, it does not.

    Args:
        model: A transformers `*ForCausalLM`, or a PEFT model around one.

    Raises:
        OptionError: Its documents reach each other whatever is done. While it runs: documents beyond the
            original length with "dynamic" rotary frequencies.

    Example:
        >>> isolate_documents(model)  # doctest: +SKIP
    """
    _isolate_rotary(model)
    base: Any = backbone(model)
    text = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
    if text.model_type not in ISOLATING and _takes_masks(base) and not hasattr(base, _MARK):
        handle = base.register_forward_pre_hook(_with_masks, with_kwargs=True)
        try:
            check_isolation(model)
        except BaseException:
            handle.remove()
            raise
        setattr(base, _MARK, True)
        return
    check_isolation(model)
