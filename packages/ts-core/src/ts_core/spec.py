"""The block spec: what a model consists of, as plain frozen data, without its weights.

`spec_of` reads a live model, also one on the meta device. Other packages make the same from a config or from
the headers of a checkpoint. What a plan costs is worked out from it (`ts_core.cost`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .blocks import BlockMap, block_map
from .dtypes import parse_dtype
from .errors import ArgumentError, CheckpointError, message

__all__ = [
    "BlockSpec",
    "ModelSpec",
    "TensorSpec",
    "block_of",
    "is_gate",
    "saved_parts",
    "saved_values",
    "spec_of",
]

_FORMAT = 1
USES = ("matmul", "experts", "gather", "other")
KINDS = ("block", "embedding", "head", "norm", "other")
#: Names of projections back to the residual stream: nothing saves what they return.
_BACK = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|c_proj|dense_4h_to_h|fc2|w2|wo|fc_out|dense|ff_out|attn_out)(\.|$|_)"
)
_GATED = re.compile(r"(^|\.)(gate_proj|gate_up_proj|w1|wi_0)(\.|$|_)")
_KERNELS = {"matmul": 1, "experts": 12, "gather": 1, "other": 6}
#: Of a block beside its matmuls and norms: rotary, attention, activation, residual sums, views.
_KERNELS_AROUND = 16


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One weight.

    Attributes:
        name: In its block.
        shape: Sizes.
        dtype: Name of the dtype that it computes in, such as "bfloat16".
        use: ``matmul`` (a linear layer), ``experts`` (stacked, a token takes a share), ``gather`` (an
            embedding) or ``other`` (norms, biases and what is not known better).
        active: Share of it that one token computes with.
        trained: Whether it is trained where every weight is; in a live model, whether it requires grad.
        codec: How the source stores it; "none" for plain values.
        stored_bytes: Bytes as the source stores it; None for what `dtype` takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    use: str = "other"
    active: float = 1.0
    trained: bool = True
    codec: str = "none"
    stored_bytes: int | None = None

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return parse_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in its dtype."""
        return self.numel * self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes as the source stores it."""
        return self.nbytes if self.stored_bytes is None else self.stored_bytes


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One group of weights: a block of the stack, or what is around it.

    Attributes:
        name: Path in the model.
        kind: ``block``, ``embedding``, ``head``, ``norm`` or ``other``.
        tensors: Its weights.
        hidden: Values a token has at its boundary.
        saved: Values of the compute dtype a token that autograd keeps of its forward pass.
        query: Width of the queries; 0 without attention.
        window: Tokens that a token attends to at most; 0 for all before it.
        kernels: Launches of a forward pass.
    """

    name: str
    kind: str = "block"
    tensors: tuple[TensorSpec, ...] = ()
    hidden: int = 0
    saved: float = 0.0
    query: int = 0
    window: int = 0
    kernels: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of all weights."""
        return sum(t.numel for t in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes as the source stores it."""
        return sum(t.bytes for t in self.tensors)

    @functools.cached_property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for blocks that take the same place and time but for the length that they attend to."""
        tensors = tuple(sorted(dataclasses.astuple(t)[1:] for t in self.tensors))
        return (self.kind, tensors, self.hidden, self.saved, self.kernels)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """All groups of a model in the order of use.

    Attributes:
        blocks: Each weight is in one of them; a tied one in the group that uses it first.
        tied: Whether the output head uses the embedding's weight.
        source: Where the spec comes from, for people.
        notes: What was assumed, one line each.

    Example:
        >>> block = BlockSpec("layers.0", tensors=(TensorSpec("w", (4, 4)),), hidden=4)
        >>> ModelSpec((block,)).numel
        16
    """

    blocks: tuple[BlockSpec, ...]
    tied: bool = False
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def stack(self) -> tuple[BlockSpec, ...]:
        """The blocks of the stack, in order."""
        return tuple(block for block in self.blocks if block.kind == "block")

    @property
    def numel(self) -> int:
        """Number of elements of all weights."""
        return sum(block.numel for block in self.blocks)

    @property
    def active(self) -> float:
        """Number of elements that one token computes with."""
        return sum(t.numel * t.active for block in self.blocks for t in block.tensors)

    @property
    def bytes(self) -> int:
        """Bytes as the source stores it."""
        return sum(block.bytes for block in self.blocks)

    @property
    def hidden(self) -> int:
        """Values a token has between blocks."""
        return max((block.hidden for block in self.blocks), default=0)

    def classes(self) -> list[tuple[int, ...]]:
        """Return the indices of interchangeable groups, class by class in order of first use."""
        found: dict[object, list[int]] = {}
        for index, block in enumerate(self.blocks):
            key: object = block.likeness if block.kind == "block" else index
            found.setdefault(key, []).append(index)
        return [tuple(members) for members in found.values()]

    def to_json(self) -> str:
        """Return the spec as a JSON string that `from_json` reads back."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Read a spec written by `to_json`.

        Args:
            text: JSON text.

        Returns:
            The spec, equal to the one written.

        Raises:
            CheckpointError: Not JSON, an unknown format, or missing and unknown fields.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise ValueError("unknown format")
            blocks = tuple(_block_from(block) for block in data.pop("blocks"))
            return cls(blocks=blocks, notes=tuple(data.pop("notes")), **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"ModelSpec.from_json: expected a spec of format {_FORMAT}: {error}"
            ) from error


