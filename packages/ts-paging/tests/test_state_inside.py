"""State that a block reads, wherever it is kept: a replay never uses what it was once."""

import collections
import functools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.pager import WeightPager

CPU = torch.device("cpu")
Box = types.SimpleNamespace


class Pays:
    """A meter by which every replay pays."""

    def now(self):
        return 0

    def between(self, first, last):
        return 1.0, 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


class Scaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


class Settings:
    scale = 2.0


class Kinds:
    """Its method returns what an attribute of its class holds."""

    table = {"scale": 2.0}  # noqa: RUF012

    def get(self):
        return self.table["scale"]


SETTINGS, SCALER, KINDS = Settings(), Scaler(), Kinds()
NESTED = {"a": {"scale": 2.0}}


def times(x, scale):
    return scale


def held(value):
    return lambda block: setattr(block, "held", value())


def restrided(block):
    weight = block.low.weight
    weight.data = weight.data.t().contiguous().t() * 2


def move(block):
    block.held[1].append(block.held[0].pop())


def put(place, key, value):
    if isinstance(key, str) and not isinstance(place, dict):
        setattr(place, key, value)
    else:
        place[key] = value


#: name -> (set up, what it computes, change)
CASES = {
    "configuration in a configuration": (
        held(lambda: Box(text=Box(scale=2.0))),
        lambda b, x: b.held.text.scale,
        lambda b: put(b.held.text, "scale", 3.0),
    ),
    "list in a configuration": (
        held(lambda: Box(each=[2.0])), lambda b, x: b.held.each[0], lambda b: put(b.held.each, 0, 3.0)
    ),
    "set": (held(set), lambda b, x: 2.0 + len(b.held), lambda b: b.held.add("a")),
    "module in a list": (
        held(lambda: [Scaler()]), lambda b, x: b.held[0](x), lambda b: put(b.held[0], "scale", 3.0)
    ),
    "array": (
        held(lambda: np.array([2.0])), lambda b, x: float(b.held[0]), lambda b: put(b.held, 0, 3.0)
    ),
    "slots": (held(Slotted), lambda b, x: b.held.scale, lambda b: put(b.held, "scale", 3.0)),
    "deque": (
        held(lambda: collections.deque([2.0])), lambda b, x: b.held[0], lambda b: put(b.held, 0, 3.0)
    ),
    "tuple": (
        held(lambda: (Box(scale=2.0),)), lambda b, x: b.held[0].scale, lambda b: put(b.held[0], "scale", 3.0)
    ),
    "two lists": (held(lambda: [["x"], []]), lambda b, x: 2.0 + len(b.held[0]), move),
    "key": (
        held(lambda: {"left": 2.0}),
        lambda b, x: b.held.get("left", 3.0),
        lambda b: put(b.held, "right", b.held.pop("left")),
    ),
    "partial": (
        held(lambda: functools.partial(times, scale=2.0)),
        lambda b, x: b.held(x),
        lambda b: put(b.held.keywords, "scale", 3.0),
    ),
    "sign of zero": (
        held(lambda: 0.0),
        lambda b, x: torch.copysign(torch.ones(8), torch.tensor(b.held)),
        lambda b: put(b, "held", -0.0),
    ),
    "number of the layer": (
        lambda b: put(b, "layer_idx", 0), lambda b, x: 2.0 + b.layer_idx, lambda b: put(b, "layer_idx", 1)
    ),
    "global: class of an object": (
        lambda b: put(Settings, "scale", 2.0), lambda b, x: SETTINGS.scale,
        lambda b: put(Settings, "scale", 3.0),
    ),
    "global: module": (
        lambda b: put(SCALER, "scale", 2.0), lambda b, x: SCALER(x), lambda b: put(SCALER, "scale", 3.0)
    ),
    "global: dictionary in a dictionary": (
        lambda b: put(NESTED["a"], "scale", 2.0),
        lambda b, x: NESTED["a"]["scale"],
        lambda b: put(NESTED["a"], "scale", 3.0),
    ),
    "global: table of a class": (
        lambda b: put(Kinds.table, "scale", 2.0), lambda b, x: KINDS.get(),
        lambda b: put(Kinds.table, "scale", 3.0),
    ),
    "strides of a weight": (lambda b: None, lambda b, x: 1.0, restrided),
    "strides of a buffer": (
        lambda b: b.register_buffer("table", torch.arange(64.0).view(8, 8)),
        lambda b, x: b.table[0],
        lambda b: put(b.table, "data", b.table.data.t().contiguous().t()),
    ),
    "generator of Python": (held(lambda: random.Random(0)), lambda b, x: b.held.random(), None),
    "generator of NumPy": (held(lambda: np.random.default_rng(0)), lambda b, x: float(b.held.random()), None),
    "generator of PyTorch": (
        held(lambda: torch.Generator().manual_seed(0)), lambda b, x: torch.rand(8, generator=b.held), None
    ),
    "generator in an object": (
        held(lambda: Box(inner=random.Random(0))), lambda b, x: b.held.inner.gauss(0, 1), None
    ),
    "numbers of Python": (lambda b: None, lambda b, x: random.random(), None),
}  # fmt: skip


