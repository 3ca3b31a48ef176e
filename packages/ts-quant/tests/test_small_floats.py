"""fp8 and nvfp4: codes, scales and values bit for bit, and what their formats promise."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import assert_bit_equal, devices, float_tensors, make_tensor, shapes
from ts_quant import (
    _C,
    QuantizedTensor,
    codecs,
    dequantize,
    from_safetensors_dict,
    quantize,
    to_safetensors_dict,
)
from ts_quant.codecs import fp8
from ts_quant.codecs.fp8 import dequantize_fp8, dequantize_fp8_out, fp8_choice, quantize_fp8
from ts_quant.codecs.nvfp4 import dequantize_nvfp4, dequantize_nvfp4_out, quantize_nvfp4
from ts_quant.references import small_floats as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("mx32", "row", "block")
CODECS = ("mxfp8", "fp8_row", "fp8_block", "nvfp4")
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors(device, **options):
    drawn = shapes(min_side=0, max_side=300, max_numel=4000)
    return st.sampled_from(DTYPES).flatmap(lambda dtype: float_tensors(dtype, drawn, device, **options))


# ---- against the reference ---------------------------------------------------------------------------


def check_fp8(x, layout):
    number = LAYOUTS.index(layout)
    parts = quantize_fp8(x, number)
    want = reference.quantize_fp8(x.cpu(), layout)
    for got, expected in zip(parts, want, strict=True):
        assert_bit_equal(got, expected)
    for dtype in DTYPES:
        values = reference.dequantize_fp8(*want, x.shape, dtype, layout)
        assert_bit_equal(dequantize_fp8(*parts, x.shape, dtype, number), values)
        out = torch.full(x.shape, float("nan"), dtype=dtype, device=x.device)
        dequantize_fp8_out(*parts, out, number)
        assert_bit_equal(out, values)


def check_nvfp4(x):
    parts = quantize_nvfp4(x)
    want = reference.quantize_nvfp4(x.cpu())
    for got, expected in zip(parts, want, strict=True):
        assert_bit_equal(got, expected)
    for dtype in DTYPES:
        values = reference.dequantize_nvfp4(*want, x.shape, dtype)
        assert_bit_equal(dequantize_nvfp4(*parts, x.shape, dtype), values)
        out = torch.full(x.shape, float("nan"), dtype=dtype, device=x.device)
        dequantize_nvfp4_out(*parts, out)
        assert_bit_equal(out, values)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
@fixture_is_constant
@given(data=st.data())
def test_fp8_equals_reference(layout, device, isa, data):
    check_fp8(data.draw(tensors(device)), layout)


@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(data=st.data())
def test_nvfp4_equals_reference(device, isa, data):
    check_nvfp4(data.draw(tensors(device)))


# Rows that the fast paths take, rows that they do not, single rows, stacks, several tiles.
SHAPES = ((131, 160), (3, 130, 24), (2, 2, 5, 40), (2, 257), (1, 4099), (4096,), (1003,), (5, 1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_every_path(device, isa, dtype, shape):
    x = make_tensor(shape, dtype=dtype, flavour="mixed_scale", seed=1).to(device)
    for layout in LAYOUTS:
        check_fp8(x, layout)
    check_nvfp4(x)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_unaligned_memory(device, isa, offset):
    x = make_tensor((33, 64), dtype=torch.bfloat16, seed=offset)
    room = torch.zeros(x.numel() + offset, dtype=x.dtype, device=device)
    shifted = room[offset:].view(x.shape).copy_(x)
    for codec in CODECS:
        want = quantize(x, codec)
        got = quantize(shifted, codec)
        moved = {}
        for name, part in want.packed.items():
            assert_bit_equal(got.packed[name], part)
            bytes_ = torch.zeros(part.numel() + offset, dtype=part.dtype, device=device)
            moved[name] = bytes_[offset:].copy_(part)
        out = torch.zeros(x.numel() + offset, dtype=x.dtype, device=device)
        QuantizedTensor(moved, codec, x.shape, x.dtype, want.meta).dequantize(out=out[offset:].view(x.shape))
        assert_bit_equal(out[offset:].view(x.shape), want.dequantize())
        assert not bool(out[:offset].any())


def test_thread_count_changes_nothing():
    x = make_tensor((65, 1001), dtype=torch.bfloat16, flavour="mixed_scale")
    for number, layout in enumerate(LAYOUTS):
        want, want_scale = reference.quantize_fp8(x, layout)
        for threads in (1, 2, 7):
            codes, scale, out = torch.zeros_like(want), torch.zeros_like(want_scale), torch.zeros_like(x)
            _C.quantize_fp8(x, codes, scale, number, threads)
            _C.dequantize_fp8(codes, scale, out, number, threads)
            assert_bit_equal(codes, want)
            assert_bit_equal(out, reference.dequantize_fp8(want, want_scale, x.shape, x.dtype, layout))
    parts = reference.quantize_nvfp4(x)
    for threads in (1, 2, 7):
        made, out = [torch.zeros_like(part) for part in parts], torch.zeros_like(x)
        _C.quantize_nvfp4(x, *made, torch.zeros(1, dtype=torch.int32), threads)
        _C.dequantize_nvfp4(*made, out, threads)
        assert_bit_equal(made[0], parts[0])
        assert_bit_equal(out, reference.dequantize_nvfp4(*parts, x.shape, x.dtype))


# ---- against what others publish -----------------------------------------------------------------------


def test_e4m3_table_is_torch_s_type():
    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.view(torch.float8_e4m3fn).float()
    ours = dequantize_fp8(every, torch.ones(1), (256,), torch.float32, 1)
    assert ours.isnan().tolist() == theirs.isnan().tolist()
    assert_bit_equal(ours.nan_to_num(0.0), theirs.nan_to_num(0.0))


def test_e8m0_is_torch_s_type():
    every = torch.arange(255, dtype=torch.uint8)
    codes = torch.full((255,), 0x38, dtype=torch.uint8)  # 1.0
    ours = dequantize_fp8(codes, every, (255, 1), torch.float32, 0)
    assert_bit_equal(ours.flatten(), every.view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_e4m3_rounding_is_torch_s(device, data):
    """Within the range of the format, torch's cast rounds the same way."""
    x = data.draw(
        float_tensors(torch.float32, shapes(max_numel=600), device, flavours=("normal", "integers"))
    )
    x = x.clamp(-448, 448).flatten()
    x = torch.cat((x, torch.full((1,), 448.0, device=device)))  # a scale of exactly 1
    codes, scale = quantize_fp8(x, 1)
    assert scale.tolist() == [1.0]
    assert_bit_equal(codes.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())


