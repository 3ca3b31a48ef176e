"""Products of packed operands: what tensor cores are given, the same product without them, and gradients."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import DeviceError, OptionError
from ts_core.registry import SlottedWeight
from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_quant import QuantizedTensor, matmul, quantize, set_matmul, verify
from ts_quant import _scaled_linear as scaled_linear_module
from ts_quant._transpose import transpose_bytes
from ts_quant.matmul import DECODE, Matmul, emulated, how, multiplies
from ts_quant.products import PRODUCTS, TRANSPOSED, outlier_columns, split_outliers
from ts_quant.references import small_floats as reference
from ts_quant.scaled_mm import Operand, blocked_scales, emulate, multiply, plain_scales
from ts_quant.verify import check_input_gradients, gradient_error, try_product

CODECS = tuple(PRODUCTS)
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LAYOUT = {"fp8_row": "row", "mxfp8": "mx32"}
E4M3 = torch.tensor([*reference.E4M3, float("nan")], dtype=F64)
E4M3 = torch.cat((E4M3, -E4M3))


def weight_of(codec, shape=(512, 1024), seed=0, device="cpu"):
    return quantize(make_tensor(shape, dtype=BF16, seed=seed, device=device), codec)


def quantized_input(codec, x):
    """What the input becomes, decoded in float64, by the formats' definitions."""
    if codec == "nvfp4":
        parts = reference.quantize_nvfp4(x)
        return reference.dequantize_nvfp4(*parts, x.shape, F32).double()
    tiles, layout = (x, LAYOUT[codec]) if codec in LAYOUT else (x.reshape(-1, 128), "row")
    codes, scale = reference.quantize_fp8(tiles, layout)
    if layout == "mx32":
        factor = torch.ldexp(torch.ones(scale.shape, dtype=F64), scale.long() - 127).repeat_interleave(32)
    else:
        factor = scale.double().repeat_interleave(tiles.shape[1])
    return (E4M3[codes.long()] * factor).reshape(x.shape)


def exact(codec, x, weight, bias=None):
    """The product in float64, with a bound on what the order of its sums can change."""
    a, b = quantized_input(codec, x.reshape(-1, x.shape[-1])), weight.dequantize(F32).double()
    out = a @ b.t() + (0 if bias is None else bias.double())
    return out.reshape(*x.shape[:-1], -1), (a.abs() @ b.abs().t()).reshape(*x.shape[:-1], -1)


