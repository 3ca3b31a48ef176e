"""Quantized scales: bit for bit against bitsandbytes and the PyTorch reference, and what they promise."""

import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core import registry
from ts_core.errors import ArgumentError, OptionError
from ts_core.testing import assert_bit_equal, devices, float_tensors, make_tensor, shapes
from ts_quant import QuantizedTensor, quantize, reference
from ts_quant.codecs import INT8_CODEC, NF4_CODEC, Meta
from ts_quant.codecs.int8 import ENCODE_INT8_DQ, INT8_DQ
from ts_quant.codecs.nested import nest_in_logs, nest_in_map, ratios
from ts_quant.codecs.nf4 import NF4_DQ
from ts_quant.references import bnb as published

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS = ("nf4", "int8")
BLOCK_SIZES = st.sampled_from([2, 4, 6, 8, 16, 24, 30, 32, 48, 64, 96, 128, 256, 1000])
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def bnb():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        return pytest.importorskip("bitsandbytes.functional")


def tensors(device, max_numel=9000):
    drawn = shapes(min_side=0, max_side=300, max_numel=max_numel)
    return st.sampled_from(DTYPES).flatmap(lambda dtype: float_tensors(dtype, drawn, device))


def without_denormals(x):
    """Its conversion to bfloat16 is a processor instruction that makes zeros of them."""
    tiny = x.abs() < torch.finfo(torch.float32).smallest_normal
    return x.masked_fill(tiny, 0.0) if x.dtype == torch.bfloat16 else x


def decoded_by_reference(codec, packed, shape, block_size):
    cpu = {name: tensor.cpu() for name, tensor in packed.items()}
    if codec == "nf4":
        table = cpu["nested_map"]
        absmax = published.map_scales(cpu["absmax"], cpu["nested_absmax"], table[:256], table[256])
        return published.decode_four_bit(reference.NF4_LEVELS, cpu["codes"], absmax, shape, block_size)
    absmax = published.log_scales(cpu["absmax"], cpu["nested_absmax"])
    return published.decode_int8_blocks(cpu["codes"], absmax, shape, block_size)


def expected(codec, x, block_size):
    """What the reference packs, with the map and the offset where the codec has them."""
    x = x.cpu()
    if codec == "nf4":
        codes, absmax = reference.quantize_nf4(x, block_size)
        scales, groups, offset = published.nest_in_map(absmax, x.dtype)
        table = torch.tensor([*published.dynamic_map(), float(offset)])
        return {"codes": codes, "absmax": scales, "nested_absmax": groups, "nested_map": table}
    absmax = reference.quantize_int8(x, block_size)[1]
    scales, groups = published.nest_in_logs(absmax)
    codes = published.encode_int8_for(x, scales, published.log_scales(scales, groups), block_size)
    return {"codes": codes, "absmax": scales, "nested_absmax": groups}


def same_parts(packed, wanted):
    assert list(packed) == list(wanted)
    for name, tensor in wanted.items():
        assert_bit_equal(packed[name], tensor)


# ---- nf4 is bitsandbytes' nested layout ----------------------------------------------------------------


@fixture_is_constant
@given(data=st.data())
def test_nf4_is_bit_identical_to_bitsandbytes(bnb, isa, data):
    block_size = data.draw(st.sampled_from([32, 64, 128, 256, 512, 1024]))
    drawn = shapes(max_side=6000, max_numel=12000)
    x = data.draw(st.sampled_from(DTYPES).flatmap(lambda dtype: float_tensors(dtype, drawn)))
    want, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type="nf4", compress_statistics=True)
    qt = quantize(x, "nf4", block_size=block_size, double_quant=True)
    if not (state.offset + state.state2.absmax.max()).to(x.dtype).isfinite():  # it decodes that to NaN or inf
        assert bool(qt.dequantize().isfinite().all())
        return
    assert_bit_equal(qt.packed["codes"], want.flatten())
    assert_bit_equal(qt.packed["absmax"], state.absmax)
    assert_bit_equal(qt.packed["nested_absmax"], state.state2.absmax)
    assert_bit_equal(qt.packed["nested_map"], torch.cat((state.state2.code, state.offset.reshape(1))))
    if x.numel() % 2 == 0:  # decoded flat, see test_formats
        state.shape = torch.Size([x.numel()])
        got, theirs = qt.dequantize().flatten(), bnb.dequantize_4bit(want, state).flatten()
        assert torch.equal(without_denormals(got), without_denormals(theirs))


