"""Log-probabilities of answers for preference training, from a model's hidden states in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ts_core.errors import ArgumentError, OptionError, message
from ts_core.options import integer
from ts_core.paged import with_weights
from ts_fused.logprobs import check_segments, sequence_logprobs, sum_by_sequence
from ts_paging.checkpointed import checkpointed

from .losses import Head, _check_inputs, backbone, head_of

__all__ = ["reference_logprobs", "sequence_logprobs_for"]

IGNORE = -100


def _chunk_logprobs(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(head.logits(hidden), targets, ignore_index=IGNORE, reduction="none")


def _called_in_chunks(head: Head, hidden: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """Call the head for each chunk, and once more in backward: for heads that are more than a matrix."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    parts = [
        checkpointed(
            _chunk_logprobs, head, rows[start : start + chunk_size], flat[start : start + chunk_size]
        )
        for start in range(0, len(rows), chunk_size)
    ]
    return torch.cat(parts).reshape(targets.shape)


def _fused(head: Head, hidden: Tensor, labels: Tensor, chunk_size: int, options: dict[str, Any]) -> Tensor:
    weight = head.module.weight
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weight.dtype)
    return sequence_logprobs(
        hidden, weight, labels, head.module.bias, chunk_size=chunk_size, softcap=head.soft_cap,
        logit_scale=head.scale, validate=False, **options,
    )  # fmt: skip


def sequence_logprobs_for(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    average: bool = False,
    segments: Tensor | None = None,
    num_segments: int | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Compute the log-probability of each row's labels: `sum_t log p(labels[t + 1] | tokens up to t)`.

    The head, its soft cap and its scale are looked up in the model as `causal_lm_loss_for` does.

    Args:
        model: A transformers `*ForCausalLM`, or a PEFT model around one; wrapped or not.
        batch: What the model is called with (`input_ids`, `attention_mask` or `position_ids`, ...), and
            `labels` `(B, S)`: -100 where a token is not part of the answer.
        average: Divide by the number of labels that count.
        segments: As for `ts_fused.sequence_logprobs`: several answers in a row (`document_ids`).
        num_segments: How many there are.
        chunk_size: Tokens whose logits exist at a time.

    Returns:
        `(B,)` or `(num_segments,)`, float32 with a graph; 0 for an answer without a token.

    Raises:
        OptionError: A model that does something to its logits that is not known here.
        ArgumentError: No labels, or labels or segments that do not fit.

    Example:
        >>> chosen = sequence_logprobs_for(model, batch)  # doctest: +SKIP
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ArgumentError(
            message("sequence_logprobs_for", "batch", "a mapping with labels", f"keys {sorted(batch)}")
        )
    chunk_size = integer("chunk_size", chunk_size, minimum=1)
    count = check_segments("sequence_logprobs_for", labels, segments, num_segments)
    head = head_of(model)
    passed = {key: value for key, value in batch.items() if key not in ("labels", "num_tokens")}
    hidden = backbone(model)(**{**passed, "use_cache": False}).last_hidden_state
    _check_inputs(hidden, labels, head.vocabulary, IGNORE)
    labels = labels.to(hidden.device, torch.long)
    options = {"average": average, "segments": segments, "num_segments": num_segments}
    trained = head.plain and any(p.requires_grad for p in head.module.parameters())
    if head.plain and not trained:
        # The weight of a paged head is on the device only in here, and is read from the module here.
        result: Tensor = with_weights(head.module, _fused, head, hidden, labels, chunk_size, options)
        return result
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    values = _called_in_chunks(head, hidden, targets, chunk_size)
    if segments is not None:
        segments = F.pad(segments[:, 1:].to(hidden.device), (0, 1), value=-1)
    return sum_by_sequence(values, targets, segments, count, IGNORE, average)


@contextlib.contextmanager
def _adapters_off(model: Any) -> Iterator[None]:
    if not hasattr(model, "peft_config"):
        yield
        return
    if hasattr(model, "disable_adapter"):  # of get_peft_model
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()  # of transformers' own add_adapter
    try:
        yield
    finally:
        model.enable_adapters()


def _check_reference(model: nn.Module) -> None:
    """Refuse adapters without which the model is not the one that training began with."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    for name, config in configs.items():
        if getattr(config, "bias", "none") != "none":
            raise OptionError(
                f"[reference_logprobs] adapter {name!r} trains biases of the base (bias={config.bias!r}), "
                "which stay when adapters are off; use a frozen copy of the base as the reference"
            )


@torch.no_grad()
def reference_logprobs(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    average: bool = False,
    chunk_size: int = 1024,
) -> list[Tensor]:
    """Compute the reference's log-probabilities with the model that will be trained: its adapters off.

    Call it once, before the first step, and keep the numbers with the data: no second model is needed, and
    nothing that is trained later (an output head, an embedding, the whole model) moves them. Dropout is off.

    Args:
        model: The PEFT model (adapters are off while this runs, and `modules_to_save` are the base's), or a
            model that will be trained whole.
        batches: Mappings as for `sequence_logprobs_for`.
        average: As for `sequence_logprobs_for`.
        chunk_size: As for `sequence_logprobs_for`.

    Returns:
        For each batch `(B,)` float32 on the CPU.

    Raises:
        OptionError: Adapters that leave trained biases in the base.

    Example:
        >>> chosen = reference_logprobs(model, [batch["chosen"] for batch in data])  # doctest: +SKIP
    """
    _check_reference(model)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _adapters_off(model):
            return [
                sequence_logprobs_for(model, batch, average=average, chunk_size=chunk_size).cpu()
                for batch in batches
            ]
    finally:
        for module in training:
            module.training = True
