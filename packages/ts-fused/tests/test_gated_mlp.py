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
from ts_fused import gated_mlp, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu_tanh")
# Products of three stay finite and normal in every dtype.
TAME = tuple(f for f in FLAVOURS if f not in ("denormal", "large", "mixed_scale"))
# Roundings of sigmoid, its argument and the products.
LENGTH = 24

activations = st.sampled_from(ACTIVATIONS)


def check(gate, up, activation, grad, y, grad_gate, grad_up):
    """Compare with float64, within the roundings of one fp32 evaluation."""
    x, u = (t.detach().double().requires_grad_() for t in (gate, up))
    want = reference.gated_mlp(x, u, activation)
    wants = torch.autograd.grad(want, (x, u), grad.double())
    a, b, g = x.detach().abs(), u.detach().abs(), grad.double().abs()
    assert_near(y, want, length=LENGTH, scale=(a * b).cpu())
    # The slope is near 1 and a sum of terms up to x^2 in the fp32 exponent of gelu.
    assert_near(grad_gate, wants[0], length=LENGTH, scale=(g * b * (1.0 + a)).cpu())
    assert_near(grad_up, wants[1], length=LENGTH, scale=(g * a).cpu())


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_forward_and_backward_are_near_float64(device, data):
    shape = data.draw(shapes(max_dims=3, max_side=600))
    dtype, activation = data.draw(st.sampled_from(DTYPES)), data.draw(activations)
    gate, up = (
        data.draw(float_tensors(dtype, shape, device, flavours=TAME)).detach().requires_grad_()
        for _ in range(2)
    )
    grad = data.draw(float_tensors(dtype, shape, device, flavours=("normal", "sparse", "constant")))
    y = gated_mlp(gate, up, activation)
    check(gate, up, activation, grad, y, *torch.autograd.grad(y, (gate, up), grad))


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_pair_has_the_bits_of_its_halves(device, data):
    shape = data.draw(shapes(max_dims=2, max_side=300))
    dtype, activation = data.draw(st.sampled_from(DTYPES)), data.draw(activations)
    wide = (*shape[:-1], 2 * shape[-1])
    pair = data.draw(float_tensors(dtype, wide, device, flavours=TAME)).detach().requires_grad_()
    gate, up = (half.detach().clone().requires_grad_() for half in pair.chunk(2, -1))
    grad = make_tensor(shape, dtype=dtype, device=device, seed=3)
    y, want = gated_mlp(pair, activation=activation), gated_mlp(gate, up, activation)
    assert_bit_equal(y, want)
    (got,) = torch.autograd.grad(y, pair, grad)
    assert_bit_equal(got, torch.cat(torch.autograd.grad(want, (gate, up), grad), -1))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 13824), (700, 1000), (1, 20000), (2, 5, 101)])
