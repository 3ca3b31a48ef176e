"""Updates that run behind `step()`: against the same optimizer on plain parameters, and against torch."""

import contextlib
import copy
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StateError
from ts_core.guard import guard, guard_of, release
from ts_core.testing import assert_bit_equal, seeded
from ts_optim import OffloadAdamW, deferred, kernel

NATIVE = kernel._C
SHAPES = ((5, 3), (7,), (2, 2, 3), ())


def land(p, share):
    p.grad = share if p.grad is None else p.grad + share


def guarded(p, rank=0):
    guard(p, land).rank = rank
    return p


def parameters(seed=0, dtype=torch.float32, shapes=SHAPES):
    with seeded(seed):
        return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def raw(p):
    """The memory as it is now, without waiting."""
    with torch._C.DisableTorchFunctionSubclass():
        return p.detach().clone()


def fill(params, seed):
    with seeded(seed):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)


def same_state(a, b, ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())
        assert a.state[p].keys() == b.state[q].keys()
        for name in a.state[p]:
            assert_bit_equal(a.state[p][name], b.state[q][name])


class Gate:
    """Stands where the native module is: holds the calls of other threads until it is opened."""

    def __init__(self):
        self.arrived, self.open = threading.Event(), threading.Event()
        self.calls = []

    def adamw_step_(self, *arguments):
        if threading.current_thread() is not threading.main_thread():
            self.arrived.set()
            assert self.open.wait(60)
        self.calls.append((threading.current_thread(), [t.data_ptr() for t in arguments[0]]))
        NATIVE.adamw_step_(*arguments)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(kernel, "_C", gate)
    yield gate
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name == "ts-optim":
            thread.join()


@contextlib.contextmanager
def nobody_works():
    """No update runs before somebody needs it."""
    before, deferred._work_off = deferred._work_off, lambda updates: None
    try:
        yield
    finally:
        deferred._work_off = before


@pytest.fixture
def lazy():
    with nobody_works():
        yield


def pair(rank=0, **options):
    """A guarded and a plain parameter of the same values, each with its optimizer and a gradient."""
    ours, theirs = parameters(), parameters()
    for i, p in enumerate(ours):
        guarded(p, rank and i)
    made = [OffloadAdamW(params, lr=0.1, **options) for params in (ours, theirs)]
    for params in (ours, theirs):
        fill(params, 1)
    return ours, theirs, *made


# -- when updates run ------------------------------------------------------------------------------------


def test_step_returns_before_the_update_and_readers_wait(gate):
    ours, theirs, a, b = pair()
    before = [raw(p) for p in ours]
    b.step()
    a.step()
    assert gate.arrived.wait(60)
    for p, old in zip(ours, before, strict=True):
        assert guard_of(p).pending is not None
        assert_bit_equal(raw(p), old)
    a.zero_grad()  # neither waits
    fill(ours, 2)
    assert all(guard_of(p).pending is not None for p in ours)
    gate.open.set()
    same_state(a, b, ours, theirs)
    assert all(guard_of(p).pending is None for p in ours)
    assert [p.grad.shape for p in ours] == list(map(torch.Size, SHAPES))


def test_next_needed_first_in_one_call_a_rank(gate):
    ranks = [2, -1, 0, 2]
    ours = [guarded(p, rank) for p, rank in zip(parameters(), ranks, strict=True)]
    with torch._C.DisableTorchFunctionSubclass():
        addresses = [p.data_ptr() for p in ours]
    optimizer = OffloadAdamW(reversed(ours))
    fill(ours, 0)
    gate.open.set()
    optimizer.step()
    for thread in threading.enumerate():
        if thread.name == "ts-optim":
            thread.join()
    assert [set(call) for _, call in gate.calls] == [
        {addresses[1]}, {addresses[2]}, {addresses[0], addresses[3]},
    ]  # fmt: skip
    assert all(guard_of(p).pending is None for p in ours)
    assert threading.main_thread() not in [thread for thread, _ in gate.calls]


