"""Paged modules get slots of their own: the same bits, and each weight is brought once per update."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_unpage import EDGES, STACK, gradients, mover, train
from test_weight_pager import LAYERS, batch, build, host, one, page

from ts_core.errors import StorageError
from ts_core.guard import GuardedParameter, guard_of
from ts_core.testing import devices
from ts_paging.files import FileTensors

ALL = [*STACK, *EDGES]


def steps(model, device, count, between=lambda step: None):
    """Train with host gradients and a host optimizer, as a wrapped model does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses.append(one(model, batch(device, step))[0].item())
        optimizer.step()
        between(step)
    return losses


def assert_same(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(p, q[1].cpu()), name


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("in_files", [False, True])
def test_every_module_settles_at_once(policy, tied, in_files, tmp_path):
    files = FileTensors(tmp_path) if in_files else None
    plain, model = build(tied), host(build(tied), files)
    pager = page(model, "cpu", 2, policy, files)
    expected = train(plain, 4)
    assert train(model, 4, lambda step: step == 1 and pager.settle(ALL)) == expected
    assert_same(model, plain)
    assert len(pager.slots) == LAYERS + (2 if tied else 3)
    assert all(slot.own for slot in pager.slots)
    assert [block.policy for block in pager.blocks] == [policy] * LAYERS
    assert all(type(p) is GuardedParameter for p in model.parameters() if p.requires_grad)
    pager.detach()
    assert all("forward" not in module.__dict__ for module in model.modules())
    if files is not None:
        files.close()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_brought_once_for_every_update(policy, tied, device):
    model, settled = host(build(tied)), host(build(tied))
    page(model, device, 2, policy)
    pager = page(settled, device, 2, policy)
    pager.settle(ALL)
    assert steps(settled, device, 3) == steps(model, device, 3)
    assert_same(settled, model)
    counts = {b.name: b.fills for b in [*pager.blocks, *pager.edges]}
    # The frozen weight of a block comes along; tied modules bring theirs once between them.
    assert all(counts[name] == 3 for name in STACK), counts
    assert sum(counts[name] for name in EDGES) == (6 if tied else 9), counts
    with torch.no_grad():
        for _ in range(3):
            settled.loss(batch(device))
    again = {b.name: b.fills for b in [*pager.blocks, *pager.edges]}
    assert all(again[name] == 4 for name in STACK), again


@given(
    st.lists(st.sampled_from(ALL), unique=True),
    st.lists(st.sampled_from(ALL), unique=True),
    st.lists(st.sampled_from(["keep", "offload", "recompute"]), min_size=LAYERS, max_size=LAYERS),
    st.integers(1, 3),
    st.booleans(),
)
def test_some_settle_and_some_return(settling, returning, policies, slots, first):
    plain, model = build(), host(build())
    pager = page(model, "cpu", slots, policies)

    def between(step):
        if step == (0 if first else 1):
            pager.settle(settling)
        elif step == (1 if first else 0):
            pager.unpage(returning, mover("cpu"))

    assert train(model, 4, between) == train(plain, 4)
    assert_same(model, plain)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_a_graph_from_before_gives_the_right_gradients(policy, device):
    plain = build().to(device)
    torch.manual_seed(0)
    expected = plain.loss(batch(device))
    expected.backward()
    model = host(build())
    pager = page(model, device, 2, policy)
    torch.manual_seed(0)
    loss = model.loss(batch(device))
    pager.settle(["layers.1", "layers.4", "head"])
    torch.manual_seed(0)
    later = model.loss(batch(device))
    loss.backward()
    assert loss.item() == later.item() == expected.item()
    wanted = gradients(plain)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, wanted[name]), name
    model.zero_grad()
    later.backward()
    for name, grad in gradients(model).items():
        assert torch.equal(grad, wanted[name]), name


