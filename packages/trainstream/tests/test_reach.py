"""After two steps: what got no gradient or did not change is named, and nothing else is."""

import copy
import itertools
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import tiny_llama, toy
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import trainstream
from trainstream._reach import ReachCheck
from ts_core.errors import StateError
from ts_core.guard import guard_of
from ts_core.testing import devices

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

PLACES = [{}, {"param_offload": True}, {"param_offload": True, "recompute": True}]


class Net(nn.Module):
    """A stack, and what only some losses use."""

    def __init__(self):
        super().__init__()
        self.stack = toy(8, 3)
        self.extra = nn.Linear(8, 8)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x, use_extra=False):
        x = self.stack(x)
        return self.extra(x) if use_extra else x


def data(seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def backward(model, seed=0, **options):
    parameter = next(model.parameters())
    session = model.__dict__.get("_trainstream_session")
    device = parameter.device if session is None else session.plan.device  # a paged one is on the host
    model(data(seed, parameter.dtype, device), **options).float().pow(2).sum().backward()


def steps(model, optimizer, count=4, **options):
    for step in range(count):
        optimizer.zero_grad()
        backward(model, step, **options)
        optimizer.step()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", PLACES)
def test_what_gets_no_gradient_is_named_once_and_training_goes_on(options, device):
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).to(device)
    model, optimizer = trainstream.wrap(model, None, device=device, lr=1e-2, **options)
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    steps(model, optimizer, 1)
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(StateError, match="after 2 steps") as caught:
        optimizer.step()
    text = str(caught.value)
    for name in ("'extra.weight'", "'extra.bias'", "'spare'"):
        assert name in text
    assert "stack" not in text
    assert "did not change" not in text
    # The step itself was done, and there is no second word about it.
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()
    steps(plain, oracle, 3)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu())


def test_a_gradient_in_one_of_the_two_steps_is_enough():
    model, optimizer = trainstream.wrap(toy(8, 3), None)
    for step in range(4):
        optimizer.zero_grad()
        x = data(step)
        for index, block in enumerate(model):
            if step % 2 or index != 1:
                x = block(x)
        x.sum().backward()
        optimizer.step()


def test_many_are_counted():
    model = Net()
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    model, optimizer = trainstream.wrap(model, None, blocks=list(model.stack))
    steps(model, optimizer, 1)
    with pytest.raises(StateError, match=r"'spare'.* and 4 more got no gradient"):
        steps(model, optimizer, 1)


def test_what_the_optimizer_does_not_hold_is_none_of_its_business():
    model = Net()
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.stack.parameters()))
    steps(model, optimizer)
    frozen = Net()
    frozen.extra.requires_grad_(False)
    frozen.spare.requires_grad = False
    steps(*trainstream.wrap(frozen, None))


@pytest.mark.parametrize("options", PLACES)
def test_adapters_whose_gradient_is_zero_at_first(options):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    model = peft.get_peft_model(tiny_llama(num_hidden_layers=3), config)
    model, optimizer = trainstream.wrap(model, None, **options)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_all_zero_gradients():
    model, optimizer = trainstream.wrap(toy(8, 3), None)
    for _ in range(3):
        optimizer.zero_grad()
        (model(data()).sum() * 0.0).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("peak", [1e-2, 1e-5, 1e-30])
def test_warmup_from_zero(peak, kind, dtype):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)]).to(dtype)
    optimizer = kind(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2000)
    model, optimizer = trainstream.wrap(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", PLACES)
def test_masters_move_before_the_16_bit_weights_do(options, dtype):
    model = toy(8, 3).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-6), **options)
    steps(model, optimizer)
    assert any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def scaled(model, optimizer, scales):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = 0
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        scaler.scale(model(data(step)).pow(2).sum() * scale).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_that_a_scaler_leaves_out(make, options):
    model = toy(8, 3)
    model, optimizer = trainstream.wrap(model, make(model.parameters(), lr=1e-2), **options)
    assert scaled(model, optimizer, [1.0, float("inf"), float("inf"), float("nan"), 1.0]) == 3