def _block_from(data: dict[str, Any]) -> BlockSpec:
    tensors = tuple(TensorSpec(shape=tuple(t.pop("shape")), **t) for t in data.pop("tensors"))
    return BlockSpec(tensors=tensors, **data)


def saved_values(tensors: Iterable[TensorSpec], hidden: int) -> float:
    """Estimate the values a token that autograd keeps of a block's forward pass.

    Each input of linear layers once, each of their outputs but those that are added to the residual stream,
    the result of a gated activation, and for each norm the input in fp32, in the compute dtype and normed.

    Args:
        tensors: The block's weights, linear layers in the order of use.
        hidden: Values a token has at its boundary.

    Returns:
        Values of the compute dtype (2 bytes each in bf16).

    Example:
        >>> saved_values([TensorSpec("mlp.up_proj.weight", (64, 16), use="matmul")], 16)
        80.0
    """
    read, made, norms = saved_parts(tensors, hidden)
    total = read + made + 3 * hidden * norms
    return total if total else 16.0 * hidden


def is_gate(name: str) -> bool:
    """Whether a weight's result goes through the activation of a gated MLP.

    Example:
        >>> is_gate("mlp.gate_proj.weight"), is_gate("mlp.up_proj.weight")
        (True, False)
    """
    return _GATED.search(name) is not None


def saved_parts(tensors: Iterable[TensorSpec], hidden: int) -> tuple[float, float, int]:
    """Return what `saved_values` adds up: values that linear layers read, that they make, and norms.

    Args:
        tensors: As for `saved_values`.
        hidden: Likewise.

    Example:
        >>> saved_parts([TensorSpec("mlp.up_proj.weight", (64, 16), use="matmul")], 16)
        (16.0, 64.0, 0)
    """
    read, made, norms, last = 0.0, 0.0, 0, ("", 0)
    for tensor in tensors:
        if tensor.use == "experts" and tensor.name.endswith("bias"):
            continue
        if tensor.use in ("matmul", "experts") and len(tensor.shape) >= 2:
            back = _BACK.search(tensor.name) is not None
            wide, narrow = max(tensor.shape[-2:]), min(tensor.shape[-2:])
            # What goes back has the stream on its output side, all else on its input side.
            inside = narrow if wide == hidden and narrow != hidden else wide
            source, out = (inside, hidden) if back else (hidden, inside)
            if not back and hidden not in tensor.shape[-2:]:
                out, source = tensor.shape[-2], tensor.shape[-1]
            share = 1.0
            if tensor.use == "experts":  # a token's row is there once for each expert that it takes
                share = max(tensor.shape[0] * tensor.active, 1.0)
            place = (tensor.name.rpartition(".")[0].rpartition(".")[0], source)
            if back or place != last:  # several that read the same save it once
                read += source * share
            last = place
            made += 0 if back else out * share
            if _GATED.search(tensor.name):
                made += share * (out / 2 if "gate_up" in tensor.name else out)
        elif len(tensor.shape) == 1 and tensor.shape[0] == hidden and not tensor.name.endswith("bias"):
            norms += 1
    return read, made, norms


def block_of(
    name: str, tensors: Sequence[TensorSpec], hidden: int, *, query: int = 0, window: int = 0
) -> BlockSpec:
    """Make the spec of a block of the stack from its weights.

    Args:
        name: Path in the model.
        tensors: Its weights, linear layers in the order of use.
        hidden: Values a token has at its boundary.
        query: Width of the queries.
        window: Tokens that a token attends to at most; 0 for all before it.

    Returns:
        The spec, with estimates of what is saved and launched.

    Example:
        >>> block_of("layers.0", [TensorSpec("up_proj.weight", (64, 16), use="matmul")], 16).kernels
        17
    """
    own = tuple(tensors)
    norms = [t for t in own if t.use == "other" and len(t.shape) == 1 and not t.name.endswith("bias")]
    counted = [t for t in own if t.use != "other" and not t.name.endswith("bias")] + norms
    kernels = _KERNELS_AROUND + sum(_KERNELS[t.use] for t in counted)
    saved = saved_values(own, hidden)
    # Queries, keys and values are there once more after the rotation, and the result of attention.
    saved += 2 * query
    return BlockSpec(name, "block", own, hidden, saved, query, window, kernels)


def _config_value(config: Any, *names: str) -> Any:
    for part in (getattr(config, "text_config", None), config):
        for name in names:
            value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
            if value is not None:
                return value
    return None


