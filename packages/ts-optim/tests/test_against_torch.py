"""Everything at once against torch's AdamW in float64: formats, dtypes, clipping, sums, groups, hooks."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard, guard_of
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW

SHAPES = ((23, 9), (31,), (1,), (300,), (4, 5))
STEPS = 20
HYPER = ({}, {"lr": 3e-3, "betas": (0.8, 0.95)}, {"weight_decay": 0.3, "eps": 1e-6})


def land(parameter, share):
    """Land a gradient as whoever pages the weights does."""

    def at_the_end():
        entry = guard_of(parameter)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for hook in list(entry.hooks.values()):
                hook(share)
            if parameter.grad is None:
                parameter.grad = share
            else:
                entry.wait()
                parameter.grad += share
        for hook in list(entry.landed_hooks.values()):
            hook(parameter)

    torch.autograd.Variable._execution_engine.queue_callback(at_the_end)


@dataclasses.dataclass
class Case:
    """What one run is made of."""

    dtype: torch.dtype
    moments: str
    clip: float | None
    inside: bool
    passes: int
    wide: bool
    given_fp32: bool
    eager: bool
    guarded: bool
    groups: int
    gaps: bool
    to_none: bool
    seed: int

    @property
    def low(self):
        return self.dtype.itemsize == 2


CASES = st.builds(
    Case,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    moments=st.sampled_from(["float32", "bfloat16", "int8"]),
    clip=st.sampled_from([None, 0.5, 1e9]),
    inside=st.booleans(),
    passes=st.sampled_from([1, 2, 3, 5]),
    wide=st.booleans(),
    given_fp32=st.booleans(),
    eager=st.booleans(),
    guarded=st.booleans(),
    groups=st.sampled_from([1, 2, 3]),
    gaps=st.booleans(),
    to_none=st.booleans(),
    seed=st.integers(0, 1000),
)


def grouped(params, count):
    return [{"params": params[i::count], **HYPER[i]} for i in range(count)]


def gradients(case, step, index, count):
    """The micro-batches' gradients of one parameter: a slope that the run follows, and noise."""
    generator = torch.Generator().manual_seed(7919 * case.seed + 101 * step + index)
    shape = SHAPES[index]
    slope = torch.linspace(-1, 1, math.prod(shape)).view(shape)
    made = [slope + 0.5 * torch.randn(shape, generator=generator) for _ in range(count)]
    return [(10.0 ** -(index % 3)) * g for g in made]


def summed(case, grads):
    """What the parameter's gradient must be: torch's own sum, or the one in fp32."""
    total = grads[0].clone()
    for grad in grads[1:]:
        total = total.float() + grad.float() if case.low and case.wide else total + grad
    return total


def missing(case, step, index):
    return case.gaps and (step + index) % 4 == 0


def give(case, params, step, device):
    """Hand out a step's gradients, by backward or by hand; return the sums that torch's AdamW is given."""
    given_ = []
    for index in range(len(params)):
        count = 0 if missing(case, step, index) else case.passes
        given_.append([g.to(device, case.dtype) for g in gradients(case, step, index, count)])
    by_hand = case.given_fp32 and case.low and case.passes == 1
    for k in range(case.passes):
        terms = []
        for p, grads in zip(params, given_, strict=True):
            if grads and by_hand:
                with torch._C.DisableTorchFunctionSubclass():
                    p.grad_dtype = None
                p.grad = grads[k].float()
            elif grads:
                terms.append((p * grads[k]).sum())
        if terms:
            sum(terms).backward()
    return [summed(case, grads) if grads else None for grads in given_]


