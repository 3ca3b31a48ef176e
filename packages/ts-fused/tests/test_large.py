"""Tensors of more than 2^31 elements: offsets must not be computed in 32 bits."""

import pytest
import torch

from ts_core.testing import assert_bit_equal, gpu
from ts_fused import add_rms_norm, gated_mlp, rms_norm, rotary

ROWS, WIDTH, EDGE = 1_048_578, 2048, 4

pytestmark = [
    gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 70 << 30,
        reason="needs a CUDA device with 70 GiB",
    ),
]


@pytest.fixture(autouse=True)
def empty():
    yield
    torch.cuda.empty_cache()


def large(seed, *shape):
    """Random at both ends, a constant between them; with guards before and after."""
    shape = shape or (ROWS, WIDTH)
    count = torch.Size(shape).numel()
    buffer = torch.full((count + 16384,), 0.5, dtype=torch.bfloat16, device="cuda")
    tensor = buffer[8192 : 8192 + count].view(shape)
    generator = torch.Generator("cuda").manual_seed(seed)
    for end in (tensor[:EDGE], tensor[-EDGE:]):
        end.copy_(torch.randn(end.shape, generator=generator, device="cuda"))
    return tensor


def check_ends(whole, parts):
    """Both ends of a result are those of the same operation on the ends alone."""
    for (head, tail), whole_part in zip(parts, whole, strict=True):
        assert_bit_equal(whole_part[:EDGE], head)
        assert_bit_equal(whole_part[-EDGE:], tail)


def ends(function, tensors):
    return list(
        zip(function(*(t[:EDGE] for t in tensors)), function(*(t[-EDGE:] for t in tensors)), strict=True)
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(activation):
    def run(gate, up, grad):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        y = gated_mlp(gate, up, activation)
        return (y.detach(), *torch.autograd.grad(y, (gate, up), grad))

    tensors = [large(seed) for seed in range(3)]
    check_ends(run(*tensors), ends(run, tensors))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(offset):
    weight = torch.randn(WIDTH, device="cuda").bfloat16()

    def run(x, residual, grad):
        x = x.detach().requires_grad_()
        y, total = add_rms_norm(x, residual, weight, offset=offset)
        (grad_x,) = torch.autograd.grad((y, total), x, (grad, grad))
        return y.detach(), grad_x, rms_norm(x.detach(), weight, offset=offset)

    tensors = [large(seed) for seed in range(3)]
    check_ends(run(*tensors), ends(run, tensors))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    shape = (ROWS, 1, 16, 128)
    angle = torch.randn(1, 1, 128, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def run(q, k):
        return rotary(q, k[:, :, :1], cos, sin, unsqueeze_dim=2, interleaved=interleaved)

    tensors = [large(seed, *shape) for seed in range(2)]
    check_ends(run(*tensors), ends(run, tensors))
