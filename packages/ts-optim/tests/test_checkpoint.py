"""State dicts: exchange with torch, resume to the bit, refusal of what does not belong."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import CheckpointError, TrainStreamError
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW


def model(dtype=torch.float32, device="cpu", seed=0):
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).to(device, dtype)


def train(m, optimizer, steps, start=0):
    p = next(m.parameters())
    for i in range(start, start + steps):
        with seeded(i):
            x = torch.randn(4, 6).to(p.device, p.dtype)
        optimizer.zero_grad()
        m(x).square().sum().backward()
        optimizer.step()


def equal(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_bit_equal(p.detach(), q.detach())


@pytest.mark.parametrize("device", devices())
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    threads=st.integers(1, 4),
    before=st.integers(0, 3),
)
def test_resume_is_bit_identical(tmp_path_factory, device, dtype, threads, before):
    straight = model(dtype, device)
    optimizer = OffloadAdamW(straight.parameters(), lr=1e-2, threads=1)
    train(straight, optimizer, before)
    path = tmp_path_factory.mktemp("resume") / "state.pt"
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, path)
    train(straight, optimizer, 3, before)
    saved = torch.load(path, weights_only=True, map_location=device)
    resumed = model(dtype, device, seed=9)
    again = OffloadAdamW(resumed.parameters(), threads=threads)
    # Either order: the optimizer's state may be loaded before the weights are.
    again.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    train(resumed, again, 3, before)
    equal(resumed, straight)
    assert again.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}])
def test_a_torch_checkpoint_goes_on_here(device, options):
    if device == "cpu" and "capturable" in options:
        options = {"differentiable": False}
    theirs = model(device=device)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, **options)
    train(theirs, b, 3)
    ours = copy.deepcopy(theirs)
    a = OffloadAdamW(ours.parameters())
    saved = copy.deepcopy(b.state_dict())
    a.load_state_dict(saved)
    assert "fused" not in a.param_groups[0]
    entry = a.state[next(ours.parameters())]
    assert entry["step"].device.type == "cpu"
    assert entry["step"].shape == ()
    train(ours, a, 3, 3)
    train(theirs, b, 3, 3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    # The loaded dict still holds what it held.
    assert_bit_equal(saved["state"][0]["step"].cpu(), torch.tensor(3.0))


@pytest.mark.parametrize("device", devices())
def test_a_checkpoint_of_ours_goes_on_in_torch(device):
    ours = model(device=device)
    a = OffloadAdamW(ours.parameters(), lr=1e-2, betas=(0.8, 0.99))
    train(ours, a, 3)
    theirs = copy.deepcopy(ours)
    b = torch.optim.AdamW(theirs.parameters())
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # torch keeps the tensors it is given
    assert b.param_groups[0]["betas"] == (0.8, 0.99)
    assert b.state[next(theirs.parameters())].keys() == {"step", "exp_avg", "exp_avg_sq"}
    train(ours, a, 3, 3)
    train(theirs, b, 3, 3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_bf16_state_of_torch_gets_fp32_moments_and_masters():
    theirs = model(torch.bfloat16)
    b = torch.optim.AdamW(theirs.parameters())
    train(theirs, b, 2)
    ours = copy.deepcopy(theirs)
    a = OffloadAdamW(ours.parameters())
    a.load_state_dict(b.state_dict())
    for p in ours.parameters():
        assert {t.dtype for t in a.state[p].values()} == {torch.float32}
        assert_bit_equal(a.state[p]["master"], p.detach().float())
    back = torch.optim.AdamW(theirs.parameters())
    back.load_state_dict(a.state_dict())
    train(theirs, back, 1)


def test_loading_copies_and_never_moves_to_a_device():
    ours = model()
    a = OffloadAdamW(ours.parameters())
    train(ours, a, 1)
    saved = a.state_dict()
    b = OffloadAdamW(ours.parameters())
    b.load_state_dict(saved)
    p = next(ours.parameters())
    assert b.state[p]["exp_avg"] is not a.state[p]["exp_avg"]
    assert b.state[p]["exp_avg"].device.type == "cpu"
    before = saved["state"][0]["exp_avg"].clone()
    train(ours, b, 1)
    assert_bit_equal(saved["state"][0]["exp_avg"], before)


def test_layouts_are_adapted_on_load():
    with seeded(0):
        x = torch.randn(3, 5)
    contiguous, transposed = nn.Parameter(x.clone()), nn.Parameter(x.t().contiguous().t())
    a, b = OffloadAdamW([contiguous]), OffloadAdamW([transposed])
    contiguous.grad = x.clone()
    a.step()
    with torch.no_grad():
        transposed.copy_(contiguous)
    b.load_state_dict(a.state_dict())
    for p, optimizer in ((contiguous, a), (transposed, b)):
        p.grad = x.square()
        optimizer.step()
    assert torch.equal(contiguous, transposed)


def spoil(state, what):
    group, entry = state["param_groups"][0], state["state"][0]
    if what in ("amsgrad", "maximize"):
        group[what] = True
    elif what == "coupled":
        group["decoupled_weight_decay"] = False
    elif what == "groups":
        state["param_groups"].append(dict(group, params=[]))
    elif what == "count":
        group["params"] = group["params"][:-1]
    elif what == "shape":
        entry["exp_avg"] = torch.zeros(3)
    elif what == "order":
        state["state"] = {k: state["state"][3 - k] for k in range(4)}
    elif what == "dtype":
        entry["exp_avg_sq"] = torch.zeros(20, 6, dtype=torch.uint8)
    elif what == "missing":
        del entry["exp_avg"]
    elif what == "extra":
        entry["max_exp_avg_sq"] = entry["exp_avg"]
    elif what == "step":
        entry["step"] = torch.tensor(-1.0)
    elif what == "nan_step":
        entry["step"] = torch.tensor(math.nan)
    elif what == "stranger":
        state["state"][77] = entry
    elif what == "lr":
        group["lr"] = -1.0
    elif what == "no_lr":
        del group["lr"]
    elif what == "object":
        entry["exp_avg"] = [0.0]


SPOILED = (
    "amsgrad", "maximize", "coupled", "groups", "count", "shape", "order", "dtype", "missing", "extra",
    "step", "nan_step", "stranger", "lr", "no_lr", "object",
)  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_foreign_or_damaged_state_is_refused_before_anything_changes(what):
    m = model()
    optimizer = OffloadAdamW(m.parameters())
    train(m, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    spoil(state, what)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(state)
    assert isinstance(caught.value, ValueError)
    assert "load_state_dict" in str(caught.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for k in before["state"]:
        for name in before["state"][k]:
            assert_bit_equal(after["state"][k][name], before["state"][k][name])


def test_a_state_of_torch_with_amsgrad_is_refused():
    m = model()
    b = torch.optim.AdamW(m.parameters(), amsgrad=True)
    train(m, b, 1)
    with pytest.raises(TrainStreamError, match="amsgrad"):
        OffloadAdamW(m.parameters()).load_state_dict(b.state_dict())
    for bad in (None, {"state": {}}, [1]):
        with pytest.raises(TypeError, match="state_dict"):
            OffloadAdamW(m.parameters()).load_state_dict(bad)


def test_plain_adam_without_decay_is_the_same_algorithm():
    m = model()
    b = torch.optim.Adam(m.parameters())
    train(m, b, 1)
    OffloadAdamW(m.parameters()).load_state_dict(b.state_dict())


def test_named_parameters_in_another_order_are_refused():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first = OffloadAdamW([("a", a), ("b", b)])
    second = OffloadAdamW([("b", b), ("a", a)])
    with pytest.raises(CheckpointError, match="order"):
        second.load_state_dict(first.state_dict())
    unnamed = OffloadAdamW([a, b])
    second.load_state_dict(unnamed.state_dict())
    assert second.param_groups[0]["param_names"] == ["b", "a"]


def test_hooks_around_loading_and_steps_as_plain_numbers():
    m = model()
    optimizer = OffloadAdamW(m.parameters())
    train(m, optimizer, 2)
    seen = []

    def rename(o, state):
        seen.append("pre")
        state = copy.deepcopy(state)
        for entry in state["state"].values():
            entry["step"] = int(entry["step"])
        return state

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post"]
    step = optimizer.state[next(m.parameters())]["step"]
    assert step.dtype is torch.float32
    assert float(step) == 2.0
