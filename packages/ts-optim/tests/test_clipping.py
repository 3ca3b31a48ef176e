"""Clipping by hand, on plain and on guarded parameters, as it is done in training loops."""

import copy
import math

import pytest
import torch
from torch import nn

from ts_core.guard import guard, guard_of
from ts_core.testing import seeded
from ts_optim import OffloadAdamW


def land(parameter, share):
    parameter.grad = share if parameter.grad is None else parameter.grad + share
    for hook in list(guard_of(parameter).landed_hooks.values()):
        hook(parameter)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.body(self.table(ids)).tanh()).square().mean()


def pair(guarded):
    with seeded(0):
        model = Tied()
    other = copy.deepcopy(model)
    a = OffloadAdamW(model.parameters(), lr=1e-2, accumulation_steps=None)
    b = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for p in model.parameters() if guarded else ():
        guard(p, land)
    return (model, a), (other, b)


def once(model, limit, **options):
    return nn.utils.clip_grad_norm_(model.parameters(), limit, **options)


def twice(model, limit, **options):
    return torch.stack([once(model, 2 * limit, **options), once(model, limit, **options)])


def subset(model, limit, **options):
    return nn.utils.clip_grad_norm_(model.body.parameters(), limit, **options)


def one_tensor(model, limit, **options):
    return nn.utils.clip_grad_norm_(model.table.weight, limit, **options)


def by_accelerate(model, limit, **options):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).clip_grad_norm_(model.parameters(), limit, **options)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e9])
@pytest.mark.parametrize("clip", [once, twice, subset, one_tensor, by_accelerate], ids=lambda f: f.__name__)
def test_clipping_by_hand_is_torch_s(guarded, clip, limit, norm_type):
    results = []
    for model, optimizer in pair(guarded):
        for step in range(2):
            optimizer.zero_grad()
            for k in range(3):
                model(torch.arange(5) + k + step).backward()
            norm = clip(model, limit, norm_type=norm_type)
            nn.utils.clip_grad_value_(model.body.bias, 0.01)
            optimizer.step()
        results.append((torch.as_tensor(norm), list(model.parameters())))
    (ours, params), (theirs, others) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)
    assert len(params) == len(others) == 3  # a tied weight is one
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach().as_subclass(torch.Tensor), q.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("guarded", [False, True])
def test_clipping_by_hand_comes_before_clipping_inside(guarded):
    (model, _), _ = pair(guarded)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)
    model(torch.arange(4)).backward()
    once(model, 1e-3)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(1e-3, rel=1e-3)
