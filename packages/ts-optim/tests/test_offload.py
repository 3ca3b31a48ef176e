"""OffloadAdamW against torch.optim.AdamW on a copy of the model, and against float64."""

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW


def small_model(seed=0, device="cpu", dtype=torch.float32):
    with seeded(seed):
        layers = nn.Linear(7, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 1)
        model = nn.Sequential(*layers)
    return model.to(device=device, dtype=dtype)


def batch(i, device="cpu", dtype=torch.float32):
    with seeded(1000 + i):
        return torch.randn(4, 7).to(device=device, dtype=dtype)


def loss_of(model, x):
    return (model(x) - 1.0).square().sum()


def worst(a, b):
    pairs = [(p.double(), q.double()) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    return max(((p - q).abs() / q.abs().clamp_min(1.0)).max().item() for p, q in pairs)


def train(model, optimizer, steps, *, clip=None, accumulate=1, start=0, dtype=torch.float32):
    device = next(model.parameters()).device
    for i in range(start, start + steps):
        optimizer.zero_grad()
        for k in range(accumulate):
            loss_of(model, batch(10 * i + k, device, dtype)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("device", devices())
@given(
    lr=st.sampled_from([1e-3, 1e-2]),
    betas=st.sampled_from([(0.9, 0.999), (0.8, 0.95), (0.0, 0.99)]),
    eps=st.sampled_from([1e-8, 1e-6]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    clip=st.sampled_from([None, 0.1, 1e9]),
    inside=st.booleans(),
    seed=st.integers(0, 100),
)
def test_fp32_stays_within_3e_7_of_torch(device, lr, betas, eps, weight_decay, clip, inside, seed):
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(shape, generator=generator).to(device) for shape in ((33, 7), (33,), (1,), (5, 40))]
    dtypes = (torch.float32, torch.float32, torch.float64)
    sets = [[nn.Parameter(w.to(d, copy=True)) for w in start] for d in dtypes]
    ours, theirs, exact = sets
    a = OffloadAdamW(ours, **options, **({"max_grad_norm": clip} if inside else {}))
    others = [torch.optim.AdamW(params, **options) for params in (theirs, exact)]
    for i in range(20):
        for j, group in enumerate(zip(*sets, strict=True)):
            grad = torch.randn(start[j].shape, generator=generator).mul_(10.0 ** (-(i + j) % 3)).to(device)
            for p in group:
                p.grad = grad.to(p.dtype, copy=True)
        for k, params in enumerate(sets):
            if clip is not None and not (k == 0 and inside):
                norm = nn.utils.clip_grad_norm_(params, clip)
        for optimizer in (a, *others):
            optimizer.step()
        if clip is not None and inside:
            assert a.last_grad_norm == pytest.approx(float(norm), rel=1e-6)
    for group in zip(*sets, strict=True):
        p, q, r = (x.detach() for x in group)
        scale = max(1.0, float(r.abs().max()))
        assert float((p - q).abs().max()) <= 3e-7 * scale
        # fp32 itself: 20 roundings of 1 - lr * decay and of the weight; torch has the same.
        theirs_off = float((q.double() - r).abs().max())
        assert float((p.double() - r).abs().max()) <= theirs_off + 3e-7 * scale <= 2e-6 * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", devices())
@given(seed=st.integers(0, 100), clip=st.sampled_from([None, 0.5]))
def test_16_bit_weights_follow_their_fp32_masters(device, dtype, seed, clip):
    model = small_model(seed, device, dtype)
    masters = copy.deepcopy(model).float()
    a = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
    b = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    for i in range(8):
        a.zero_grad()
        loss_of(model, batch(i, device, dtype)).backward()
        for p, q in zip(model.parameters(), masters.parameters(), strict=True):
            q.grad = p.grad.float()
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.parameters(), clip)
        a.step()
        b.step()
    for p, q in zip(model.parameters(), masters.parameters(), strict=True):
        assert a.state[p]["master"].dtype is torch.float32
        torch.testing.assert_close(a.state[p]["master"].to(device), q.detach(), rtol=3e-7, atol=3e-7)
        assert_bit_equal(p.detach(), a.state[p]["master"].to(device=device, dtype=dtype))


@pytest.mark.parametrize("device", devices())
def test_float64_weights_are_updated_in_float64(device):
    ours, theirs = small_model(3, device, torch.float64), small_model(3, device, torch.float64)
    a = OffloadAdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.3)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(ours, a, 20, dtype=torch.float64)
    train(theirs, b, 20, clip=0.3, dtype=torch.float64)
    assert worst(ours, theirs) < 1e-12
    assert a.state[next(ours.parameters())]["exp_avg"].dtype is torch.float64


