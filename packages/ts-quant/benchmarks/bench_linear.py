"""A linear layer over packed weights, forward and backward, beside bf16 and nf4 that is decoded.

    python bench_linear.py [--tokens 512 2048 8192] [--shape 13824x5120] [--repeat 7] [--out FILE] [--smoke]

JSON lines: one with the machine and the versions, then one per number of tokens and contender with the
median, the best time and the spread in milliseconds, TFLOP/s (two products), `vs_bf16` and `vs_nf4` (how many
times faster), and the relative error of the output and of the input gradient against the decoded weight in
fp32. On a GPU these are forward and backward recorded in a CUDA graph, over weights that the L2 cache does
not hold; `call_us` is the same in eager code, from an idle device on, and `call_vs_bf16` compares that
(timing.py). Contenders take turns, so that a busy machine slows all of them. `fp8_row`, `fp8_block`, `mxfp8`
and `nvfp4` multiply packed where this GPU does (`packed` says whether); with `+backward` the input gradient
is packed too, W^T made anew in each call, as for a resident weight; with `+slot` W^T is there, as in the slot
of a paged block. `matmul` lines time the product alone, on operands that are packed already, with fast
accumulation and without.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import Contender, measure, own_stream, sets
from torch import nn

from ts_quant import _C, Matmul, QuantizedTensor, quantize
from ts_quant.matmul import multiplies
from ts_quant.products import PRODUCTS

TOKENS = (512, 2048, 8192)
SHAPE = "13824x5120"
DTYPE = torch.bfloat16


def machine(device: torch.device) -> dict:
    """Say what this ran on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "isa": _C.isa(),
    }


def weights(plain: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight of each contender."""
    found: dict[str, torch.Tensor] = {"bf16": plain, "nf4": quantize(plain, "nf4")}
    for codec, product in PRODUCTS.items():
        packed = quantize(plain, codec)
        found[codec] = packed
        if not multiplies(codec, plain.device) or not product.accepts(plain.shape, backward=True):
            continue
        found[f"{codec}+backward"] = backward = packed.with_packed(packed.packed)
        backward.matmul_options = Matmul(backward=True)
        both = {**packed.packed, **product.transpose(packed.packed, tuple(plain.shape))}
        found[f"{codec}+slot"] = slot = packed.with_packed(both)
        slot.matmul_options = Matmul(backward=True)
    return found


def step(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Callable[[], tuple]:
    """Forward and backward of one layer."""

    def run() -> tuple:
        # Another tensor each time: what it is quantized to is not found again.
        own = x.detach().requires_grad_()
        y = nn.functional.linear(own, weight)
        return y, torch.autograd.grad(y, own, grad)[0]

    return run


def alone(codec: str, weight: QuantizedTensor, x: torch.Tensor, fast: bool) -> Callable[[], object]:
    """The product alone."""
    product = PRODUCTS[codec]
    a, b = product.activation(x.detach()), product.weight(weight.packed, tuple(weight.shape))

    def run() -> object:
        return torch._scaled_mm(
            a.codes, b.codes.t(), a.scale, b.scale.t(), out_dtype=DTYPE, use_fast_accum=fast
        )

    return run


def again(weight: torch.Tensor) -> torch.Tensor:
    """The same weight in memory of its own."""
    if not isinstance(weight, QuantizedTensor):
        return weight.clone()
    made = weight.with_packed({key: part.clone() for key, part in weight.packed.items()})
    made.matmul_options = weight.matmul_options
    return made


def rotated(weight: torch.Tensor) -> list[torch.Tensor]:
    """The weight and as many copies as it takes to leave the caches."""
    size = weight.packed_bytes if isinstance(weight, QuantizedTensor) else weight.nbytes
    return [weight, *(again(weight) for _ in range(sets(size, weight.device) - 1))]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error in the Frobenius norm."""
    return float((got.float() - want).norm() / want.norm())


def errors(weight: torch.Tensor, call: Callable, x: torch.Tensor, grad: torch.Tensor) -> dict[str, float]:
    """What is lost against the decoded weight in fp32."""
    y, grad_x = call()
    wide = (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).float()
    return {
        "output_error": round(relative(y.detach(), x.detach().float() @ wide.t()), 5),
        "gradient_error": round(relative(grad_x, grad.float() @ wide), 5),
    }


def lines_of(tokens: int, shape: tuple[int, int], repeat: int, device: torch.device) -> list[dict]:
    """Lines for one number of tokens."""
    generator = torch.Generator(device).manual_seed(0)
    outputs, inputs = shape
    plain = (torch.randn(shape, generator=generator, device=device) * 0.02).to(DTYPE)
    x = torch.randn(tokens, inputs, generator=generator, device=device).to(DTYPE).requires_grad_()
    grad = torch.randn(tokens, outputs, generator=generator, device=device).to(DTYPE)
    held = weights(plain)
    runs = {
        name: Contender([step(x, each, grad) for each in rotated(weight)]) for name, weight in held.items()
    }
    products = {
        f"{codec} matmul{' fast' if fast else ''}": Contender(
            [alone(codec, each, x, fast) for each in rotated(held[codec])]
        )
        for codec in ("fp8_row", "fp8_block")
        if codec in held and multiplies(codec, device) and PRODUCTS[codec].accepts(shape)
        for fast in ((False, True) if codec == "fp8_row" else (False,))
    }
    wide = [functools.partial(nn.functional.linear, x.detach(), each) for each in rotated(plain)]
    products["bf16 matmul"] = Contender(wide)
    times = measure({**runs, **products}, device, repeat, at_least=6)
    medians = {name: 1e3 * taken.median() for name, taken in times.items()}
    calls = {name: statistics.median(taken.alone or taken.seconds) for name, taken in times.items()}
    flops = 2 * tokens * outputs * inputs
    lines = []
    for name, taken in times.items():
        line = {
            "tokens": tokens,
            "shape": f"{outputs}x{inputs}",
            "contender": name,
            **taken.columns(),
        }
        if name in products:
            line["tflops"] = round(flops / medians[name] / 1e9, 1)
            line["vs_bf16"] = round(medians["bf16 matmul"] / medians[name], 3)
        else:
            line["tflops"] = round(2 * flops / medians[name] / 1e9, 1)
            line["vs_bf16"] = round(medians["bf16"] / medians[name], 3)
            line["vs_nf4"] = round(medians["nf4"] / medians[name], 3)
            line["packed"] = multiplies(name.split("+")[0], device)
            line["call_vs_bf16"] = round(calls["bf16"] / calls[name], 3)
            line |= errors(held[name], runs[name].calls[0], x, grad)
        lines.append(line)
    return lines


def main() -> None:
    """Parse the command line and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shape", default=SHAPE, help="outputs x inputs")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small and short, to see that it runs")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.tokens, chosen.shape, chosen.repeat = [8], "512x512", 2
    device = torch.device(chosen.device)
    outputs, inputs = (int(side) for side in chosen.shape.split("x"))
    own_stream(device)
    lines = [machine(device)]
    print(json.dumps(lines[0]), flush=True)
    for tokens in chosen.tokens:
        for line in lines_of(tokens, (outputs, inputs), chosen.repeat, device):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if chosen.out is not None:
        chosen.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
