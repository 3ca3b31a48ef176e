"""A state of training to come back to, wherever weights and optimizer state are by then."""

import random

import pytest
import torch
from conftest import tiny_llama
from torch import nn

import trainstream
from ts_core import memory
from ts_core.errors import DoesNotFitError, StateError
from ts_core.testing import devices
from ts_optim import OffloadAdamW


def model_of(dtype=torch.float32):
    model = tiny_llama(attention_dropout=0.3)
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), Counting())
    return model.to(dtype)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x


def steps(model, optimizer, count, device):
    losses = []
    for _ in range(count):
        ids = torch.randint(0, 97, (2, 9)).to(device)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), random.random()))
    return losses


def state_of(model, optimizer):
    held = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    held["seen"] = model.model.layers[0].mlp.act_fn[1].seen.cpu().clone()
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            held[f"{name}.{key}"] = torch.as_tensor(value).cpu().clone()
    return held


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("how", ["resident", "paged", "bf16", "int8", "foreign"])
def test_going_back_is_exact_and_may_be_repeated(how, first, device):
    torch.manual_seed(5)
    random.seed(5)
    model = model_of(torch.bfloat16 if how == "bf16" else torch.float32).to(device)
    kind = torch.optim.SGD if how == "foreign" else OffloadAdamW
    settings = {"momentum": 0.9} if how == "foreign" else {}
    if how == "int8":
        settings["moment_dtype"] = "int8"
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    model, optimizer = trainstream.wrap(model, optimizer, param_offload=how in ("paged", "bf16"))
    session = model._trainstream_session
    steps(model, optimizer, first, device)
    session.snapshot()
    before = state_of(model, optimizer)
    expected = steps(model, optimizer, 3, device)
    after = state_of(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    for _ in range(2):
        session.rollback()
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert all(p.grad is None for p in model.parameters())
        assert_same(state_of(model, optimizer), before)
        assert steps(model, optimizer, 3, device) == expected
        assert_same(state_of(model, optimizer), after)
    trainstream.unwrap(model)


def test_it_follows_weights_that_have_left_meanwhile():
    model = model_of()
    model, optimizer = trainstream.wrap(model, OffloadAdamW(model.parameters(), lr=1e-2))
    session = model._trainstream_session
    steps(model, optimizer, 2, "cpu")
    session.snapshot()
    before = state_of(model, optimizer)
    expected = steps(model, optimizer, 2, "cpu")
    session.set_budget(ram=session.relief.places.limits.others + (1 << 30))
    session.relief.make_room(1 << 40, "asked for")
    assert session.plan.paged
    session.rollback()
    assert_same(state_of(model, optimizer), before)
    assert steps(model, optimizer, 2, "cpu") == expected
    trainstream.unwrap(model)


def test_where_ram_is_short_the_copies_are_in_files_which_go_again(monkeypatch, tmp_path):
    model, optimizer = trainstream.wrap(model_of(), None, lr=1e-2, disk_offload=tmp_path)
    session = model._trainstream_session
    steps(model, optimizer, 1, "cpu")
    real = memory.host_budget()
    poor = type(real)(real.total_bytes, 0, None, "test")
    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: poor)
    before = state_of(model, optimizer)
    session.snapshot()
    used = session.tiers.files.used_bytes
    assert used > 0
    session.snapshot()
    assert session.tiers.files.used_bytes == used
    assert "in files" in session.events.events[-1]
    monkeypatch.undo()
    steps(model, optimizer, 1, "cpu")
    session.rollback()
    assert_same(state_of(model, optimizer), before)
    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: poor)
    monkeypatch.setattr(memory, "disk_budget", lambda path: 10)
    with pytest.raises(DoesNotFitError, match="save a checkpoint instead"):
        session.snapshot()
    monkeypatch.undo()
    trainstream.unwrap(model)
    assert not list(tmp_path.iterdir())


def test_without_a_snapshot_there_is_nothing_to_go_back_to():
    model, _ = trainstream.wrap(nn.Linear(2, 2))
    with pytest.raises(StateError, match=r"call session\.snapshot"):
        model._trainstream_session.rollback()