def test_nf4_large_draw_is_bit_identical_to_bitsandbytes(bnb):
    x = make_tensor((1000, 1031), dtype=torch.bfloat16, flavour="mixed_scale", seed=3)
    want, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed = quantize(x, "nf4", double_quant=True).packed
    assert_bit_equal(packed["codes"], want.flatten())
    assert_bit_equal(packed["absmax"], state.absmax)
    assert_bit_equal(packed["nested_absmax"], state.state2.absmax)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_on_a_gpu_against_bitsandbytes_there(bnb, dtype):
    """Its CUDA kernels keep all bits of a scale's quotient and add up in another order."""
    x = make_tensor((512, 640), dtype=dtype, seed=4, device="cuda")
    want, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed = quantize(x, "nf4", double_quant=True).packed
    assert_bit_equal(packed["codes"], want.flatten().cpu())
    assert torch.allclose(packed["nested_absmax"], state.state2.absmax, rtol=1e-5)
    assert torch.allclose(packed["nested_map"][256], state.offset, rtol=1e-6)
    apart = (packed["absmax"].int() - state.absmax.int()).abs()
    assert int(apart.max()) <= 8  # around zero the codes lie close together
    assert float((apart > 0).float().mean()) < 0.02


# ---- against the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(data=st.data())
def test_packing_and_decoding_equal_the_reference(codec, device, isa, data):
    x = data.draw(tensors(device))
    block_size = data.draw(BLOCK_SIZES)
    qt = quantize(x, codec, block_size=block_size, double_quant=True)
    same_parts(qt.packed, expected(codec, x, block_size))
    want = decoded_by_reference(codec, qt.packed, x.shape, block_size)
    for dtype in DTYPES:
        assert_bit_equal(qt.dequantize(dtype), want.to(dtype))
        out = torch.full(x.shape, float("nan"), dtype=dtype, device=device)
        assert qt.dequantize(out=out) is out
        assert_bit_equal(out, want.to(dtype))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", devices())
