"""Gradients of 16-bit weights summed in fp32, in the order of micro-batches, wherever the weight is."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard, guard_of, release
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW

LOW = (torch.bfloat16, torch.float16)


class Landing:
    """Lands gradients of guarded parameters as whoever pages them does, with memory of its own for sums."""

    def __init__(self):
        self.made = []

    def wide(self, parameter):
        self.made.append(torch.empty(parameter.shape, dtype=torch.float32))
        return self.made[-1].detach()

    def __call__(self, parameter, share):
        entry = guard_of(parameter)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            entry.wide_memory = self.wide
            for hook in list(entry.hooks.values()):
                changed = hook(share)
                share = share if changed is None else changed
            if parameter.grad is None:
                parameter.grad = share
            else:
                entry.wait()
                parameter.grad += share
        for hook in list(entry.landed_hooks.values()):
            hook(parameter)


def parameters(dtype, seed=0, device="cpu"):
    with seeded(seed):
        return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in ((17, 5), (33,), (4, 6))]


def micro_batches(params, k, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(k):
        scale = 10.0 ** (i % 3)
        made.append(
            [(scale * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype) for p in params]
        )
    return made


def backward(params, grads):
    sum((p * g).sum() for p, g in zip(params, grads, strict=True)).backward()


def reference(batches):
    """fp32 sums of the gradients, one after the other."""
    sums = [g.clone() for g in batches[0]]
    for batch in batches[1:]:
        sums = [s.float() + g.float() for s, g in zip(sums, batch, strict=True)]
    return sums


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("device", devices())
@given(
    dtype=st.sampled_from(LOW),
    k=st.sampled_from([1, 2, 3, 8]),
    to_none=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_sum_is_that_of_fp32_to_the_bit(device, guarded, dtype, k, to_none, seed):
    if guarded and device != "cpu":
        return
    params = parameters(dtype, device=device)
    optimizer = OffloadAdamW(params, accumulation_steps=None, accumulate_fp32=True)
    landing = Landing()
    for p in params if guarded else ():
        guard(p, landing)
    for step in range(3):
        batches = micro_batches(params, k, seed + step)
        for batch in batches:
            backward(params, batch)
        for p, want in zip(params, reference(batches), strict=True):
            held = p.grad
            if step and not to_none:
                assert held.dtype is torch.float32 or k == 1
                assert_bit_equal(held.float(), want.float() + 0.0)
            else:
                assert_bit_equal(held, want)  # a single one keeps its dtype
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        assert all(p.grad is None if to_none else not p.grad.any() for p in params)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_paged_and_resident_runs_are_bit_equal_to_one_given_the_sums(device, dtype, moments):
    def make(**options):
        params = parameters(dtype, device=device)
        common = {"lr": 1e-2, "max_grad_norm": 3.0, "moment_dtype": moments, "place": lambda p: "host"}
        return params, OffloadAdamW(params, accumulation_steps=None, **common, **options)

    runs = [make(accumulate_fp32=True), make()]
    if device == "cpu":
        runs.append(make(accumulate_fp32=True))
        for p in runs[-1][0]:
            guard(p, Landing())
    for step in range(3):
        batches = micro_batches(runs[0][0], 1 + step, step)
        for index, (params, optimizer) in enumerate(runs):
            optimizer.zero_grad()
            if index == 1:
                for p, total in zip(params, reference(batches), strict=True):
                    p.grad_dtype = None
                    p.grad = total
            else:
                for batch in batches:
                    backward(params, batch)
            optimizer.step()
    for params, optimizer in runs[1:]:
        assert optimizer.last_grad_norm == runs[0][1].last_grad_norm
        for p, q in zip(params, runs[0][0], strict=True):
            assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())


def test_small_contributions_do_not_vanish_beside_large_ones():
    # bfloat16 sums stop at 256.
    p = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True, measure_grad_norm=True)
    for c in [256.0] + [1.0] * 256:
        (p * c).sum().backward()
    assert p.grad.tolist() == [512.0] * 8
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(512 * math.sqrt(8))


def test_weights_of_other_dtypes_are_left_alone():
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    OffloadAdamW(params, accumulation_steps=None, accumulate_fp32=True)
    for _ in range(2):
        sum((p * 2).sum() for p in params).backward()
    assert [p.grad.dtype for p in params] == [torch.float32, torch.float64]
    assert all(p.grad.tolist() == [4.0] * 3 for p in params)


def test_a_gradient_kept_elsewhere_stays_as_it_was():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True)
    (p * 2).sum().backward()
    kept = p.grad
    (p * 3).sum().backward()
    assert kept.tolist() == [2.0] * 3
    assert p.grad.tolist() == [5.0] * 3
    (p * 3).sum().backward()
    assert p.grad.tolist() == [8.0] * 3
    del optimizer
    p.grad = None
    (p * 2).sum().backward()  # an optimizer that is gone sums nothing any more
    assert p.grad.dtype is torch.bfloat16


class Wide(torch.autograd.Function):
    """Gives a gradient in fp32, whatever it was asked for."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.float() * 1.001


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_each_contribution_is_rounded_to_the_weight_s_dtype_as_torch_does_it(passes):
    p, q = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(passes):
            Wide.apply(p).sum().backward()
    Wide.apply(q).sum().backward()
    assert_bit_equal(p.grad.float(), q.grad.float() * passes)


