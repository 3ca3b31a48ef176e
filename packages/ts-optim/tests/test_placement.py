"""State on the host or beside the parameter: the same bits, whatever is copied where."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ts_optim.slots
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW

CUDA = pytest.param("cuda", marks=[p.marks for p in devices()][1])
# Without a GPU the way over host buffers is tested on CPU tensors that pretend to be remote.
DEVICES = [pytest.param("cpu"), CUDA]


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setattr(ts_optim.slots, "is_remote", lambda p: True)


def always_host(param):
    return "host"


def always_device(param):
    return "device"


def mixed(param):
    return "device" if param.dim() == 1 else "host"


def parameters(dtype, device):
    with seeded(0):
        made = [torch.randn(40, 30), torch.randn(5000), torch.randn(7, 9).t(), torch.randn(6, 8)[:, ::2]]
    return [nn.Parameter(t.to(device, dtype)) for t in made]


def run(params, steps=4, start=0, grad_dtype=None, **options):
    optimizer = OffloadAdamW(params, lr=1e-2, max_grad_norm=0.7, **options)
    continue_run(params, optimizer, steps, start, grad_dtype)
    return optimizer


def continue_run(params, optimizer, steps, start=0, grad_dtype=None):
    for i in range(start, start + steps):
        for j, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * i + j)
            p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [always_host, mixed])
def test_every_place_gives_the_bits_of_the_cpu(device, dtype, place, request):
    plain = parameters(dtype, "cpu")
    want = run(plain, place=always_host)
    if device == "cpu":
        request.getfixturevalue("remote")
    params = parameters(dtype, device)
    got = run(params, place=place)
    assert got.last_grad_norm == want.last_grad_norm
    for p, q in zip(params, plain, strict=True):
        assert_bit_equal(p.detach(), q.detach())
        for name in want.state[q]:
            assert_bit_equal(got.state[p][name], want.state[q][name])
    moved = sum(p.numel() * p.element_size() for p in params if place(p) == "host")
    assert got.stats()["d2h_bytes"] == 4 * moved
    assert got.stats()["h2d_bytes"] == 4 * moved
    assert got.stats()["staging_bytes"] == moved
    got.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_kernel_gives_the_bits_of_the_host(dtype):
    plain, params = parameters(dtype, "cpu"), parameters(dtype, "cuda")
    want, got = run(plain), run(params, place=always_device)
    assert got.last_grad_norm == want.last_grad_norm
    for p, q in zip(params, plain, strict=True):
        assert got.state[p]["exp_avg"].is_cuda
        assert got.state[p]["step"].device.type == "cpu"
        assert_bit_equal(p.detach(), q.detach())
    assert got.stats()["host_state_bytes"] == 0
    loaded = OffloadAdamW(params, place=always_host)
    loaded.load_state_dict(got.state_dict())
    assert not any(t.is_cuda for entry in loaded.state.values() for t in entry.values())
    assert loaded.stats()["pinned_bytes"] > 0


@pytest.mark.parametrize("device", DEVICES)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    where=st.integers(0, 3),
    value=st.floats(-4.0, 4.0, width=16),
)
def test_edits_on_the_device_are_taken_over(device, dtype, where, value):
    with pytest.MonkeyPatch.context() as patch:
        plain = parameters(dtype, "cpu")
        want = run(plain, 2)
        twin_params = parameters(dtype, device)
        if device == "cpu":
            patch.setattr(ts_optim.slots, "is_remote", lambda p: True)
        got = run(twin_params, 2, place=always_host)
        for params in (plain, twin_params):
            with torch.no_grad():
                params[where][1] = value
        continue_run(twin_params, got, 2, 2)
        patch.undo()
        continue_run(plain, want, 2, 2)
        for p, q in zip(twin_params, plain, strict=True):
            assert_bit_equal(p.detach(), q.detach())


def test_fp32_gradients_of_staged_16_bit_weights(remote):
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    p.grad_dtype = None
    p.grad = torch.full((5,), 1.001)
    optimizer = OffloadAdamW([p], lr=0.1, weight_decay=0.0, place=always_host)
    optimizer.step()
    assert_bit_equal(p.detach(), optimizer.state[p]["master"].bfloat16())
    assert float(optimizer.state[p]["exp_avg"][0]) == pytest.approx(0.1001, rel=1e-6)


def test_many_small_tensors_share_calls_and_large_ones_are_cut(remote, monkeypatch):
    import ts_optim.transfer

    monkeypatch.setattr(ts_optim.transfer, "_BATCH_BYTES", 100)
    params = [nn.Parameter(torch.ones(n)) for n in (3, 4, 60, 2, 0, 30)]
    plain = copy.deepcopy(params)
    for p in (*params, *plain):
        p.grad = torch.ones_like(p)
    OffloadAdamW(params, place=always_host).step()
    torch.optim.AdamW(plain).step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-7, atol=0.0)


def test_a_policy_that_answers_nonsense_is_refused_before_the_step(remote):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = OffloadAdamW([p], place=lambda _: "moon")
    with pytest.raises(ValueError, match="moon"):
        optimizer.step()
    assert p.tolist() == [1.0] * 3
    assert not optimizer.state


def test_float64_stays_where_it_is(remote):
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    optimizer = OffloadAdamW([p], place=always_host)
    optimizer.step()
    assert optimizer.stats()["d2h_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_default_policy_and_a_model_moved_to_the_gpu():
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024))
    optimizer = OffloadAdamW(model.parameters())
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters())
    for i in range(4):
        if i == 2:
            model.cuda()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            with seeded(i):
                q.grad = torch.randn(q.shape)
            p.grad = q.grad.to(p.device)
        optimizer.step()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=3e-7, atol=1e-7)
    assert not optimizer.state[model[0].weight]["exp_avg"].is_cuda
    assert optimizer.state[model[1].weight]["exp_avg"].is_cuda
