"""Merging PEFT adapters into packed weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ts_core import registry
from ts_core.errors import ArgumentTypeError, OptionError, StateError, message
from ts_core.headroom import require_ram
from ts_core.options import boolean
from ts_quant import QuantizedTensor

__all__ = ["merge_adapters"]


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that PEFT put around others, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer") and hasattr(module, "merge")
    ]


def _check_packs(layers: list[tuple[str, Any]]) -> None:
    for name, layer in layers:
        weight = getattr(layer.get_base_layer(), "weight", None)
        if isinstance(weight, QuantizedTensor) and not getattr(registry.codec(weight.codec), "encodes", True):
            raise OptionError(
                f"option repack: the weight of {name!r} is stored as {weight.codec!r}, a published format "
                "that is decoded but not written here; use repack=False"
            )


def _require_room(layers: list[tuple[str, Any]], repack: bool) -> None:
    """Look whether RAM has room for the matrices that are decoded: all of them, or one at a time."""
    weights = [getattr(layer.get_base_layer(), "weight", None) for _, layer in layers]
    sizes = [
        w.numel() * w.dtype.itemsize
        for w in weights
        if isinstance(w, QuantizedTensor) and w.device.type == "cpu"
    ]
    nbytes = max(sizes, default=0) if repack else sum(sizes)
    require_ram("merge_adapters", nbytes, "Use repack=True, or keep the adapters apart (save_pretrained).")


def merge_adapters(model: nn.Module, *, repack: bool = False, safe_merge: bool = True) -> nn.Module:
    """Add the active adapters to the weights they adapt and take PEFT's modules out; packed weights too.

    What `model.merge_and_unload()` does, which cannot add to packed values: here each packed matrix is
    decoded first, one after the other.

    Args:
        model: What `get_peft_model` returned, not wrapped (`trainstream.unwrap` it before); changed.
        repack: Pack the merged matrices as they were, each as soon as it is merged: RAM holds one decoded
            matrix at a time, and the result is rounded to the codec again. False leaves them decoded.
        safe_merge: Refuse to merge what is not finite.

    Returns:
        The transformers model.

    Raises:
        ArgumentTypeError: Not a PEFT model.
        StateError: It is wrapped.
        OptionError: `repack` with a format that is not written here.
        DoesNotFitError: The decoded matrices have no room in RAM; nothing is changed (a ``MemoryError``).

    Example:
        >>> merge_adapters(model).save_pretrained("merged")  # doctest: +SKIP
    """
    if not hasattr(model, "merge_and_unload"):
        given = type(model).__name__
        raise ArgumentTypeError(message("merge_adapters", "model", "a model of get_peft_model", given))
    if getattr(model, "_trainstream_session", None) is not None:
        raise StateError("[merge_adapters] the model is wrapped; call trainstream.unwrap(model) first")
    boolean("repack", repack)
    boolean("safe_merge", safe_merge)
    layers = _adapted(model)
    if repack:
        _check_packs(layers)
    _require_room(layers, repack)
    with warnings.catch_warnings():
        # PEFT says that what was merged here is not merged again.
        warnings.filterwarnings("ignore", message=".*(already|following adapters).*")
        for _, layer in layers:
            base = layer.get_base_layer()
            packed = getattr(base, "weight", None)
            if not isinstance(packed, QuantizedTensor):
                continue
            base.weight = nn.Parameter(packed.dequantize(), requires_grad=False)
            if repack:
                layer.merge(safe_merge=safe_merge)
                with torch.no_grad():
                    again = registry.codec(packed.codec).encode(base.weight.detach(), packed.meta)
                found = QuantizedTensor.from_packed(
                    again, packed.codec, packed.shape, packed.dtype, packed.meta
                )
                base.weight = nn.Parameter(found, requires_grad=False)
        merged: nn.Module = model.merge_and_unload(safe_merge=safe_merge)  # type: ignore[operator]
    return merged
