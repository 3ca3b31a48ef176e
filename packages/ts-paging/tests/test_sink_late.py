"""Gradients that land before they are there, and such that leave in a narrower format."""

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sink_measure import Through, squares
from torch import nn

from ts_core.arriving import ArrivingGradient
from ts_core.guard import guard, guard_of
from ts_core.testing import devices
from ts_paging import sink as sink_module
from ts_paging.sink import GradientSink


class Ticket:
    """A copy that happens when it is let go."""

    def __init__(self, pairs, held):
        self.pairs, self.free, self.lock = pairs, not held, threading.Lock()
        if self.free:
            self.copy()

    def copy(self):
        with self.lock:
            for dst, src in self.pairs:
                dst.copy_(src)
            self.pairs = []

    def let_go(self):
        self.free = True
        self.copy()

    def done(self):
        return self.free

    def wait(self):
        self.let_go()


class Link:
    """Stands for the copy engine; keeps what it is given until it is let go."""

    def __init__(self):
        self.tickets, self.held, self.nbytes, self.dtypes = [], True, 0, []

    def d2h_many(self, dsts, srcs, **order):
        self.nbytes += sum(src.nbytes for src in srcs)
        self.dtypes.append([src.dtype for src in srcs])
        self.tickets.append(Ticket(list(zip(dsts, srcs, strict=True)), self.held))
        return self.tickets[-1]


@pytest.fixture
def link(monkeypatch):
    """Gradients leave, on a machine without a GPU too."""
    made = Link()
    monkeypatch.setattr(sink_module, "d2h_many", made.d2h_many)
    monkeypatch.setattr(sink_module, "_is_away", lambda grad: True)
    return made


def made(sink, values=None):
    values = torch.arange(15.0).view(3, 5) if values is None else values
    parameter = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    guard(parameter, sink.divert)
    return parameter


def send(sink, parameter, *grads):
    """One backward pass that brings these gradients."""
    anchor = torch.zeros((), requires_grad=True)
    loss = anchor * 1
    for grad in grads:
        loss = loss + (Through.apply(anchor, sink, parameter, "cpu") * grad).sum()
    loss.backward()


def stored(parameter):
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def test_a_pass_ends_before_its_gradient_is_there(link):
    sink = GradientSink(square_sum=squares)
    sink.late = True
    parameter, grad = made(sink), torch.randn(3, 5)
    send(sink, parameter, grad)
    assert type(stored(parameter)) is ArrivingGradient
    assert not stored(parameter).arrived
    with torch._C.DisableTorchFunctionSubclass():
        assert guard_of(parameter).square_sum_of(parameter.grad) == float(squares([grad])[0])
    assert torch.equal(parameter.grad, grad)
    assert type(stored(parameter)) is torch.Tensor


@pytest.mark.parametrize("kind", ["late off", "hook", "landed hook", "two", "more to add"])
def test_what_is_used_at_once_is_waited_for(kind, link):
    sink = GradientSink()
    sink.late = kind != "late off"
    parameter, grad = made(sink), torch.randn(3, 5)
    expected, seen = grad, []
    if kind == "hook":
        parameter.register_hook(lambda g: g * 2)
        expected = grad * 2
    if kind == "landed hook":
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    if kind == "more to add":
        parameter.grad = torch.ones(3, 5)
        expected = 1 + grad
    send(sink, parameter, grad, *([grad] if kind == "two" else []))
    expected = grad + grad if kind == "two" else expected
    assert type(stored(parameter)) is torch.Tensor
    assert torch.equal(parameter.grad, expected)
    assert all(torch.equal(each, grad) for each in seen)


@pytest.mark.parametrize("narrow", [False, True])
def test_passes_add_up(narrow, link):
    sink = GradientSink()
    sink.late, sink.narrow = True, narrow
    parameter = made(sink)
    grads = [torch.randn(3, 5).bfloat16().float() for _ in range(3)]
    for grad in grads:
        send(sink, parameter, grad)
    assert torch.equal(parameter.grad, grads[0] + grads[1] + grads[2])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_buffer_is_not_handed_out_while_something_arrives_in_it(narrow, link):
    sink = GradientSink()
    sink.late, sink.narrow = True, narrow
    parameter = made(sink)
    one, two = (torch.randn(3, 5).bfloat16().float() for _ in range(2))
    send(sink, parameter, one)
    parameter.grad = None  # dropped unread, while it is on its way
    gc.collect()
    tickets = list(link.tickets)
    send(sink, parameter, two)
    for ticket in tickets:
        ticket.let_go()  # the first one lands now at the latest
    assert torch.equal(parameter.grad, two)


