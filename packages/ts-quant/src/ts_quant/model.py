"""`quantize_model`: pack the frozen block weights of a module where they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ts_core import registry
from ts_core.blocks import find_blocks
from ts_core.errors import ArgumentError, DoesNotFitError, message
from ts_core.memory import host_budget, parse_bytes
from ts_core.options import integer

from ._ops import FLOATS
from .error_fit import quantize_with_error
from .functional import find_codec, meta_for
from .precision import NEXT_CODEC, keep_precise_share, precise_names
from .tensor import QuantizedTensor

__all__ = ["QuantizableWeight", "dequantize_model", "quantizable_weights", "quantize_model"]

_PINNED_FRACTION = 0.4
_LOG = logging.getLogger("trainstream")


@dataclass
class QuantizableWeight:
    """A parameter to pack, and every place that holds it.

    Attributes:
        name: Its first name in the model.
        places: (module, key in its ``_parameters``) of each.
    """

    name: str
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is there now."""
        module, name = self.places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter


def quantize_model(
    model: nn.Module,
    quantize: str = "nf4",
    *,
    blocks: Iterable[nn.Module] | None = None,
    block_size: int = 64,
    pin_budget: int | str | None = None,
    keep_precise: float | str | bool | None = 0,
    error_rank: int = 0,
    error_iters: int = 1,
    double_quant: bool = False,
) -> dict[str, int]:
    """Pack the frozen weights of a model's blocks, one by one.

    Packed are floating parameters of two or more dimensions inside the blocks that do not require grad.
    Left alone: embeddings, the output head and everything else outside the blocks, weights that are tied to
    something outside, trained weights, adapters (`lora_*`), one-dimensional parameters, and what is packed
    already. A parameter shared by several modules is packed once and stays shared. Every weight is checked
    before the first one is replaced. Peak memory above the model's own is one packed tensor.

    Args:
        model: Any module; changed in place. Its weights may be on the CPU, a GPU, or both.
        quantize: "nf4", "int8", "nvfp4", "fp8" (what this GPU computes) or one of its layouts, "mxfp8",
            "fp8_row", "fp8_block".
        blocks: The modules to look in; `None` finds the repeated layer stack.
        block_size: Values per scale, even, >= 2; fp8 and nvfp4 ignore it.
        pin_budget: Bytes (or "20GiB") of packed weights on the CPU to page-lock, where CUDA is usable; `None`
            is 40 % of the machine's RAM. What is beyond it, or cannot be locked, is pageable.
        keep_precise: Extra bytes, as a fraction (up to 0.5) of what all packed weights take without it;
            "auto" and True are 0.05; 0, False and None are off. Within them nf4 weights become int8 and
            nvfp4 weights fp8: taken by falling reduction of the relative Frobenius error per extra byte, each
            that still fits. int8 and fp8 have no codec above them and ignore this; the logger "trainstream"
            says so.
        error_rank: Rank of a fit of each matrix's error, kept with it for `init_lora_from_error`; 0 is none.
            Matrices that are not larger than their two factors, stacks and meta weights have none.
        error_iters: How often to quantize and refit; 1 leaves the packed bytes as they are without a fit.
        double_quant: Quantize the scales too: nf4 and int8 (see `quantize`); other codecs refuse it.

    Returns:
        `{"tensors": how many were packed, "kept_precise": how many of them one codec up, "bytes_before",
        "bytes_after"}`; the bytes are those of these weights alone, with their fits.

    Raises:
        OptionError: An option outside its accepted values, or not available yet.
        ArgumentError: A weight holds a NaN or an infinity; the message names it. The model is unchanged.
        DoesNotFitError: Memory ran out on the way; the message says what is packed by then. Calling again
            carries on from there.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).requires_grad_(False)
        >>> quantize_model(model, "int8")["tensors"]
        2
    """
    block_size = integer("block_size", block_size, minimum=2, maximum=1 << 40, multiple_of=2)
    chosen = find_codec("quantize", quantize)
    meta_for(chosen, block_size, double_quant)
    codec = chosen.name
    share = keep_precise_share(keep_precise)
    fit = integer("error_rank", error_rank, minimum=0), integer("error_iters", error_iters, minimum=1)
    pins = _Pins(None if pin_budget is None else parse_bytes(pin_budget, name="pin_budget"))
    weights = quantizable_weights(model, find_blocks(model, blocks))
    if not weights and not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        _LOG.warning(
            "quantize_model packed nothing: no block holds a frozen matrix. "
            "Freeze what is to be packed first: model.requires_grad_(False)"
        )
    for weight in weights:
        _check_finite(weight)
    totals = {"tensors": 0, "kept_precise": 0, "bytes_before": 0, "bytes_after": 0}
    where = "the measurement for keep_precise"
    try:
        if share and codec not in NEXT_CODEC:
            _LOG.info("keep_precise=%g ignored: %s has no codec above it", share, codec)
        named = ((w.name, w.parameter) for w in weights)
        precise = precise_names(named, codec, block_size, share, double_quant)
        for weight in weights:
            where = weight.name
            before = weight.parameter.numel() * weight.parameter.element_size()
            target = NEXT_CODEC[codec] if where in precise else codec
            packed = _pack(weight, target, (block_size, double_quant), fit, pins)
            for module, name in weight.places:
                module._parameters[name] = packed
            totals["tensors"] += 1
            totals["kept_precise"] += where in precise
            totals["bytes_before"] += before
            totals["bytes_after"] += _held(packed)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DoesNotFitError(
            f"[quantize_model] memory ran out at {where}; {totals['tensors']} of {len(weights)} "
            "weights are packed. Free memory and call quantize_model again: it carries on from there"
        ) from error
    return totals


