"""What a checkpoint of quantized weights holds once it is loaded, worked out from headers or by rule.

`load_model` keeps each weight's packed tensors as they are stored, but for scales that it widens and for what
a weight does not need (zero points that are zero, scales of activations, group indices in order). So the
bytes of every weight follow from the dtypes and shapes in the headers and from the config's description; or,
without the headers, from the model's shapes and that description alone.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ts_core.spec import BlockSpec, ModelSpec, TensorSpec

from .prequantized import Scheme, recognise
from .safetensors_reader import _BITS

__all__ = ["Held", "as_held", "described", "held_weights", "left_plain", "rule_of"]

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
_IN_STACK = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.([0-9]{1,6})\.(.+)$")
_EXPERT = re.compile(r"\bexperts\.[0-9]{1,6}\.(?:(.*)\.)?([^.]+)\.weight$")
_DOWN = ("down_proj", "w2")


@dataclasses.dataclass(frozen=True)
class Held:
    """One packed weight.

    Attributes:
        shape: Its sizes; None where the headers do not tell (bitsandbytes' 4 bits).
        numel: Its elements, at most.
        nbytes: What its packed tensors take once it is loaded.
    """

    shape: tuple[int, ...] | None
    numel: int
    nbytes: int


def described(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a config's description of stored quantization, or None."""
    for part in (config, config.get("text_config")):
        stored = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(stored, Mapping) and stored:
            return stored
    return None


def held_weights(headers: Headers, stored: Mapping[str, Any]) -> tuple[dict[str, Held], set[str]]:
    """Find the packed weights of a checkpoint.

    Args:
        headers: Stored dtype and shape of every tensor by name.
        stored: The `quantization_config`.

    Returns:
        Each packed weight by its name in the model, and the names of the tensors that they are made of or
        that no weight needs.

    Raises:
        OptionError: A method, or a variant of one, that `load_model` does not read.
        CheckpointError: A tensor that it does not let one leave out.

    Example:
        >>> headers = {"q.weight": ("I8", (4, 8)), "q.SCB": ("F32", (4,))}
        >>> held, _ = held_weights(headers, {"quant_method": "bitsandbytes", "load_in_8bit": True})
        >>> held["q.weight"].nbytes
        48
    """
    scheme = recognise(stored)
    groups, aside = scheme.group(headers)
    found = {}
    for name, pieces in groups.items():
        weight = _held(scheme, {piece: headers[where] for piece, where in pieces.items()}, stored)
        if weight is not None:
            found[name] = weight
    used = {where for name in found for where in groups[name].values()}
    return found, used | set(aside)


def _bytes(entry: tuple[str, tuple[int, ...]]) -> int:
    return math.prod(entry[1]) * _BITS[entry[0]] // 8


def _wide(entry: tuple[str, tuple[int, ...]]) -> int:
    return 4 * math.prod(entry[1])


def _held(
    scheme: Scheme, pieces: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, Any]
) -> Held | None:
    """Work out one weight; None where its pieces have other forms than the method has."""
    method = scheme.method.partition(" ")[0]
    try:
        if method == "gptq":
            return _gptq(pieces, stored)
        if method == "awq":
            columns, words = pieces["qweight"][1]
            return _of((words * 8, columns), pieces, "qweight", "qzeros", "scales")
        if method == "bitsandbytes":
            return _bitsandbytes(pieces)
        if method == "mxfp4":
            *stacks, rows, groups, half = pieces["blocks"][1]
            return _of((*stacks, groups * half * 2, rows), pieces, "blocks", "scales")
        if scheme.method.endswith("nvfp4"):
            codes = "weight_packed" if "weight_packed" in pieces else "weight"
            *outer, half = pieces[codes][1]
            return _of((*outer, half * 2), pieces, codes, "weight_scale", more=4)
        return _of(pieces["weight"][1], pieces, "weight", "weight_scale")  # a float8 of some kind
    except (KeyError, ValueError, TypeError):
        return None


def _of(
    shape: tuple[int, ...], pieces: Mapping[str, tuple[str, tuple[int, ...]]], *kept: str, more: int = 0
) -> Held:
    return Held(shape, math.prod(shape), sum(_bytes(pieces[piece]) for piece in kept) + more)


