"""`guard_params`: who waits for an update that is under way, and that training never depends on it."""

import copy

import pytest
import torch
from conftest import tiny_llama

import trainstream
from ts_core.guard import guard_of
from ts_core.testing import devices
from ts_optim.deferred import Update

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def build():
    torch.manual_seed(0)
    return tiny_llama(num_hidden_layers=3)


def step(model, optimizer, number):
    device = next(iter(model.buffers())).device
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number)).to(device)
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def lazy(monkeypatch):
    """Updates run when somebody waits for them, and not before."""
    monkeypatch.setattr(Update, "run", lambda self: None)


def wrapped(guard_params, device):
    """With the optimizer's state on the host: on a GPU with room it would be there, and no update waits."""
    model, optimizer = trainstream.wrap(
        build(),
        None,
        lr=1e-2,
        device=device,
        quantize="none",
        param_offload=True,
        offload=True,
        guard_params=guard_params,
    )
    return model, optimizer


@pytest.mark.parametrize("device", devices())
def test_a_read_waits_or_not(device, lazy):
    for guard_params in (True, False):
        model, optimizer = wrapped(guard_params, device)
        weight = model.model.layers[1].mlp.up_proj.weight
        for number in range(2):  # the session looks at every weight in the first two steps
            step(model, optimizer, number)
        before = copy.deepcopy(weight).detach()
        step(model, optimizer, 2)
        assert guard_of(weight).pending is not None
        with torch.no_grad():
            read = weight.clone()
        assert torch.equal(read, before) == (not guard_params)
        assert (guard_of(weight).pending is None) == guard_params
        optimizer.synchronize()
        with torch.no_grad():
            assert not torch.equal(weight.clone(), before)
        trainstream.unwrap(model)


@pytest.mark.parametrize("device", devices())
def test_training_saving_and_writing_are_the_same_without(device, lazy, tmp_path):
    losses, states, files = [], [], []
    for guard_params in (True, False):
        model, optimizer = wrapped(guard_params, device)
        losses.append([step(model, optimizer, number) for number in range(4)])
        model.save_pretrained(tmp_path / str(guard_params))
        files.append((tmp_path / str(guard_params) / "model.safetensors").read_bytes())
        step(model, optimizer, 4)
        states.append([{n: p.clone() for n, p in model.state_dict().items()}])
        step(model, optimizer, 5)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                parameter.mul_(0.5)
        losses[-1].append(step(model, optimizer, 6))
        model.eval()
        ids = torch.arange(8, device=next(iter(model.buffers())).device).view(1, 8)
        states[-1].append({"logits": model(input_ids=ids).logits.detach()})
        model.train()
        trainstream.unwrap(model)
        states[-1].append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert losses[0] == losses[1]
    assert files[0] == files[1]
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_it_holds_after_units_have_moved(lazy):
    model, optimizer = wrapped(False, "cpu")
    session = model._trainstream_session
    step(model, optimizer, 0)
    session.relief.places.evict(session, [1], {1: "disk"})
    assert all(not guard_of(p).waits for p in model.parameters() if guard_of(p) is not None)
    layer = model.model.layers[0]
    layer.load_state_dict({n: p.clone() for n, p in layer.state_dict().items()}, assign=True)
    step(model, optimizer, 1)
    assert not guard_of(layer.mlp.up_proj.weight).waits
    trainstream.unwrap(model)
