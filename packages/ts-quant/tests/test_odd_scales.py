"""Scales that no encoder makes but a file may hold: NaN, infinity, zero, subnormal; of every codec."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_every_codec import PACKINGS, SHAPE, every_packing, packed

from ts_core.testing import assert_bit_equal, devices
from ts_quant import QuantizedTensor

# Scales in bytes: which byte is NaN. Those in blocks of bytes: where the fp16 factor of the first one is.
NAN_BYTES = {"mxfp8": 255, "mxfp4": 255, "nvfp4": 0x7F, "nvfp4_export": 0x7F}
FACTOR_AT = {"gguf_q6_k": 208}
ADDS = ("gguf_q4_1", "gguf_q5_1", "gguf_q4_k", "gguf_q5_k")
E4M3 = ("mxfp8", "fp8_row", "fp8_block", "fp8_export")


def scale_parts(qt):
    """Names of the packed tensors that hold scales as floats."""
    return [name for name, part in qt.packed.items() if part.is_floating_point()]


def with_scale(qt, value):
    """Copies of a tensor in each of which the first scale of one kind is replaced."""
    made = []
    for name in scale_parts(qt):
        parts = {key: part.clone() for key, part in qt.packed.items()}
        parts[name].view(-1)[0] = value
        made.append(parts)
    if qt.codec.startswith("gguf_"):
        parts = {key: part.clone() for key, part in qt.packed.items()}
        first = FACTOR_AT.get(qt.codec, 0)
        half = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
        parts["blocks"][first : first + 2] = half
        made.append(parts)
    return [QuantizedTensor.from_packed(p, qt.codec, qt.shape, qt.dtype, qt.meta) for p in made]


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.int32)


@every_packing
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_block(packing, device, value):
    """It is decoded as it stands: its values become NaN or infinite, and no other one changes."""
    qt = packed(packing)
    plain = qt.dequantize(torch.float32)
    for odd in with_scale(qt, value):
        got = odd.to(device).dequantize(torch.float32).cpu()
        changed = bits(got) != bits(plain)
        assert not bool(got[changed].isfinite().any())
        assert not bool(changed.all()) or min(p.numel() for p in odd.packed.values()) == 1
        if value != value and "nested_map" not in odd.packed:
            assert bool(changed.any())


@every_packing
@pytest.mark.parametrize("device", devices())
def test_bytes_that_stand_for_nan(packing, device):
    """e8m0 has one such byte, e4m3 two: as scales, and as codes."""
    qt = packed(packing)
    plain = qt.dequantize(torch.float32)
    kind = str(qt.meta.get("codec", qt.codec))
    places = [
        (name, NAN_BYTES[kind]) for name in ("scale", "scales") if kind in NAN_BYTES and name in qt.packed
    ]
    places += [("codes", byte) for byte in (0x7F, 0xFF) if kind in E4M3]
    for name, byte in places:
        parts = {key: part.clone() for key, part in qt.packed.items()}
        parts[name].view(-1)[0] = byte
        odd = QuantizedTensor.from_packed(parts, qt.codec, qt.shape, qt.dtype, qt.meta)
        got = odd.to(device).dequantize(torch.float32).cpu()
        changed = bits(got) != bits(plain)
        assert bool(got[changed].isnan().all())
        assert 1 <= int(changed.sum()) <= (1 if name == "codes" else 32)


@every_packing
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [0.0, 1e-7])
def test_zero_and_subnormal_scales(packing, device, value):
    """Zero gives zeros, plus what a format adds; what fp16 holds as a subnormal is not lost."""
    qt = packed(packing)
    plain = qt.dequantize(torch.float32)
    for odd in with_scale(qt, value):
        got = odd.to(device).dequantize(torch.float32).cpu()
        assert bool(got.isfinite().all())
        assert_bit_equal(got, odd.dequantize(torch.float32))
        adds = "nested_map" in odd.packed or odd.codec in ADDS
        differs = bits(got) != bits(plain)
        assert adds or bool(got[differs].any()) == bool(value)


@pytest.mark.parametrize("codec", ["nf4", "int8", "bnb_fp4", "fp8_row", "bnb_int8"])
@given(exponent=st.integers(-149, -120), seed=st.integers(0, 9))
def test_subnormal_fp32_scales_are_exact(codec, exponent, seed):
    """Nothing flushes to zero: the product of a level and a scale is rounded once, as in float64."""
    packing = next(p for p in PACKINGS if p[0] == codec and not p[1].get("double_quant"))
    qt = packed(packing, seed=seed)
    (name,) = scale_parts(qt)
    ones = {**qt.packed, name: torch.ones_like(qt.packed[name])}
    scaled = {**qt.packed, name: torch.full_like(qt.packed[name], 2.0**exponent)}
    level, got = (
        QuantizedTensor.from_packed(parts, qt.codec, SHAPE, torch.float32, qt.meta).dequantize()
        for parts in (ones, scaled)
    )
    if codec in ("int8", "bnb_int8"):  # two roundings there
        assert float((got.double() - level.double() * 2.0**exponent).abs().max()) <= 127 * 2.0**-149
    else:
        assert_bit_equal(got, (level.double() * 2.0**exponent).float())
