import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import assert_bit_equal, assert_near, devices, float_tensors, make_tensor, shapes
from ts_fused import add_rms_norm, reference, rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = (0.0, 1.0)
KINDS = ("normal", "zeros", "constant", "sparse", "integers", "outlier")


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_forward_has_the_bits_of_the_sum_and_its_norm(device, data):
    shape = data.draw(shapes(max_dims=3, max_side=1100))
    dtype, form = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(FORMS))
    x, residual = (data.draw(float_tensors(dtype, shape, device)) for _ in range(2))
    weight = data.draw(float_tensors(data.draw(st.sampled_from(DTYPES)), shape[-1:], device, flavours=KINDS))
    y, total = add_rms_norm(x, residual, weight, offset=form)
    assert_bit_equal(total, x + residual)
    assert_bit_equal(y, rms_norm(x + residual, weight, offset=form))


def check(x, residual, weight, form, grad_y, grad_sum, got):
    """Compare with the float64 derivative at the rounded sum, within the roundings of one fp32 evaluation."""
    total, w = (x + residual).detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y = reference.rms_norm(total, w, offset=form)
    hidden, rows = x.shape[-1], max(1, x.numel() // x.shape[-1])
    want_x, want_w = torch.autograd.grad(y, (total, w), grad_y.double())
    rstd = torch.rsqrt(total.detach().pow(2).mean(-1, keepdim=True) + 1e-6)
    normalized = total.detach() * rstd
    terms = grad_y.double() * (w.detach() + form)
    size = rstd * (terms.abs() + normalized.abs() * (terms * normalized).abs().mean(-1, keepdim=True))
    extra = 0.0 if grad_sum is None else grad_sum.double()
    size = size + (0.0 if grad_sum is None else grad_sum.double().abs())
    assert_near(got[0], want_x + extra, length=2 * hidden + 8, scale=size.cpu())
    assert_bit_equal(got[0], got[1])
    products = (grad_y.double() * normalized).reshape(-1, hidden).abs().sum(0)
    accumulate = x.dtype if form == 0.0 else torch.float32
    assert_near(got[2], want_w, length=rows + hidden, scale=products.cpu(), accumulate=accumulate)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_backward_is_near_float64(device, data):
    shape = data.draw(shapes(max_dims=3, max_side=1100))
    dtype, form = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(FORMS))
    x, residual = (
        data.draw(float_tensors(dtype, shape, device, flavours=KINDS)).detach().requires_grad_()
        for _ in range(2)
    )
    weight = make_tensor(shape[-1:], dtype=dtype, device=device, seed=5).requires_grad_()
    y, total = add_rms_norm(x, residual, weight, offset=form)
    grads = [
        data.draw(float_tensors(dtype, shape, device, flavours=("normal", "constant"))) for _ in range(2)
    ]
    both = torch.autograd.grad((y, total), (x, residual, weight), grads, retain_graph=True)
    check(x, residual, weight, form, *grads, both)
    alone = torch.autograd.grad(y, (x, residual, weight), grads[0], retain_graph=True)
    check(x, residual, weight, form, grads[0], None, alone)
    again = torch.autograd.grad((y, total), (x, residual, weight), grads)
    for a, b in zip(both, again, strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 128, 200, 1024, 1032, 2048, 5120, 16384])
