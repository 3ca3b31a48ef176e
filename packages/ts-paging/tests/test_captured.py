"""What changes around a captured block between or within passes is heard of: no gradient is wrong or lost."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from ts_core.errors import StateError
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.pager import WeightPager

CPU = torch.device("cpu")


class Block(nn.Module):
    """A frozen linear layer with an adapter that is not paged."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.beside = []

    def forward(self, x):
        y = torch.tanh(self.base(x)) + self.up(self.down(x))
        for tensor in self.beside:
            y = y + tensor
        return y


def make(policy="keep", captured=True, paged=True):
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)])
    base = {id(p) for block in blocks for p in block.base.parameters()} if paged else set()
    pager = WeightPager(CPU, pages=lambda parameter: id(parameter) in base)
    pager.attach([(f"block {index}", block, policy) for index, block in enumerate(blocks)])
    pager.block_mode = BlockMode(Captures(CPU) if captured else None)
    return blocks, pager


def loss_of(blocks, x=None):
    x = torch.linspace(-1, 1, 4 * 32).view(4, 32) if x is None else x
    return blocks(x.detach().requires_grad_()).square().sum()


def train(blocks, passes=4):
    for _ in range(passes):
        blocks.zero_grad()
        loss_of(blocks).backward()


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_a_resident_weight_written_between_forward_and_backward_is_refused(policy, captured, paged):
    blocks, pager = make(policy, captured, paged)
    train(blocks)
    assert pager.block_mode.report()["blocks"] == (3 if captured else 0)
    loss = loss_of(blocks)
    with torch.no_grad():
        blocks[1].up.weight.mul_(3)
    with pytest.raises((StateError, RuntimeError), match="modified"):
        loss.backward()


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_backward_uses_the_adapter_that_was_there_in_forward(paged, again):
    blocks, _ = make("keep", paged=paged)
    train(blocks)
    expected = [p.grad for p in blocks.parameters() if p.requires_grad]
    old = [p for p in blocks.parameters() if p.requires_grad]
    blocks.zero_grad()
    loss = loss_of(blocks)
    blocks[1].up = nn.Linear(2, 32, bias=False)
    if again:
        loss_of(blocks)  # looks at the block anew
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(old, expected, strict=True))
    assert blocks[1].up.weight.grad is None


def test_memory_that_is_exchanged_under_a_recording_of_its_own_is_not_read():
    blocks, _ = make("keep", paged=False)
    train(blocks)
    loss = loss_of(blocks)
    blocks[1].up.weight.data = blocks[1].up.weight.detach() * 3
    with pytest.raises(StateError, match="modified"):
        loss.backward()


def test_a_trained_tensor_that_no_module_holds_gets_its_gradient():
    blocks, pager = make()
    hidden = nn.Parameter(torch.ones(32))
    for block in blocks:
        block.beside = [hidden]
    train(blocks, 3)
    assert hidden.grad is not None
    expected = 3 * torch.autograd.grad(loss_of(blocks), hidden)[0]
    assert torch.allclose(hidden.grad, expected)
    assert all("neither an argument nor in its modules" in each for each in pager.block_mode.reasons.values())


def test_gradients_of_adapters_do_not_hold_memory_of_others():
    blocks, pager = make()
    train(blocks)
    assert pager.block_mode.report()["blocks"] == 3
    grads = [p.grad for p in blocks[1].parameters() if p.requires_grad]
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}
    assert sum(storages.values()) == sum(grad.nbytes for grad in grads)


def test_a_second_thread_is_refused_though_no_weight_is_paged(monkeypatch):
    """It would write its inputs over those that the first one computes with."""
    monkeypatch.setattr("ts_paging.turns._LINGERS", 0.01)
    blocks, _ = make(paged=False)
    train(blocks)
    failures = []

    def other():
        try:
            loss_of(blocks)
        except StateError as error:
            failures.append(str(error))

    def beside(grad):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    x = torch.ones(4, 32).requires_grad_()
    x.register_hook(beside)
    blocks(x).sum().backward()
    assert len(failures) == 1
    assert "another thread" in failures[0]
    loss_of(blocks).backward()


def test_hooks_on_all_modules_see_what_is_inside():
    blocks, _ = make()
    train(blocks)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        loss_of(blocks)
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 9


def test_what_was_recorded_for_other_kernels_or_another_precision_is_not_replayed():
    blocks, pager = make()
    train(blocks)
    assert pager.block_mode.report()["shapes"] == 1
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        train(blocks)
    assert pager.block_mode.report()["shapes"] == 2
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision == "high" else "high")
        train(blocks)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert pager.block_mode.report()["shapes"] == 3


def test_what_stood_in_a_module_once_is_kept_with_its_recording():
    """Or another function that gets its address would be taken for it."""
    blocks, _ = make()

    def function():
        pass

    for block in blocks:
        block.function = function
    train(blocks)
    reference = weakref.ref(function)
    del function
    for block in blocks:
        block.function = None
    train(blocks)
    gc.collect()
    assert reference() is not None
