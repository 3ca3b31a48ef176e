"""The causal-LM loss of a transformers model without its logits ever existing as a whole.

    loss = sum_{b,s} CE(f(h_{b,s} W^T + bias), labels_{b,s+1}) / num_items

`h` is the last hidden state, `W` the output head, and `f` what the model's class does to its logits: a scale,
a soft cap `c tanh(x / c)`, or nothing. `f` is read from the config. A model that does something to its logits
that is not known here is refused by name: leaving it out would train to a wrong loss without any error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, message
from ts_core.options import integer
from ts_core.paged import with_weights
from ts_fused import chunked_cross_entropy
from ts_paging.checkpointed import checkpointed

__all__ = ["Head", "backbone", "causal_lm_loss_for", "count_items", "head_of"]

# Attributes that scale logits. Several model families use one name in opposite senses.
_MULTIPLY = ("logit_scale", "lm_head_multiplier")
_DIVIDE = ("logits_mup_width_multiplier",)
_SOFT_CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
_LOGITS_SCALING = {"granite": "divide", "minicpm3": "divide", "hyperclovax": "multiply"}
_OUTPUT_MULTIPLIER = ("muse_spark", "muse_glimmer")
# What looks like a change of the logits, and what only looks so.
_SUSPICIOUS = re.compile(
    r"logit.*(scal|cap|mult|temp|mup)|(scal|cap|mult|temp|mup).*logit|lm_head.*(scal|mult)|soft_?cap"
)
_HARMLESS = re.compile(
    r"att(n|ention)|router|init_value|gate|_up_|moe|contrastive|lsd_|invalid|router|max_logit_scale"
)
#: Decoders of encoder-decoder models, trained alone: transformers 5.24 takes their labels as they are.
_NOT_SHIFTED = frozenset(
    {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen",
        "musicgen_melody", "pegasus", "plbart", "whisper",
    }
)  # fmt: skip
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEUTRAL = (None, 0, 0.0, 1, 1.0, False)


def count_items(labels: torch.Tensor, ignore_index: int = -100) -> int:
    """Count the labels that a causal-LM loss is averaged over: the valid ones after the shift.

    The label at position 0 of each row is predicted by nothing and does not count.

    Args:
        labels: `(B, S)` or `(S,)`, integer, any device.
        ignore_index: Label that is left out.

    Returns:
        The number of `labels[..., 1:]` that are not `ignore_index`. Waits for the device.

    Raises:
        ArgumentTypeError: `labels` is no integer tensor.
        ArgumentError: `labels` has no dimension.

    Example:
        >>> count_items(torch.tensor([[5, 6, -100, 7]]))
        2
    """
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        given = getattr(labels, "dtype", type(labels))
        raise ArgumentTypeError(message("count_items", "labels", "an integer tensor", given))
    if labels.dim() == 0:
        raise ArgumentError(message("count_items", "labels", "shape (B, S) or (S,)", "a scalar"))
    return int((labels[..., 1:] != ignore_index).sum())


def _unwrap_peft(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT one; its injected adapters stay in it."""
    inner: Any = model
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        for name, config in inner.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise OptionError(
                    f"[backbone] adapter {name!r}: {type(config).__name__} changes the inputs outside the "
                    "transformers "
                    "model, so the hidden states cannot be had without it; use the model's own loss"
                )
        inner = inner.get_base_model()
    return inner


def backbone(model: nn.Module) -> nn.Module:
    """Return the part of a causal LM that computes the last hidden state, without the output head.

    Called as `backbone(model)(input_ids=..., attention_mask=...).last_hidden_state`. Adapters that PEFT put
    into
    the layers are inside it.

    Args:
        model: A transformers `*ForCausalLM`, or a PEFT model around one.

    Returns:
        The module named by the model's `base_model_prefix`.

    Raises:
        OptionError: No such module, or a PEFT method that works outside the transformers model.

    Example:
        >>> hidden = backbone(model)(input_ids=ids).last_hidden_state  # doctest: +SKIP
    """
    inner = _unwrap_peft(model)
    prefix = getattr(inner, "base_model_prefix", "")
    found = getattr(inner, prefix, None) if prefix else None
    if not isinstance(found, nn.Module) or found is inner:
        raise OptionError(
            f"[backbone] {type(inner).__name__} has no module named by its base_model_prefix ({prefix!r}); "
            "a transformers *ForCausalLM is expected"
        )
    return found


