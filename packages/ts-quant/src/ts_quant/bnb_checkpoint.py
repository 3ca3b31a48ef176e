"""Weights of bitsandbytes checkpoints as quantized tensors, their bytes unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import CheckpointError, TrainStreamError

from .codecs import BNB_FP4_CODEC, BNB_INT8_CODEC, NF4_CODEC, Meta
from .codecs.nested import GROUP
from .reference import NF4_LEVELS
from .references.bnb import FP4_LEVELS
from .tensor import QuantizedTensor

__all__ = ["bitsandbytes_names", "from_bitsandbytes"]

_STATE = ".quant_state.bitsandbytes__"
_KINDS = {"nf4": (NF4_CODEC.name, NF4_LEVELS), "fp4": (BNB_FP4_CODEC.name, FP4_LEVELS)}
_STATE_LIMIT = 1 << 16  # bytes; what bitsandbytes writes is about 200
_WIDE = (torch.float32, torch.float16, torch.bfloat16)


def bitsandbytes_names(name: str, names: Collection[str]) -> dict[str, str] | None:
    """Find what belongs to a weight in a bitsandbytes checkpoint.

    Args:
        name: Name of the weight, as a model has it: "layers.0.up.weight".
        names: All names in the checkpoint.

    Returns:
        The name in the checkpoint of each piece: "weight", and "absmax", "quant_map", "nested_absmax",
        "nested_quant_map", "state" as far as they are there (4 bits), or "scales" and "format" (8 bits). None
        if the weight is not in the checkpoint or was not quantized by bitsandbytes.

    Example:
        >>> bitsandbytes_names("up.weight", ["up.weight", "up.SCB", "up.weight_format"])
        {'weight': 'up.weight', 'scales': 'up.SCB', 'format': 'up.weight_format'}
    """
    if name not in names:
        return None
    found = {"weight": name}
    states = [f"{name}{_STATE}{kind}" for kind in _KINDS if f"{name}{_STATE}{kind}" in names]
    if states:
        found["state"] = states[0]
        pieces = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return found | {piece: f"{name}.{piece}" for piece in pieces if f"{name}.{piece}" in names}
    module = name.removesuffix("weight")
    if name.endswith("weight") and f"{module}SCB" in names:
        found["scales"] = f"{module}SCB"
        if f"{name}_format" in names:
            found["format"] = f"{name}_format"
        return found
    return None


def from_bitsandbytes(
    name: str, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> QuantizedTensor:
    """Take a weight of a bitsandbytes checkpoint as it was published.

    Args:
        name: Name of the weight.
        tensors: The checkpoint's tensors, or those that `bitsandbytes_names` lists; others are ignored.
            4 bits: `<name>` with `<name>.absmax`, `<name>.quant_map`, `<name>.quant_state.bitsandbytes__nf4`
            or `__fp4`, and with nested statistics `<name>.nested_absmax`, `<name>.nested_quant_map`.
            8 bits: `<name>` in int8 with `<module>.SCB`.
        dtype: Floating dtype that the tensor presents; `None`: the one that was quantized, float16 in 8 bits.

    Returns:
        A tensor whose packed tensors are the checkpoint's own bytes, on their device: codec "nf4", "bnb_fp4"
        or "bnb_int8". It decodes to what bitsandbytes decodes to.

    Raises:
        CheckpointError: A piece is missing, damaged, or of a form that was never published.

    Example:
        >>> import torch
        >>> tensors = {"up.weight": torch.ones(2, 4, dtype=torch.int8), "up.SCB": torch.full((2,), 127.0)}
        >>> from_bitsandbytes("up.weight", tensors, torch.float32).dequantize()[0]
        tensor([1., 1., 1., 1.])
    """
    pieces = bitsandbytes_names(name, tensors)
    if pieces is None:
        raise _fail(name, "no weight of bitsandbytes: expected quant_state or SCB beside it")
    found = {piece: tensors[where] for piece, where in pieces.items()}
    try:
        if "scales" in found:
            return _from_rows(name, found, dtype or torch.float16)
        return _from_blocks(name, pieces["state"].rsplit("__", 1)[1], found, dtype)
    except CheckpointError:
        raise
    except TrainStreamError as error:
        raise _fail(name, str(error)) from error


def _fail(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"[from_bitsandbytes] {name}: {reason}")


def _from_rows(name: str, found: Mapping[str, torch.Tensor], dtype: torch.dtype) -> QuantizedTensor:
    weight = found["weight"]
    if weight.dtype != torch.int8 or weight.dim() < 2:
        raise _fail(name, f"expected an int8 matrix, given {dtype_name(weight.dtype)} {tuple(weight.shape)}")
    # Column orders for old tensor cores; nothing writes them any more.
    form = found.get("format")
    if form is not None and (form.numel() != 1 or form.item() != 0):
        given = form.item() if form.numel() == 1 else f"{form.numel()} values"
        raise _fail(
            name,
            f"expected weight_format 0 (rows), given {given}. Save the checkpoint again with a recent "
            "bitsandbytes",
        )
    packed = {"codes": weight.contiguous().reshape(-1), "row_absmax": _wide(name, "SCB", found["scales"])}
    return QuantizedTensor.from_packed(packed, BNB_INT8_CODEC.name, tuple(weight.shape), dtype, Meta(0))


def _from_blocks(
    name: str, kind: str, found: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> QuantizedTensor:
    state = _state(name, found["state"])
    codec, levels = _KINDS[kind]
    if state.get("quant_type") != kind:
        raise _fail(name, f"quant_state says {state.get('quant_type')!r}, its name says {kind!r}")
    if "quant_map" in found:
        given = found["quant_map"].float().flatten().cpu()
        if given.numel() != 16 or not torch.allclose(given, torch.tensor(levels), atol=2e-3, rtol=0):
            raise _fail(name, f"quant_map holds other values than {kind} has")
    if "absmax" not in found:
        raise _fail(name, "absmax is missing")
    shape = _shape(name, state.get("shape"))
    codes = found["weight"].contiguous().reshape(-1).view(torch.uint8)  # other storage dtypes hold the bytes
    packed = {"codes": codes}
    nested = "nested_absmax" in found
    if nested != ("nested_offset" in state):
        raise _fail(name, "nested_absmax and nested_offset: expected both or neither")
    if nested:
        packed |= _nested(name, state, found)
    else:
        packed["absmax"] = _wide(name, "absmax", found["absmax"])
    meta = Meta.make(_integer(name, "blocksize", state.get("blocksize")), double_quant=nested)
    shown = parse_dtype(state["dtype"]) if dtype is None and "dtype" in state else dtype or torch.float16
    return QuantizedTensor.from_packed(packed, codec, shape, shown, meta)


def _nested(
    name: str, state: Mapping[str, Any], found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gather quantized scales: the map, and after it the offset."""
    if state.get("nested_blocksize") != GROUP or state.get("nested_dtype") != "float32":
        given = f"{state.get('nested_blocksize')!r} of {state.get('nested_dtype')!r}"
        raise _fail(name, f"expected one float32 per {GROUP} scales, given {given}")
    offset = state["nested_offset"]
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise _fail(name, f"nested_offset: expected a finite number, given {offset!r}")
    if "nested_quant_map" not in found or found["nested_quant_map"].numel() != 256:
        raise _fail(name, "nested_quant_map: expected 256 values")
    table = _wide(name, "nested_quant_map", found["nested_quant_map"])
    end = torch.tensor([offset], dtype=torch.float32, device=table.device)
    return {
        "absmax": found["absmax"].reshape(-1),
        "nested_absmax": _wide(name, "nested_absmax", found["nested_absmax"]),
        "nested_map": torch.cat((table, end)),
    }


def _state(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Read the JSON that bitsandbytes keeps in a uint8 tensor."""
    if tensor.dtype != torch.uint8 or tensor.numel() > _STATE_LIMIT:
        raise _fail(name, "quant_state: expected a small uint8 tensor")
    try:
        state: Any = json.loads(bytes(tensor.flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise _fail(name, f"quant_state: damaged ({error})") from error
    if not isinstance(state, dict):
        raise _fail(name, f"quant_state: expected named values, given {type(state).__name__}")
    return state


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise _fail(name, f"quant_state: expected a shape, given {value!r}")
    return tuple(value)


def _integer(name: str, key: str, value: Any) -> int:
    if type(value) is not int:
        raise _fail(name, f"quant_state: {key}: expected an integer, given {value!r}")
    return value


def _wide(name: str, piece: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a scale tensor as float32; widening from 16 bits is exact."""
    if tensor.dtype not in _WIDE:
        raise _fail(name, f"{piece}: expected floats, given {dtype_name(tensor.dtype)}")
    return tensor.contiguous().reshape(-1).float()
