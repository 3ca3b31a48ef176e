import functools
import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import (
    FLAVOURS,
    assert_bit_equal,
    assert_near,
    devices,
    float_tensors,
    make_tensor,
    shapes,
)
from ts_fused import reference, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = (0.0, 1.0)
EPS = 1e-6
# Squares of these stay finite in fp32, and products with the weight normal numbers in every dtype.
TAME = tuple(f for f in FLAVOURS if f not in ("denormal", "large"))

dtypes = st.sampled_from(DTYPES)
forms = st.sampled_from(FORMS)
x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="PyTorch's summation order is known on x86"
)


@functools.cache
def any_shape():
    return shapes(max_dims=3, max_side=1100)


def draw_case(data, device, flavours=FLAVOURS):
    shape = data.draw(any_shape())
    x_dtype, w_dtype = data.draw(dtypes), data.draw(dtypes)
    x = data.draw(float_tensors(x_dtype, shape, device, flavours=flavours))
    weight = data.draw(float_tensors(w_dtype, shape[-1:], device, flavours=("normal", "zeros", "constant")))
    return x, weight, data.draw(forms)


def exact(x, weight, offset, eps=EPS):
    """Everything about a call in float64: y, x * rstd, rstd."""
    wide = x.double()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * rstd * (weight.double() + offset), wide * rstd, rstd


def check_gradients(x, weight, offset, grad, grad_x, grad_weight):
    """Compare with the float64 derivative, within the rounding errors of one fp32 evaluation."""
    hidden = x.shape[-1]
    g, w = grad.double(), weight.double() + offset
    _, normalized, rstd = exact(x, weight, offset)
    terms = g * w * normalized
    want_x = rstd * (g * w - normalized * terms.mean(-1, keepdim=True))
    size = rstd * ((g * w).abs() + normalized.abs() * terms.abs().mean(-1, keepdim=True))
    assert_near(grad_x, want_x, length=2 * hidden + 8, scale=size)
    rows = max(1, x.numel() // hidden)
    products = (g * normalized).reshape(-1, hidden)
    # The Llama form multiplies by x * rstd rounded to the dtype of x, in the module as here.
    accumulate = x.dtype if offset == 0.0 else torch.float32
    assert_near(
        grad_weight, products.sum(0), length=rows + hidden, scale=products.abs().sum(0), accumulate=accumulate
    )


@x86
@given(st.data())
def test_forward_has_the_bits_of_the_pytorch_module_on_cpu(data):
    x, weight, offset = draw_case(data, "cpu")
    assert_bit_equal(
        rms_norm(x, weight, EPS, offset=offset), reference.rms_norm(x, weight, EPS, offset=offset)
    )


@x86
@pytest.mark.parametrize("hidden", [4096, 5120, 8192, 12345])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_has_the_bits_of_the_pytorch_module_for_long_rows(hidden, dtype):
    x = make_tensor((5, hidden), dtype=dtype)
    weight = make_tensor((hidden,), dtype=dtype, seed=1)
    assert_bit_equal(rms_norm(x, weight), reference.rms_norm(x, weight))


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_forward_is_near_float64(device, data):
    x, weight, offset = draw_case(data, device, TAME)
    y = rms_norm(x, weight, EPS, offset=offset)
    assert_near(y, exact(x, weight, offset)[0], length=x.shape[-1] + 4, dtype=x.dtype)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_backward_is_near_float64(device, data):
    x, weight, offset = draw_case(data, device, TAME)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = rms_norm(x, weight, EPS, offset=offset)
    grad = data.draw(
        float_tensors(y.dtype, tuple(y.shape), device, flavours=("normal", "sparse", "constant"))
    )
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    check_gradients(x.detach(), weight.detach(), offset, grad, grad_x, grad_weight)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "hidden",
    [8, 64, 72, 128, 136, 256, 264, 1024, 1032, 2048, 2056, 4096, 5120, 8192, 8200, 12288, 16384],
)
@pytest.mark.parametrize("rows", [1, 37, 700])
def test_sizes_that_take_different_kernels(device, dtype, hidden, rows):
    if device == "cpu" and (rows * hidden > 2_000_000 or hidden not in (64, 1024, 1032, 4096, 12288, 16384)):
        pytest.skip("the CPU has one kernel")
    x = make_tensor((rows, hidden), dtype=dtype, device=device).requires_grad_()
    weight = make_tensor((hidden,), dtype=dtype, device=device, seed=1).requires_grad_()
    grad = make_tensor((rows, hidden), dtype=dtype, device=device, seed=2)
    y = rms_norm(x, weight)
    assert_near(y, exact(x.detach(), weight.detach(), 0.0)[0], length=hidden)
    grads = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
    again = torch.autograd.grad(y, (x, weight), grad)
    check_gradients(x.detach(), weight.detach(), 0.0, grad, *grads)
    for first, second in zip(grads, again, strict=True):
        assert_bit_equal(first, second)
    frozen = torch.autograd.grad(rms_norm(x, weight.detach()), x, grad)[0]
    torch.testing.assert_close(frozen, grads[0])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", FORMS)
