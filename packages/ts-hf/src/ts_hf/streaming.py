"""Fills an empty model from a checkpoint, one parameter at a time.

Names are mapped by transformers' own tables (`get_model_conversion_mapping`), which also say how several
tensors of a file become one parameter (the experts of a mixture) or one becomes several. What arrives is
cast,
moved and packed before the next tensor is read, so RAM holds the finished part of the model and what one
parameter needs.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ts_core.blocks import find_blocks
from ts_core.errors import ArgumentError, CheckpointError
from ts_quant import QuantizedTensor
from ts_quant.error_fit import quantize_with_error
from ts_quant.precision import NEXT_CODEC, Candidate, choose, measure

from .build import owner_of
from .checkpoint import Checkpoint
from .offload import FileHome
from .packed_checkpoint import PackedCheckpoint, require_ram_for, stack_packed
from .read_ahead import Conveyor, Hints, carries
from .safetensors_reader import TensorInfo

__all__ = [
    "OUTSIDE",
    "Packing",
    "Plan",
    "Target",
    "UnknownTablesError",
    "make_plan",
    "packable",
    "stream",
    "stream_again",
]

# The reason why the codec leaves a parameter alone that is in no block.
OUTSIDE = "outside the blocks"
# The conversions that put rows one below the other: experts, and of each expert two matrices.
_STACKS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


class UnknownTablesError(Exception):
    """The installed transformers keeps its conversion tables somewhere else."""


@dataclass
class Target:
    """One parameter (or, by conversion, several) and the checkpoint tensors it is made of.

    Attributes:
        name: The model's name of it; of the first one, if several come of one conversion.
        sources: Pairs (pattern of the conversion, name in the checkpoint), in the order of the conversion.
        converter: transformers' conversion, or None if the tensor is taken as it is.
    """

    name: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    converter: Any = None


@dataclass
class Plan:
    """What is read for what.

    Attributes:
        targets: In the order to read them in.
        unused: Checkpoint tensors that the model has no place for.
        mapping: transformers' conversions, to be kept with the model for saving.
    """

    targets: list[Target]
    unused: list[str]
    mapping: list[Any]


@dataclass
class Packing:
    """How parameters are stored.

    Attributes:
        codec: Name of the codec, None for plain weights.
        block_size: Values per scale.
        names: Parameters that the codec applies to.
        skipped: Reasons why the others stay as they are.
        home: The files that hold the parameters, or None if they stay in memory.
        fit: Rank and iterations of the fit of the error that packed matrices keep.
        decoded: Weights that the checkpoint stores quantized and that were decoded, and why.
        double_quant: Whether the codec's scales are quantized too.
        share: Extra bytes for parameters that move up one codec, as a fraction of what all packed ones take:
            with it every one is measured while it is stored.
        measured: What was found.
        precise: Parameters that are stored one codec up.
        scratch: What is measured is decoded to: one buffer, so that the heap gets no holes.
    """

    codec: str | None
    block_size: int
    names: frozenset[str]
    skipped: dict[str, str]
    home: FileHome | None = None
    fit: tuple[int, int] = (0, 1)
    decoded: dict[str, str] = field(default_factory=dict)
    double_quant: bool = False
    share: float = 0.0
    measured: dict[str, Candidate] = field(default_factory=dict)
    precise: frozenset[str] = frozenset()
    scratch: torch.Tensor | None = None

    def choose_precise(self, names: Iterable[str]) -> frozenset[str]:
        """Settle which parameters move up one codec, once all are stored.

        Args:
            names: Of the model's parameters, in its order.

        Returns:
            Those that have to be stored again; what they are stored as from now on is the next codec.
        """
        found = [self.measured[name] for name in names if name in self.measured]
        self.precise = frozenset(choose(found, self.share))
        self.measured, self.share, self.scratch = {}, 0.0, None
        return self.precise

    def packs(self, name: str) -> bool:
        """Whether the codec applies to a parameter."""
        return self.codec is not None and name in self.names

    def store(self, name: str, tensor: torch.Tensor, old: nn.Parameter) -> nn.Parameter:
        """Make the parameter that replaces `old`: packed if the name says so, and where it is to live."""
        trained = old.requires_grad and tensor.is_floating_point() and not isinstance(tensor, QuantizedTensor)
        if self.codec is not None and name in self.names:
            size, double = self.block_size, self.double_quant
            codec = NEXT_CODEC[self.codec] if name in self.precise else self.codec
            if self.share:
                room = self.scratch
                if room is None or room.numel() < tensor.numel() or room.device != tensor.device:
                    self.scratch = None
                    self.scratch = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
                self.measured[name] = measure(name, tensor, codec, size, double, scratch=self.scratch)
            how: Any = {"block_size": size, "double_quant": double, "name": name}
            temporary = bool(self.share or self.fit[0])
            tensor = quantize_with_error(tensor, codec, *self.fit, **how)
            trained = False
            if temporary and self.home is None:
                # What stays moves down to where the temporaries of measuring were: no holes in the heap.
                tensor = tensor.clone()
        if self.home is not None:
            tensor = self.home.place(name, tensor)
        return nn.Parameter(tensor, requires_grad=trained)

    def reserve(
        self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the file that a plain parameter is written to directly, or None if there is none."""
        return None if self.home is None or self.packs(name) else self.home.reserve(name, shape, dtype)

    def adopt(self, name: str, path: Path, stored: TensorInfo, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the tensor of a file that the parameter can be as it is, or None."""
        if self.home is None or self.packs(name) or stored.dtype != dtype:
            return None
        return self.home.adopt(name, path, stored.begin, stored.shape, dtype)


def packable(model: Any) -> tuple[frozenset[str], dict[str, str]]:
    """Say which parameters a codec may store, and why not the others.

    Packed are floating matrices (two or more dimensions) inside the repeated blocks; never embeddings, the
    output head, norms, biases, tied weights, or what the model's class keeps in fp32.

    Args:
        model: A transformers model; its parameters may be on the meta device.

    Returns:
        The names, and for each other parameter the reason.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=5))
        >>> names, skipped = packable(model)
        >>> sorted(names)[0], skipped["transformer.wte.weight"]
        ('transformer.h.0.attn.c_attn.weight', 'outside the blocks')
    """
    inside = {id(module) for block in find_blocks(model) for module in block.modules()}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied_names = {*tied, *tied.values()}
    plan = _dtype_plan(model, torch.bfloat16)
    names: set[str] = set()
    skipped: dict[str, str] = {}
    for path, module in model.named_modules():
        for last, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{last}" if path else last
            if id(module) not in inside:
                skipped[name] = OUTSIDE
            elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                skipped[name] = "an embedding"
            elif parameter.dim() < 2 or parameter.numel() == 0:
                skipped[name] = "not a matrix"
            elif not parameter.is_floating_point():
                skipped[name] = "not floating"
            elif name in tied_names:
                skipped[name] = "tied to another parameter"
            elif any(pattern.search(name) for pattern, _ in plan):
                skipped[name] = "kept in fp32 by its model"
            else:
                names.add(name)
    return frozenset(names), skipped


def _dtype_plan(model: Any, dtype: torch.dtype) -> list[tuple[re.Pattern[str], torch.dtype]]:
    """Return transformers' exceptions from the dtype: patterns of names and the dtype they keep."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    # Matched anywhere in the name, "*" for anything: transformers' own reading of these lists.
    return [(re.compile(name.replace("*", ".*")), kept) for name, kept in plan.items()]