def test_every_code_of_a_scale(codec, device, isa):
    """All 256 bytes of a scale in several groups, whether encoding makes them or not."""
    scales = torch.arange(3 * 256 + 5).to(torch.uint8)
    groups = torch.tensor([1.0, 3e-39, 2.5e38, 0.75])
    generator = torch.Generator().manual_seed(0)
    n = scales.numel() * 4
    if codec == "nf4":
        codes = torch.randint(0, 256, (n // 2,), generator=generator).to(torch.uint8)
        table = torch.cat((torch.tensor(published.dynamic_map()), torch.tensor([0.5])))
        packed = {"codes": codes, "absmax": scales, "nested_absmax": groups, "nested_map": table}
    else:
        codes = torch.randint(-127, 128, (n,), generator=generator).to(torch.int8)
        packed = {"codes": codes, "absmax": scales, "nested_absmax": groups}
    there = {name: tensor.to(device) for name, tensor in packed.items()}
    meta = registry.codec(codec).meta(4, double_quant=True)
    qt = QuantizedTensor.from_packed(there, codec, (n,), torch.float32, meta)
    assert_bit_equal(qt.dequantize(), decoded_by_reference(codec, packed, (n,), 4))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_unaligned_memory(codec, device, isa, offset):
    x = make_tensor((1003,), dtype=torch.bfloat16, seed=offset)
    packed = quantize(x, codec, double_quant=True).packed
    moved = {}
    for name, tensor in packed.items():
        room = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        moved[name] = room[offset:].copy_(tensor)
    out = torch.zeros(x.numel() + offset, dtype=x.dtype, device=device)
    ops = NF4_DQ if codec == "nf4" else INT8_DQ
    ops.out(*moved.values(), out[offset:], 64)
    assert_bit_equal(out[offset:], decoded_by_reference(codec, packed, x.shape, 64).to(x.dtype))
    assert not bool(out[:offset].any())
    wide = torch.zeros(x.numel() + offset, dtype=x.dtype, device=device)
    wide[offset:].copy_(x)
    assert_bit_equal(quantize(wide[offset:], codec, double_quant=True).packed["codes"], packed["codes"])


@pytest.mark.parametrize("codec", CODECS)
def test_thread_count_changes_nothing(codec):
    x = make_tensor((300_001,), dtype=torch.bfloat16, flavour="mixed_scale")
    qt = quantize(x, codec, double_quant=True)
    whole, before = qt.dequantize(), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_bit_equal(qt.dequantize(), whole)
            if codec == "int8":  # nf4's offset is a mean, which PyTorch adds up by threads
                same_parts(quantize(x, codec, double_quant=True).packed, qt.packed)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_nesting_alone_equals_the_reference(device, data):
    drawn = shapes(min_dims=1, max_dims=1, min_side=0, max_side=700)
    absmax = data.draw(float_tensors(torch.float32, drawn, device)).abs()
    nested, logs = nest_in_map(absmax), nest_in_logs(absmax)
    codes, groups, offset = published.nest_in_map(absmax.cpu())
    assert_bit_equal(nested["absmax"], codes)
    assert_bit_equal(nested["nested_absmax"], groups)
    assert_bit_equal(nested["nested_map"][256:], offset.reshape(1))
    codes, groups = published.nest_in_logs(absmax.cpu())
    assert_bit_equal(logs["absmax"], codes)
    assert_bit_equal(logs["nested_absmax"], groups)


# ---- what int8 promises --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_int8_error_in_float64(device, data):
    """Half a step of a scale at most 4.5 % above the block's own, and no value grows."""
    flavours = ("normal", "sparse", "integers", "outlier", "mixed_scale", "constant", "zeros", "denormal")
    x = data.draw(float_tensors(torch.float32, shapes(max_numel=3000), device, flavours=flavours))
    got = quantize(x, "int8", block_size=8, double_quant=True).dequantize().double().cpu().flatten()
    flat = x.double().cpu().flatten()
    largest = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).reshape(-1, 8).abs().amax(dim=1)
    largest = largest.repeat_interleave(8)[: flat.numel()]
    assert bool((got.abs() <= largest * 1.01 + 2.0**-148).all())
    assert bool(((got - flat).abs() <= largest + 2.0**-148).all())
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % 2048)).reshape(-1, 2048).abs().amax(dim=1)
    within = largest >= groups.repeat_interleave(2048)[: flat.numel()] * 2.0**-15
    step = largest * 1.045 / 127
    bound = torch.where(within, step * 0.5 + 1e-6 * largest, largest) + 2.0**-148
    assert bool(((got - flat).abs() <= bound).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_zero_blocks_stay_zero(device, codec):
    x = torch.zeros(40, 64, device=device)
    x[::3] = make_tensor((14, 64), device=device)
    got = quantize(x, codec, double_quant=True).dequantize()
    assert not bool(got[1::3].any())
    assert not bool(got[2::3].any())
    assert not bool(quantize(torch.zeros(700, device=device), codec, double_quant=True).dequantize().any())


def test_the_log_scale_is_what_the_docs_say():
    """Sixteen steps an octave from the largest down, each the float nearest to its value."""
    exact = [0.0] + [2.0 ** ((code + 1) / 16 - 16) for code in range(1, 256)]
    assert ratios(torch.device("cpu")).tolist() == torch.tensor(exact, dtype=torch.float64).float().tolist()
    assert ratios(torch.device("cpu"))[255] == 1.0


@pytest.mark.parametrize("device", devices())
def test_blocks_far_below_their_group(device, isa):
    """The range of a scale ends 15.9 octaves below the largest: what is smaller goes toward zero."""
    x = torch.full((6, 4), 1.0, device=device)
    for row, exponent in enumerate((0, -10, -15, -17, -22, -30)):
        x[row] *= 2.0**exponent
    got = quantize(x, "int8", block_size=4, double_quant=True).dequantize()
    assert bool((got.abs() <= x.abs() * (1 + 1e-6)).all())
    assert bool((got[:3] > 0.95 * x[:3]).all())
    assert not bool(got[5].any())


# ---- sizes, options, refusals --------------------------------------------------------------------------


def test_bytes_per_weight():
    shape = (4096, 4096)
    for codec, size in ((NF4_CODEC, 0.516), (INT8_CODEC, 1.016)):
        packed = codec.packed_bytes(shape, codec.meta(64, double_quant=True))
        assert round(packed / math.prod(shape), 3) == size


@pytest.mark.parametrize("codec", CODECS)
@given(numel=st.integers(0, 5000), half=st.integers(1, 70))
def test_packed_bytes_are_what_is_packed(codec, numel, half):
    qt = quantize(make_tensor((numel,)), codec, block_size=2 * half, double_quant=True)
    found = registry.codec(codec)
    assert found.packed_bytes((numel,), qt.meta) == qt.packed_bytes
    for name, (dtype, shape) in found.parts((numel,), qt.meta).items():
        assert (qt.packed[name].dtype, tuple(qt.packed[name].shape)) == (dtype, shape)


@pytest.mark.parametrize("codec", CODECS)
def test_meta_tensors_beyond_32_bits(codec):
    """Sizes of a tensor that has more elements than 32 bits count, without its memory."""
    n = 2**31 + 64 + 3
    qt = quantize(torch.empty(n, device="meta"), codec, double_quant=True)
    assert qt.packed["absmax"].numel() == 2**25 + 2
    assert qt.packed["nested_absmax"].numel() == 2**17 + 1
    assert qt.packed_bytes == registry.codec(codec).packed_bytes(n, qt.meta)
    assert qt.dequantize().shape == (n,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", CODECS)
def test_not_finite_is_refused_by_name(codec, value):
    x = torch.ones(4, 64)
    x[2, 5] = value
    with pytest.raises(ArgumentError, match=r"layers\.3\.weight: expected finite .* flat index 128"):
        quantize(x, codec, name="layers.3.weight", double_quant=True)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_cut_between_groups_of_blocks(codec):
    qt = quantize(make_tensor((12, 256, 64)), codec, double_quant=True)
    whole = qt.dequantize()
    cut = qt[3:8]
    assert isinstance(cut, QuantizedTensor)
    assert_bit_equal(cut.dequantize(), whole[3:8])
    assert_bit_equal(qt.unbind()[11].dequantize(), whole[11])
    uneven = quantize(make_tensor((12, 100, 64)), codec, double_quant=True)
    assert not isinstance(uneven[3:8], QuantizedTensor)
    assert_bit_equal(uneven[3:8], uneven.dequantize()[3:8])


@pytest.mark.parametrize("codec", CODECS)
def test_the_two_packings_are_not_mixed_up(codec):
    x = make_tensor((8, 64))
    plain, double = quantize(x, codec), quantize(x, codec, double_quant=True)
    assert plain.meta == Meta(64)
    assert double.meta == Meta.make(64, double_quant=True)
    with pytest.raises(ArgumentError):
        double.copy_(plain)
    with pytest.raises(ArgumentError):
        QuantizedTensor.from_packed(double.packed, codec, x.shape, x.dtype, plain.meta)
    with pytest.raises(ArgumentError, match="double_quant"):
        QuantizedTensor.from_packed(double.packed, codec, x.shape, x.dtype, Meta.make(64, double_quant=2))


@pytest.mark.parametrize("given", [None, 1, "yes", 0])
def test_the_option_is_a_boolean(given):
    with pytest.raises(OptionError, match="double_quant"):
        quantize(torch.ones(64), "nf4", double_quant=given)


@pytest.mark.parametrize("codec", [name for name in registry.codecs() if name not in CODECS])
def test_other_codecs_have_no_such_option(codec):
    """bitsandbytes' fp4 has quantized scales where it was published with them; it is not made here."""
    with pytest.raises(OptionError, match=r"double_quant|decodes"):
        quantize(torch.ones(64, 256), codec, double_quant=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: INT8_DQ.new(p["codes"], p["absmax"], p["nested_absmax"], (65,), torch.float32, 64),
        lambda p: INT8_DQ.new(p["codes"], p["absmax"][:0], p["nested_absmax"], (64,), torch.float32, 64),
        lambda p: INT8_DQ.new(p["codes"], p["absmax"], p["nested_absmax"][:0], (64,), torch.float32, 64),
        lambda p: INT8_DQ.new(p["codes"], p["absmax"], p["nested_absmax"], (64,), torch.float32, 63),
        lambda p: INT8_DQ.new(p["codes"], p["absmax"].float(), p["nested_absmax"], (64,), torch.float32, 64),
        lambda p: INT8_DQ.new(p["codes"], p["absmax"], p["nested_absmax"], (64,), torch.float64, 64),
        lambda p: INT8_DQ.out(p["codes"], p["absmax"], p["nested_absmax"], torch.ones(64).double(), 64),
        lambda p: INT8_DQ.out(p["codes"], p["absmax"], p["nested_absmax"], torch.ones(128)[::2], 64),
        lambda p: ENCODE_INT8_DQ(torch.ones(64), p["absmax"][:0], p["nested_absmax"], 64),
        lambda p: ENCODE_INT8_DQ(torch.ones(64).int(), p["absmax"], p["nested_absmax"], 64),
        lambda p: ENCODE_INT8_DQ(torch.ones(64), p["absmax"], p["nested_absmax"], 3),
    ],
)
def test_bad_calls(call):
    packed = quantize(torch.ones(64), "int8", double_quant=True).packed
    with pytest.raises((ValueError, TypeError), match="expected"):
        call(packed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codec", CODECS)
def test_more_than_two_to_the_31_elements(codec):
    n = 2**31 + 64 + 3
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    # Whole groups of the end of the tensor, so that they can be decoded alone.
    tail = n - (n // 16384 - 1) * 16384
    x[n - tail :] = make_tensor((tail,), dtype=torch.bfloat16, seed=1, device="cuda")
    qt = quantize(x, codec, double_quant=True)
    del x
    out = qt.dequantize()
    packed = {name: tensor.cpu() for name, tensor in qt.packed.items()}
    per_byte = 2 if codec == "nf4" else 1
    packed["codes"] = packed["codes"][(n - tail) // per_byte :]
    packed["absmax"] = packed["absmax"][(n - tail) // 64 :]
    packed["nested_absmax"] = packed["nested_absmax"][(n - tail) // 16384 :]
    want = decoded_by_reference(codec, packed, (tail,), 64).to(torch.bfloat16)
    assert_bit_equal(out[n - tail :], want)
    assert not bool(out[: 2**20].any())
