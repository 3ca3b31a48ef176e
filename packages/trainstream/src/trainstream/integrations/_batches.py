"""How the Trainer collates when it packs documents, and what becomes of its activation checkpointing."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, Trainer
from transformers.data.data_collator import DefaultDataCollator, default_data_collator

from ts_core.errors import OptionError
from ts_core.options import integer
from ts_hf.isolation import isolate_documents
from ts_hf.packing import PackedCollator, flatten_rows

__all__ = ["RowPacking", "packing_option", "recompute_of", "refuse_misspelled"]

LOGGER = logging.getLogger("trainstream")
_OWN = ("chunked_loss", "events", "loss_chunk_size", "packing", "save_in_background")


def refuse_misspelled(options: Iterable[str]) -> None:
    """Raise `OptionError` for a name that is nearly one of the Trainer's own options."""
    for name in options:
        near = difflib.get_close_matches(name, _OWN, n=1, cutoff=0.8)
        if near:
            raise OptionError(f"TrainStreamTrainer has no option {name!r}; did you mean {near[0]}?")


def packing_option(value: Any) -> bool | int:
    """Return `packing`: False, True, or the tokens of a row."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise OptionError(f"option packing: expected False, True or the tokens of a row, given {value!r}")
    return integer("packing", value, minimum=2)  # a row of one token has nothing to predict


class _TrainingCollator:
    """Packs, says how many tokens are no padding, and lays the rows in one for flash attention."""

    def __init__(self, collator: PackedCollator, flat: bool) -> None:
        self.collator, self.flat = collator, flat

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        batch = {**self.collator.pack(examples), "use_cache": False}
        return flatten_rows(batch) if self.flat else batch


class RowPacking:
    """The collators of a Trainer whose training rows are packed; evaluation has one document a row.

    Args:
        trainer: Built, with its model.
        rows: True or the tokens of a row.

    Raises:
        OptionError: A collator of the user's own, or a model whose documents would reach each other.
    """

    def __init__(self, trainer: Trainer, rows: bool | int) -> None:
        """Check that the Trainer's own collator is replaced, not a user's."""
        given = trainer.data_collator
        if given is not default_data_collator and not isinstance(
            given, DataCollatorWithPadding | DefaultDataCollator
        ):
            raise OptionError(
                f"option packing: batches are made by {type(given).__name__} already; pass no data_collator, "
                "or leave packing to it (SFTConfig(packing=True) with TRL's SFTTrainer)"
            )
        isolate_documents(trainer.model)
        tokenizer = trainer.processing_class
        pad = getattr(tokenizer, "pad_token_id", None)
        pad = getattr(trainer.model.config, "pad_token_id", None) if pad is None else pad
        pad = 0 if pad is None or pad < 0 else pad
        flash = "flash" in str(getattr(trainer.model.config, "_attn_implementation", ""))
        length = None if isinstance(rows, bool) else rows
        self._training = _TrainingCollator(PackedCollator(length, pad), flash)
        self._evaluation = PackedCollator(None, pad, share_rows=False)

    def collator(self, training: bool) -> Any:
        """Return the collator for training or for evaluation."""
        return self._training if training else self._evaluation


def recompute_of(arguments: Any, layers: Sequence[nn.Module], given: bool) -> bool | list[int] | None:
    """Take over activation checkpointing from `TrainingArguments`: blocks recompute in backward as it asks.

    Both at once would run every block three times. Afterwards the arguments say that it is off.

    Args:
        arguments: Of the Trainer; changed.
        layers: The decoder layers; without any, checkpointing is left to transformers.
        given: Whether `recompute` was given: then it holds.

    Returns:
        The value for `recompute`, or None.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    if not layers or not any(getattr(arguments, name, False) for name in names):
        return None
    settings: dict[str, Any] = {}
    for name in reversed(names):
        value = getattr(arguments, f"{name}_kwargs", None)
        settings.update(value if isinstance(value, dict) else {})
    if settings.get("offload"):
        return None  # where transformers puts saved activations is its own affair
    for name in names:
        if hasattr(arguments, name):
            setattr(arguments, name, False)
    if given:
        LOGGER.info("activation checkpointing: option recompute holds")
        return None
    every = int(settings.get("every_n_layers") or 1)
    return True if every == 1 else list(range(0, len(layers), every))
