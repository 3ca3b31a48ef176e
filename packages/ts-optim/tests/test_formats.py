"""OffloadAdamW with every format of moments: against torch, resumed, moved, deferred, where others failed."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard, release
from ts_core.testing import assert_bit_equal, devices
from ts_optim import OffloadAdamW, slots

FORMATS = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 8 / 256}
PACKED = ("bfloat16", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def host(param):
    return "host"


def weights(seed, dtype=torch.float32, shapes=((40, 33), (7,), (300,)), device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(t.to(device, dtype)) for t in made]


def gradients(params, step, seed=0):
    """Gradients of a run that gets somewhere: a slope, and noise."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for i, p in enumerate(params):
        slope = torch.linspace(-1, 1, p.numel()).view(p.shape) * 10.0 ** (-i)
        g = slope + 0.5 * 10.0 ** (-i) * torch.randn(p.shape, generator=generator)
        p.grad = g.to(p.device, p.dtype)


def train(params, optimizer, steps, start=0, seed=0):
    for step in range(start, start + steps):
        gradients(params, step, seed)
        optimizer.step()
    return params


def same(a, b, ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p.detach().cpu(), q.detach().cpu())
        assert a.state[p].keys() == b.state[q].keys()
        for name, t in a.state[p].items():
            assert_bit_equal(t.cpu(), b.state[q][name].cpu())


