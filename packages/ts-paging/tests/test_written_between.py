"""What a block that recomputes reads where it is: written between forward and backward, it is noticed."""

import copy

import pytest
import torch
from torch import nn

from ts_core.errors import StateError
from ts_core.testing import devices
from ts_paging.blockmode import BlockMode
from ts_paging.pager import WeightPager


class Block(nn.Module):
    """Paged weights in the middle; beside them a bias, an adapter, a frozen norm, and a large buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.up = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8, bias=False)
        self.idle = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(1 << 19))  # 2 MiB
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = self.norm(x)
        return x + (self.up(x) + self.adapter(x)).exp() * 0.1 * self.table[3] + self.calls


def build(device, paged, policy="recompute", block_mode=False):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).to(device)
    oracle = copy.deepcopy(model)
    chosen = {id(p) for block in model for p in block.up.parameters()} if paged else set()
    for p in model.parameters():
        if id(p) in chosen:
            p.data = p.data.cpu()
    pager = WeightPager(torch.device(device), min_offload_bytes=0, pages=lambda p: id(p) in chosen)
    pager.attach([(f"blocks.{i}", block, policy) for i, block in enumerate(model)])
    pager.block_mode = BlockMode(None) if block_mode else None
    return model, oracle


def batch(device):
    return torch.linspace(-1, 1, 24, device=device).reshape(3, 8)


def scale(tensor):
    with torch.no_grad():
        tensor.mul_(1.5)


EDITS = {
    "trained weight": (lambda b: scale(b.adapter.weight), r"blocks\.1\.adapter\.weight"),
    "frozen weight": (lambda b: scale(b.norm.weight), r"blocks\.1\.norm\.weight"),
    "bias, which autograd does not save": (lambda b: scale(b.norm.bias), r"blocks\.1\.norm\.bias"),
    "large buffer": (lambda b: scale(b.table), "buffer 'table'"),
    "exchanged weight": (
        lambda b: setattr(b.adapter, "weight", nn.Parameter(b.adapter.weight.detach() * 2)),
        r"blocks\.1\.adapter\.weight",
    ),
    "exchanged buffer": (lambda b: setattr(b, "table", b.table * 2), "buffer 'table'"),
    "step of an optimizer": (
        lambda b: torch.optim.SGD(b.adapter.parameters(), lr=0.1).step(),
        r"blocks\.1\.adapter\.weight",
    ),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_a_second_run_on_other_values_is_refused_by_name(edit, paged, device):
    model, _ = build(device, paged)
    change, name = EDITS[edit]
    for block in model:
        block.adapter.weight.grad = torch.zeros_like(block.adapter.weight)
    loss = model(batch(device)).square().sum()
    change(model[1])
    with pytest.raises(RuntimeError, match=rf"{name}.*modified in place since the forward pass") as caught:
        loss.backward()
    assert isinstance(caught.value, StateError)
    model(batch(device)).square().sum().backward()  # and it goes on


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_block_mode_refuses_them_too(edit, paged, device):
    model, _ = build(device, paged, block_mode=True)
    for _ in range(3):
        model(batch(device)).square().sum().backward()
    loss = model(batch(device)).square().sum()
    EDITS[edit][0](model[1])
    with pytest.raises(RuntimeError, match=r"blocks\.1.*modified in place since the forward pass"):
        loss.backward()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_what_torch_refuses_in_a_plain_run_is_refused_under_every_policy(policy, paged, device):
    model, oracle = build(device, paged, policy)
    for current in (model, oracle):
        loss = current(batch(device)).square().sum()
        scale(current[1].adapter.weight)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [True, False])
def test_writes_before_forward_after_backward_and_to_small_buffers_are_none(paged, device):
    model, oracle = build(device, paged)
    for step in range(3):
        found = []
        for current in (model, oracle):
            current.zero_grad()
            loss = current(batch(device)).square().sum()
            if current is model:
                current[1].calls.fill_(7.0)  # a second run starts from its own copy
                current[1].calls.fill_(float(step))
            loss.backward(retain_graph=True)
            loss.backward()
            with torch.no_grad():
                for p in current.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad.to(p.device), alpha=1e-3)
            for block in current:
                block.calls.fill_(step + 1.0)
            found.append([p.grad.cpu() for p in current.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
