"""Packing of documents into full rows; the code is in ts-hf."""

from ts_hf.isolation import isolate_documents
from ts_hf.packing import (
    PackedCollator,
    best_fit,
    check_isolation,
    document_ids,
    flatten_rows,
    pack_sequences,
)

__all__ = [
    "PackedCollator",
    "best_fit",
    "check_isolation",
    "document_ids",
    "flatten_rows",
    "isolate_documents",
    "pack_sequences",
]
