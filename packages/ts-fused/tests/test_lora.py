import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import RowInt8

from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import assert_bit_equal, assert_near, devices, make_tensor
from ts_fused import LoraAdapter, LoraProjection, lora, lora_linear, lora_linears, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    return (make_tensor(shape, device=device, seed=seed) * scale).to(dtype)


def make(out, inner, ranks, *, dtype=torch.float32, adapter_dtype=None, device="cpu", seed=0, bias=False):
    """A projection with factors of the size that training gives them."""
    place, kind = {"device": device}, adapter_dtype or dtype

    def factor(rows, columns, seed):
        return tensor(rows, columns, dtype=kind, seed=seed, scale=columns**-0.5, **place).requires_grad_()

    adapters = [
        LoraAdapter(
            factor(r, inner, seed + 10 * i), factor(out, r, seed + 10 * i + 1), (0.5, 2.0, 1.0)[i % 3]
        )
        for i, r in enumerate(ranks)
    ]
    weight = tensor(out, inner, dtype=dtype, device=device, seed=seed + 5, scale=inner**-0.5)
    return LoraProjection(
        weight, adapters, tensor(out, dtype=dtype, device=device, seed=seed + 6) if bias else None
    )


def leaves(x, projections):
    return [x, *(t for p in projections for a in p.adapters for t in a[:2])]


def truth(x, projections, grads):
    """Outputs and gradients in float64, from parameters rounded as the function rounds them."""
    wide = x.detach().double().requires_grad_()
    lifted = [
        LoraProjection(
            p.weight.detach().double(),
            [
                LoraAdapter(*(t.detach().to(x.dtype).double().requires_grad_() for t in a[:2]), a.scaling)
                for a in p.adapters
            ],
            None if p.bias is None else p.bias.detach().double(),
        )
        for p in projections
    ]
    outs = [reference.lora_linear(wide, p.weight, p.adapters, p.bias) for p in lifted]
    return outs, torch.autograd.grad(outs, leaves(wide, lifted), [g.double() for g in grads])


