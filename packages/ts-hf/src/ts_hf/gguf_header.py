"""The block spec of a GGUF file from its header alone: names, types and shapes, no tensor and no tokenizer.

A GGUF file begins with typed named values and then lists its tensors. The vocabulary is among the values, so
a header takes some megabytes; strings of arrays are passed over, which reads a file of any size in less than
a second.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from ts_core.errors import ArgumentError, CheckpointError, OptionError, StorageError
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of
from ts_quant.codecs import GGUF_CODECS

__all__ = ["DECODED", "GgufHeader", "read_gguf_header", "spec_from_gguf"]

#: Architectures whose tensors load_model leaves to transformers, which decodes them all: mixtures, whose
#: tensors are put together from several, and those that are turned or shifted value by value.
DECODED = frozenset(
    ("bloom", "gpt2", "gpt_oss", "lfm2", "mamba", "minimax-m2", "nemotron", "qwen2moe", "qwen3moe", "t5")
)
#: ggml's numbers of its types, in the order of their numbers; None was taken back.
_TYPES = (
    "F32", "F16", "Q4_0", "Q4_1", None, None, "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
    "I16", "I32", "I64", "F64", "IQ1_M", "BF16", None, None, None, "TQ1_0", "TQ2_0", None, None, None,
    "MXFP4",
)  # fmt: skip
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 24  # bytes of a string, or entries of an array of numbers that is kept
_ENTRIES = 1 << 24  # values, tensors or strings of an array at most: a damaged count ends the reading
_IN_STACK = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
#: Names of a block's parts in these files and in transformers' models, in the order of use.
_PARTS = (
    ("attn_norm", "input_layernorm"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_NAMES = {short: (place, long) for place, (short, long) in enumerate(_PARTS)}
_AROUND = {"token_embd": "embedding", "output": "head", "output_norm": "norm"}
#: What no parameter of a model is made of: transformers makes these tables from its config.
_NOT_HELD = re.compile(r"rope_(freqs|factors_\w+)\.weight")


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a file says about itself.

    Attributes:
        values: Its named values; of arrays of strings only how many there are.
        tensors: Type and shape by name, shapes as PyTorch has them: rows first.
    """

    values: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


class _Reader:
    """Reads numbers and strings of a file, and says where it ends too early."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file, self._where = file, where

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: not a GGUF file that can be read: {what}")

    def take(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise self.bad("it ends within its header")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, what: str) -> int:
        value = int(self.number("Q"))
        if value > _ENTRIES:
            raise self.bad(f"it would have {value} {what}")
        return value

    def string(self) -> str:
        length = self.number("Q")
        if length > _LONGEST:
            raise self.bad(f"a name or text would have {length} bytes")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.bad(f"it has a value of type {kind}")
        inner, count = self.number("I"), self.count("entries in an array")
        if inner == _STRING:
            for _ in range(count):
                self.string()
            return count
        if inner not in _SCALARS:
            raise self.bad(f"it has an array of type {inner}")
        form = _SCALARS[inner]
        return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}"))))

    def tensor(self) -> tuple[str, str, tuple[int, ...]]:
        name, dims = self.string(), self.number("I")
        if not 0 <= dims <= 8:
            raise self.bad(f"tensor {name[:100]!r} would have {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        number, _ = self.number("I"), self.number("Q")
        kind = _TYPES[number] if number < len(_TYPES) else None
        if any(size >= 2**48 for size in shape):
            raise self.bad(f"tensor {name[:100]!r} would have the shape {shape}")
        return name, kind or f"type {number}", tuple(reversed(shape))


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of a GGUF file (versions 2 and 3), without the package gguf.

    Args:
        path: The file.

    Returns:
        Its values and tensors.

    Raises:
        CheckpointError: It is none, or damaged.
        StorageError: It cannot be read.

    Example:
        >>> read_gguf_header("path/to/model.gguf").values["general.architecture"]  # doctest: +SKIP
        'llama'
    """
    try:
        with Path(path).open("rb", buffering=1 << 20) as file:
            read = _Reader(file, str(path))
            if file.read(4) != b"GGUF":
                raise read.bad("it does not begin with the letters GGUF")
            version = read.number("I")
            if version not in (2, 3):
                raise read.bad(f"version {version}, where 2 and 3 are known")
            tensors, values = read.count("tensors"), read.count("values")
            named = {read.string(): read.value() for _ in range(values)}
            listed = [read.tensor() for _ in range(tensors)]
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    return GgufHeader(named, {name: (kind, shape) for name, kind, shape in listed})


