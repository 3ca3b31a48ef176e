"""Decoding published formats beside a copy of the decoded bytes.

    python bench_published.py [--device cuda] [--rows 13824 --columns 5120] [--dtype bfloat16] [--out FILE]

JSON lines: one with the machine and the versions, then one per format with the median, the best time and the
spread in milliseconds of a decode into a buffer that exists; on a GPU as one of several calls in a CUDA
graph, over buffers that the L2 cache does not hold, and as `call_us` by itself (timing.py). `gb_per_s` counts
bytes read and written, `copy_frac` relates it to the copy's. All take turns, so a busy machine slows all of
them.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from timing import Contender, measure, own_stream, sets

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
            order = torch.randperm(size[0], device=device)
            made = (torch.arange(size[0], device=device) // meta.block_size)[order].to(kind)
        elif kind.is_floating_point:
            made = torch.rand(size, device=device).to(kind)
        elif kind == torch.uint8:
            made = torch.randint(0, 120, size, dtype=kind, device=device)
        else:
            made = torch.randint(-(1 << 31), (1 << 31) - 1, size, dtype=torch.int64, device=device).to(kind)
        packed[part] = made
    return QuantizedTensor.from_packed(packed, name, shape, dtype, meta)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=13824)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny and once: proves that the script works")
    options = parser.parse_args(argv)
    if options.smoke:
        options.rows, options.columns, options.turns = 256, 512, 1
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    shape = (options.rows, options.columns)
    own_stream(device)
    count = sets(options.rows * options.columns * dtype.itemsize, device)
    outs = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
    sources = [torch.rand(shape, device=device).to(dtype) for _ in outs]
    copies = [functools.partial(o.copy_, s) for o, s in zip(outs, sources, strict=True)]
    runs = {"copy": Contender(copies, 2 * outs[0].nbytes)}
    for label, ((name, meta), stacked) in descriptions().items():
        size = (1, *shape[::-1]) if stacked else shape
        first = example(name, meta, size, device, dtype)
        tensors = [first]
        for _ in outs[1:]:
            tensors.append(first.with_packed({key: part.clone() for key, part in first.packed.items()}))
        calls = [
            functools.partial(t.dequantize, out=o.view(size)) for t, o in zip(tensors, outs, strict=True)
        ]
        runs[label] = Contender(calls, first.packed_bytes + outs[0].nbytes)
    times = measure(runs, device, options.turns)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    lines: list[dict[str, Any]] = [
        {"machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads(), "shape": shape}
    ]
    copy = runs["copy"].moved / times["copy"].median()
    for label, taken in times.items():
        rate = runs[label].moved / taken.median()
        lines.append(
            {
                "format": label,
                "dtype": options.dtype,
                **taken.columns(),
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
