"""Codes, scales and decoded values, bit for bit: against the PyTorch reference and against bitsandbytes."""

import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.testing import assert_bit_equal, assert_near, devices, float_tensors, make_tensor, shapes
from ts_quant import _C, reference
from ts_quant.codecs.int8 import INT8
from ts_quant.codecs.nf4 import NF4
from ts_quant.reference import NF4_LEVELS, NF4_THRESHOLDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {
    "nf4": (NF4, reference.quantize_nf4, reference.dequantize_nf4),
    "int8": (INT8, reference.quantize_int8, reference.dequantize_int8),
}
BLOCK_SIZES = st.sampled_from([2, 4, 6, 8, 16, 24, 30, 32, 48, 64, 96, 128, 256, 512, 1000, 4096])
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors(device):
    drawn = shapes(min_side=0, max_side=300, max_numel=9000)
    return st.sampled_from(DTYPES).flatmap(lambda dtype: float_tensors(dtype, drawn, device))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(data=st.data())
def test_kernels_equal_reference(name, device, isa, data):
    layout, encode, decode = FORMATS[name]
    x = data.draw(tensors(device))
    block_size = data.draw(BLOCK_SIZES)
    codes, absmax = layout.quantize(x, block_size)
    want_codes, want_absmax = encode(x.cpu(), block_size)
    assert_bit_equal(codes, want_codes)
    assert_bit_equal(absmax, want_absmax)
    for dtype in DTYPES:
        got = layout.dequantize(codes, absmax, x.shape, dtype, block_size)
        want = decode(want_codes, want_absmax, x.shape, dtype, block_size)
        assert_bit_equal(got, want)
        out = torch.full(x.shape, float("nan"), dtype=dtype, device=device)
        layout.dequantize_out(codes, absmax, out, block_size)
        assert_bit_equal(out, want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 24, 1000, 8200, 50_000])
def test_blocks_begin_anywhere_in_a_tile_of_the_kernels(name, device, dtype, block_size):
    layout, encode, decode = FORMATS[name]
    x = make_tensor((40_011,), dtype=dtype, seed=block_size)
    codes, absmax = encode(x, block_size)
    got = layout.dequantize(codes.to(device), absmax.to(device), x.shape, dtype, block_size)
    assert_bit_equal(got, decode(codes, absmax, x.shape, dtype, block_size))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5])
def test_unaligned_memory(name, device, isa, dtype, offset):
    layout, encode, decode = FORMATS[name]
    x = make_tensor((1003,), dtype=dtype, seed=offset)
    codes, absmax = encode(x, 64)
    room = torch.zeros(codes.numel() + offset, dtype=codes.dtype, device=device)
    shifted = room[offset:]
    shifted.copy_(codes)
    out = torch.zeros(x.numel() + offset, dtype=dtype, device=device)
    layout.dequantize_out(shifted, absmax.to(device), out[offset:], 64)
    assert_bit_equal(out[offset:], decode(codes, absmax, x.shape, dtype, 64))
    assert not bool(out[:offset].any())
    wide = torch.zeros(x.numel() + offset, dtype=dtype, device=device)
    wide[offset:].copy_(x)
    assert_bit_equal(layout.quantize(wide[offset:], 64)[0], codes)


@pytest.mark.parametrize("name", FORMATS)
def test_thread_count_changes_nothing(name):
    _, encode, decode = FORMATS[name]
    x = make_tensor((300_001,), dtype=torch.bfloat16, flavour="mixed_scale")
    want, want_absmax = encode(x, 64)
    native = getattr(_C, f"quantize_{name}"), getattr(_C, f"dequantize_{name}")
    for threads in (1, 2, 3, 7):
        codes, absmax = torch.zeros_like(want), torch.zeros_like(want_absmax)
        native[0](x, codes, absmax, 64, threads)
        assert_bit_equal(codes, want)
        out = torch.zeros_like(x)
        native[1](codes, absmax, out, 64, threads)
        assert_bit_equal(out, decode(want, want_absmax, x.shape, x.dtype, 64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 37, 63, 64, 99])
def test_absmax_shows_what_is_not_finite(name, device, isa, value, position):
    x = make_tensor((100,))
    x[position] = value
    absmax = FORMATS[name][0].quantize(x.to(device), 64)[1]
    assert absmax.isfinite().tolist() == [position >= 64, position < 64]