class Fused(torch.optim.SGD):
    """Takes the scaler's word itself, as fused optimizers do: every parameter stays where one overflows."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        if float(getattr(self, "found_inf", None) or 0.0) == 0.0:
            super().step(closure)


def test_fused_steps_that_a_scaler_leaves_out():
    """Only one gradient overflows, the others are fine and their weights stay, too."""
    model = toy(8, 3)
    model, optimizer = trainstream.wrap(model, Fused(model.parameters(), lr=1e-2))
    model[1][0].weight.register_hook(lambda grad: grad * float("inf"))
    scaled(model, optimizer, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("found", [1.0, None])
def test_a_skip_is_known_by_the_scaler_or_by_the_gradients(found):
    """The pieces of it, without a scaler."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = ReachCheck(model, optimizer)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if found is None:
            model[1].bias.grad[0] = float("nan")
        optimizer.found_inf = None if found is None else torch.tensor(found)
        check.before(optimizer)
        check.after(optimizer)
    check.finish()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_closures(make, to_none):
    model = toy(8, 3)
    optimizer = make(model.parameters(), lr=1e-2)
    model, optimizer = trainstream.wrap(model, optimizer)
    seeds = itertools.count()

    def closure():
        optimizer.zero_grad(set_to_none=to_none)
        loss = model(data(next(seeds)) * (torch.arange(8) == next(seeds) % 8)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def test_a_closure_that_reaches_too_little():
    model, optimizer = trainstream.wrap(Net(), None)

    def closure():
        optimizer.zero_grad()
        backward(model)

    optimizer.step(closure)
    with pytest.raises(StateError, match=r"'extra\.weight'"):
        optimizer.step(closure)


FOREIGN = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("options", PLACES[:2])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_optimizers(name, options):
    model = toy(8, 3)
    steps(*trainstream.wrap(model, FOREIGN[name](model.parameters()), **options))


class NoRate(torch.optim.Optimizer):
    """Its groups have no learning rate at all."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.01)


def test_an_optimizer_without_a_learning_rate():
    model = toy(8, 3)
    steps(*trainstream.wrap(model, NoRate(model.parameters())))


class Scales(torch.optim.Adam):
    """Learns how far to go, from next to nothing, as Prodigy does: lr is a factor."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group["d"] = 1e-6

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= group["d"]
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = 1.0


def test_an_optimizer_that_learns_its_rate_is_given_time():
    model = toy(8, 3).to(torch.bfloat16)
    steps(*trainstream.wrap(model, Scales(model.parameters())))


class StepsACopy(torch.optim.SGD):
    """Broken: it took copies of the parameters when it was made."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.copies = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        with torch.no_grad():
            held = [p for group in self.param_groups for p in group["params"]]
            for p, copied in zip(held, self.copies, strict=True):
                copied.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", PLACES[:2])
def test_an_optimizer_that_steps_copies_is_caught(options, dtype):
    model = toy(8, 2).to(dtype)
    optimizer = StepsACopy(model.parameters(), lr=0.1)
    model, optimizer = trainstream.wrap(model, optimizer, **options)
    steps(model, optimizer, 1)
    with pytest.raises(StateError, match=r"'0\.0\.weight'.* did not change although") as caught:
        steps(model, optimizer, 1)
    assert "got no gradient" not in str(caught.value)
    steps(model, optimizer, 2)


def test_weights_that_were_exchanged_after_the_optimizer_was_made():
    """The classic: the optimizer holds Parameters that the model computes with no more."""
    model = toy(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = trainstream.wrap(model, optimizer)
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach().clone())
    steps(model, optimizer, 1)
    with pytest.raises(StateError, match=r"'1\.0\.weight' got no gradient"):
        steps(model, optimizer, 1)


def test_looking_is_not_a_use_from_outside():
    """Slots stay valid: a weight that only this has looked at need not be brought again."""
    model = toy(8, 4)
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters()), param_offload=True)
    pager = model._trainstream_session.pager
    steps(model, optimizer, 2)
    assert not any(guard_of(p).escaped for p in model.parameters())
    fills = [block.fills for block in pager.blocks]
    steps(model, optimizer, 1)
    # Two slots for four: the first two come for forward and for backward, the last two are there still.
    assert [after - before for after, before in zip([b.fills for b in pager.blocks], fills, strict=True)] == [
        2,
        2,
        1,
        1,
    ]


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6),
    st.floats(0, 10.0),
    st.sampled_from([torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RAdam]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@example([0.0], [1.0], 1e-300, torch.optim.SGD, torch.float32)
@example([1.0], [1.0], 1e-9, torch.optim.AdamW, torch.float32)
@example([0.02], [1e-8], 1e-2, torch.optim.RAdam, torch.float32)  # moves by lr x gradient at first
@example([0.01], [1e-3], 1e-2, torch.optim.RAdam, torch.bfloat16)
def test_an_optimizer_that_works_raises_no_alarm(weights, grads, lr, make, dtype):
    count = min(len(weights), len(grads))
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(weights[:count], dtype=dtype))
    optimizer = make(
        model.parameters(), lr=lr, **({} if make is torch.optim.Adagrad else {"weight_decay": 0.0})
    )
    check = ReachCheck(model, optimizer)
    for _ in range(2):
        model.weight.grad = torch.tensor(grads[:count], dtype=dtype)
        check.before(optimizer)
        optimizer.step()
        done = check.after(optimizer)
    assert done
    check.finish()


class Routed(nn.Module):
    """Four experts, of which tokens reach the first ones only."""

    def __init__(self, used):
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)])
        self.used = used

    def forward(self, x):
        for expert in self.experts[: self.used]:
            x = x + expert(x)
        return x


@pytest.mark.parametrize("offload", [False, True])
def test_experts_that_no_token_reached_are_named_once_and_are_no_error(offload):
    torch.manual_seed(0)
    model = nn.Sequential(*[Routed(2) for _ in range(3)])
    model, optimizer = trainstream.wrap(model, None, lr=1e-2, param_offload=offload)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    said = [line for line in model._trainstream_session.events.events if "expert" in line]
    assert len(said) == 1
    assert "no token has been routed to 6 experts, whose 24 parameters got no gradient" in said[0]
    assert "'0.experts.2.0.weight'" in said[0]


def test_experts_of_which_none_was_reached_are_an_error():
    model = nn.Sequential(Routed(2), nn.Linear(4, 4))
    model.append(nn.Linear(4, 1))
    model, optimizer = trainstream.wrap(nn.ModuleDict({"a": model, "b": Routed(0)}), None, lr=1e-2)

    def step():
        optimizer.zero_grad()
        model["b"](model["a"](torch.randn(2, 4))).sum().backward()
        optimizer.step()

    step()
    with pytest.raises(StateError, match=r"'b.experts.0.0.weight', .* and 11 more got no gradient"):
        step()


class Dropping(nn.Module):
    """A stack that leaves out layers in training, as the config says: here always the second one."""

    def __init__(self, share):
        super().__init__()
        self.config = SimpleNamespace(layerdrop=share)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layers[2](self.layers[0](x)))


@pytest.mark.parametrize("options", PLACES[:2])
def test_steps_before_there_is_any_gradient_do_not_count(options):
    model, optimizer = trainstream.wrap(Net(), None, lr=1e-2, **options)
    optimizer.step()
    optimizer.step()
    steps(model, optimizer, 1)
    with pytest.raises(StateError, match=r"after 2 steps, 'spare', 'extra.weight', 'extra.bias' got no"):
        steps(model, optimizer, 1)


def test_an_optimizer_that_never_sees_a_gradient_is_caught():
    _model, optimizer = trainstream.wrap(toy(8, 3), None, lr=1e-2)
    for _ in range(5):
        optimizer.step()
    with pytest.raises(StateError, match="got no gradient"):
        optimizer.step()


@pytest.mark.parametrize("options", PLACES)
def test_layers_that_layer_drop_left_out_are_named_once_and_are_no_error(options):
    model, optimizer = trainstream.wrap(Dropping(0.5), None, lr=1e-2, **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    said = [line for line in model._trainstream_session.events.events if "layer drop" in line]
    assert len(said) == 1
    assert "left out 1 layers each time, whose 2 parameters got no gradient: 'layers.1.0.weight'" in said[0]


def test_without_layer_drop_a_layer_that_is_left_out_is_an_error():
    model, optimizer = trainstream.wrap(Dropping(0.0), None, lr=1e-2)

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    step()
    with pytest.raises(StateError, match=r"'layers.1.0.weight', 'layers.1.0.bias' got no gradient"):
        step()
