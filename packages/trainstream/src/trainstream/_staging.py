"""New values of a model's tensors, made beside the old ones and put in their place at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ts_quant
from trainstream._paging import Tiers
from ts_core.blocks import parameter_bytes
from ts_core.memory import format_bytes
from ts_optim import OffloadAdamW
from ts_optim.gradients import ConsumedGradient, gradient_of
from ts_paging.files import locate
from ts_quant import QuantizedTensor
from ts_quant.error_fit import quantize_with_error
from ts_quant.model import quantizable_weights
from ts_quant.precision import NEXT_CODEC

__all__ = [
    "Followers",
    "Staged",
    "bring_back",
    "commit",
    "frozen_weights",
    "gradient_in",
    "parts_of",
    "stage",
]


def frozen_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the frozen block weights that a codec can hold."""
    return [weight.parameter for weight in quantizable_weights(model, blocks)]


@dataclasses.dataclass
class Staged:
    """New values of a model's tensors, made beside the old ones.

    Attributes:
        data: Triples (tensor of the model, its value and its gradient on the target device).
        replaced: id of a Parameter -> the Parameter that takes its place, where the kind of tensor changes.
        state: Triples (entry of an optimizer's state, key, its value on the target device).
        left: Plain tensors that nobody needs after the exchange; those in files have their file removed.
    """

    data: list[tuple[Tensor, Tensor, Tensor | None]] = dataclasses.field(default_factory=list)
    replaced: dict[int, nn.Parameter] = dataclasses.field(default_factory=dict)
    state: list[tuple[dict[str, Any], str, Tensor]] = dataclasses.field(default_factory=list)
    left: list[Tensor] = dataclasses.field(default_factory=list)

    def discard(self) -> None:
        """Remove the files of what was left behind; what still maps them stays readable."""
        for tensor in self.left:
            place = locate(tensor) if tensor.device.type == "cpu" else None
            if place is not None:
                place[0].drop(tensor)


def stage(
    model: nn.Module,
    quantized: frozenset[int],
    device: torch.device,
    codec: str,
    block_size: int,
    paged: dict[int, nn.Parameter],
    tiers: Tiers,
    optimizer: Optimizer | None = None,
    precise: frozenset[int] = frozenset(),
    fit: tuple[int, int] = (0, 1),
    double_quant: bool = False,
) -> Staged:
    """Make new values for what changes its place or its codec.

    Args:
        model: The model; not changed.
        quantized: ids of the Parameters that are packed.
        device: Where everything goes that is not paged.
        codec: Codec of `quantized`.
        block_size: Its values per scale.
        paged: Parameters that go to their tier, by id.
        tiers: The tiers.
        optimizer: The optimizer; not changed.
        precise: ids of those of `quantized` that move up one codec.
        fit: Rank and iterations of the fit of their error; it stays in RAM.
        double_quant: Whether their scales are quantized too.

    Returns:
        What `commit` puts in place.
    """
    staged = Staged()
    follow = Followers(optimizer)
    for tensor in [*model.parameters(), *model.buffers()]:
        value = tensor.detach()
        here = id(tensor) in paged
        if id(tensor) in quantized or not here:
            staged.left += parts_of(value)
        if id(tensor) in quantized:
            chosen = NEXT_CODEC[codec] if id(tensor) in precise else codec
            made = quantize_with_error(
                value.to(device), chosen, *fit, block_size=block_size, double_quant=double_quant
            )
            value = tiers.store(tensor, made) if here else _fit_in_ram(made, made)
            staged.replaced[id(tensor)] = nn.Parameter(value, requires_grad=False)
        elif here:
            if isinstance(value, ts_quant.QuantizedTensor):
                staged.replaced[id(tensor)] = nn.Parameter(tiers.store(tensor), requires_grad=False)
            else:
                stored = tiers.store(tensor)
                staged.data.append((tensor, stored, _gradient(tensor, stored, copy=False)))
                staged.state += follow(tensor, torch.device("cpu"))
        elif tensor.device != device or _mapped(value):
            if isinstance(value, ts_quant.QuantizedTensor):
                staged.replaced[id(tensor)] = nn.Parameter(_copied(value, device), requires_grad=False)
            else:
                moved = _copied(value, device)
                staged.data.append((tensor, moved, _gradient(tensor, moved, copy=False)))
                staged.state += follow(tensor, device)
    return staged


class Followers:
    """Makes what the state of a Parameter becomes on another device; `OffloadAdamW` sees to its own."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        """Look at the optimizer, or do nothing for None."""
        # One that stands before another, as Accelerate's does, calls it so.
        ours = isinstance(getattr(optimizer, "optimizer", optimizer), OffloadAdamW)
        theirs = None if ours else optimizer
        self._state: Any = {} if theirs is None else theirs.state
        # Counters stay on the CPU, but for kernels that count on the device.
        self._counting = {
            id(p)
            for group in (theirs.param_groups if theirs is not None else ())
            if group.get("fused") or group.get("capturable")
            for p in group["params"]
        }

    def __call__(self, tensor: Tensor, device: torch.device) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Return (entry, key, value on the device) of what has to follow."""
        entry = self._state.get(tensor)
        if not isinstance(entry, dict):
            return []
        return [
            (entry, key, value.to(device))
            for key, value in entry.items()
            if isinstance(value, Tensor)
            and value.device != device
            and (value.dim() > 0 or id(tensor) in self._counting)
        ]


