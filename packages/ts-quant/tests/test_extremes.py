"""Values as large and as small as each dtype has them: finite values stay finite in their own dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_every_codec import every_encoding

from ts_core import registry
from ts_core.testing import assert_bit_equal, devices
from ts_quant import QuantizedTensor, quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How far below the largest number of a dtype: by what share of it.
BELOW = (0.0, 2.0**-22, 2.0**-12, 2.0**-8, 0.02, 0.07, 0.13, 0.3, 0.6)


@st.composite
def extremes(draw, dtype):
    """Tensors of the largest numbers, of those a bit below, and of these among zeros and subnormals."""
    shape = draw(st.sampled_from([(5, 256), (130, 33), (3, 700), (1, 64), (67,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    info, below = torch.finfo(dtype), draw(st.sampled_from(BELOW))
    uniform, sign = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x = info.max * (1 - below * (uniform if draw(st.booleans()) else 1)) * torch.where(sign < 0.5, -1.0, 1.0)
    among = draw(st.sampled_from(["itself", "zeros", "subnormals"]))
    if among != "itself":
        rest = 0.0 if among == "zeros" else info.smallest_normal * uniform
        x = torch.where(torch.rand(shape, generator=generator) < 0.03, x, rest)
    return x.to(dtype)


def pack(packing, x):
    name, meta = packing
    return quantize(x, name, double_quant=bool(meta.get("double_quant", False)))


@every_encoding
@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_finite_values_decode_to_finite_ones(packing, device, data):
    """In the dtype that was packed; the bytes are the CPU's on every device."""
    dtype = data.draw(st.sampled_from(DTYPES))
    x = data.draw(extremes(dtype))
    qt, there = pack(packing, x), pack(packing, x.to(device))
    for name, part in qt.packed.items():
        assert_bit_equal(there.packed[name], part)
    got = there.dequantize()
    assert got.dtype == dtype
    assert bool(got.isfinite().all())
    assert_bit_equal(got, qt.dequantize())
    grown = got.cpu().double().abs() - x.double().abs()
    # Half of the widest step (e2m1: from 4 to 6, of 6), under a scale that is rounded up by a sixteenth.
    assert float(grown.max()) <= 0.18 * float(x.double().abs().max())


@every_encoding
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_alone(packing, dtype):
    """Of every codec at most the last step of its format is lost."""
    top = torch.finfo(dtype).max
    x = torch.zeros(4, 256, dtype=dtype)
    x[1, 7], x[2, 200] = top, -top
    got = pack(packing, x).dequantize().double()
    assert bool(((got[1, 7] / top - 1).abs() <= 1 / 8) & ((got[2, 200] / top + 1).abs() <= 1 / 8))
    assert int(got.count_nonzero()) == 2 or packing[1].get("double_quant", False)


@pytest.mark.parametrize("device", devices())
def test_mxfp8_keeps_fp16_below_what_it_cannot_hold(device):
    """The scale is 2^8, whose multiple 256 no fp16 is; 240 is the last code, as the OCP format clamps."""
    values = [57344.0, 57376.0, 61440.0, 63456.0, 63488.0, 65504.0, -63488.0, -65504.0]
    x = torch.tensor(values, dtype=torch.float16, device=device).reshape(-1, 1).repeat(1, 32)
    qt = quantize(x, "mxfp8")
    assert (qt.packed["scale"].int() - 127).tolist() == [7] + [8] * 7
    want = [57344.0, 57344.0, 61440.0, 61440.0, 61440.0, 61440.0, -61440.0, -61440.0]
    assert qt.dequantize()[:, 5].tolist() == want
    # fp32 and bf16 hold 65,536: nothing is clamped there.
    wide = quantize(x.float(), "mxfp8")
    assert wide.dequantize()[5, 5] == 65536.0


@pytest.mark.parametrize("device", devices())
def test_int8_s_largest_absmax(device):
    """127 times the scale of the largest float is infinite, so the one before it is stored."""
    largest = torch.finfo(torch.float32).max
    before = float(torch.tensor(largest).nextafter(torch.tensor(0.0)))
    qt = quantize(torch.full((1, 64), largest, device=device), "int8")
    assert qt.packed["absmax"].tolist() == [before]
    assert qt.packed["codes"].tolist() == [127] * 64
    assert bool(qt.dequantize().isfinite().all())
    again = quantize(torch.full((1, 64), before, device=device), "int8")
    assert_bit_equal(again.dequantize(), qt.dequantize())


@pytest.mark.parametrize("device", devices())
def test_a_nested_scale_beyond_fp16_gets_the_next_smaller_byte(device):
    """Where most scales are large the few small ones make the range, and a step may reach past all."""
    x = torch.zeros(256, 64)
    x[6:] = torch.linspace(65000, 65504, 250).reshape(-1, 1)
    x = x.half().to(device)
    packed = quantize(x, "nf4", double_quant=True).packed
    free = quantize(x.float(), "nf4", double_quant=True).packed
    moved = free["absmax"].int() - packed["absmax"].int()
    meta = registry.codec("nf4").meta(64, double_quant=True)
    plain = QuantizedTensor.from_packed(free, "nf4", x.shape, torch.float16, meta).dequantize()
    beyond = (~plain.isfinite()).any(dim=1)
    assert 0 < int(beyond.sum()) < 250
    assert moved.tolist() == beyond.int().tolist()
    assert bool(quantize(x, "nf4", double_quant=True).dequantize().isfinite().all())