ASKED = ("set", "strides of a weight", "numbers of Python")  # also where capturing is asked for


class Block(nn.Module):
    def __init__(self, setup, function):
        super().__init__()
        self.linear, self.low = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        setup(self)

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.low(x)) * self.function(self, x)


def steps(case, auto, paged, captured=True, count=16):
    setup, function, change = case
    random.seed(0)
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(setup, function) for _ in range(2)])
    chosen = {id(p) for b in blocks for p in b.linear.parameters()} if paged else set()
    pager = WeightPager(CPU, pages=lambda parameter: id(parameter) in chosen)
    pager.attach([(f"block {index}", block, "keep") for index, block in enumerate(blocks)])
    if captured:
        pager.block_mode = BlockMode(Captures(CPU, auto=auto, meter=Pays()))
    found = []
    for number in range(count):
        if number == count - 8:
            assert not captured or change is None or pager.block_mode.report()["replays"] > 0
            for block in blocks if change is not None else ():
                change(block)
        with torch.no_grad():
            for block in blocks:
                block.low.bias.add_(0.1)
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        blocks.zero_grad()
        loss = blocks(x).square().sum()
        loss.backward()
        found.append([loss.detach(), x.grad, *[p.grad.clone() for p in blocks.parameters()]])
    return found


@pytest.mark.parametrize(
    ("name", "auto", "paged"), [*[(name, True, True) for name in CASES], *[(n, False, False) for n in ASKED]]
)
def test_no_replay_uses_what_has_changed(name, auto, paged):
    found = steps(CASES[name], auto, paged)
    plain = steps(CASES[name], auto, paged, captured=False)
    for number, (one, two) in enumerate(zip(found, plain, strict=True)):
        assert all(map(torch.equal, one, two)), f"step {number}"


def test_a_result_in_an_object_of_no_known_kind_keeps_the_block_in_graph_mode():
    class Result:
        def __init__(self, mean):
            self.mean = mean

    class Returns(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, Result(y.detach().mean())

    block = Returns(8, 8)
    pager = WeightPager(CPU)
    pager.attach([("block", block, "keep")])
    pager.block_mode = BlockMode(Captures(CPU))
    for number in range(6):
        y, result = block(torch.full((4, 8), float(number)).requires_grad_())
        assert torch.equal(result.mean, y.detach().mean())
        y.sum().backward()
    assert "plain tensors" in pager.block_mode.reasons["block"]


def test_a_tensor_that_comes_twice_only_later_adds_up_as_before():
    class Adds(nn.Linear):
        def forward(self, x, y):
            return torch.tanh(super().forward(x) * y + x.exp()) * y

    torch.manual_seed(0)
    block = Adds(8, 8)
    pager = WeightPager(CPU)
    pager.attach([("block", block, "keep")])
    gradients = []
    for mode in (None, BlockMode(Captures(CPU))):
        pager.block_mode = mode
        for number in range(6):
            x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number)).requires_grad_()
            x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
            block(x, x if number > 3 else y).sum().backward()
            gradients.append(x.grad)
    assert all(map(torch.equal, gradients[:6], gradients[6:]))


def test_memory_exchanged_under_a_shared_recording_is_not_read_in_backward():
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(lambda b: None, lambda b, x: 1.0) for _ in range(2)])
    chosen = {id(p) for b in blocks for p in b.linear.parameters()}
    pager = WeightPager(CPU, pages=lambda parameter: id(parameter) in chosen)
    pager.attach([(f"block {index}", block, "keep") for index, block in enumerate(blocks)])
    pager.block_mode = BlockMode(Captures(CPU))
    for _ in range(5):
        blocks(torch.ones(4, 8).requires_grad_()).sum().backward()
    assert pager.block_mode.report()["blocks"] == 2
    loss = blocks(torch.ones(4, 8).requires_grad_()).sum()
    blocks[1].low.weight.data = blocks[1].low.weight.detach() * 3
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_the_newer_setting_of_precision_is_no_error():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("PyTorch has the older setting alone")
    before, legacy = matmul.fp32_precision, torch.get_float32_matmul_precision()
    try:
        matmul.fp32_precision = "tf32"
        case = (lambda b: None, lambda b, x: 1.0, lambda b: None)
        plain = steps(case, False, True, captured=False)
        for one, two in zip(steps(case, False, True), plain, strict=True):
            assert all(map(torch.equal, one, two))
    finally:
        matmul.fp32_precision = before
        torch.set_float32_matmul_precision(legacy)