@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 48), (0, 48), (1, 48), (3, 100), (2, 0, 100)])
@pytest.mark.parametrize("upstream", ["sum", "strided", "transposed", "expanded"])
def test_incoming_gradient_layouts(device, dtype, offset, shape, upstream):
    x = make_tensor(shape, dtype=dtype, device=device).requires_grad_()
    weight = make_tensor(shape[-1:], dtype=dtype, device=device, seed=1).requires_grad_()
    y = rms_norm(x, weight, offset=offset)
    if upstream == "sum":
        loss, grad = y.sum(), torch.ones_like(y)
    elif upstream == "strided":
        loss, grad = y[..., ::2].sum(), torch.zeros_like(y)
        grad[..., ::2] = 1.0
    elif upstream == "transposed":
        if len(shape) < 2:
            pytest.skip("one dimension")
        factor = make_tensor(y.transpose(0, 1).shape, dtype=dtype, device=device, seed=3)
        loss, grad = (y.transpose(0, 1).contiguous() * factor).sum(), factor.transpose(0, 1)
    else:
        grad = make_tensor((shape[-1],), dtype=dtype, device=device, seed=3).expand(shape)
        kept = grad.clone()
        grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
        assert_bit_equal(grad.contiguous(), kept)
        check_gradients(x.detach(), weight.detach(), offset, grad, grad_x, grad_weight)
        return
    grad_x, grad_weight = torch.autograd.grad(loss, (x, weight))
    check_gradients(x.detach(), weight.detach(), offset, grad, grad_x, grad_weight)


@pytest.mark.parametrize("device", devices())
def test_incoming_gradient_is_not_written_and_may_have_other_uses(device):
    x = make_tensor((4, 48), device=device).requires_grad_()
    w1 = make_tensor((48,), device=device, seed=1).requires_grad_()
    w2 = make_tensor((48,), device=device, seed=2).requires_grad_()

    def block(norm, *tensors):
        a, b, c = tensors
        y = norm(torch.sin(norm(a, b)), c)
        return ((a + y) * 0.5 + y * y).sum()

    tensors = (x, w1, w2)
    got = torch.autograd.grad(block(rms_norm, *tensors), tensors)
    wide = tuple(t.detach().double().requires_grad_() for t in tensors)
    want = torch.autograd.grad(block(reference.rms_norm, *wide), wide)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    y = rms_norm(x, w1)
    grad = torch.ones_like(y)
    y.backward(grad)
    assert bool((grad == 1).all())


@pytest.mark.parametrize("device", devices())
def test_one_plus_a_small_weight_survives_bf16(device):
    x = torch.ones(1, 48, dtype=torch.bfloat16, device=device)
    for value, expected in ((0.0, 1.0), (0.00390625, 1.00390625)):
        weight = torch.full((48,), value, dtype=torch.bfloat16, device=device)
        # 1 + 2^-8 is a tie in bf16: seen exactly with an fp32 input, and scaled out of the tie in bf16.
        assert rms_norm(x.float(), weight, 0.0, offset=1.0).eq(expected).all()
    scaled = torch.cat([x * 3.0, x], 0).reshape(1, 96)
    y = rms_norm(scaled, weight.repeat(2), 0.0, offset=1.0)
    assert_bit_equal(y.float(), (exact(scaled, weight.repeat(2), 1.0, 0.0)[0]).bfloat16().float())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", FORMS)
