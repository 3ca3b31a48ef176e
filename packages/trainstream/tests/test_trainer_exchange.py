"""State of a run taken out and put in again, in every way a training loop does it."""

import copy
import io

import pytest
import torch
from test_trainer import build, lora

import trainstream
from trainstream._session import session_of
from ts_core.errors import CheckpointError, StateError
from ts_optim import OffloadAdamW

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
PLACEMENTS = ["resident", "paged"]


@pytest.fixture
def options(tmp_path):
    return {
        "resident": {},
        "paged": {"param_offload": True, "recompute": [0], "disk_offload": str(tmp_path)},
    }


def adamw(model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def ids_of(step):
    return torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps):
    model.train()
    losses = []
    for step in steps:
        ids = ids_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(model, optimizer):
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    return through_a_file(state)


def make(kind, seed):
    torch.manual_seed(seed)
    if kind == "lora":
        # The base is the same; the adapters are what is restored.
        return lora(build(), lora_dropout=0.3, init_lora_weights=False)
    return build(seed).bfloat16() if kind == "bf16" else build(seed)


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def whole():
    """Return, of each kind: the state after two steps, the losses of two more, and the weights then."""
    found = {}
    for kind in ("full", "bf16", "lora"):
        model = make(kind, 0)
        model, optimizer = trainstream.wrap(model, adamw(model))
        train(model, optimizer, (0, 1))
        state = snapshot(model, optimizer)
        found[kind] = state, train(model, optimizer, (2, 3)), values(model)
    return found


@pytest.mark.parametrize("when", ["before wrap", "after wrap", "after a step"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["full", "bf16", "lora"])
def test_a_run_goes_on_exactly_wherever_it_is_loaded(whole, options, kind, placement, when):
    state, losses, expected = whole[kind]
    state = copy.deepcopy(state)
    model = make(kind, 5)
    optimizer = adamw(model)
    if when == "before wrap":
        if kind == "bf16":  # torch's AdamW has no place for the fp32 weights of a bf16 model
            optimizer = OffloadAdamW(list(model.named_parameters()), lr=1e-2, weight_decay=0.1)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model, optimizer = trainstream.wrap(model, optimizer, **options[placement])
    if when == "after a step":
        train(model, optimizer, (7,))
    if when != "before wrap":
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    assert train(model, optimizer, (2, 3)) == losses
    assert bool(session_of(model).plan.paged) == (placement == "paged")
    for name, value in values(model).items():
        assert torch.equal(value, expected[name]), name
    trainstream.unwrap(model)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_state_taken_while_paged_is_the_same(whole, options, placement):
    expected = whole["full"][0]
    model = make("full", 0)
    model, optimizer = trainstream.wrap(model, adamw(model), **options[placement])
    train(model, optimizer, (0, 1))
    state = snapshot(model, optimizer)
    assert all(torch.equal(state["model"][name], value) for name, value in expected["model"].items())
    ours, theirs = state["optimizer"], expected["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        assert ours["state"][number].keys() == entry.keys()
        assert all(torch.equal(ours["state"][number][key], value) for key, value in entry.items())
    trainstream.unwrap(model)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("direction", ["into ours", "out of ours"])
def test_plain_adamw_and_ours_take_each_others_state(options, placement, direction):
    """Their arithmetic differs by a rounding, so they agree within the bound of AdamW, not bit for bit."""
    first, second = make("full", 0), make("full", 5)
    optimizers = [adamw(first), adamw(second)]
    wrapped = 0 if direction == "out of ours" else 1
    models = [first, second]
    models[wrapped], optimizers[wrapped] = trainstream.wrap(
        models[wrapped], optimizers[wrapped], **options[placement]
    )
    assert isinstance(optimizers[wrapped], OffloadAdamW)
    train(models[0], optimizers[0], (0, 1))
    state = snapshot(models[0], optimizers[0])
    models[1].load_state_dict(state["model"])
    optimizers[1].load_state_dict(state["optimizer"])
    losses = train(models[0], optimizers[0], (2, 3))
    assert train(models[1], optimizers[1], (2, 3)) == pytest.approx(losses, rel=1e-5)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=2e-6)
    trainstream.unwrap(models[wrapped])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_that_never_had_a_gradient_has_no_state(options, placement):
    def make_odd():
        model = make("full", 0)
        model.model.layers[0].extra = torch.nn.Linear(4, 4)  # in a block, and used by nothing
        return model

    model = make_odd()
    model, optimizer = trainstream.wrap(model, adamw(model), **options[placement])
    with pytest.raises(StateError, match=r"layers\.0\.extra\.weight"):
        train(model, optimizer, (0, 1))
    optimizer.zero_grad()
    state = snapshot(model, optimizer)
    count = len(list(model.parameters()))
    assert len(state["optimizer"]["state"]) == count - 2
    losses, expected = train(model, optimizer, (2, 3)), values(model)
    again = make_odd()
    again, other = trainstream.wrap(again, adamw(again), **options[placement])
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    with pytest.raises(StateError, match="extra"):  # it is looked for once in every session
        train(again, other, (2, 3))
    for name, value in values(again).items():
        assert torch.equal(value, expected[name]), name
    assert train(again, other, (4,)) == train(model, optimizer, (4,))
    assert losses
    for each in (model, again):
        trainstream.unwrap(each)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_order_is_refused_by_name(whole, options, placement):
    state = copy.deepcopy(whole["full"][0])
    model = make("full", 5)
    named = list(model.named_parameters())
    # Two matrices of one shape change places: by position they would fit.
    a, b = (i for i, (name, _) in enumerate(named) if name.endswith("q_proj.weight"))
    named[a], named[b] = named[b], named[a]
    before = values(model)
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(named, lr=1e-2), **options[placement])
    with pytest.raises(CheckpointError, match="q_proj"):
        optimizer.load_state_dict(state["optimizer"])
    assert not optimizer.state  # nothing of it was taken
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    trainstream.unwrap(model)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_optimizers_state_is_no_adamw_state(whole, options, placement):
    model = make("full", 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd, (0,))
    model, optimizer = trainstream.wrap(model, adamw(model), **options[placement])
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(sgd.state_dict())
    trainstream.unwrap(model)