@dataclass(frozen=True)
class Head:
    """The output head of a causal LM and what happens to its logits.

    Attributes:
        module: The head; called for what a plain matrix product does not cover.
        plain: Whether it is an `nn.Linear` (a weight and perhaps a bias) and nothing else.
        scale: Factor of the logits, 1.0 for none.
        soft_cap: `c` of `c tanh(x / c)` after the scale, or None.
    """

    module: Any
    plain: bool
    scale: float
    soft_cap: float | None

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens it scores, where its weight tells."""
        weight = getattr(self.module, "weight", None)
        return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits in fp32: `(N, H)` to `(N, V)`."""
        values: torch.Tensor = self.module(hidden)
        if self.scale != 1.0:
            values = values * self.scale
        values = values.float()
        if self.soft_cap is not None:
            values = torch.tanh(values / self.soft_cap) * self.soft_cap
        return values


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _scale_of(name: str, value: float, model_type: str) -> float:
    if name in _MULTIPLY:
        return float(value)
    if name in _DIVIDE:
        return 1.0 / float(value)
    if name == "logits_scaling":
        for family, sense in _LOGITS_SCALING.items():
            if model_type.startswith(family):
                return float(value) if sense == "multiply" else 1.0 / float(value)
    if name == "output_multiplier" and model_type in _OUTPUT_MULTIPLIER:
        return float(value)
    raise OptionError(
        f"[causal_lm_loss_for] the config of {model_type!r} has {name}={value!r}, which may change the "
        "logits in a way "
        "not known here; use the model's own loss"
    )


def _attributes(config: Any) -> dict[str, Any]:
    names = dict(config.to_dict()) if hasattr(config, "to_dict") else dict(vars(config))
    # Properties are in no dict; MiniCPM's scale is one.
    names.update({name: getattr(config, name) for name in ("logits_scaling",) if hasattr(config, name)})
    return names


def _logit_changes(config: Any) -> tuple[float, float | None]:
    text = _text_config(config)
    model_type = str(getattr(text, "model_type", ""))
    scale, cap = 1.0, None
    for name, value in sorted(_attributes(text).items()):
        if name in _SOFT_CAPS:
            cap = float(value) if value else cap
        elif name == "output_multiplier" or (_SUSPICIOUS.search(name) and not _HARMLESS.search(name)):
            if isinstance(value, (int, float)) and value not in _NEUTRAL:
                scale *= _scale_of(name, value, model_type)
            elif value not in _NEUTRAL and not isinstance(value, bool):
                _scale_of("?" + name, value, model_type)
    return scale, cap