def test_extreme_rows_stay_finite(device, dtype, offset):
    rows = [torch.zeros(48), torch.full((48,), 1e-30), torch.full((48,), 3e4), torch.ones(48)]
    x = torch.stack(rows).to(device, dtype).requires_grad_()
    weight = torch.ones(48, dtype=dtype, device=device).requires_grad_()
    y = rms_norm(x, weight, offset=offset)
    y.backward(torch.ones_like(y))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert_near(y, exact(x.detach(), weight.detach(), offset)[0], length=48)


@pytest.mark.parametrize("device", devices())
def test_head_norm_on_a_view_and_strided_inputs(device):
    base = make_tensor((2, 7, 32), device=device)
    weight = make_tensor((8,), device=device, seed=1)
    views = [base.view(2, 7, 4, 8), base.view(2, 7, 4, 8).transpose(1, 2), base[..., ::4], base[:, ::2, 3:11]]
    for view in views:
        x = view.detach().requires_grad_()
        y = rms_norm(x, weight)
        assert_near(y, exact(view, weight, 0.0)[0], length=8)
        (grad_x,) = torch.autograd.grad(y.sum(), x)
        packed = view.contiguous().requires_grad_()
        (want,) = torch.autograd.grad(rms_norm(packed, weight).sum(), packed)
        assert_bit_equal(grad_x.contiguous(), want)


def test_only_the_gradients_that_are_needed():
    x, weight = torch.randn(3, 48, requires_grad=True), torch.randn(48, requires_grad=True)
    rms_norm(x, weight.detach()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    x.grad = None
    rms_norm(x.detach(), weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not rms_norm(x, weight).requires_grad


def test_second_derivative_raises():
    x = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, torch.ones(8)).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_autocast_does_not_change_it():
    x, weight = torch.randn(3, 48), torch.randn(48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm(x, weight)
    assert_bit_equal(y, rms_norm(x, weight))


def test_same_bits_for_every_instruction_set_and_thread_count(variants):
    for dtype in DTYPES:
        for offset in FORMS:
            x = make_tensor((300, 100), dtype=dtype).requires_grad_()
            weight = make_tensor((100,), dtype=torch.float32, seed=1).requires_grad_()

            def run(x=x, weight=weight, offset=offset):
                y = rms_norm(x, weight, offset=offset)
                return (y.detach(), *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))

            first, *others = variants(run)
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert_bit_equal(b, a)


# PyTorch's own tracer instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", devices())
def test_compiles_in_one_graph(device):
    def step(x, weight):
        return (rms_norm(x, weight, offset=1.0) * 2.0).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        x = make_tensor((rows, 48), device=device).requires_grad_()
        weight = make_tensor((48,), device=device, seed=1).requires_grad_()
        got = torch.autograd.grad(compiled(x, weight), (x, weight))
        want = torch.autograd.grad(step(x, weight), (x, weight))
        for a, b in zip(got, want, strict=True):
            assert_bit_equal(a, b)


def test_bad_input_is_named():
    x, weight = torch.randn(2, 8), torch.ones(8)
    for args, error, text in [
        (([1.0], weight), ArgumentTypeError, "x: expected a torch.Tensor"),
        ((x, 3), ArgumentTypeError, "weight: expected a torch.Tensor"),
        ((x.double(), weight), ArgumentTypeError, "float64"),
        ((x, weight.long()), ArgumentTypeError, "int64"),
        ((x, torch.ones(7)), ArgumentError, r"shape \(8,\)"),
        ((x, torch.ones(1, 8)), ArgumentError, r"shape \(8,\)"),
        ((torch.tensor(1.0), weight), ArgumentError, "0-dimensional"),
        ((torch.ones(3, 0), torch.ones(0)), ArgumentError, "last dimension"),
        ((x, weight.to("meta")), ArgumentError, "meta"),
        ((x, weight, -1.0), OptionError, "eps"),
        ((x, weight, float("nan")), OptionError, "eps"),
    ]:
        with pytest.raises(error, match=text):
            rms_norm(*args)
    with pytest.raises(OptionError, match="offset"):
        rms_norm(x, weight, offset=float("inf"))
