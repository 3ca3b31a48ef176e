"""The loss of a causal LM from its hidden states, in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ts_core.errors import OptionError
from ts_hf import backbone, causal_lm_loss_for
from ts_hf.losses import head_of

__all__ = ["chunking_obstacle", "loss_in_chunks"]


def loss_in_chunks(
    model: nn.Module, inputs: dict[str, Any], num_items: torch.Tensor | int | None, chunk_size: int
) -> torch.Tensor:
    """Compute the loss of a batch without its logits as a whole."""
    passed = {key: value for key, value in inputs.items() if key not in ("labels", "num_items_in_batch")}
    hidden = backbone(model)(**{"use_cache": False, **passed}).last_hidden_state
    return causal_lm_loss_for(model, hidden, inputs["labels"], num_items, chunk_size)


def chunking_obstacle(model: nn.Module) -> str:
    """Return why the loss of a model cannot be computed from hidden states, or an empty text."""
    try:
        head_of(model)
    except (OptionError, AttributeError) as error:
        return str(error)
    if getattr(model.config, "output_router_logits", False):
        return "output_router_logits adds the router's loss to the model's own"
    return ""