def test_hooks_edits_and_clipping_by_hand_work_on_the_sum():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    seen = []
    p.register_hook(lambda grad: seen.append(grad.dtype))
    p.register_hook(lambda grad: grad * 2)
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    optimizer = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True, weight_decay=0.0)
    for _ in range(2):
        (p * 1.5).sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]
    assert p.grad.tolist() == [6.0] * 3
    norm = nn.utils.clip_grad_norm_([p], 1.0)
    assert float(norm) == pytest.approx(6 * math.sqrt(3))
    p.grad.mul_(2.0)
    optimizer.step()
    expected = torch.full((3,), 0.1 * 2 / math.sqrt(3))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-5, atol=0.0)
    p.grad = torch.ones(3, dtype=torch.bfloat16)
    (p * 1.0).sum().backward()
    assert p.grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_scales_sums_back(unscale):
    p, q = (nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wide = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True, measure_grad_norm=True)
    exact = OffloadAdamW([q], accumulation_steps=None, measure_grad_norm=True)
    for factor in (0.5, 0.25):
        scaler.scale((p.float() * factor).sum()).backward()
    if unscale:
        scaler.unscale_(wide)
        assert p.grad.tolist() == [0.75] * 4
    scaler.step(wide)
    scaler.update()
    q.grad_dtype = None
    q.grad = torch.full((4,), 0.75)
    exact.step()
    assert wide.last_grad_norm == exact.last_grad_norm
    assert_bit_equal(p.detach(), q.detach())
    wide.zero_grad()
    for factor in (1.0, math.inf):
        scaler.scale((p.float() * factor).sum()).backward()
    scaler.step(wide)
    scaler.update()
    assert_bit_equal(p.detach(), q.detach())
    assert wide.stats()["skipped_steps"] == 1


def test_parameters_that_come_later_copies_and_pickles():
    layer = nn.Linear(3, 2).bfloat16()
    layer.bias.requires_grad_(False)
    optimizer = OffloadAdamW(layer.parameters(), accumulation_steps=None, accumulate_fp32=True)
    layer.bias.requires_grad_(True)
    optimizer.zero_grad()
    other, twin = copy.deepcopy((layer, optimizer))
    third, triplet = pickle.loads(pickle.dumps((layer, optimizer)))
    for model in (layer, other, third):
        for _ in range(2):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert model.bias.grad.dtype is torch.float32
    twin.step()
    triplet.step()


def test_a_pending_update_keeps_the_gradient_it_was_given():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    landing = Landing()
    guard(p, landing)
    optimizer = OffloadAdamW([p], accumulation_steps=None, accumulate_fp32=True)
    loss = (p * 2).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert p.grad.tolist() == [6.0] * 3
    assert len(landing.made) == 1
    optimizer.step()
    loss.backward()
    assert p.grad.tolist() == [8.0] * 3
    optimizer.synchronize()
    release(p)
