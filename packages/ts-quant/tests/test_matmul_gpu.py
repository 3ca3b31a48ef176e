"""Products of packed operands on a GPU that has them, against the emulation."""

import pytest
import torch
from test_matmul import BF16, CODECS, assert_close, exact, weight_of
from torch import nn

from ts_core.testing import assert_bit_equal, make_tensor
from ts_quant.matmul import Matmul, emulated, multiplies
from ts_quant.products import PRODUCTS
from ts_quant.scaled_mm import ROUNDING
from ts_quant.verify import try_product


def here(codec):
    return torch.cuda.is_available() and multiplies(codec, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_that_should_multiply_does(codec):
    """The trial product: nothing is wrong on a GPU of the right kind."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    properties = torch.cuda.get_device_properties(0)
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    if not PRODUCTS[codec].on(properties.major, properties.minor, cuda):
        pytest.skip(f"compute capability {properties.major}.{properties.minor} does not multiply {codec}")
    assert try_product(codec, torch.device("cuda", 0)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cuda", dtype=BF16)]
)
def test_the_trial_does_not_depend_on_where_it_is_made(codec, mode):
    if not here(codec):
        pytest.skip(f"this GPU does not multiply {codec}")
    with mode():
        assert try_product(codec, torch.device("cuda", 0)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 515])
def test_tensor_cores_agree_with_the_emulation(codec, with_bias, rows):
    if not here(codec):
        pytest.skip(f"this GPU does not multiply {codec}")
    weight = weight_of(codec, (1024, 1536), device="cuda")
    x = make_tensor((rows, 1536), dtype=BF16, seed=1, device="cuda")
    bias = make_tensor((1024,), dtype=BF16, seed=2, device="cuda") if with_bias else None
    got = nn.functional.linear(x, weight, bias)
    want, magnitudes = exact(codec, x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
    assert_close(got.cpu(), want, magnitudes, ROUNDING + (2.0**-8 if with_bias else 0))
    with emulated():
        on_gpu = nn.functional.linear(x, weight, bias)
        on_cpu = nn.functional.linear(x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
    if codec == "fp8_row":  # every sum is exact
        assert_bit_equal(on_gpu.cpu(), on_cpu)
    assert_close(on_gpu.cpu(), want, magnitudes, 2.0**-20 + (2.0**-8 if with_bias else 0))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_packed_gradients_agree_with_the_emulation(codec):
    if not here(codec):
        pytest.skip(f"this GPU does not multiply {codec}")
    weight = weight_of(codec, (1024, 1536), device="cuda")
    weight.matmul_options = Matmul(backward=True)
    grads = []
    for context in (torch.no_grad, emulated):  # the first one is for symmetry alone
        x = make_tensor((37, 1536), dtype=BF16, seed=1, device="cuda").requires_grad_()
        with context(), torch.enable_grad():
            y = nn.functional.linear(x, weight)
        (grad,) = torch.autograd.grad(y, x, make_tensor((37, 1024), dtype=BF16, seed=3, device="cuda"))
        grads.append(grad.float())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 2.0**-7


@pytest.mark.gpu
def test_captured_graphs_do_not_share_what_another_one_quantized():
    if not here("fp8_row"):
        pytest.skip("this GPU does not multiply fp8_row")
    weight = weight_of("fp8_row", (64, 64), device="cuda")
    x = make_tensor((16, 64), dtype=BF16, device="cuda")
    nn.functional.linear(x, weight)
    torch.cuda.synchronize()
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([nn.functional.linear(x, weight) for _ in range(2)])
        graphs.append(graph)
    x.copy_(make_tensor((16, 64), dtype=BF16, seed=9, device="cuda"))
    want = nn.functional.linear(x.clone(), weight)
    graphs[1].replay()
    torch.cuda.synchronize()
    for got in outs[1]:
        assert_bit_equal(got, want)
