"""TrainStream for Hugging Face models: loading, GGUF files, losses and text data.

Importing this package is cheap: transformers is imported by the functions that need it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import merge_adapters
    from .background import save_in_background
    from .checkpoint import Checkpoint, resolve
    from .gguf import fetch_smollm2, load_gguf, save_as_safetensors, smollm2_path
    from .isolation import isolate_documents
    from .kv_cache import BlockCache
    from .loading import load_model, load_tokenizer
    from .losses import backbone, causal_lm_loss_for, count_items
    from .packing import PackedCollator, best_fit, pack_sequences
    from .preference import reference_logprobs, sequence_logprobs_for
    from .quantizer import TrainStreamConfig
    from .safetensors_reader import SafetensorsReader
    from .saving import save_model, save_safetensors
    from .tokens import stdlib_text, text_dataset

__version__ = version("ts-hf")

_HOME = {
    "BlockCache": "kv_cache",
    "Checkpoint": "checkpoint",
    "PackedCollator": "packing",
    "SafetensorsReader": "safetensors_reader",
    "TrainStreamConfig": "quantizer",
    "backbone": "losses",
    "best_fit": "packing",
    "causal_lm_loss_for": "losses",
    "count_items": "losses",
    "fetch_smollm2": "gguf",
    "isolate_documents": "isolation",
    "load_gguf": "gguf",
    "load_model": "loading",
    "load_tokenizer": "loading",
    "merge_adapters": "adapters",
    "pack_sequences": "packing",
    "reference_logprobs": "preference",
    "resolve": "checkpoint",
    "save_as_safetensors": "gguf",
    "save_in_background": "background",
    "save_model": "saving",
    "save_safetensors": "saving",
    "sequence_logprobs_for": "preference",
    "smollm2_path": "gguf",
    "stdlib_text": "tokens",
    "text_dataset": "tokens",
}

__all__ = [
    "BlockCache",
    "Checkpoint",
    "PackedCollator",
    "SafetensorsReader",
    "TrainStreamConfig",
    "backbone",
    "best_fit",
    "causal_lm_loss_for",
    "count_items",
    "fetch_smollm2",
    "isolate_documents",
    "load_gguf",
    "load_model",
    "load_tokenizer",
    "merge_adapters",
    "pack_sequences",
    "reference_logprobs",
    "resolve",
    "save_as_safetensors",
    "save_in_background",
    "save_model",
    "save_safetensors",
    "sequence_logprobs_for",
    "smollm2_path",
    "stdlib_text",
    "text_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
