"""Decoding (and encoding) beside bitsandbytes, the PyTorch expression and a copy of the decoded bytes.

    python bench_decode.py [--device cuda] [--shapes 13824x5120 1024x1024] [--dtype bfloat16] [--out FILE]

JSON lines: one with the machine and the versions, then one per shape, codec and contender with the median,
the best time and the spread in milliseconds. Contenders take turns, so a busy machine slows all of them.
On a GPU these are calls in a CUDA graph over buffers that the L2 cache does not hold; `call_us` is one call
by itself, the host's share included (timing.py). `gb_per_s` counts bytes read and written, `copy_frac`
relates it to the copy's. "out" contenders write into a buffer that exists; the others allocate their result,
which on a CPU costs page faults.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Contender, measure, own_stream, sets

from ts_core import registry
from ts_quant import _C, QuantizedTensor, dequantize, quantize, reference

BLOCK_SIZE = 64
EXPRESSIONS = ("int8", "nf4", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
SHAPES = ("13824x5120", "1024x1024")
SLOW_TURNS = 5
"""Rounds of what takes many times a decode, on a GPU."""


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


def bitsandbytes(
    x: torch.Tensor, codec: str, outs: list[torch.Tensor], moved: int, slow: int
) -> dict[str, Contender]:
    """Their decode and encode of the same format, if they have it and are installed."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            import bitsandbytes.functional as theirs
    except ImportError:
        return {}
    if codec == "bnb_int8":
        codes, rows, _ = theirs.int8_vectorwise_quant(x.half())
        turns = [(codes.clone(), rows.clone()) for _ in outs]
        return {
            "bitsandbytes": Contender(
                [functools.partial(theirs.int8_vectorwise_dequant, *turn) for turn in turns], moved
            )
        }
    kind, nested = codec.removesuffix("-dq").removeprefix("bnb_"), codec.endswith("-dq")
    if kind not in ("nf4", "fp4"):
        return {}
    how = {"blocksize": BLOCK_SIZE, "quant_type": kind, "compress_statistics": nested}
    codes, state = theirs.quantize_4bit(x, **how)
    calls = [functools.partial(theirs.dequantize_4bit, codes.clone(), state) for _ in outs]
    found = {"bitsandbytes": Contender(calls, moved)}
    if x.is_cuda:  # their CPU operation has no such variant
        into = [functools.partial(call, out=out) for call, out in zip(calls, outs, strict=True)]
        found["bitsandbytes out"] = Contender(into, moved)
    encode = functools.partial(theirs.quantize_4bit, x, **how)
    found["bitsandbytes encode"] = Contender([encode], moved, records=False, turns=slow)
    return found


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


def contenders(x: torch.Tensor, codec: str, slow_rounds: int) -> dict[str, Contender]:
    """Who is timed, over as many sets of buffers as it takes to leave the caches."""
    name, double = codec.removesuffix("-dq"), codec.endswith("-dq")
    encodes = registry.codec(name).encodes
    how = {"block_size": BLOCK_SIZE, "double_quant": double}
    qt = quantize(x, name, **how) if encodes else published(x, name)
    moved, count = x.nbytes + qt.packed_bytes, sets(x.nbytes + qt.packed_bytes, x.device)
    weights = [
        qt.with_packed({key: part.clone() for key, part in qt.packed.items()}) for _ in range(count - 1)
    ]
    weights.append(qt)
    outs, plain = [torch.empty_like(x) for _ in weights], [x, *(x.clone() for _ in weights[1:])]
    few = x[:8].contiguous()
    each = functools.partial
    found = {
        "copy out": Contender([each(o.copy_, p) for o, p in zip(outs, plain, strict=True)], 2 * x.nbytes),
        "ts_quant out": Contender(
            [each(dequantize, w, out=o) for w, o in zip(weights, outs, strict=True)], moved
        ),
        "ts_quant": Contender([each(dequantize, w) for w in weights], moved),
        # Another tensor each time: what is made of an input is kept for the next layer that takes it.
        "linear, 8 rows": Contender([each(F.linear, few.clone(), w) for w in weights]),
        "linear, 8 rows, plain weight": Contender([each(F.linear, few, p) for p in plain]),
    }
    slow = slow_rounds if x.device.type == "cpu" else SLOW_TURNS
    if encodes:
        found["ts_quant encode"] = Contender(
            [each(quantize, x, name, **how)], moved, records=False, turns=slow
        )
    if codec in EXPRESSIONS:
        calls = [expression(codec, w.packed, x.shape, x.dtype) for w in weights[:2]]
        found["expression"] = Contender(calls, moved, turns=slow)
    return found | bitsandbytes(x, codec, outs, moved, slow)


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


def lines(x: torch.Tensor, codec: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Time every contender of a codec."""
    found = contenders(x, codec, options.slow_rounds)
    times = measure(found, options.device, options.rounds)
    copy = found["copy out"].moved / times["copy out"].median()
    rows: list[dict[str, object]] = []
    for name, taken in times.items():
        rate = found[name].moved / taken.median()
        rates = {"gb_per_s": round(rate / 1e9, 2), "copy_frac": round(rate / copy, 3)} if rate else {}
        rows.append(
            {
                "codec": codec,
                "contender": name,
                "shape": list(x.shape),
                "dtype": options.dtype,
                "block_size": BLOCK_SIZE,
                **taken.columns(),
                **rates,
            }
        )
    return rows


@torch.no_grad()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="rows x columns, such as 4096x4096")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--codecs", nargs="+", default=every_codec(), help="NAME, or NAME-dq")
    parser.add_argument("--rounds", type=int, help="default: 15 on a CPU, 7 of several calls on a GPU")
    parser.add_argument("--slow-rounds", type=int, default=3, help="for the expression and for encoding")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument("--smoke", action="store_true", help="tiny, once: proves that the script runs")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 15 if options.device == "cpu" else 7
    if options.smoke:
        options.shapes, options.rounds, options.slow_rounds = ["128x256"], 1, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    own_stream(options.device)
    print(json.dumps({"machine": machine(options.device)}), file=options.out)
    for shape in options.shapes:
        rows, columns = map(int, shape.split("x"))
        generator = torch.Generator(options.device).manual_seed(0)
        x = torch.randn(rows, columns, generator=generator, device=options.device)
        x = x.to(getattr(torch, options.dtype))
        for codec in options.codecs:
            for row in lines(x, codec, options):
                print(json.dumps(row), file=options.out, flush=True)


if __name__ == "__main__":
    main()
