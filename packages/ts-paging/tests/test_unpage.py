"""Blocks and edges return to the device while training goes on: the same bits as the resident model."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_weight_pager import LAYERS, assert_equal_runs, batch, build, host, one, page, resident
from torch import nn

from ts_core.guard import GuardedParameter, guard_of
from ts_core.paged import with_weights
from ts_core.testing import assert_bit_equal, devices
from ts_paging.files import FileTensors, locate

STACK = [f"layers.{i}" for i in range(LAYERS)]
EDGES = ["embed", "norm", "head"]


def mover(device, moved=None):
    """Put a Parameter's value and gradient on the device, as whoever unpages must."""

    def move(parameter):
        assert type(parameter) is nn.Parameter
        if moved is not None:
            moved.append(parameter)
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device, copy=True)
        parameter.grad = None if grad is None else grad.to(device, copy=True)

    return move


def gradients(model):
    return {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.requires_grad}


def plain_step(tied=False, shift=0):
    """Loss and gradients of the resident model's first step."""
    model = build(tied)
    torch.manual_seed(0)
    losses = one(model, batch("cpu", shift))
    return losses[0].item(), gradients(model)


def train(model, steps, between=lambda step: None):
    """Train on the CPU; say what every step's loss was."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses.append(one(model, batch("cpu", step))[0].item())
        optimizer.step()
        between(step)
    return losses


def assert_same_training(order, policy="keep", slots=2, tied=False, files=None):
    """Train; after each step the next names of `order` return."""
    plain, model = build(tied), host(build(tied), files)
    pager = page(model, "cpu", slots, policy, files)
    expected = train(plain, len(order) + 1)
    left = iter([*order, []])
    losses = train(model, len(order) + 1, lambda step: pager.unpage(next(left), mover("cpu")))
    assert losses == expected
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.requires_grad:
            assert torch.equal(p.grad, q.grad), name
    return model, pager


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("in_files", [False, True])
def test_one_by_one_between_steps(policy, in_files, tmp_path):
    files = FileTensors(tmp_path) if in_files else None
    order = [
        ["layers.3"],
        ["head"],
        ["layers.0"],
        ["embed"],
        ["layers.4"],
        ["norm"],
        ["layers.1"],
        ["layers.2"],
    ]
    model, pager = assert_same_training(order, policy, files=files)
    assert pager.slots == []
    assert pager.edges == []
    assert [block.policy for block in pager.blocks] == [policy] * LAYERS
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert guard_of(parameter) is None
        assert locate(parameter) is None
    pager.detach()
    assert all("forward" not in module.__dict__ for module in model.modules())
    if files is not None:
        files.close()


@given(
    st.lists(st.sampled_from([*STACK, *EDGES]), unique=True, max_size=5),
    st.lists(st.sampled_from(["keep", "offload", "recompute"]), min_size=LAYERS, max_size=LAYERS),
    st.integers(1, 3),
    st.data(),
)
def test_any_order_in_any_portions(names, policies, slots, data):
    order = []
    while names:
        count = data.draw(st.integers(1, len(names)))
        order.append(names[:count])
        names = names[count:]
    assert_same_training(order, policies, slots)


def test_a_tied_pair_returns_together():
    moved = []
    plain, model = build(True), host(build(True))
    pager = page(model, "cpu")
    expected = train(plain, 3)

    def between(step):
        if step == 0:
            pager.unpage(["embed", "head"], mover("cpu", moved))

    assert train(model, 3, between) == expected
    assert [id(p) for p in moved] == [id(model.embed.weight)]
    assert model.head.weight is model.embed.weight
    assert type(model.head.weight) is nn.Parameter


def test_half_of_a_tied_pair_leaves_the_weight_where_it_is():
    moved = []
    plain, model = build(True), host(build(True))
    pager = page(model, "cpu")
    expected = train(plain, 3)
    assert train(model, 3, lambda step: pager.unpage(["head"], mover("cpu", moved))) == expected
    assert moved == []
    assert type(model.embed.weight) is GuardedParameter


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("in_files", [False, True])
def test_a_graph_from_before_gives_the_right_gradients(policy, in_files, device, tmp_path):
    files = FileTensors(tmp_path) if in_files else None
    plain = build().to(device)
    torch.manual_seed(0)
    expected_loss = plain.loss(batch(device))
    expected_loss.backward()
    for names in ([*STACK, *EDGES], ["layers.1", "layers.4", "head"], STACK):
        model = host(build(), files)
        pager = page(model, device, 2, policy, files)
        torch.manual_seed(0)
        loss = model.loss(batch(device))
        pager.unpage(names, mover(device))
        loss.backward()
        assert loss.item() == expected_loss.item()
        wanted = gradients(plain)
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert p.grad.device == p.device, name
                assert torch.equal(p.grad.cpu(), wanted[name]), name
    if files is not None:
        files.close()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_passes_before_and_after_in_flight_together(policy):
    plain, model = build(), host(build())
    pager = page(model, "cpu", 2, policy)
    for current in (plain, model):
        torch.manual_seed(0)
        first = current.loss(batch("cpu"))
        if current is model:
            pager.unpage(["layers.0", "layers.2", "embed"], mover("cpu"))
        second = current.loss(batch("cpu", 1))
        second.backward()
        first.backward()
    expected = gradients(plain)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("device", devices())
def test_the_resident_rest_trains_as_if_it_had_never_been_paged(device):
    model = host(build())
    pager = page(model, device, 2, "recompute")
    pager.unpage(["layers.0", "layers.2", "embed"], mover(device))
    if device == "cpu":
        assert_equal_runs(model, one, False, device)
        return
    torch.manual_seed(0)
    losses = one(model, batch(device))
    _, expected_losses, expected = resident(one, False, device)
    assert losses[0].item() == expected_losses[0][0]
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[0][name]), name


def test_hooks_registered_while_paged_survive():
    model = host(build())
    pager = page(model, "cpu")
    seen, landed = [], []
    weight = model.layers[1].gate.weight
    handle = weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: landed.append(p.grad.clone()))
    one(model, batch("cpu"))
    first = weight.grad.clone()
    assert torch.equal(first, seen[0] * 2)
    pager.unpage(["layers.1"], mover("cpu"))
    model.zero_grad()
    torch.manual_seed(0)
    one(model, batch("cpu"))
    assert len(seen) == len(landed) == 2
    assert torch.equal(weight.grad, seen[1] * 2)
    assert torch.equal(landed[1], weight.grad)
    handle.remove()
    model.zero_grad()
    torch.manual_seed(0)
    one(model, batch("cpu"))
    assert len(seen) == 2
    assert len(landed) == 3


def test_an_update_under_way_is_done_first():
    model = host(build())
    pager = page(model, "cpu")
    weight = model.layers[1].gate.weight
    order = []
    guard_of(weight).pending = lambda: order.append("updated")
    pager.unpage(["layers.1"], lambda p: order.append("moved") if p is weight else None)
    assert order == ["updated", "moved"]


def test_slots_go_with_the_last_of_their_users():
    model = host(build())
    pager = page(model, "cpu", 2)
    stack, edge = pager.slots[:2], pager.slots[2]
    pager.unpage(["layers.0", "layers.2"], mover("cpu"))
    assert pager.slots == [*stack, edge]
    pager.unpage(["layers.4"], mover("cpu"))  # the last one in the first slot
    assert pager.slots == [stack[1], edge]
    pager.unpage(EDGES, mover("cpu"))
    assert pager.slots == [stack[1]]
    one(model, batch("cpu"))
    pager.unpage(STACK, mover("cpu"))
    assert pager.slots == []
    one(model, batch("cpu"))


def test_what_is_not_paged_any_more_is_left_alone():
    model = host(build())
    pager = page(model, "cpu")
    pager.unpage(["layers.0"], mover("cpu"))
    before = [block.module.__dict__["forward"] for block in pager.blocks]
    moved = []
    pager.unpage([], mover("cpu", moved))
    pager.unpage(["no.such.block"], mover("cpu", moved))
    assert moved == []
    assert before == [block.module.__dict__["forward"] for block in pager.blocks]


@pytest.mark.parametrize("device", devices())
def test_a_borrowed_weight_has_the_gradients_of_the_plain_model(device):
    """A loss that reads the head's weight itself, before and after the head returns."""

    def chunked(model, ids):
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(x)
        x = model.norm(x)

        def loss():
            return torch.stack([(piece @ model.head.weight.t()).logsumexp(-1).sum() for piece in x]).sum()

        return with_weights(model.head, loss)

    plain, model = build().to(device), host(build())
    pager = page(model, device, 2)
    for step in range(3):
        results = []
        for current in (plain, model):
            current.zero_grad()
            torch.manual_seed(step)
            loss = chunked(current, batch(device))
            loss.backward()
            results.append([loss.detach().cpu(), *gradients(current).values()])
        for got, expected in zip(*results, strict=True):
            assert_bit_equal(got, expected)
        if step == 1:
            pager.unpage(["head"], mover(device))


def test_a_copy_made_after_a_return_is_a_plain_model():
    model = host(build())
    pager = page(model, "cpu", 2, "recompute")
    pager.unpage(["layers.0", "embed"], mover("cpu"))
    twin = copy.deepcopy(model)
    loss, expected = plain_step()
    torch.manual_seed(0)
    assert one(twin, batch("cpu"))[0].item() == loss
    for name, grad in gradients(twin).items():
        assert torch.equal(grad, expected[name]), name