def parameter(layout, seed):
    with seeded(seed):
        x = torch.randn(6, 10)
        if layout == "transposed":
            return nn.Parameter(x.t())
        if layout == "channels_last":
            return nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        if layout == "strided":
            return nn.Parameter(x[:, ::2])
        if layout == "offset":
            return nn.Parameter(x.view(-1)[3:])
        if layout == "scalar":
            return nn.Parameter(x[0, 0].clone())
        if layout == "empty":
            return nn.Parameter(torch.zeros(0, 4))
        if layout == "side_of_one":
            return nn.Parameter(torch.randn(5, 1, 4).transpose(0, 1))
        return nn.Parameter(x)


LAYOUTS = (
    "plain", "transposed", "channels_last", "strided", "offset", "scalar", "empty", "side_of_one",
)  # fmt: skip


@given(
    layout=st.sampled_from(LAYOUTS),
    same_layout=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_every_layout_of_parameter_and_gradient(layout, same_layout, dtype, seed):
    base = parameter(layout, seed)
    p = nn.Parameter(base.detach().clone(memory_format=torch.preserve_format).to(dtype))
    if layout == "strided":
        p = nn.Parameter(torch.zeros(6, 10, dtype=dtype)[:, ::2].copy_(base.detach()))
        assert not p.is_contiguous()
    q = nn.Parameter(p.detach().float().contiguous() if dtype is torch.bfloat16 else p.detach().contiguous())
    outside = p.detach().clone()
    a = OffloadAdamW([p], lr=1e-2)
    b = torch.optim.AdamW([q], lr=1e-2)
    for i in range(3):
        with seeded(seed + i):
            g = torch.randn(p.shape, dtype=torch.float64).to(dtype)
        p.grad = torch.empty_like(p).copy_(g) if same_layout else g.contiguous()
        q.grad = g.to(q.dtype)
        a.step()
        b.step()
    result = a.state[p]["master"] if dtype is torch.bfloat16 else p.detach()
    torch.testing.assert_close(result, q.detach(), rtol=3e-7, atol=1e-7)
    assert p.stride() == outside.stride() or layout == "strided"
    assert a.state[p]["step"] == 3
    assert a.state[p]["exp_avg"].shape == p.shape


def test_a_step_writes_only_the_parameter_s_own_elements():
    storage = torch.zeros(6, 10)
    p = nn.Parameter(storage[:, ::2])
    p.grad = torch.ones_like(p)
    OffloadAdamW([p], lr=0.5).step()
    assert bool((storage[:, 1::2] == 0).all())
    assert bool((storage[:, ::2] < 0).all())


def test_groups_with_their_own_hyperparameters():
    ours, theirs = small_model(), small_model()

    def groups(model):
        ps = list(model.parameters())
        return [
            {"params": ps[:2], "weight_decay": 0.1, "lr": 1e-2},
            {"params": ps[2:5], "betas": (0.7, 0.9), "eps": 1e-4},
            {"params": ps[5:], "weight_decay": 0.0},
        ]

    a, b = OffloadAdamW(groups(ours), lr=1e-3), torch.optim.AdamW(groups(theirs), lr=1e-3)
    train(ours, a, 20)
    train(theirs, b, 20)
    assert worst(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", ["cosine", "lambda", "onecycle", "plateau"])
def test_schedulers_drive_it_as_they_drive_torch(kind):
    def scheduler(optimizer):
        s = torch.optim.lr_scheduler
        return {
            "cosine": lambda: s.CosineAnnealingLR(optimizer, T_max=8),
            "lambda": lambda: s.LambdaLR(optimizer, lambda i: 1.0 / (i + 1)),
            "onecycle": lambda: s.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10),
            "plateau": lambda: s.ReduceLROnPlateau(optimizer, patience=0),
        }[kind]()

    ours, theirs = small_model(), small_model()
    a, b = OffloadAdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, optimizer in ((ours, a), (theirs, b)):
        s = scheduler(optimizer)
        for i in range(8):
            train(model, optimizer, 1, start=i)
            s.step(*((1.0,) if kind == "plateau" else ()))
    assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
    assert a.param_groups[0]["betas"] == b.param_groups[0]["betas"]
    assert worst(ours, theirs) < 2e-6
    assert isinstance(a, torch.optim.Optimizer)
    assert a.defaults["lr"] == 1e-2


def test_lr_as_a_tensor_and_lr_zero():
    ours, theirs = small_model(), small_model()
    a = OffloadAdamW(ours.parameters(), lr=torch.tensor(1e-2))
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(ours, a, 3)
    train(theirs, b, 3)
    a.param_groups[0]["lr"].fill_(0.0)
    b.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in ours.parameters()]
    train(ours, a, 1, start=3)
    train(theirs, b, 1, start=3)
    for p, q in zip(ours.parameters(), before, strict=True):
        assert_bit_equal(p.detach(), q)
    a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 1e-3
    train(ours, a, 2, start=4)
    train(theirs, b, 2, start=4)
    assert worst(ours, theirs) < 1e-6


