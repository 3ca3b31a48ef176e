"""Memory that runs out in a micro-batch: room is made, it runs again, and not a bit differs."""

import copy
import functools
import gc
import random
import weakref

import numpy as np
import peft
import pytest
import torch
from conftest import tiny_llama
from torch import nn

import trainstream
from trainstream._budget import host_used
from ts_core.errors import ArgumentError, StateError
from ts_core.testing import devices
from ts_optim import OffloadAdamW
from ts_paging.files import locate

MIB = 1 << 20
STEPS, ACCUMULATED = 5, 2
WHERE = ("embedding", "forward", "recompute", "attention backward", "early backward", "head")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


class Fault:
    """Raises what a device raises when its memory runs out, when armed and reached so many times."""

    def __init__(self):
        self.left = -1
        self.raised = 0

    def arm(self, reached=0):
        self.left = reached

    def reach(self):
        if self.left == 0:
            self.raised += 1
            self.left = -1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        self.left -= self.left > 0


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.fault.reach()
        return grad, None


def plant(model, where):
    """Put the fault into a model, before it is wrapped."""
    fault, base = Fault(), model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = base.model.layers
    if where == "embedding":
        base.model.embed_tokens.register_forward_pre_hook(lambda *_: fault.reach())
    elif where == "forward":
        layers[2].mlp.register_forward_pre_hook(lambda *_: fault.reach())
    elif where == "recompute":
        layers[1].mlp.register_forward_pre_hook(lambda *_: fault.reach())
    elif where == "attention backward":
        layers[2].self_attn.o_proj.register_forward_hook(lambda m, a, out: Trip.apply(out, fault))
    elif where == "early backward":  # the last ones of backward: nearly all gradients are there
        layers[0].mlp.register_forward_hook(lambda m, a, out: Trip.apply(out, fault))
    else:
        base.lm_head.register_forward_pre_hook(lambda *_: fault.reach())
    return fault


def model_of(kind="full", dtype=torch.float32):
    model = tiny_llama(num_hidden_layers=4, attention_dropout=0.2).to(dtype)
    if kind == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def batches_of(step, device):
    made = torch.Generator().manual_seed(step)
    return [
        {"input_ids": ids, "labels": ids}
        for ids in (torch.randint(0, 97, (2, 9), generator=made).to(device) for _ in range(ACCUMULATED))
    ]


def run(kind, where, arm, *, device="cpu", dtype=torch.float32, optimizer=OffloadAdamW, **options):
    torch.manual_seed(1)
    model = model_of(kind, dtype).to(device)
    fault = plant(model, where)
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {} if optimizer is torch.optim.SGD else {"accumulation_steps": ACCUMULATED}
    chosen = optimizer(trained, lr=1e-2, **settings)
    model, chosen = trainstream.wrap(model, chosen, quantize="none", **options)
    session = model._trainstream_session
    torch.manual_seed(2)
    losses = []
    for step in range(STEPS):
        reached = arm.get(step)
        if reached is not None:
            fault.arm(reached)
        losses.append(session.train_step(batches_of(step, device)).item())
    state = {
        (name, key): value.detach().cpu().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
        for key, value in chosen.state[p].items()
        if isinstance(value, torch.Tensor)
    }
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    grads = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    return losses, weights, grads, state, fault, model


def assert_same(got, expected):
    assert got[0] == expected[0]
    for mine, theirs in zip(got[1:4], expected[1:4], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype is theirs[name].dtype
            assert torch.equal(value, theirs[name]), name


def room(device):
    return {"ram_budget": host_used() + 3000 * MIB} if device == "cpu" else {"vram_budget": "8GiB"}


@functools.cache
def undisturbed(kind, device):
    """The fault is planted somewhere, but never armed."""
    result = run(kind, "forward", {}, device=device, **room(device))
    assert result[4].raised == 0
    policies = result[5]._trainstream_session.plan.policy
    assert device == "cuda" or policies == ("keep",) * 4  # measured, and there is room
    trainstream.unwrap(result[5])
    return result[:4]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("kind", "where"), [("full", where) for where in WHERE] + [("lora", where) for where in WHERE[2:5]]
)
def test_a_micro_batch_runs_again_and_nothing_differs(kind, where, device):
    expected = undisturbed(kind, device)
    # In the second micro-batch of step 3 and, with everything recomputed by then, once more in step 4.
    again = 3 if where == "recompute" else 1
    got = run(kind, where, {3: 1, 4: again}, device=device, **room(device))
    assert got[4].raised == 2
    assert_same(got, expected)
    session = got[5]._trainstream_session
    assert session.plan.policy == ("recompute",) * 4
    assert not session.adapting
    said = [line for line in session.events.events if "out of memory" in line]
    assert len(said) == 2
    if device == "cpu":  # beside a GPU weights may have the room first, and activations none yet
        assert "keep their activations no longer" in said[0]
    assert "stream from now on" in said[1]
    assert session.plan.paged
    paged = [p for b in session.pager.blocks for p in b.parameters]
    assert paged
    if device == "cpu":
        assert all(locate(p.detach()) is not None for p in paged)
    trainstream.unwrap(got[5])
    assert all(type(p) is nn.Parameter for p in got[5].parameters())