def _tables() -> Any:
    """Return transformers' conversion tables and their helpers, as one namespace."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise UnknownTablesError(str(error)) from error
    return SimpleNamespace(
        WeightConverter=WeightConverter,
        WeightRenaming=WeightRenaming,
        dot_natural_key=dot_natural_key,
        get_model_conversion_mapping=get_model_conversion_mapping,
        rename_source_key=rename_source_key,
    )


def make_plan(model: Any, checkpoint: Checkpoint) -> Plan:
    """Map every tensor of a checkpoint to the parameter or buffer it is for.

    Args:
        model: A transformers model; its parameters may be on the meta device.
        checkpoint: The files.

    Returns:
        The plan.

    Raises:
        UnknownTablesError: This transformers has no conversion tables in the place known here.
    """
    tables = _tables()
    mapping = tables.get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, tables.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, tables.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected = model.state_dict()
    prefix = model.base_model_prefix
    targets: dict[str, Target] = {}
    unused: list[str] = []
    # The order of the experts' numbers, not of their spelling: a conversion stacks in the order given.
    for key in sorted(checkpoint.keys(), key=tables.dot_natural_key):
        name, pattern = tables.rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = tables.rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unused.append(key)
            continue
        target = targets.get(name)
        if target is None:
            target = targets[name] = Target(name)
            target.converter = None if pattern is None else copy.deepcopy(by_pattern[pattern])
        elif pattern is None or target.converter is None:
            first = target.sources[0][1]
            raise CheckpointError(
                f"{checkpoint.file_of(key)}: tensors {first!r} and {key!r} are both for the parameter "
                f"{name!r}"
            )
        target.sources.append((pattern or key, key))
    place = {key: index for index, key in enumerate(checkpoint.keys())}
    ordered = sorted(targets.values(), key=lambda target: min(place[key] for _, key in target.sources))
    return Plan(ordered, unused, mapping)


class _Stream:
    """The state of one pass over a checkpoint."""

    def __init__(
        self, model: Any, checkpoint: Checkpoint, packing: Packing, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.packing = packing
        self.device = device
        self.sources: dict[str, list[tuple[str, str]]] = {}
        self.only: frozenset[str] | None = None
        self.expected = frozenset(model.state_dict())
        self.exceptions = _dtype_plan(model, dtype)
        # Tensors to be packed pass through these two buffers. Fresh ones, between packed tensors that stay,
        # would leave holes in the heap: half of the peak.
        self.raw = torch.empty(0, dtype=torch.uint8)
        self.cast = torch.empty(0, dtype=torch.uint8)
        self.conveyor: Conveyor | None = None

    @contextlib.contextmanager
    def reading(self, targets: list[Target]) -> Iterator[None]:
        """Have what these targets are made of brought to the device while they are filled, in this order."""
        names = self.brought(targets)
        if not names:
            yield
            return
        try:
            with Conveyor(self.checkpoint, names, self.device) as self.conveyor:
                yield
        finally:
            self.conveyor = None

    def brought(self, targets: list[Target]) -> list[str]:
        """Name the tensors that go to the device as they are stored, not by way of a tensor in RAM."""
        # Parts of packed weights have other names, and what lives in files is read into them.
        if type(self.checkpoint) is not Checkpoint or self.packing.home or not carries(self.device):
            return []
        converts = self.room_to_convert(targets)
        keys = [key for t in targets if converts or t.converter is None for _, key in t.sources]
        return [key for key in keys if self.checkpoint.info(key).dtype is not None]

    def hinted(self, targets: list[Target]) -> list[str]:
        """Name the tensors that are read into RAM, in this order."""
        # What stays where it is on the disk is not read at all.
        if type(self.checkpoint) is not Checkpoint or self.packing.home:
            return []
        keys = [key for target in targets for _, key in target.sources]
        return [key for key in keys if self.conveyor is None or key not in self.conveyor]

    def room_to_convert(self, targets: list[Target]) -> bool:
        """Whether the device holds what a conversion takes and what it makes, beside the whole model."""
        if self.device.type != "cuda":
            return True
        most, state = 0, self.model.state_dict()
        for target in targets:
            if target.converter is not None:
                count = sum(math.prod(self.checkpoint.info(key).shape) for _, key in target.sources)
                most = max(most, count * state[target.name].itemsize)
        memory: Any = torch.cuda
        kept = memory.memory_reserved(self.device) - memory.memory_allocated(self.device)
        room = int(memory.mem_get_info(self.device)[0] + kept)
        return bool(sum(tensor.nbytes for tensor in state.values()) + 2 * most <= room)

    def wanted_dtype(self, name: str, old: torch.Tensor) -> torch.dtype:
        if old.is_floating_point():
            for pattern, kept in self.exceptions:
                if pattern.search(name):
                    return kept
        return old.dtype

    def read(
        self, key: str, dtype: torch.dtype, *, passing: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read and cast one tensor, into `out` if given; `passing` ones are valid until the next is read."""
        if isinstance(self.checkpoint, PackedCheckpoint) and self.checkpoint.is_packed(key):
            self.packing.decoded[key] = "part of a larger parameter"
            return self.checkpoint.read_packed(key).dequantize(dtype)
        stored = self.checkpoint.info(key)
        small = stored.dtype is None or stored.dtype.itemsize < 2
        if dtype.is_floating_point and (small or not (stored.dtype and stored.dtype.is_floating_point)):
            raise CheckpointError(
                f"{self.checkpoint.file_of(key)}: tensor {key!r} is stored as {stored.stored_dtype}, which "
                "is not the "
                "plain weight the model expects; the checkpoint is quantized, but its config does not say how"
            )
        if self.conveyor is not None and key in self.conveyor:
            return self.conveyor.take(key, dtype)
        if out is not None and stored.dtype == dtype:
            return self.checkpoint.read(key, out=out)
        if (out is None and not passing) or stored.dtype is None:
            return self.checkpoint.read(key).to(dtype)
        if self.raw.numel() < stored.nbytes:
            self.raw = torch.empty(0, dtype=torch.uint8)
            self.raw = torch.empty(stored.nbytes, dtype=torch.uint8)
        tensor = self.checkpoint.read(
            key, out=self.raw[: stored.nbytes].view(stored.dtype).view(stored.shape)
        )
        if out is not None:
            return out.copy_(tensor)
        if stored.dtype == dtype:
            return tensor
        nbytes = tensor.numel() * dtype.itemsize
        if self.cast.numel() < nbytes:
            self.cast = torch.empty(0, dtype=torch.uint8)
            self.cast = torch.empty(nbytes, dtype=torch.uint8)
        return self.cast[:nbytes].view(dtype).view(stored.shape).copy_(tensor)

    def put(self, name: str, tensor: torch.Tensor, sources: list[tuple[str, str]]) -> None:
        if self.only is not None and name not in self.only:
            return
        module, last = owner_of(self.model, name)
        old = getattr(module, last)
        if tuple(tensor.shape) != tuple(old.shape):
            key = sources[0][1]
            raise CheckpointError(
                f"{self.checkpoint.file_of(key)}: tensor {key!r} has shape {tuple(tensor.shape)}, the "
                "model's "
                f"{name!r} has {tuple(old.shape)}"
            )
        tensor = tensor.to(self.device if self.only is None else old.device)
        if last in module._parameters:
            try:
                module._parameters[last] = self.packing.store(name, tensor, old)
            except ArgumentError as error:  # a NaN or an infinity
                raise CheckpointError(f"{self.checkpoint.file_of(sources[0][1])}: {error}") from error
        else:
            module._buffers[last] = tensor
        self.sources[name] = sources

    def fill_alike(self, target: Target, key: str, dtype: torch.dtype, is_parameter: bool) -> None:
        """Fill what is one tensor of the checkpoint."""
        if isinstance(self.checkpoint, PackedCheckpoint) and self.checkpoint.is_packed(key):
            return self.fill_packed(target, key, dtype, is_parameter)
        stored, out = self.checkpoint.info(key), None
        if is_parameter:
            adopted = self.packing.adopt(target.name, self.checkpoint.file_of(key), stored, dtype)
            if adopted is not None:
                return self.put(target.name, adopted, target.sources)
            out = self.packing.reserve(target.name, stored.shape, dtype)
        tensor = self.read(key, dtype, passing=self.packing.packs(target.name), out=out)
        self.put(target.name, tensor, target.sources)

    def fill_packed(self, target: Target, key: str, dtype: torch.dtype, is_parameter: bool) -> None:
        """Fill what is stored quantized: kept as it is in the blocks, decoded elsewhere."""
        assert isinstance(self.checkpoint, PackedCheckpoint)
        packed = self.checkpoint.read_packed(key)
        if is_parameter and target.name in self.packing.names:
            module = owner_of(self.model, target.name)[0]
            if type(module).__name__ == "Conv1D":
                raise CheckpointError(
                    f"{self.checkpoint.file_of(key)}: {target.name!r} is stored quantized, but its "
                    "module (Conv1D) holds it transposed, which no format that is read does"
                )
            return self.put(target.name, packed, target.sources)
        reason = self.packing.skipped.get(target.name, "not a matrix")
        self.packing.decoded[target.name] = reason
        self.put(target.name, packed.dequantize(dtype), target.sources)

    def stacked(self, target: Target) -> QuantizedTensor | None:
        """Stack what the checkpoint holds packed, expert by expert; None if that is not all to be done."""
        checkpoint, patterns = self.checkpoint, list(target.converter.source_patterns)
        if not isinstance(checkpoint, PackedCheckpoint) or target.name not in self.packing.names:
            return None
        done = [
            (type(step).__name__, step.dim) for step in target.converter.operations if hasattr(step, "dim")
        ]
        if done not in _STACKS or len(done) != len(target.converter.operations):
            return None
        by_pattern = [[key for pattern, key in target.sources if pattern == wanted] for wanted in patterns]
        keys = [key for expert in zip(*by_pattern, strict=False) for key in expert]
        if len(keys) != len(target.sources) or not all(map(checkpoint.is_packed, keys)):
            return None
        module, last = owner_of(self.model, target.name)
        return stack_packed([checkpoint.read_packed(key) for key in keys], tuple(getattr(module, last).shape))

    def fill(self, target: Target) -> None:
        module, last = owner_of(self.model, target.name)
        dtype = self.wanted_dtype(target.name, getattr(module, last))
        if target.converter is None:
            self.fill_alike(target, target.sources[0][1], dtype, last in module._parameters)
            return
        stacked = self.stacked(target)
        if stacked is not None:
            return self.put(target.name, stacked, target.sources)
        for pattern, key in target.sources:
            target.converter.add_tensor(target.name, key, pattern, partial(_itself, self.read(key, dtype)))
        try:
            made = target.converter.convert(target.name, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            key = target.sources[0][1]
            raise CheckpointError(
                f"{self.checkpoint.file_of(key)}: the {len(target.sources)} tensors for {target.name!r} "
                f"(first: {key!r}) "
                f"do not fit together: {error}"
            ) from error
        while made:
            name, tensor = made.popitem()
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if name not in self.expected:
                raise CheckpointError(
                    f"{self.checkpoint.file_of(target.sources[0][1])}: tensor {target.sources[0][1]!r} was "
                    "converted "
                    f"to {name!r}, which the model does not have"
                )
            tensor = tensor.contiguous()
            if self.conveyor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.clone()  # a part of what was read, all of which would stay
            self.put(name, tensor, target.sources)

    def again(self, names: frozenset[str]) -> None:
        """Read these parameters once more: which of them the packing treats otherwise is known by now."""
        self.only = names
        wanted = {tuple(self.sources[name]) for name in names}
        plan = make_plan(self.model, self.checkpoint)
        targets = [target for target in plan.targets if tuple(target.sources) in wanted]
        with self.reading(targets):
            for target in targets:
                self.fill(target)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def stream_again(
    model: Any, checkpoint: Checkpoint, packing: Packing, names: frozenset[str], dtype: torch.dtype
) -> set[str]:
    """Read these parameters of a filled model once more, and store them as the packing says by now.

    Args:
        model: The model; each parameter stays on the device where it is.
        checkpoint: The files that it was filled from.
        packing: After `choose_precise`.
        names: Names in the model.
        dtype: Dtype the model was built with.

    Returns:
        Those of the names that the checkpoint has a tensor for.

    Raises:
        CheckpointError: As `stream`.
    """
    state = _Stream(model, checkpoint, packing, dtype, torch.device("cpu"))
    state.only = names
    with torch.no_grad():
        for target in make_plan(model, checkpoint).targets:
            several = target.converter is not None and len(target.converter.target_patterns) > 1
            if several or target.name in names:
                state.fill(target)
    return set(state.sources)


def stream(
    model: Any,
    checkpoint: Checkpoint,
    plan: Plan,
    packing: Packing,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> set[str]:
    """Read every planned tensor and put it into the model.

    Args:
        model: The model; parameters on the meta device are replaced.
        checkpoint: The files.
        plan: From `make_plan`.
        packing: What is stored how.
        dtype: Dtype the model was built with.
        device: Where the tensors end up, and where they are packed.
        progress: Called with the bytes read after each parameter.

    Returns:
        Names of the parameters and buffers that got a value.

    Raises:
        CheckpointError: A shape that does not fit, or a stored dtype that is no plain weight.
        DoesNotFitError: Weights that are kept as they are stored exceed the RAM that is left.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        require_ram_for(checkpoint.nbytes, packing.home, device)
    state = _Stream(model, checkpoint, packing, dtype, device)
    passing = [t.sources[0][1] for t in plan.targets if t.converter is None and packing.packs(t.name)]
    if not state.brought(plan.targets):
        most = max((checkpoint.info(key).nbytes for key in passing), default=0)
        state.raw = torch.empty(most, dtype=torch.uint8)
    if packing.share:
        most = max((math.prod(checkpoint.info(key).shape) for key in passing), default=0)
        packing.scratch = torch.empty(most, dtype=torch.float32, device=device)
    with torch.no_grad():
        with state.reading(plan.targets):
            hints = Hints(checkpoint, state.hinted(plan.targets))
            for target in plan.targets:
                hints.reads(key for _, key in target.sources)
                state.fill(target)
                if progress is not None:
                    progress(sum(checkpoint.info(key).nbytes for _, key in target.sources))
        if packing.share:
            state.again(packing.choose_precise(name for name, _ in model.named_parameters()))
    return set(state.sources)
