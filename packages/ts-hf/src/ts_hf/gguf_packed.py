"""Loads a GGUF file with the block matrices left in the file's own packed form.

Names and row orders come from transformers' tables, as in `gguf_streaming`; rows of packed blocks are put in
order as they are, for a row of a matrix is a whole number of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ts_core.errors import TrainStreamError
from ts_quant import QuantizedTensor
from ts_quant.codecs import GGUF_CODECS

from .build import build_model, import_transformers, load_config, owner_of
from .gguf_streaming import _ALONE, _PLAIN, _like, _tables, warn_unused
from .packed_checkpoint import require_ram_for
from .streaming import OUTSIDE, Packing

__all__ = ["load_packed"]

_PIECE_ROWS = 4096
MakePacking = Callable[[Any, str], tuple[Packing, str]]


def load_packed(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    overrides: dict[str, Any],
    make_packing: MakePacking,
) -> tuple[Any, Packing, dict[str, Any], str] | None:
    """Load a GGUF file; matrices of the blocks stay packed where their type is one that is decoded here.

    Args:
        path: The file.
        dtype: Dtype of the other weights, and what packed ones present.
        device: Where all of them go.
        overrides: Changes to the config.
        make_packing: `(model, method) -> (packing, reason)`.

    Returns:
        The causal LM, what is stored how, what the receipt says, the reason; or None if this file is one that
        transformers has to decode as a whole (mixtures), or is damaged: its own loader says so better.

    Raises:
        TrainStreamError: A bad override, or files that cannot be written.

    Example:
        >>> load_packed(path, torch.bfloat16, torch.device("cpu"), {}, make)  # doctest: +SKIP
    """
    tables = _tables()
    if tables is None:
        return None
    try:
        return _Load(tables, path, dtype, device).run(overrides, make_packing)
    except TrainStreamError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, NotImplementedError, OSError):
        return None


class _Load:
    """The state of one pass over a file."""

    def __init__(self, tables: SimpleNamespace, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.tables, self.path, self.dtype, self.device = tables, path, dtype, device
        self.unused: list[str] = []

    def run(
        self, overrides: dict[str, Any], make_packing: MakePacking
    ) -> tuple[Any, Packing, dict[str, Any], str] | None:
        tables, path = self.tables, self.path
        # Opening a file takes seconds: the vocabulary becomes objects, one a token.
        reader = tables.GGUFReader(str(path))
        architecture = tables.read_field(reader, "general.architecture")[0]
        processor_class = tables.processors.get(architecture, tables.default)
        if processor_class.__name__ not in _ALONE:
            return None
        self.header = tables.header(str(path), return_tensors=False)
        transformers = import_transformers()
        config = transformers.AutoConfig.for_model(**self.header["config"])
        config = load_config(config, overrides, trust_remote_code=False)
        self.model = build_model(config, self.dtype)
        self.processor = processor_class(config=self.header["config"])
        self.names: dict[str, str] = tables.weights_map(self.model, self.processor)
        kinds = Counter(stored.tensor_type.name for stored in reader.tensors)
        shown = ", ".join(kind for kind, _ in kinds.most_common() if kind in GGUF_CODECS)
        self.packing, reason = make_packing(self.model, f"GGUF ({shown or 'nothing packed'})")
        nbytes = sum(int(stored.n_bytes) for stored in reader.tensors)
        require_ram_for(nbytes, self.packing.home, self.device)
        missing = set(self.model.state_dict()) - set(self.model.all_tied_weights_keys)
        with torch.no_grad():
            for stored in reader.tensors:
                missing.discard(self.fill(stored))
        if missing:
            return None
        warn_unused(self.model, path, self.unused)
        self.model.tie_weights(recompute_mapping=False)
        if self.model.can_generate():
            self.model.generation_config = transformers.GenerationConfig.from_model_config(config)
        found = {
            "tensors": len(reader.tensors),
            "checkpoint_bytes": nbytes,
            "unused": self.unused,
            "aside": [],
            "initialized": [],
            "buffers_from_init": [],
        }
        return self.model, self.packing, found, reason

    def fill(self, stored: Any) -> str | None:
        """Put one tensor of the file into the model; returns the parameter's name."""
        kind = stored.tensor_type.name
        target = self.names.get(stored.name)
        packed = None
        if kind in GGUF_CODECS and target in self.packing.names:
            packed = self.keep(stored, kind, _like(self.model, target))
        if packed is None:
            target, value = self.decode(stored)
            if target is None or value is None:
                self.unused.append(stored.name)
                return None
            if kind not in ("F32", "F16", "BF16"):
                inside = target in self.packing.names
                why = f"{kind} is not kept" if inside else self.packing.skipped.get(target, OUTSIDE)
                self.packing.decoded[target] = why
        else:
            value = packed
        assert target is not None
        module, last = owner_of(self.model, target)
        old = module._parameters[last]
        assert old is not None
        module._parameters[last] = self.packing.store(target, value.to(self.device), old)
        return target

    def keep(self, stored: Any, kind: str, like: torch.Tensor) -> QuantizedTensor | None:
        """Take a matrix in its packed form, its rows in the model's order; None if that is not enough."""
        shape = tuple(like.shape)
        if like.dim() != 2 or len(stored.data) != shape[0]:
            return None
        order = self.row_order(stored, shape[0])
        if order is None:
            return None
        rows = torch.from_numpy(np.array(stored.data))  # the file's memory is read-only, and goes
        if not torch.equal(order, torch.arange(len(order))):
            rows = rows[order]
        codec = GGUF_CODECS[kind]
        packed = {"blocks": rows.reshape(-1)}
        return QuantizedTensor.from_packed(packed, codec.name, shape, self.dtype, codec.meta())

    def row_order(self, stored: Any, rows: int) -> torch.Tensor | None:
        """Ask transformers' treatment of a tensor what it does to numbered rows."""
        numbers = np.arange(rows, dtype=np.int64)[:, None]
        result = self.processor.process(
            weights=numbers,
            name=stored.name,
            tensor_key_mapping=self.names,
            parsed_parameters=self.header,
        )
        order = torch.from_numpy(np.array(result.weights))
        if order.shape != (rows, 1) or result.name != stored.name:
            return None
        order = order[:, 0]
        return order if torch.equal(order.sort().values, torch.arange(rows)) else None

    def decode(self, stored: Any) -> tuple[str | None, torch.Tensor | None]:
        """Decode a tensor to the dtype of its parameter, the largest ones in pieces."""
        if stored.name in self.names and stored.name in ("token_embd.weight", "output.weight"):
            target = self.names[stored.name]
            like = _like(self.model, target)
            value = self.packing.reserve(target, like.shape, like.dtype)
            value = torch.empty(like.shape, dtype=like.dtype) if value is None else value
            for start in range(0, len(stored.data), _PIECE_ROWS):
                rows = slice(start, start + _PIECE_ROWS)
                value[rows].copy_(self.plain(stored.data[rows], stored))
            return target, value
        result = self.processor.process(
            weights=self.tables.dequantize(stored.data, stored.tensor_type),
            name=stored.name,
            tensor_key_mapping=self.names,
            parsed_parameters=self.header,
        )
        if result.name not in self.names:
            return None, None
        target = self.names[result.name]
        value = torch.from_numpy(np.require(result.weights, requirements=_PLAIN))
        return target, value.to(_like(self.model, target).dtype)

    def plain(self, data: Any, stored: Any) -> torch.Tensor:
        """Decode some rows."""
        values = self.tables.dequantize(data, stored.tensor_type)
        return torch.from_numpy(np.require(values, requirements=_PLAIN))