# -- what has to be the same again -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [(OffloadAdamW, torch.bfloat16), (torch.optim.SGD, torch.float32)]
)
def test_gradients_that_came_before_the_fault_count_once(optimizer, dtype):
    """Resident weights, and the fault at the end of the second micro-batch."""
    expected = run("full", "early backward", {}, optimizer=optimizer, dtype=dtype)
    assert expected[5]._trainstream_session.pager is None
    got = run("full", "early backward", {1: 1, 2: 1}, optimizer=optimizer, dtype=dtype)
    assert got[4].raised == 2
    assert_same(got, expected)
    session = got[5]._trainstream_session
    assert session.plan.policy == ("recompute",) * 4  # a pager was made for that
    paged = len(session.plan.paged)
    assert 0 < paged < len(session.plan.blocks)  # half of it gave room enough
    if dtype is torch.bfloat16 and optimizer is OffloadAdamW:
        assert {g.dtype for g in got[2].values()} == {torch.float32}
    trainstream.unwrap(got[5])
    assert "zero_grad" not in got[5].__dict__
    assert not got[5]._forward_pre_hooks


class Counts(nn.Module):
    """Writes buffers in each forward pass, and fails when told to."""

    def __init__(self, large=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(400_000 if large else 2))
        self.fault = Fault()

    def forward(self, x):
        self.seen += 1
        x = self.norm(self.linear(x))
        self.fault.reach()
        return nn.functional.dropout(x, 0.5)


class Draws(nn.Module):
    """Draws from every generator before its stack computes."""

    def __init__(self, large):
        super().__init__()
        self.layers = nn.ModuleList([Counts(large) for _ in range(3)])

    def forward(self, x):
        x = x * (random.random() + np.random.random() + torch.rand(()))
        for layer in self.layers:
            x = layer(x)
        return x