def e4m3_codes(values):
    """Encode with a scale of exactly 1."""
    codes, scale = quantize_fp8(torch.cat((values, torch.full((1,), 448.0, device=values.device))), 1)
    assert scale.tolist() == [1.0]
    return codes[:-1].tolist()


def e2m1_codes(values):
    """Encode with scales of exactly 1: each value beside a 6, and somewhere 6 * 448."""
    rows = torch.zeros(len(values) + 1, 16, device=values.device)
    rows[:-1, 0], rows[:-1, 1], rows[-1, 0] = values, 6.0, 2688.0
    codes, scale, whole = quantize_nvfp4(rows)
    assert whole.tolist() == [1.0]
    assert scale[:-1].unique().tolist() == [0x38]
    return (codes.view(-1, 8)[:-1, 0] & 15).tolist()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("table", "encode", "sign"), [(reference.E4M3, e4m3_codes, 0x80), (reference.E2M1, e2m1_codes, 8)]
)
def test_every_middle_goes_to_the_even_code(device, isa, table, encode, sign):
    values = torch.tensor(table)
    middles = (values[:-1] + values[1:]) / 2
    index = range(len(middles))
    for factor, added in ((1.0, 0), (-1.0, sign)):
        for x, want in (
            (values, [*index, len(middles)]),
            (middles, [code + code % 2 for code in index]),
            (torch.nextafter(middles, torch.tensor(0.0)), list(index)),
            (torch.nextafter(middles, torch.tensor(1e9)), [code + 1 for code in index]),
        ):
            assert encode((factor * x).to(device)) == [code + added for code in want]


