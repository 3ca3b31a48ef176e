"""The norm of gradients that were measured before they came to the host: the same bits, read once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard, guard_of
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW, grad_sumsq, norms

SHAPES = ((300, 31), (7,), (9000,))


def land(p, share):
    p.grad = share


def pair(dtype, seed, clip):
    made = []
    for measured in (True, False):
        with seeded(seed):
            params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        if measured:
            for p in params:
                guard(p, land)
        made.append((params, OffloadAdamW(params, max_grad_norm=clip, accumulation_steps=None)))
    return made


def give(params, seed, device=None):
    """Gradients, measured on a device if one is named."""
    for i, p in enumerate(params):
        with seeded(seed + i):
            grad = torch.randn(p.shape).to(p.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            p.grad = grad
            if device is not None:
                value = grad_sumsq([grad.to(device).view(-1)]).item()
                guard_of(p).note_square_sum(p.grad, value)


@pytest.mark.parametrize("device", devices())
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    clip=st.sampled_from([0.1, 1e9]),
    seed=st.integers(0, 100),
)
def test_measured_gradients_give_the_bits_of_the_host(device, dtype, clip, seed):
    (ours, a), (theirs, b) = pair(dtype, seed, clip)
    for step in range(2):
        give(ours, 10 * step, device)
        give(theirs, 10 * step)
        a.step()
        b.step()
        assert a.last_grad_norm == b.last_grad_norm
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())


def test_what_was_measured_is_not_read_again(monkeypatch):
    (ours, a), _ = pair(torch.float32, 0, 1.0)
    counts = []

    def counting(grads, threads=0):
        counts.append(len(grads))
        return grad_sumsq(grads, threads)

    monkeypatch.setattr(norms, "grad_sumsq", counting)
    give(ours, 0, "cpu")
    a.step()
    assert counts == []
    give(ours, 0, "cpu")
    ours[1].grad.mul_(2.0)
    a.step()
    assert counts == [1]
    assert a.last_grad_norm == pytest.approx(
        float(torch.cat([p.grad.view(-1) for p in ours]).norm()), rel=1e-6
    )


def test_a_non_finite_measure_is_reported():
    (ours, a), _ = pair(torch.float32, 0, 1.0)
    give(ours, 0)
    with torch._C.DisableTorchFunctionSubclass():
        ours[1].grad[3] = float("nan")
        guard_of(ours[1]).note_square_sum(ours[1].grad, float("nan"))
    a.step()
    assert a.stats()["nonfinite"] == (1, "parameter 1")
