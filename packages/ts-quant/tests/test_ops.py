"""The contract of the operations: schema, fake kernels, refusals, in eager mode and traced."""

import importlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import devices, opcheck_all
from ts_quant import _C
from ts_quant._ops import check_block_size
from ts_quant.codecs.int8 import INT8
from ts_quant.codecs.nf4 import NF4

FORMATS = {"nf4": NF4, "int8": INT8}


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    """Each codec's samples are in a file of their own, op_samples_<codec>.py."""
    samples = {}
    for path in sorted(Path(__file__).parent.glob("op_samples_*.py")):
        samples |= importlib.import_module(path.stem).samples(device)
    assert opcheck_all("ts_quant", samples) == sum(map(len, samples.values()))


def bad_calls(layout):
    codes, absmax = layout.quantize(torch.ones(128), 64)
    f32 = torch.float32
    return {
        "odd block": (ArgumentError, lambda: layout.quantize(torch.ones(8), 3)),
        "block of 0": (ArgumentError, lambda: layout.quantize(torch.ones(8), 0)),
        "ints": (ArgumentTypeError, lambda: layout.quantize(torch.ones(8, dtype=torch.int32), 64)),
        "float64": (ArgumentTypeError, lambda: layout.quantize(torch.ones(8, dtype=torch.float64), 64)),
        "codes short": (ArgumentError, lambda: layout.dequantize(codes[:-1], absmax, (128,), f32, 64)),
        "absmax short": (ArgumentError, lambda: layout.dequantize(codes, absmax[:1], (128,), f32, 64)),
        "other block": (ArgumentError, lambda: layout.dequantize(codes, absmax, (128,), f32, 32)),
        "codes dtype": (
            ArgumentTypeError,
            lambda: layout.dequantize(codes.short(), absmax, (128,), f32, 64),
        ),
        "absmax dtype": (
            ArgumentTypeError,
            lambda: layout.dequantize(codes, absmax.double(), (128,), f32, 64),
        ),
        "codes strided": (
            ArgumentError,
            lambda: layout.dequantize(codes.repeat_interleave(2)[::2], absmax, (128,), f32, 64),
        ),
        "to int": (ArgumentTypeError, lambda: layout.dequantize(codes, absmax, (128,), torch.int8, 64)),
        "out strided": (
            ArgumentError,
            lambda: layout.dequantize_out(codes, absmax, torch.empty(256)[::2], 64),
        ),
        "out device": (
            ArgumentError,
            lambda: layout.dequantize_out(codes, absmax, torch.empty(128, device="meta"), 64),
        ),
        "out size": (ArgumentError, lambda: layout.dequantize_out(codes, absmax, torch.empty(200), 64)),
        "absmax device": (
            ArgumentError,
            lambda: layout.dequantize(codes, absmax.to("meta"), (128,), f32, 64),
        ),
    }


@pytest.mark.parametrize("layout", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("case", bad_calls(NF4))
def test_bad_arguments(layout, case):
    error, call = bad_calls(layout)[case]
    with pytest.raises(error, match=r"\[.*quantize_.*\] .*: expected .*, given "):
        call()


@pytest.mark.parametrize("layout", FORMATS.values(), ids=list(FORMATS))
def test_bad_arguments_fail_alike_when_traced(layout):
    with FakeTensorMode(), pytest.raises(ArgumentError, match="block_size"):
        layout.quantize(torch.ones(8), 5)


@given(block_size=st.integers(-4, 200))
def test_check_block_size(block_size):
    if block_size >= 2 and block_size % 2 == 0:
        check_block_size("f", block_size)
    else:
        with pytest.raises(ArgumentError, match="even integer"):
            check_block_size("f", block_size)


@pytest.mark.parametrize("name", FORMATS)
def test_native_module_checks_for_itself(name):
    """The binding is safe to call directly: sizes and dtypes are checked before memory is touched."""
    encode, decode = getattr(_C, f"quantize_{name}"), getattr(_C, f"dequantize_{name}")
    codes, absmax = FORMATS[name].quantize(torch.ones(128), 64)
    with pytest.raises(ValueError, match="block_size"):
        decode(codes, absmax, torch.empty(128), 7)
    with pytest.raises(ValueError, match="codes"):
        decode(codes, absmax, torch.empty(256), 64)
    with pytest.raises(ValueError, match="absmax"):
        encode(torch.ones(128), codes, absmax[:1], 64)
    with pytest.raises(TypeError, match="codes"):
        decode(absmax, absmax, torch.empty(128), 64)
    with pytest.raises(TypeError, match="out"):
        decode(codes, absmax, torch.empty(128, dtype=torch.float64), 64)
    with pytest.raises(ValueError, match="contiguous"):
        encode(torch.ones(256)[::2], codes, absmax, 64)