def test_closure_is_run_with_gradients_and_its_loss_returned():
    ours, theirs = small_model(), small_model()
    a, b = OffloadAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for model, optimizer in ((ours, a), (theirs, b)):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            loss.backward()
            return loss

        for _ in range(3):
            loss = optimizer.step(closure)
        assert float(loss.detach()) > 0.0
    assert worst(ours, theirs) < 3e-7


@pytest.mark.parametrize("options", [{}, {"eager": True}, {"accumulate_fp32": True}])
def test_unfreezing_freezing_and_adding_groups(options):
    ours, theirs = small_model(), small_model()

    def recipe(model, make, **options):
        for p in model.parameters():
            p.requires_grad_(False)
        model[4].requires_grad_(True)
        last = [p for layer in (model[3], model[4]) for p in layer.parameters()]
        optimizer = make(last, lr=1e-2, **options)
        train(model, optimizer, 2)
        model[3].requires_grad_(True)
        train(model, optimizer, 2, start=2)
        model[4].requires_grad_(False)
        before = [p.detach().clone() for p in model[4].parameters()]
        train(model, optimizer, 2, start=4)
        for p, q in zip(model[4].parameters(), before, strict=True):
            assert_bit_equal(p.detach(), q)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        train(model, optimizer, 2, start=6)
        return optimizer

    a = recipe(ours, OffloadAdamW, **options)
    recipe(theirs, torch.optim.AdamW)
    assert worst(ours, theirs) < 3e-7
    assert not any(p in a.state for p in ours[1].parameters())


def test_frozen_parameters_of_any_dtype_may_be_in_the_list():
    packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    p = nn.Parameter(torch.ones(2))
    optimizer = OffloadAdamW([packed, p])
    p.sum().backward()
    optimizer.step()
    assert list(optimizer.state) == [p]


def test_grad_scaler_on_cpu_equals_the_unscaled_run():
    ours, theirs = small_model(), small_model()
    a, b = OffloadAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3) for _ in range(2)]
    for i in range(8):
        for model, optimizer, scaler in ((ours, a, scalers[0]), (theirs, b, scalers[1])):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(i) * (math.inf if i == 4 else 1.0))).backward()
            if i % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert a.stats()["skipped_steps"] == 1
    assert float(a.state[next(ours.parameters())]["step"]) == 7
    assert worst(ours, theirs) < 1e-6


