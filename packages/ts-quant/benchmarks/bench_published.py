"""Decoding published formats beside a copy of the decoded bytes.

    python bench_published.py [--device cuda] [--rows 13824 --columns 5120] [--dtype bfloat16] [--out FILE]

JSON lines: one with the machine and the versions, then one per format with the median and the best time in
milliseconds of the kernel, which writes into a buffer that exists. `gb_per_s` counts bytes read and written,
`copy_frac` relates it to the copy's. Formats and the copy take turns, so a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ts_core import registry
from ts_quant import QuantizedTensor
from ts_quant.codecs import (
    AWQ_CODEC,
    FP8_EXPORT_CODEC,
    GGUF_CODECS,
    GPTQ_CODEC,
    MXFP4_CODEC,
    NVFP4_EXPORT_CODEC,
)


def descriptions() -> dict[str, tuple[Any, bool]]:
    """By label: the codec's name and description; whether the matrix is one of a stack."""
    formats: dict[str, tuple[Any, bool]] = {
        f"GGUF {name}": ((codec.name, codec.meta()), False) for name, codec in GGUF_CODECS.items()
    }
    formats |= {
        "GPTQ 4 bits": (("gptq", GPTQ_CODEC.describe(128, zero_offset=1)), False),
        "GPTQ 4 bits act-order": (("gptq", GPTQ_CODEC.describe(128, zero_offset=1, act_order=True)), False),
        "GPTQ 8 bits": (("gptq", GPTQ_CODEC.describe(128, 8, zero_offset=1)), False),
        "AWQ": (("awq", AWQ_CODEC.describe(128)), False),
        "MXFP4": (("mxfp4", MXFP4_CODEC.describe()), False),
        "MXFP4 transposed": (("mxfp4", MXFP4_CODEC.describe(transposed=True)), True),
        "NVFP4": (("nvfp4_export", NVFP4_EXPORT_CODEC.describe()), False),
        "fp8 tensor": (("fp8_export", FP8_EXPORT_CODEC.describe()), False),
        "fp8 rows": (("fp8_export", FP8_EXPORT_CODEC.describe(1)), False),
        "fp8 128x128": (("fp8_export", FP8_EXPORT_CODEC.describe(128, 128)), False),
    }
    return formats


def example(
    name: str, meta: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> QuantizedTensor:
    """A tensor of random bytes with scales of an ordinary size."""
    packed = {}
    for part, (kind, size) in registry.codec(name).parts(shape, meta).items():
        if part == "g_idx":
            made = (torch.arange(size[0]) // meta.block_size)[torch.randperm(size[0])].to(kind)
        elif kind.is_floating_point:
            made = torch.rand(size).to(kind)
        elif kind == torch.uint8:
            made = torch.randint(0, 120, size, dtype=kind)
        else:
            made = torch.randint(-(1 << 31), (1 << 31) - 1, size, dtype=torch.int64).to(kind)
        packed[part] = made.to(device)
    return QuantizedTensor.from_packed(packed, name, shape, dtype, meta)


def clock(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny and once: proves that the script works")
    options = parser.parse_args(argv)
    if options.smoke:
        options.rows, options.columns, options.turns = 256, 512, 1
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    shape = (options.rows, options.columns)
    out = torch.empty(shape, dtype=dtype, device=device)
    source = torch.rand(shape, device=device).to(dtype)
    runs: dict[str, tuple[Callable[[], Any], int]] = {"copy": (lambda: out.copy_(source), 2 * out.nbytes)}
    for label, ((name, meta), stacked) in descriptions().items():
        size = (1, *shape[::-1]) if stacked else shape
        tensor = example(name, meta, size, device, dtype)
        into = out.view(size)
        runs[label] = (lambda t=tensor, o=into: t.dequantize(out=o), tensor.packed_bytes + out.nbytes)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for turn in range(options.turns + 2):
        for label, (run, _) in runs.items():
            seconds = clock(run, device)
            if turn >= 2:
                times[label].append(seconds)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    lines: list[dict[str, Any]] = [
        {"machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads(), "shape": shape}
    ]
    copy = runs["copy"][1] / statistics.median(times["copy"])
    for label, (_, nbytes) in runs.items():
        median = statistics.median(times[label])
        rate = nbytes / median
        lines.append(
            {
                "format": label,
                "dtype": options.dtype,
                "median_ms": round(1e3 * median, 4),
                "best_ms": round(1e3 * min(times[label]), 4),
                "gb_per_s": round(rate / 1e9, 2),
                "copy_frac": round(rate / copy, 3),
            }
        )
    text = "\n".join(json.dumps(line) for line in lines)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