def spec_from_gguf(header: GgufHeader, *, source: str = "", dtype: str | None = None) -> ModelSpec:
    """Make the spec of a GGUF file as `load_model` holds it.

    Matrices of the blocks stay packed where their type is one that is decoded here (`GGUF_CODECS`); the
    embedding, the head and everything else are decoded.

    Args:
        header: What the file says.
        source: For people.
        dtype: Of what is decoded; None is bfloat16.

    Returns:
        The spec.

    Raises:
        CheckpointError: It has no layer stack.
        OptionError: It is one part of several.
    """
    values, notes = header.values, []
    if int(_number(values, "split.count")) > 1:
        raise OptionError(
            f"option model: {source} is one of {values['split.count']} parts of a model; join them first "
            "(llama.cpp's gguf-split --merge)"
        )
    family = str(values.get("general.architecture", ""))
    experts = _number(values, f"{family}.expert_count")
    packs = family not in DECODED and not experts
    if not packs:
        notes.append(f"a {family} GGUF file is decoded to 16 bits as a whole: nothing of it stays packed")
    share = _number(values, f"{family}.expert_used_count") / experts if experts else 1.0
    plain = dtype or "bfloat16"
    around: dict[str, list[TensorSpec]] = {}
    blocks: dict[int, list[tuple[int, TensorSpec]]] = {}
    decoded = 0
    for name, (kind, shape) in header.tensors.items():
        match = _IN_STACK.fullmatch(name)
        if match is None:
            place = _AROUND.get(name.rpartition(".")[0], "other")
            use = {"embedding": "gather", "head": "matmul"}.get(place, "other")
            if not _NOT_HELD.fullmatch(name):
                around.setdefault(place, []).append(TensorSpec("weight", shape, plain, use))
            continue
        order, tensor = _part(match[2], kind, shape, plain, share, packs)
        decoded += packs and tensor.codec == "none" and kind not in ("F32", "F16", "BF16")
        blocks.setdefault(int(match[1]), []).append((order, tensor))
    if not blocks:
        raise CheckpointError(
            f"{source or 'GGUF file'}: no layer stack among its {len(header.tensors)} tensors"
        )
    if decoded:
        notes.append(f"{decoded} tensors are of types that are not kept packed: decoded to {plain}")
    hidden = int(_number(values, f"{family}.embedding_length")) or max(
        (t.shape[-1] for t in around.get("embedding", []) if t.shape), default=0
    )
    heads, size = (_number(values, f"{family}.attention.{key}") for key in ("head_count", "key_length"))
    query = int(heads * size) or hidden
    made = []
    for index, own in sorted(blocks.items()):
        ordered = [tensor for _, tensor in sorted(own, key=lambda part: part[0])]
        made.append(block_of(f"model.layers.{index}", ordered, hidden, query=query))
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "other": "other"}
    groups = {
        kind: BlockSpec(names[kind], kind, tuple(own), hidden, kernels=1) for kind, own in around.items()
    }
    first = [groups[kind] for kind in ("embedding", "other") if kind in groups]
    last = [groups[kind] for kind in ("norm", "head") if kind in groups]
    tied = "head" not in groups and "embedding" in groups
    return ModelSpec((*first, *made, *last), tied, source, tuple(notes))


def _part(
    name: str, kind: str, shape: tuple[int, ...], plain: str, share: float, packs: bool
) -> tuple[int, TensorSpec]:
    """Return where a block's tensor comes in the order of use, and its spec."""
    part, _, last = name.rpartition(".")
    order, long = _NAMES.get(part, (len(_NAMES), part or name))
    weight = last == "weight"
    use = "experts" if len(shape) == 3 else "matmul" if len(shape) == 2 and weight else "other"
    if long == "mlp.gate":
        use = "other"
    active = share if use == "experts" else 1.0
    codec = GGUF_CODECS.get(kind)
    if codec is None or not packs or len(shape) != 2:
        return order, TensorSpec(f"{long}.{last}", shape, plain, use, active)
    try:
        parts = codec.parts(shape)
    except ArgumentError as error:
        raise CheckpointError(f"GGUF tensor {name!r} of type {kind} and shape {shape}: {error}") from error
    nbytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts.values())
    return order, TensorSpec(f"{long}.{last}", shape, plain, use, active, False, codec.name, nbytes)


def _number(values: dict[str, Any], name: str) -> float:
    """Return a value, the largest where each layer has its own, 0 where there is none that makes sense."""
    value = values.get(name, 0)
    if isinstance(value, list):
        value = max(value, default=0)
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and 0 <= value < _ENTRIES else 0  # neither NaN nor infinite
