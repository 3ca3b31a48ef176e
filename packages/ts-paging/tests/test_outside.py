"""What a captured block computes with besides arguments and modules is followed, or it is not captured."""

import contextvars
import copy
import functools
import gc
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.outside import Names, Reads, backwards_of, leads_elsewhere
from ts_paging.pager import WeightPager
from ts_paging.recording import CannotRecord
from ts_paging.structure import Structure

CPU = torch.device("cpu")
SCALE = 2.0
TABLE = {"scale": 2.0}
SETTINGS = types.SimpleNamespace(scale=2.0)
TENSOR = torch.full((8,), 2.0)
CONTEXT = contextvars.ContextVar("context", default=2.0)
NUMBERS = [2.0]


class Kind:
    scale = 2.0


class Pays:
    """A meter by which every replay pays."""

    def now(self):
        return 0

    def between(self, first, last):
        return 1.0, 1.0


class Block(nn.Module):
    """A linear layer whose result is changed by a function."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.function(x)


def make(function, auto=True, policy="keep", paged=True):
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(function) for _ in range(3)])
    events = []
    pager = WeightPager(CPU, pages=lambda parameter: paged)
    pager.attach([(f"block {index}", block, policy) for index, block in enumerate(blocks)])
    pager.block_mode = BlockMode(Captures(CPU, auto=auto, meter=Pays()), events.append)
    pager.block_mode.events = events
    return blocks, pager


def step(blocks, x=None):
    x = torch.linspace(-1, 1, 32).view(4, 8) if x is None else x
    x = x.detach().requires_grad_()
    blocks.zero_grad()
    loss = blocks(x).square().sum()
    loss.backward()
    return loss.detach(), x.grad, [p.grad.clone() for p in blocks.parameters()]


def expected(function):
    torch.manual_seed(0)
    return step(nn.Sequential(*[Block(function) for _ in range(3)]))


def same(one, two):
    return all(map(torch.equal, [*one[:2], *one[2]], [*two[:2], *two[2]]))


def captured_steps(blocks, pager, least=3, auto=True):
    """Run until all blocks replay."""
    for _ in range(12):
        step(blocks)
    assert pager.block_mode.report()["blocks"] == least, pager.block_mode.reasons


def set_global(value):
    globals()["SCALE"] = value


NAMED = {
    "global": (lambda x: SCALE, set_global),
    "entry of a dictionary": (lambda x: TABLE["scale"], lambda v: TABLE.update(scale=v)),
    "attribute of an object": (lambda x: SETTINGS.scale, lambda v: setattr(SETTINGS, "scale", v)),
    "attribute of a class": (lambda x: Kind.scale, lambda v: setattr(Kind, "scale", v)),
    "attribute of a module": (lambda x: THIS.SCALE, set_global),
    "context variable": (lambda x: CONTEXT.get(), CONTEXT.set),
    "entry of a list": (lambda x: NUMBERS[0], lambda v: NUMBERS.__setitem__(0, v)),
}
THIS = sys.modules[__name__]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    for _, change in NAMED.values():
        change(2.0)


@pytest.mark.parametrize(("policy", "auto"), [("keep", True), ("recompute", False)])
@pytest.mark.parametrize("name", list(NAMED))
def test_a_value_from_outside_that_changes_is_never_the_old_one(name, policy, auto):
    function, change = NAMED[name]
    blocks, pager = make(function, auto, policy)
    captured_steps(blocks, pager)
    assert same(step(blocks), expected(function))
    change(3.0)
    changed = expected(function)
    for _ in range(8):
        assert same(step(blocks), changed)
    assert pager.block_mode.report()["blocks"] == 3  # recorded anew
    assert any("has changed" in line for line in pager.block_mode.events)


def test_a_value_that_changes_in_every_pass_ends_capturing():
    function, change = NAMED["global"]
    blocks, pager = make(function)
    for number in range(40):
        change(float(number))
        assert same(step(blocks), expected(function))
    captured_steps(blocks, pager, 0)
    assert any("changes from run to run" in reason for reason in pager.block_mode.reasons.values())


def test_what_the_garbage_collector_calls_is_not_the_blocks_code():
    def counts(*_):
        set_global(SCALE + 1)

    def allocates(x):
        rows = [[x] for _ in range(50)]
        return rows[0][0]

    threshold = gc.get_threshold()
    gc.callbacks.append(counts)
    gc.set_threshold(1)
    try:
        blocks, pager = make(allocates)
        captured_steps(blocks, pager)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(counts)


def test_a_variable_of_an_enclosing_function_is_followed():
    scale = 2.0

    def function(x):
        return scale

    blocks, pager = make(function)
    captured_steps(blocks, pager)
    scale = 3.0
    for _ in range(8):
        assert same(step(blocks), expected(function))
    assert pager.block_mode.report()["blocks"] == 3


class Inner(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def test_a_method_exchanged_on_a_class_is_not_the_old_one():
    def built(blocks):
        for block in blocks:
            block.linear = Inner(8, 8)
        return blocks

    torch.manual_seed(0)
    blocks = built(nn.Sequential(*[Block(one) for _ in range(3)]))
    plain = copy.deepcopy(blocks)
    pager = WeightPager(CPU)
    pager.attach([(f"block {index}", block, "keep") for index, block in enumerate(blocks)])
    pager.block_mode = BlockMode(Captures(CPU, auto=True, meter=Pays()))
    captured_steps(blocks, pager)
    before = Inner.forward
    try:
        Inner.forward = lambda self, x: torch.sigmoid(before(self, x))
        for _ in range(10):
            assert same(step(blocks), step(plain))
        assert pager.block_mode.report()["blocks"] == 3
    finally:
        Inner.forward = before


def one(x):
    return 1.0


def test_a_dictionary_inside_a_configuration_is_watched():
    settings = types.SimpleNamespace(rope={"theta": 1.0})
    block = Block(lambda x: 1.0)
    block.config = settings
    structure = Structure(block)
    assert structure.holds()
    settings.rope["theta"] = 2.0
    assert not structure.holds()


TENSORS = {
    "global": lambda x: TENSOR,
    "view of a global": lambda x: TENSOR[:8],
}


@pytest.mark.parametrize("name", list(TENSORS))
def test_a_tensor_from_elsewhere_is_not_captured_by_itself(name):
    blocks, pager = make(TENSORS[name])
    captured_steps(blocks, pager, 0)
    assert all("no argument, Parameter or buffer" in each for each in pager.block_mode.reasons.values())
    assert same(step(blocks), expected(TENSORS[name]))
    TENSOR.mul_(2)
    try:
        assert same(step(blocks), expected(TENSORS[name]))
    finally:
        TENSOR.div_(2)


def test_a_tensor_from_elsewhere_is_read_where_it_is_when_capturing_is_asked_for():
    function = TENSORS["global"]
    blocks, pager = make(function, auto=False)
    captured_steps(blocks, pager)
    assert sum("(8,) float32" in line for line in pager.block_mode.events) == 1
    TENSOR.mul_(2)
    try:
        assert same(step(blocks), expected(function))
        assert pager.block_mode.report()["blocks"] == 3
    finally:
        TENSOR.div_(2)


def test_constants_made_inside_are_no_tensors_from_elsewhere():
    def function(x):
        return torch.tensor([2.0]) * torch.arange(8) + torch.ones(8, dtype=x.dtype) * 0.5

    blocks, pager = make(function)
    captured_steps(blocks, pager)
    assert same(step(blocks), expected(function))


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
@pytest.mark.parametrize("auto", [True, False])
def test_random_numbers_of_python_are_drawn_anew(draw, auto):
    blocks, pager = make(lambda x: draw(), auto)
    captured_steps(blocks, pager, 0)
    assert all("random numbers of Python" in reason for reason in pager.block_mode.reasons.values())
    assert not torch.equal(step(blocks)[0], step(blocks)[0])


STASH = []


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("form", ["the same", "a view", "derived", "derived with a weight"])
def test_a_tensor_with_a_graph_from_elsewhere_gets_its_gradient(form, policy, captured):
    """Stashed by the model, as it is or changed, and used inside a block besides its argument."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    change = {
        "the same": lambda h: h,
        "a view": lambda h: h.view(4, 8),
        "derived": torch.sin,
        "derived with a weight": lambda h: h * weight,
    }[form]

    def run(blocks, x):
        h = x * 2.0
        STASH[:] = [change(h)]
        return blocks(h).square().sum()

    def gradients(blocks):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        weight.grad = None
        blocks.zero_grad()
        run(blocks, x).backward()
        return [x.grad, weight.grad, *[p.grad.clone() for p in blocks.parameters()]]

    def function(x):
        return STASH[0]

    torch.manual_seed(0)
    plain = gradients(nn.Sequential(*[Block(function) for _ in range(3)]))
    blocks, pager = make(function, False, policy)
    if not captured:
        pager.block_mode = BlockMode()
    for _ in range(5):
        found = gradients(blocks)
        for one, two in zip(found, plain, strict=True):
            assert (one is None) == (two is None)
            assert one is None or torch.allclose(one, two)
    assert set(pager.block_mode.reasons) == {"block 0", "block 1", "block 2"}
    STASH.clear()


