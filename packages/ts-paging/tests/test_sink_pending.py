"""A gradient that a pending update still needs is not added to before the update has used it."""

import pytest
import torch
from torch import nn

from ts_core.guard import guard
from ts_paging.sink import GradientSink, PlainMemory


def test_adding_to_a_gradient_waits_for_the_update_that_uses_it():
    sink = GradientSink()
    parameter = nn.Parameter(torch.ones(3))
    entry = guard(parameter, sink.divert)
    used = []

    def step():
        gradient = parameter.grad
        entry.pending = lambda: used.append(gradient.tolist())

    loss = (parameter * 2).sum()
    loss.backward(retain_graph=True)
    step()
    loss.backward()  # nothing reads the parameter here
    assert used == [[2.0] * 3]
    assert entry.pending is None
    assert parameter.grad.tolist() == [4.0] * 3


class Counting(PlainMemory):
    def __init__(self):
        self.made = []

    def like(self, tensor, owner=None):
        self.made.append(tensor.dtype)
        return super().like(tensor, owner)


@pytest.mark.parametrize("turned", [False, True])
def test_a_hook_may_widen_what_is_there_with_memory_that_is_used_again(turned):
    memory = Counting()
    sink = GradientSink(memory)
    value = torch.ones(3, 5, dtype=torch.bfloat16)
    parameter = nn.Parameter(value.t() if turned else value)
    entry = guard(parameter, sink.divert)

    def widen(grad):
        if parameter.grad is not None and parameter.grad.dtype is torch.bfloat16:
            wide = entry.wide_memory(parameter)
            wide.copy_(parameter.grad)
            parameter.grad = None
            parameter.grad_dtype = None
            parameter.grad = wide

    parameter.register_hook(widen)
    for _ in range(3):
        for factor in (256.0, 1.0, 1.0):
            (parameter * factor).sum().backward()
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.stride() == parameter.stride()
        assert bool((parameter.grad == 258.0).all())
        parameter.grad = None
    assert memory.made.count(torch.float32) == 1
    assert memory.made.count(torch.bfloat16) <= 2