def test_weight_gradient_repeats_for_sizes_that_take_different_kernels(device, dtype, hidden):
    x, residual = (make_tensor((700, hidden), dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight = make_tensor((hidden,), dtype=dtype, device=device, seed=2).requires_grad_()
    grad = make_tensor((700, hidden), dtype=dtype, device=device, seed=3)
    x.requires_grad_()

    def run():
        y, total = add_rms_norm(x, residual, weight)
        return torch.autograd.grad((y, total), (x, weight), (grad, grad))

    first = run()
    for _ in range(3):
        for a, b in zip(first, run(), strict=True):
            assert_bit_equal(a, b)
    y, total = add_rms_norm(x, residual, weight)
    assert_bit_equal(y, rms_norm(total.detach(), weight))
    frozen = torch.autograd.grad(add_rms_norm(x, residual, weight.detach()), x, (grad, grad))[0]
    torch.testing.assert_close(frozen, first[0])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("upstream", ["sum", "strided", "expanded", "only_sum"])
def test_incoming_gradient_layouts(device, rows, upstream):
    x, residual = (make_tensor((rows, 48), device=device, seed=s).requires_grad_() for s in (0, 1))
    weight = make_tensor((48,), device=device, seed=2).requires_grad_()
    y, total = add_rms_norm(x, residual, weight)
    if upstream == "only_sum":
        total.sum().backward()
        assert bool((x.grad == 1).all())
        assert bool((residual.grad == 1).all())
        assert weight.grad is None
        return
    if upstream == "sum":
        loss, grads = y.sum() + total.sum(), [torch.ones_like(y)] * 2
    elif upstream == "strided":
        loss, grads = (y[:, ::2] + total[:, ::2]).sum(), [torch.zeros_like(y)] * 2
        grads[0][:, ::2] = 1.0
    else:
        loss, grads = None, [make_tensor((48,), device=device, seed=4).expand(rows, 48)] * 2
    args = (x, residual, weight)
    got = torch.autograd.grad((y, total) if loss is None else loss, args, grads if loss is None else None)
    want = torch.autograd.grad(add_rms_norm(*args), args, [g.contiguous() for g in grads])
    for a, b in zip(got, want, strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize("device", devices())
def test_gradients_of_a_stack_of_norms_with_other_uses(device):
    """The residual stream is used again, and a gradient that was handed in stays as it is."""
    tensors = [
        make_tensor(s, device=device, seed=i).requires_grad_()
        for i, s in enumerate(((4, 48), (4, 48), (48,)))
    ]

    def block(add_norm, x, r, w):
        for _ in range(3):
            y, r = add_norm(x, r, w)
            x = torch.sin(y) + r * 0.5
        return (x * r + y * y).sum()

    wide = [t.detach().double().requires_grad_() for t in tensors]
    got = torch.autograd.grad(block(add_rms_norm, *tensors), tensors)
    want = torch.autograd.grad(block(reference.add_rms_norm, *wide), wide)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-4)
    y, total = add_rms_norm(*tensors)
    grads = [torch.ones_like(y), torch.ones_like(y)]
    torch.autograd.backward((y, total), grads)
    assert all(bool((g == 1).all()) for g in grads)


def test_only_the_gradients_that_are_needed():
    values = [torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)]
    for which in range(3):
        args = [v.clone().requires_grad_(i == which) for i, v in enumerate(values)]
        sum(t.sum() for t in add_rms_norm(*args)).backward()
        assert [a.grad is not None for a in args] == [i == which for i in range(3)]
        want = [v.clone().double().requires_grad_(i == which) for i, v in enumerate(values)]
        sum(t.sum() for t in reference.add_rms_norm(*want)).backward()
        torch.testing.assert_close(args[which].grad.double(), want[which].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*not a double precision floating point.*")
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    args = [torch.randn(2, 6), torch.randn(2, 6), torch.randn(6)]
    args = [a.requires_grad_() for a in args]
    assert torch.autograd.gradcheck(
        lambda *a: add_rms_norm(*a, offset=form), args, eps=1e-2, atol=3e-3, rtol=2e-3
    )


def test_second_derivative_raises():
    x = torch.randn(2, 8, requires_grad=True)
    y, _ = add_rms_norm(x, torch.ones(2, 8), torch.ones(8))
    (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_same_bits_for_every_instruction_set_and_thread_count(variants):
    for dtype in DTYPES:
        for form in FORMS:
            x, residual = (make_tensor((300, 100), dtype=dtype, seed=s).requires_grad_() for s in (0, 1))
            weight = make_tensor((100,), dtype=torch.float32, seed=2).requires_grad_()

            def run(x=x, residual=residual, weight=weight, form=form):
                outs = add_rms_norm(x, residual, weight, offset=form)
                grads = torch.autograd.grad(outs, (x, weight), [torch.ones_like(o) for o in outs])
                return [o.detach() for o in outs] + list(grads)

            first, *others = variants(run)
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert_bit_equal(b, a)


# PyTorch's own tracer instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", devices())
def test_compiles_in_one_graph(device):
    def step(x, r, w):
        y, total = add_rms_norm(x, r, w, offset=1.0)
        return (y * total).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        args = [make_tensor((rows, 48), device=device, seed=s).requires_grad_() for s in (0, 1)]
        args.append(make_tensor((48,), device=device, seed=2).requires_grad_())
        got = torch.autograd.grad(compiled(*args), args)
        for a, b in zip(got, torch.autograd.grad(step(*args), args), strict=True):
            assert_bit_equal(a, b)


def test_bad_input_is_named():
    x, weight = torch.randn(2, 8), torch.ones(8)
    for args, error, text in [
        ((x, [1.0], weight), ArgumentTypeError, "residual: expected a torch.Tensor"),
        ((x, x.half(), weight), ArgumentTypeError, "residual: "),
        ((x, x[:1], weight), ArgumentError, "residual: "),
        ((x, x.to("meta"), weight), ArgumentError, "meta"),
        ((x, x, torch.ones(7)), ArgumentError, "weight: "),
        ((x.double(), x.double(), weight), ArgumentTypeError, "float64"),
    ]:
        with pytest.raises(error, match=text):
            add_rms_norm(*args)
