"""Parameters read and written outside a block's forward while they are paged out.

A paged Parameter is the true value wherever it is used: by its parent, a penalty, a moving average, an edit
in place, a conversion or a loader. Each test compares with the same code on a model that is not paged.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from grid_models import (
    LAYERS,
    HostOptimizer,
    Stack,
    adamw,
    assert_same_grads,
    assert_same_values,
    batch,
    both,
    build,
    compare,
    lora,
    offload_adamw,
    one,
    paged,
    penalised,
    resident,
    same_bits,
    step,
    train,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

import trainstream
from ts_core.blocks import find_blocks
from ts_core.errors import StateError
from ts_core.testing import devices

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

HOWS = ["host", "disk", "wrap"]
POLICIES = ["keep", "offload", "recompute"]
KINDS = ["llama_tied", "lora"]  # trained as a whole, and frozen beside adapters
everywhere = pytest.mark.parametrize("how", HOWS)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


# -- what is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_every_parameter_reads_as_its_true_value(how, kind, device):
    with both(lambda: build(kind), how, device=device) as ((model, optimizer), (oracle, reference)):
        for seed in range(2):
            step(model, optimizer, seed=seed, device=device)
            step(oracle, reference, seed=seed, device=device)
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert p.shape == q.shape, name
            assert p.numel() == q.numel() > 0, name
            assert p.double().sum().item() == q.cpu().double().sum().item() or p.is_cuda, name
        assert_same_values(model, oracle)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_a_penalty_on_all_parameters(how, kind, policy, device):
    make = offload_adamw
    expected = resident(kind, penalised, "none", device, make)
    model = build(kind)
    with paged(model, how, policy, device, make) as (_, optimizer):
        compare(train(model, optimizer, penalised, device), expected)


@pytest.mark.parametrize("device", devices())
@everywhere
def test_the_gradient_of_a_penalty_alone(how, device):
    with both(lambda: build("llama_tied"), how, device=device) as ((model, _), _):
        (1e-3 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, 1e-3 * (2 * p.detach())), name


def test_a_penalty_taken_before_or_after_the_forward_pass():
    """A tied weight has three contributions; their order decides the last bit."""

    def first(model, ids):
        penalty = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss = model(input_ids=ids, labels=ids).loss + penalty
        loss.backward()
        return [loss]

    def last(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss = loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        return [loss]

    for sequence in (first, last):
        for kind in ("llama_tied", "gpt2"):
            model = build(kind)
            with paged(model, "host", make=adamw) as (_, optimizer):
                compare(train(model, optimizer, sequence), resident(kind, sequence, "none", "cpu"))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_a_moving_average_of_weights(how, kind, device):
    with both(lambda: build(kind), how, device=device) as runs:
        averages = []
        for model, optimizer in runs:
            average = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
            for seed in range(3):
                step(model, optimizer, seed=seed, device=device)
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        average[name].lerp_(p.cpu(), 0.1)
            averages.append(average)
        assert all(same_bits(averages[0][name], value) for name, value in averages[1].items())


@everywhere
def test_torch_averages_paged_models(how):
    with both(lambda: build("llama"), how) as ((model, optimizer), (oracle, reference)):
        averages = []
        for net, opt in ((model, optimizer), (oracle, reference)):
            average = torch.optim.swa_utils.AveragedModel(
                net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            for seed in range(2):
                step(net, opt, seed=seed)
                average.update_parameters(net)
            averages.append(average)
        for (name, p), q in zip(averages[0].named_parameters(), averages[1].parameters(), strict=True):
            assert type(p) is nn.Parameter, name
            assert torch.equal(p, q), name


# -- what is written -----------------------------------------------------------------------------------------

WRITES = {
    "mul": lambda p, other: p.mul_(0.5),
    "copy": lambda p, other: p.copy_(other),
    "data_item": lambda p, other: p.data.__setitem__(0, 0),
    "data_fill": lambda p, other: p.data.fill_(0.25),
    "data_assigned": lambda p, other: setattr(p, "data", other.to(p.device).clone()),
    "detached": lambda p, other: p.detach().add_(0.125),
    "numpy": lambda p, other: p.detach().numpy().fill(0.5) if not p.is_cuda else p.fill_(0.5),
    "rows": lambda p, other: p[1:].zero_(),
    "flat": lambda p, other: p.view(-1)[3:7].fill_(0.75),
    "init": lambda p, other: nn.init.constant_(p, 0.1),
    "foreach": lambda p, other: torch._foreach_mul_([p], 0.5),
    "set": lambda p, other: p.set_(other.to(p.device).clone()),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("slots", [1, LAYERS])  # all blocks evicted, and all still in their slots
@pytest.mark.parametrize("how", ["host", "disk"])
def test_a_write_between_steps_reaches_the_next_forward(how, slots, write, device):
    with both(lambda: build("llama"), how, device=device, slots=slots) as runs:
        other = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
        seen = []
        for model, optimizer in runs:
            losses = [step(model, optimizer, device=device)]
            weight = model.model.layers[1].self_attn.q_proj.weight
            with torch.no_grad():
                WRITES[write](weight, other)
                losses.append(model(input_ids=batch(1, device)).logits.tolist())
            if isinstance(optimizer, HostOptimizer):
                optimizer.follow()
            losses.append(step(model, optimizer, seed=1, device=device))
            seen.append(losses)
        assert seen[0] == seen[1]
        assert_same_values(runs[0][0], runs[1][0])


@pytest.mark.parametrize("write", ["mul", "copy", "data_item", "init"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_between_steps_reaches_a_wrapped_model(policy, write):
    with both(lambda: build("llama"), "wrap", policy) as runs:
        other = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
        seen = []
        for model, optimizer in runs:
            losses = [step(model, optimizer)]
            with torch.no_grad():
                WRITES[write](model.model.layers[1].self_attn.q_proj.weight, other)
            if isinstance(optimizer, HostOptimizer):
                optimizer.follow()
            losses += [step(model, optimizer, seed=seed) for seed in (1, 2)]
            seen.append(losses)
        assert seen[0] == seen[1]
        assert_same_values(runs[0][0], runs[1][0])


@pytest.mark.parametrize("slots", [1, LAYERS])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_write_between_forward_and_backward_is_refused_as_autograd_does(policy, slots):
    with both(lambda: build("llama"), "host", policy, slots=slots) as runs:
        for net, _ in runs:
            loss = net(input_ids=batch(0), labels=batch(0)).loss
            with torch.no_grad():
                net.model.layers[1].self_attn.q_proj.weight.mul_(0.5)
            with pytest.raises(RuntimeError, match="modified"):
                loss.backward()
        model = runs[0][0]
        model.zero_grad()
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        loss.backward()  # the next pass is in order again
        late = model(input_ids=batch(0), labels=batch(0)).loss
        runs[0][1].step()
        with pytest.raises(StateError, match=r"(lm_head|norm|layers\.\d).*optimizer step"):
            late.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_activation_changed_before_backward_is_refused_as_autograd_does(policy):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            return self.up(x).exp()  # saves its own result

    with both(lambda: Stack(Block), "host", policy) as runs:
        for net, _ in runs:
            x = net.embed(batch(0))
            given = x.clone()
            y = net.layers[0](given)
            z = net.layers[1](y)
            with torch.no_grad():
                y.mul_(2)
            if net is runs[0][0] and policy == "offload":
                # What was moved out is what forward computed with: right, and no reason to refuse.
                continue
            with pytest.raises(RuntimeError, match="modified"):
                z.sum().backward()


def loaded(model, factor, **options):
    state = {name: value * factor for name, value in model.state_dict().items()}
    return model.load_state_dict(state, **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_state_dicts_go_in_and_out(how, kind, device):
    with both(lambda: build(kind), how, device=device) as ((model, optimizer), (oracle, reference)):
        step(model, optimizer, device=device)
        step(oracle, reference, device=device)
        ours, theirs = model.state_dict(), oracle.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[name].cpu(), value.cpu()) for name, value in theirs.items())
        for net in (model, oracle):
            loaded(net, 0.5)
            partly = {k: v * 3 for k, v in net.state_dict().items() if "layers.1.mlp" in k or "norm" in k}
            missing, unexpected = net.load_state_dict(partly, strict=False)
            assert missing
            assert not unexpected
            with pytest.raises(RuntimeError, match="size mismatch"):
                net.load_state_dict({k: v[:1] for k, v in partly.items()}, strict=False)
        reference.follow()
        assert step(model, optimizer, seed=1, device=device) == step(oracle, reference, seed=1, device=device)
        assert_same_values(model, oracle)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "lora"])
@everywhere
def test_assigned_state_dicts_replace_the_parameters(how, kind, policy):
    """The new Parameters are what computes and what gets gradients; the optimizer has the old ones."""
    with both(lambda: build(kind), how, policy) as ((model, optimizer), (oracle, reference)):
        step(model, optimizer)
        step(oracle, reference)
        for net in (model, oracle):
            before = list(net.parameters())
            loaded(net, 0.5, assign=True)
            assert all(p is not q for p, q in zip(net.parameters(), before, strict=True))
            torch.manual_seed(3)
            net.zero_grad()
            one(net, batch(3))
        assert_same_values(model, oracle)
        assert_same_grads(model, oracle)
        new = offload_adamw(list(model.parameters()))
        again = HostOptimizer(oracle, offload_adamw)
        for seed in range(2):
            assert step(model, new, seed=seed) == step(oracle, again, seed=seed)
        assert_same_values(model, oracle)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert step(model, new) == step(oracle, again)


def test_a_replacement_that_does_not_fit_is_refused_by_name():
    with both(lambda: build("llama"), "host") as ((model, _), _):
        attention = model.model.layers[2].self_attn
        kept = attention.q_proj.weight
        for wrong in (
            nn.Parameter(torch.zeros(32, 32, dtype=torch.float64)),
            nn.Parameter(torch.zeros(3, 3)),
            nn.Parameter(torch.zeros(32, 32).t()),
        ):
            attention.q_proj._parameters["weight"] = wrong
            with pytest.raises(StateError, match=r"layers\.2.*'weight' was replaced"):
                model(input_ids=batch(0))
        attention.q_proj.weight = kept
        one(model, batch(0))


@everywhere
def test_vectors_of_parameters(how):
    with both(lambda: build("llama"), how) as ((model, optimizer), (oracle, reference)):
        step(model, optimizer)
        step(oracle, reference)
        ours, theirs = (parameters_to_vector(net.parameters()) for net in (model, oracle))
        assert torch.equal(ours, theirs)
        for net in (model, oracle):
            vector = parameters_to_vector(net.parameters()).detach()
            vector_to_parameters(vector * 0.5, net.parameters())
        reference.follow()
        for seed in (1, 2):
            assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
        assert_same_values(model, oracle)


@everywhere
def test_weights_are_frozen_and_unfrozen_between_steps(how):
    with both(lambda: build("llama"), how, make=lambda p: offload_adamw(list(p))) as runs:
        seen = []
        for model, optimizer in runs:
            losses = []
            for seed in range(4):
                for p in model.model.layers[2].mlp.parameters():
                    p.requires_grad_(seed % 2 == 0)
                losses.append(step(model, optimizer, penalised, seed))
                assert all(
                    (p.grad is None) == (seed % 2 == 1) for p in model.model.layers[2].mlp.parameters()
                )
            seen.append(losses)
        assert seen[0] == seen[1]
        assert_same_values(runs[0][0], runs[1][0])


@everywhere
def test_a_weight_that_was_frozen_when_paging_began_can_be_trained_later(how):
    def frozen():
        model = build("llama")
        model.model.layers[1].requires_grad_(False)
        return model

    with both(frozen, how) as ((model, _), (oracle, _)):
        for net in (model, oracle):
            net.model.layers[1].requires_grad_(True)
            for _ in range(2):  # the second pass adds to the first one's gradient
                torch.manual_seed(0)
                one(net, batch(0))
        assert_same_grads(model, oracle)


def test_an_optimizer_made_before_the_model_was_converted_trains_every_block():
    for how in HOWS:
        model = build("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to(torch.float64)
        start = values(model)
        with paged(model, how, make=lambda _, opt=optimizer: opt) as (_, given_back):
            assert given_back is optimizer
            step(model, optimizer)
            after = values(model)
        for index in range(LAYERS):
            names = [name for name in after if f"layers.{index}." in name]
            assert all(not torch.equal(after[name], start[name]) for name in names)


# -- blocks of other shapes ----------------------------------------------------------------------------------


class ReadsItsChild(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=32, bias=False)

    def forward(self, x):
        x = x + F.linear(x, self.proj.weight, self.proj.bias)
        return x + F.conv1d(x.transpose(1, 2), self.conv.weight, None, padding=1, groups=32).transpose(1, 2)


class Bare(nn.Module):
    """Owns a bare Parameter and no submodule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.list = nn.ParameterList([torch.ones(32), torch.zeros(32)])

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) * self.list[0] + self.list[1]