def drift(params, exact, start):
    """Distance from the exact weights, as a part of the way they went."""
    flat = [torch.cat([p.detach().double().view(-1) for p in ps]) for ps in (params, exact, start)]
    return float((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("mode", ["cpu", "auto", pytest.param("gpu", marks=pytest.mark.gpu)])
@given(
    dtype=st.sampled_from(DTYPES),
    clip=st.sampled_from([None, 0.5, 100.0]),
    accumulate=st.sampled_from([1, 3]),
    betas=st.sampled_from([(0.9, 0.999), (0.8, 0.95), (0.95, 0.99), (0.0, 0.9)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    place=st.sampled_from(["host", "device"]),
    seed=st.integers(0, 1000),
)
def test_every_combination_follows_torch_in_float64(
    device, moments, mode, dtype, clip, accumulate, betas, weight_decay, place, seed
):
    if mode == "gpu" and (device == "cpu" or moments == "int8"):
        return  # refused, which is tested with the options
    common = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay}
    params = weights(seed, dtype, device=device)
    exact = [nn.Parameter(p.detach().cpu().double()) for p in params]
    start = [p.detach().clone() for p in exact]
    a = OffloadAdamW(
        params,
        **common,
        mode=mode,
        moment_dtype=moments,
        max_grad_norm=clip,
        accumulation_steps=accumulate,
        place=lambda p: place,
        seed=seed,
    )
    b = torch.optim.AdamW(exact, **common)
    for step in range(20):
        a.zero_grad()
        total = [torch.zeros_like(q) for q in exact]
        for k in range(accumulate):
            gradients(exact, step * accumulate + k, seed)
            given_ = [q.grad.to(device, dtype) for q in exact]
            sum((p * g).sum() for p, g in zip(params, given_, strict=True)).backward()
        for q, p, t in zip(exact, params, total, strict=True):
            q.grad = t + p.grad.cpu().double()  # what was accumulated is torch's own sum
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(exact, clip)
        a.step()
        b.step()
    masters = [a.state[p].get("master", p) for p in params]
    allowed = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06}[moments]
    assert drift([m.cpu() for m in masters], exact, start) <= (1e-12 if dtype is torch.float64 else allowed)
    for p, m in zip(params, masters, strict=True):
        assert_bit_equal(p.detach().cpu(), m.detach().cpu().to(dtype))


# -- where 8 and 16 bits went wrong for others -----------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("moments", PACKED)
@pytest.mark.parametrize("beta1", [0.9, 0.95, 0.99])
def test_a_coordinate_whose_gradient_stops_does_not_explode(device, moments, beta1):
    common = {"lr": 1e-3, "weight_decay": 0.0, "betas": (beta1, 0.999)}
    ours, theirs = (nn.Parameter(torch.zeros(256, device=where)) for where in (device, "cpu"))
    a = OffloadAdamW([ours], moment_dtype=moments, place=host, **common)
    b = torch.optim.AdamW([theirs], **common)
    for step in range(300):
        g = torch.full((256,), 1e-2 if step in (0, 3) else 0.0)
        g[0] = 1.0
        ours.grad, theirs.grad = g.to(device), g.clone()
        before = ours.detach().clone()
        a.step()
        b.step()
        apart = (ours.detach().cpu() - theirs.detach()).abs()
        assert float((ours.detach() - before).abs().max()) <= 1.1e-3
        assert float(apart[1:].max()) <= (1e-4 if step < 4 else 3e-3)


@pytest.mark.parametrize("moments", PACKED)
def test_a_coordinate_without_gradient_stays_exactly_where_it_is(moments):
    p = nn.Parameter(torch.zeros(256))
    optimizer = OffloadAdamW([p], lr=1e-3, weight_decay=0.0, moment_dtype=moments)
    for step in range(500):
        g = torch.full((256,), 0.5 * (-1.0) ** step)
        g[0], g[1] = 1.0, 0.0
        p.grad = g
        optimizer.step()
    assert p.tolist()[1] == 0.0
    assert bool(p.isfinite().all())


@pytest.mark.parametrize("moments", PACKED)
def test_embedding_rows_that_come_and_go(moments):
    tables = [nn.Embedding(64, 24) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    a = OffloadAdamW(tables[0].parameters(), lr=1e-3, moment_dtype=moments)
    b = torch.optim.AdamW(tables[1].parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 24, generator=generator)
    for step in range(200):
        rows = torch.randint(1, 11, (16,), generator=generator) + 49 * (step % 2)
        for table, optimizer in zip(tables, (a, b), strict=True):
            optimizer.zero_grad()
            (table(rows) - target[rows]).square().mean().backward()
            optimizer.step()
    assert bool(tables[0].weight.isfinite().all())
    assert float((tables[0].weight - tables[1].weight).detach().abs().max()) <= 20 * 1e-3


@pytest.mark.parametrize("random", [False, True])
def test_bf16_moments_are_not_stuck_and_not_biased(random):
    ours, theirs = (nn.Parameter(torch.zeros(64)) for _ in range(2))
    a = OffloadAdamW([ours], lr=1e-3, weight_decay=0.0, moment_dtype="bf16")
    b = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        g = 1e-2 * torch.randn(64, generator=generator) if random else torch.full((64,), 1e-3)
        ours.grad, theirs.grad = g, g.clone()
        a.step()
        b.step()
    v, w = a.state[ours]["exp_avg_sq"].double(), b.state[theirs]["exp_avg_sq"].double()
    error = (v - w) / w
    assert abs(float(error.mean())) <= 0.02
    assert float(error.abs().max()) <= (0.2 if random else 0.05)
    assert float((ours - theirs).detach().norm()) <= 0.02 * float(theirs.detach().norm())


@pytest.mark.parametrize("moments", FORMATS)
def test_decay_and_small_updates_reach_16_bit_weights(moments):
    p, q = (nn.Parameter(torch.full((8,), x, dtype=torch.bfloat16)) for x in (1.0, 256.0))
    a = OffloadAdamW([p], lr=1e-3, weight_decay=0.1, moment_dtype=moments)
    b = OffloadAdamW([q], lr=1e-3, weight_decay=0.0, moment_dtype=moments)
    for step in range(2000):
        q.grad = torch.ones_like(q)
        b.step()
        if step < 1000:
            p.grad = torch.zeros_like(p)
            a.step()
    assert p.tolist() == [0.90625] * 8
    assert q.tolist() == [254.0] * 8


# -- drift, beside others --------------------------------------------------------------------------------


def dynamic_map(signed):
    """Dettmers' dynamic tree: 7 decades, each with twice the steps of the one below."""
    values = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1 if signed else 2 ** (decade + 1) + 1)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted([*values, 0.0, 1.0]))


class Dynamic8bit:
    """AdamW with moments rounded to the nearest dynamic code in blocks of 256: what others do."""

    def __init__(self, params, lr):
        self.params, self.lr, self.t = params, lr, 0
        self.maps = [dynamic_map(True), dynamic_map(False)]
        self.state = [[torch.zeros(p.numel()) for _ in range(2)] for p in params]

    def step(self):
        self.t += 1
        for p, state in zip(self.params, self.state, strict=True):
            g = p.grad.view(-1)
            m = 0.9 * state[0] + 0.1 * g
            v = 0.999 * state[1] + 0.001 * g * g
            denom = (v / (1 - 0.999**self.t)).sqrt() + 1e-8
            p.data.view(-1).sub_(self.lr / (1 - 0.9**self.t) * m / denom)
            for i, x in enumerate((m, v)):
                blocks = torch.nn.functional.pad(x, (0, -x.numel() % 256)).view(-1, 256)
                most = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
                middle = (self.maps[i][1:] + self.maps[i][:-1]) / 2
                nearest = self.maps[i][torch.searchsorted(middle, blocks / most)]
                state[i] = (nearest * most).view(-1)[: x.numel()]


def mlp(optimizer_of, spread=0.0, steps=30):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 16, bias=False))
    x = torch.randn(1024, 64) * torch.logspace(-spread, 0, 64)
    y = torch.tanh(x @ torch.randn(64, 16))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_of(list(model.parameters()))
    for step in range(steps):
        model.zero_grad()
        rows = torch.arange(64) + 64 * (step % 16)
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return list(model.parameters()), start


