"""What a model holds, group by group, and what each group takes on every tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstream._stored import Stored
from ts_core.blocks import BlockMap, Group
from ts_core.planner import GroupSpec
from ts_optim import OffloadAdamW
from ts_optim.placement import place_by_size
from ts_paging.rows import gathers
from ts_paging.slots import SlotLayout
from ts_quant import QuantizedTensor
from ts_quant.error_fit import fits

__all__ = ["Inventory", "Unit", "reserve_for"]

#: Bytes of both moments per trained element; int8 ones have a scale for every 256.
_MOMENTS = {"float32": 8, "bfloat16": 4, "int8": 2 + 2 * 4 / 256}
_MASTER = 4  # and an fp32 weight where the parameter is not one
_LOW = (torch.bfloat16, torch.float16)
_TOKENS = 2048  # of a micro-batch, where nobody has said how long one is


@dataclasses.dataclass
class Unit:
    """A group of parameters and the live objects behind it.

    Attributes:
        group: Names, kind and bytes.
        modules: (path, module) of what is hooked when it is paged.
        pageable: Parameters of the group that can leave the device.
        fixed: The others.
    """

    group: Group
    modules: list[tuple[str, nn.Module]] = dataclasses.field(default_factory=list)
    pageable: list[nn.Parameter] = dataclasses.field(default_factory=list)
    fixed: list[nn.Parameter] = dataclasses.field(default_factory=list)


class Inventory:
    """All units of a model, in the order of its block map.

    A Parameter can leave the device if every module that holds it directly is part of a block or computes
    with it in its own forward. Where fewer elements of a group are trained than frozen, the trained ones stay
    (adapters, norms): they are small, and have a resident optimizer.

    Attributes:
        units: One per group of the block map.
    """

    def __init__(self, model: nn.Module, groups: BlockMap, blocks: Sequence[nn.Module]) -> None:
        """Look at the model; nothing is changed."""
        self._model = model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        block_of = {id(m): i for i, block in enumerate(blocks) for m in block.modules()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._holders: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(module)
        self._block_of = block_of
        self.units: list[Unit] = []
        index = -1
        for group in groups.groups:
            unit = Unit(group)
            own = [parameters[name] for name in group.parameters if name in parameters]
            trained = sum(p.numel() for p in own if p.requires_grad)
            adapters = 2 * trained < sum(p.numel() for p in own)
            if group.kind == "block":
                index += 1
                unit.modules = [(group.name, blocks[index])]
            for parameter in own:
                good = not (adapters and parameter.requires_grad) and self._can_leave(parameter, group)
                (unit.pageable if good else unit.fixed).append(parameter)
            if group.kind != "block":
                unit.modules = self._edges(unit.pageable)
            self.units.append(unit)

    def _can_leave(self, parameter: nn.Parameter, group: Group) -> bool:
        if type(parameter) is not nn.Parameter and not isinstance(parameter, QuantizedTensor):
            return False
        holders = self._holders.get(id(parameter), [])
        if any(_keeps_its_own(module) for module in holders):
            return False
        inside = [id(module) in self._block_of for module in holders]
        if group.kind == "block":
            return all(inside)
        # Around the stack: a module that computes with its own weight, not one that hands it to others.
        leaves = all(
            next(module.children(), None) is None
            and module is not self._model
            and not isinstance(module, nn.ParameterDict | nn.ParameterList)
            for module in holders
        )
        return group.kind in ("embedding", "norm", "head") and leaves and not any(inside)

    def _in_slot(self, unit: Unit) -> list[nn.Parameter]:
        """Return what a slot of the unit holds: a block's Parameters may belong to an earlier one."""
        if unit.group.kind != "block":
            return unit.pageable
        leaving = {id(p) for other in self.units for p in other.pageable}
        return [p for p in unit.modules[0][1].parameters() if id(p) in leaving]

    def _edges(self, parameters: Sequence[nn.Parameter]) -> list[tuple[str, nn.Module]]:
        modules = {id(m): m for p in parameters for m in self._holders[id(p)]}
        return [(self._names[key], module) for key, module in modules.items()]

    @property
    def blocks(self) -> list[Unit]:
        """Units of the stack, in order."""
        return [unit for unit in self.units if unit.group.kind == "block"]

    def linked(self) -> list[frozenset[int]]:
        """Return for each unit the others that use a pageable Parameter of its own: they return together."""
        leaving = {id(p) for unit in self.units for p in unit.pageable}
        users: dict[int, set[int]] = {}
        for index, unit in enumerate(self.units):
            for _, module in unit.modules:
                for parameter in module.parameters():
                    if id(parameter) not in leaving:
                        continue
                    users.setdefault(id(parameter), set()).add(index)
        links: list[set[int]] = [set() for _ in self.units]
        for indices in users.values():
            for index in indices:
                links[index] |= indices - {index}
        return [frozenset(link) for link in links]

    def paged(self, indices: frozenset[int]) -> dict[int, nn.Parameter]:
        """Return the Parameters that leave the device when these units are paged, by id.

        One that a resident block uses too stays.
        """
        chosen = [self.units[index] for index in indices]
        stack = self.blocks
        resident = {i for i, unit in enumerate(stack) if not any(unit is other for other in chosen)}
        result = {}
        for unit in chosen:
            for parameter in unit.pageable:
                used_by = {self._block_of.get(id(m), -1) for m in self._holders[id(parameter)]}
                if not used_by & resident:
                    result[id(parameter)] = parameter
        return result

    def specs(
        self,
        device: torch.device,
        optimizer: Optimizer | None,
        codec: str,
        block_size: int,
        packed: frozenset[int],
        settling: frozenset[int] = frozenset(),
        moments: str = "float32",
        precise: frozenset[int] = frozenset(),
        error_rank: int = 0,
        double_quant: bool = False,
        backward: tuple[bool, bool] = (False, False),
    ) -> list[GroupSpec]:
        """Return what each unit takes.

        Args:
            device: Where the model computes.
            optimizer: The optimizer that will be used.
            codec: Codec of the Parameters in `packed`.
            block_size: Its values per scale.
            packed: ids of the frozen Parameters that are going to be packed.
            settling: Indices of units that are paged, in a slot of their own, where their optimizer works on
                the host: resident they have its state beside them.
            moments: Format of the moments of an `OffloadAdamW`.
            precise: ids of those in `packed` that move up one codec.
            error_rank: Rank of the fit that each of those in `packed` gets; it stays in RAM.
            double_quant: Whether their scales are quantized too, where the codec can.
            backward: Whether input gradients of fp8 weights, and those of nvfp4 weights, are packed too.
        """
        held = _trained_by(optimizer)
        cpu = device.type == "cpu"
        ours = isinstance(optimizer, OffloadAdamW)
        each = _MOMENTS[moments] if ours else 8
        stored = Stored(device, codec, block_size, packed, precise, double_quant, backward)
        found = [
            self._spec(unit, cpu or index in settling, ours, held, each, stored)
            for index, unit in enumerate(self.units)
        ]
        fits = [
            sum(_fit_bytes(p, error_rank * (id(p) in packed)) for p in unit.pageable) for unit in self.units
        ]
        return [
            dataclasses.replace(
                spec,
                paged=spec.paged + fit,
                device=spec.device + (fit if cpu else 0),
                host=spec.host + (0 if cpu else fit),
            )
            for spec, fit in zip(found, fits, strict=True)
        ]

    def trained(self, optimizer: Optimizer | None) -> frozenset[int]:
        """Return the indices of the units with pageable Parameters that an optimizer trains."""
        held = _trained_by(optimizer)
        return frozenset(
            index for index, unit in enumerate(self.units) if any(id(p) in held for p in unit.pageable)
        )

    def _spec(
        self,
        unit: Unit,
        beside: bool,
        ours: bool,
        held: frozenset[int],
        moments: float,
        stored: Stored,
    ) -> GroupSpec:
        device = host = paged = scratch = foreign = updated = 0
        for parameter in unit.pageable:
            grad, state, on_host = _training_bytes(parameter, held, beside, moments)
            updated += stored.nbytes(parameter) + grad + state if ours and id(parameter) in held else 0
            device += stored.nbytes(parameter) + grad + (0 if on_host else state)
            # Kept up there, a gradient has a buffer, and an fp32 weight a copy.
            copied = 0 if parameter.dtype in _LOW else parameter.numel() * 4
            host += state + grad + copied if on_host else 0
            # A foreign optimizer keeps its state in RAM wherever the weight is.
            paged += stored.nbytes(parameter) + grad + (state if ours else 0)
            foreign += 0 if ours or on_host else state
            # A loss in chunks adds up the gradient of the head piece by piece; one that several modules use
            # waits for the share of the last of them.
            twice = unit.group.kind == "head" or len(self._holders[id(parameter)]) > 1
            scratch += 2 * grad if twice else grad
        fixed = sum(stored.nbytes(p) + sum(_training_bytes(p, held, beside, moments)[:2]) for p in unit.fixed)
        device -= foreign
        around = unit.group.kind != "block" and all(gathers(module) for _, module in unit.modules)
        slot = 0 if around else SlotLayout([stored.seat(p) for p in self._in_slot(unit)]).nbytes
        return GroupSpec(
            name=unit.group.name,
            kind=unit.group.kind,
            fixed=fixed + foreign,
            device=device,
            host=host,
            paged=paged,
            slot=slot,
            scratch=scratch,
            pageable=bool(unit.pageable),
            staged=0 if around else sum(stored.staged(p) for p in self._in_slot(unit)),
            updated=updated,
        )