def test_a_reader_runs_an_update_that_has_not_begun(gate):
    ours, theirs, a, b = pair(rank=1)
    b.step()
    a.step()
    assert gate.arrived.wait(60)  # the thread is at the first one
    assert_bit_equal(raw(ours[2] * 1), theirs[2].detach())
    assert [thread for thread, _ in gate.calls][1:] == [threading.main_thread()]
    assert guard_of(ours[0]).pending is not None
    assert guard_of(ours[1]).pending is not None
    gate.open.set()
    same_state(a, b, ours, theirs)
    assert len(gate.calls) == 1 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(
    threads=st.sampled_from([1, 2, None]),
    lazily=st.booleans(),
    ranks=st.lists(st.integers(-1, 2), min_size=6, max_size=6),
    clip=st.sampled_from([None, 0.5]),
    grads=st.sampled_from(["same", "fp32", "fp64", "transposed"]),
    seed=st.integers(0, 50),
)
def test_bits_are_those_of_an_update_within_step(dtype, threads, lazily, ranks, clip, grads, seed):
    shapes = (*SHAPES, (0, 2), (4, 9000))
    results = []
    for make in (guarded, lambda p, rank: p):
        params = parameters(seed, dtype, shapes)
        base = torch.zeros(4, 6, dtype=dtype)
        params[0] = nn.Parameter(base[:, ::2].copy_(params[0].detach()[:4]))  # with gaps
        for p, rank in zip(params, ranks, strict=True):
            make(p, rank)
        optimizer = OffloadAdamW(params, lr=0.1, threads=threads, max_grad_norm=clip)
        with nobody_works() if lazily else contextlib.nullcontext():
            for i in range(3):
                fill(params, seed + i)
                if grads == "transposed":
                    params[5].grad = params[5].grad.t().contiguous().t()
                elif grads != "same":
                    for p in params:
                        p.grad_dtype = None
                        p.grad = p.grad.to(torch.float32 if grads == "fp32" else torch.float64)
                optimizer.step()
                optimizer.zero_grad()
        results.append((optimizer, params))
        assert bool((base[:, 1::2] == 0).all())
    (a, ours), (b, theirs) = results
    same_state(a, b, ours, theirs)
    assert a.last_grad_norm == b.last_grad_norm


ACTIONS = (
    "zero_none", "zero_zeros", "read", "edit", "read_grad", "edit_grad", "assign_grad", "clip", "state_dict",
    "load", "scheduler", "lr", "stats", "copy", "synchronize", "state", "skip", "again", "unguard", "guard",
    "frozen",
)  # fmt: skip


