import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import FLAVOURS, assert_bit_equal, assert_near, devices, float_tensors, make_tensor
from ts_fused import reference, rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Products with an angle stay finite, and normal, in every dtype.
TAME = tuple(f for f in FLAVOURS if f not in ("denormal", "large", "mixed_scale"))


def angles(batch, tokens, dim, *, half=False, dtype=torch.float32, device="cpu", scale=1.0):
    """Cosines and sines of a plain rotary embedding, as the modules of transformers make them."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    position = torch.arange(tokens) + torch.arange(batch)[:, None] * 3
    angle = position[..., None] * frequency
    if not half:
        angle = torch.cat([angle, angle], -1)
    return tuple((f(angle) * scale).to(device, dtype) for f in (torch.cos, torch.sin))


def check(got, x, want, reach):
    """A result lies within the roundings of two products and a sum of terms of the size of its head."""
    top = x.detach().double().abs().amax(-1, keepdim=True).cpu() if x.numel() else 0.0
    assert_near(got, want, length=3, scale=reach * top)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_forward_and_backward_are_near_float64(device, data):
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    pairs = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 32, 64])))
    rest = data.draw(st.sampled_from([0, 0, 1, 5, 8, 64]))
    heads, dtype = (
        data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5))),
        data.draw(st.sampled_from(DTYPES)),
    )
    half, interleaved, where = (
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([1, 2])),
    )
    dim = 2 * pairs + rest
    cos, sin = angles(
        data.draw(st.sampled_from([1, batch])), tokens, 2 * pairs, half=half,
        dtype=data.draw(st.sampled_from(DTYPES)), device=device, scale=data.draw(st.sampled_from([1.0, 1.4])),
    )  # fmt: skip
    shapes = [(batch, h, tokens, dim) if where == 1 else (batch, tokens, h, dim) for h in heads]
    q, k = (
        data.draw(float_tensors(dtype, s, device, flavours=TAME)).detach().requires_grad_() for s in shapes
    )
    options = {"unsqueeze_dim": where, "interleaved": interleaved, "rotary_dim": 2 * pairs}
    outs = rotary(q, k, cos, sin, **options)
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    want = reference.rotary(*wide, cos.double(), sin.double(), **options)
    for got, x, truth in zip(outs, (q, k), want, strict=True):
        check(got, x, truth, 3.0)
        assert_bit_equal(got[..., 2 * pairs :], x.detach()[..., 2 * pairs :])
    flavours = ("normal", "sparse", "constant")
    grads = [data.draw(float_tensors(dtype, s, device, flavours=flavours)) for s in shapes]
    got = torch.autograd.grad(outs, (q, k), grads)
    truth = torch.autograd.grad(want, wide, [g.double() for g in grads])
    for a, b, g in zip(got, truth, grads, strict=True):
        check(a, g, b, 3.0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(128, 128), (128, 32), (80, 80), (96, 64), (256, 256), (10, 6)])
def test_sizes_that_take_different_kernels(device, dtype, interleaved, half, dim, size):
    q = make_tensor((2, 9, 33, dim), dtype=dtype, device=device)
    k = make_tensor((2, 9, 2, dim), dtype=dtype, device=device, seed=1)
    cos, sin = angles(2, 9, size, half=half, dtype=dtype, device=device)
    options = {"unsqueeze_dim": 2, "interleaved": interleaved, "rotary_dim": size}
    got = rotary(q, k, cos, sin, **options)
    want = reference.rotary(q.double(), k.double(), cos.double(), sin.double(), **options)
    for a, x, b in zip(got, (q, k), want, strict=True):
        check(a, x, b, 3.0)


def test_no_farther_from_float64_than_the_expression_of_the_modules():
    q, k = (make_tensor((2, 8, 64, 128), dtype=torch.bfloat16, seed=s) for s in (0, 1))
    cos, sin = angles(2, 64, 128, dtype=torch.bfloat16)
    want = reference.rotary(q.double(), k.double(), cos.double(), sin.double())
    ours, theirs = rotary(q, k, cos, sin), reference.rotary(q, k, cos, sin)
    for a, b, truth in zip(ours, theirs, want, strict=True):
        assert (a - truth).norm() <= (b - truth).norm()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("upstream", ["sum", "strided", "transposed", "expanded_heads", "expanded_tokens"])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_incoming_gradient_layouts(device, upstream, tokens):
    q = make_tensor((2, 3, tokens, 16), device=device).requires_grad_()
    k = make_tensor((2, 1, tokens, 16), device=device, seed=1).requires_grad_()
    cos, sin = angles(2, tokens, 16, device=device)
    out = rotary(q, k, cos, sin)
    grads = [torch.ones_like(x) for x in out]
    if upstream == "sum":
        loss = out[0].sum() + out[1].sum()
    elif upstream == "strided":
        loss = out[0][..., ::2].sum() + out[1][..., ::2].sum()
        for grad in grads:
            grad[..., 1::2] = 0.0
    elif upstream == "transposed":
        factors = [make_tensor(x.transpose(1, 3).shape, device=device, seed=3) for x in out]
        loss = sum((x.transpose(1, 3).contiguous() * f).sum() for x, f in zip(out, factors, strict=True))
        grads = [f.transpose(1, 3) for f in factors]
    else:
        side = (2, 1, tokens, 16) if upstream == "expanded_heads" else (2, 1, 1, 16)
        grads = [make_tensor(side, device=device, seed=3).expand(x.shape) for x in out]
        loss = None
    kept = [g.clone() for g in grads]
    got = torch.autograd.grad(out if loss is None else loss, (q, k), grads if loss is None else None)
    want = rotary(*(g.contiguous() for g in grads), cos, -sin)
    for a, b, grad, before in zip(got, want, grads, kept, strict=True):
        assert_bit_equal(a.contiguous(), b)
        assert_bit_equal(grad.contiguous(), before.contiguous())


@pytest.mark.parametrize("device", devices())
def test_views_of_one_projection_and_the_layout_of_results(device):
    packed = make_tensor((2, 5, (4 + 2 + 2) * 16), device=device, dtype=torch.bfloat16)
    q = packed[..., :64].view(2, 5, 4, 16).transpose(1, 2)
    k = packed[..., 64:96].view(2, 5, 2, 16).transpose(1, 2)
    cos, sin = angles(1, 5, 16, dtype=torch.bfloat16, device=device)
    got = rotary(q, k, cos, sin)
    want = rotary(q.contiguous(), k.contiguous(), cos, sin)
    for a, b in zip(got, want, strict=True):
        assert_bit_equal(a.contiguous(), b)
        assert a.transpose(1, 2).is_contiguous()
    # Unaligned and strided elements, and angles without a batch.
    odd = make_tensor((2, 5, 4, 33), device=device)[..., 1::2]
    a, _ = rotary(odd, odd, cos[0].float(), sin[0].float(), unsqueeze_dim=2)
    b, _ = rotary(odd.contiguous(), odd.contiguous(), cos.float(), sin.float(), unsqueeze_dim=2)
    assert_bit_equal(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("device", devices())
def test_both_forms_of_the_angles_have_the_same_bits(device):
    q, k = make_tensor((1, 3, 7, 32), device=device), make_tensor((1, 2, 7, 32), device=device, seed=1)
    cos, sin = angles(1, 7, 32, half=True, device=device)
    for interleaved, wide in (
        (False, [torch.cat([a, a], -1) for a in (cos, sin)]),
        (True, [a.repeat_interleave(2, -1) for a in (cos, sin)]),
    ):
        narrow = rotary(q, k, cos, sin, rotary_dim=32, interleaved=interleaved)
        for a, b in zip(narrow, rotary(q, k, *wide, interleaved=interleaved), strict=True):
            assert_bit_equal(a, b)


@pytest.mark.parametrize("device", devices())
def test_angles_that_differ_within_a_pair(device):
    # Sections of several axes give the two halves of a head angles of their own.
    cos, sin = (make_tensor((2, 5, 24), device=device, seed=s) for s in (4, 5))
    q = make_tensor((2, 3, 5, 24), device=device).requires_grad_()
    for interleaved in (False, True):
        wide = q.detach().double().requires_grad_()
        out, _ = rotary(q, q.detach(), cos, sin, interleaved=interleaved)
        want, _ = reference.rotary(wide, wide.detach(), cos.double(), sin.double(), interleaved=interleaved)
        check(out, q, want, 10.0)
        grad = make_tensor(out.shape, device=device, seed=7)
        (got,) = torch.autograd.grad(out, q, grad)
        (truth,) = torch.autograd.grad(want, wide, grad.double())
        check(got, grad, truth, 10.0)


def test_only_the_gradients_that_are_needed():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    cos, sin = angles(1, 3, 8)
    for needs in ((True, False), (False, True)):
        a, b = (x.detach().requires_grad_(need) for x, need in zip((q, k), needs, strict=True))
        sum(x.sum() for x in rotary(a, b, cos, sin)).backward()
        assert [x.grad is not None for x in (a, b)] == list(needs)
    a, b = q.requires_grad_(), k.requires_grad_()
    grads = torch.autograd.grad(rotary(a, b, cos, sin)[1].sum(), (a, b), allow_unused=True)
    assert grads[0] is None or not grads[0].any()
    assert grads[1].any()
    with torch.no_grad():
        assert not rotary(a, b, cos, sin)[0].requires_grad


@pytest.mark.filterwarnings("ignore:.*not a double precision floating point.*")
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved):
    q, k = torch.randn(1, 2, 3, 10, requires_grad=True), torch.randn(1, 1, 3, 10, requires_grad=True)
    cos, sin = angles(1, 3, 6)
    # The map is linear: a long step costs nothing and keeps fp32's rounding small.
    assert torch.autograd.gradcheck(
        lambda a, b: rotary(a, b, cos, sin, interleaved=interleaved), (q, k), eps=0.5, atol=1e-5, rtol=1e-5
    )


def test_second_derivative_raises():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    out, _ = rotary(q, q.detach(), *angles(1, 2, 4))
    (grad,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_same_bits_for_every_instruction_set_and_thread_count(variants):
    for dtype in DTYPES:
        q, k = make_tensor((2, 300, 3, 44), dtype=dtype), make_tensor((2, 300, 1, 44), dtype=dtype, seed=1)
        cos, sin = angles(2, 300, 40, dtype=dtype)

        def run(q=q, k=k, cos=cos, sin=sin):
            forms = [rotary(q, k, cos, sin, unsqueeze_dim=2, interleaved=i) for i in (False, True)]
            return [x for form in forms for x in form]

        first, *others = variants(run)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert_bit_equal(b, a)


# PyTorch's own tracer instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", devices())
def test_compiles_in_one_graph(device):
    def step(q, k, cos, sin):
        a, b = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return (a * b).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for tokens in (3, 5):
        q, k = (make_tensor((2, tokens, 2, 16), device=device, seed=s).requires_grad_() for s in (0, 1))
        cos, sin = angles(2, tokens, 16, device=device)
        got = torch.autograd.grad(compiled(q, k, cos, sin), (q, k))
        want = torch.autograd.grad(step(q, k, cos, sin), (q, k))
        for a, b in zip(got, want, strict=True):
            assert_bit_equal(a, b)


def test_autocast_does_not_change_it():
    q, (cos, sin) = torch.randn(1, 2, 3, 8), angles(1, 3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = rotary(q, q, cos, sin)
    assert_bit_equal(got, rotary(q, q, cos, sin)[0])


def test_bad_input_is_named():
    q, (cos, sin) = torch.randn(1, 2, 3, 8), angles(1, 3, 8)
    for args, options, error, text in [
        (([1.0], q, cos, sin), {}, ArgumentTypeError, "q: expected a torch.Tensor"),
        ((q.double(), q.double(), cos, sin), {}, ArgumentTypeError, "float64"),
        ((q, q.half(), cos, sin), {}, ArgumentTypeError, "k: "),
        ((q, q, cos, sin.half()), {}, ArgumentTypeError, "sin: "),
        ((q, q, cos.long(), sin), {}, ArgumentTypeError, "cos: "),
        ((q[0], q, cos, sin), {}, ArgumentError, "four dimensions"),
        ((q, q[..., :6], cos, sin), {}, ArgumentError, "k: "),
        ((q, q, cos[:, :2], sin[:, :2]), {}, ArgumentError, "cos: "),
        ((q, q, cos, sin[..., :4]), {}, ArgumentError, "sin: "),
        ((q, q, cos, sin), {"rotary_dim": 10}, ArgumentError, "rotary_dim"),
        ((q, q, cos[..., :5], sin[..., :5]), {}, ArgumentError, "rotary_dim"),
        ((q, q, cos, sin), {"rotary_dim": 1.5}, OptionError, "rotary_dim"),
        ((q, q, cos, sin), {"interleaved": 1}, OptionError, "interleaved"),
        ((q, q, cos, sin), {"unsqueeze_dim": 3}, ArgumentError, "unsqueeze_dim"),
        ((q, q.to("meta"), cos, sin), {}, ArgumentError, "meta"),
        ((q, q, cos.clone().requires_grad_(), sin), {}, ArgumentError, "requires grad"),
    ]:
        with pytest.raises(error, match=text):
            rotary(*args, **options)
