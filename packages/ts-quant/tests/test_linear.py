"""Training through packed weights: gradients of the decoded weight, only packed bytes kept for backward."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_quant import QuantizedTensor, quantize
from ts_quant.matmul import Matmul, emulated, how
from ts_quant.products import PRODUCTS

CODECS = ("nf4", "int8")


def pair(shape, codec="nf4", dtype=torch.float32, device="cpu", seed=0):
    """Return a packed weight and what it stands for."""
    qt = quantize(make_tensor(shape, dtype=dtype, seed=seed, device=device), codec, block_size=32)
    return qt, qt.dequantize()


def run(function, weight, x, bias=None):
    """Return the output and the gradients of x and bias of a loss that is not linear in it."""
    x = x.detach().clone().requires_grad_()
    inputs = [x] if bias is None else [x, bias.detach().clone().requires_grad_()]
    out = function(*[inputs[0], weight, *inputs[1:]])
    out.square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def assert_same_training(function, shape, x, *, codec="nf4", bias=None):
    qt, plain = pair(shape, codec, x.dtype, x.device)
    for got, want in zip(run(function, qt, x, bias), run(function, plain, x, bias), strict=True):
        assert_bit_equal(got, want)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_linear_equals_linear_on_the_decoded_weight(device, data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    leading = data.draw(st.sampled_from([(), (1,), (5,), (2, 3), (0,)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    codec = data.draw(st.sampled_from(CODECS))
    x = make_tensor((*leading, columns), dtype=dtype, device=device, seed=1)
    bias = make_tensor((rows,), dtype=dtype, device=device, seed=2) if data.draw(st.booleans()) else None
    assert_same_training(nn.functional.linear, (rows, columns), x, codec=codec, bias=bias)


def test_linear_keeps_only_packed_tensors(saved_types):
    qt, _ = pair((48, 64))
    x = torch.ones(3, 64, requires_grad=True)
    layer = nn.Linear(64, 48, bias=False)
    layer.weight = nn.Parameter(qt, requires_grad=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in qt.packed.values()}


def test_layers_of_different_sizes_do_not_disturb_each_other():
    """The buffer that weights are decoded into is shared by all layers of a thread."""
    pairs = [pair(shape, seed=seed) for seed, shape in enumerate([(40, 32), (64, 40), (8, 64), (32, 8)])]

    def chain(weights):
        x = make_tensor((3, 32), seed=9).requires_grad_()
        out = x
        for weight in weights:
            out = nn.functional.linear(out, weight).tanh()
        out.sum().backward()
        return out.detach(), x.grad

    for got, want in zip(chain([qt for qt, _ in pairs]), chain([w for _, w in pairs]), strict=True):
        assert_bit_equal(got, want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_linear_without_gradients(mode):
    qt, plain = pair((40, 64))
    x = make_tensor((3, 64), seed=9)
    with mode():
        got, again = nn.functional.linear(x, qt), nn.functional.linear(x[:1], qt)
    assert_bit_equal(got, nn.functional.linear(x, plain))
    assert_bit_equal(again, nn.functional.linear(x[:1], plain))
    with torch.no_grad():
        assert_bit_equal(nn.functional.linear(x, qt), got)


def test_linear_double_backward():
    qt, plain = pair((8, 32))

    def penalty(weight):
        x = make_tensor((4, 32), seed=3).requires_grad_()
        out = nn.functional.linear(x, weight).pow(3).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    assert_bit_equal(penalty(qt), penalty(plain))


def test_linear_under_checkpointing():
    qt, plain = pair((32, 32))

    def call(x, weight):
        return checkpoint(lambda y: nn.functional.linear(y, weight).relu(), x, use_reentrant=False)

    assert_same_training(call, (32, 32), make_tensor((4, 32), seed=2))
    assert isinstance(qt, QuantizedTensor)
    assert type(plain) is torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear_under_autocast(dtype):
    qt, plain = pair((32, 64), dtype=dtype)
    x, bias = make_tensor((4, 64), seed=2), make_tensor((32,), seed=3)

    def call(x, weight, bias):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.linear(x, weight, bias)

    got, want = run(call, qt, x, bias), run(call, plain, x, bias)
    assert got[0].dtype == torch.bfloat16
    for a, b in zip(got, want, strict=True):
        assert_bit_equal(a, b)


def test_linear_refuses_mixed_dtypes_as_pytorch_does():
    qt, plain = pair((32, 64))
    for weight in (qt, plain):
        with pytest.raises(RuntimeError, match=r"dtype|same"):
            nn.functional.linear(torch.ones(2, 64, dtype=torch.float64), weight)


def conv1d(x, weight, bias):
    """As GPT-2's layer: the weight is (in, out) and not transposed."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", CODECS)
def test_addmm_with_a_weight_that_is_not_transposed(device, codec, saved_types):
    x, bias = make_tensor((2, 5, 64), device=device), make_tensor((96,), device=device, seed=1)
    assert_same_training(conv1d, (64, 96), x, codec=codec, bias=bias)
    assert QuantizedTensor in saved_types


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "call",
    [
        torch.bmm,
        torch.matmul,
        lambda x, w: torch.stack([x[i] @ w[i] for i in range(4)]),
        lambda x, w: torch.stack([x[i] @ w[torch.tensor(i)] for i in range(4)]),
        lambda x, w: torch.stack([nn.functional.linear(x[i], w[i].t()) for i in range(4)]),
        lambda x, w: torch.bmm(x[:2], w[:2]),
        lambda x, w: torch.bmm(x, w[torch.tensor([3, 0, 1, 1])]),
        lambda x, w: torch.einsum("ebi,eio->ebo", x, w),
    ],
)
def test_stacked_experts(device, call):
    assert_same_training(call, (4, 32, 24), make_tensor((4, 5, 32), device=device))


@pytest.mark.parametrize("call", [torch.bmm, torch.matmul])
def test_batched_products_keep_the_packed_weight(call, saved_types):
    qt, _ = pair((4, 32, 24))
    call(torch.ones(4, 5, 32, requires_grad=True), qt)
    assert saved_types == [QuantizedTensor]


def test_one_expert_runs_packed(saved_types):
    qt, plain = pair((4, 24, 32))
    x = torch.ones(5, 32, requires_grad=True)
    out = nn.functional.linear(x, qt[2])
    assert_bit_equal(out.detach(), nn.functional.linear(x.detach(), plain[2]))
    assert isinstance(qt[2], QuantizedTensor)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("codec", [*CODECS, "mxfp8", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_without_a_graph_break(kind, codec, fresh_compiler):
    qt, _ = pair((64, 64), codec)
    weight, bias = nn.Parameter(qt, requires_grad=False), make_tensor((64,), seed=4)
    function = nn.functional.linear if kind == "linear" else conv1d
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = make_tensor((3, 64), seed=5)
    for got, want in zip(run(compiled, weight, x, bias), run(function, weight, x, bias), strict=True):
        assert_bit_equal(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_a_module(fresh_compiler):
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(pair((64, 64))[0], requires_grad=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = make_tensor((3, 64), seed=5)
    assert_bit_equal(compiled(x).detach(), layer(x).detach())


def test_the_emulation_holds_in_the_threads_of_autograd():
    found = []
    given = "fp8_row", (64, 64), torch.bfloat16, torch.device("cpu"), Matmul()
    with emulated(), emulated():
        thread = threading.Thread(target=lambda: found.append(how(*given)))
        thread.start()
        thread.join()
    assert found == [(PRODUCTS["fp8_row"], True, False)]
    assert how(*given) is None
