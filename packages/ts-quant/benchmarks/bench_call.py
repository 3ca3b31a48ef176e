"""What a call costs before any work is done: tiny tensors, one thread, microseconds.

    python bench_call.py [--device cuda]

JSON lines; the best of several rounds, in CPU time of this process, so that other work on the machine does
not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ts_quant import _C, dequantize, quantize
from ts_quant.codecs.nf4 import NF4


def best_us(call: Callable, calls: int, rounds: int) -> float:
    """Time of one call in the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - begin) / calls)
    return best * 1e6


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--smoke", action="store_true", help="few calls: proves that the script runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(8, 8, device=options.device)
    qt = quantize(x)
    codes, absmax = qt.packed["codes"], qt.packed["absmax"]
    out, plain = torch.empty_like(x), qt.dequantize()
    contenders = {
        "torch: out.copy_(x)": lambda: out.copy_(x),
        "native: _C.dequantize_nf4": lambda: _C.dequantize_nf4(codes, absmax, out, 64),
        "op: ts_quant::dequantize_nf4_out": lambda: NF4.dequantize_out(codes, absmax, out, 64),
        "op: ts_quant::dequantize_nf4": lambda: NF4.dequantize(codes, absmax, (8, 8), torch.float32, 64),
        "dequantize(qt, out=out)": lambda: dequantize(qt, out=out),
        "quantize(x)": lambda: quantize(x),
        "F.linear(x, plain)": lambda: F.linear(x, plain),
        "F.linear(x, qt)": lambda: F.linear(x, qt),
    }
    for name, call in contenders.items():
        taken = best_us(call, 10 if options.smoke else 2000, 1 if options.smoke else 15)
        row = {"call": name, "us": round(taken, 2), "device": options.device, "torch": torch.__version__}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
