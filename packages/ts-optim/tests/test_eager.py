"""Updates during backward: the bits of those by step(), gradients that are gone, what is refused."""

import copy
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ts_optim.slots
from ts_core.errors import StateError
from ts_core.guard import guard, guard_of
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW, eager, kernel
from ts_optim.gradients import ConsumedGradient


def land(parameter, share):
    """Land a gradient as whoever pages the weights does."""

    def at_the_end():
        entry = guard_of(parameter)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for hook in list(entry.hooks.values()):
                hook(share)
            parameter.grad = share if parameter.grad is None else parameter.grad + share
        for hook in list(entry.landed_hooks.values()):
            hook(parameter)

    torch.autograd.Variable._execution_engine.queue_callback(at_the_end)


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.to(dtype)
        self.scale = nn.Parameter(self.scale.detach().double())

    def forward(self, x, short=False):
        x = self.first(x).tanh()
        x = x if short else self.middle(self.middle(x)).tanh()  # shared weights count once
        return (self.last(x).double() * self.scale).square().mean()


def make(dtype=torch.float32, device="cpu", guarded=False, **options):
    with seeded(3):
        model = Net(dtype).to(device)
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3, "weight_decay": 0.3}]
    optimizer = OffloadAdamW(groups, lr=1e-2, **options)
    for rank, p in enumerate(params if guarded else ()):
        guard(p, land).rank = rank
    return model, optimizer


def train(model, optimizer, steps=4, passes=1, to_none=True, dtype=torch.float32):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    device = model.scale.device
    for step in range(steps):
        for k in range(passes):
            with seeded(100 * step + k):
                x = torch.randn(4, 6).to(device, dtype)
            model(x, short=step == 1).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=to_none)
    optimizer.synchronize()
    return optimizer


