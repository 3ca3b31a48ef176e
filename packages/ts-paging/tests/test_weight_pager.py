"""Paged training against the resident model: losses, gradients and weights, bit for bit."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StateError
from ts_core.guard import GuardedParameter, guard_of
from ts_core.testing import devices
from ts_paging.activations import FileActivations
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 5, 37


class Block(nn.Module):
    """Attention with dropout, a gated MLP, a bare parameter, and a weight that is used by its parent."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH).t(), requires_grad=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + F.dropout(F.linear(y, self.out.weight, self.out.bias), 0.1, self.training)
        return x + self.down(F.silu(self.gate(x @ self.frozen))) * self.scale


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, ids):
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(tied=False):
    torch.manual_seed(0)
    return Model(tied)


def host(model, files=None):
    """Put the weights where the pager expects them."""
    for parameter in model.parameters():
        parameter.data = files.place(parameter.data) if files else parameter.data.cpu()
    return model


def page(model, device, slots=2, policy="keep", files=None, **options):
    policies = [policy] * LAYERS if isinstance(policy, str) else policy
    pager = WeightPager(torch.device(device), slots=slots, gradients=files, min_offload_bytes=0, **options)
    blocks = [(f"layers.{i}", block, policies[i]) for i, block in enumerate(model.layers)]
    pager.attach(blocks, [("embed", model.embed), ("norm", model.norm), ("head", model.head)])
    return pager


def batch(device, shift=0):
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    return ids.roll(shift, 1).to(device)


def one(model, x):
    loss = model.loss(x)
    loss.backward()
    return [loss]


def forward_order(model, x):
    a, b = model.loss(x), model.loss(x.flip(1))
    a.backward()
    b.backward()
    return [a, b]


def reverse_order(model, x):
    a, b = model.loss(x), model.loss(x.flip(1))
    b.backward()
    a.backward()
    return [a, b]


def summed(model, x):
    loss = model.loss(x) + model.loss(x.flip(1))
    loss.backward()
    return [loss]


def retained(model, x):
    loss = model.loss(x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def accumulated(model, x):
    return [one(model, x.roll(i, 1))[0] for i in range(3)]


def penalised(model, x):
    loss = model.loss(x) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters()).to(x.device)
    loss.backward()
    return [loss]


def hooked(model, x):
    seen = []
    handles = [b.gate.register_forward_hook(lambda m, i, o: seen.append(o)) for b in model.layers]
    loss = model.loss(x) + sum(h.pow(2).mean() for h in seen[:LAYERS])
    loss.backward()
    for handle in handles:
        handle.remove()
    return [loss]


def interrupted(model, x):
    """A forward whose loss is dropped, and an evaluation in between."""
    model.loss(x.roll(2, 1))
    loss = model.loss(x)
    with torch.no_grad():
        model.loss(x.roll(1, 1))
    loss.backward()
    return [loss]


SEQUENCES = [
    one,
    forward_order,
    reverse_order,
    summed,
    retained,
    accumulated,
    penalised,
    hooked,
    interrupted,
]