def _routed(config: Any) -> tuple[int, int]:
    """Return experts that a token takes, and all; (0, 0) where nothing is routed."""
    every = _config_value(config, "n_routed_experts", "num_local_experts", "num_experts")
    taken = _config_value(config, "num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token")
    good = isinstance(every, int) and isinstance(taken, int) and every > 0
    return (taken, every) if good else (0, 0)


def _uses(model: nn.Module, config: Any) -> Callable[[str, torch.Tensor], tuple[str, float]]:
    """Return what says how a parameter is used, and the share of it that a token takes."""
    modules = dict(model.named_modules())
    taken, every = _routed(config)

    def use(name: str, parameter: torch.Tensor) -> tuple[str, float]:
        holder = modules.get(name.rpartition(".")[0])
        routed = every > 0 and re.search(r"(^|\.)experts(\.|$)", name) is not None
        if parameter.dim() >= 3 or routed:
            stacked = every > 0 and parameter.shape[0] == every
            if stacked or routed:
                return "experts" if parameter.dim() >= 2 else "other", taken / every
        if isinstance(holder, nn.Embedding | nn.EmbeddingBag):
            return "gather", 1.0
        linear = isinstance(holder, nn.Linear) or type(holder).__name__ == "Conv1D"
        return ("matmul" if linear and parameter.dim() == 2 else "other"), 1.0

    return use


def _stored(parameter: Any) -> tuple[str, int | None]:
    codec, packed = getattr(parameter, "codec", None), getattr(parameter, "packed_bytes", None)
    return (codec, packed) if isinstance(codec, str) and isinstance(packed, int) else ("none", None)


def spec_of(model: nn.Module, groups: BlockMap | None = None, *, source: str = "") -> ModelSpec:
    """Look at a model, live or on the meta device; nothing is changed and no weight is read.

    Args:
        model: Any module; its `config`, where it has one, tells about experts and attention windows.
        groups: Its block map; None makes one.
        source: For people.

    Returns:
        The spec.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        >>> [block.numel for block in spec_of(model).blocks]
        [72, 72, 72]
    """
    config = getattr(model, "config", None)
    found = groups if groups is not None else block_map(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    use = _uses(model, config)
    width = _config_value(config, "hidden_size", "n_embd", "d_model")
    made = []
    index = -1
    for group in found.groups:
        index += group.kind == "block"
        tensors = []
        for name in group.parameters:
            parameter = parameters[name]
            kind, active = use(name, parameter)
            codec, packed = _stored(parameter)
            inner = name[len(group.name) + 1 :] if name.startswith(f"{group.name}.") else name
            dtype = str(parameter.dtype).removeprefix("torch.")
            shape = tuple(parameter.shape)
            tensors.append(
                TensorSpec(inner, shape, dtype, kind, active, parameter.requires_grad, codec, packed)
            )
        made.append(_grouped(group.name, group.kind, tensors, width, config, index))
    tied = any(group.tied_to for group in found.groups) or bool(
        _config_value(config, "tie_word_embeddings") and not found.of_kind("head")
    )
    return ModelSpec(tuple(made), tied, source)


def _grouped(
    name: str, kind: str, tensors: list[TensorSpec], width: Any, config: Any, index: int
) -> BlockSpec:
    hidden = int(width) if isinstance(width, int) else _hidden_of(tensors)
    if kind != "block":
        return BlockSpec(name, kind, tuple(tensors), hidden, kernels=1)
    heads = _config_value(config, "num_attention_heads", "n_head")
    size = _config_value(config, "head_dim")
    query = 0
    if isinstance(heads, int):
        query = heads * size if isinstance(size, int) else hidden
    kinds = _config_value(config, "layer_types")
    window = _config_value(config, "sliding_window")
    slides = isinstance(kinds, list | tuple) and index < len(kinds) and "sliding" in str(kinds[index])
    # Keys and values of a layer are not looked at: what attention costs is given by its queries.
    return block_of(name, tensors, hidden, query=query, window=int(window) if slides and window else 0)


def _hidden_of(tensors: Sequence[TensorSpec]) -> int:
    """Guess the width of the stream: the narrower side of the largest matrix."""
    wide = [t for t in tensors if len(t.shape) >= 2]
    return (
        min(max(wide, key=lambda t: t.numel).shape[-2:])
        if wide
        else max((t.shape[0] for t in tensors if t.shape), default=0)
    )


def check(spec: ModelSpec) -> None:
    """Refuse a spec that no plan can be made for.

    Raises:
        ArgumentError: It has no weights, or an unknown kind or use.
    """
    if not spec.numel:
        raise ArgumentError(message("plan", "spec", "a model with weights", "none"))
    for block in spec.blocks:
        if block.kind not in KINDS:
            raise ArgumentError(message("plan", "spec", f"kinds {KINDS}", block.kind))
        for tensor in block.tensors:
            if tensor.use not in USES:
                raise ArgumentError(message("plan", "spec", f"uses {USES}", tensor.use))