# ---- nf4 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
def test_nf4_levels_and_ties(device, isa):
    """A level encodes to itself, a value on a threshold to the lower level, the next float to the upper."""
    levels = torch.tensor(NF4_LEVELS)
    above = torch.nextafter(NF4_THRESHOLDS, torch.tensor(2.0))
    # With an absmax of exactly 1 the values are not scaled.
    for values, want in (
        (levels, range(16)),
        (torch.cat((NF4_THRESHOLDS, torch.ones(1))), [*range(15), 15]),
        (torch.cat((above, torch.ones(1))), [*range(1, 16), 15]),
    ):
        codes, absmax = NF4.quantize(values.to(device), 16)
        nibbles = torch.stack((codes >> 4, codes & 15), dim=1).flatten().tolist()
        assert absmax.tolist() == [1.0]
        assert nibbles == list(want)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_nf4_takes_the_nearest_level(device, data):
    """An independent statement of the format in float64: no other level is nearer, within rounding."""
    flavours = ("normal", "sparse", "integers", "outlier", "mixed_scale", "large")
    x = data.draw(float_tensors(torch.float32, shapes(max_numel=600), device, flavours=flavours))
    codes, absmax = NF4.quantize(x, 32)
    got = NF4.dequantize(codes, absmax, x.shape, torch.float32, 32).double().cpu().flatten()
    flat = x.double().cpu().flatten()
    scale = absmax.double().cpu().repeat_interleave(32)[: flat.numel()]
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64) * scale.unsqueeze(1)
    nearest = (levels - flat.unsqueeze(1)).abs().amin(dim=1)
    assert bool(((got - flat).abs() <= nearest + 1e-6 * scale).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("count", [1, 3, 65])
def test_nf4_low_nibble_after_an_odd_end(device, isa, count):
    codes, _ = NF4.quantize(torch.ones(count, device=device), 64)
    assert int(codes[-1]) == 0xF7


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("count", [64, 100, 128])
def test_nf4_zero_blocks(device, isa, count):
    codes, absmax = NF4.quantize(torch.zeros(count, device=device), 64)
    assert codes.unique().tolist() == [0x77]
    assert absmax[0] == 0
    assert not bool(NF4.dequantize(codes, absmax, (count,), torch.float32, 64).any())


BNB_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def bnb():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        return pytest.importorskip("bitsandbytes.functional")


@fixture_is_constant
@given(data=st.data())
def test_nf4_is_bit_identical_to_bitsandbytes(bnb, isa, data):
    block_size = data.draw(st.sampled_from(BNB_SIZES))
    x = data.draw(
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: float_tensors(dtype, shapes(max_side=6000, max_numel=12000))
        )
    )
    want, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type="nf4", compress_statistics=False)
    codes, absmax = NF4.quantize(x, block_size)
    assert_bit_equal(codes, want.flatten())
    assert_bit_equal(absmax, state.absmax)
    # Decoded flat: its CPU decode is wrong for rows that are no multiple of the block. Other sizes than these
    # it hands to a function that it compiles, which takes a minute.
    if x.numel() % 2 == 0 and block_size < 2048 and x.numel():
        state.shape = torch.Size([x.numel()])
        theirs = bnb.dequantize_4bit(want, state)
        got = NF4.dequantize(codes, absmax, (x.numel(),), x.dtype, block_size)
        if x.dtype == torch.bfloat16:  # processors that convert to it by an instruction lose denormals
            normal = got.abs() >= torch.finfo(torch.float32).smallest_normal
            got, theirs = got * normal, theirs.reshape(-1) * normal
        assert torch.equal(got, theirs.reshape(-1))


def test_nf4_large_draw_is_bit_identical_to_bitsandbytes(bnb):
    x = make_tensor((1000, 1031), dtype=torch.bfloat16, flavour="mixed_scale", seed=3)
    want, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)
    codes, absmax = NF4.quantize(x, 64)
    assert_bit_equal(codes, want.flatten())
    assert_bit_equal(absmax, state.absmax)


# ---- int8 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_int8_error_is_half_a_step(device, data):
    """An independent statement of the format in float64."""
    flavours = ("normal", "sparse", "integers", "outlier", "mixed_scale", "constant", "zeros")
    x = data.draw(float_tensors(torch.float32, shapes(max_numel=600), device, flavours=flavours))
    codes, absmax = INT8.quantize(x, 32)
    got = INT8.dequantize(codes, absmax, x.shape, torch.float32, 32).flatten()
    scale = absmax.double().cpu().repeat_interleave(32)[: x.numel()] / 127
    error = (got.double().cpu() - x.double().cpu().flatten()).abs()
    assert bool((error <= scale * (0.5 + 1e-5) + 2.0**-149).all())
    assert_near(got.abs().max(), x.double().abs().max(), length=3)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bits", [1, 2, 63, 64, 100, 126, 127, 190, 191, 5000])
def test_int8_never_amplifies_denormals(device, isa, bits):
    """`bits` counts units of the smallest denormal."""
    tiny = 2.0**-149
    x = torch.tensor([bits * tiny, -bits * tiny, 0.0, tiny], dtype=torch.float64).float().to(device)
    codes, absmax = INT8.quantize(x, 4)
    got = INT8.dequantize(codes, absmax, (4,), torch.float32, 4)
    assert_bit_equal(codes, reference.quantize_int8(x.cpu(), 4)[0])
    assert bool((got.abs() <= x.abs().max() * 1.1).all())
    assert bool(((got - x).abs() <= x.abs().max()).all())
    assert not bool(got.isnan().any())


@pytest.mark.parametrize("device", devices())
def test_int8_rounds_ties_to_even(device, isa):
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], device=device)
    assert INT8.quantize(x, 8)[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


# ---- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_more_than_two_to_the_31_elements(name):
    layout, encode, decode = FORMATS[name]
    n = 2**31 + 64 + 3
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    tail = make_tensor((4096 + 67,), dtype=torch.bfloat16, seed=1)
    x[n - tail.numel() :] = tail.cuda()
    codes, absmax = layout.quantize(x, 64)
    del x
    out = layout.dequantize(codes, absmax, (n,), torch.bfloat16, 64)
    want = decode(*encode(tail, 64), tail.shape, torch.bfloat16, 64)
    assert_bit_equal(out[n - tail.numel() :], want)
    assert not bool(out[: 2**20].any())
    assert math.isfinite(float(absmax.max()))