VALUES = st.sampled_from([0.0, -0.0, 1.5, -3.0, 2.0**-133, 1e38, float("inf"), float("-inf"), 2.0**-120, 1.0])
OTHERS = st.sampled_from([1.0 + 2.0**-12, float("nan"), 3.3e38, 2.0**-149, 0.1])


@pytest.mark.parametrize("device", devices())
@given(
    values=st.lists(VALUES, min_size=15, max_size=15),
    others=st.lists(st.tuples(st.integers(0, 14), OTHERS), max_size=2),
    late=st.booleans(),
    turned=st.booleans(),
    passes=st.integers(1, 3),
)
def test_a_narrow_form_has_the_same_bits_or_is_not_taken(device, values, others, late, turned, passes):
    with pytest.MonkeyPatch.context() as patch:
        link = Link()
        if device == "cpu":
            patch.setattr(sink_module, "d2h_many", link.d2h_many)
            patch.setattr(sink_module, "_is_away", lambda grad: True)
        sink = GradientSink(square_sum=squares)
        sink.late, sink.narrow = late, True
        grad = torch.tensor(values)
        for at, value in others:
            grad[at] = value
        grad = grad.view(3, 5)
        grad = grad.t() if turned else grad
        parameter = made(sink, torch.zeros(5, 3).t() if turned and passes > 1 else torch.zeros(grad.shape))
        if grad.shape != parameter.shape:
            grad = grad.t()
        exact = torch.equal(grad.bfloat16().float(), grad)  # a NaN is never equal
        for number in range(passes):
            before, link.nbytes = sink.d2h_bytes, 0
            anchor = torch.zeros((), requires_grad=True)
            weight = Through.apply(anchor, sink, parameter, device)
            torch.autograd.backward([weight], [grad.to(device)])
            moved = sink.d2h_bytes - before
            assert moved == (30 if exact else 90 if number == 0 else 60)
            assert torch.equal(
                parameter.grad.view(torch.int32), grad.contiguous().view(torch.int32).view(3, 5)
            ) or (
                torch.equal(
                    parameter.grad.contiguous().view(torch.int32), grad.contiguous().view(torch.int32)
                )
            )
            assert parameter.grad.dtype is torch.float32
            assert parameter.grad.stride() == parameter.stride()
            parameter.grad = None