def run(model, sequence, device, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses.append([loss.item() for loss in sequence(model, batch(device, step))])
        gradients.append({n: p.grad.clone().cpu() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, gradients


_resident = {}


def resident(sequence, tied, device):
    key = (sequence, tied, device)
    if key not in _resident:
        model = build(tied).to(device)
        # Weights are updated on the host in the paged run: torch's AdamW there, too.
        _resident[key] = (model, *run(model, sequence, device))
    return _resident[key]


def assert_equal_runs(model, sequence, tied, device):
    losses, gradients = run(model, sequence, device)
    oracle, expected_losses, expected = resident(sequence, tied, device)
    assert losses[0] == expected_losses[0]
    for name, grad in expected[0].items():
        assert torch.equal(gradients[0][name], grad), name
    if device == "cpu":
        assert losses == expected_losses
        for step, names in enumerate(expected):
            assert names.keys() == gradients[step].keys()
            for name, grad in names.items():
                assert torch.equal(gradients[step][name], grad), (step, name)
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_paged_training_is_the_resident_training(policy, sequence, tied, device):
    for slots in (1, 2, 3):
        model = host(build(tied))
        pager = page(model, device, slots, policy)
        assert_equal_runs(model, sequence, tied, device)
        runs = [block.runs for block in pager.blocks]
        forwards = {forward_order: 2, reverse_order: 2, summed: 2, accumulated: 3, interrupted: 3}
        times = 3 * forwards.get(sequence, 1)
        backwards = 3 * (forwards.get(sequence, 1) - 2 * (sequence is interrupted) + (sequence is retained))
        # The dropped forward and the evaluation of `interrupted` are not run again.
        assert runs == [times + (backwards if policy == "recompute" else 0)] * LAYERS
        assert (pager.activations.parked > 0) == (policy == "offload")
        assert all(block.fills > 0 for block in pager.blocks)
        assert pager.host_bytes > 0


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_weights_and_gradients_in_files(policy, device, tmp_path):
    files = FileTensors(tmp_path)
    for tied, sequence in itertools.product([False, True], [one, reverse_order, accumulated]):
        model = host(build(tied), files)
        pager = page(model, device, 2, policy, files)
        assert_equal_runs(model, sequence, tied, device)
        assert pager.disk_bytes > 0
        assert pager.host_bytes == 0
        pager.detach()
    files.close()


@given(policies=st.lists(st.sampled_from(["keep", "offload", "recompute"]), min_size=LAYERS, max_size=LAYERS))
def test_policies_may_differ_from_block_to_block(policies):
    model = host(build())
    page(model, "cpu", 2, policies)
    assert_equal_runs(model, one, False, "cpu")


def test_a_flipped_bit_in_a_slot_is_seen():
    model = host(build())
    pager = page(model, "cpu", 3)
    loss = model.loss(batch("cpu"))
    # The slot of the last block still holds its weights: a wrong byte must change the gradients.
    pager.blocks[-1].slot.buffer[5] ^= 0x40
    loss.backward()
    expected = resident(one, False, "cpu")[2][0]
    assert any(not torch.equal(p.grad, expected[n]) for n, p in model.named_parameters() if n in expected)


def test_create_graph_is_refused_by_name():
    for policy in ("keep", "offload", "recompute"):
        model = host(build())
        page(model, "cpu", 2, policy)
        x = model.embed.weight.detach()[None, :9].clone().requires_grad_()
        y = model.layers[0](x)
        with pytest.raises(StateError, match=r"create_graph=True.*layers\.0"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_writes_from_outside_reach_the_next_forward():
    model, oracle = host(build()), build()
    page(model, "cpu", LAYERS)  # every block keeps its slot
    x = batch("cpu")
    model.eval()
    oracle.eval()
    for write in (
        lambda m: m.layers[1].out.weight.mul_(0.5),
        lambda m: m.layers[1].gate.weight.copy_(torch.ones_like(m.layers[1].gate.weight)),
        lambda m: m.layers[2].out.weight.data.fill_(0.25),
        lambda m: m.layers[3].out.bias.detach().numpy().fill(2.0),
        lambda m: m.load_state_dict({k: v * 0.9 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.layers[0].out.weight, "data", torch.full((WIDTH, WIDTH), 0.1)),
    ):
        with torch.no_grad():
            write(model)
            write(oracle)
            assert torch.equal(model(x), oracle(x))


def test_a_weight_of_another_shape_is_refused():
    model = host(build())
    page(model, "cpu")
    model.layers[0].out.weight.data = torch.zeros(3, 3)
    with pytest.raises(StateError, match=r"layers\.0"):
        model(batch("cpu"))


def test_hooks_on_weights_see_the_whole_gradient_once():
    model, oracle = host(build(True)), build(True)
    seen = {}

    def hooks(net, tag):
        weight = net.embed.weight
        weight.register_hook(lambda g: seen.setdefault(tag, []).append(g.clone()) or g * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.setdefault(tag, []).append(p.grad.clone()))

    hooks(oracle, "plain")
    early = model.embed.weight.register_hook(lambda g: pytest.fail("removed before it could run"))
    page(model, "cpu")
    early.remove()
    hooks(model, "paged")
    for net in (model, oracle):
        torch.manual_seed(0)
        penalised(net, batch("cpu"))
    assert len(seen["paged"]) == len(seen["plain"]) == 2
    for a, b in zip(seen["paged"], seen["plain"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model.embed.weight.grad, oracle.embed.weight.grad)


def test_an_interrupted_backward_leaves_no_gradient_behind():
    model, oracle = host(build()), build()
    page(model, "cpu")
    x = batch("cpu")

    def fail(grad):
        raise KeyboardInterrupt

    for net in (model, oracle):
        y = net.layers[0](net.embed(x))
        y.register_hook(fail)
        for layer in net.layers[1:]:
            y = layer(y)
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
        net.zero_grad()
        torch.manual_seed(0)
        one(net, x)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_an_error_in_a_block_puts_the_parameters_back():
    model = host(build())
    page(model, "cpu")
    weight = model.layers[0].out.weight
    with pytest.raises(RuntimeError):
        model.layers[0](torch.zeros(1, 2, WIDTH + 1))
    assert model.layers[0].out.weight is weight


def test_clipping_schedulers_scaler_and_copies_work_on_paged_weights():
    model, oracle = host(build()), build()
    page(model, "cpu")
    for net in (model, oracle):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            torch.manual_seed(step)
            scaler.scale(net.loss(batch("cpu", step))).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p, q)
    twin = copy.deepcopy(model.layers[0].out)
    assert type(twin.weight) is nn.Parameter
    assert torch.equal(twin.weight, model.layers[0].out.weight)


def test_detach_gives_ordinary_parameters_back():
    model = host(build())
    pager = page(model, "cpu", 2, "offload")
    handle = model.embed.weight.register_hook(lambda g: g)
    assert type(model.embed.weight) is GuardedParameter
    one(model, batch("cpu"))
    pager.detach()
    assert all(type(p) is nn.Parameter and guard_of(p) is None for p in model.parameters())
    assert "forward" not in model.layers[0].__dict__
    assert len(model.embed.weight._backward_hooks) == 1
    handle.remove()
    model.zero_grad()
    assert_equal_runs(host(build()), one, False, "cpu")


@pytest.mark.parametrize("in_files", [False, True])
def test_gradient_buffers_are_used_again_unless_somebody_holds_them(in_files):
    files = FileTensors() if in_files else None
    model = host(build(), files)
    page(model, "cpu", files=files)
    one(model, batch("cpu"))
    first = model.embed.weight.grad.data_ptr()
    model.zero_grad(set_to_none=True)
    one(model, batch("cpu"))
    assert model.embed.weight.grad.data_ptr() == first
    held = model.embed.weight.grad
    copy_of = held.clone()
    model.zero_grad(set_to_none=True)
    one(model, batch("cpu", 3))
    assert model.embed.weight.grad.data_ptr() != held.data_ptr()
    assert torch.equal(held, copy_of)
    if files is not None:
        used = files.used_bytes
        for step in range(3):
            model.zero_grad(set_to_none=True)
            one(model, batch("cpu", step))
        assert files.used_bytes == used
        files.close()


def test_activations_in_files():
    files = FileTensors()
    store = FileActivations(files.store)
    model = host(build())
    page(model, "cpu", 2, "offload", activations=store)
    assert_equal_runs(model, reverse_order, False, "cpu")
    assert store.parked > 0
    assert store.brought_bytes > 0
    # What was parked went with the graphs.
    assert not [key for key in files.store.keys() if key.startswith("activation")]  # noqa: SIM118
    files.close()


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_resident_blocks_have_policies_too(policy):
    model = host(build())
    pager = page(model, "cpu", 2, policy, pages=lambda p: p is not model.layers[0].out.weight and p.dim() > 9)
    assert not pager.slots[:-1]
    assert_equal_runs(model, summed, False, "cpu")
    assert [block.runs for block in pager.blocks] == [12 if policy == "recompute" else 6] * LAYERS
    assert (pager.activations.parked > 0) == (policy == "offload")


def test_moving_and_converting_leave_paged_weights_alone():
    model = host(build())
    page(model, "cpu")
    names = [name for name, _ in model.named_parameters()]
    pointers = [p.data_ptr() for p in model.parameters()]
    model.to("cpu")
    model.float()
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.data_ptr() for p in model.parameters()] == pointers
    with pytest.raises(StateError, match="dtype"):
        model.half()