def dequantize_model(model: nn.Module) -> int:
    """Replace every packed weight of a model by its decoded values, one by one.

    What was lost in packing stays lost: the weights become what the model computed with.

    Args:
        model: Any module; changed in place. Decoded weights have the dtype they presented and stay where they
            were; shared ones stay shared.

    Returns:
        How many weights were decoded.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).requires_grad_(False)
        >>> _ = quantize_model(model, "nf4")
        >>> dequantize_model(model)
        2
    """
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            weight: torch.Tensor | None = parameter
            if isinstance(weight, QuantizedTensor):
                if id(parameter) not in plain:
                    plain[id(parameter)] = nn.Parameter(weight.dequantize(), requires_grad=False)
                module._parameters[name] = plain[id(parameter)]
    return len(plain)


def _places(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, name, full name) of every place that holds a parameter; shared modules once."""
    for prefix, child in module.named_modules(memo=seen, prefix=path):  # type: ignore[arg-type]
        for name, parameter in child._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                yield child, name, f"{prefix}.{name}" if prefix else name


def _storage(parameter: torch.Tensor) -> object:
    """Identify the memory of a parameter; a packed or empty one is its own."""
    if isinstance(parameter, QuantizedTensor) or parameter.is_meta or parameter.numel() == 0:
        return id(parameter)
    return parameter.device, parameter.untyped_storage().data_ptr()


def _eligible(module: nn.Module, parameter: torch.Tensor, full: str) -> bool:
    return (
        not parameter.requires_grad
        and parameter.dim() >= 2
        and parameter.numel() > 0
        and parameter.dtype in FLOATS
        and not isinstance(parameter, QuantizedTensor)
        and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and not any(part.startswith("lora_") for part in full.split("."))
    )


def quantizable_weights(model: nn.Module, blocks: Iterable[nn.Module]) -> list[QuantizableWeight]:
    """List what `quantize_model` would pack, in the order of the model.

    Args:
        model: Any module.
        blocks: Its blocks, from `ts_core.blocks.find_blocks`.

    Returns:
        The frozen floating weights of two or more dimensions inside the blocks; each once, with every place
        that holds it.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).requires_grad_(False)
        >>> [weight.name for weight in quantizable_weights(model, list(model))]
        ['0.weight', '1.weight']
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    weights: dict[int, QuantizableWeight] = {}
    owners: dict[object, set[int]] = {}
    refused: set[int] = set()
    for module, name, full in _places(model, "", set()):
        parameter = module._parameters[name]
        assert parameter is not None
        # Two parameters over one memory are tied as well; packing one would untie them.
        owners.setdefault(_storage(parameter), set()).add(id(parameter))
        if id(module) not in inside or not _eligible(module, parameter, full):
            refused.add(id(parameter))
        weights.setdefault(id(parameter), QuantizableWeight(full)).places.append((module, name))
    tied = {one for together in owners.values() if len(together) > 1 for one in together}
    return [weight for key, weight in weights.items() if key not in refused and key not in tied]


def _check_finite(weight: QuantizableWeight) -> None:
    parameter = weight.parameter.detach()
    if parameter.is_meta:
        return
    low, high = torch.aminmax(parameter)  # a NaN comes out as both
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ArgumentError(
            message(
                "quantize_model",
                weight.name,
                "finite values",
                "a NaN or an infinity",
                "Nothing was changed. Look at how the checkpoint was written",
            )
        )


class _Pins:
    """Page-locks packed tensors until a budget is used up."""

    def __init__(self, budget: int | None) -> None:
        self.left = 0
        if torch.cuda.is_available():
            ram = host_budget()  # a container's, shared by the ranks on it
            share = int(ram.whole_bytes * _PINNED_FRACTION) // ram.ranks
            self.left = share if budget is None else budget

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or size > self.left or size == 0:
            return tensor
        try:
            memory = registry.host_allocator().empty(size)
        except (MemoryError, RuntimeError, OSError):
            self.left = 0  # the system locks no more: the rest stays pageable
            return tensor
        self.left -= size
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _pack(
    weight: QuantizableWeight, codec: str, packing: tuple[int, bool], fit: tuple[int, int], pins: _Pins
) -> nn.Parameter:
    source = weight.parameter.detach()
    size, double = packing
    made = quantize_with_error(source, codec, *fit, block_size=size, double_quant=double, name=weight.name)
    made = made._like({name: pins.place(part) for name, part in made.packed.items()})
    return nn.Parameter(made, requires_grad=False)


def _held(packed: Any) -> int:
    """Bytes of a packed weight and its fit."""
    factors = packed.error_factors or ()
    return int(packed.packed_bytes + sum(t.numel() * t.element_size() for t in factors))