def test_little_is_held_on_the_device_until_it_is_known(link, monkeypatch):
    monkeypatch.setattr(sink_module, "_HELD_BYTES", 100)
    sink = GradientSink()
    sink.late = sink.narrow = True
    parameters = [made(sink) for _ in range(4)]
    grads = [torch.randn(3, 5) if i == 1 else torch.ones(3, 5) for i in range(4)]
    anchor = torch.zeros((), requires_grad=True)
    held = []

    def note(grad):
        passes = list(sink._passes.values())
        held.append(sum(wide.grad.nbytes for p in passes for n in p.narrow for wide in n.grads))

    loss = anchor * 1
    for parameter, grad in zip(parameters, grads, strict=True):
        weight = Through.apply(anchor, sink, parameter, "cpu")
        weight.register_hook(note)
        loss = loss + (weight * grad).sum()
    loss.backward()
    assert max(held) <= 160
    for parameter, grad in zip(parameters, grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    assert sink._no_narrow == {id(parameters[1])}


def test_16_bit_parameters_and_fp64_ones_leave_as_they_are(link):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        sink = GradientSink()
        sink.late = sink.narrow = True
        parameter = made(sink, torch.zeros(3, 5, dtype=dtype))
        send(sink, parameter, torch.ones(3, 5, dtype=dtype))
        assert sink.d2h_bytes == 15 * dtype.itemsize
        assert torch.equal(parameter.grad, torch.ones(3, 5, dtype=dtype))
        assert not sink._no_narrow


def test_after_the_sink_is_gone_a_gradient_still_arrives(link):
    sink = GradientSink()
    sink.late = sink.narrow = True
    parameter, grad = made(sink), torch.ones(3, 5)
    send(sink, parameter, grad)
    guard_of(parameter).wide_memory = None
    del sink
    gc.collect()
    assert torch.equal(parameter.grad, grad)


class Together(torch.autograd.Function):
    """Hands the gradients of several Parameters to the sink at once, as a paged block does."""

    @staticmethod
    def forward(ctx, anchor, sink, parameters):
        ctx.sink, ctx.parameters = sink, parameters
        return tuple(p.detach().clone() for p in parameters)

    @staticmethod
    def backward(ctx, *grads):
        ctx.sink.add_all(list(zip(ctx.parameters, grads, strict=True)))
        return None, None, None


def send_together(sink, parameters, grads):
    anchor = torch.zeros((), requires_grad=True)
    torch.autograd.backward(Together.apply(anchor, sink, parameters), grads)


@pytest.mark.parametrize("measured", [False, True])
def test_what_comes_together_is_made_narrow_in_one_call(measured, link):
    calls, seen = [], []

    def narrow_by(grads):
        calls.append([grad.clone() for grad in grads])
        # As a kernel does: forms in one buffer, with gaps. What it says counts, not what PyTorch would say.
        whole = torch.full((16 * len(grads),), 99.0, dtype=torch.bfloat16)
        forms = [whole[16 * i : 16 * i + grad.numel()] for i, grad in enumerate(grads)]
        for form, grad in zip(forms, grads, strict=True):
            form.copy_(grad + 1)
        lost = torch.tensor([0, 0, 1], dtype=torch.uint8)[: len(grads)]
        return forms, lost, torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64)[: len(grads)]

    def square_sum(grads):
        seen.append(len(grads))
        return squares(grads)

    sink = GradientSink(square_sum=square_sum if measured else None)
    sink.late, sink.narrow, sink.narrow_by = True, True, narrow_by
    turned = torch.arange(15.0).view(5, 3).t()
    parameters = [made(sink), made(sink, turned), made(sink), made(sink, torch.ones(4, dtype=torch.bfloat16))]
    grads = [torch.full((3, 5), 2.0 * i) + torch.arange(5.0) for i in range(3)]
    send_together(sink, parameters, [*grads, torch.ones(4, dtype=torch.bfloat16)])
    assert len(calls) == 1
    for given_grad, grad in zip(calls[0], (grads[0], grads[1].t(), grads[2]), strict=True):
        assert torch.equal(given_grad, grad.reshape(-1))
    # The one that lost something follows the others.
    assert link.dtypes == [[torch.bfloat16] * 4, [torch.float32]]
    assert seen == ([1] if measured else [])  # the 16-bit one
    with torch._C.DisableTorchFunctionSubclass():
        found = [guard_of(p).square_sum_of(p.grad) for p in parameters]
    assert found == ([3.0, 5.0, 7.0, 4.0] if measured else [None] * 4)
    for parameter, expected in zip(parameters, (grads[0] + 1, grads[1] + 1, grads[2]), strict=False):
        assert torch.equal(parameter.grad, expected)
        assert parameter.grad.stride() == parameter.stride()
    assert sink._no_narrow == {id(parameters[2])}
    for parameter in parameters:
        parameter.grad = None
    send_together(sink, parameters[2:3], grads[2:])
    assert len(calls) == 1  # what has lost once is not tried again
    assert torch.equal(parameters[2].grad, grads[2])


@pytest.mark.parametrize("device", devices())
def test_nothing_is_made_narrow_that_has_to_be_added_to(device):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(sink_module, "d2h_many", Link().d2h_many)
            patch.setattr(sink_module, "_is_away", lambda grad: True)
        sink = GradientSink()
        sink.late = sink.narrow = True
        sink.narrow_by = lambda grads: calls.append(len(grads))
        parameter, grad = made(sink), torch.ones(3, 5)
        parameter.grad = torch.ones(3, 5)
        anchor = torch.zeros((), requires_grad=True)
        torch.autograd.backward([Through.apply(anchor, sink, parameter, device)], [grad.to(device)])
        assert torch.equal(parameter.grad, 1 + grad)
    assert not calls


def test_a_sum_of_several_uses_is_not_held_up_by_the_gradients_before_it(link, monkeypatch):
    orders = []

    def d2h_many(dsts, srcs, **order):
        orders.append(order)
        return link.d2h_many(dsts, srcs)

    monkeypatch.setattr(sink_module, "d2h_many", d2h_many)
    sink = GradientSink()
    sink.late = True
    shared, other = made(sink), made(sink)
    sink.shared = {id(shared)}
    grad = torch.randn(3, 5)
    send(sink, other, grad)
    send(sink, shared, grad, grad)
    assert [order["priority"] for order in orders] == [0, 1]
    assert torch.equal(shared.grad, grad + grad)