class Loop:
    """One training loop that does what it is told between its steps."""

    def __init__(self, make, defer, threads):
        self.params = parameters(3)
        self.defer = defer
        if defer:
            for i, p in enumerate(self.params):
                guarded(p, i % 3)
        ours = make is OffloadAdamW
        options = {"accumulation_steps": None, "skip_nonfinite": True, "threads": threads} if ours else {}
        self.optimizer = make(self.params, lr=0.1, weight_decay=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.skip = False
        self.seen = []

    def round(self, i, actions):
        if i % 2:
            fill(self.params, i)
        for p in self.params:
            (p * (i + 1.0) + p * p).sum().backward()
        if self.skip:
            self.params[1].grad = self.params[1].grad * math.nan
        if not self.skip or isinstance(self.optimizer, OffloadAdamW):
            self.optimizer.step()
        if self.skip:
            self.skip = False
            self.assign_grad()
        for action in actions:
            getattr(self, action)()

    def zero_none(self):
        self.optimizer.zero_grad()

    def zero_zeros(self):
        self.optimizer.zero_grad(set_to_none=False)

    def read(self):
        self.seen.append(self.params[2].tolist())

    @torch.no_grad()
    def edit(self):
        self.params[0].mul_(0.5)
        self.params[2].data[0] = 1.0

    def read_grad(self):
        self.seen.append([None if p.grad is None else p.grad.tolist() for p in self.params])

    def edit_grad(self):
        if self.params[0].grad is not None:
            self.params[0].grad.mul_(0.25)

    def assign_grad(self):
        self.params[1].grad = torch.ones(7)

    def clip(self):
        self.seen.append(float(nn.utils.clip_grad_norm_(self.params, 0.5)))

    def state_dict(self):
        self.saved = copy.deepcopy(self.optimizer.state_dict())
        self.seen.append([e["exp_avg"].tolist() for e in self.saved["state"].values()])

    def load(self):
        self.optimizer.load_state_dict(getattr(self, "saved", None) or self.optimizer.state_dict())

    def lr(self):
        self.optimizer.param_groups[0]["lr"] *= 2.0
        self.optimizer.param_groups[0]["weight_decay"] = 0.3

    def stats(self):
        if isinstance(self.optimizer, OffloadAdamW):
            assert self.optimizer.stats()["steps"] > 0

    def copy(self):
        params, optimizer = copy.deepcopy((self.params, self.optimizer))
        self.seen.append([p.tolist() for p in params])
        self.seen.append([e["step"].tolist() for e in optimizer.state.values()])

    def synchronize(self):
        if isinstance(self.optimizer, OffloadAdamW):
            self.optimizer.synchronize()
            assert all(guard_of(p) is None or guard_of(p).pending is None for p in self.params)

    def state(self):
        self.seen.append([e["exp_avg_sq"].sum().item() for e in self.optimizer.state.values()])
        for entry in self.optimizer.state.values():
            entry["exp_avg"].mul_(0.5)

    def again(self):
        self.optimizer.step()

    def unguard(self):
        for p in self.params:
            release(p)

    def guard(self):
        if self.defer:
            for p in self.params:
                guarded(p, 1)

    def frozen(self):
        self.params[3].requires_grad_(False)
        self.params[3].requires_grad_(True)

    def scheduler_(self):
        self.scheduler.step()


def run(make, defer, history, threads=1):
    loop = Loop(make, defer, threads)
    for i, actions in enumerate(history):
        for action in actions:
            loop.skip = loop.skip or action == "skip"
        loop.round(i, ["scheduler_" if a == "scheduler" else a for a in actions if a != "skip"])
    return loop


histories = st.lists(st.lists(st.sampled_from(ACTIONS), max_size=4), min_size=1, max_size=5)


@given(history=histories, lazily=st.booleans(), threads=st.sampled_from([1, 2]))
def test_whatever_comes_between_steps_equals_the_synchronous_run(history, lazily, threads):
    with nobody_works() if lazily else contextlib.nullcontext():
        ours = run(OffloadAdamW, True, history, threads)
        theirs = run(OffloadAdamW, False, history)
        assert ours.seen == theirs.seen
        same_state(ours.optimizer, theirs.optimizer, ours.params, theirs.params)


@given(history=histories)
def test_whatever_comes_between_steps_equals_torch(history):
    ours, theirs = run(OffloadAdamW, True, history), run(torch.optim.AdamW, False, history)
    for p, q in zip(ours.params, theirs.params, strict=True):
        torch.testing.assert_close(p.detach().as_subclass(torch.Tensor), q.detach(), rtol=1e-5, atol=1e-5)
        assert float(ours.optimizer.state[p]["step"]) == float(theirs.optimizer.state[q]["step"])


def test_hyperparameters_are_those_of_the_step_call(lazy):
    ours, theirs, a, b = pair(max_grad_norm=0.3)
    for optimizer in (a, b):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 100.0
        optimizer.param_groups[0]["weight_decay"] = 0.9
    same_state(a, b, ours, theirs)


def test_other_parameters_are_complete_when_step_returns(lazy):
    ours, theirs, a, b = pair()
    release(ours[1])
    a.step()
    b.step()
    assert_bit_equal(raw(ours[1]), theirs[1].detach())
    assert not torch.equal(raw(ours[0]), theirs[0].detach())
    same_state(a, b, ours, theirs)


def test_version_counters_tell_at_once_and_again_when_it_is_done(lazy):
    (p, *_), _, optimizer, _ = pair()
    with torch._C.DisableTorchFunctionSubclass():
        stale = (p * p).sum()
        start = p._version
        optimizer.step()
        posted = p._version
        assert posted > start
        with pytest.raises(RuntimeError, match="inplace"):
            stale.backward()
    optimizer.synchronize()
    assert p._version > posted
    assert not guard_of(p).escaped  # our own reads are none


def test_grad_scaler_and_skipped_steps_behave_as_synchronous_ones(lazy):
    ours, theirs, a, b = pair(max_grad_norm=1.0)
    for params, optimizer in ((ours, a), (theirs, b)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for i in range(6):
            optimizer.zero_grad()
            loss = sum((p * (i + 1.0)).square().sum() for p in params)
            scaler.scale(loss * (math.inf if i == 3 else 1.0)).backward()
            if i % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.stats()["skipped_steps"] == 1
    same_state(a, b, ours, theirs)


def test_a_non_finite_gradient_leaves_nothing_pending(lazy):
    ours, theirs, a, _ = pair(skip_nonfinite=True)
    ours[1].grad[0] = math.nan
    a.step()
    assert all(guard_of(p).pending is None for p in ours)
    assert a.stats()["nonfinite"] == (1, "parameter 1")
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(raw(p), q.detach())


def test_zero_grad_to_zeros_waits_and_zeroes(lazy):
    ours, theirs, a, b = pair()
    held = [p.grad for p in ours]
    for optimizer in (a, b):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(guard_of(p).pending is None for p in ours)
    assert all(bool((g == 0).all()) for g in held)
    same_state(a, b, ours, theirs)


def test_two_optimizers_on_the_same_parameters(lazy):
    results = []
    for defer in (True, False):
        params = parameters()
        if defer:
            params = [guarded(p) for p in params]
        first, second = OffloadAdamW(params, lr=0.1), OffloadAdamW(params[:2], lr=0.3)
        for i in range(3):
            fill(params, i)
            first.step()
            second.step()
        results.append(((first, params), (second, params[:2])))
    for (a, ours), (b, theirs) in zip(*results, strict=True):
        same_state(a, b, ours, theirs)


# -- what goes wrong -------------------------------------------------------------------------------------


def test_a_gradient_changed_in_place_is_refused(lazy):
    ours, theirs, a, b = pair(rank=1)
    a.attach(nn.ParameterDict({f"w{i}": p for i, p in enumerate(ours)}))
    held = ours[1].grad
    before, old = raw(ours[1]), copy.deepcopy(a.state_dict())
    a.step()
    b.step()
    held.mul_(2.0)
    ours[0].grad = torch.ones(5, 3)
    uses = [lambda: ours[1] + 1, lambda: ours[1].grad, a.state_dict, a.step, a.stats, lambda: a.state]
    uses += [lambda: a.zero_grad(set_to_none=False), lambda: a.load_state_dict(b.state_dict())]
    for use in uses:
        with pytest.raises(StateError, match=r"'w1': its gradient was changed in place.*synchronize\(\)"):
            use()
    assert_bit_equal(raw(ours[1]), before)
    assert not old["state"]
    assert bool((ours[0].grad == 1).all())
    assert_bit_equal(raw(ours[2]), theirs[2].detach())  # the others were updated
    with pytest.raises(StateError, match="w1"):
        a.synchronize()
    a.synchronize()
    assert float(a.state[ours[1]]["step"]) == 0.0
    assert float(a.state[ours[2]]["step"]) == 1.0
    assert_bit_equal(raw(ours[1] * 1), before)
    fill(ours, 2)
    a.step()
    assert float(a.state[ours[1]]["step"]) == 1.0


def test_a_failed_update_is_not_forgotten_with_the_guard(lazy):
    ours, _, a, _ = pair()
    held = ours[0].grad
    a.step()
    held.zero_()
    with pytest.raises(StateError, match="parameter 0"):
        release(ours[0])
    for p in ours[1:]:
        guard_of(p).pending = None
    ours[0] + 1
    for use in (a.step, a.synchronize):
        with pytest.raises(StateError, match="parameter 0"):
            use()
    a.step()


def test_loading_what_was_taken_before_a_step_loads_what_the_step_made_of_it(lazy):
    ours, theirs, a, b = pair()
    for optimizer in (a, b):
        optimizer.step()
        taken = optimizer.state_dict()
        optimizer.step()
        optimizer.load_state_dict(taken)
        optimizer.step()
    same_state(a, b, ours, theirs)


def test_a_gradient_changed_after_its_update_is_the_user_s(gate):
    ours, theirs, a, b = pair()
    held = [p.grad for p in ours]
    a.step()
    b.step()
    gate.open.set()
    a.synchronize()
    for g in held:
        g.zero_()
    same_state(a, b, ours, theirs)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master", "step"])
def test_state_changed_in_place_is_refused(name, lazy):
    p = guarded(nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))
    optimizer = OffloadAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    held = optimizer.state[p][name]
    optimizer.step()
    held.add_(1.0)
    with pytest.raises(StateError, match=f"parameter 0: its {name} was changed"):
        p + 1


@pytest.mark.parametrize("how", ["changed", "exchanged"])
def test_a_value_written_past_the_guard_is_refused(how, lazy):
    (p,) = parameters(shapes=[(3,)])
    optimizer = OffloadAdamW([guarded(p)])
    p.grad = torch.ones(3)
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if how == "changed":
            p.add_(1.0)
        else:
            p.data = torch.zeros(3)
    del optimizer
    gc.collect()
    with pytest.raises(StateError, match=f"parameter 0: its value was {how}"):
        p + 1


class Broken:
    def adamw_step_(self, *arguments):
        raise MemoryError("no room")


def test_an_error_of_the_kernel_is_raised_where_it_is_waited_for(monkeypatch):
    ours, _, a, _ = pair(rank=1)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_C", Broken())
        a.step()
        with pytest.raises(MemoryError, match="no room"):
            ours[3] + 1
        with pytest.raises(StateError, match=r"no room\nno room\nno room\nno room"):
            a.synchronize()
    assert all(guard_of(p).pending is None for p in ours)
    assert [float(a.state[p]["step"]) for p in ours] == [0.0] * 4
    a.step()
    assert [float(a.state[p]["step"]) for p in ours] == [1.0] * 4


def test_a_failed_update_of_one_optimizer_stops_the_other_s_step(lazy):
    ours, _, a, _ = pair()
    other = OffloadAdamW(ours)
    held = ours[0].grad
    a.step()
    held.zero_()
    with pytest.raises(StateError, match="parameter 0"):
        other.step()
    assert not other.state
    with pytest.raises(StateError):
        a.detach()
    other.step()
    assert float(other.state[ours[0]]["step"]) == 1.0


def test_a_bad_gradient_is_refused_before_anything_is_pending(lazy):
    ours, _, a, _ = pair()
    ours[0].grad = torch.ones(5, 3).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        a.step()
    assert all(guard_of(p).pending is None for p in ours)
    assert not a.state


class Interrupting:
    """Raises KeyboardInterrupt once, as Ctrl-C right after the kernel does."""

    def __init__(self, before):
        self.before, self.left = before, 1

    def adamw_step_(self, *arguments):
        if not self.before:
            NATIVE.adamw_step_(*arguments)
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        if self.before:
            NATIVE.adamw_step_(*arguments)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupt_in_a_reader_loses_and_doubles_nothing(before, dtype, lazy, monkeypatch):
    results = []
    for defer in (True, False):
        base = torch.zeros(4, 6, dtype=dtype)
        params = [nn.Parameter(torch.ones(5, dtype=dtype)), nn.Parameter(base[:, ::2])]
        optimizer = OffloadAdamW(params, lr=0.1)
        if defer:
            params = [guarded(p) for p in params]
        for i in range(2):
            fill(params, i)
            optimizer.step()
            if defer:
                with monkeypatch.context() as patch:
                    patch.setattr(kernel, "_C", Interrupting(before))
                    with pytest.raises(KeyboardInterrupt):
                        params[0] + 1
                    assert guard_of(params[1]).pending is not None
                    if i:
                        params[1] + 1
                    else:
                        optimizer.synchronize()
        results.append((optimizer, params))
    (a, ours), (b, theirs) = results
    same_state(a, b, ours, theirs)


def test_ctrl_c_while_waiting_for_the_thread(gate):
    ours, theirs, a, b = pair()
    b.step()
    a.step()
    assert gate.arrived.wait(60)
    seen = threading.Event()

    def handler(*_):
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    def press():
        # Again and again: one that comes between Python's look at signals and the wait itself waits with it.
        while not seen.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=press)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            thread.start()
            ours[0] + 1
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert guard_of(ours[0]).pending is not None
    gate.open.set()
    same_state(a, b, ours, theirs)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_signal_handler_may_use_what_it_interrupted_the_update_of(place, lazy, monkeypatch):
    ours, theirs, a, b = pair()
    b.step()
    a.step()
    seen = []
    arguments = kernel.choose_kernel

    def handler():
        if not seen:
            seen.append(None)
            seen.append((ours[0] * 1).tolist())

    class Native:
        def adamw_step_(self, *args):
            NATIVE.adamw_step_(*args)
            handler()

    def interrupted(*args):
        handler()
        return arguments(*args)

    if place == "before":
        monkeypatch.setattr(kernel, "choose_kernel", interrupted)
    else:
        monkeypatch.setattr(kernel, "_C", Native())
    assert (ours[0] * 1).tolist() == theirs[0].tolist() == seen[1]
    same_state(a, b, ours, theirs)


