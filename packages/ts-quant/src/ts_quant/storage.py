"""Quantized tensors in safetensors files: plain packed tensors, and one line of JSON metadata each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import CheckpointError, TrainStreamError

from .codecs import Meta
from .tensor import QuantizedTensor

__all__ = ["from_safetensors_dict", "to_safetensors_dict"]

_VERSION = 1
_ERROR = "error_"


def to_safetensors_dict(
    prefix: str, tensor: QuantizedTensor
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a tensor into what `safetensors.torch.save_file(tensors, path, metadata)` takes.

    Args:
        prefix: Name of the tensor; the packed tensors are called `prefix.codes`, `prefix.absmax` (by the
            codec's names), and a low-rank fit of its error `prefix.error_a`, `prefix.error_b`.
        tensor: The tensor; its packed tensors are handed over, not copied.

    Returns:
        The tensors by name, and the metadata `{prefix: JSON}`.

    Example:
        >>> from ts_quant import quantize
        >>> sorted(to_safetensors_dict("w", quantize(torch.ones(64)))[0])
        ['w.absmax', 'w.codes']
    """
    description: dict[str, Any] = {
        "version": _VERSION,
        "codec": tensor.codec,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "block_size": tensor.meta.block_size,
        "packed": sorted(tensor.packed),
    }
    if tensor.meta.options:
        description["options"] = dict(tensor.meta.options)
    tensors = {f"{prefix}.{name}": value for name, value in tensor.packed.items()}
    if tensor.error_factors is not None:
        description["error"] = True
        tensors |= {f"{prefix}.{_ERROR}{side}": t for side, t in zip("ab", tensor.error_factors, strict=True)}
    return tensors, {prefix: json.dumps(description, sort_keys=True)}


def from_safetensors_dict(
    prefix: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> QuantizedTensor:
    """Put together what `to_safetensors_dict` split.

    Args:
        prefix: Name of the tensor.
        tensors: The file's tensors; others are ignored.
        metadata: The file's metadata.

    Returns:
        The tensor, on the device of its packed tensors, which it keeps.

    Raises:
        CheckpointError: The description is missing or damaged, or the packed tensors do not fit it.

    Example:
        >>> from ts_quant import quantize
        >>> from_safetensors_dict("w", *to_safetensors_dict("w", quantize(torch.ones(64)))).shape
        torch.Size([64])
    """

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"[from_safetensors_dict] tensor {prefix!r}: {reason}")

    if prefix not in metadata:
        raise fail("no description in the file's metadata; it was not saved by to_safetensors_dict")
    try:
        description: Any = json.loads(metadata[prefix])
        version, codec = description["version"], description["codec"]
        shape, meta = description["shape"], (description["block_size"], description.get("options", ()))
        dtype = parse_dtype(description["dtype"])
        packed = {name: tensors[f"{prefix}.{name}"] for name in description["packed"]}
        if not packed:
            raise ValueError("no packed tensors")
        shape = tuple(shape)
        error = [tensors[f"{prefix}.{_ERROR}{side}"] for side in "ab"] if description.get("error") else None
    except (TrainStreamError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as why:
        raise fail(f"damaged description or missing tensor ({why!r})") from why
    if version != _VERSION:
        raise fail(f"expected version {_VERSION} of the description, given {version!r}; update ts-quant")
    try:
        made = QuantizedTensor.from_packed(packed, codec, shape, dtype, Meta.of(meta))
        return made if error is None else made.with_error(*error)
    except TrainStreamError as why:
        raise fail(str(why)) from why
