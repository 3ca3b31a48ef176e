"""Passes of several threads that end together: nothing that lands is lost."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from ts_core.guard import guard
from ts_paging.sink import GradientSink


class _Brings(torch.autograd.Function):
    """Something that has a gradient for a host Parameter, which goes to the sink."""

    @staticmethod
    def forward(ctx, sink, parameter, anchor, grad):
        ctx.sink, ctx.parameter, ctx.found = sink, parameter, grad
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.sink.add(ctx.parameter, ctx.found)
        return None, None, grad, None


class Together:
    """Where two threads meet if nothing keeps them from being there together."""

    def __init__(self):
        self._barrier = threading.Barrier(2)

    def meet(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(0.5)


def brought(sink, parameter, value):
    anchor = torch.zeros((), requires_grad=True)
    return _Brings.apply(sink, parameter, anchor, torch.full((5, 7), value))


def backward_in_threads(sink, parameter):
    threads = [threading.Thread(target=brought(sink, parameter, value).backward) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def parameter():
    return nn.Parameter(torch.zeros(5, 7))


def test_of_two_first_gradients_none_is_lost(parameter):
    together = Together()

    class Meets(torch.Tensor):
        def detach(self):
            together.meet()
            return super().detach()

    sink = GradientSink()
    guard(parameter, sink.divert)
    parameter.register_hook(lambda grad: grad.as_subclass(Meets))
    backward_in_threads(sink, parameter)
    assert torch.equal(parameter.grad.as_subclass(torch.Tensor), torch.full((5, 7), 3.0))


def test_what_is_run_on_a_gradient_that_has_landed_is_run_once_for_each(parameter):
    """As an optimizer that steps there: AccumulateGrad lets nobody add to a gradient meanwhile."""
    together, taken = Together(), []
    sink = GradientSink()
    guard(parameter, sink.divert)

    def step(landed):
        grad = landed.grad.clone()
        together.meet()
        taken.append(grad)
        landed.grad = None

    parameter.register_post_accumulate_grad_hook(step)
    backward_in_threads(sink, parameter)
    assert sorted(grad[0, 0].item() for grad in taken) == [1.0, 2.0]


def test_a_hook_may_replace_what_is_there(parameter):
    """As one that widens it does."""
    together, turn = Together(), []
    sink = GradientSink()
    guard(parameter, sink.divert)
    parameter.grad = torch.ones(5, 7)

    def replace(grad):
        there = parameter.grad.double().float()
        turn.append(threading.get_ident())
        together.meet()
        if turn[0] != threading.get_ident():
            together.meet()
        parameter.grad = there

    def landed(parameter):
        if turn[0] == threading.get_ident() and len(turn) == 2:
            together.meet()

    parameter.register_hook(replace)
    parameter.register_post_accumulate_grad_hook(landed)
    backward_in_threads(sink, parameter)
    assert torch.equal(parameter.grad, torch.full((5, 7), 4.0))


def test_a_hook_may_call_backward_for_the_same_parameter(parameter):
    sink = GradientSink()
    guard(parameter, sink.divert)
    inner = []

    def hook(grad):
        if not inner:
            inner.append(True)
            with torch.enable_grad():
                brought(sink, parameter, 2.0).backward()

    parameter.register_hook(hook)
    brought(sink, parameter, 1.0).backward()
    assert torch.equal(parameter.grad, torch.full((5, 7), 3.0))
