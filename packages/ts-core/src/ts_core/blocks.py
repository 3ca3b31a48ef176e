"""Finds the repeated layer stack of a model, and divides all of its parameters into groups around it.

Vocabulary: a *block* is one element of the repeated stack; each other group of parameters (embedding, output
head, norm, a vision tower) is a unit of placement as well. Nothing here knows a particular library: what is
looked at is the module tree, and `get_output_embeddings()` where a model has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import ArgumentTypeError, OptionError, message

__all__ = ["BlockMap", "Group", "Kind", "block_map", "find_blocks", "parameter_bytes"]

Kind = Literal["block", "embedding", "head", "norm", "other"]

# Order in which groups use their parameters within a forward pass; decides who owns a tied one.
_USE_ORDER: dict[Kind, int] = {"embedding": 0, "block": 1, "other": 2, "norm": 3, "head": 4}
_HEAD_NAMES = frozenset(
    {"lm_head", "head", "heads", "output", "output_layer", "embed_out", "score", "classifier", "fc_out"}
)
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Group:
    """Parameters that are placed together.

    Attributes:
        name: Path of its module; "(root)" for parameters that the model itself holds.
        kind: "block", "embedding", "head", "norm" or "other".
        modules: Paths of the modules it is made of, without their submodules.
        parameters: Names of the parameters that it owns; `model.get_parameter(name)` finds each.
        bytes: Bytes of these; a quantized parameter counts as stored.
        tied_to: Pairs (name here, name of the owner) of parameters that another group owns, or that this one
            owns under another name.
    """

    name: str
    kind: Kind
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    bytes: int
    tied_to: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class BlockMap:
    """All parameters of a model, each in exactly one group.

    Attributes:
        groups: In the order of the module tree; blocks in the order of the stack.
    """

    groups: tuple[Group, ...]

    @property
    def blocks(self) -> tuple[Group, ...]:
        """The blocks, in the order of the stack."""
        return self.of_kind("block")

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(group.bytes for group in self.groups)

    def of_kind(self, kind: Kind) -> tuple[Group, ...]:
        """List the groups of one kind."""
        return tuple(group for group in self.groups if group.kind == kind)

    def group_of(self, parameter: str) -> Group:
        """Find the group that owns a parameter.

        Args:
            parameter: One of its names, a tied one too.

        Returns:
            The group.

        Raises:
            OptionError: The model has no such parameter.
        """
        owner = parameter
        for group in self.groups:
            owner = dict(group.tied_to).get(parameter, owner)
        for group in self.groups:
            if owner in group.parameters:
                return group
        raise OptionError(message("BlockMap.group_of", "parameter", "a parameter of the model", parameter))


def parameter_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes a parameter takes as it is stored.

    Args:
        parameter: Any tensor; one with an integer attribute `packed_bytes` (a quantized one) counts as that.

    Returns:
        Bytes; 0 for a lazy parameter that has no shape yet.
    """
    if is_lazy(parameter):
        return 0
    packed = getattr(parameter, "packed_bytes", None)
    return packed if isinstance(packed, int) else parameter.numel() * parameter.element_size()


def _values(parameter: torch.Tensor) -> int:
    """Return how many values a parameter stands for, however it is stored."""
    if is_lazy(parameter):
        return 0
    # bitsandbytes presents the shape of the packed bytes, and keeps that of the values beside.
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return math.prod(shape) if shape is not None else parameter.numel()


def _module_values(modules: Iterable[nn.Module]) -> int:
    unique = {id(p): p for module in modules for p in module.parameters()}
    inside = {id(part): part for module in modules for part in module.modules()}
    # Where the packed weight of a linear layer is a buffer, the layer says how large it is.
    sides = [
        (module.in_features, getattr(module, "out_features", None))
        for module in inside.values()
        if hasattr(module, "in_features") and module._parameters.get("weight") is None and module._buffers
    ]
    packed = sum(a * b for a, b in sides if isinstance(a, int) and isinstance(b, int))
    return packed + sum(_values(p) for p in unique.values())


def _signature(module: nn.Module) -> object:
    """Return what makes two modules the same kind of layer."""
    kind = type(module)
    # By name: parametrizing an instance gives it a class of its own.
    name = (kind.__module__, kind.__qualname__)
    # Two nn.Sequential are alike only if what they hold is.
    return (name, tuple(_signature(child) for child in module.children())) if kind in _CONTAINERS else name


def _repeated(container: nn.Module) -> list[nn.Module]:
    """List the children of a container that form a stack; empty if they do not."""
    children = [child for child in container.children() if next(child.parameters(), None) is not None]
    # A layer that another layer also holds is part of that one.
    inside = {id(part) for child in children for part in child.modules() if part is not child}
    children = [child for child in children if id(child) not in inside]
    signatures = [_signature(child) for child in children]
    counts = Counter(signatures)
    alike = [child for child, signature in zip(children, signatures, strict=True) if counts[signature] >= 2]
    if len(alike) < 2 or 2 * len(alike) < len(children):
        return []
    # In a list the odd one out (a dense first layer before sparse ones) is a layer too; in a Sequential it is
    # the embedding or the head.
    return children if isinstance(container, nn.ModuleList) else alike


