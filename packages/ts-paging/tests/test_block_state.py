"""What a paged block notices: graphs that are dropped, tensors that changed since forward, new Parameters."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StateError
from ts_core.guard import GuardedParameter
from ts_paging.activations import FileActivations
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager

POLICIES = ["keep", "offload", "recompute"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.up(x).exp() * 0.1 + self.calls  # exp saves its own result


def build(policy="keep", slots=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    oracle = copy.deepcopy(model)
    pager = WeightPager(torch.device("cpu"), slots=slots, min_offload_bytes=0, **options)
    pager.attach([(f"blocks.{i}", block, policy) for i, block in enumerate(model)])
    return model, oracle, pager


X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_is_dropped_is_freed(policy):
    files = FileTensors()
    activations = FileActivations(files.store)
    model, _, _ = build(policy, activations=activations)
    output = model(X)
    node = weakref.ref(output.grad_fn)
    del output
    assert node() is None
    gc.collect()
    activations.sweep()  # as the next pass does first
    assert not files.store.keys()
    files.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_and_activations_changed_since_forward_are_noticed(policy):
    model, oracle, _ = build(policy)
    for net in (model, oracle):
        loss = net(X).sum()
        with torch.no_grad():
            net[1].up.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        x = X.clone()
        loss = net(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_are_written_once_a_pass(policy):
    model, oracle, pager = build(policy)
    for net in (model, oracle):
        loss = net(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert [block.calls.item() for block in model] == [1.0] * 3
    assert [block.runs for block in pager.blocks] == [3 if policy == "recompute" else 1] * 3
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_large_buffer_that_a_recomputing_block_writes_is_refused():
    class Large(Block):
        def forward(self, x):
            self.calls.add_(1)
            return self.up(x)

    large = Large()
    large.calls = torch.zeros(1 << 19)
    pager = WeightPager(torch.device("cpu"))
    pager.attach([("large", large, "recompute")])
    with pytest.raises(StateError, match=r"'large'.*'calls'.*Keep or offload"):
        large(X)


@given(replaced=st.sets(st.integers(0, 2)), policy=st.sampled_from(POLICIES))
def test_replaced_parameters_compute_and_get_gradients(replaced, policy):
    model, oracle, pager = build(policy)
    for net in (model, oracle):
        net(X)
        for index in replaced:
            weight = net[index].up.weight.detach() * 2
            net[index].up.weight = nn.Parameter(weight)
        net(X).sum().backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert type(p) is GuardedParameter
        assert torch.equal(p.grad, q.grad)
    pager.detach()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_replacement_of_another_kind_is_refused():
    model, _, _ = build()
    model[1].up.weight = nn.Parameter(torch.zeros(8, 8).double())
    with pytest.raises(StateError, match=r"blocks\.1.*'weight' was replaced"):
        model(X)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_pass_within_another_keeps_its_gradients(policy):
    model, oracle, _ = build(policy)
    for net in (model, oracle):
        inner = torch.utils.checkpoint.checkpoint(net[:2], X.clone().requires_grad_(), use_reentrant=True)
        net[2](inner).sum().backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_copies_of_blocks_with_a_forward_of_their_own_keep_it():
    block = Block()
    block.forward = block.__class__.forward.__get__(block)
    pager = WeightPager(torch.device("cpu"))
    own = block.forward
    pager.attach([("block", block, "keep")])
    other = copy.deepcopy(block)
    assert other.forward.__self__ is other
    pager.detach()
    assert block.forward == own


def test_a_module_used_inside_its_own_forward():
    """`with_weights` around a call of the module: the outer use goes on with what it had."""
    from ts_core.paged import with_weights

    model, oracle, _ = build()

    def both(block):
        inner = block(X)
        return inner @ block.up.weight

    for net in (model, oracle):
        with_weights(net[0], both, net[0]).sum().backward()
    assert torch.equal(model[0].up.weight.grad, oracle[0].up.weight.grad)
