"""What `load_model` says about a model that it filled: sizes, codecs, and what was left as it is."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from ts_core.memory import format_bytes
from ts_quant import QuantizedTensor

from .offload import file_bytes
from .streaming import Packing

__all__ = ["log_receipt", "not_printed", "print_receipt", "receipt_of", "receipt_text"]

LOGGER = logging.getLogger("trainstream")
_printed: ContextVar[bool] = ContextVar("receipts are printed", default=True)


def receipt_of(model: Any, packing: Packing, started: float) -> dict[str, Any]:
    """Say what is stored how.

    Args:
        model: The filled model.
        packing: How its parameters were stored.
        started: When that began, by `time.perf_counter`.

    Returns:
        The part of `load_model`'s receipt that does not depend on where the weights came from.
    """
    seen: set[int] = set()
    before = after = packed = total = filed = 0
    for _, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        plain = parameter.numel() * parameter.dtype.itemsize
        stored = getattr(parameter, "packed_bytes", None)
        total += parameter.numel()
        packed += parameter.numel() if stored is not None else 0
        before += plain
        fit = getattr(parameter, "error_factors", None) or ()
        after += int(stored) + sum(part.nbytes for part in fit) if stored is not None else plain
        filed += file_bytes(parameter) if packing.home is not None else 0
    names = dict(model.named_parameters())
    skipped = {name: why for name, why in packing.skipped.items() if name in names} if packing.codec else {}
    return {
        "quantize": packing.codec,
        "parameters": total,
        "packed_tensors": sum(hasattr(p, "packed_bytes") for p in model.parameters()),
        "kept_precise": len(packing.precise),
        "bytes_before": before,
        "bytes_after": after,
        "file_bytes": filed,
        "adopted_bytes": 0 if packing.home is None else packing.home.files.adopted_bytes,
        "share_packed": packed / total if total else 0.0,
        "formats": dict(Counter(p.codec for p in model.parameters() if isinstance(p, QuantizedTensor))),
        "decoded": dict(packing.decoded),
        "skipped": skipped,
        "seconds": time.perf_counter() - started,
    }


def log_receipt(receipt: dict[str, Any]) -> None:
    """Log a receipt in one line.

    Args:
        receipt: The whole of it.
    """
    LOGGER.info(
        "loaded %s: %d parameters, %s -> %s (%s of it in files, %s of these in the checkpoint's own), "
        "%.1f %% packed as %s (%s), %d left as they are, %d tensors unused, %.1f s",
        receipt["source"],
        receipt["parameters"],
        format_bytes(receipt["bytes_before"]),
        format_bytes(receipt["bytes_after"]),
        format_bytes(receipt["file_bytes"]),
        format_bytes(receipt["adopted_bytes"]),
        100 * receipt["share_packed"],
        receipt["quantize"]
        or ", ".join(f"{n} x {name}" for name, n in receipt["formats"].items())
        or "nothing",
        receipt["reason"],
        len(receipt["skipped"]),
        len(receipt["unused"]),
        receipt["seconds"],
    )


@contextlib.contextmanager
def not_printed() -> Iterator[None]:
    """Load without printing receipts, where standard output belongs to somebody else."""
    token = _printed.set(False)
    try:
        yield
    finally:
        _printed.reset(token)


def print_receipt(receipt: dict[str, Any]) -> None:
    """Print a receipt; of several ranks only the first one does.

    Args:
        receipt: The whole of it.
    """
    if _printed.get() and os.environ.get("RANK", "0") == "0":
        print(receipt_text(receipt), flush=True)


def receipt_text(receipt: dict[str, Any]) -> str:
    """Write a receipt as the lines that `load_model` prints: what is packed, and anything skipped.

    Args:
        receipt: The whole of it.

    Returns:
        Lines; those about what did not happen are left out.
    """
    formats = ", ".join(f"{count} x {name}" for name, count in receipt["formats"].items())
    packed, plain = format_bytes(receipt["bytes_after"]), format_bytes(receipt["bytes_before"])
    lines = [
        f"loaded {receipt['source']}: {receipt['parameters']:,} parameters, {receipt['dtype']}, "
        f"{receipt['seconds']:.1f} s",
        f"  packed    {100 * receipt['share_packed']:.1f} % of the parameters"
        f"{f' ({formats})' if formats else ''}; {receipt['reason']}",
        f"  memory    {packed}, unpacked {plain}" if packed != plain else f"  memory    {plain}",
    ]
    if receipt["file_bytes"]:
        own = receipt["adopted_bytes"]
        rest = f", {format_bytes(own)} of these the checkpoint's own" if own else ""
        lines.append(f"  in files  {format_bytes(receipt['file_bytes'])}{rest}")
    for what, found in (("skipped", receipt["skipped"]), ("decoded", receipt["decoded"])):
        if found:
            reasons = (f"{count} {reason}" for reason, count in Counter(found.values()).items())
            lines.append(f"  {what:9} {len(found):,} parameters: {', '.join(reasons)}")
    for what, names, why in (
        ("unused", receipt["unused"], "tensors of the checkpoint, which have no place in the model"),
        ("drawn", receipt["initialized"], "parameters that are in no file"),
    ):
        if names:
            lines.append(f"  {what:9} {len(names):,} {why}, first: {min(names)}")
    return "\n".join(lines)