# ---- what the formats promise ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_values_stay_near_and_never_grow(codec, device, dtype, data):
    flavours = ("normal", "sparse", "integers", "outlier", "mixed_scale", "constant", "zeros", "denormal")
    x = data.draw(float_tensors(dtype, shapes(max_numel=3000), device, flavours=flavours))
    made = quantize(x, codec)
    got, flat = made.dequantize(torch.float32).double(), x.double()
    assert bool(got.isfinite().all())
    if x.numel():
        top = flat.abs().max()
        assert bool((got.abs() <= 1.1 * top).all())
        assert bool(((got - flat).abs() <= top).all())
        assert bool((got[flat == 0] == 0).all())
    if codec != "nvfp4":
        return
    # Each group by itself: what is small flushes to zero or stays small.
    columns = x.shape[-1] if x.dim() else 1
    rows = flat.reshape(-1, columns) if x.numel() else flat.reshape(0, 1)
    if rows.numel():
        pad = (0, -columns % 16)
        group = [
            torch.nn.functional.pad(t.reshape(rows.shape), pad).reshape(-1, 16).abs() for t in (got, rows)
        ]
        assert bool((group[0].amax(1) <= 1.1 * group[1].amax(1)).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_tiny_and_saturated_blocks(codec, device, isa, dtype):
    base = make_tensor((64, 64), dtype=torch.float32, seed=5) * 0.02
    plain = quantize(base.to(dtype).to(device), codec).dequantize().cpu()
    cases = {
        "row of zeros": base.index_fill(0, torch.tensor([3]), 0.0),
        "zeros": torch.zeros(64, 64),
        "negative zeros": -torch.zeros(64, 64),
        "tiny tensor, one zero block": torch.cat((base * 5e-5, torch.zeros(1, 64))),
        "1e-37": base.index_fill(0, torch.tensor([7]), 1e-37),
        "denormal": base.index_fill(0, torch.tensor([7]), 9e-40),
        "all denormal": torch.full((64, 64), 9e-40),
        "one huge": torch.full((64, 64), 1e-3).index_put(
            (torch.tensor(2), torch.tensor(5)), torch.tensor(1e30)
        ),
        "at the maximum": torch.full((64, 64), 448.0),
        "above the maximum": torch.full((64, 64), 448.0001),
        "largest": torch.full((64, 64), torch.finfo(dtype).max),
        "columns of 50": base[:, :50],
        "empty": torch.zeros(0, 64),
    }
    for name, case in cases.items():
        x = case.to(dtype).to(device)
        made = quantize(x, codec)
        got = made.dequantize().cpu()
        assert bool(got.isfinite().all()), name
        assert bool((got[x.cpu() == 0] == 0).all()), name
        scale = made.packed["scale"]
        if scale.dtype == torch.uint8:
            bad = (0xFF,) if codec == "mxfp8" else (0x7F, 0xFF)
            assert not any(bool((scale == byte).any()) for byte in bad), name
        else:
            assert bool(scale.isfinite().all()), name
        if name == "row of zeros" and codec != "fp8_block":
            others = [row for row in range(64) if row != 3]
            assert_bit_equal(got[others], plain[others])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(40, 70), (1, 1003), (256, 256)])
def test_not_finite_is_refused_by_name(codec, device, isa, value, shape):
    x = make_tensor(shape)
    x[-1, -1] = value
    with pytest.raises(ArgumentError, match=r"model\.weight.*NaN or an infinity"):
        quantize(x.to(device), codec, name="model.weight")


@pytest.mark.parametrize("codec", CODECS)
def test_other_options_and_dtypes(codec):
    assert quantize(torch.ones(4, 64), codec, block_size=128).meta == registry.codec(codec).meta(64)
    with pytest.raises(ArgumentTypeError, match="float32"):
        quantize(torch.ones(4, dtype=torch.float64), codec)
    with pytest.raises(OptionError, match="double_quant"):
        quantize(torch.ones(4), codec, double_quant=True)
    made = quantize(torch.ones(40, 64), codec)
    with pytest.raises(ArgumentError, match="meta"):
        QuantizedTensor.from_packed(made.packed, codec, (40, 64), torch.float32, 34)
    with pytest.raises(ArgumentError, match="codes"):
        QuantizedTensor.from_packed(made.packed, codec, (40, 640), torch.float32, made.meta)
    with pytest.raises(ArgumentTypeError):
        registry.codec(codec).decode(
            made.packed, (40, 64), torch.float32, made.meta, torch.ones(40, 64).double()
        )
    for name, part in made.packed.items():
        with pytest.raises(ArgumentTypeError, match=name):
            registry.codec(codec).decode(
                {**made.packed, name: part.double()}, (40, 64), torch.float32, made.meta
            )
        short = {**made.packed, name: part[1:]}
        with pytest.raises(ArgumentError, match=name):
            registry.codec(codec).decode(short, (40, 64), torch.float32, made.meta)
        with pytest.raises(ArgumentError, match=name):
            registry.codec(codec).decode(short, (40, 64), torch.float32, made.meta, torch.ones(40, 64))


def same(view, want):
    assert_bit_equal(dequantize(view) if isinstance(view, QuantizedTensor) else view, want)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_views_keep_the_bytes_or_decode(codec, data):
    shape = data.draw(st.sampled_from([(300, 16), (4, 130, 8), (640,), (257, 18), (2, 2, 128, 4)]))
    x = make_tensor(shape, seed=len(shape))
    made = quantize(x, codec)
    whole = made.dequantize()
    start = data.draw(st.sampled_from([0, 1, 16, 32, 128, 256])) % shape[0]
    stop = data.draw(st.sampled_from([shape[0], start, min(start + 128, shape[0])]))
    assert_bit_equal(
        dequantize(cut) if isinstance(cut := made[start:stop], QuantizedTensor) else cut, whole[start:stop]
    )
    row = made[start]
    assert_bit_equal(dequantize(row) if isinstance(row, QuantizedTensor) else row, whole[start])
    for size in ((1, *shape), (-1, shape[-1]), (-1,)):
        view = made.view(size)
        assert_bit_equal(dequantize(view) if isinstance(view, QuantizedTensor) else view, whole.view(size))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_and_experts_are_cut_without_decoding(codec):
    assert isinstance(quantize(torch.ones(4, 256, 64), codec)[1], QuantizedTensor)
    assert isinstance(quantize(torch.ones(256, 64), codec)[128:], QuantizedTensor)
    assert isinstance(quantize(torch.ones(256, 64), codec)[3:5], QuantizedTensor) == (codec != "fp8_block")