@pytest.mark.parametrize("device", devices())
def test_fp16_weights_train_under_a_grad_scaler_with_clipping(device):
    model = small_model(0, device, torch.float16)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    x = batch(0, device, torch.float16)
    first = float(loss_of(model, x).detach())
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        plain = [p.grad.double() / 2.0**8 for p in model.parameters()]
        assert optimizer.last_grad_norm == pytest.approx(float(sum(g.square().sum() for g in plain)) ** 0.5)
    assert float(loss.detach()) < first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(threads=st.integers(1, 6), seed=st.integers(0, 50))
def test_results_do_not_depend_on_threads(dtype, threads, seed):
    results = []
    for count in (1, threads, None):
        model = small_model(seed, dtype=dtype)
        train(model, OffloadAdamW(model.parameters(), threads=count, max_grad_norm=0.1), 3, dtype=dtype)
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            assert_bit_equal(p, q)


def test_copies_and_pickles_train_on_alone(tmp_path):
    model = small_model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, accumulation_steps=1).attach(model)
    train(model, optimizer, 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "both.pt")
    loaded = torch.load(tmp_path / "both.pt", weights_only=False)
    for m, o in ((twin, twin_optimizer), (loaded["model"], loaded["optimizer"]), (model, optimizer)):
        train(m, o, 2, start=2)
        for p, q in zip(m.parameters(), model.parameters(), strict=True):
            assert (p is q) == (m is model)
    for m in (twin, loaded["model"]):
        for p, q in zip(m.parameters(), model.parameters(), strict=True):
            assert_bit_equal(p.detach(), q.detach())
    loss_of(twin, batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight'|'4\.\w+'|accumulation_steps=1"):
        loss_of(twin, batch(0)).backward()


def test_duplicate_parameters_are_counted_once():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = OffloadAdamW([p, p])
    b = torch.optim.AdamW([q])
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    a.step()
    b.step()
    assert float(a.state[p]["step"]) == 1.0
    torch.testing.assert_close(p, q, rtol=3e-7, atol=0.0)


def test_hooks_of_torch_and_the_profiler_see_the_step():
    model = small_model()
    optimizer = OffloadAdamW(model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append("post"))
    with torch.profiler.profile(acc_events=True) as profile:
        train(model, optimizer, 1)
    assert seen == ["pre", "post"]
    assert any(event.key == "ts/optim/step" for event in profile.key_averages())


def test_moving_and_casting_a_model_after_the_first_step():
    model = small_model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    p = next(model.parameters())
    model.bfloat16()
    train(model, optimizer, 1, start=2, dtype=torch.bfloat16)
    assert optimizer.state[p]["master"].dtype is torch.float32
    assert float(optimizer.state[p]["step"]) == 3.0
    model.float()
    train(model, optimizer, 1, start=3)
    assert "master" not in optimizer.state[p]


def test_stats_count_bytes_and_steps():
    model = small_model(dtype=torch.bfloat16)
    n = sum(p.numel() for p in model.parameters())
    optimizer = OffloadAdamW(model.parameters())
    assert optimizer.stats()["host_state_bytes"] == 0
    train(model, optimizer, 2, dtype=torch.bfloat16)
    stats = optimizer.stats()
    assert stats["host_state_bytes"] == 12 * n
    assert (stats["steps"], stats["skipped_steps"], stats["device_state_bytes"]) == (2, 0, 0)
    assert stats["kernel_s"] > 0.0
    optimizer.synchronize()
    optimizer.detach()


def test_attach_names_parameters_in_errors():
    model = small_model()
    optimizer = OffloadAdamW(model.parameters(), measure_grad_norm=True).attach(model)
    loss_of(model, batch(0)).backward()
    model[3].bias.grad[1] = math.nan
    optimizer.step()
    assert optimizer.stats()["nonfinite"] == (5, "parameter '3.bias'")
    assert math.isnan(optimizer.last_grad_norm)
    optimizer.detach()
    named = OffloadAdamW(model.named_parameters(), measure_grad_norm=True)
    named.step()
    assert named.stats()["nonfinite"] == (5, "parameter '3.bias'")
    with pytest.raises(TypeError, match="model"):
        optimizer.attach(model.parameters())
    with pytest.raises(ValueError, match="guard"):
        optimizer.attach(model, guard=1)