@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.parametrize("moments", PACKED)
def test_drift_is_no_larger_than_that_of_dynamic_8_bit_codes(moments, spread):
    exact, start = mlp(lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.0), spread)
    dynamic, _ = mlp(lambda ps: Dynamic8bit(ps, 1e-3), spread)
    ours, _ = mlp(lambda ps: OffloadAdamW(ps, 1e-3, weight_decay=0.0, moment_dtype=moments), spread)
    theirs, mine = drift(dynamic, exact, start), drift(ours, exact, start)
    assert mine <= min(theirs, 0.041)


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_drift_is_no_larger_than_that_of_bitsandbytes(spread):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def theirs_of(ps):
        return bitsandbytes.optim.AdamW8bit(ps, lr=1e-3, weight_decay=0.0, min_8bit_size=0)

    exact, start = mlp(lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.0), spread)
    theirs, _ = mlp(theirs_of, spread)
    ours, _ = mlp(lambda ps: OffloadAdamW(ps, 1e-3, weight_decay=0.0, moment_dtype="int8"), spread)
    assert drift(ours, exact, start) <= min(drift(theirs, exact, start), 0.041)


# -- bytes, checkpoints, places --------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", FORMATS)
def test_bytes_of_state(moments, dtype, ema):
    params = [nn.Parameter(torch.ones(64, 256, dtype=dtype))]
    optimizer = OffloadAdamW(params, moment_dtype=moments, ema=ema)
    train(params, optimizer, 1)
    each = FORMATS[moments] + (4 if dtype is torch.bfloat16 else 0) + (0 if ema is None else 4)
    assert optimizer.stats()["host_state_bytes"] == each * 64 * 256


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("moments", FORMATS)
@given(
    dtype=st.sampled_from(DTYPES[:3]),
    steps=st.integers(1, 5),
    threads=st.sampled_from([1, 2, 4]),
    beta1=st.sampled_from([0.9, 0.95]),
    ema=st.sampled_from([None, 0.9]),
    layout=st.sampled_from(["plain", "transposed", "gaps"]),
    seed=st.integers(0, 1000),
)
def test_a_resumed_run_goes_on_to_the_bit(device, moments, dtype, steps, threads, beta1, ema, layout, seed):
    def laid_out(params):
        if layout == "plain":
            return params
        if layout == "transposed":
            return [nn.Parameter(p.detach().t().clone().t() if p.dim() == 2 else p.detach()) for p in params]
        return [nn.Parameter(torch.stack([p.detach()] * 2, -1)[..., 0]) for p in params]

    options = {"moment_dtype": moments, "betas": (beta1, 0.999), "place": host, "ema": ema}
    straight = laid_out(weights(seed, dtype, device=device))
    a = OffloadAdamW(straight, threads=1, seed=seed, **options)
    train(straight, a, steps)
    halfway = laid_out([nn.Parameter(p.detach().clone()) for p in straight])
    b = OffloadAdamW(halfway, threads=threads, seed=77, **options)
    b.load_state_dict(a.state_dict())
    same(a, b, straight, halfway)
    train(straight, a, 4, start=steps)
    train(halfway, b, 4, start=steps)
    same(a, b, straight, halfway)