def _checked(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Validate a list of blocks that the user gave."""
    hint = "Pass a list of submodules of the model, such as list(model.model.layers), or None"
    if isinstance(blocks, (str, dict)) or not isinstance(blocks, Iterable):
        raise OptionError(message("find_blocks", "blocks", "a list of modules or None", type(blocks), hint))
    chosen = list(blocks)
    paths = {id(module): name for name, module in model.named_modules()}
    owner: dict[int, int] = {}
    for index, block in enumerate(chosen):
        what = f"blocks[{index}]"
        if not isinstance(block, nn.Module) or id(block) not in paths:
            raise OptionError(message("find_blocks", what, "a module of this model", type(block), hint))
        if id(block) in owner:
            given = f"{paths[id(block)]!r}, which is part of blocks[{owner[id(block)]}]"
            raise OptionError(message("find_blocks", what, "modules that do not overlap", given, hint))
        for module in block.modules():
            first = owner.setdefault(id(module), index)
            if first != index and any(module is other for other in chosen[:index]):
                given = f"{paths[id(block)]!r}, which contains blocks[{first}]"
                raise OptionError(message("find_blocks", what, "modules that do not overlap", given, hint))
    return chosen


def find_blocks(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """Find the repeated layer stack of a model.

    The stack is the `nn.ModuleList` or `nn.Sequential` with at least two children, most of them of a class
    that occurs more than once, whose children hold the most parameters, packed or not; of two with equally
    many the outer one. So the decoder layers win over the experts inside a layer, and the larger of an
    encoder and a decoder is taken. Children without parameters are not blocks.

    Args:
        model: Any module; wrapped by PEFT or not.
        blocks: The stack, if it is known better: modules of the model, none inside another. It is checked
            and returned.

    Returns:
        The blocks in order; empty if the model has no such stack.

    Raises:
        ArgumentTypeError: `model` is no `nn.Module`.
        OptionError: `blocks` holds something else than distinct, separate modules of the model.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> find_blocks(model) == [model[1], model[2]]
        True
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("find_blocks", "model", "an nn.Module", type(model)))
    if blocks is not None:
        return _checked(model, blocks)
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            stack = _repeated(module)
            size = _module_values(stack)
            if size > most:
                best, most = stack, size
    return best