def test_sizes_that_take_different_kernels(device, dtype, activation, shape):
    gate = (make_tensor(shape, dtype=dtype, device=device) * 3).requires_grad_()
    up = make_tensor(shape, dtype=dtype, device=device, seed=1).requires_grad_()
    grad = make_tensor(shape, dtype=dtype, device=device, seed=2)
    y = gated_mlp(gate, up, activation)
    check(gate, up, activation, grad, y, *torch.autograd.grad(y, (gate, up), grad))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_whole_range_of_the_activation(device, activation):
    gate = torch.cat([torch.linspace(-120, 120, 40001), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-38])])
    gate = gate.to(device).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    y = gated_mlp(gate, up, activation)
    grads = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    inside = gate.detach().abs() < 1e3
    for t in (y, *grads):
        assert t[inside].isfinite().all()
    assert y[gate > 20].eq(gate[gate > 20]).all()
    check(*(t[inside] for t in (gate, up)), activation, torch.ones_like(y[inside]),
          *(t[inside] for t in (y, *grads)))  # fmt: skip
    for x, want in ((1e30, 1e30), (-1e30, 0.0)):
        assert y.detach()[gate.detach() == x].item() == pytest.approx(want, rel=1e-6)
    nan = torch.full((17,), float("nan"), device=device)
    assert gated_mlp(nan, torch.zeros_like(nan), activation).isnan().all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_at_the_ends_of_the_range(device, dtype, activation):
    """Where the formula has infinity times zero, the value and the slope are what they tend to."""
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    inf, small = float("inf"), tiny / 4
    # gate, its activation, the slope there
    rows = [
        (inf, inf, 1.0),
        (top, top, 1.0),
        (-top, 0.0, 0.0),
        (-inf, 0.0, 0.0),
        (0.0, 0.0, 0.5),
        (-0.0, 0.0, 0.5),
    ]
    rows += [(-x, 0.0, 0.0) for x in (2e13, 3e13, 1e20, 3e38) if x < top]
    rows += [(x, x / 2, 0.5) for x in (small, -small, tiny, -tiny)]
    rows += [(200.0, 200.0, 1.0), (-200.0, 0.0, 0.0)]
    gate, value, slope = (torch.tensor(c, dtype=torch.float64).repeat(3) for c in zip(*rows, strict=True))
    x = gate.to(device, dtype).requires_grad_()
    up = torch.full_like(x, 2.0).requires_grad_()
    y = gated_mlp(x, up, activation)
    grad_x, grad_up = torch.autograd.grad(y, (x, up), torch.full_like(y, 3.0))
    for got, want in ((y, 2 * value), (grad_x, 6 * slope), (grad_up, 3 * value)):
        want = want.to(dtype)  # what is beyond its range is infinite
        torch.testing.assert_close(got.detach().cpu(), want, rtol=1e-6, atol=float(tiny) / 8)
    pair = torch.stack([x.detach(), up.detach()]).requires_grad_()
    whole = torch.autograd.grad(
        gated_mlp(pair.flatten(), activation=activation), pair, torch.full_like(y, 3.0)
    )[0]
    assert_bit_equal(whole, torch.stack([grad_x, grad_up]))


@pytest.mark.parametrize("device", devices())
def test_nothing_is_kept_where_no_gradient_is_asked_for(device):
    x = make_tensor((4, 48), dtype=torch.float32, device=device)
    for y in (gated_mlp(x, x), gated_mlp(x)):
        assert y.grad_fn is None
    with torch.no_grad():
        assert gated_mlp(x.requires_grad_(), x).grad_fn is None


