"""Decoding (and encoding) beside bitsandbytes, the PyTorch expression and a copy of the decoded bytes.

    python bench_decode.py [--device cuda] [--shapes 13824x5120 1024x1024] [--dtype bfloat16] [--out FILE]

JSON lines: one with the machine and the versions, then one per shape, codec and contender with the median
and the best time in milliseconds. Contenders take turns, so a busy machine slows all of them. `gb_per_s`
counts bytes read and written, `copy_frac` relates it to the copy's. "out" contenders write into a buffer that
exists; the others allocate their result, as bitsandbytes' function does, which on a CPU costs page faults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ts_core import registry
from ts_quant import _C, QuantizedTensor, dequantize, quantize, reference

BLOCK_SIZE = 64
EXPRESSIONS = ("int8", "nf4", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
SHAPES = ("13824x5120", "1024x1024")


def expression(
    codec: str, packed: dict[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype
) -> Callable:
    """What one would write in PyTorch without kernels."""
    codes, scale = packed["codes"], packed.get("scale")
    if scale is not None:
        return small_float_expression(codec, codes, scale, packed.get("tensor_scale"), shape, dtype)
    absmax = packed["absmax"].unsqueeze(1)
    if codec == "int8":
        return lambda: (codes.view(-1, BLOCK_SIZE) * (absmax / 127)).to(dtype).view(shape)
    levels = torch.tensor(reference.NF4_LEVELS, device=codes.device)
    pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), dim=1)  # by byte
    return lambda: (pairs[codes.int()].view(-1, BLOCK_SIZE) * absmax).to(dtype).view(shape)


def small_float_expression(
    codec: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    whole: torch.Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Callable:
    """The same for fp8 and nvfp4; for tiles of 128 x 128 the shape must be whole ones."""
    rows, columns = shape
    if codec == "nvfp4":
        values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=codes.device)
        values = torch.cat((values, -values))
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # by byte
        factor = scale.view(torch.float8_e4m3fn)
        return lambda: (
            (pairs[codes.int()].view(-1, 16) * (factor.float() * whole).unsqueeze(1)).to(dtype).view(shape)
        )
    values, wide = codes.view(torch.float8_e4m3fn), {"mxfp8": 32, "fp8_block": 128}.get(codec, columns)
    high = 128 if codec == "fp8_block" else 1
    factor = scale.view(torch.float8_e8m0fnu) if codec == "mxfp8" else scale
    factor = factor.view(rows // high, 1, columns // wide, 1)
    tiles = values.view(rows // high, high, columns // wide, wide)
    return lambda: (tiles.float() * factor.float()).to(dtype).view(shape)


def bitsandbytes(x: torch.Tensor, codec: str) -> dict[str, Callable]:
    """Their decode and encode of the same format, if they have it and are installed."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            import bitsandbytes.functional as theirs
    except ImportError:
        return {}
    if codec == "bnb_int8":
        codes, rows, _ = theirs.int8_vectorwise_quant(x.half())
        return {"bitsandbytes": lambda: theirs.int8_vectorwise_dequant(codes, rows)}
    kind, nested = codec.removesuffix("-dq").removeprefix("bnb_"), codec.endswith("-dq")
    if kind not in ("nf4", "fp4"):
        return {}
    how = {"blocksize": BLOCK_SIZE, "quant_type": kind, "compress_statistics": nested}
    codes, state = theirs.quantize_4bit(x, **how)
    return {
        "bitsandbytes": lambda: theirs.dequantize_4bit(codes, state),
        "bitsandbytes encode": lambda: theirs.quantize_4bit(x, **how),
    }