def test_no_room_changes_nothing(monkeypatch):
    model, plain = host(build()), build()
    pager = page(model, "cpu")
    blocks, slots, made = list(pager.blocks), list(pager.slots), []

    class Scarce:
        def __init__(self, nbytes, device, *, own=False):
            made.append(nbytes)
            if len(made) == 3:
                raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("ts_paging.pager.Slot", Scarce)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            pager.settle(ALL)
    assert pager.blocks == blocks
    assert pager.slots == slots
    assert train(model, 3) == train(plain, 3)


def test_a_write_outside_reaches_the_slot():
    model, plain = host(build()), build()
    pager = page(model, "cpu")
    pager.settle(ALL)
    for current in (model, plain):
        torch.manual_seed(0)
        one(current, batch("cpu"))
        with torch.no_grad():
            current.layers[2].gate.weight.mul_(0.5)
            current.head.weight.detach().numpy()[0] = 0.25
    torch.manual_seed(1)
    got = model.loss(batch("cpu")).item()
    torch.manual_seed(1)
    assert got == plain.loss(batch("cpu")).item()


def test_a_frozen_model_streams_as_before_once_its_state_dict_is_gone(tmp_path):
    files = FileTensors(tmp_path)
    model = host(build().requires_grad_(False), files)
    pager = page(model, "cpu", 2, "keep", files)
    expected = model.loss(batch("cpu")).item()

    def fills():
        before = [block.fills for block in pager.blocks]
        assert model.loss(batch("cpu")).item() == expected
        return [block.fills - n for block, n in zip(pager.blocks, before, strict=True)]

    model.eval()
    expected = model.loss(batch("cpu")).item()
    fills()
    usual = fills()
    state = model.state_dict()
    assert max(fills()) == max(fills()) == 1  # at its use, never twice
    del state
    fills()
    assert fills() == usual
    model.layers[0].gate.weight.detach().numpy()[:] = 0.5
    assert model.loss(batch("cpu")).item() != expected
    files.close()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("how", ["settle", "unpage"])
@pytest.mark.parametrize("seen", [True, False])
def test_parameters_that_were_assigned_settle_and_return(how, seen, device):
    plain, model = build().to(device), host(build())
    pager = page(model, device, 2)
    halved = {name: value.detach() / 2 for name, value in plain.state_dict().items()}
    plain.load_state_dict(halved)
    model.load_state_dict({name: value.cpu().clone() for name, value in halved.items()}, assign=True)
    if seen:  # the blocks have run with them
        with torch.no_grad():
            model.loss(batch(device))
    if how == "settle":
        pager.settle(ALL)
        assert all(len(b.parameters) == len(list(b.module.parameters())) for b in pager.blocks)
        assert all(type(p) is GuardedParameter for p in model.parameters() if p.requires_grad)
    else:
        pager.unpage(ALL, mover(device))
        assert all(guard_of(p) is None and p.device.type == device for p in model.parameters())
    for each in (plain, model):
        torch.manual_seed(0)
        each.loss(batch(device)).backward()
    wanted = gradients(plain)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, wanted[name]), name


def test_nothing_returns_while_an_update_is_in_trouble():
    plain, model = build(), host(build())
    pager = page(model, "cpu", 2)
    told = [StorageError(5, "no", "disk")]

    def pending():
        if told:
            raise told.pop()

    guard_of(pager.blocks[2].parameters[0]).pending = pending
    with pytest.raises(StorageError):
        pager.unpage(["layers.1", "layers.2"], mover("cpu"))
    assert all("forward" in block.module.__dict__ for block in pager.blocks)
    assert all(type(p) is GuardedParameter for p in model.parameters() if p.requires_grad)
    pager.unpage(["layers.1", "layers.2"], mover("cpu"))
    assert train(model, 2) == train(plain, 2)