def test_the_tanh_form_and_not_the_exact_one():
    x = torch.linspace(-4, 4, 1001)
    exact, tanh = (torch.nn.functional.gelu(x.double(), approximate=a) for a in ("none", "tanh"))
    got = gated_mlp(x, torch.ones_like(x), "gelu_tanh")
    assert (got - tanh).abs().max() < 1e-6 < 1e-4 < (exact - tanh).abs().max()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_farther_from_float64_than_the_expression_of_the_modules(activation):
    gate, up = (make_tensor((64, 512), dtype=torch.bfloat16, seed=s) for s in (0, 1))
    want = reference.gated_mlp(gate.double(), up.double(), activation)
    ours, theirs = gated_mlp(gate, up, activation), reference.gated_mlp(gate, up, activation)
    assert (ours - want).norm() <= (theirs - want).norm()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("upstream", ["sum", "strided", "transposed", "expanded", "expanded_rows"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_incoming_gradient_layouts(device, activation, upstream, rows):
    gate = make_tensor((2, rows, 24), device=device).requires_grad_()
    up = make_tensor((2, rows, 24), device=device, seed=1).requires_grad_()
    y = gated_mlp(gate, up, activation)
    if upstream == "sum":
        loss, grad = y.sum(), torch.ones_like(y)
    elif upstream == "strided":
        loss, grad = y[..., ::2].sum(), torch.zeros_like(y)
        grad[..., ::2] = 1.0
    elif upstream == "transposed":
        factor = make_tensor((2, 24, rows), device=device, seed=3)
        loss, grad = (y.transpose(1, 2).contiguous() * factor).sum(), factor.transpose(1, 2)
    else:
        side = (24,) if upstream == "expanded" else (2, 1, 24)
        loss, grad = None, make_tensor(side, device=device, seed=3).expand(y.shape)
    kept = grad.clone()
    got = torch.autograd.grad(y if loss is None else loss, (gate, up), grad if loss is None else None)
    packed = grad.contiguous()
    want = torch.autograd.grad(gated_mlp(gate, up, activation), (gate, up), packed)
    for a, b in zip(got, want, strict=True):
        assert_bit_equal(a, b)
    assert_bit_equal(grad.contiguous(), kept.contiguous())


@pytest.mark.parametrize("device", devices())
def test_strided_inputs(device):
    base = make_tensor((3, 7, 64), device=device)
    for view in (
        base[..., :24],
        base[..., 1:25],
        base[..., ::2],
        base.transpose(0, 1),
        base[:1].expand(3, 7, 64),
    ):
        got = gated_mlp(view, view.flip(0))
        assert_bit_equal(got, gated_mlp(view.contiguous(), view.flip(0).contiguous()))


@pytest.mark.parametrize("device", devices())
def test_saves_only_its_two_inputs(device):
    gate, up = (make_tensor((4, 16), device=device, seed=s).requires_grad_() for s in (0, 1))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        gated_mlp(gate, up)
    assert saved == [gate.data_ptr(), up.data_ptr()]


def test_only_the_gradients_that_are_needed():
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    for needs in ((True, False), (False, True)):
        a, b = (x.clone().requires_grad_(need) for x, need in zip((gate, up), needs, strict=True))
        gated_mlp(a, b).sum().backward()
        assert [x.grad is not None for x in (a, b)] == list(needs)
    with torch.no_grad():
        assert not gated_mlp(a, b).requires_grad


@pytest.mark.filterwarnings("ignore:.*not a double precision floating point.*")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    gate, up = torch.randn(2, 9, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    options = {"eps": 1e-2, "atol": 2e-3, "rtol": 1e-3}
    assert torch.autograd.gradcheck(lambda a, b: gated_mlp(a, b, activation), (gate, up), **options)
    pair = torch.randn(2, 18, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: gated_mlp(p, activation=activation), (pair,), **options)


def test_second_derivative_raises():
    gate = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(gated_mlp(gate).pow(2).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_same_bits_for_every_instruction_set_and_thread_count(variants):
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            gate = make_tensor((30, 9001), dtype=dtype).requires_grad_()
            up = make_tensor((30, 9001), dtype=dtype, seed=1).requires_grad_()

            def run(gate=gate, up=up, activation=activation):
                y = gated_mlp(gate, up, activation)
                return (y.detach(), *torch.autograd.grad(y, (gate, up), torch.ones_like(y)))

            first, *others = variants(run)
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert_bit_equal(b, a)


# PyTorch's own tracer instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", devices())
def test_compiles_in_one_graph(device):
    def step(gate, up):
        return (gated_mlp(gate, up) * gated_mlp(torch.cat([gate, up], -1), activation="gelu_tanh")).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        gate, up = (make_tensor((rows, 16), device=device, seed=s).requires_grad_() for s in (0, 1))
        got = torch.autograd.grad(compiled(gate, up), (gate, up))
        want = torch.autograd.grad(step(gate, up), (gate, up))
        for a, b in zip(got, want, strict=True):
            assert_bit_equal(a, b)


def test_autocast_does_not_change_it():
    gate = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gated_mlp(gate, gate)
    assert_bit_equal(got, gated_mlp(gate, gate))


def test_bad_input_is_named():
    x = torch.randn(2, 8)
    for args, error, text in [
        (([1.0], x), ArgumentTypeError, "gate: expected a torch.Tensor"),
        ((x, 3), ArgumentTypeError, "up: expected a torch.Tensor"),
        ((x.double(), x.double()), ArgumentTypeError, "float64"),
        ((x, x.half()), ArgumentTypeError, "up: "),
        ((x, x[:1]), ArgumentError, r"shape \(2, 8\)"),
        ((x[:, :0], x[:, :0]), ArgumentError, "last dimension"),
        ((x[:, :7],), ArgumentError, "even last dimension"),
        ((torch.tensor(1.0),), ArgumentError, "even last dimension"),
        ((x, x.to("meta")), ArgumentError, "meta"),
        ((x, x, "gelu"), OptionError, "activation"),
    ]:
        with pytest.raises(error, match=text):
            gated_mlp(*args)