def _gradient(parameter: Tensor, value: Tensor, *, copy: bool) -> Tensor | None:
    """Return the gradient as it is where the new value is; what stands for one that is used up still does."""
    if isinstance(parameter.grad, ConsumedGradient) and gradient_of(parameter) is None:
        return ConsumedGradient(value)
    grad = gradient_of(parameter)
    return None if grad is None else grad.to(value.device, copy=copy)


def gradient_in(parameter: Tensor, value: Tensor, tiers: Tiers) -> Tensor | None:
    """Return the gradient of a Parameter that leaves for its tier, in that tier.

    Args:
        parameter: As it is before it leaves.
        value: Its value in the tier.
        tiers: Where memory for gradients is made.
    """
    grad = gradient_of(parameter)
    if grad is None:
        return _gradient(parameter, value, copy=False)
    return tiers.like(grad, parameter).copy_(grad)


def parts_of(value: Tensor) -> list[Tensor]:
    """Return the plain tensors that hold a value."""
    if isinstance(value, ts_quant.QuantizedTensor):
        return [*value.packed.values(), *(value.error_factors or ())]
    return [value]


def _fit_in_ram(made: QuantizedTensor, source: QuantizedTensor, *, copy: bool = False) -> QuantizedTensor:
    """Put the fit of `source` beside what was made of it; nothing computes with it, so it is in RAM."""
    if source.error_factors is None:
        return made
    return made.with_error(*(part.to("cpu", copy=copy) for part in source.error_factors))


def _mapped(value: Tensor) -> bool:
    """Whether a value is in files, wholly or in part: a model that was loaded into them."""
    return any(part.device.type == "cpu" and locate(part) is not None for part in parts_of(value))


def _exchange(tensor: Tensor, value: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = value
    tensor.grad = grad


def commit(model: nn.Module, optimizer: Optimizer | None, staged: Staged) -> list[Callable[[], None]]:
    """Put the staged values in place; return what takes each of them back, in order."""
    undo: list[Callable[[], None]] = []
    for tensor, value, grad in staged.data:
        undo.append(partial(_exchange, tensor, tensor.data, tensor.grad))
        _exchange(tensor, value, grad)
    for entry, key, moved in staged.state:
        undo.append(partial(entry.__setitem__, key, entry[key]))
        entry[key] = moved
    places: list[Any] = [module._parameters for module in model.modules()]
    # A frozen weight may be listed in the optimizer: left there, the original would never be freed.
    places += [dict(enumerate(group["params"])) for group in optimizer.param_groups] if optimizer else []
    for place in places:
        for key, parameter in place.items():
            if id(parameter) in staged.replaced:
                undo.append(partial(place.__setitem__, key, parameter))
                place[key] = staged.replaced[id(parameter)]
    if optimizer is not None:
        for group, params in zip(optimizer.param_groups, places[-len(optimizer.param_groups) :], strict=True):
            undo.append(partial(group.__setitem__, "params", group["params"]))
            group["params"] = list(params.values())
    return undo


def bring_back(
    model: nn.Module,
    optimizer: Optimizer | None,
    paged: dict[int, nn.Parameter],
    device: torch.device,
    tell: Callable[[str], object] = lambda text: None,
) -> dict[int, nn.Parameter]:
    """Move Parameters out of their tier, to the device, or to RAM where it has no room; their files go.

    The state of an optimizer that is none of ours goes along.

    Args:
        model: The model that holds them.
        optimizer: Whose groups may list them.
        paged: Ordinary Parameters, guarded no more, by id.
        device: Where they go.
        tell: Told of those that it has no room for.

    Returns:
        The Parameters that took the place of packed ones, by the id of the one before.
    """
    staged, follow = Staged(), Followers(optimizer)
    left_out: list[Tensor] = []
    for key, parameter in paged.items():
        value: Any = parameter.detach()
        left = gradient_of(parameter)
        staged.left += parts_of(value) + ([] if left is None else [left])
        try:
            value = _copied(value, device)
            grad = _gradient(parameter, value, copy=True)
            state = follow(parameter, device)
        except torch.OutOfMemoryError:
            host = torch.device("cpu")
            left_out.append(parameter)
            value = _copied(parameter.detach(), host)
            grad = _gradient(parameter, value, copy=True)
            state = follow(parameter, host)
        if isinstance(value, ts_quant.QuantizedTensor):
            staged.replaced[key] = nn.Parameter(value, requires_grad=False)
        else:
            staged.data.append((parameter, value, grad))
            staged.state += state
    commit(model, optimizer, staged)
    staged.discard()
    if left_out:
        size = format_bytes(sum(map(parameter_bytes, left_out)))
        tell(f"{device} has no room for {len(left_out)} of {len(paged)} weights ({size}): they are in RAM")
    return staged.replaced


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` even if it is there: a mapped file must not stay behind."""
    if isinstance(value, ts_quant.QuantizedTensor):
        packed = {key: part.to(device, copy=True) for key, part in value.packed.items()}
        made = value.with_packed(packed)
        return _fit_in_ram(made, value, copy=True)
    return value.to(device, copy=True)