def published(x: torch.Tensor, name: str) -> QuantizedTensor:
    """A weight in a format that is only decoded: bytes that mean finite values, and sizes of its own."""
    codec = registry.codec(name)
    meta = codec.describe(BLOCK_SIZE) if name in ("gptq", "awq") else codec.meta(BLOCK_SIZE)
    parts = {}
    for part, (dtype, shape) in codec.parts(x.shape, meta).items():
        made = torch.full(shape, 0.01, device=x.device) if dtype.is_floating_point else None
        if made is None:
            made = torch.randint(0, 100, shape, device=x.device)
        parts[part] = made.to(dtype)
    return QuantizedTensor.from_packed(parts, name, tuple(x.shape), x.dtype, meta)


def every_codec() -> list[str]:
    """Names of all codecs; with "-dq" where scales can be quantized too."""
    names = [name for name in registry.codecs() if name != "stacked"]  # pieces of the others
    return names + [f"{name}-dq" for name in names if getattr(registry.codec(name), "nests", False)]


def contenders(x: torch.Tensor, codec: str) -> tuple[dict[str, Callable], int]:
    """Return the calls to time, and the bytes of the packed tensor."""
    name, double = codec.removesuffix("-dq"), codec.endswith("-dq")
    encodes = registry.codec(name).encodes
    how = {"block_size": BLOCK_SIZE, "double_quant": double}
    qt = quantize(x, name, **how) if encodes else published(x, name)
    out, few = torch.empty_like(x), x[:8].contiguous()
    calls = {
        "copy out": lambda: out.copy_(x),
        "ts_quant out": lambda: dequantize(qt, out=out),
        "ts_quant": lambda: dequantize(qt),
        "linear, 8 rows": lambda: F.linear(few, qt),
        "linear, 8 rows, plain weight": lambda: F.linear(few, x),
    }
    if encodes:
        calls["ts_quant encode"] = lambda: quantize(x, name, **how)
    if codec in EXPRESSIONS:
        calls["expression"] = expression(codec, qt.packed, x.shape, x.dtype)
    return calls | bitsandbytes(x, codec), qt.packed_bytes


def time_ms(call: Callable, device: str) -> float:
    """Time of one call: CUDA events, or the wall clock."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def machine(device: str) -> dict[str, object]:
    """Hardware and versions."""
    name = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), name)
    found: dict[str, object] = {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "isa": _C.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):
        import bitsandbytes as theirs

        found["bitsandbytes"] = theirs.__version__
    return found


def measure(x: torch.Tensor, codec: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Time every contender of a codec, in turns."""
    calls, packed_bytes = contenders(x, codec)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            slow = options.device == "cpu" and ("encode" in name or name == "expression")
            if slow and turn > options.slow_rounds:
                continue
            took = time_ms(call, options.device)
            if turn:  # the first turn warms up
                times[name].append(took)
    copy_rate = 2 * x.nbytes / statistics.median(times["copy out"])
    rows: list[dict[str, object]] = []
    for name, taken in times.items():
        median = statistics.median(taken)
        moved = 2 * x.nbytes if name == "copy out" else x.nbytes + packed_bytes
        rows.append(
            {
                "codec": codec,
                "contender": name,
                "shape": list(x.shape),
                "dtype": options.dtype,
                "block_size": BLOCK_SIZE,
                "median_ms": round(median, 4),
                "best_ms": round(min(taken), 4),
                "gb_per_s": round(moved / median / 1e6, 2),
                "copy_frac": round(moved / median / copy_rate, 3),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="rows x columns, such as 4096x4096")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--codecs", nargs="+", default=every_codec(), help="NAME, or NAME-dq")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=3, help="for the expression and for encoding")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument("--smoke", action="store_true", help="tiny, once: proves that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.shapes, options.rounds, options.slow_rounds = ["128x256"], 1, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    print(json.dumps({"machine": machine(options.device)}), file=options.out)
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, columns, generator=generator)
        x = x.to(options.device, getattr(torch, options.dtype))
        for codec in options.codecs:
            for row in measure(x, codec, options):
                print(json.dumps(row), file=options.out, flush=True)


if __name__ == "__main__":
    main()