# ---- as a tensor -----------------------------------------------------------------------------------------


def bytes_equal(got, want):
    assert isinstance(got, QuantizedTensor)
    assert (got.codec, got.shape, got.dtype, got.meta) == (want.codec, want.shape, want.dtype, want.meta)
    for name, part in want.packed.items():
        assert_bit_equal(got.packed[name], part)


@pytest.mark.parametrize("codec", CODECS)
def test_kept_through_copies_and_files(codec, tmp_path):
    made = quantize(make_tensor((130, 50), dtype=torch.bfloat16), codec)
    bytes_equal(copy.deepcopy(made), made)
    bytes_equal(pickle.loads(pickle.dumps(made)), made)
    torch.save({"w": torch.nn.Parameter(made, requires_grad=False)}, tmp_path / "w.pt")
    bytes_equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], made)
    bytes_equal(from_safetensors_dict("w", *to_safetensors_dict("w", made)), made)
    damaged = list(made.__reduce_ex__(2)[1])
    damaged[4] = (damaged[4], (("group", 7),))
    with pytest.raises(ArgumentError, match="meta"):
        made.__reduce_ex__(2)[0](*damaged)


@pytest.mark.parametrize("codec", CODECS)
def test_loading_something_else_leaves_the_bytes_alone(codec):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).requires_grad_(False)
    layer[0].weight = torch.nn.Parameter(quantize(layer[0].weight.detach(), codec), requires_grad=False)
    before = {name: part.clone() for name, part in layer[0].weight.packed.items()}
    layer.load_state_dict({"1.weight": torch.zeros(8, 32)}, strict=False)
    same = copy.deepcopy(layer)
    same.load_state_dict(layer.state_dict())
    for each in (layer, same):
        for name, part in before.items():
            assert_bit_equal(each[0].weight.packed[name], part)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_linear_is_that_of_the_decoded_weight(device, codec):
    made = quantize(make_tensor((48, 64), seed=2).to(device), codec)
    x = make_tensor((5, 64), seed=3).to(device).requires_grad_()
    out = torch.nn.functional.linear(x, made)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    plain = made.dequantize()
    want = torch.nn.functional.linear(x, plain)
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    assert_bit_equal(out.detach(), want.detach())
    assert_bit_equal(grad, want_grad)


# ---- the name "fp8" ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "want"),
    [((8, 0), "mxfp8"), ((8, 9), "fp8_row"), ((9, 0), "fp8_row"), ((10, 0), "mxfp8"), ((12, 0), "mxfp8")],
)
def test_fp8_is_what_the_gpu_computes(monkeypatch, capability, want):
    monkeypatch.setattr(fp8.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda device=None: capability)
    assert fp8_choice() == fp8_choice("cuda:0") == want
    assert fp8_choice("cpu") == "mxfp8"


def test_fp8_without_a_gpu(monkeypatch):
    monkeypatch.setattr(fp8.torch.cuda, "is_available", lambda: False)
    assert fp8_choice() == fp8_choice("cpu") == "mxfp8"
    assert quantize(torch.ones(4, 64), "fp8").codec == "mxfp8"
    assert codecs.resolve("fp8") == "mxfp8"
    assert codecs.resolve("nf4") == "nf4"


# ---- more than 2^31 elements -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", [param for param in devices() if param.values != ("cpu",)])
@pytest.mark.parametrize("codec", CODECS)
def test_more_than_two_to_the_31_elements(device, codec):
    rows, columns = 1_048_578, 2048
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    piece = make_tensor((4096, columns), dtype=torch.bfloat16).to(device)
    for first in range(0, rows, 4096):
        x[first : first + 4096] = piece[: rows - first]
    made = quantize(x, codec)
    small = quantize(x[-4098:].contiguous(), codec) if codec != "fp8_block" else None
    out = torch.empty(rows + 2, columns, dtype=torch.bfloat16, device=device).fill_(7)
    dequantize(made, out=out[1:-1])
    assert bool((out[0] == 7).all() & (out[-1] == 7).all())
    assert_bit_equal(out[1:4097], quantize(piece, codec).dequantize())
    if small is not None:
        assert_bit_equal(out[-4099:-1], small.dequantize())