def assert_same(a, b):
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())
        assert a[1].state[p].keys() == b[1].state[q].keys()
        for name, t in b[1].state[q].items():
            assert_bit_equal(a[1].state[p][name], t)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("guarded", [False, True])
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    moments=st.sampled_from(["float32", "bfloat16", "int8"]),
    passes=st.sampled_from([1, 3]),
    wide=st.booleans(),
    to_none=st.booleans(),
    place=st.sampled_from(["host", "device"]),
    extras=st.sampled_from(
        [{}, {"measure_grad_norm": True}, {"measure_updates": True, "ema": 0.9}, {"max_grad_norm": 0.05}]
    ),
)
def test_the_bits_are_those_of_updates_by_step(
    device, guarded, dtype, moments, passes, wide, to_none, place, extras
):
    if guarded and device != "cpu":
        return
    common = {"moment_dtype": moments, "accumulation_steps": passes, "place": lambda p: place, **extras}
    runs = []
    for flag in (True, False):
        model, optimizer = make(dtype, device, guarded, eager=flag, accumulate_fp32=wide, **common)
        train(model, optimizer, passes=passes, to_none=to_none, dtype=dtype)
        runs.append((model, optimizer))
    assert_same(*runs)
    (_, a), (_, b) = runs
    assert a.last_grad_norm == b.last_grad_norm
    assert a.stats()["steps"] == b.stats()["steps"] == 4
    if extras.get("measure_updates"):
        assert a.tensor_stats() == b.tensor_stats()


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setattr(ts_optim.slots, "is_remote", lambda p: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_across_the_link_is_updated_on_a_worker(remote, monkeypatch, dtype):
    threads = set()
    native = eager.call_kernel

    def noting(batch, terms):
        threads.add(threading.current_thread().name)
        native(batch, terms)

    monkeypatch.setattr(eager, "call_kernel", noting)
    runs = []
    for flag in (True, False):
        model, optimizer = make(dtype, eager=flag, place=lambda p: "host")
        train(model, optimizer, dtype=dtype)
        runs.append((model, optimizer))
    assert_same(*runs)
    assert {name.split("_")[0] for name in threads} == {"ts-optim-eager"}
    assert runs[0][1].stats()["h2d_bytes"] == runs[1][1].stats()["h2d_bytes"] > 0
    assert runs[0][1].stats()["d2h_bytes"] == runs[1][1].stats()["d2h_bytes"] > 0


def test_a_failure_on_the_worker_is_raised_by_backward(remote, monkeypatch):
    model, _optimizer = make(eager=True, place=lambda p: "host")

    def failing(batch, terms):
        raise MemoryError("no room")

    monkeypatch.setattr(eager, "call_kernel", failing)
    with pytest.raises(MemoryError, match="no room"):
        model(torch.ones(1, 6)).backward()
    monkeypatch.undo()


def test_without_a_thread_the_work_is_done_at_once(remote, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(eager.ThreadPoolExecutor, "submit", refuse)
    runs = []
    for flag in (True, False):
        model, optimizer = make(eager=flag, place=lambda p: "host")
        runs.append((model, train(model, optimizer)))
    assert_same(*runs)


def test_weights_have_changed_when_backward_returns_and_step_changes_no_more():
    model, optimizer = make(eager=True)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).backward()
    after = [p.detach().clone() for p in model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for _ in range(2):  # gradients are used up: a second step is a no-op
        optimizer.step()
    for p, kept in zip(model.parameters(), after, strict=True):
        assert_bit_equal(p.detach(), kept)
        assert float(optimizer.state[p]["step"]) == 1.0
    assert optimizer.stats()["steps"] == 2


def test_guarded_weights_are_updated_beside_what_comes_next(monkeypatch):
    model, optimizer = make(eager=True, guarded=True)
    released = threading.Event()
    native = kernel._C.adamw_step_

    class Gate:
        def __getattr__(self, name):
            return getattr(eager_native, name)

        def adamw_step_(self, *arguments):
            if threading.current_thread() is not threading.main_thread():
                assert released.wait(60)
            native(*arguments)

    eager_native = kernel._C
    monkeypatch.setattr(kernel, "_C", Gate())
    model(torch.ones(2, 6)).backward()
    entry = guard_of(model.last.weight)
    assert entry.pending is not None
    optimizer.step()  # does not wait
    assert entry.pending is not None
    released.set()
    assert float(optimizer.state[model.last.weight]["step"]) == 1.0
    assert entry.pending is None


def test_what_step_finds_is_finished_by_it():
    outside = nn.Parameter(torch.ones(3))
    model, optimizer = make(eager=True, accumulation_steps=2)
    twin, other = make(accumulation_steps=2)
    results = []
    for net, opt in ((model, optimizer), (twin, other)):
        extra = copy.deepcopy(outside)
        opt.add_param_group({"params": [extra]})
        extra.grad = torch.ones(3)
        net(torch.ones(1, 6)).backward()
        net(torch.ones(1, 6), short=True).backward()  # the middle layer has had one pass of two
        opt.step()
        results.append(extra.detach())
    assert_same((model, optimizer), (twin, other))
    assert_bit_equal(*results)


def consumed():
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = OffloadAdamW([p], lr=0.1, eager=True)
    (p * 2).sum().backward()
    return p, optimizer


READS = {
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "clip_foreach": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "operator": lambda p: p.grad + 1,
    "in_place": lambda p: p.grad.mul_(0.5),
    "item": lambda p: p.grad[0, 0].item(),
    "list": lambda p: p.grad.tolist(),
    "numpy": lambda p: p.grad.numpy(),
    "clone": lambda p: p.grad.clone(),
    "detach": lambda p: p.grad.detach().sum(),
    "data": lambda p: p.grad.data.clamp_(-1, 1),
    "to": lambda p: p.grad.double(),
    "torch_optimizer": lambda p: torch.optim.SGD([p], 0.1).step(),
    "finite": lambda p: torch.isfinite(p.grad).all(),
    "copy": lambda p: torch.zeros(3, 2).copy_(p.grad),
    "pointer": lambda p: p.grad.data_ptr(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_a_gradient_that_is_gone_names_the_option(read):
    p, _ = consumed()
    with pytest.raises(StateError, match="max_grad_norm"):
        read(p)


def test_what_is_known_of_a_gradient_that_is_gone():
    p, _ = consumed()
    assert p.grad is not None
    assert (p.grad.shape, p.grad.dtype, p.grad.device) == ((3, 2), torch.float32, p.device)
    assert "ConsumedGradient" in repr(p.grad)
    assert not p.grad.requires_grad
    assert not p.grad.is_sparse


def test_accelerate_s_clipping_names_the_option_too():
    accelerate = pytest.importorskip("accelerate")
    p, _ = consumed()
    with pytest.raises(StateError, match="max_grad_norm"):
        accelerate.Accelerator(cpu=True).clip_grad_norm_([p], 1.0)


def zero(p, optimizer):
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [[0.0] * 2] * 3


def zero_module(p, optimizer):
    holder = nn.ParameterList([p])
    holder.zero_grad(set_to_none=False)
    assert p.grad.sum() == 0


def zero_foreach(p, optimizer):
    torch._foreach_zero_([p.grad, torch.ones(2)])
    assert p.grad.sum() == 0


WAYS = {
    "none": lambda p, optimizer: optimizer.zero_grad(),
    "zero": zero,
    "module_none": lambda p, optimizer: nn.ParameterList([p]).zero_grad(),
    "module_zero": zero_module,
    "foreach_zero": zero_foreach,
    "by_hand": lambda p, optimizer: setattr(p, "grad", None),
    "not_at_all": lambda p, optimizer: None,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_next_backward_starts_anew(way):
    p, optimizer = consumed()
    q = nn.Parameter(torch.ones(3, 2))
    other = OffloadAdamW([q], lr=0.1)
    (q * 2).sum().backward()
    for param, opt in ((p, optimizer), (q, other)):
        opt.step()
        way(p, optimizer) if param is p else opt.zero_grad()
        (param * param * 3).sum().backward()
        opt.step()
    assert_bit_equal(p.detach(), q.detach())
    assert isinstance(p.grad, ConsumedGradient)


def test_a_zeroed_gradient_can_be_edited_and_zeroed_again():
    p, optimizer = consumed()
    optimizer.zero_grad(set_to_none=False)
    p.grad.add_(1.0)
    assert p.grad.tolist() == [[1.0] * 2] * 3
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.sum() == 0


def test_a_gradient_too_many_is_an_error():
    p, _ = consumed()
    with pytest.raises(StateError, match="accumulation_steps=1"):
        (p * 2).sum().backward()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_grad_scaler_is_refused(clip):
    p = nn.Parameter(torch.ones(3))
    optimizer = OffloadAdamW([p], eager=True, max_grad_norm=clip)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((p * 2).sum()).backward()
    with pytest.raises(StateError, match=r"GradScaler.*eager=(True|False)"):
        scaler.step(optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    disabled.scale((p * 2).sum()).backward()
    disabled.step(optimizer)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.1}, {"skip_nonfinite": True}])
def test_what_needs_all_gradients_first_is_done_by_step(options):
    p = nn.Parameter(torch.ones(3))
    optimizer = OffloadAdamW([p], eager=True, **options)
    (p * torch.tensor([1.0, float("nan") if "skip_nonfinite" in options else 5.0, 1.0])).sum().backward()
    assert p.tolist() == [1.0] * 3
    assert not isinstance(p.grad, ConsumedGradient)
    optimizer.step()
    assert (p.tolist() == [1.0] * 3) == ("skip_nonfinite" in options)


def test_a_backward_that_fails_leaves_the_rest_to_step():
    model, optimizer = make(eager=True)
    handle = model.first.weight.register_hook(lambda grad: 1 / 0)
    before = model.first.weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 6)).backward()
    assert isinstance(model.last.weight.grad, ConsumedGradient)  # what was updated stays updated
    assert_bit_equal(model.first.weight.detach(), before)
    optimizer.step()
    optimizer.zero_grad()
    handle.remove()
    model(torch.ones(2, 6)).backward()
    optimizer.step()
    assert float(optimizer.state[model.last.weight]["step"]) == 2.0
    assert float(optimizer.state[model.first.weight]["step"]) == 1.0


def test_closures_checkpoints_copies_and_parameters_that_are_gone():
    model, optimizer = make(eager=True)
    twin, other = make()
    for net, opt in ((model, optimizer), (twin, other)):

        def closure(net=net, opt=opt):
            opt.zero_grad()
            loss = net(torch.ones(2, 6))
            loss.backward()
            return loss

        assert opt.step(closure).requires_grad
    assert_same((model, optimizer), (twin, other))
    copied, again = copy.deepcopy((model, optimizer))
    again.load_state_dict(optimizer.state_dict())
    for net, opt in ((model, optimizer), (copied, again), (twin, other)):
        opt.zero_grad()
        net(torch.ones(3, 6)).backward()
        opt.step()
    assert_same((model, optimizer), (twin, other))
    assert_same((copied, again), (twin, other))
    del optimizer, opt
    kept = model.last.weight.detach().clone()
    del again, other
    model.zero_grad()
    model(torch.ones(1, 6)).backward()
    assert_bit_equal(model.last.weight.detach(), kept)
    assert model.last.weight.grad.sum() != 0


def test_clipping_can_be_asked_for_later():
    p, optimizer = consumed()
    optimizer.reconfigure(max_grad_norm=0.5)
    optimizer.step()
    (p * 2).sum().backward()
    assert p.grad.tolist() == [[2.0] * 2] * 3
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(2 * 6**0.5)