def counted(fail, large=False):
    torch.manual_seed(0)
    model, _ = trainstream.wrap(Draws(large), None, lr=1e-2)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(3)
    losses = []
    for step in range(3):
        if fail and step == 1:
            model.layers[1].fault.arm(1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model._trainstream_session.train_step([x, -x], loss=lambda y, _: y.square().sum())
        losses.append(loss.item())
    state = {name: t.clone() for name, t in model.state_dict().items()}
    return losses, state, random.random(), float(torch.rand(())), model.layers[1].fault.raised


def test_buffers_and_all_random_numbers_are_what_they_were():
    expected, got = counted(False), counted(True)
    assert (expected[4], got[4]) == (0, 1)
    assert got[0] == expected[0]
    assert got[2:4] == expected[2:4]
    for name, t in expected[1].items():
        assert torch.equal(got[1][name], t), name


def test_buffers_that_are_made_anew_in_each_pass_do_not_add_up():
    class Averaging(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x)

    model, _ = trainstream.wrap(nn.Sequential(*[Averaging() for _ in range(3)]), param_offload=True)
    session = model._trainstream_session
    first = model[0].mean
    gone = weakref.ref(first)
    del first
    for _ in range(4):
        session.train_step([torch.ones(2, 4)] * 2, lambda out, _: out.square().mean())
    assert gone() is None
    assert len(session.relief._copies) == 3
    trainstream.unwrap(model)


def test_a_large_buffer_that_was_written_is_a_reason_not_to_run_again():
    with pytest.raises(torch.OutOfMemoryError, match="wrote the buffer 'seen' of 1600000 bytes"):
        counted(True, large=True)


@pytest.mark.parametrize("device", devices())
def test_weights_that_blocks_share_leave_and_train_as_before(device):
    def shared(fail):
        torch.manual_seed(1)
        model = model_of().to(device)
        layers = model.model.layers
        layers[2].self_attn.q_proj = layers[0].self_attn.q_proj
        fault = plant(model, "forward")
        model, _ = trainstream.wrap(model, None, lr=1e-2, recompute=False, activation_offload=False)
        session = model._trainstream_session
        losses = []
        for step in range(3):
            if fail and step == 1:
                fault.arm(1)
            losses.append(session.train_step(batches_of(step, device)).item())
        return losses, {n: p.detach().cpu().clone() for n, p in model.named_parameters()}, model, layers

    expected, got = shared(False), shared(True)
    assert got[0] == expected[0]
    for name, t in expected[1].items():
        assert torch.equal(got[1][name], t), name
    model, layers = got[2:]
    paged = {row.name for row in model._trainstream_session.plan.blocks if row.tier != "device"}
    assert {"model.layers.0", "model.layers.2"} <= paged
    weight = layers[0].self_attn.q_proj.weight
    assert weight is layers[2].self_attn.q_proj.weight
    assert weight.device.type == "cpu"
    if device == "cpu":
        assert locate(weight.detach()) is not None
    trainstream.unwrap(model)


# -- where it ends ---------------------------------------------------------------------------------------


def test_after_a_few_tries_the_error_comes_with_what_was_tried():
    model = model_of()
    fault = plant(model, "head")
    model, _ = trainstream.wrap(model, None, lr=1e-2)
    session = model._trainstream_session
    session.train_step(batches_of(0, "cpu"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    always, fault.reach = fault.reach, lambda: (fault.arm(), always())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        session.train_step(batches_of(1, "cpu"))
    text = str(caught.value)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 1.00 GiB\nTried before: 4 blocks keep their"
    )
    assert text.count("groups stream from now on") == 2
    assert "Nothing is left that could make room. Use a smaller micro-batch" in text
    assert fault.raised == 4
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    fault.reach = always
    session.train_step(batches_of(1, "cpu"))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert grads.keys() == before.keys()
    trainstream.unwrap(model)


def test_what_an_option_has_fixed_stays_fixed():
    model = model_of()
    fault = plant(model, "forward")
    options = {"param_offload": False, "recompute": False, "activation_offload": False}
    model, _ = trainstream.wrap(model, None, lr=1e-2, **options)
    session = model._trainstream_session
    always, fault.reach = fault.reach, lambda: (fault.arm(), always())
    with pytest.raises(torch.OutOfMemoryError, match="memory that was only cached"):
        session.train_step(batches_of(0, "cpu"))
    assert fault.raised == 2
    assert session.plan.paged == ()
    assert session.plan.policy == ("keep",) * 4


def test_updates_during_backward_cannot_be_undone():
    model = model_of()
    fault = plant(model, "forward")
    optimizer = OffloadAdamW(model.parameters(), eager=True)
    model, optimizer = trainstream.wrap(model, optimizer)
    fault.arm()
    with pytest.raises(torch.OutOfMemoryError, match="eager=True weights change during backward"):
        model._trainstream_session.train_step(batches_of(0, "cpu")[:1])
    assert fault.raised == 1


def test_other_errors_are_passed_on_at_once():
    model = model_of()
    model.lm_head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    model, _ = trainstream.wrap(model, None)
    with pytest.raises(KeyError, match="mine"):
        model._trainstream_session.train_step(batches_of(0, "cpu"))


# -- train_step ------------------------------------------------------------------------------------------


def test_train_step_is_the_loop_that_one_would_write():
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), None
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    model, _ = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(3):
        x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        total = 0.0
        for each in x:
            loss = other(each).square().mean()
            (loss / 3).backward()
            total += loss.item() / 3
        optimizer.step()
        batches = [(x[0],), x[1], {"input": x[2]}]
        got = model._trainstream_session.train_step(batches, loss=lambda y, _: y.square().mean())
        assert got.item() == pytest.approx(total, rel=1e-6)
        assert not got.requires_grad
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(p.grad, q.grad)


def test_train_step_says_what_is_missing():
    model, _ = trainstream.wrap(nn.Sequential(nn.Linear(4, 4)), None)
    session = model._trainstream_session
    with pytest.raises(ArgumentError, match="at least one micro-batch"):
        session.train_step([])
    with pytest.raises(ArgumentError, match="has no loss of one element"):
        session.train_step([torch.randn(2, 4)])
    assert session.train_step([torch.randn(2, 4)], loss=lambda y, _: y.sum()).dim() == 0
    frozen, _ = trainstream.wrap(nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(StateError, match="nothing is trained"):
        frozen._trainstream_session.train_step([torch.randn(2, 4)])


def test_the_history_has_what_was_predicted_beside_what_was_measured():
    model, _ = trainstream.wrap(model_of(), None, lr=1e-2, param_offload=[0])
    session = model._trainstream_session
    session.train_step(batches_of(0, "cpu"))
    entry = trainstream.memory_report(model)["plan"]["history"][-1]
    assert entry["step"] == 1
    assert entry["host_peak_bytes"] > 0
    planned = session.plan.predicted
    assert entry["predicted_device_bytes"] == planned["device"] + planned["activations"] > 0
    assert entry["predicted_host_bytes"] == planned["host"]
    trainstream.unwrap(model)


# -- a loop of one's own ---------------------------------------------------------------------------------


def test_what_a_run_has_changed_besides_can_be_taken_back():
    model = model_of()
    fault = plant(model, "head")
    model, optimizer = trainstream.wrap(model, None, lr=1e-2)
    seen, taken_back = [], []

    def both():
        seen.append(1)
        loss = model(**batches_of(0, "cpu")[0]).loss
        loss.backward()
        return loss.detach()

    fault.arm()
    loss = model._trainstream_session.replayed(both, lambda: taken_back.append(len(seen)))
    assert (len(seen), taken_back) == (2, [1])
    assert loss.dim() == 0
    optimizer.step()


def test_in_a_loop_of_ones_own_the_next_pass_finds_room():
    def loop(fail):
        torch.manual_seed(1)
        model = model_of()
        fault = plant(model, "forward")
        model, optimizer = trainstream.wrap(model, None, lr=1e-2, param_offload=[0])
        losses = []
        for step in range(3):
            batch = batches_of(step, "cpu")[0]
            optimizer.zero_grad()
            if fail and step == 1:
                fault.arm()
                with pytest.raises(torch.OutOfMemoryError, match="call it again with the same micro-batch"):
                    model(**batch)
            torch.manual_seed(step)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    expected, _ = loop(False)
    got, model = loop(True)
    assert got == expected
    session = model._trainstream_session
    assert session.plan.policy == ("recompute",) * 4
    assert any("memory ran out in a forward pass: 4 blocks" in line for line in session.events.events)
    twin = copy.deepcopy(model)
    twin(**batches_of(0, "cpu")[0])
    trainstream.unwrap(model)
    assert not model._forward_pre_hooks
    assert not model.model._forward_hooks


# -- a GPU whose memory really runs out ------------------------------------------------------------------


def wide(kind="full"):
    torch.manual_seed(1)
    model = tiny_llama(
        num_hidden_layers=6,
        hidden_size=256,
        intermediate_size=1024,
        head_dim=64,
        max_position_embeddings=512,
        attention_dropout=0.1,
        attn_implementation="eager",  # a fused one over so many fp32 keys adds in any order on a GPU
    )
    if kind == "lora":
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.to("cuda")


def long_batches(step):
    made = torch.Generator().manual_seed(step)
    return [
        {"input_ids": ids, "labels": ids}
        # More than 3,072 indices, and CUDA adds up an embedding's gradient in any order.
        for ids in (torch.randint(0, 97, (4, 512), generator=made).to("cuda") for _ in range(2))
    ]


SETTLED = 16  # steps after which a session has measured, and keeps the activations of every block


@pytest.fixture
def whole_gpu():
    """What a test has taken from PyTorch is given back, also where it fails."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def hold_to_half(session, step):
    """Do a step, then cap PyTorch so that half of what it took beyond what is there between steps is left.

    Only what every block keeps is that large: one block that computes again takes a small part of it. While a
    session measures, it resets the peak that is read here, and its blocks keep nothing.
    """
    assert not session.adapting
    assert session.plan.policy == ("keep",) * 6
    torch.cuda.reset_peak_memory_stats()
    result = step()
    gc.collect()
    torch.cuda.empty_cache()
    beyond = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    cap = torch.cuda.memory_reserved() + beyond // 2
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_real_shortage_under_way_changes_nothing(kind, whole_gpu):
    def train(short):
        # Recordings hold their memory between steps: with them the half that is left is another one.
        model, _ = trainstream.wrap(wide(kind), None, lr=1e-3, quantize="none", offload=True, capture=False)
        session = model._trainstream_session
        torch.manual_seed(2)
        losses = []
        for number in range(SETTLED + 4):
            step = functools.partial(session.train_step, long_batches(number))
            now = short and number == SETTLED
            losses.append((hold_to_half(session, step) if now else step()).item())
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        events = session.events.events
        torch.cuda.set_per_process_memory_fraction(1.0)
        trainstream.unwrap(model)
        return losses, weights, events

    expected, got = train(False), train(True)
    assert not any("out of memory" in line for line in expected[2])
    assert any(f"out of memory in micro-batch {SETTLED + 2}" in line for line in got[2]), got[2][-12:]
    assert got[0] == expected[0]
    for name, t in expected[1].items():
        assert torch.equal(got[1][name], t), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_shortage_in_a_loop_of_ones_own_is_made_good_before_the_next_pass(whole_gpu):
    model, optimizer = trainstream.wrap(wide(), None, lr=1e-3, quantize="none", offload=True, capture=False)
    session = model._trainstream_session

    def step(number):
        optimizer.zero_grad()
        model(**long_batches(number)[0]).loss.backward()
        optimizer.step()

    for number in range(SETTLED):
        step(number)
    hold_to_half(session, lambda: step(SETTLED))
    failed = 0
    for number in range(SETTLED + 1, SETTLED + 7):
        try:
            step(number)
        except torch.OutOfMemoryError:
            failed += 1
            assert session.relief.due
    assert 0 < failed < 4
    assert not session.relief.due
    assert any("memory ran out in a" in line for line in session.events.events)
    trainstream.unwrap(model)
