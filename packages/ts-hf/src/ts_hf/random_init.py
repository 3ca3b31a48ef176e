"""A model with random weights, made and packed block by block: for tests and benchmarks of large shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ts_core.blocks import find_blocks

from .streaming import Packing

__all__ = ["fill_random"]

# Classes whose matrices every transformers model initializes; others are drawn here first.
_ALWAYS_DRAWN = (nn.Linear, nn.Embedding)


def _std(model: Any) -> float:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for name in ("initializer_range", "init_std"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            return float(value)
    return 0.02


class _Filler:
    def __init__(self, model: Any, packing: Packing, device: torch.device) -> None:
        self.model = model
        self.packing = packing
        self.device = device
        self.std = _std(model)
        self.blocks = {id(block) for block in find_blocks(model)}
        self.tied = set(getattr(model, "all_tied_weights_keys", None) or {})

    def parameters_of(self, path: str, module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
        for last, parameter in module._parameters.items():
            name = f"{path}.{last}" if path else last
            if parameter is not None and name not in self.tied:
                yield name, last, parameter

    def materialize(self, path: str, module: nn.Module) -> None:
        for name, last, parameter in self.parameters_of(path, module):
            flagged: Any = parameter
            if not parameter.is_meta:
                flagged._is_hf_initialized = (
                    True  # it has the value of __init__ and of the model's own initialization
                )
                continue
            values = self.packing.reserve(name, parameter.shape, parameter.dtype)
            if values is None:
                values = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if (
                parameter.dim() >= 2
                and parameter.is_floating_point()
                and not isinstance(module, _ALWAYS_DRAWN)
            ):
                values.normal_(0.0, self.std)
            module._parameters[last] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        unset: Any = module
        unset._is_hf_initialized = False

    def store(self, path: str, module: nn.Module) -> None:
        for name, last, parameter in self.parameters_of(path, module):
            kept: Any = self.packing.store(name, parameter.detach().to(self.device), parameter)
            kept._is_hf_initialized = True
            module._parameters[last] = kept

    def subtree(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for inner, child in module.named_modules():
            yield (f"{path}.{inner}" if path and inner else path or inner), child

    def run(self, path: str, module: nn.Module, owner: Any) -> None:
        """Initialize children first, as transformers does; a block is packed as soon as it is complete."""
        whole = id(module) in self.blocks
        if whole:
            for name, child in self.subtree(path, module):
                self.materialize(name, child)
        self.visit(path, module, owner, materialized=whole)
        if whole:
            for name, child in self.subtree(path, module):
                self.store(name, child)

    def visit(self, path: str, module: nn.Module, owner: Any, *, materialized: bool) -> None:
        if not materialized:
            self.materialize(path, module)
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            inner_owner = child if hasattr(child, "_initialize_weights") else owner
            if materialized:
                self.visit(inner, child, inner_owner, materialized=True)
            else:
                self.run(inner, child, inner_owner)
        owner._initialize_weights(module)


def fill_random(model: Any, packing: Packing, device: torch.device) -> None:
    """Draw every parameter as its model class would: matrices from normal(0, initializer_range).

    Values come from torch's global CPU generator, so `torch.manual_seed` fixes them, whatever the device and
    the codec.

    Args:
        model: From `build_model`, with `keep_numel` so that small parameters have their initial values.
        packing: What is stored how.
        device: Where the tensors end up.
    """
    from transformers import initialization

    filler = _Filler(model, packing, device)
    with torch.no_grad(), initialization.guard_torch_init_functions():
        filler.run("", model, model)
        for path, module in model.named_modules():
            for _, last, parameter in filler.parameters_of(path, module):
                if parameter.device != device and not parameter.is_meta:
                    module._parameters[last] = nn.Parameter(
                        parameter.detach().to(device), requires_grad=parameter.requires_grad
                    )
        model.tie_weights(recompute_mapping=False)