@pytest.mark.parametrize("moments", PACKED)
def test_state_dicts_are_exchanged_with_torch(moments):
    ours, theirs = weights(0), weights(0)
    a = OffloadAdamW(ours, lr=1e-2, moment_dtype=moments, seed=3)
    b = torch.optim.AdamW(theirs, lr=1e-2)
    train(ours, a, 5)
    saved = a.state_dict()
    for entry in saved["state"].values():
        assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
        want = torch.float32 if moments == "int8" else torch.bfloat16
        assert {entry["exp_avg"].dtype, entry["exp_avg_sq"].dtype} == {want}
    train(theirs, b, 1)
    b.load_state_dict(saved)
    train(theirs, b, 1)
    other = OffloadAdamW(weights(0), lr=1e-2, moment_dtype=moments)
    other.load_state_dict(b.state_dict())
    params = other.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    train(params, other, 3, start=5)
    assert max(float((p - q).detach().abs().max()) for p, q in zip(params, before, strict=True)) <= 5e-2
    assert other.param_groups[0]["rounding_seed"] == 3  # it travelled through torch's groups
    fresh = torch.optim.AdamW(weights(0), lr=1e-2)
    train(fresh.param_groups[0]["params"], fresh, 1)
    other.load_state_dict(fresh.state_dict())
    assert "rounding_seed" in other.param_groups[0]