def _check_predicts_next(model: Any) -> None:
    """Refuse models whose labels are not the tokens that follow: the losses here shift them."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    config: Any = model.config
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    own = getattr(model, "_loss_function", None) or LOSS_MAPPING.get(kind, ForCausalLMLoss)
    what = ""
    if getattr(config, "is_encoder_decoder", False):
        what = "has an encoder and a decoder, whose labels are not shifted"
    elif own is not ForCausalLMLoss:
        what = f"computes {getattr(own, '__name__', type(own).__name__)}"
    elif getattr(config, "model_type", "") in _NOT_SHIFTED:
        what = "does not shift its labels"
    if what:
        raise OptionError(
            f"[causal_lm_loss_for] {type(model).__name__} {what}, and a loss over next tokens is another "
            "one; use the model's own loss"
        )


def _check_nothing_between(model: Any, base: nn.Module, head: nn.Module) -> None:
    """Refuse models that put other layers between the last hidden state and the head."""
    inside = set(map(id, base.modules()))
    if id(head) not in inside and not any(child is head for child in model.children()):
        raise OptionError(
            f"[causal_lm_loss_for] the output head of {type(model).__name__} is part of a larger module, "
            "whose other "
            "layers come before it; use the model's own loss"
        )
    for name, child in model.named_children():
        if child is not base and child is not head and any(True for _ in child.parameters()):
            raise OptionError(
                f"[causal_lm_loss_for] {type(model).__name__} has a module {name!r} beside its backbone and "
                "its output "
                "head, whose part in the logits is not known here; use the model's own loss"
            )


def head_of(model: nn.Module) -> Head:
    """Find the output head of a causal LM and what its class does to the logits.

    Args:
        model: A transformers `*ForCausalLM`, or a PEFT model around one.

    Returns:
        The head.

    Raises:
        OptionError: No head, layers between backbone and head, a config with a change of the logits that is
            not known here, or a model that predicts something else than next tokens; the message names it.

    Example:
        >>> head_of(model).soft_cap  # doctest: +SKIP
        30.0
    """
    inner = _unwrap_peft(model)
    _check_predicts_next(inner)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(head, nn.Module):
        raise OptionError(
            f"[causal_lm_loss_for] {type(inner).__name__} has no output head to compute the loss with"
        )
    _check_nothing_between(inner, backbone(model), head)
    scale, cap = _logit_changes(inner.config)
    # Adapters and hooks on the head make it more than its weight.
    hooked = bool(head._forward_hooks or head._forward_pre_hooks)
    plain = type(head) is nn.Linear and not hooked and head.weight.dtype in _FUSED_DTYPES
    return Head(head, plain, scale, cap)


def _chunk_sum(head: Head, hidden: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return F.cross_entropy(head.logits(hidden), targets, ignore_index=ignore_index, reduction="sum")


def _chunked_loss(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    num_items: int | torch.Tensor | None,
    chunk_size: int,
    ignore_index: int,
) -> torch.Tensor:
    """Call the head chunk by chunk, for heads that are more than a matrix; backward computes them again."""
    valid = (targets != ignore_index).sum()
    total = hidden.sum(dtype=torch.float32) * 0.0  # a graph exists even if there is no token
    for start in range(0, hidden.shape[0], chunk_size):
        rows = slice(start, start + chunk_size)
        part = checkpointed(_chunk_sum, head, hidden[rows], targets[rows], ignore_index)
        total = total + part
    divisor = torch.as_tensor(valid if num_items is None else num_items, device=total.device)
    return total / divisor.clamp(min=1)


def _fused_loss(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    num_items: int | torch.Tensor | None,
    chunk_size: int,
    ignore_index: int,
) -> torch.Tensor:
    """Hand the weight of a plain head to the fused loss."""
    weight, bias = head.module.weight, head.module.bias
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weight.dtype)
    return chunked_cross_entropy(
        hidden,
        weight,
        targets,
        bias,
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        num_items=num_items,
        softcap=head.soft_cap,
        logit_scale=head.scale,
        validate=False,  # done before, where it costs nothing; a GPU would have to be waited for
    )


def _check_inputs(
    hidden: torch.Tensor, labels: torch.Tensor, vocabulary: int | None, ignore_index: int
) -> None:
    name = "causal_lm_loss_for"
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ArgumentTypeError(message(name, "labels", "an integer tensor", labels.dtype))
    if hidden.dim() != 3 or labels.shape != hidden.shape[:2]:
        expected = "labels (B, S) for hidden states (B, S, H)"
        raise ArgumentError(
            message(name, "labels", expected, f"{tuple(labels.shape)} for {tuple(hidden.shape)}")
        )
    shifted = labels[:, 1:]
    if vocabulary is not None and shifted.numel() and labels.device.type == "cpu":
        bad = (shifted != ignore_index) & ((shifted < 0) | (shifted >= vocabulary))
        if bool(bad.any()):
            worst = int(shifted[bad][0])
            raise ArgumentError(
                message(name, "labels", f"0 <= label < {vocabulary}, or {ignore_index}", worst)
            )


def causal_lm_loss_for(
    model: nn.Module,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    num_items: int | torch.Tensor | None = None,
    chunk_size: int = 1024,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Compute the loss that `model(input_ids, labels=labels).loss` is, from the last hidden state.

    `sum CE(f(h W^T + bias)[:, :-1], labels[:, 1:]) / num_items`; see the top of this module. The logits of at
    most `chunk_size` tokens exist at a time, in forward and in backward.

    Args:
        model: The causal LM, or a PEFT model around it; its head and config are looked up.
        hidden: Last hidden state `(B, S, H)`, from `backbone(model)`.
        labels: `(B, S)`, integer, not shifted.
        num_items: Divisor, for losses accumulated over several micro-batches: `count_items` summed over the
        whole
            window. None divides by this batch's own count.
        chunk_size: Tokens per chunk.
        ignore_index: Label that does not count.

    Returns:
        The loss, a scalar in fp32 with a graph. Without any valid label it is 0, and so are all gradients
        (transformers gives NaN there unless `num_items` is given).

    Raises:
        OptionError: A model that does something to its logits that is not known here.
        ArgumentError: Shapes that do not match, a label outside the vocabulary, `num_items` < 0.

    Example:
        >>> hidden = backbone(model)(input_ids=ids).last_hidden_state  # doctest: +SKIP
        >>> loss = causal_lm_loss_for(model, hidden, ids)  # doctest: +SKIP
    """
    chunk_size = integer("chunk_size", chunk_size, minimum=1)
    head = head_of(model)
    _check_inputs(hidden, labels, head.vocabulary, ignore_index)
    if isinstance(num_items, (int, float)) and not num_items > 0:
        valid = count_items(labels, ignore_index)
        if num_items < 0 or valid:
            raise ArgumentError(
                message("causal_lm_loss_for", "num_items", f"a count > 0 for {valid} valid labels", num_items)
            )
        num_items = None
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    targets = labels[:, 1:].reshape(-1).to(flat.device, torch.long)
    if not head.plain:
        return _chunked_loss(head, flat, targets, num_items, chunk_size, ignore_index)
    # The weight of a paged head is on the device only in here, and is read from the module here.
    loss: torch.Tensor = with_weights(
        head.module, _fused_loss, head, flat, targets, num_items, chunk_size, ignore_index
    )
    return loss