# -- threads, processes, copies --------------------------------------------------------------------------


def test_the_thread_does_not_keep_the_optimizer_and_ends(gate):
    ours, theirs, a, b = pair()
    b.step()
    a.step()
    assert gate.arrived.wait(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "ts-optim"]
    assert not thread.daemon
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive()
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(raw(p), q.detach())


def test_gradients_are_let_go_of_when_they_have_been_used(gate):
    ours, _, a, _ = pair()
    held = [p.grad.untyped_storage() for p in ours]

    def others():
        return [torch._C._storage_Use_Count(storage._cdata) - 1 for storage in held]

    a.step()
    a.zero_grad()
    assert min(others()) > 0
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name == "ts-optim":
            thread.join()
    assert others() == [0] * 4


def test_without_a_thread_the_update_is_done_in_step(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ours, theirs, a, b = pair()
    a.step()
    b.step()
    assert all(guard_of(p).pending is None for p in ours)
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(raw(p), q.detach())


FORK_WARNING = "ignore:.*multi-threaded.*fork:DeprecationWarning"


@pytest.mark.filterwarnings(FORK_WARNING)
@pytest.mark.parametrize("begun", [True, False])
def test_a_forked_child_sees_whole_updates(begun, gate, monkeypatch):
    if not begun:
        monkeypatch.setattr(deferred, "_work_off", lambda updates: None)
    ours, theirs, a, b = pair(rank=1)
    b.step()
    a.step()
    if begun:
        assert gate.arrived.wait(60)
    threading.Thread(target=gate.open.set).start()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        good = all(torch.equal(raw(p), q.detach()) for p, q in zip(ours, theirs, strict=True))
        good = good and all(torch.equal(p * 1, q * 1) for p, q in zip(ours, theirs, strict=True))
        good = good and a.stats()["steps"] == 1
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    same_state(a, b, ours, theirs)


EXIT = """
import sys, threading, torch
from ts_core.guard import guard
from ts_optim import OffloadAdamW, kernel
native, main_is_done = kernel._C, threading.Event()

class Late:
    def adamw_step_(self, *arguments):
        threading.main_thread().join()  # begins when the script is over
        native.adamw_step_(*arguments)

kernel._C = Late()
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.from_file(sys.argv[1], shared=True, size=4))
guard(p, lambda p, g: None)
p.grad = torch.ones(4)
OffloadAdamW([p], lr=0.5, weight_decay=0.0).step()
"""


def test_the_end_of_the_interpreter_waits_for_updates(tmp_path):
    path = tmp_path / "weight"
    path.write_bytes(bytes(16))
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    torch.testing.assert_close(torch.from_file(str(path), size=4), torch.full((4,), -0.5))


def test_copies_and_pickles_are_taken_after_the_update(lazy):
    ours, theirs, a, b = pair()
    a.step()
    b.step()
    params, twin = copy.deepcopy((ours, a))
    a.step()
    b.step()
    loaded_params, loaded = pickle.loads(pickle.dumps((ours, a)))
    same_state(loaded, b, loaded_params, theirs)
    fill(params, 1)
    twin.step()
    same_state(twin, b, params, theirs)
    fill(loaded_params, 7)
    fill(theirs, 7)
    loaded.step()
    b.step()
    same_state(loaded, b, loaded_params, theirs)


def test_state_can_be_assigned_as_in_torch(lazy):
    ours, theirs, a, b = pair()
    a.step()
    before = a.state
    a.state = before
    assert a.state is before
    b.step()
    same_state(a, b, ours, theirs)


def test_waiting_and_kernel_time_are_counted(gate):
    ours, _, a, _ = pair(rank=1)
    a.step()
    assert gate.arrived.wait(60)
    ours[3] + 1
    gate.open.set()
    stats = a.stats()
    assert stats["wait_s"] > 0.0
    assert stats["kernel_s"] > 0.0
    assert (stats["steps"], stats["host_state_bytes"]) == (1, 8 * sum(p.numel() for p in ours))
    waited = stats["wait_s"]
    ours[3] + 1
    assert a.stats()["wait_s"] == waited


def test_attach_and_detach_with_updates_pending(lazy):
    ours, theirs, a, b = pair()
    a.attach(nn.ParameterList(ours))
    a.step()
    b.step()
    a.detach()
    assert all(guard_of(p).pending is None for p in ours)
    same_state(a, b, ours, theirs)


@given(threads=st.lists(st.integers(1, 4), min_size=2, max_size=4), seed=st.integers(0, 20))
def test_the_thread_pool_serves_several_threads_at_once(threads, seed):
    def arguments():
        (p, m, v, g) = parameters(seed, shapes=[(50_001,)] * 4)
        hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.1]], dtype=torch.float64)
        lists = [t.detach() for t in (p, g, m, v.detach().abs())]
        return [[t] for t in lists] + [[torch.tensor(0.0)], [], hyper, [0], 1.0, False]

    want = arguments()
    for _ in range(5):
        NATIVE.adamw_step_(*want, 1)
    sets = [arguments() for _ in threads]
    barrier = threading.Barrier(len(threads))

    def work(mine, count):
        barrier.wait(60)
        for _ in range(5):
            NATIVE.adamw_step_(*mine, count)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(sets, threads, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    for mine in sets:
        for a, b in zip(mine[:5], want[:5], strict=True):
            assert_bit_equal(a[0], b[0])


@pytest.mark.parametrize("piece", [1, 6, 1000])
def test_the_last_large_update_is_cut_and_has_the_same_bits(piece, monkeypatch):
    monkeypatch.setattr(deferred, "_PIECE", piece)
    calls = []

    class Noted:
        def adamw_step_(self, *arguments):
            calls.append(len(arguments[0]))
            NATIVE.adamw_step_(*arguments)

        def __getattr__(self, name):
            return getattr(NATIVE, name)

    ours, theirs = [guarded(p, 3) for p in parameters()], parameters()
    a, b = OffloadAdamW(ours, lr=1e-2, max_grad_norm=0.1), OffloadAdamW(theirs, lr=1e-2, max_grad_norm=0.1)
    for seed in range(3):
        fill(ours, seed)
        fill(theirs, seed)
        b.step()
        with monkeypatch.context() as patch:
            calls.clear()
            patch.setattr(kernel, "_C", Noted())
            a.step()
            a.synchronize()
        assert sum(calls) == len(SHAPES)
        assert (len(calls) > 1) == (piece < 1000)
    same_state(a, b, ours, theirs)
