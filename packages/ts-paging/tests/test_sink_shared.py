"""Gradients of a Parameter that several modules use leave the device as one sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard
from ts_core.testing import devices
from ts_paging.sink import GradientSink, _add_to, _Part

cuda = pytest.mark.parametrize("device", [d for d in devices() if "cuda" in str(d)])


@given(st.integers(1, 9), st.booleans(), st.booleans())
def test_a_sum_is_made_in_place_only_where_nobody_looks(size, watched, expanded):
    one = torch.full((1,), 2.0).expand(size) if expanded else torch.full((size,), 2.0)
    seen = one if watched else None
    first, second = _Part(None, None), _Part(None, None)
    first.held, second.held = one.detach(), torch.arange(float(size))
    address = one.data_ptr()
    del one
    _add_to(first, second)
    assert torch.equal(first.held, 2.0 + torch.arange(float(size)))
    assert (first.held.data_ptr() == address) == (not watched and (not expanded or size == 1))
    assert seen is None or torch.equal(seen, torch.full((size,), 2.0))


class _Uses(torch.autograd.Function):
    """A use of a host Parameter by a module on a GPU: its gradient goes to the sink."""

    @staticmethod
    def forward(ctx, sink, parameter, anchor, grads):
        ctx.sink, ctx.parameter, ctx.grads = sink, parameter, grads
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        for each in ctx.grads:
            ctx.sink.add(ctx.parameter, each)
        return None, None, grad, None


@cuda
@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", [False, True])
def test_the_sum_has_the_bits_of_one_made_in_order(uses, dtype, penalty, device):
    torch.manual_seed(0)
    measured = []

    def square_sum(tensors):
        measured.extend(tensors)
        return torch.stack([t.double().square().sum() for t in tensors])

    sink = GradientSink(square_sum=square_sum)
    parameter = nn.Parameter(torch.zeros(5, 7, dtype=dtype))
    guard(parameter, sink.divert)
    sink.shared = {id(parameter)}
    grads = [torch.randn(5, 7, dtype=dtype, device=device) for _ in range(uses)]
    kept = [g.clone() for g in grads]
    anchor = torch.zeros((), device=device, requires_grad=True)
    loss = _Uses.apply(sink, parameter, anchor, grads).sum()
    if penalty:
        loss = loss + (parameter * 0.5).sum().to(device)
    loss.backward()
    parts = [torch.full((5, 7), 0.5, dtype=dtype)] if penalty else []
    parts += [g.cpu() for g in kept]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert parameter.grad.device.type == "cpu"
    assert torch.equal(parameter.grad, total)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))  # others hold them: untouched
    assert len(measured) == (not penalty)
    before = parameter.grad.clone()
    _Uses.apply(sink, parameter, anchor, grads).sum().backward()  # and a second pass adds to it
    again = kept[0].cpu().clone()
    for part in kept[1:]:
        again += part.cpu()
    assert torch.equal(parameter.grad, before + again)
