"""Every option for each accepted value, and for rejected ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import MissingDependencyError, OptionError, StateError
from ts_core.testing import seeded
from ts_optim import OffloadAdamW, options, place_by_size
from ts_optim.reference import adamw_, grad_norm


def make(**given):
    return OffloadAdamW([nn.Parameter(torch.ones(2))], **given)


ACCEPTED = {
    "mode": ["cpu", "auto"],
    "moment_dtype": [
        "auto",
        "float32",
        "fp32",
        torch.float32,
        "bf16",
        torch.bfloat16,
        "bfloat16",
        "int8",
        "8bit",
    ],
    "ema": [None, 0, 0.999],
    "measure_updates": [True, False],
    "seed": [0, 2**63 - 1],
    "eager": [None, False, True],
    "accumulate_fp32": [None, True, False],
    "distributed": [False],
    "max_grad_norm": [None, 1, 0.5, 1e9],
    "accumulation_steps": [None, 1, 7],
    "threads": [None, 1, 3],
    "pin_moments": [None, False],
    "measure_grad_norm": [True, False],
    "skip_nonfinite": [True, False],
    "place": [place_by_size, lambda p: "host"],
    "lr": [0.0, 1, 1e-3, torch.tensor(0.1)],
    "betas": [(0.0, 0.0), [0.9, 0.99], (torch.tensor(0.9), 0.99)],
    "eps": [0.0, 1e-8],
    "weight_decay": [0.0, 0.1],
}
REJECTED = {
    "mode": ["tpu", None, 1],
    "moment_dtype": ["fp8", torch.float16, torch.uint8, None, 8],
    "ema": [1, 1.5, -0.1, float("nan"), "x"],
    "measure_updates": [None, 1],
    "seed": [None, -1, 2**63, 0.5, "x"],
    "eager": [1, "yes"],
    "accumulate_fp32": ["yes", 2],
    "distributed": [True, None, 0],
    "max_grad_norm": [0.0, -1.0, float("nan"), float("inf"), "1", True],
    "accumulation_steps": [0, -1, 1.5, True, "1"],
    "threads": [0, -2, 1.5, True, "all"],
    "pin_moments": ["auto", 1, 0],
    "measure_grad_norm": [None, 1],
    "skip_nonfinite": [None, 0],
    "place": [None, "host"],
    "lr": [-1.0, float("nan"), "x", None, torch.ones(2)],
    "betas": [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9, (0.9, "x")],
    "eps": [-1e-8, None],
    "weight_decay": [-0.1, "x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in ACCEPTED.items() for v in vs])
def test_accepted(name, value):
    optimizer = make(**{name: value})
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.ones(2)
    optimizer.step()
    assert bool(p.isfinite().all())


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REJECTED.items() for v in vs])
def test_rejected_by_name(name, value):
    with pytest.raises(OptionError, match=name) as caught:
        make(**{name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("other", [{"mode": "auto"}, {"eager": True}])
def test_averaging_over_ranks_happens_in_step_on_the_host(other):
    with pytest.raises(OptionError, match=rf"{next(iter(other))}.*distributed=True"):
        make(distributed=True, **other)


def test_eager_needs_to_know_when_a_gradient_is_complete():
    with pytest.raises(OptionError, match=r"accumulation_steps=None.*eager=True"):
        make(eager=True, accumulation_steps=None)


def test_sums_in_fp32_need_a_torch_that_allows_them(monkeypatch):
    monkeypatch.setattr(options, "_GRAD_DTYPE", False)
    make()
    with pytest.raises(OptionError, match="accumulate_fp32=True needs torch"):
        make(accumulate_fp32=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only without a GPU")
def test_mode_gpu_needs_a_gpu():
    with pytest.raises(OptionError, match=r"mode='gpu' needs a CUDA device"):
        make(mode="gpu")


@pytest.mark.parametrize("name", ["int8", "8bit"])
def test_mode_gpu_has_no_int8_moments(name):
    with pytest.raises(OptionError, match=f"moment_dtype='{name}'.*mode='gpu'"):
        make(mode="gpu", moment_dtype=name)


def test_mode_gpu_pins_its_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(OptionError, match="pin_moments=False"):
        make(mode="gpu", pin_moments=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only without a GPU")
def test_pinning_needs_a_gpu():
    with pytest.raises(OptionError, match="pin_moments"):
        make(pin_moments=True)


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"])
def test_switches_of_torch_are_not_in_the_signature(name):
    with pytest.raises(TypeError, match=name):
        make(**{name: True})


@pytest.mark.parametrize(
    "group", [{"amsgrad": True}, {"maximize": True}, {"decoupled_weight_decay": False}, {"lr": -1.0}]
)
def test_groups_cannot_ask_for_another_algorithm(group):
    optimizer = make()
    with pytest.raises(OptionError, match=next(iter(group))):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **group})
    assert len(optimizer.param_groups) == 1


def test_torch_s_own_checks_of_parameters_hold():
    with pytest.raises(ValueError, match="empty"):
        OffloadAdamW([])
    with pytest.raises(TypeError):
        OffloadAdamW(nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="non-leaf"):
        OffloadAdamW([nn.Parameter(torch.ones(1)) * 2])
    with pytest.raises(TypeError):
        make().add_param_group([1])


@given(
    rank=st.sampled_from([4, 8, 16, 64, 128]),
    side=st.sampled_from([512, 3584, 4096, 11008, 14336, 18944, 28672]),
    flip=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_lora_factors_and_norms_stay_on_the_device(rank, side, flip, dtype):
    shape = (rank, side) if flip else (side, rank)
    assert place_by_size(torch.empty(shape, dtype=dtype, device="meta")) == "device"
    assert place_by_size(torch.empty(side, dtype=dtype, device="meta")) == "device"
    assert place_by_size(torch.empty((side, side * 2), dtype=torch.float32, device="meta")) == "host"


@given(seed=st.integers(0, 100), weight_decay=st.sampled_from([0.0, 0.1]), scale=st.sampled_from([1.0, 0.5]))
def test_the_reference_is_torch_s_adamw(seed, weight_decay, scale):
    with seeded(seed):
        p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        q, m, v = p.detach().clone(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
        optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=weight_decay)
        for t in range(1, 6):
            grad = torch.randn(3, 4, dtype=torch.float64)
            p.grad = grad * scale
            optimizer.step()
            adamw_(
                q, grad, m, v, t,
                lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, grad_scale=scale,
            )  # fmt: skip
    torch.testing.assert_close(q, p.detach(), rtol=1e-12, atol=1e-14)
    assert grad_norm([q, m]) == pytest.approx(float(torch.cat([q, m]).norm()))


def test_a_missing_native_module_is_explained(monkeypatch):
    import importlib
    import sys

    import ts_optim

    for name in [n for n in sys.modules if n.startswith("ts_optim")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setitem(sys.modules, "ts_optim._C", None)
    monkeypatch.delattr(ts_optim, "_C")
    monkeypatch.delitem(sys.modules, "ts_optim")
    with pytest.raises(MissingDependencyError, match="nanobind-backend"):
        importlib.import_module("ts_optim")


def test_options_change_between_steps():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = OffloadAdamW([weight], lr=0.1, accumulation_steps=1)
    assert not optimizer.needs_norm
    optimizer.reconfigure(max_grad_norm=0.5, accumulation_steps=2, threads=1)
    assert optimizer.needs_norm
    for _ in range(2):
        (weight * 3).sum().backward()
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(12.0)
    optimizer.zero_grad()
    for _ in range(2):
        weight.sum().backward()
    with pytest.raises(StateError, match="accumulation_steps=2"):
        weight.sum().backward()
    optimizer.reconfigure(accumulation_steps=None)
    for _ in range(5):
        weight.sum().backward()
    optimizer.step()
    for wrong in ({"max_grad_norm": 0.0}, {"threads": 0}, {"accumulation_steps": 0}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            optimizer.reconfigure(**wrong, accumulate_fp32=True)
    assert not optimizer._options.accumulate_fp32
    optimizer.reconfigure(max_grad_norm=None)
    assert not optimizer.needs_norm


def test_sums_become_fp32_from_the_time_they_are_asked_for():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([weight], accumulation_steps=None)
    optimizer.reconfigure(accumulate_fp32=True)
    (weight * 1.0).sum().backward()
    (weight * 0.001).sum().backward()
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad, torch.full((4,), 1 + torch.tensor(0.001).bfloat16().item()))
    optimizer.reconfigure(accumulate_fp32=False)
    (weight * 1.0).sum().backward()
    assert weight.grad.dtype is torch.float32  # what has begun
    optimizer.zero_grad()
    for value in (1.0, 0.001):
        (weight * value).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4).bfloat16() + torch.tensor(0.001).bfloat16())
    assert optimizer.accumulate_fp32 is False