@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_formats_are_converted_on_loading(before, after):
    ours, theirs = weights(0, torch.bfloat16), weights(0, torch.bfloat16)
    a, b = (OffloadAdamW(ps, moment_dtype=m) for ps, m in ((ours, before), (theirs, after)))
    train(ours, a, 3)
    b.load_state_dict(a.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        x, y = (
            o.state_dict()["state"][i] for o, ps, t in ((a, ours, p), (b, theirs, q)) for i in [_at(ps, t)]
        )
        torch.testing.assert_close(x["exp_avg_sq"].float(), y["exp_avg_sq"].float(), rtol=0.07, atol=0)
        assert_bit_equal(x["master"], y["master"])


def _at(params, param):
    return next(i for i, p in enumerate(params) if p is param)


def test_state_that_somebody_assigned_is_converted():
    ours, theirs = weights(0), weights(0)
    a, b = OffloadAdamW(ours, moment_dtype="int8"), OffloadAdamW(theirs)
    train(ours, a, 2)
    for p, q in zip(ours, theirs, strict=True):
        b.state[q].update(a.state[p])
    train(theirs, b, 1, start=2)
    assert {t.dtype for q in theirs for t in b.state[q].values()} == {torch.float32}
    assert "exp_avg_scale" not in b.state[theirs[0]]


def test_hooks_see_what_a_checkpoint_holds_and_copies_hold_what_is_stored():
    import copy
    import pickle

    ours = weights(0)
    a = OffloadAdamW(ours, moment_dtype="int8", ema=0.9)
    train(ours, a, 2)
    seen = []
    a.register_state_dict_post_hook(lambda o, d: seen.append(d["state"][0]["exp_avg"].dtype))
    a.state_dict()
    assert seen == [torch.float32]
    for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        params = other.param_groups[0]["params"]
        assert other.state[params[0]]["exp_avg"].dtype is torch.uint8
        assert other.state_dict()["state"][0]["exp_avg"].dtype is torch.float32
        reference = copy.deepcopy(a)
        train(params, other, 2, start=2)
        train(reference.param_groups[0]["params"], reference, 2, start=2)
        same(other, reference, params, reference.param_groups[0]["params"])


class Pool:
    """Memory that counts what it gives and takes back."""

    def __init__(self):
        self.held = 0

    def empty(self, nbytes):
        self.held += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def drop(self, tensor):
        self.held -= tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("moments", FORMATS)
def test_state_moves_to_other_memory_and_back(moments):
    ours, theirs = weights(0, torch.bfloat16), weights(0, torch.bfloat16)
    a, b = (OffloadAdamW(ps, moment_dtype=moments, ema=0.9, seed=0) for ps in (ours, theirs))
    pool = Pool()
    for round_, provider in enumerate((lambda p: pool, None, lambda p: pool)):
        a.set_memory(provider)
        a.rehouse(ours)
        train(ours, a, 2, start=2 * round_)
        train(theirs, b, 2, start=2 * round_)
        same(a, b, ours, theirs)
        held = sum(t.numel() * t.element_size() for p in ours for k, t in a.state[p].items() if k != "step")
        assert pool.held == (held if provider else 0)


@pytest.mark.parametrize("moments", FORMATS)
@given(threads=st.sampled_from([1, 3]), ranks=st.permutations([0, 1, 2]), seed=st.integers(0, 100))
def test_deferred_updates_give_the_same_bits(moments, threads, ranks, seed):
    ours, theirs = weights(seed, torch.bfloat16), weights(seed, torch.bfloat16)
    for p, rank in zip(ours, ranks, strict=True):
        guard(p, lambda p, share: None).rank = rank
    a, b = (
        OffloadAdamW(ps, moment_dtype=moments, threads=threads, ema=0.5, measure_updates=True, seed=1)
        for ps in (ours, theirs)
    )
    train(ours, a, 4)
    train(theirs, b, 4)
    assert a.tensor_stats() == b.tensor_stats()
    for p in ours:
        release(p)
    same(a, b, ours, theirs)


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_state_on_the_host_of_a_device_gives_the_bits_of_the_cpu(moments, dtype, in_place, monkeypatch):
    ours, theirs = weights(0, dtype), weights(0, dtype)
    b = OffloadAdamW(theirs, moment_dtype=moments, seed=0, ema=0.9, measure_updates=True)
    train(theirs, b, 4)
    monkeypatch.setattr(slots, "is_remote", lambda p: True)
    if in_place:
        monkeypatch.setattr(slots, "is_reachable", lambda t: True)
    a = OffloadAdamW(
        ours, moment_dtype=moments, seed=0, ema=0.9, measure_updates=True, place=host, pin_moments=False
    )
    a._maker._in_place = lambda p: in_place
    train(ours, a, 4)
    assert all(slot.in_place is in_place for slot in a._slots.values())
    assert a.tensor_stats() == b.tensor_stats()
    same(a, b, ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("mode", ["cpu", "gpu"])
def test_every_place_and_mode_gives_the_bits_of_the_cpu(moments, dtype, place, mode):
    if mode == "gpu" and moments == "int8":
        pytest.skip("refused")
    shapes = ((300, 257), (7,), (2000,))
    ours, theirs = weights(0, dtype, shapes, "cuda"), weights(0, dtype, shapes)
    options = {"moment_dtype": moments, "seed": 0, "ema": 0.9, "measure_updates": True}
    a = OffloadAdamW(ours, mode=mode, place=lambda p: place, **options)
    b = OffloadAdamW(theirs, **options)
    train(ours, a, 4)
    train(theirs, b, 4)
    assert all(slot.in_place is (mode == "gpu" and place == "host") for slot in a._slots.values())
    assert a.tensor_stats() == b.tensor_stats()
    same(a, b, ours, theirs)


RUN = """
    import os, signal, sys
    import torch
    sys.path.insert(0, {tests!r})
    import test_formats as t

    files, load, save = sys.argv[1:]

    class Files:
        count = 0
        def empty(self, nbytes):
            self.count += 1
            path = os.path.join(files, str(self.count))
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    torch.set_num_threads(1)
    memory = Files() if files else None
    results = {{}}
    for moments in t.FORMATS:
        params, optimizer = t.mixed(moments, threads=3 if load else 1, seed=9 if load else 5)
        optimizer.set_memory(lambda p: memory)
        if load:
            saved = torch.load(load, weights_only=True)[moments]
            optimizer.load_state_dict(saved["optimizer"])
            with torch.no_grad():
                for p, q in zip(params, saved["params"]):
                    p.copy_(q)
        t.train(params, optimizer, 3, start=3 if load else 0)
        results[moments] = {{"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}}
        if not load and moments == "int8":
            torch.save(results, save)
            t.train(params, optimizer, 1, start=3)
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save(results, save)
"""


def mixed(moments, threads, seed):
    params = weights(0, torch.bfloat16) + weights(1)
    options = {"betas": (0.95, 0.999), "ema": 0.9, "threads": threads, "seed": seed}
    return params, OffloadAdamW(params, moment_dtype=moments, **options)


def test_a_killed_run_is_resumed_to_the_bit_with_other_threads_and_another_tier(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN).format(tests=str(Path(__file__).parent)))
    files = tmp_path / "files"
    files.mkdir()

    def launch(*arguments):
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)

    half, end = (str(tmp_path / name) for name in ("half.pt", "end.pt"))
    first = launch("", "", half)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = launch(str(files), half, end)
    assert second.returncode == 0, second.stderr
    assert any(files.iterdir())
    results = torch.load(end, weights_only=True)
    for moments in FORMATS:
        params, optimizer = mixed(moments, threads=2, seed=5)
        train(params, optimizer, 6)
        for p, q in zip(results[moments]["params"], params, strict=True):
            assert_bit_equal(p, q.detach())
        want = optimizer.state_dict()["state"]
        for i, entry in results[moments]["optimizer"]["state"].items():
            assert entry.keys() == want[i].keys()
            for name, t in entry.items():
                assert_bit_equal(t, want[i][name])