def _keeps_its_own(module: nn.Module) -> bool:
    """Whether a module uses its weights in a way that a copy in a slot cannot stand for."""
    if isinstance(module, nn.RNNBase):
        return True  # it computes with a list of them that it made itself
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        # One writes its rows when it is read, the other has gradients that are not dense.
        return module.max_norm is not None or module.sparse
    return False


def _fit_bytes(parameter: Tensor, rank: int) -> int:
    """Bytes of the fit of a weight's error: of the one that it has, or of one of this rank."""
    if isinstance(parameter, QuantizedTensor):
        return sum(t.numel() * t.element_size() for t in parameter.error_factors or ())
    return rank * sum(parameter.shape) * parameter.element_size() if fits(parameter, rank) else 0


def _trained_by(optimizer: Optimizer | None) -> frozenset[int]:
    if optimizer is None:
        return frozenset()
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def _training_bytes(
    parameter: Tensor, held: frozenset[int], beside: bool, moments: float
) -> tuple[int, int, bool]:
    """Bytes of gradient and optimizer state, and whether the state lives on the host while it is resident.

    Where the state is `beside` its Parameter, that is never so.
    """
    if not parameter.requires_grad:
        return 0, 0, False
    grad = parameter.numel() * parameter.element_size()
    if id(parameter) not in held:
        return grad, 0, False
    on_host = not beside and place_by_size(parameter) == "host"
    master = _MASTER if parameter.dtype in _LOW else 0
    return grad, int(parameter.numel() * (moments + master)), on_host


def reserve_for(inventory: Inventory) -> int:
    """Estimate activations and temporaries of a step, before any input is known.

    2,048 tokens through the stack with every block recomputed: one hidden state a block, some forty in the
    block that computes, and two chunks of 1,024 rows of fp32 logits.

    Args:
        inventory: The model.

    Returns:
        Bytes; 0 for a model without a stack.
    """
    blocks = inventory.blocks
    matrices = [p for unit in blocks for p in (*unit.pageable, *unit.fixed) if p.dim() == 2]
    if not matrices:
        return 0
    largest = max(matrices, key=lambda p: p.numel())
    width = min(largest.shape)
    hidden = _TOKENS * width * max(largest.dtype.itemsize, 2) * (len(blocks) + 40)
    heads = [
        p.shape[0]
        for unit in inventory.units
        if unit.group.kind != "block"
        for p in unit.pageable
        if p.dim() == 2
    ]
    return hidden + 2 * (_TOKENS // 2) * max(heads, default=0) * 4
