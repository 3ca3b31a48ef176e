"""Gradients that come, stay, vanish or break: what the optimizer must do in each case."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StateError, TrainStreamError
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW


def scalar(value=1.0):
    return nn.Parameter(torch.tensor(value))


def test_a_missing_gradient_is_neither_stale_nor_zero():
    # A stale gradient gives 0.8900, 0.7811, 0.6733; None taken for zero 0.8900, 0.8141, 0.7242.
    p, q = scalar(), scalar()
    optimizer = OffloadAdamW([p, q], lr=0.1, weight_decay=0.1)
    seen = []
    for use_p in (True, False, True):
        optimizer.zero_grad(set_to_none=True)
        ((3 * p if use_p else 0.0) + 2 * q).backward()
        optimizer.step()
        seen.append(round(float(p.detach()), 4))
    assert seen == [0.89, 0.89, 0.7811]
    assert float(optimizer.state[p]["step"]) == 2.0
    assert float(optimizer.state[q]["step"]) == 3.0


def test_each_parameter_has_its_own_step_count():
    # One shared counter gives 0.8656427.
    p, q = scalar(), scalar()
    optimizer = OffloadAdamW([p, q], lr=0.1, weight_decay=0.0)
    seen = []
    for grad in (3.0, None, -1.0):
        p.grad = None if grad is None else torch.tensor(grad)
        q.grad = torch.tensor(1.0)
        optimizer.step()
        seen.append(float(p.detach()))
    assert seen == pytest.approx([0.9, 0.9, 0.8599781], abs=2e-7)


@given(history=st.lists(st.sampled_from(["both", "p", "q", "none", "again", "edit", "zero"]), max_size=8))
def test_any_history_of_gradients_equals_torch(history):
    results = []
    for make in (OffloadAdamW, torch.optim.AdamW):
        p, q = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))
        optimizer = make([p, q], lr=0.1)
        for i, event in enumerate(history):
            if event != "again":
                optimizer.zero_grad(set_to_none=event != "zero")
            if event in ("both", "p", "edit", "zero"):
                p.grad = torch.tensor([1.0, -2.0]) * (i + 1)
            if event in ("both", "q"):
                (q * (i + 1)).sum().backward()
            if event == "edit":
                p.grad.mul_(0.5)
            optimizer.step()
        counts = [float(optimizer.state[x]["step"]) if x in optimizer.state else 0.0 for x in (p, q)]
        results.append((p.detach(), q.detach(), counts))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=3e-7, atol=1e-7)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("accumulation_steps", [None, 4])
def test_several_backward_passes_add_up(accumulation_steps):
    with seeded(0):
        layer = nn.Linear(5, 3)
        xs = torch.randn(4, 2, 5)
    other = copy.deepcopy(layer)
    a = OffloadAdamW(layer.parameters(), accumulation_steps=accumulation_steps)
    b = torch.optim.AdamW(other.parameters())
    for model, optimizer in ((layer, a), (other, b)):
        for x in xs:
            model(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(layer.weight, other.weight, rtol=3e-7, atol=1e-7)
    single = sum(torch.autograd.grad(other(x).square().sum(), other.weight)[0] * 0.0 for x in xs)
    assert single.shape == layer.weight.grad.shape


def test_one_pass_too_many_is_an_error_that_names_the_parameter():
    layer = nn.Linear(3, 2)
    optimizer = OffloadAdamW(layer.parameters(), accumulation_steps=2).attach(layer)
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(StateError, match=r"pass 3 .*(weight|bias).*accumulation_steps=2"):
        layer(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    layer(torch.ones(1, 3)).sum().backward()


def test_the_default_is_one_pass_and_tied_weights_count_once():
    tied = nn.Linear(3, 3)
    optimizer = OffloadAdamW(tied.parameters())
    tied(tied(torch.ones(1, 3))).sum().backward()
    with pytest.raises(StateError, match="accumulation_steps=1"):
        tied(torch.ones(1, 3)).sum().backward()
    del optimizer
    tied.zero_grad()
    for _ in range(3):  # an optimizer that is gone counts no more
        tied(torch.ones(1, 3)).sum().backward()


def test_a_parameter_unfrozen_later_is_counted_from_the_next_call():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    optimizer = OffloadAdamW(layer.parameters())
    layer.bias.requires_grad_(True)
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    layer.weight.requires_grad_(False)
    with pytest.raises(StateError):
        layer(torch.ones(1, 2)).sum().backward()


def test_zero_grad_both_ways_and_a_step_without_any_gradient():
    p = scalar()
    optimizer = OffloadAdamW([p], lr=0.1)
    p.grad = torch.tensor(1.0)
    optimizer.zero_grad(set_to_none=False)
    assert float(p.grad) == 0.0
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.step()
    assert float(p.detach()) == 1.0
    assert not optimizer.state


@pytest.mark.parametrize("device", devices())
def test_a_bad_gradient_changes_nothing_at_all(device):
    good = nn.Parameter(torch.ones(3, device=device))
    table = nn.Embedding(4, 2, sparse=True).to(device)
    good.grad = torch.ones(3, device=device)
    table(torch.tensor([1], device=device)).sum().backward()
    optimizer = OffloadAdamW([good, table.weight])
    with pytest.raises(TypeError, match="sparse") as caught:
        optimizer.step()
    assert isinstance(caught.value, TrainStreamError)
    assert good.tolist() == [1.0] * 3
    assert not optimizer.state
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    number.grad = torch.ones_like(number)
    with pytest.raises(TypeError, match="complex"):
        OffloadAdamW([good, number]).step()
    shared = nn.Parameter(torch.ones(1, device=device).expand(4))
    shared.grad = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="share memory"):
        OffloadAdamW([good, shared]).step()
    byte = nn.Parameter(torch.ones(4, device=device).to(torch.float8_e4m3fn))
    byte.grad = torch.ones(4, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8"):
        OffloadAdamW([good, byte]).step()
    assert good.tolist() == [1.0] * 3


def test_a_late_failure_leaves_counters_and_state_alone():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = OffloadAdamW([{"params": [p]}, {"params": [q]}])
    p.grad, q.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.state[q]["exp_avg"] = torch.zeros(5)
    with pytest.raises(StateError, match="exp_avg"):
        optimizer.step()
    optimizer.state[q]["exp_avg"] = before["state"][1]["exp_avg"]
    del optimizer.state[q]["step"]
    with pytest.raises(StateError, match="step"):
        optimizer.step()
    optimizer.state[q]["step"] = before["state"][1]["step"]
    optimizer.param_groups[1]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert_bit_equal(optimizer.state[p]["exp_avg"], before["state"][0]["exp_avg"])
    assert float(optimizer.state[p]["step"]) == 1.0


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e9])
def test_clipping_inside_equals_torch_clipping(device, limit):
    results = []
    for inside in (True, False):
        with seeded(0):
            params = [nn.Parameter(torch.randn(n).to(device)) for n in (5, 4096, 9000)]
            for p in params:
                p.grad = torch.randn(p.shape).to(device)
        if inside:
            optimizer = OffloadAdamW(params, max_grad_norm=limit)
            optimizer.step()
            norm = optimizer.last_grad_norm
        else:
            norm = float(nn.utils.clip_grad_norm_(params, limit))
            torch.optim.AdamW(params).step()
        results.append((norm, [p.detach() for p in params]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for p, q in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_torch_clipping_functions_work_on_it(norm_type):
    results = []
    for make in (OffloadAdamW, torch.optim.AdamW):
        with seeded(0):
            layer = nn.Linear(6, 4)
            x = torch.randn(3, 6)
        optimizer = make(layer.parameters())
        layer(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_((p for p in layer.parameters()), 0.5, norm_type=norm_type)
        nn.utils.clip_grad_norm_(layer.weight, 0.1, norm_type=norm_type)
        nn.utils.clip_grad_value_(layer.parameters(), 0.05)
        optimizer.step()
        results.append((norm, layer.weight.detach(), layer.bias.detach()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=1e-7)


def test_clipping_gradients_whose_squares_overflow_fp32():
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    p.grad = torch.full((64,), 1e20, dtype=torch.bfloat16)
    optimizer = OffloadAdamW([p], lr=0.1, max_grad_norm=1.0, weight_decay=0.0)
    optimizer.step()
    value = float(torch.tensor(1e20).bfloat16())
    assert optimizer.last_grad_norm == pytest.approx(8.0 * value, rel=1e-6)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((64,), 0.1 / 8), rtol=1e-6, atol=0.0)
    assert float(optimizer.state[p]["master"][0]) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("skip", [False, True])
def test_non_finite_gradients_are_reported_and_skipped_on_demand(device, bad, skip):
    p, q = (nn.Parameter(torch.ones(4, device=device)) for _ in range(2))
    p.grad, q.grad = torch.ones(4, device=device), torch.tensor([1.0, bad, 1.0, 1.0], device=device)
    optimizer = OffloadAdamW([p, q], max_grad_norm=1.0, skip_nonfinite=skip)
    optimizer.step()
    assert optimizer.stats()["nonfinite"] == (1, "parameter 1")
    assert not math.isfinite(optimizer.last_grad_norm)
    if skip:
        assert p.tolist() == q.tolist() == [1.0] * 4
        assert optimizer.stats()["skipped_steps"] == 1
        assert all(float(entry["step"]) == 0.0 for entry in optimizer.state.values())
        q.grad = torch.ones(4, device=device)
        optimizer.step()
        assert optimizer.stats()["nonfinite"] is None
        assert q.tolist() != [1.0] * 4
    else:  # as torch: a NaN norm spoils all, an infinite one what was infinite
        assert not bool(q.isfinite().all())


def test_nan_with_torch_clipping_raises_when_asked():
    p = nn.Parameter(torch.ones(2))
    optimizer = OffloadAdamW([p])
    p.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    optimizer.step()
    assert math.isnan(float(p[0].detach()))
    assert not math.isnan(float(p[1].detach()))


def test_the_norm_is_measured_only_on_demand():
    p = scalar()
    p.grad = torch.tensor(-3.0)
    plain, measuring = OffloadAdamW([p]), OffloadAdamW([p], measure_grad_norm=True)
    plain.step()
    assert plain.last_grad_norm is None
    measuring.step()
    assert measuring.last_grad_norm == 3.0
    double = nn.Parameter(torch.ones(2, dtype=torch.float64))
    double.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    both = OffloadAdamW([p, double], measure_grad_norm=True)
    both.step()
    assert both.last_grad_norm == pytest.approx(math.sqrt(34.0))


def test_accumulation_is_torch_s_own_in_the_dtype_of_the_parameter():
    ours, theirs = (nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = OffloadAdamW([ours], accumulation_steps=None, measure_grad_norm=True)
    for p in (ours, theirs):
        for c in [256.0] + [1.0] * 256:
            (p * c).sum().backward()
    assert_bit_equal(ours.grad, theirs.grad)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(float(theirs.grad.double().norm()))


def test_decay_too_small_for_bf16_reaches_the_weight_through_its_master():
    # Plain bf16 AdamW stays at 1.0.
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([p], lr=1e-3, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    for _ in range(1000):
        optimizer.step()
    assert float(optimizer.state[p]["master"][0]) == pytest.approx(0.9048, abs=5e-5)
    assert p.tolist() == [0.90625] * 4


def test_updates_below_half_an_ulp_add_up():
    p = nn.Parameter(torch.full((2,), 256.0, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([p], lr=1e-3, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    for _ in range(2000):
        optimizer.step()
    assert p.tolist() == [254.0] * 2


def test_edits_of_a_16_bit_weight_survive_the_next_step():
    p = nn.Parameter(torch.tensor([1.001, 2.0, 3.003]).bfloat16())
    optimizer = OffloadAdamW([p], lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["master"].copy_(torch.tensor([1.0001, 2.0001, 3.0001]))
    with torch.no_grad():
        p.copy_(torch.tensor([1.0, 5.0, 3.0]))
    optimizer.step()
    p.data[0] = 9.0
    optimizer.step()
    assert p.tolist() == [9.0, 5.0, 3.0]
    want = torch.tensor([9.0, 5.0, 3.0001])
    assert_bit_equal(optimizer.state[p]["master"], want)


def test_empty_parameters_are_no_ops():
    p, q = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))
    p.grad, q.grad = torch.zeros(0, 3), torch.ones(2)
    optimizer = OffloadAdamW([p, q], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(math.sqrt(2.0))
    assert p.shape == (0, 3)


def test_an_fp32_gradient_of_a_16_bit_weight_is_used_as_it_is():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad_dtype = None
    p.grad = torch.full((3,), 1.001)
    optimizer = OffloadAdamW([p], weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((3,), 0.1001), rtol=1e-6, atol=0.0)


def test_a_second_step_applies_the_same_gradient_again():
    results = []
    for make in (OffloadAdamW, torch.optim.AdamW):
        p = scalar()
        optimizer = make([p], lr=0.1)
        p.grad = torch.tensor(2.0)
        optimizer.step()
        optimizer.step()
        results.append(float(p.detach()))
    assert results[0] == pytest.approx(results[1], rel=3e-7)