def test_random_numbers_are_the_same_when_a_run_is_taken_back():
    """The run in block mode finds the tensor; the one in graph mode that follows is the one that counts."""
    used = []

    class Dropping(Block):
        def forward(self, x):
            y = torch.nn.functional.dropout(super().forward(x), 0.5)
            return y + STASH[0] if used else y

    def losses(blocks, hidden):
        torch.manual_seed(1)
        found = []
        for number in range(6):
            used[:] = [1] if number >= 3 else []
            STASH[:] = [hidden * 1.0]
            x = torch.ones(4, 8).requires_grad_()
            found.append(blocks(x).sum())
            found[-1].backward()
        return [float(each.detach()) for each in found]

    def built():
        torch.manual_seed(0)
        return nn.Sequential(*[Dropping(lambda x: 1.0) for _ in range(2)])

    hidden = nn.Parameter(torch.ones(8))
    plain = losses(built(), hidden)
    gradient, hidden.grad = hidden.grad, None
    blocks = built()
    pager = WeightPager(CPU)
    pager.attach([(f"block {index}", block, "keep") for index, block in enumerate(blocks)])
    pager.block_mode = BlockMode()
    assert losses(blocks, hidden) == plain
    assert torch.equal(hidden.grad, gradient)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * TABLE["scale"]