@dataclass
class _Unit:
    """A group while it is being made."""

    path: str
    module: nn.Module
    kind: Kind
    block: int = -1
    loose: bool = False  # holds only the direct parameters of a module that contains blocks
    entries: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return _USE_ORDER[self.kind], self.block


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_parameters(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield _join(path, name), parameter


class _Walker:
    """Cuts a module tree into units: blocks, and the largest subtrees beside them."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.block_index = {id(block): index for index, block in enumerate(blocks)}
        self.units: list[_Unit] = []
        self.aliases: list[tuple[str, nn.Parameter]] = []
        self._seen: set[int] = set()
        self._above = self._ancestors(model)
        self._walk(model, "")

    def _ancestors(self, model: nn.Module) -> set[int]:
        """Collect the modules that contain a block, the model included."""
        parents: dict[int, list[int]] = {}
        for module in model.modules():
            for child in module.children():
                parents.setdefault(id(child), []).append(id(module))
        above = {id(model)} - set(self.block_index)
        pending = list(self.block_index)
        while pending:
            for parent in parents.get(pending.pop(), []):
                if parent not in above and parent not in self.block_index:
                    above.add(parent)
                    pending.append(parent)
        return above

    def _walk(self, module: nn.Module, path: str) -> None:
        """Visit a module that is not inside a unit, in the order of registration."""
        if id(module) in self._seen:
            self.aliases += module.named_parameters(prefix=path)
            return
        index = self.block_index.get(id(module), -1)
        above = id(module) in self._above
        unit = _Unit(path, module, "block" if index >= 0 else "other", index, loose=above)
        if above:
            self._seen.add(id(module))
            unit.entries += _own_parameters(module, path)
        else:
            self._collect(unit, module, path)
        if unit.entries or index >= 0:
            self.units.append(unit)
        if above:
            for name, child in module._modules.items():
                if child is not None:
                    self._walk(child, _join(path, name))

    def _collect(self, unit: _Unit, module: nn.Module, path: str) -> None:
        """Add a whole subtree to a unit; what another unit holds already is only named."""
        self._seen.add(id(module))
        unit.entries += _own_parameters(module, path)
        for name, child in module._modules.items():
            if child is None:
                continue
            if id(child) in self._seen:
                unit.entries += child.named_parameters(prefix=_join(path, name))
            else:
                self._collect(unit, child, _join(path, name))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "embedding" in type(module).__name__.lower()


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or "linear" in type(module).__name__.lower()


def _mostly(module: nn.Module, is_kind: Callable[[nn.Module], bool]) -> bool:
    """Tell whether more than half of a module's values are inside submodules of one kind."""
    parts: list[nn.Module] = []
    pending, seen = [module], {id(module)}
    while pending:
        part = pending.pop()
        if is_kind(part):
            parts.append(part)
            continue
        fresh = [child for child in part.children() if id(child) not in seen]
        seen.update(id(child) for child in fresh)
        pending += fresh
    return 2 * _module_values(parts) > _module_values([module])


def _output_layer(model: nn.Module) -> nn.Module | None:
    """Ask a model for its output layer; many have no such method, or one that raises."""
    ask = getattr(model, "get_output_embeddings", None)
    try:
        layer = ask() if callable(ask) else None
    except Exception:  # whatever the model's own method raises, it only means: unknown
        return None
    return layer if isinstance(layer, nn.Module) else None


def _classify(model: nn.Module, units: list[_Unit]) -> None:
    """Set the kind of every unit that is not a block."""
    output = _output_layer(model)
    last_block = max((index for index, unit in enumerate(units) if unit.kind == "block"), default=-1)
    whole = [unit for unit in units if unit.kind == "other" and not unit.loose]
    for unit in whole:
        if _mostly(unit.module, _is_embedding):
            unit.kind = "embedding"
        elif any(module is output for module in unit.module.modules()) or (
            output is None and unit.path.rpartition(".")[2] in _HEAD_NAMES
        ):
            unit.kind = "head"
        elif _mostly(unit.module, _is_norm):
            unit.kind = "norm"
    if output is not None or last_block < 0 or any(unit.kind == "head" for unit in units):
        return
    after = [unit for unit in units[last_block + 1 :] if unit.kind == "other" and not unit.loose]
    linear = [unit for unit in after if _mostly(unit.module, _is_linear)]
    if linear:
        linear[-1].kind = "head"


def _memory(parameter: nn.Parameter) -> object:
    """Return a key that is equal for two parameters over exactly the same memory."""
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or parameter.numel() == 0:
        return id(parameter)
    return (parameter.data_ptr(), parameter.dtype, parameter.device, parameter.shape, parameter.stride())


def _groups(model: nn.Module, units: list[_Unit], aliases: list[tuple[str, nn.Parameter]]) -> list[Group]:
    """Give each parameter to the unit that uses it first, and name the others' ties to it."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, tuple[_Unit, str]] = {}
    holder: dict[object, str] = {}
    extra: dict[int, list[tuple[str, str]]] = {}
    owned: dict[int, list[str]] = {}
    sizes: Counter[int] = Counter()
    for unit in sorted(units, key=lambda unit: unit.rank):
        names = {name for name, _ in unit.entries}
        for name, parameter in unit.entries:
            if id(parameter) in owner:
                if owner[id(parameter)] != (unit, name):
                    extra.setdefault(id(unit), []).append((name, owner[id(parameter)][1]))
                continue
            first = first_names[id(parameter)]
            chosen = first if first in names else name
            owner[id(parameter)] = (unit, chosen)
            owned.setdefault(id(unit), []).append(chosen)
            if chosen != name:
                extra.setdefault(id(unit), []).append((name, chosen))
            memory = _memory(parameter)
            if memory in holder:
                # Two Parameter objects over one memory: both are listed, the bytes are counted once.
                extra.setdefault(id(unit), []).append((chosen, holder[memory]))
            else:
                holder[memory] = chosen
                sizes[id(unit)] += parameter_bytes(parameter)
    for name, parameter in aliases:
        unit, chosen = owner[id(parameter)]
        extra.setdefault(id(unit), []).append((name, chosen))
    return [
        Group(
            name=unit.path or "(root)",
            kind=unit.kind,
            modules=(unit.path,),
            parameters=tuple(owned.get(id(unit), [])),
            bytes=sizes[id(unit)],
            tied_to=tuple(extra.get(id(unit), [])),
        )
        for unit in units
    ]


def block_map(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> BlockMap:
    """Divide all parameters of a model into groups: one per block, and one per subtree beside the blocks.

    A tied parameter belongs to the group that uses it first in a forward pass (embedding, blocks, others,
    norm, head); the other groups name it in `tied_to`. A group whose parameters are all tied elsewhere
    stays, with 0 bytes.

    Args:
        model: Any module.
        blocks: As in `find_blocks`.

    Returns:
        The map: every parameter of the model is in exactly one group.

    Raises:
        ArgumentTypeError: `model` is no `nn.Module`.
        OptionError: As in `find_blocks`.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> [(group.name, group.kind) for group in block_map(model).groups]
        [('0', 'embedding'), ('1', 'block'), ('2', 'block'), ('3', 'norm')]
    """
    stack = find_blocks(model, blocks)
    walker = _Walker(model, stack)
    units = walker.units
    _classify(model, units)
    in_order = iter(sorted((unit for unit in units if unit.kind == "block"), key=lambda unit: unit.block))
    units = [next(in_order) if unit.kind == "block" else unit for unit in units]
    return BlockMap(tuple(_groups(model, units, walker.aliases)))