def test_everything_is_given_back_whatever_became_of_an_update():
    model = host(build())
    pager = page(model, "cpu", 2)

    def pending():
        raise StorageError(5, "no", "disk")

    guard_of(pager.blocks[0].parameters[0]).pending = pending
    with pytest.raises(StorageError):
        pager.detach()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(guard_of(p) is None for p in model.parameters())
    assert pager.slots == []


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("how", ["settle", "unpage"])
def test_slots_of_a_graph_from_before_go_with_it(how, device):
    model = host(build())
    pager = page(model, device, 2)
    loss = model.loss(batch(device))
    slots = [weakref.ref(slot) for slot in pager.slots]
    pager.settle(ALL) if how == "settle" else pager.unpage(ALL, mover(device))
    loss.backward()
    del loss
    gc.collect()
    assert all(slot() is None for slot in slots)


@pytest.mark.parametrize("device", devices())
def test_hooks_run_on_gradients_of_a_graph_from_before(device):
    plain, model = build().to(device), host(build())
    pager = page(model, device, 2)
    ran = []
    for each in (plain, model):
        for name, p in each.named_parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * 2)
                p.register_post_accumulate_grad_hook(lambda q, name=name: ran.append(name))
    graphs = []
    for each in (plain, model):
        torch.manual_seed(0)
        graphs.append(each.loss(batch(device)))
    pager.unpage(ALL, mover(device))
    for graph in graphs:
        graph.backward()
    wanted = gradients(plain)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, wanted[name]), name
        assert ran.count(name) == 2, name


def test_backward_is_fetched_ahead_of_whatever_has_escaped(tmp_path, monkeypatch):
    files = FileTensors(tmp_path)
    model = host(build(), files)
    pager = page(model, "cpu", 2, "keep", files)
    ahead = []
    start = pager._start
    monkeypatch.setattr(
        pager, "_start", lambda block, urgent=False: (ahead.append(not urgent), start(block, urgent))
    )

    def fetched_ahead():
        loss = model.loss(batch("cpu"))
        ahead.clear()
        loss.backward()
        return sum(ahead), len(ahead)

    fetched_ahead()
    usual = fetched_ahead()
    assert usual[0] > 0
    model.state_dict()
    assert fetched_ahead() == usual
    pager.detach()
    files.close()


def test_a_pass_that_is_over_is_taken_off_the_list():
    """Not by a callback of its end, in which a Ctrl-C would be lost."""
    model = host(build())
    pager = page(model, "cpu", 2)
    held = []
    loss = model.loss(batch("cpu"))
    model.layers[0].gate.weight.register_hook(lambda grad: held.extend(pager.sink._passes.values()))
    loss.backward()
    assert len(held) == 1
    assert len(pager.sink._passes) == 0


def around(module, calls):
    """Put a function around a module's forward, as profilers and patches do."""
    inner = module.forward

    def forward(*args, **kwargs):
        calls.append(module)
        return inner(*args, **kwargs)

    module.forward = forward
    return forward


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_function_that_others_put_around_a_module_stays(policy):
    plain, model = build(), host(build())
    calls, before = [], []
    first = around(model.layers[3], before)  # below ours
    pager = page(model, "cpu", 2, policy)
    mine = [around(model.layers[1], calls), around(model.head, calls)]

    def between(step):
        if step == 0:
            pager.settle(["layers.1", "layers.3", "head"])
        elif step == 1:
            pager.unpage(["layers.1", "layers.3"], mover("cpu"))
        elif step == 2:
            pager.unpage(["head"], mover("cpu"))

    assert train(model, 4, between) == train(plain, 4)
    assert calls == [model.layers[1], model.head] * 4
    assert len(before) == 4 * (2 if policy == "recompute" else 1)
    pager.detach()
    assert [model.layers[1].forward, model.head.forward] == mine
    assert model.layers[3].forward is first
    assert train(model, 1) == train(plain, 1)
    assert calls == [model.layers[1], model.head] * 5
    assert all("forward" not in model.layers[i].__dict__ for i in (0, 2, 4))