def run(case, device, mode, place):
    with seeded(case.seed):
        start = [torch.randn(shape).to(case.dtype) for shape in SHAPES]
    params = [nn.Parameter(w.to(device, copy=True)) for w in start]
    exact, same = ([nn.Parameter(w.to(d, copy=True)) for w in start] for d in (torch.float64, torch.float32))
    outside = case.clip is not None and not case.inside and not case.eager
    optimizer = OffloadAdamW(
        grouped(params, case.groups),
        lr=1e-2,
        mode=mode,
        moment_dtype=case.moments,
        max_grad_norm=None if outside else case.clip,
        accumulation_steps=case.passes,
        accumulate_fp32=case.wide,
        eager=case.eager,
        place=lambda p: place,
        seed=case.seed,
    )
    references = [(ps, torch.optim.AdamW(grouped(ps, case.groups), lr=1e-2)) for ps in (exact, same)]
    for rank, p in enumerate(params if case.guarded and device == "cpu" else ()):
        guard(p, land).rank = rank % 3
    for step in range(STEPS):
        sums = give(case, params, step, device)
        if outside:
            nn.utils.clip_grad_norm_(
                [p for p, g in zip(params, sums, strict=True) if g is not None], case.clip
            )
            sums = [None if g is None else p.grad.detach().clone() for p, g in zip(params, sums, strict=True)]
        for ps, reference in references:
            for p, total in zip(ps, sums, strict=True):
                p.grad = None if total is None else total.to("cpu", p.dtype)
            if case.clip is not None and not outside:
                norm = nn.utils.clip_grad_norm_(ps, case.clip)
                if ps is exact:
                    expected = float(norm)
            reference.step()
        optimizer.step()
        if case.clip is not None and not outside:
            assert optimizer.last_grad_norm == pytest.approx(expected, rel=1e-6)
        if case.gaps or case.to_none:
            optimizer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=False)
    optimizer.synchronize()
    return optimizer, params, exact, same, start


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", ["cpu", "auto", pytest.param("gpu", marks=pytest.mark.gpu)])
@given(case=CASES, place=st.sampled_from(["host", "device"]))
def test_every_combination_follows_torch_in_float64(device, mode, case, place):
    if mode == "gpu" and (case.moments == "int8" or device == "cpu"):
        return  # refused, which is tested with the options
    optimizer, params, exact, same, start = run(case, device, mode, place)
    masters = [optimizer.state[p].get("master", p).detach().cpu().as_subclass(torch.Tensor) for p in params]
    for p, master in zip(params, masters, strict=True):
        assert_bit_equal(p.detach().cpu().as_subclass(torch.Tensor), master.to(case.dtype))
    counts = [sum(not missing(case, step, i) for step in range(STEPS)) for i in range(len(params))]
    assert [float(optimizer.state[p]["step"]) for p in params] == counts
    if case.dtype is torch.float64:
        for p, q in zip(masters, exact, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-12, atol=1e-13)
    elif case.moments == "float32":
        for p, q, r in zip(masters, same, exact, strict=True):
            scale = max(1.0, float(r.detach().abs().max()))
            # fp32 itself rounds 20 times: torch's own distance from float64, and 3e-7.
            torch_off = float((q.detach().double() - r.detach()).abs().max())
            assert float((p.double() - r.detach()).abs().max()) <= torch_off + 3e-7 * scale
    else:
        went, off = [], []
        for p, r, w in zip(masters, exact, start, strict=True):
            went.append((r.detach() - w.double()).view(-1))
            off.append((p.double() - r.detach()).view(-1))
        allowed = {"bfloat16": 0.02, "int8": 0.06}[case.moments]
        assert float(torch.cat(off).norm() / torch.cat(went).norm()) <= allowed


SWITCHES = {"amsgrad": False, "maximize": False, "capturable": True, "foreach": True, "fused": True,
            "differentiable": True}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [False, True])
def test_switches_of_torch_in_groups_and_state_dicts(name, value):
    """Those that change the arithmetic are refused; those that choose an implementation change nothing."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours = OffloadAdamW([p], lr=0.1)
    torch_s = torch.optim.AdamW([q], lr=0.1)
    for _ in range(2):
        q.grad = torch.tensor([1.0, -2.0, 3.0])
        torch_s.step()
    saved = torch_s.state_dict()
    saved["param_groups"][0][name] = value
    group = {"params": [nn.Parameter(torch.ones(2))], name: value}
    if value and not SWITCHES[name]:
        with pytest.raises(ValueError, match=name):
            ours.load_state_dict(saved)
        with pytest.raises(ValueError, match=name):
            ours.add_param_group(group)
        assert not ours.state
        assert len(ours.param_groups) == 1
        return
    ours.load_state_dict(saved)
    with torch.no_grad():
        p.copy_(q)
    ours.add_param_group(group)
    p.grad = q.grad
    ours.step()
    torch_s.step()
    torch.testing.assert_close(p, q, rtol=3e-7, atol=1e-7)