def assert_close(got, want, magnitudes, factor=0.0, rounds=1):
    assert got.dtype == BF16
    bound = factor * magnitudes + rounds * 2.0**-8 * want.abs() + 1e-30
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("with_bias", [False, True])
@given(rows=st.integers(1, 9), seed=st.integers(0, 99), magnitude=st.sampled_from([1e-6, 1.0, 1e4]))
def test_linear_is_the_product_of_quantized_input_and_weight(codec, with_bias, rows, seed, magnitude):
    weight = weight_of(codec, (128, 512), seed)
    x = make_tensor((2, rows, 512), dtype=BF16, seed=seed + 1) * magnitude
    bias = make_tensor((128,), dtype=BF16, seed=seed + 2) if with_bias else None
    with emulated():
        got = nn.functional.linear(x, weight, bias)
    want, magnitudes = exact(codec, x, weight, bias)
    # Added after rounding, a bias that cancels leaves the error of the product.
    rounds = 0 if bias is None else 2.0**-8
    assert_close(got, want, magnitudes, 2.0**-20 + rounds)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_inputs_are_quantized_as_the_formats_define(codec, device):
    x = make_tensor((36, 1536), dtype=BF16, device=device)
    x[3], x[5, :256] = 0, 0
    operand = PRODUCTS[codec].activation(x)
    rows = operand.codes.view(torch.uint8).reshape(-1)
    if codec == "nvfp4":
        codes, scale, whole = reference.quantize_nvfp4(x.cpu())
        assert_bit_equal(operand.whole, whole)
    else:
        tiles, layout = (x, LAYOUT[codec]) if codec in LAYOUT else (x.reshape(-1, 128), "row")
        codes, scale = reference.quantize_fp8(tiles.cpu(), layout)
    assert_bit_equal(rows, codes)
    scales = operand.scale
    if codec in ("nvfp4", "mxfp8"):
        scales = plain_scales(scales.view(torch.uint8), 36, scale.numel() // 36)
    assert_bit_equal(scales.reshape(-1), scale)


def test_the_product_of_rows_is_pytorchs_own():
    """The same operands through PyTorch's operation on the CPU, which knows this layout."""
    x, weight = make_tensor((33, 64), dtype=BF16), weight_of("fp8_row", (48, 64))
    product = PRODUCTS["fp8_row"]
    a, b = product.activation(x), product.weight(weight.packed, weight.shape)
    try:
        theirs = torch._scaled_mm(a.codes, b.codes.t(), a.scale, b.scale.t(), out_dtype=BF16)
    except RuntimeError as error:
        if "per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("up to PyTorch 2.11 its CPU takes one scale a tensor")
    ours = emulate("row", a, b)
    want, magnitudes = exact("fp8_row", x, weight)
    for got in (theirs, ours):
        assert_close(got, want, magnitudes, 2.0**-20)


@pytest.mark.parametrize("codec", CODECS)
def test_operands_have_the_layout_that_pytorch_documents(codec):
    """PyTorch's own check of sizes and strides, on tensors without data as on a GPU."""
    product, shape = PRODUCTS[codec], (640, 1536)
    weight = weight_of(codec, shape)
    made = product.transpose(weight.packed, shape)
    forward = product.activation(make_tensor((24, 1536), dtype=BF16)), product.weight(weight.packed, shape)
    backward = None
    if product.accepts(shape, backward=True):
        grad = product.gradient(make_tensor((24, 640), dtype=BF16), weight.packed)
        backward = grad, product.transposed(weight.packed, made, shape)
    for pair in (forward, backward):
        if pair is None:
            continue
        for side in pair:
            assert side.codes.is_contiguous()
        a, b = (Operand(*(None if t is None else t.to("meta") for t in side)) for side in pair)
        out = multiply(product.kind, a, b)
        assert out.shape == (24, b.codes.shape[0])
        assert out.dtype == BF16


def test_scales_of_tiles_follow_one_another_as_cublas_reads_them():
    a = PRODUCTS["fp8_block"].activation(make_tensor((8, 1024), dtype=BF16))
    assert a.scale.shape == (8, 8)
    assert a.scale.stride() == (1, 8)
    weight = weight_of("fp8_block", (256, 1024))
    b = PRODUCTS["fp8_block"].weight(weight.packed, weight.shape)
    assert b.scale.shape == (2, 8)
    assert b.scale.stride() == (8, 1)


@given(rows=st.integers(1, 300), columns=st.integers(1, 20))
def test_blocked_scales(rows, columns):
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    blocked = blocked_scales(scale)
    down, across = -(-rows // 128), -(-columns // 4)
    assert blocked.shape == (512 * down * across,)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (r // 128) * across + c // 4
    assert_bit_equal(blocked[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4], scale)
    assert int(blocked.long().sum()) == int(scale.long().sum())  # what is beyond is zero
    assert_bit_equal(plain_scales(blocked, rows, columns), scale)


@pytest.mark.parametrize("device", devices())
@given(rows=st.integers(0, 40), columns=st.integers(0, 40), sixteenths=st.booleans())
def test_transposed_bytes(device, rows, columns, sixteenths):
    rows, columns = (16 * rows, 16 * columns) if sixteenths else (rows, columns)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
    out = torch.empty(rows * columns, dtype=torch.uint8, device=device)
    transpose_bytes(codes.reshape(-1), out, rows, columns)
    assert_bit_equal(out.view(columns, rows), codes.t().contiguous())


def test_transposed_bytes_without_alignment(isa):
    memory = torch.randint(0, 256, (33 * 48 + 1,), dtype=torch.uint8)
    out = torch.empty(33 * 48, dtype=torch.uint8)
    transpose_bytes(memory[1:], out, 33, 48)
    assert_bit_equal(out.view(48, 33), memory[1:].view(33, 48).t().contiguous())


@pytest.mark.parametrize("codec", CODECS)
def test_rows_cut_out_of_a_weight_multiply_as_they_do_in_it(codec):
    weight, x = weight_of(codec, (384, 512)), make_tensor((3, 512), dtype=BF16)
    first = 128 if codec == "fp8_block" else 17
    part = weight[first : first + 128]
    assert isinstance(part, QuantizedTensor)
    with emulated():
        whole, cut = nn.functional.linear(x, weight), nn.functional.linear(x, part)
    assert_bit_equal(cut, whole[:, first : first + 128].contiguous())
    operand = PRODUCTS[codec].weight(part.packed, part.shape)
    assert operand.scale.storage_offset() * operand.scale.element_size() % 16 == 0


@pytest.mark.parametrize("codec", ["fp8_row", "fp8_block"])
def test_the_transposed_weight_of_fp8_is_exact(codec):
    product, shape = PRODUCTS[codec], (512, 1024)
    weight = weight_of(codec, shape)
    operand = product.transposed(weight.packed, product.transpose(weight.packed, shape), shape)
    values = operand.codes.double()
    if codec == "fp8_block":
        values = values * operand.scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        values = values * weight.packed["scale"].double()
    assert torch.equal(values, weight.dequantize(F32).double().t()) or torch.allclose(
        values, weight.dequantize(F32).double().t(), rtol=2.0**-24, atol=0
    )


@pytest.mark.parametrize("codec", ["mxfp8", "nvfp4"])
def test_the_transposed_weight_is_quantized_along_the_reduced_axis(codec):
    shape = (96, 160)
    weight = weight_of(codec, shape)
    made = PRODUCTS[codec].transpose(weight.packed, shape)
    again = quantize(weight.dequantize(BF16).t().contiguous(), codec)
    for name, part in again.packed.items():
        assert_bit_equal(made[name + TRANSPOSED], part)


LIMITS = {"fp8_row": (0.02, 0.035), "fp8_block": (0.02, 0.035), "mxfp8": (0.02, 0.04), "nvfp4": (0.1, 0.16)}


@pytest.mark.parametrize("codec", CODECS)
def test_input_gradients(codec):
    """From the decoded weight by default, bit for bit; from packed operands within what the format loses."""
    weight = weight_of(codec)
    grad, x = make_tensor((3, 7, 512), dtype=BF16, seed=5), make_tensor((3, 7, 1024), dtype=BF16, seed=6)

    def gradients(function):
        inputs = x.clone().requires_grad_(), torch.zeros(512, dtype=BF16, requires_grad=True)
        return torch.autograd.grad(function(inputs[0], weight, inputs[1]), inputs, grad)

    plain = gradients(lambda x, w, b: nn.functional.linear(x, w.dequantize(), b))
    with emulated():
        for got, want in zip(gradients(nn.functional.linear), plain, strict=True):
            assert_bit_equal(got, want)
        weight.matmul_options = Matmul(backward=True)
        got_x, got_bias = gradients(nn.functional.linear)
    assert_bit_equal(got_bias, plain[1])
    error = float((got_x.float() - plain[0].float()).norm() / plain[0].float().norm())
    low, high = LIMITS[codec]
    assert low < error < high


@pytest.mark.parametrize("codec", CODECS)
def test_packed_gradients_use_a_transposed_weight_that_is_there(codec, monkeypatch):
    """A slot holds W and W^T: both are used as they are, and give what making W^T gives."""
    product, shape = PRODUCTS[codec], (512, 512)
    weight = weight_of(codec, shape)
    parts = product.transposed_parts(shape)
    out = {name: torch.empty(size, dtype=kind) for name, (kind, size) in parts.items()}
    made = product.transpose(weight.packed, shape, out)
    assert all(made[name] is out[name] for name in parts)
    both = QuantizedTensor({**weight.packed, **out}, codec, shape, BF16, weight.meta)
    weight.matmul_options = both.matmul_options = Matmul(backward=True)
    grads = []
    for w in (weight, both):
        x = make_tensor((4, 512), dtype=BF16, seed=1).requires_grad_()
        with emulated():
            nn.functional.linear(x, w).square().sum().backward()
        grads.append(x.grad)
        monkeypatch.setattr(type(product), "transpose", None)
    assert_bit_equal(grads[0], grads[1])
    assert_bit_equal(both.dequantize(), weight.dequantize())


def test_a_gradient_that_is_differentiated_again_has_the_decoded_formula():
    weight = weight_of("fp8_row", (16, 32))
    plain = weight.dequantize()
    weight.matmul_options = Matmul(backward=True)
    results = []
    for w in (weight, plain):
        x = make_tensor((4, 32), dtype=BF16, seed=3).requires_grad_()
        with emulated():
            out = nn.functional.linear(x, w)
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out, requires_grad=True), create_graph=True)
        results.append(grad)
    assert results[0].requires_grad
    assert_bit_equal(results[0].detach(), results[1].detach())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(codec, value):
    weight = weight_of(codec, (128, 512))
    x = make_tensor((5, 512), dtype=BF16)
    x[2, 7] = value
    with emulated():
        got = nn.functional.linear(x, weight)
    assert not got[2].isfinite().any()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_zeros_give_zeros(codec):
    x = make_tensor((5, 512), dtype=BF16)
    x[2] = 0
    with emulated():
        got = nn.functional.linear(x, weight_of(codec, (128, 512)))
        nothing = nn.functional.linear(torch.zeros_like(x), weight_of(codec, (128, 512)))
    assert not got[2].any()
    assert not nothing.any()


REFUSED = {
    "fp8_row": [(512, 1000), (500, 1024)],
    "fp8_block": [(512, 640), (192, 1024)],
    "mxfp8": [(512, 48), (24, 1024)],
    "nvfp4": [(512, 48), (24, 1024)],
}


@pytest.mark.parametrize("codec", CODECS)
def test_other_shapes_and_dtypes_are_decoded(codec):
    for shape in REFUSED[codec]:
        weight = weight_of(codec, shape)
        x = make_tensor((3, shape[1]), dtype=BF16)
        with emulated():
            assert how(codec, shape, BF16, x.device, weight.matmul_options) is None
            assert_bit_equal(nn.functional.linear(x, weight), nn.functional.linear(x, weight.dequantize()))
    weight = quantize(make_tensor((512, 1024)), codec)
    x = make_tensor((3, 1024))
    with emulated():
        assert_bit_equal(nn.functional.linear(x, weight), nn.functional.linear(x, weight.dequantize()))
        weight = weight.to(BF16)
        weight.matmul_options = DECODE
        assert_bit_equal(
            nn.functional.linear(x.bfloat16(), weight),
            nn.functional.linear(x.bfloat16(), weight.dequantize()),
        )


@pytest.mark.parametrize("dtype", [F32, torch.float16])
def test_a_weight_that_autocast_casts_is_decoded_wherever_it_lies(dtype):
    weight, x = quantize(make_tensor((32, 64), dtype=dtype), "fp8_row"), make_tensor((3, 64))
    weight.matmul_options = Matmul(backward=True)
    with emulated():
        assert weight.slot_parts(x.device) is None
        assert weight.input_gradient(make_tensor((3, 32), dtype=BF16)) is None
        with torch.autocast("cpu", dtype=BF16):
            got, want = (nn.functional.linear(x, w) for w in (weight, weight.dequantize()))
    assert got.dtype == BF16
    assert_bit_equal(got, want)


def test_a_bias_of_another_dtype_is_refused_as_pytorch_does():
    with emulated(), pytest.raises(RuntimeError, match="dtype"):
        nn.functional.linear(make_tensor((3, 1024), dtype=BF16), weight_of("fp8_row"), make_tensor((512,)))


def test_what_was_found_wrong_is_not_compiled(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(matmul, "_should", lambda codec, device: True)
    monkeypatch.setattr(matmul, "_found", {("fp8_row", 0): "wrong", ("fp8_block", 0): ""})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [multiplies(codec, device) for codec in ("fp8_row", "fp8_block", "mxfp8")] == [False, True, True]


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_of_shapes_whose_transpose_is_refused_are_decoded(codec):
    shape = {"fp8_row": (16, 32), "fp8_block": (128, 512), "mxfp8": (48, 32), "nvfp4": (48, 32)}[codec]
    refused = codec != "fp8_row"
    with emulated():
        product, _, backward = how(codec, shape, BF16, torch.device("cpu"), Matmul(backward=True))
    assert product is PRODUCTS[codec]
    assert backward is not refused


def test_a_cpu_decodes():
    assert not any(multiplies(codec, torch.device("cpu")) for codec in (*CODECS, "nf4"))
    weight, x = weight_of("fp8_row"), make_tensor((3, 1024), dtype=BF16)
    assert_bit_equal(nn.functional.linear(x, weight), nn.functional.linear(x, weight.dequantize()))


@pytest.mark.parametrize(
    ("codec", "capability", "cuda", "expected"),
    [
        ("fp8_row", (8, 9), (12, 6), True),
        ("fp8_row", (9, 0), (12, 6), True),
        ("fp8_row", (8, 0), (13, 0), False),
        ("fp8_row", (10, 0), (13, 0), False),
        ("fp8_block", (9, 0), (12, 9), True),
        ("fp8_block", (9, 0), (12, 8), False),
        ("fp8_block", (8, 9), (13, 0), False),
        ("mxfp8", (10, 0), (12, 8), True),
        ("mxfp8", (12, 0), (13, 0), True),
        ("mxfp8", (9, 0), (13, 0), False),
        ("nvfp4", (10, 0), (12, 8), True),
        ("nvfp4", (9, 0), (13, 0), False),
    ],
)
def test_which_gpus_compute_what(codec, capability, cuda, expected):
    assert PRODUCTS[codec].on(*capability, cuda) is expected


# -- outliers


@given(seed=st.integers(0, 99))
def test_outlier_columns_are_those_of_the_decoded_weight(seed):
    weight = weight_of("nvfp4", (48, 96), seed)
    index = torch.randperm(96)[:7]
    assert_bit_equal(
        outlier_columns(weight.packed, weight.shape, index), weight.dequantize(BF16).index_select(1, index)
    )


def test_split_outliers():
    x = make_tensor((5, 100), dtype=BF16)
    x[3, 17], x[0, 40] = 90.0, -80.0
    rest, values, index = split_outliers(x, 0.02)
    assert sorted(index.tolist()) == [17, 40]
    assert_bit_equal(values, x[:, index])
    assert not rest[:, index].any()
    assert split_outliers(x, 0.0001)[2].tolist() == [17]


def test_outliers_keep_large_channels_exact():
    weight, x = weight_of("nvfp4"), make_tensor((16, 1024), dtype=BF16, seed=1)
    x[:, [3, 500]] *= 100
    want = x.double() @ weight.dequantize(F32).double().t()
    grads, errors = [], []
    for share in (0.0, 0.01):
        weight.matmul_options = Matmul(outliers=share)
        inputs = x.clone().requires_grad_()
        with emulated():
            got = nn.functional.linear(inputs, weight)
        errors.append(float((got.detach().double() - want).norm() / want.norm()))
        grads.append(torch.autograd.grad(got, inputs, torch.ones_like(got))[0])
    assert errors[1] < 0.6 * errors[0]
    assert_bit_equal(grads[0], grads[1])


# -- options


def small_model():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=BF16) for _ in range(3)), nn.Linear(512, 8))
    for layer, codec in zip(model, ("fp8_row", "nvfp4", "nf4"), strict=False):
        packed = quantize(layer.weight.detach(), codec)
        layer.weight = nn.Parameter(packed, requires_grad=False)
    return model


