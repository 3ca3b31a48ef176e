"""A gradient that a pending update still needs is not added to before the update has used it."""

import torch
from torch import nn

from ts_core.guard import guard
from ts_paging.sink import GradientSink


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