class Normed(nn.Module):
    """Weight and spectral norm by parametrization; the second has buffers that its forward writes."""

    def __init__(self):
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(32, 32))
        self.b = parametrizations.spectral_norm(nn.Linear(32, 32))

    def forward(self, x):
        return x + self.b(F.silu(self.a(x)))


class Batched(nn.Module):
    """Batch statistics: buffers written in every training pass."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.proj = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x + self.proj(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Strided(nn.Module):
    """A transposed and a channels-last weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 32).t() * 0.1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = F.gelu(x @ self.weight)[..., :32]
        b, s, _ = y.shape
        return x + self.conv(y.reshape(b, s, 4, 8).transpose(1, 2)).transpose(1, 2).reshape(b, s, 32)


class InPlace(nn.Module):
    """Changes tensors in place on its way, as nn.ReLU(inplace=True) does."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.act(self.up(x))).add_(x)


BLOCKS = [ReadsItsChild, Bare, Normed, Batched, Strided, InPlace]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
@everywhere
def test_blocks_that_use_parameters_in_their_own_way(how, block, policy, device):
    with both(lambda: Stack(block), how, policy, device) as ((model, optimizer), (oracle, reference)):
        for seed in range(3):
            ours = step(model, optimizer, seed=seed, device=device)
            assert ours == step(oracle, reference, seed=seed, device=device)
            assert_same_grads(model, oracle)
        assert_same_values(model, oracle)
        for (name, buffer), other in zip(model.named_buffers(), oracle.buffers(), strict=True):
            assert torch.equal(buffer, other), name
        ids = batch(7, device)
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).logits, oracle.eval()(ids).logits)


class Shared(Stack):
    """Two blocks share one module, and one block runs twice in a pass."""

    def __init__(self):
        super().__init__()
        self.layers[1].up = self.layers[0].up
        self.layers[3].norm = self.layers[0].norm

    def forward(self, input_ids, labels=None, **options):
        x = self.embed(input_ids)
        for index in (0, 1, 2, 1, 3, 0):
            x = self.layers[index](x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})


class Reordered(Stack):
    """Blocks in another order in every pass, some left out."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, input_ids, labels=None, **options):
        orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (2, 0, 3), (), (0, 1, 2, 3)]
        x = self.embed(input_ids)
        for index in orders[self.passes % len(orders)]:
            x = self.layers[index](x)
        self.passes += 1
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})