def _gptq(pieces: Mapping[str, tuple[str, tuple[int, ...]]], stored: Mapping[str, Any]) -> Held:
    bits = stored.get("bits") or 4
    words, rows = pieces["qweight"][1]
    columns = words * 32 // bits
    group = stored.get("group_size") or -1
    # The order of columns is kept only where it is not the plain one.
    ordered = "g_idx" in pieces and bool(stored.get("desc_act")) and 0 < group < columns
    return _of(
        (rows, columns), pieces, "qweight", "qzeros", "scales", more=_wide(pieces["g_idx"]) if ordered else 0
    )


def _bitsandbytes(pieces: Mapping[str, tuple[str, tuple[int, ...]]]) -> Held:
    codes = _bytes(pieces["weight"])
    if "scales" in pieces:  # a row has one
        return Held(pieces["weight"][1], codes, codes + _wide(pieces["scales"]))
    scales = math.prod(pieces["absmax"][1])
    if "nested_absmax" in pieces:  # a byte each, their own scales, and a table with an offset
        return Held(None, 2 * codes, codes + scales + _wide(pieces["nested_absmax"]) + 257 * 4)
    return Held(None, 2 * codes, codes + 4 * scales)


def as_held(spec: ModelSpec, held: Mapping[str, Held], method: str) -> ModelSpec:
    """Let the weights of a spec count as they are held; what is not among them counts as it is.

    Args:
        spec: Of the same model.
        held: Its packed weights by name.
        method: What to call their form.

    Returns:
        The spec; a stack of experts that are stored one by one is packed if all of them are.

    Example:
        >>> block = BlockSpec("layers.0", tensors=(TensorSpec("q.weight", (4, 8)),), hidden=8)
        >>> as_held(ModelSpec((block,)), {"layers.0.q.weight": Held((4, 8), 32, 48)}, "int8").bytes
        48
    """
    inside: dict[int, dict[str, Held]] = {}
    for name, weight in held.items():
        if match := _IN_STACK.search(name):
            inside.setdefault(int(match[1]), {})[match[2]] = weight
    blocks = []
    index = -1
    for block in spec.blocks:
        if block.kind != "block":
            blocks.append(block)
            continue
        index += 1
        blocks.append(_block(block, inside.get(_number_of(block, index), {}), method))
    return dataclasses.replace(spec, blocks=tuple(blocks))


def _number_of(block: BlockSpec, index: int) -> int:
    last = block.name.rpartition(".")[2]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 7 else index


def _block(block: BlockSpec, held: Mapping[str, Held], method: str) -> BlockSpec:
    tensors = []
    for tensor in block.tensors:
        weights = _parts_of(tensor, held)
        if weights is not None:
            nbytes = sum(weight.nbytes for weight in weights)
            tensor = dataclasses.replace(tensor, codec=method, stored_bytes=nbytes, trained=False)
        tensors.append(tensor)
    return dataclasses.replace(block, tensors=tuple(tensors))


def _parts_of(tensor: TensorSpec, held: Mapping[str, Held]) -> list[Held] | None:
    """Return the packed weights that make up a tensor of the model; None if it is not packed as a whole."""
    if tensor.name in held:
        return [held[tensor.name]]
    if tensor.use != "experts" or len(tensor.shape) < 3:
        return None
    wanted = _projection(tensor.name.removesuffix(".weight").rpartition(".")[2])
    parts = []
    for name, weight in held.items():
        match = _EXPERT.search(name)
        if match and _projection(match[2]) in wanted:
            parts.append(weight)
    whole = sum(weight.numel for weight in parts) >= tensor.numel > 0
    return parts if whole else None


def _projection(name: str) -> str:
    """Return which matrix of an expert a name means: `d`own, `g`ate, `u`p, or `gu` for both in one."""
    if name in _DOWN:
        return "d"
    if name in ("gate_up_proj", "w13"):
        return "gu"
    return {"gate_proj": "g", "w1": "g", "up_proj": "u", "w3": "u"}.get(name, name)


# ------------------------------------------------------------------------------- by rule, without headers

_Rule = Callable[[tuple[int, ...]], int]
_PLAIN = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules")


