"""What a step does in the same pass over memory: averages of the weights, norms of tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_formats import DTYPES, FORMATS, gradients, train, weights
from torch import nn

from ts_core.errors import StateError
from ts_core.testing import assert_bit_equal, devices
from ts_optim import OffloadAdamW


@pytest.mark.parametrize("device", devices())
@given(
    dtype=st.sampled_from(DTYPES),
    moments=st.sampled_from(list(FORMATS)),
    decay=st.sampled_from([0.0, 0.9, 0.999]),
    seed=st.integers(0, 100),
)
def test_the_average_follows_the_weights(device, dtype, moments, decay, seed):
    params = weights(seed, dtype, device=device)
    optimizer = OffloadAdamW(params, moment_dtype=moments, ema=decay)
    averages = [p.detach().double().clone() for p in params]
    for step in range(4):
        train(params, optimizer, 1, start=step)
        exact = [optimizer.state[p].get("master", p).detach().double() for p in params]
        averages = [decay * e + (1 - decay) * p.to(e.device) for e, p in zip(averages, exact, strict=True)]
    for p, e in zip(params, averages, strict=True):
        got = optimizer.ema_weights()[p].double().to(e.device)
        torch.testing.assert_close(got, e, rtol=1e-6, atol=1e-6)


def test_the_average_starts_where_a_checkpoint_without_one_left_off():
    ours, theirs = weights(0), weights(0)
    a, b = OffloadAdamW(ours), OffloadAdamW(theirs, ema=0.5)
    train(ours, a, 1)
    b.load_state_dict(a.state_dict())
    for q in theirs:
        assert_bit_equal(b.ema_weights()[q], q.detach())
    with pytest.raises(StateError, match="ema="):
        a.ema_weights()
    a.load_state_dict(b.state_dict())
    assert "ema" not in a.state[ours[0]]


@pytest.mark.parametrize("device", devices())
@given(
    dtype=st.sampled_from(DTYPES),
    moments=st.sampled_from(list(FORMATS)),
    place=st.sampled_from(["host", "device"]),
    seed=st.integers(0, 100),
)
def test_norms_and_ratios_of_every_tensor(device, dtype, moments, place, seed):
    model = nn.ParameterDict(dict(zip("abc", weights(seed, dtype, device=device), strict=True)))
    params = list(model.parameters())
    options = {"moment_dtype": moments, "place": lambda p: place, "measure_updates": True}
    optimizer = OffloadAdamW(params, **options).attach(model)
    train(params, optimizer, 1)
    before = [optimizer.state[p].get("master", p).detach().cpu().double().clone() for p in params]
    train(params, optimizer, 1, start=1)
    stats = optimizer.tensor_stats()
    assert list(stats) == ["a", "b", "c"]
    for p, old, row in zip(params, before, stats.values(), strict=True):
        new = optimizer.state[p].get("master", p).detach().cpu().double()
        want = [float(t.norm()) for t in (p.grad.cpu().double(), new - old, new)]
        got = [row[k] for k in ("grad_norm", "update_norm", "weight_norm")]
        assert got == pytest.approx(want, rel=1e-4)
        assert row["ratio"] == pytest.approx(want[1] / want[2], rel=1e-4)


def test_measuring_is_asked_for_and_names_what_is_not_finite():
    params = weights(0)
    with pytest.raises(StateError, match="measure_updates=True"):
        OffloadAdamW(params).tensor_stats()
    optimizer = OffloadAdamW([("first", params[0]), ("second", params[1])], measure_updates=True)
    train(params[:2], optimizer, 2)
    assert optimizer.stats()["first_nonfinite"] is None
    gradients(params, 2)
    params[1].grad[0] = float("nan")
    optimizer.step()
    train(params[:2], optimizer, 1)
    assert optimizer.stats()["first_nonfinite"] == (3, "parameter 'second'")
    row = optimizer.tensor_stats()["second"]
    assert all(math.isnan(x) for x in (row["ratio"], row["update_norm"], row["weight_norm"]))


def test_a_weight_of_zero_has_a_ratio_all_the_same():
    p = nn.Parameter(torch.zeros(3))
    optimizer = OffloadAdamW([p], measure_updates=True)
    p.grad = torch.zeros(3)
    optimizer.step()
    assert optimizer.tensor_stats() == {
        "0": {"grad_norm": 0.0, "update_norm": 0.0, "weight_norm": 0.0, "ratio": 0.0}
    }
