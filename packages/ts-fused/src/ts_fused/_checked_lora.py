"""Linear layers with plain LoRA adapters, in the form that PEFT gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._compare import (
    Verdict,
    any_global_hook,
    differences,
    hooked,
    random_linear,
    random_tensor,
    run_with_gradients,
)
from .lora import LoraAdapter, LoraProjection, lora_linears, run_projections

__all__ = ["check_lora", "looks_like_lora", "lora_projection", "run_lora", "small_twin", "worth_it"]


def looks_like_lora(module: Any) -> bool:
    """Tell whether a module holds a linear layer and adapters beside it."""
    there = all(hasattr(module, n) for n in ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters"))
    return there and type(module.base_layer).forward is nn.Linear.forward


_LINEAR = nn.Linear.forward


def _own_parameters(module: Any) -> bool:
    """Whether weight and bias are parameters, and not computed from others by a parametrization."""
    own = module._parameters
    return "weight" in own and "bias" in own


def _watched(module: Any) -> bool:
    """Tell what `hooked` does, in less time: this runs for every part of a layer at every call."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or ("forward" in own and hooked(module))
    )


def _plain_factor(module: Any) -> bool:
    own = module._parameters
    return (
        type(module).forward is _LINEAR
        and own.get("bias", False) is None
        and "weight" in own
        and not _watched(module)
    )


def _passes(dropout: Any) -> bool:
    """Tell whether a dropout hands its input on as it is; one in training drops in a layer in eval too."""
    kind = type(dropout)
    still = kind is nn.Identity or (kind is nn.Dropout and (dropout.p == 0.0 or not dropout.training))
    return still and not _watched(dropout)


def lora_projection(layer: Any, x: Tensor) -> LoraProjection | None:
    """Describe a layer as it stands, or return None where its own code must run.

    Its own code runs while adapters are disabled or merged, for DoRA and other variants, with dropout, with
    hooks on one of the parts or a parametrization, with a trained base, and where input and base differ in
    dtype.
    """
    # Children from their dictionary: this runs at every call, and an attribute of a module costs a search.
    parts = layer._modules
    base = parts["base_layer"]
    plain = type(base).forward is _LINEAR and _own_parameters(base) and not _watched(base)
    if not plain or layer.disable_adapters or layer.merged or any_global_hook():
        return None
    variants = layer.__dict__.get("lora_variant") or parts.get("lora_variant") or ()
    factors_a, factors_b, dropouts = (parts[key]._modules for key in ("lora_A", "lora_B", "lora_dropout"))
    adapters = []
    place = x.device
    for name in layer.active_adapters:
        if name not in factors_a:
            continue
        a, b, dropout = factors_a[name], factors_b[name], dropouts[name]
        if name in variants or not (_passes(dropout) and _plain_factor(a) and _plain_factor(b)):
            return None
        a, b = a._parameters["weight"], b._parameters["weight"]
        if not (a.is_floating_point() and a.device == place and b.device == place):
            return None
        adapters.append(LoraAdapter(a, b, float(layer.scaling[name])))
    weight, bias = base._parameters["weight"], base._parameters["bias"]
    fits = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    fits = fits or torch.is_autocast_enabled(x.device.type)
    if not fits or weight.requires_grad or weight.dim() != 2 or weight.device != place or x.dim() == 0:
        return None
    return LoraProjection(weight, adapters, bias)


def small_twin(layer: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Make a small layer of the same class, with random factors: fresh ones are zero and hide mistakes."""
    twin: Any = object.__new__(type(layer))
    twin.__dict__ = dict(layer.__dict__)
    base = random_linear(12, 20, device, dtype, 9 * seed, bias=True).requires_grad_(False)
    a, b = nn.ModuleDict(), nn.ModuleDict()
    for i, name in enumerate(layer.lora_A):
        biases = [
            getattr(factors[name], "bias", None) is not None for factors in (layer.lora_A, layer.lora_B)
        ]
        a[name] = random_linear(12, 3, device, dtype, 9 * seed + 2 * i + 1, bias=biases[0])
        b[name] = random_linear(3, 20, device, dtype, 9 * seed + 2 * i + 2, bias=biases[1])
    drop = nn.ModuleDict({name: nn.Identity() for name in layer.lora_dropout})
    twin.__dict__["_modules"] = {
        **layer._modules, "base_layer": base, "lora_A": a, "lora_B": b, "lora_dropout": drop,
    }  # fmt: skip
    twin.__dict__["_disable_adapters"] = False
    twin.__dict__["merged_adapters"] = []
    return twin


def check_lora(layer: Any, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Compare a small layer of the same class, then give the layer its fused path."""
    total = Verdict()
    for kind in dict.fromkeys((torch.float32, dtype)):
        twin = small_twin(layer, device, kind)
        x = random_tensor((2, 3, 12), device, kind, 0).requires_grad_()
        projection = lora_projection(twin, x)
        if projection is None:
            return Verdict(reason="its adapters are not plain ones: a variant, a bias, a hook")
        inputs = (x, *(t for adapter in projection.adapters for t in adapter[:2]))
        theirs = run_with_gradients(lambda x, *_, m=twin: type(m).forward(m, x), inputs)
        ours = run_with_gradients(lambda x, *_, p=projection: lora_linears(x, [p])[0], inputs)
        found = differences(ours, theirs, kind)
        if found.reason:
            return found
        total = total.and_(found)
    return total.with_forward("linear", run_lora)


# Multiplications of the base from which on a CPU one function beats PEFT's few: below, calls cost more
# than what is saved. On a GPU it is launches that are saved, at every size.
WORTH_IT = 1 << 26


def worth_it(x: Tensor, width: int) -> bool:
    """Whether layers of that many outputs in all gain by their fused path."""
    return x.device.type != "cpu" or x.numel() * width >= WORTH_IT


def run_lora(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer: its fused path if the call is what was checked, else its own code."""
    if not args and not kwargs and isinstance(x, Tensor) and x.is_floating_point():
        projection = lora_projection(layer, x)
        if projection is not None and worth_it(x, projection.weight.shape[0]):
            return run_projections(x, (projection,))[0]
    return type(layer).forward(layer, x, *args, **kwargs)