def test_set_matmul_tells_every_weight():
    model = small_model()
    counts = set_matmul(model, outliers=0.02, fp8_backward=True)
    assert counts == {**dict.fromkeys(counts, 0), "weights": 3}
    assert [layer.weight.matmul_options for layer in model[:3]] == [
        Matmul(backward=True),
        Matmul(outliers=0.02),
        Matmul(),
    ]
    set_matmul(model, tensor_cores=False)
    assert model[0].weight.matmul_options == Matmul(False, 0.0, True)
    with emulated():
        assert set_matmul(model)["tensor_cores"] == 0
        counts = set_matmul(model, tensor_cores=True, fp8_backward=False, nvfp4_backward=True)
    assert counts.pop("weights") == 3
    assert counts == {"tensor_cores": 2, "fp8_backward": 0, "nvfp4_backward": 1, "outliers": 1}
    assert model[0].weight.matmul_options == Matmul()


@pytest.mark.parametrize(
    "options", [{"outliers": 0.2}, {"outliers": -0.1}, {"tensor_cores": 1}, {"fp8_backward": "auto"}]
)
def test_set_matmul_refuses(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        set_matmul(nn.Linear(2, 2), **options)


@pytest.mark.parametrize("codec", [*CODECS, "nf4"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_slot_holds_what_is_multiplied(codec, backward):
    """The pager asks for the tensors, copies the packed ones and has the others made, whatever the codec."""
    weight = weight_of(codec, (512, 512))
    weight.matmul_options = Matmul(backward=backward)
    assert weight.slot_parts(torch.device("cpu")) is None
    with emulated():
        parts = weight.slot_parts(torch.device("cpu"))
        if codec == "nf4":
            assert parts is None
            return
        assert isinstance(weight, SlottedWeight)
        places = {name: torch.empty(size, dtype=kind) for name, (kind, size) in parts.items()}
        assert (set(places) > set(weight.packed)) is backward
        for name, part in weight.packed.items():
            places[name].copy_(part)
        weight.complete_slot(places)
        slotted = weight.with_packed(places)
        results = []
        for w in (weight, slotted):
            x = make_tensor((4, 512), dtype=BF16, seed=1).requires_grad_()
            out = nn.functional.linear(x, w)
            grad = make_tensor((4, 512), dtype=BF16, seed=2)
            direct = w.input_gradient(grad)
            assert (direct is not None) is backward
            results.append(
                [out.detach(), *torch.autograd.grad(out, x, grad), *([direct] if backward else [])]
            )
            assert not backward or torch.equal(*results[-1][1:])
    for got, want in zip(*results, strict=True):
        assert_bit_equal(got, want)


def test_options_stay_with_the_tensor():
    weight = weight_of("fp8_row", (64, 64))
    options = weight.matmul_options = Matmul(backward=True)
    names, context = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    again = QuantizedTensor.__tensor_unflatten__(parts, context, weight.shape, weight.stride())
    others = [weight.detach(), weight.clone(), weight.to(F32), copy.deepcopy(weight), weight[:16], again]
    others += [weight.with_packed(weight.packed), nn.Parameter(weight, requires_grad=False)]
    fitted = weight.with_error(torch.ones(2, 64), torch.ones(64, 2))
    others += [pickle.loads(pickle.dumps(w)) for w in (weight, fitted, others[-1])]
    assert others[-2].error_a is not None
    with io.BytesIO() as file:
        torch.save(weight, file)
        file.seek(0)
        others.append(torch.load(file, weights_only=True))
    assert all(other.matmul_options == options for other in others)


# -- checks on load


@pytest.mark.parametrize("codec", CODECS)
def test_the_trial_notices_what_is_wrong(codec, monkeypatch):
    """The emulation stands for the GPU; then it is scaled, refused, or its gradient alone is wrong."""
    cpu = torch.device("cpu")

    def refuse(*operands):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")

    monkeypatch.setattr(scaled_linear_module, "multiply", emulate)
    for stand_in, expected in (
        (emulate, ""),
        (lambda *operands: 1.1 * emulate(*operands), "farther from the reference"),
        (refuse, "CUBLAS_STATUS_NOT_SUPPORTED"),
    ):
        monkeypatch.setattr(verify, "multiply", stand_in)
        with torch.inference_mode():
            found = try_product(codec, cpu)
        assert expected in found
        assert bool(expected) is bool(found)
    monkeypatch.setattr(verify, "multiply", emulate)
    monkeypatch.setattr(scaled_linear_module, "multiply", lambda *operands: emulate(*operands).neg())
    assert "input gradient" in try_product(codec, cpu)


@pytest.mark.parametrize("codec", [*CODECS, "nf4", "int8"])
@pytest.mark.parametrize("backward", [False, True])
def test_gradient_errors(codec, backward):
    weight = weight_of(codec, (512, 512))
    weight.matmul_options = Matmul(backward=backward)
    with emulated():
        error = gradient_error(weight)
    assert error < (LIMITS[codec][1] if backward and codec in LIMITS else 2.0**-7)


def test_check_input_gradients_names_the_weight(monkeypatch):
    model = small_model()
    set_matmul(model, fp8_backward=True, nvfp4_backward=True)
    with emulated():
        assert check_input_gradients(model) == 3
        right = PRODUCTS["fp8_row"].transpose

        def wrong(packed, shape, out=None):
            made = right(packed, shape, out)
            made["codes" + TRANSPOSED].copy_(packed["codes"])  # not transposed at all
            return made

        monkeypatch.setattr(PRODUCTS["fp8_row"], "transpose", wrong, raising=False)
        with pytest.raises(DeviceError, match=r"0\.weight.*fp8_row"):
            check_input_gradients(model)
    assert check_input_gradients(model) == 3  # decoded here


def test_of_a_large_weight_some_rows_are_looked_at(monkeypatch):
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False, dtype=BF16))
    packed = quantize(model[0].weight.detach(), "fp8_row")
    model[0].weight = nn.Parameter(packed, requires_grad=False)
    shapes = []
    original = verify.gradient_error
    monkeypatch.setattr(verify, "gradient_error", lambda w: shapes.append(tuple(w.shape)) or original(w))
    assert check_input_gradients(model) == 1
    assert shapes == [(2048, 1024)]


# -- compiled


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("codec", "options"), [("fp8_row", Matmul()), ("nvfp4", Matmul(True, 0.02, True))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_without_a_graph_break(codec, options, device):
    torch._dynamo.reset()
    packed = weight_of(codec, (64, 64), device=device)
    packed.matmul_options = options
    weight = nn.Parameter(packed, requires_grad=False)
    compiled = torch.compile(nn.functional.linear, fullgraph=True, backend="aot_eager")
    results = []
    with emulated() if device == "cpu" else contextlib.nullcontext():
        for function in (nn.functional.linear, compiled):
            x = make_tensor((3, 64), dtype=BF16, seed=5, device=device).requires_grad_()
            out = function(x, weight)
            results.append([out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))])
    torch._dynamo.reset()
    for got, want in zip(*results, strict=True):
        assert_bit_equal(got, want)