class ReadByTheModel(Stack):
    """The model itself uses a block's weights outside the block, before and after calling it."""

    def forward(self, input_ids, labels=None, **options):
        x = self.embed(input_ids)
        x = F.linear(x, self.layers[2].mlp.weight[:, :32])
        for layer in self.layers:
            x = layer(x)
        x = x * self.layers[0].scale
        logits = F.linear(self.norm(x), self.head.weight + self.embed.weight)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return type("Output", (), {"loss": loss, "logits": logits})


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [Shared, Reordered])
@everywhere
def test_blocks_shared_repeated_reordered_and_left_out(how, shape, policy, device):
    with both(shape, how, policy, device) as ((model, optimizer), (oracle, reference)):
        for seed in range(6):
            ours = step(model, optimizer, seed=seed, device=device)
            assert ours == step(oracle, reference, seed=seed, device=device)
            assert_same_grads(model, oracle)
        assert_same_values(model, oracle)


LAYOUTS = {
    "transposed": lambda value: value.t().contiguous().t(),
    "contiguous": lambda value: value.clone(memory_format=torch.contiguous_format),
    "gaps": lambda value: torch.stack([value, value], -1)[..., 0],
    "expanded": lambda value: value[:1].expand(value.shape),
    "offset": lambda value: torch.cat([value.new_zeros(7), value.flatten()])[7:].view(value.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["host", "disk"])
def test_data_assigned_with_another_layout(how, layout):
    """The bytes of a transposed tensor are another matrix; both weights are tried with both orders."""
    with both(lambda: Stack(Strided), how) as ((model, optimizer), (oracle, reference)):
        value = torch.randn(32, 48, generator=torch.Generator().manual_seed(2)) * 0.1
        for net in (model, oracle):
            for index, transposed in ((1, True), (2, False)):
                given_order = value.t().contiguous().t() if transposed else value
                net.layers[index].weight.data = LAYOUTS[layout](given_order)
        reference.follow()
        with torch.no_grad():
            assert torch.equal(model(batch(0)).logits, oracle(batch(0)).logits)
        if layout != "expanded":  # no optimizer can write to it
            for seed in range(2):
                assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
            assert_same_values(model, oracle)


@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_the_model_reads_weights_of_its_blocks(how, policy):
    with both(ReadByTheModel, how, policy) as ((model, optimizer), (oracle, reference)):
        for seed in range(3):
            assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
        assert_same_values(model, oracle)


@given(
    orders=st.lists(st.lists(st.integers(0, LAYERS - 1), max_size=6), min_size=1, max_size=4), data=st.data()
)
def test_any_order_of_blocks(orders, data):
    """Also with prefetch, whose guess of what comes next is then wrong."""
    policies = data.draw(st.lists(st.sampled_from(POLICIES), min_size=LAYERS, max_size=LAYERS))
    slots = data.draw(st.integers(1, 3))
    with both(Stack, "disk", policies, slots=slots) as ((model, optimizer), (oracle, reference)):
        for seed, order in enumerate(orders):
            losses = []
            for net, opt in ((model, optimizer), (oracle, reference)):
                opt.zero_grad()
                torch.manual_seed(seed)
                x = net.embed(batch(seed))
                for index in order:
                    x = net.layers[index](x)
                loss = net.head(net.norm(x)).pow(2).mean()
                loss.backward()
                opt.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            assert_same_grads(model, oracle)
        assert_same_values(model, oracle)


def test_what_trains_and_what_does_not_is_what_was_asked():
    """Gradients that land on temporary tensors would train nothing and raise nothing."""
    for how in HOWS:
        for kind in KINDS:
            model = build(kind)
            start = values(model)
            with paged(model, how) as (_, optimizer):
                for seed in range(2):
                    step(model, optimizer, seed=seed)
                after = values(model)
            trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            changed = {name for name, value in after.items() if not torch.equal(value, start[name])}
            assert changed == trained


@everywhere
def test_adapters_merged_and_unmerged_while_paged(how):
    with both(lambda: lora(build("llama")), how) as ((model, optimizer), (oracle, reference)):
        ids = batch(5)
        step(model, optimizer)
        step(oracle, reference)
        for act in ("merge_adapter", "unmerge_adapter"):
            for net in (model, oracle):
                getattr(net.eval(), act)()
            with torch.no_grad():
                assert torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)
        with model.disable_adapter(), oracle.disable_adapter(), torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)
        reference.follow()
        assert step(model.train(), optimizer, seed=1) == step(oracle.train(), reference, seed=1)
        assert_same_values(model, oracle)


def test_unwrapped_models_have_the_values_of_the_last_step():
    model = build("llama")
    oracle = copy.deepcopy(model)
    model, optimizer = trainstream.wrap(model, offload_adamw(list(model.parameters())), param_offload=True)
    reference = offload_adamw(list(oracle.parameters()))
    step(model, optimizer)
    step(oracle, reference)
    trainstream.unwrap(model)
    assert_same_values(model, oracle)
    assert not any(hasattr(block.__dict__.get("forward"), "with_weights") for block in find_blocks(model))