def check(got, want, length, dtype):
    """Intermediates round to the dtype of x: errors are of sums in it of terms of the result's size."""
    top = want.abs().max().item() if want.numel() else 0.0
    assert_near(got, want, length=length, scale=4.0 * top + 1e-3, dtype=dtype, accumulate=dtype)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_forward_and_backward_are_near_float64(device, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    adapter_dtype = data.draw(st.sampled_from([dtype, torch.float32]))
    inner, rows = (
        data.draw(st.integers(1, 70)),
        data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=2)),
    )
    projections = [
        make(
            data.draw(st.integers(1, 70)), inner, data.draw(st.lists(st.integers(1, 20), max_size=3)),
            dtype=dtype, adapter_dtype=adapter_dtype, device=device, seed=100 * i,
            bias=data.draw(st.booleans()),
        )
        for i in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    x = tensor(*rows, inner, dtype=dtype, device=device, seed=7).requires_grad_()
    outs = lora_linears(x, projections)
    grads = [tensor(*out.shape, dtype=dtype, device=device, seed=50 + i) for i, out in enumerate(outs)]
    got = torch.autograd.grad(outs, leaves(x, projections), grads)
    want_outs, want = truth(x, projections, grads)
    for a, b in zip(outs, want_outs, strict=True):
        check(a, b, 12, dtype)
    for a, b, leaf in zip(got, want, leaves(x, projections), strict=True):
        assert a.dtype == leaf.dtype
        check(a, b, 16, dtype)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rank", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks(device, rank, dtype):
    projection = make(96, 128, [rank], dtype=dtype, adapter_dtype=torch.float32, device=device)
    x = tensor(2, 5, 128, dtype=dtype, device=device).requires_grad_()
    y = lora_linear(x, projection.weight, projection.adapters)
    grad = tensor(*y.shape, dtype=dtype, device=device, seed=9)
    got = torch.autograd.grad(y, leaves(x, [projection]), grad)
    (want_y,), want = truth(x, [projection], [grad])
    check(y, want_y, 12, dtype)
    for a, b in zip(got, want, strict=True):
        check(a, b, 16, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_equals_its_projections_one_by_one(dtype):
    projections = [make(n, 64, [4], dtype=dtype, seed=i) for i, n in enumerate((64, 32, 32))]
    x = tensor(3, 64, dtype=dtype).requires_grad_()
    together = lora_linears(x, projections)
    apart = [lora_linear(x, p.weight, p.adapters, p.bias) for p in projections]
    grads = [tensor(*y.shape, dtype=dtype, seed=3) for y in together]
    got = torch.autograd.grad(together, leaves(x, projections), grads)
    want = torch.autograd.grad(apart, leaves(x, projections), grads)
    for a, b in zip((*together, *got), (*apart, *want), strict=True):
        torch.testing.assert_close(
            a,
            b,
            rtol=3e-2 if dtype == torch.bfloat16 else 1e-5,
            atol=2e-2 if dtype == torch.bfloat16 else 1e-5,
        )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", [0, 1, 2])
def test_a_packed_base_equals_its_decoded_matrix(device, dtype, adapters):
    projection = make(48, 64, [4] * adapters, dtype=dtype, device=device, bias=True)
    packed = torch.nn.Parameter(RowInt8.of(projection.weight), requires_grad=False)
    x = tensor(2, 3, 64, dtype=dtype, device=device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = lora_linear(x, packed, projection.adapters, projection.bias)
    want = lora_linear(x, packed.dequantize(), projection.adapters, projection.bias)
    assert_bit_equal(y, want)
    # What stays alive is the packed bytes and no decoded matrix.
    assert not any(t.shape == projection.weight.shape and t.dtype == dtype for t in saved)
    assert any(t is not None and t.dtype == torch.int8 for t in saved)
    grad = tensor(*y.shape, dtype=dtype, device=device, seed=9)
    args = leaves(x, [projection])
    for a, b in zip(torch.autograd.grad(y, args, grad), torch.autograd.grad(want, args, grad), strict=True):
        assert_bit_equal(a, b)


class OwnGradient(RowInt8):
    """A packed weight that computes the input gradient itself."""

    def input_gradient(self, grad):
        return 2 * grad @ self.dequantize(grad.dtype)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return OwnGradient(inner["codes"], inner["scale"], context)


@pytest.mark.parametrize("projections", [1, 2])
def test_a_packed_base_may_compute_the_input_gradient_itself(projections):
    x = tensor(3, 64).requires_grad_()
    bases = [make(48, 64, [4], seed=i) for i in range(projections)]
    grads = []
    for kind in (OwnGradient, RowInt8):
        held = [torch.nn.Parameter(RowInt8.of(base.weight), requires_grad=False) for base in bases]
        weights = [kind(w.codes, w.scale, w.dtype) for w in held]
        group = [LoraProjection(w, base.adapters) for w, base in zip(weights, bases, strict=True)]
        outs = lora_linears(x, group)
        grads.append(torch.autograd.grad(sum(out.sum() for out in outs), x)[0])
    base_only = sum(torch.ones(3, 48) @ w.dequantize() for w in weights)
    torch.testing.assert_close(grads[0], grads[1] + base_only, rtol=1e-5, atol=1e-4)


def test_a_matrix_packed_by_ts_quant():
    quant = pytest.importorskip("ts_quant", exc_type=ImportError)
    for dtype in (torch.float32, torch.bfloat16):
        for codec in ("nf4", "int8"):
            projection = make(48, 64, [4], dtype=dtype)
            packed = torch.nn.Parameter(quant.quantize(projection.weight, codec), requires_grad=False)
            x = tensor(2, 64, dtype=dtype).requires_grad_()
            y = lora_linear(x, packed, projection.adapters)
            want = lora_linear(x, packed.dequantize(), projection.adapters)
            assert_bit_equal(y, want)
            args = leaves(x, [projection])
            got = torch.autograd.grad(y.sum(), args)
            for a, b in zip(got, torch.autograd.grad(want.sum(), args), strict=True):
                assert_bit_equal(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("upstream", ["sum", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_incoming_gradient_layouts(device, upstream, rows):
    projection = make(24, 16, [3, 2], device=device, bias=True)
    x = tensor(2, rows, 16, device=device).requires_grad_()
    args = leaves(x, [projection])
    y = lora_linear(x, projection.weight, projection.adapters, projection.bias)
    if upstream == "sum":
        loss, grad = y.sum(), torch.ones_like(y)
    elif upstream == "strided":
        loss, grad = y[..., ::2].sum(), torch.zeros_like(y)
        grad[..., ::2] = 1.0
    elif upstream == "transposed":
        factor = tensor(2, 24, rows, device=device, seed=3)
        loss, grad = (y.transpose(1, 2).contiguous() * factor).sum(), factor.transpose(1, 2)
    else:
        loss, grad = None, tensor(24, device=device, seed=3).expand(y.shape)
    kept = grad.clone()
    got = torch.autograd.grad(
        y if loss is None else loss, args, grad if loss is None else None, retain_graph=True
    )
    want = torch.autograd.grad(y, args, grad.contiguous())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_bit_equal(grad.contiguous(), kept.contiguous())


@pytest.mark.parametrize("device", devices())
def test_inputs_of_any_layout(device):
    projection = make(24, 16, [3], device=device)
    base = tensor(4, 6, 32, device=device)
    for view in (
        base[..., :16],
        base[..., ::2],
        base.transpose(0, 1)[..., :16],
        base[:1, :1, :16].expand(4, 6, 16),
        base[0, 0, :16],
    ):
        x = view.detach().requires_grad_()
        y = lora_linear(x, projection.weight, projection.adapters)
        packed = view.contiguous().requires_grad_()
        want = lora_linear(packed, projection.weight, projection.adapters)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        (got,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(want.sum(), packed)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_keeps_the_input_itself_and_no_copy(device):
    projection = make(24, 16, [3], dtype=torch.bfloat16, adapter_dtype=torch.float32, device=device)
    x = tensor(4, 16, dtype=torch.bfloat16, device=device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lora_linear(x, projection.weight, projection.adapters)
    known = {t.data_ptr() for t in (x, projection.weight, *projection.adapters[0][:2])}
    others = [t for t in saved if t.data_ptr() not in known]
    assert [tuple(t.shape) for t in others] == [(4, 3)]
    assert all(t.dtype == torch.bfloat16 for t in others)


def test_only_the_gradients_that_are_needed():
    fresh = make(8, 6, [2], bias=True)
    values = [torch.randn(3, 6), *fresh.adapters[0][:2], fresh.bias]
    for which in range(4):
        x, a, b, bias = (v.detach().clone().requires_grad_(i == which) for i, v in enumerate(values))
        lora_linear(x, fresh.weight, [LoraAdapter(a, b, 2.0)], bias).sum().backward()
        assert [t.grad is not None for t in (x, a, b, bias)] == [i == which for i in range(4)]
        x2, a2, b2, bias2 = (v.detach().clone().requires_grad_() for v in values)
        reference.lora_linear(x2, fresh.weight, [(a2, b2, 2.0)], bias2).sum().backward()
        pairs = ((x, x2), (a, a2), (b, b2), (bias, bias2))
        torch.testing.assert_close(pairs[which][0].grad, pairs[which][1].grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not lora_linear(x.requires_grad_(), fresh.weight, fresh.adapters).requires_grad


def test_an_output_that_is_not_used():
    projections = [make(8, 6, [2], seed=i) for i in range(3)]
    x = torch.randn(3, 6, requires_grad=True)
    used = lora_linears(x, projections)[1]
    args = leaves(x, projections)
    got = torch.autograd.grad(used.sum(), args, allow_unused=True)
    alone = lora_linear(x, projections[1].weight, projections[1].adapters)
    want = torch.autograd.grad(alone.sum(), leaves(x, projections[1:2]))
    for a, b in zip((got[0], got[3], got[4]), want, strict=True):
        torch.testing.assert_close(a, b)
    assert [got[i] for i in (1, 2, 5, 6)] == [None] * 4  # zeros would let an optimizer decay them


def test_the_only_adapter_is_of_an_output_that_is_not_used():
    adapted, bare = make(8, 6, [2]), make(8, 6, [], seed=1)
    x = torch.randn(3, 6, requires_grad=True)
    used = lora_linears(x, [adapted, bare])[1]
    got = torch.autograd.grad(used.sum(), [x, *adapted.adapters[0][:2]], allow_unused=True)
    torch.testing.assert_close(got[0], torch.autograd.grad((x @ bare.weight.t()).sum(), x)[0])
    assert got[1:] == (None, None)


def test_outputs_may_be_changed_in_place():
    x = torch.randn(3, 2, 6, requires_grad=True)
    outs = lora_linears(x, [make(8, 6, [2], seed=i) for i in range(2)])
    want = torch.autograd.grad((outs[0] * 3).sum() + outs[1].sum(), x, retain_graph=True)[0]
    outs[0].mul_(3)
    torch.testing.assert_close(torch.autograd.grad(outs[0].sum() + outs[1].sum(), x)[0], want)


def test_autocast_decides_the_dtype_and_nothing_else():
    projection = make(8, 6, [2], adapter_dtype=torch.float32, bias=True)
    base = LoraProjection(projection.weight.bfloat16(), projection.adapters, projection.bias.bfloat16())
    for weight, bias in (projection[::2], base[::2]):
        for dtype in (torch.float32, torch.bfloat16):
            x = tensor(3, 6, dtype=dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = lora_linear(x, weight, projection.adapters, bias)
                grads = torch.autograd.grad(y.sum(), [x, *projection.adapters[0][:2]])
            assert y.dtype == torch.bfloat16
            assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
            x16 = x.detach().bfloat16().requires_grad_()
            want = lora_linear(x16, base.weight, projection.adapters, base.bias)
            assert_bit_equal(y, want)
            for a, b in zip(
                grads, torch.autograd.grad(want.sum(), [x16, *projection.adapters[0][:2]]), strict=True
            ):
                assert_bit_equal(a, b.to(a.dtype))


def test_autocast_decodes_a_packed_base_of_another_dtype():
    projection = make(8, 6, [2], bias=True)
    packed = torch.nn.Parameter(RowInt8.of(projection.weight), requires_grad=False)
    results = []
    for weight in (packed, packed.dequantize()):
        x = tensor(3, 6).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = lora_linear(x, weight, projection.adapters, projection.bias)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *projection.adapters[0][:2]])])
    assert results[0][0].dtype == torch.bfloat16
    for got, want in zip(*results, strict=True):
        assert_bit_equal(got, want)


def test_gradcheck():
    projections = [make(5, 4, ranks, seed=i, bias=True) for i, ranks in enumerate(([2], [], [1, 3]))]
    wide = [
        LoraProjection(
            p.weight.double(),
            [
                LoraAdapter(*(t.detach().double().requires_grad_() for t in a[:2]), a.scaling)
                for a in p.adapters
            ],
            p.bias.double().requires_grad_(),
        )
        for p in projections
    ]
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    args = [*leaves(x, wide), *(p.bias for p in wide)]

    def call(*args):
        del args
        return lora_linears(x, wide)

    assert torch.autograd.gradcheck(call, args)


def test_second_derivative_raises():
    projection = make(8, 6, [2])
    x = torch.randn(3, 6, requires_grad=True)
    y = lora_linear(x, projection.weight, projection.adapters)
    (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradients_own_their_memory():
    projections = [make(8, 6, [2], seed=i) for i in range(2)]
    x = torch.randn(3, 6, requires_grad=True)
    sum(y.sum() for y in lora_linears(x, projections)).backward()
    grads = [t.grad for t in leaves(x, projections)]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)
    assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_several_factors_by_one_product_or_by_one_each(device, adapter_dtype, monkeypatch):
    options = {"dtype": torch.bfloat16, "adapter_dtype": adapter_dtype, "device": device}
    projections = [make(24, 16, [3, 2], **options), make(8, 16, [5], seed=40, **options)]
    x = tensor(4, 16, dtype=torch.bfloat16, device=device).requires_grad_()
    inputs = leaves(x, projections)
    grads = [tensor(4, n, dtype=torch.bfloat16, device=device, seed=n) for n in (24, 8)]
    want = truth(x, projections, grads)[1]
    for limit in (0, 1 << 30):
        monkeypatch.setattr(lora, "_READ_ONCE", limit)
        outs = lora_linears(x, projections)
        got = torch.autograd.grad(outs, inputs, grads)
        assert [g.dtype for g in got] == [t.dtype for t in inputs]
        assert len({g.untyped_storage().data_ptr() for g in got}) == len(got)
        for g, w in zip(got, want, strict=True):
            check(g, w, 60, torch.bfloat16)


def test_what_lies_in_memory_does_not_reach_a_result():
    """Products that overwrite take the shape of a tensor, and none of its values."""
    projection = make(24, 16, [3])
    x = tensor(4, 16).requires_grad_()
    with torch.no_grad():
        projection.adapters[0].a[1] = float("inf")
        projection.adapters[0].b[5] = float("nan")
    out = lora_linear(x, projection.weight, projection.adapters)
    grad = torch.ones_like(out)
    grad[:, 5] = 0.0
    of_b = torch.autograd.grad(out, projection.adapters[0].b, grad)[0]
    low = x.detach() @ projection.adapters[0].a.detach().t()
    torch.testing.assert_close(of_b[:5], 0.5 * low.sum(0).expand(5, -1), equal_nan=True)


# PyTorch's own tracer instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("device", devices())
def test_compiles_in_one_graph(device):
    projections = [make(8, 6, [2], seed=i, device=device) for i in range(2)]

    def step(x, weights, factors):
        given = [
            LoraProjection(w, [LoraAdapter(a, b, 0.5)]) for w, (a, b) in zip(weights, factors, strict=True)
        ]
        y, z = lora_linears(x, given)
        return (y * z).sum() + lora_linear(x, weights[0], given[0].adapters).sum()

    weights = [p.weight for p in projections]
    factors = [p.adapters[0][:2] for p in projections]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        x = tensor(rows, 6, device=device).requires_grad_()
        got = torch.autograd.grad(compiled(x, weights, factors), leaves(x, projections))
        want = torch.autograd.grad(step(x, weights, factors), leaves(x, projections))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_bad_input_is_named():
    fresh = make(8, 6, [2])
    x, w, (a, b, _) = torch.randn(3, 6), fresh.weight, fresh.adapters[0]
    for args, error, text in [
        (([1.0], w, fresh.adapters), ArgumentTypeError, "x: expected a floating tensor"),
        ((x.long(), w, fresh.adapters), ArgumentTypeError, "int64"),
        ((x, 3, fresh.adapters), ArgumentTypeError, "weight: "),
        ((x.half(), w, fresh.adapters), ArgumentTypeError, "the dtype of x"),
        ((x, w.clone().requires_grad_(), fresh.adapters), ArgumentError, "frozen"),
        ((x[:, :5], w, fresh.adapters), ArgumentError, "out_features, 5"),
        ((x, w, [LoraAdapter(b, a)]), ArgumentError, "rank, 6"),
        ((x, w, [LoraAdapter(a[:0], b[:, :0])]), ArgumentError, "rank >= 1"),
        ((x, w, [LoraAdapter(a, b, float("nan"))]), ArgumentError, "scaling"),
        ((x, w, [LoraAdapter(a.long(), b)]), ArgumentTypeError, "a: "),
        ((x, w, [LoraAdapter(a, [1.0])]), ArgumentTypeError, "b: "),
        ((x, w, [LoraAdapter(a.to("meta"), b)]), ArgumentError, "meta"),
        ((x, w.to("meta"), []), ArgumentError, "meta"),
        ((x, w, [], torch.ones(7)), ArgumentError, "bias: "),
        ((x, w, [], 3), ArgumentTypeError, "bias: "),
        ((torch.tensor(1.0), w, []), ArgumentError, "at least one"),
    ]:
        with pytest.raises(error, match=text):
            lora_linear(*args)
    with pytest.raises(ArgumentError, match="0 projections"):
        lora_linears(x, [])
