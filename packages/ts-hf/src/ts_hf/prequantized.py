"""Checkpoints whose weights were quantized before: which method, which tensors belong together, how packed.

A method is recognised by the checkpoint's own config. Each weight's tensors become one `QuantizedTensor` over
the very bytes of the file; nothing is decoded and encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import CheckpointError, OptionError, TrainStreamError
from ts_quant import QuantizedTensor
from ts_quant.bnb_checkpoint import bitsandbytes_names, from_bitsandbytes
from ts_quant.codecs import AWQ_CODEC, FP8_EXPORT_CODEC, GPTQ_CODEC, MXFP4_CODEC, NVFP4_EXPORT_CODEC

__all__ = ["METHODS", "Scheme", "recognise", "take_modelopt", "take_quantization"]

Tensors = Mapping[str, torch.Tensor]
Builder = Callable[[Tensors, torch.dtype], QuantizedTensor]

# Scales of activations and of the KV cache: the weights do not depend on them.
_ACTIVATIONS = tuple(
    f".{what}_scale" for what in ("input", "input_global", "k", "v", "q", "output", "activation")
)


@dataclass(frozen=True)
class Scheme:
    """How one checkpoint stores its quantized weights.

    Attributes:
        method: What to call it.
        suffixes: End of a tensor's name -> (end of the weight's name, piece that it is).
        needs: Pieces that a weight has to have.
        build: Makes the weight of its pieces.
        refused: Ends of names of tensors that cannot be left out, and why.
        by_name: Whether `build` wants tensors by their names in the checkpoint: bitsandbytes.
    """

    method: str
    suffixes: Mapping[str, tuple[str, str]]
    needs: tuple[str, ...]
    build: Builder
    refused: Mapping[str, str] = field(default_factory=dict)
    by_name: bool = False

    def group(self, names: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Find what belongs together.

        Args:
            names: The names of all tensors in the checkpoint.

        Returns:
            For each quantized weight, under the name it has in the model, its tensors by piece; and the
            tensors that no weight needs.

        Raises:
            CheckpointError: A tensor is there that the method does not let one leave out.
        """
        every = list(names)
        if self.by_name:
            return _bitsandbytes_groups(every), []
        groups: dict[str, dict[str, str]] = {}
        aside: list[str] = []
        for name in every:
            for end, why in self.refused.items():
                if name.endswith(end):
                    raise CheckpointError(f"tensor {name!r}: {why}")
            if name.endswith(_ACTIVATIONS):
                aside.append(name)
                continue
            for end, (replaced, piece) in self.suffixes.items():
                if name.endswith(end):
                    groups.setdefault(name.removesuffix(end) + replaced, {})[piece] = name
                    break
        for weight in list(groups):
            # A scale alone belongs to something else.
            if not set(self.needs) <= groups[weight].keys():
                del groups[weight]
        return groups, aside

    def make(self, name: str, tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        """Make a weight.

        Args:
            name: Its name.
            tensors: Its tensors by piece (bitsandbytes: by name).
            dtype: What it presents.

        Returns:
            The weight over these tensors.

        Raises:
            CheckpointError: The tensors do not fit together.
        """
        try:
            if self.by_name:
                return from_bitsandbytes(name, tensors, dtype)
            return self.build(tensors, dtype)
        except (TrainStreamError, RuntimeError, ValueError, IndexError, TypeError, OverflowError) as error:
            raise CheckpointError(f"tensor {name!r}, stored as {self.method}: {error}") from error


def _bitsandbytes_groups(names: list[str]) -> dict[str, dict[str, str]]:
    known = set(names)
    found = {name: bitsandbytes_names(name, known) for name in names if name.endswith("weight")}
    return {name: pieces for name, pieces in found.items() if pieces is not None}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of small floats."""
    return tensor.contiguous().view(torch.uint8)


def _number(stored: Mapping[str, Any], names: tuple[str, ...], default: Any) -> int:
    value = next((stored[name] for name in names if stored.get(name) is not None), default)
    if type(value) is not int:
        raise OptionError(
            f"quantization_config: {names[0]}: expected an integer, given {value!r}; config.json is damaged"
        )
    return value


def _named(value: Any, what: str) -> Mapping[str, Any]:
    """Take an entry of the config that holds named values; none of it is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{what}: expected named values, given {value!r}; config.json is damaged")
    return value or {}


def _flat_groups(g_idx: torch.Tensor, group_size: int) -> bool:
    return torch.equal(g_idx.long(), torch.arange(g_idx.numel()) // group_size)


def _gptq(stored: Mapping[str, Any]) -> Scheme:
    bits, group = _number(stored, ("bits",), 4), _number(stored, ("group_size",), -1)
    if bits not in (2, 4, 8):
        raise _unknown(f"gptq with {bits} bits", "gptq with 2, 4 or 8 bits")
    layout = stored.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _unknown(f"gptq in the format {layout!r}", "its formats 'gptq' and 'gptq_v2'")
    offset = 1 if layout == "gptq" else 0

    def build(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        qweight, scales, g_idx = tensors["qweight"], tensors["scales"], tensors.get("g_idx")
        columns, rows = qweight.shape[0] * (32 // bits), qweight.shape[1]
        size = group if group > 0 else max(columns, 1)
        packed = {"qweight": qweight, "qzeros": tensors["qzeros"], "scales": scales}
        ordered = g_idx is not None and not _flat_groups(g_idx, size)
        if ordered and g_idx is not None:
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= len(scales):
                raise ValueError(f"g_idx: expected groups from 0 to {len(scales) - 1}")
            packed["g_idx"] = g_idx.int()
        meta = GPTQ_CODEC.describe(size, bits, zero_offset=offset, act_order=ordered, scales=scales.dtype)
        return QuantizedTensor.from_packed(packed, GPTQ_CODEC.name, (rows, columns), dtype, meta)

    pieces = ("qweight", "qzeros", "scales")
    suffixes = {f".{piece}": (".weight", piece) for piece in (*pieces, "g_idx")}
    return Scheme(f"gptq ({bits} bits)", suffixes, pieces, build)


def _awq(stored: Mapping[str, Any]) -> Scheme:
    bits = _number(stored, ("bits", "w_bit"), 4)
    group = _number(stored, ("group_size", "q_group_size"), 128)
    version = str(stored.get("version") or "gemm").lower()
    if bits != 4 or version not in ("gemm", "exllama", "ipex"):
        raise _unknown(f"awq, version {version!r} with {bits} bits", "its version 'gemm' with 4 bits")

    def build(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        qweight, scales = tensors["qweight"], tensors["scales"]
        columns, rows = qweight.shape[0], qweight.shape[1] * 8
        packed = {"qweight": qweight, "qzeros": tensors["qzeros"], "scales": scales}
        meta = AWQ_CODEC.describe(group if group > 0 else max(columns, 1), scales=scales.dtype)
        return QuantizedTensor.from_packed(packed, AWQ_CODEC.name, (rows, columns), dtype, meta)

    pieces = ("qweight", "qzeros", "scales")
    return Scheme("awq", {f".{piece}": (".weight", piece) for piece in pieces}, pieces, build)


def _nvfp4(weight: str, scale: str, *, divided: bool) -> Builder:
    def build(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        codes = _bits(tensors[weight])
        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        packed = {
            "codes": codes.flatten(0, -2),
            "scales": _bits(tensors["weight_scale"]).flatten(0, -2),
            "tensor_scale": tensors[scale].float().reshape(1),
        }
        meta = NVFP4_EXPORT_CODEC.describe(divided=divided)
        return QuantizedTensor.from_packed(packed, NVFP4_EXPORT_CODEC.name, shape, dtype, meta)

    return build


def _fp8(tile: tuple[int, int] | None) -> Builder:
    """Make the builder for e4m3 weights; without a tile the shape of the scales tells."""

    def build(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        codes, scale = tensors["weight"], tensors["weight_scale"]
        if codes.dtype != torch.float8_e4m3fn or codes.dim() < 2:
            raise ValueError(f"expected a float8_e4m3fn matrix, given {codes.dtype} {tuple(codes.shape)}")
        zero = tensors.get("weight_zero_point")
        if zero is not None and bool((zero.float() != 0).any()):
            raise ValueError("weight_zero_point: expected none, or zeros")
        rows = codes.shape[:-1].numel()
        size = (0, 0)
        if scale.numel() > 1:
            size = (1, 0) if tile is None or (scale.numel() == rows != 1 and scale.shape[-1] == 1) else tile
        if codes.dim() > 2 and size[0] > 1 and codes.shape[-2] % size[0]:
            raise ValueError(f"matrices of {codes.shape[-2]} rows in a stack end inside a tile of {size[0]}")
        count = [-(-n // (m or n or 1)) for n, m in zip((rows, codes.shape[-1]), size, strict=True)]
        meta = FP8_EXPORT_CODEC.describe(*size, scales=scale.dtype)
        packed = {"codes": _bits(codes).flatten(0, -2), "scales": scale.reshape(count)}
        return QuantizedTensor.from_packed(packed, FP8_EXPORT_CODEC.name, tuple(codes.shape), dtype, meta)

    return build


def _tile(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int for n in value)):
        raise OptionError(f"quantization_config: expected a block of two sizes, given {value!r}")
    return int(value[0]), int(value[1])


_FP8_SUFFIXES = {
    ".weight": (".weight", "weight"),
    ".weight_scale": (".weight", "weight_scale"),
    ".weight_scale_inv": (".weight", "weight_scale"),
    ".weight_zero_point": (".weight", "weight_zero_point"),
}


def _fp8_blocks(stored: Mapping[str, Any]) -> Scheme:
    tile = _tile(stored.get("weight_block_size"))
    shown = "fp8" if tile is None else f"fp8 in blocks of {tile[0]}x{tile[1]}"
    return Scheme(shown, _FP8_SUFFIXES, ("weight", "weight_scale"), _fp8(tile))


def _modelopt(stored: Mapping[str, Any]) -> Scheme:
    algorithm = str(stored.get("quant_algo") or "unnamed").upper()
    refused = {
        ".pre_quant_scale": "its layer multiplies activations before the weight, which is not supported"
    }
    if algorithm == "FP8":
        return Scheme("modelopt fp8", _FP8_SUFFIXES, ("weight", "weight_scale"), _fp8(None), refused)
    # W4A16: the same weights, and activations that nobody rounds.
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise _unknown(f"modelopt with quant_algo {algorithm!r}", "its quant_algo NVFP4 and FP8")
    pieces = ("weight", "weight_scale", "weight_scale_2")
    suffixes = {f".{piece}": (".weight", piece) for piece in pieces}
    build = _nvfp4("weight", "weight_scale_2", divided=False)
    return Scheme("modelopt nvfp4", suffixes, pieces, build, refused)


def _mxfp4(stored: Mapping[str, Any]) -> Scheme:
    def build(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
        blocks, scales = tensors["blocks"], tensors["scales"]
        *stacks, rows, groups, half = blocks.shape
        if half != 16:
            raise ValueError(f"blocks: expected 16 bytes of 32 codes last, given shape {tuple(blocks.shape)}")
        packed = {
            "codes": _bits(blocks).reshape(-1, groups * 16),
            "scales": _bits(scales).reshape(-1, groups),
        }
        # Published (outputs, inputs); the models that use it multiply with (inputs, outputs).
        shape, meta = (*stacks, groups * 32, rows), MXFP4_CODEC.describe(transposed=True)
        return QuantizedTensor.from_packed(packed, MXFP4_CODEC.name, shape, dtype, meta)

    suffixes = {"_blocks": ("", "blocks"), "_scales": ("", "scales")}
    return Scheme("mxfp4", suffixes, ("blocks", "scales"), build)


def _compressed(stored: Mapping[str, Any]) -> Scheme:
    named = _named(stored.get("config_groups"), "quantization_config: config_groups")
    groups = [_named(group, f"quantization_config: config_groups: {key}") for key, group in named.items()]
    sparsity = _named(stored.get("sparsity_config"), "quantization_config: sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise _unknown("compressed-tensors with sparse weights", "its dense formats")
    if stored.get("transform_config"):
        raise _unknown("compressed-tensors with transforms of activations", "formats without them")
    formats = {str(group.get("format") or stored.get("format")) for group in groups}
    formats |= set() if formats else {str(stored.get("format"))}
    plans = [_named(group.get("weights"), "quantization_config: weights") for group in groups]
    if formats == {"nvfp4-pack-quantized"}:
        pieces = ("weight_packed", "weight_scale", "weight_global_scale")
        suffixes = {f".{piece}": (".weight", piece) for piece in pieces}
        build = _nvfp4("weight_packed", "weight_global_scale", divided=True)
        return Scheme("compressed-tensors nvfp4", suffixes, pieces, build)
    fp8 = all(plan.get("type") == "float" and plan.get("num_bits") == 8 for plan in plans)
    if formats <= {"float-quantized", "naive-quantized"} and fp8:
        tiles = {_tile(plan.get("block_structure")) for plan in plans if plan.get("strategy") == "block"}
        if len(tiles) > 1:
            raise _unknown("compressed-tensors with blocks of several sizes", "one size")
        tile = tiles.pop() if tiles else None
        return Scheme("compressed-tensors fp8", _FP8_SUFFIXES, ("weight", "weight_scale"), _fp8(tile))
    shown = ", ".join(sorted(formats))
    raise _unknown(
        f"compressed-tensors in the format {shown!r}",
        "its formats float-quantized (fp8) and nvfp4-pack-quantized",
    )


def _by_name(tensors: Tensors, dtype: torch.dtype) -> QuantizedTensor:
    raise NotImplementedError("bitsandbytes weights are made by name")


def _bitsandbytes(stored: Mapping[str, Any]) -> Scheme:
    bits = 8 if stored.get("load_in_8bit") else 4
    return Scheme(f"bitsandbytes ({bits} bits)", {}, (), _by_name, by_name=True)


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8_blocks,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""By `quant_method`, what reads a checkpoint's `quantization_config`."""


def _unknown(given: str, known: str) -> OptionError:
    return OptionError(
        f"[load_model] the checkpoint is stored as {given}; read are {known}. Load it once with the library "
        "that made it, decode its weights, save them as bf16 safetensors and load that folder"
    )


def recognise(stored: Mapping[str, Any]) -> Scheme:
    """Say how a checkpoint stores its weights.

    Args:
        stored: Its `quantization_config`.

    Returns:
        The scheme.

    Raises:
        OptionError: A method, or a variant of one, that is not read; the message names it.

    Example:
        >>> recognise({"quant_method": "gptq", "bits": 4, "group_size": 128}).method
        'gptq (4 bits)'
    """
    method = str(stored.get("quant_method") or "unnamed").lower()
    if method not in METHODS:
        raise _unknown(f"quant_method {method!r}", ", ".join(map(repr, METHODS)))
    return METHODS[method](stored)


def _plain(stored: Any) -> dict[str, Any]:
    made = stored.to_dict() if hasattr(stored, "to_dict") else _named(stored, "quantization_config")
    return {key: getattr(value, "value", value) for key, value in made.items()}


def take_quantization(config: Any, folder: Path | None) -> dict[str, Any] | None:
    """Take the description of stored quantization out of a config: the model is built without it.

    Args:
        config: A transformers config; changed.
        folder: The checkpoint, for ModelOpt's own file beside the config.

    Returns:
        The `quantization_config` of the model, or None for plain weights.

    Raises:
        CheckpointError: ModelOpt's file is damaged.
        OptionError: The entry of the config is.
    """
    found: dict[str, Any] | None = None
    for part in (config, getattr(config, "text_config", None)):
        stored = getattr(part, "quantization_config", None)
        if part is not None and stored:
            found = found or _plain(stored)
            del part.quantization_config
    return found if found is not None or folder is None else take_modelopt(folder)


def take_modelopt(folder: Path) -> dict[str, Any] | None:
    """Read ModelOpt's own file beside the config.

    Args:
        folder: The checkpoint.

    Returns:
        What a `quantization_config` would say, or None.

    Raises:
        CheckpointError: It is damaged.
    """
    path = folder / "hf_quant_config.json"
    if not path.is_file():
        return None
    try:
        content: Any = json.loads(path.read_bytes())
        described = dict(content["quantization"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: it does not describe a quantization ({error!r})") from error
    if not described.get("quant_algo"):
        return None
    producer = content.get("producer")
    name = producer.get("name") if isinstance(producer, Mapping) else None
    return {"quant_method": str(name or "modelopt"), **described}