def test_backward_functions_are_looked_into():
    x = torch.ones(2, requires_grad=True)
    out = torch.sin(Doubled.apply(x))
    assert list(backwards_of([out], None)) == [Doubled.backward]
    names = Names()
    with names:
        names.note(Doubled.backward)
    assert not names.changed()
    TABLE["scale"] = 4.0
    assert names.changed()


@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_a_graph_leads_elsewhere_exactly_if_a_leaf_is_in_it(leaves):
    x = torch.ones(2, requires_grad=True)
    begin = x * 1.0
    others = [torch.ones(2, requires_grad=leaf) for leaf in leaves]
    out = functools.reduce(torch.mul, others, begin)
    assert leads_elsewhere([out], begin.grad_fn) == any(leaves)


@pytest.mark.parametrize(
    "run", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.unique(x)]
)
def test_what_the_host_has_to_know_is_found_before_anything_is_recorded(run):
    x = torch.ones(4)
    with pytest.raises(CannotRecord, match="host has to know"), Reads([x.data_ptr()], CPU):
        run(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(4),
        lambda: torch.tensor([1.0, 2.0]) + 1,
        lambda: torch.tensor(1.0).to(torch.float64),
    ],
)
def test_tensors_on_another_device_are_refused(run):
    with pytest.raises(CannotRecord, match="on cpu"), Reads([], torch.device("cuda", 0)):
        run()


def test_a_profiler_that_was_on_goes_on():
    seen = []

    def profiler(frame, event, argument):
        seen.append(event)

    sys.setprofile(profiler)
    try:
        with Names():
            NAMED["global"][0](None)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
