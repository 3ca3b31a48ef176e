"""Decodes a GGUF file tensor by tensor into mapped files, so that the decoded model is never in RAM.

transformers decodes all tensors before it makes a model of them. Here its own tables (which tensor is which,
and how a file's row order is undone) are applied to one tensor at a time, where they are known to look at
nothing else: mixtures, whose tensors are put together from several, are left to transformers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ts_paging.files import FileTensors

from .build import build_model, import_transformers, owner_of

__all__ = ["decode_into_files", "warn_unused"]

LOGGER = logging.getLogger("trainstream")

# transformers' treatments that need no other tensor.
_ALONE = ("TensorProcessor", "LlamaTensorProcessor", "Gemma2TensorProcessor")
# The largest tensors, which none of these treatments touches: decoded in pieces.
_IN_PIECES = ("token_embd.weight", "output.weight")
_PIECE_ROWS = 4096
_PLAIN: Any = ["C_CONTIGUOUS", "WRITEABLE"]  # what torch takes without a warning


def _tables() -> Any:
    """Return what transformers and gguf have for this, or None if it is elsewhere in these releases."""
    try:
        from gguf import GGUFReader, dequantize
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
            read_field,
        )
    except ImportError:
        return None
    return SimpleNamespace(
        GGUFReader=GGUFReader,
        dequantize=dequantize,
        processors=TENSOR_PROCESSORS,
        default=TensorProcessor,
        weights_map=get_gguf_hf_weights_map,
        header=load_gguf_checkpoint,
        read_field=read_field,
    )


def decode_into_files(path: Path, dtype: torch.dtype, files: FileTensors) -> Any:
    """Decode a GGUF file into a model whose weights are in files.

    Args:
        path: The file.
        dtype: Dtype of the weights.
        files: Where they go; they must outlive the model.

    Returns:
        The causal LM, the same as `load_gguf` makes; or None if this file is one that transformers has to
        decode as a whole, or is damaged: it says so better.

    Example:
        >>> decode_into_files(Path("path/to/model.gguf"), torch.bfloat16, FileTensors())  # doctest: +SKIP
    """
    tables = _tables()
    if tables is None:
        return None
    try:
        return _decode(tables, path, dtype, files)
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, NotImplementedError):
        return None


def _decode(tables: Any, path: Path, dtype: torch.dtype, files: FileTensors) -> Any:
    transformers = import_transformers()
    # A reader holds every token of the vocabulary as an object, so there is one at a time.
    architecture = tables.read_field(tables.GGUFReader(str(path)), "general.architecture")[0]
    processor_class = tables.processors.get(architecture, tables.default)
    if processor_class.__name__ not in _ALONE:
        return None
    header = tables.header(str(path), return_tensors=False)
    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    config.name_or_path = path.stem
    model = build_model(config, dtype)
    processor = processor_class(config=header["config"])
    names = tables.weights_map(model, processor)
    missing = set(model.state_dict()) - set(model.all_tied_weights_keys)
    unused: list[str] = []
    reader = tables.GGUFReader(str(path))
    with torch.no_grad():
        for stored in reader.tensors:
            if stored.name in _IN_PIECES and stored.name in names:
                target = names[stored.name]
                value = _in_pieces(tables, stored, _like(model, target), files)
            else:
                weights = tables.dequantize(stored.data, stored.tensor_type)
                result = processor.process(
                    weights=weights, name=stored.name, tensor_key_mapping=names, parsed_parameters=header
                )
                if result.name not in names:
                    unused.append(stored.name)
                    continue
                target = names[result.name]
                value = files.like(_like(model, target))
                value.copy_(torch.from_numpy(np.require(result.weights, requirements=_PLAIN)))
            module, last = owner_of(model, target)
            module._parameters[last] = nn.Parameter(value)
            missing.discard(target)
    if missing:
        return None
    warn_unused(model, path, unused)
    model.tie_weights(recompute_mapping=False)
    if model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_model_config(config)
    return model.eval()


def warn_unused(model: Any, path: Path, unused: list[str]) -> None:
    """Say which tensors of a file have no place in the model."""
    if not unused:
        return
    hint = ""
    if "rope_freqs.weight" in unused:
        hint = (
            "; rope_freqs.weight scales the rotary frequencies, which a GGUF file's config does not say: "
            "pass rope_parameters={...} as the config.json of the original model has them"
        )
    text = "%s: %d tensors of the file have no place in %s and were not used, first: %s%s"
    LOGGER.warning(text, path, len(unused), type(model).__name__, unused[0], hint)


def _like(model: Any, name: str) -> torch.Tensor:
    module, last = owner_of(model, name)
    parameter = module._parameters[last]
    if parameter is None:
        raise KeyError(name)
    return parameter


def _in_pieces(tables: Any, stored: Any, like: torch.Tensor, files: FileTensors) -> torch.Tensor:
    value = files.like(like)
    for start in range(0, len(stored.data), _PIECE_ROWS):
        rows = slice(start, start + _PIECE_ROWS)
        piece = tables.dequantize(stored.data[rows], stored.tensor_type)
        value[rows].copy_(torch.from_numpy(np.require(piece, requirements=_PLAIN)))
    return value