def left_plain(stored: Mapping[str, Any], module: str) -> bool:
    """Whether a description leaves a module as it was.

    Args:
        stored: The `quantization_config`.
        module: Its path.

    Returns:
        Whether one of the names and patterns that it lists fits: a path, a part of one, a shell pattern, or
        after "re:" a regular expression.

    Example:
        >>> left_plain({"modules_to_not_convert": ["self_attn"]}, "model.layers.0.self_attn.q_proj")
        True
    """
    named = [n for key in _PLAIN for n in _list(stored.get(key)) if isinstance(n, str) and 0 < len(n) < 300]
    for name in named:
        if name.startswith("re:"):
            try:
                if re.match(name[3:], module):
                    return True
            except re.error:
                continue
        elif f".{name}." in f".{module}." or fnmatch.fnmatchcase(module, name):
            return True
    return False


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def rule_of(stored: Mapping[str, Any]) -> _Rule | None:
    """Say what a matrix takes that a method packs.

    Args:
        stored: The `quantization_config`.

    Returns:
        Function from (outputs, inputs), or a stack of such, to bytes; None for a method that is not read.

    Example:
        >>> rule_of({"quant_method": "gptq", "bits": 4, "group_size": 128})((256, 256))
        34048
    """
    method = str(stored.get("quant_method") or "").lower()
    text = json.dumps(stored, default=str).lower()
    if method in ("gptq", "awq"):
        bits = _positive(stored, ("bits", "w_bit"), 4)
        group = _positive(stored, ("group_size", "q_group_size"), 0 if method == "gptq" else 128)
        ordered = method == "gptq" and bool(stored.get("desc_act"))
        return lambda shape: _grouped(shape, bits, group, ordered)
    if method == "bitsandbytes":
        nested = bool(stored.get("bnb_4bit_use_double_quant"))
        return _rows_of_8_bits if stored.get("load_in_8bit") else lambda shape: _blocks_of_64(shape, nested)
    if method == "mxfp4":
        return lambda shape: math.prod(shape) // 2 + math.prod(shape) // 32
    fp4 = str(stored.get("quant_algo")).upper() == "NVFP4" or "nvfp4" in text
    if method in ("modelopt", "compressed-tensors") and fp4:
        return lambda shape: math.prod(shape) // 2 + math.prod(shape) // 16 + 4 * _stack(shape)
    if method in ("fp8", "modelopt", "compressed-tensors"):
        found = re.search(r'"(?:weight_block_size|block_structure)": *\[([0-9]{1,6}), *([0-9]{1,6})\]', text)
        tile = (int(found[1]), int(found[2])) if found else None
        channel = method == "compressed-tensors" and '"strategy": "channel"' in text
        return lambda shape: _floats_of_8_bits(shape, tile, channel)
    return None


def _positive(stored: Mapping[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    value = next((stored[name] for name in names if stored.get(name) is not None), otherwise)
    return value if type(value) is int and 0 < value < 1 << 20 else otherwise


def _stack(shape: tuple[int, ...]) -> int:
    """How many matrices a shape holds."""
    return math.prod(shape[:-2])


def _grouped(shape: tuple[int, ...], bits: int, group: int, ordered: bool) -> int:
    rows, columns = shape[-2:]
    groups = -(-columns // (group or max(columns, 1)))
    # A scale of 16 bits and a packed zero for each group and output.
    one = (rows * columns * bits + groups * rows * (bits + 16)) // 8
    return _stack(shape) * (one + (4 * columns if ordered and groups > 1 else 0))


def _rows_of_8_bits(shape: tuple[int, ...]) -> int:
    return math.prod(shape) + 4 * math.prod(shape[:-1])


def _blocks_of_64(shape: tuple[int, ...], nested: bool) -> int:
    matrix = math.prod(shape[-2:])
    scales = -(-matrix // 64)
    one = -(-matrix // 2) + (scales + 4 * -(-scales // 256) + 257 * 4 if nested else 4 * scales)
    return _stack(shape) * one


def _floats_of_8_bits(shape: tuple[int, ...], tile: tuple[int, int] | None, channel: bool) -> int:
    rows, columns = shape[-2:]
    if channel:  # scales of 16 bits
        return math.prod(shape) + 2 * _stack(shape) * rows
    down, across = tile or (rows, columns)
    scales = -(-rows // max(down, 1)) * -(-columns // max(across, 1))
    return math.prod(shape) + 4 * _stack(shape) * scales
