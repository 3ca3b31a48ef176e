"""Several threads in one paged model: right results or an error, never wrong ones."""

import threading

import pytest
import torch
from test_weight_pager import batch, build, host, page

from ts_core.errors import StateError
from ts_core.testing import devices
from ts_paging.pager import WeightPager
from ts_paging.turns import _Backward


def started(function):
    """Run a function in another thread; what it returns or raises will be the one element of the list."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    # A daemon: one that hangs keeps the process from ending otherwise.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def in_thread(function):
    """Run a function in another thread; return what it returned or raised."""
    thread, found = started(function)
    thread.join(60)
    assert found, "it hangs, and would go on beside the tests that follow"
    return found[0]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_evaluation_beside_evaluation_is_right_or_refused(policy, device):
    model = host(build()).eval()
    page(model, device, 2, policy)
    x = batch(device)
    with torch.no_grad():
        expected = model(x)
    found, refused = [], []

    def evaluate():
        for _ in range(60):
            try:
                with torch.no_grad():
                    found.append(torch.equal(model(x), expected))
            except StateError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found)
    assert all("another thread" in message for message in refused)
    with torch.no_grad():
        assert torch.equal(model(x), expected)  # and it goes on


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_a_pass_within_another_thread_s_forward_or_backward_is_refused(policy, device):
    model = host(build())
    page(model, device, 2, policy)
    x = batch(device)
    told = []

    def evaluate():
        with torch.no_grad():
            return model(x)

    def in_forward(module, args, output):
        told.append(in_thread(evaluate))

    handle = model.layers[2].gate.register_forward_hook(in_forward)
    loss = model.loss(x)
    handle.remove()
    assert isinstance(told.pop(), StateError)
    loss.backward()
    handle = model.layers[1].register_full_backward_hook(lambda *_: told.append(in_thread(evaluate)))
    model.loss(x).backward()
    handle.remove()
    assert isinstance(told.pop(), StateError)
    assert torch.is_tensor(in_thread(evaluate))  # when it is over, anybody may


@pytest.mark.parametrize("device", devices())
def test_turns_may_be_taken_from_any_thread(device):
    plain, model = build().to(device), host(build())
    page(model, device)
    x = batch(device)
    for step in range(3):
        for current in (plain, model):
            current.zero_grad()
            torch.manual_seed(step)
            loss = in_thread(lambda current=current: current.loss(x))
            loss.backward() if step % 2 else in_thread(loss.backward)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad.cpu(), q.grad.cpu())


def test_a_failed_backward_pass_locks_nobody_out():
    model = host(build())
    page(model, "cpu")
    x = batch("cpu")
    handle = model.layers[0].gate.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.loss(x).backward()
    handle.remove()
    model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.loss(x).backward()
    assert torch.is_tensor(in_thread(lambda: model.loss(x)))


def test_a_module_that_runs_within_a_backward_pass_is_no_other_thread():
    model = host(build())
    page(model, "cpu")
    x, seen = batch("cpu"), []

    def hook(grad):
        with torch.no_grad():
            seen.append(model(x))

    loss = model.loss(x)
    model.norm.weight.register_hook(hook)
    loss.backward()
    assert len(seen) == 1


def test_a_pass_that_the_engine_drops_late_is_waited_for():
    """What a device's thread holds of a pass may outlive `backward()`, and above all one that failed."""
    model = host(build()).eval()
    pager = page(model, "cpu", 2)
    x = batch("cpu")
    expected = model(x)
    late, ended = _Backward(), _Backward()
    late.thread = ended.thread = -1
    pager.turns._backwards.update({-2: late, -3: ended})
    ended()
    holder = [late]
    del late
    dropping = threading.Timer(0.2, holder.clear)
    dropping.start()
    assert torch.equal(model(x), expected)
    assert not holder
    dropping.join()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("fails", [False, True])
def test_one_pass_after_another_is_never_refused(device, fails):
    model = host(build())
    page(model, device, 2)
    x = batch(device)

    def fail(grad):
        raise ValueError("on purpose")

    for _ in range(100):
        if fails:
            hidden = model.embed(x)
            hidden.register_hook(fail)
            for layer in model.layers:
                hidden = layer(hidden)
            with pytest.raises(ValueError, match="on purpose"):
                hidden.sum().backward()
        else:
            model.loss(x).backward()
        with torch.no_grad():
            model(x)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_a_backward_pass_within_another_thread_s_is_refused_and_the_other_goes_on(policy, device):
    """Held in a hook until the second pass has begun; a GPU's thread works for both, and for the later first.

    So the hook may not wait there until the second pass has ended: that has begun once the thread that called
    it has gone on to the part of its graph that is on the CPU, and is of operations from before.
    """
    plain, model = build().to(device).eval(), host(build()).eval()
    page(model, device, 2, policy)
    x, others, begun = batch(device), [], threading.Event()
    plain.loss(x).backward()

    def second_pass():
        try:
            second.backward()
        finally:
            begun.set()

    def hold(*_):
        others.append(started(second_pass))
        assert begun.wait(60)

    handle = model.layers[2].register_full_backward_hook(hold)
    first = model.loss(x)
    handle.remove()
    beside = torch.zeros((), requires_grad=True) * 2
    beside.register_hook(lambda grad: begun.set())
    second = model.loss(x.flip(1)).cpu() + beside
    first.backward()
    thread, told = others[0]
    thread.join(60)
    assert isinstance(told[0], StateError)
    assert "another thread" in str(told[0])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert q.grad is None or torch.equal(p.grad.cpu(), q.grad.cpu())
    assert in_thread(model.loss(x).backward) is None  # when it is over, anybody may


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_backward_passes_of_several_threads_are_right_or_refused(policy, device):
    plain, model = build().to(device).eval(), host(build()).eval()
    assert all(torch.equal(p.cpu(), q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    page(model, device, 2, policy)
    xs = [batch(device, shift) for shift in range(3)]
    expected = []
    for x in xs:
        plain.zero_grad()
        plain.loss(x).backward()
        expected.append([p.grad.double().cpu() for p in plain.parameters() if p.requires_grad])
    start = threading.Barrier(3)
    model.loss(xs[0]).backward()  # hooks and order are known
    for _ in range(5):
        losses = [model.loss(x) for x in xs]

        def backward(loss):
            start.wait()
            loss.backward()

        model.zero_grad()
        threads = [started(lambda loss=loss: backward(loss)) for loss in losses]
        for thread, _ in threads:
            thread.join(60)
        told = [found[0] for _, found in threads]
        assert all(error is None or isinstance(error, StateError) for error in told)
        assert all(error is None or "another thread" in str(error) for error in told)
        # Those that were refused have left nothing.
        right = [grads for grads, error in zip(expected, told, strict=True) if error is None]
        assert right
        for index, p in enumerate(p for p in model.parameters() if p.requires_grad):
            total = sum(grads[index] for grads in right)
            torch.testing.assert_close(p.grad.double().cpu(), total, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_within_one_is_no_other_thread():
    model = host(build()).eval()
    pager = page(model, "cpu")
    x, seen = batch("cpu"), []
    inner = model.loss(x.flip(1))
    plain = build().eval()
    plain.loss(x.flip(1)).backward()
    plain.loss(x).backward()

    def hook(grad):
        if not seen:
            seen.append(True)
            inner.backward()

    loss = model.loss(x)
    handle = model.norm.weight.register_hook(hook)
    loss.backward()
    handle.remove()
    assert seen
    assert len(pager.turns._backwards) == 0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_backward_pass_waits_for_one_that_the_engine_drops_late():
    model = host(build())
    pager = page(model, "cpu", 2)
    loss = model.loss(batch("cpu"))
    late = _Backward()
    late.thread = -1
    pager.turns._backwards[-2] = late
    holder = [late]
    del late
    dropping = threading.Timer(0.2, holder.clear)
    dropping.start()
    loss.backward()
    assert not holder
    dropping.join()


def test_second_runs_of_blocks_with_buffers_take_turns_too():
    """They exchange buffers, even where no weight is paged."""

    class Counting(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Counting() for _ in range(3)])
    pager = WeightPager(torch.device("cpu"), pages=lambda p: False)
    pager.attach([(f"blocks.{i}", block, "recompute") for i, block in enumerate(model)])
    x, told = torch.ones(2, 4), []
    second = model(x).sum()
    handle = model[1].register_full_backward_hook(lambda *_: told.append(in_thread(second.backward)))
    first = model(x).sum()
    handle.remove()
    before = [block.calls for block in model]
    first.backward()
    assert isinstance(told[0], StateError)
    assert all(block.calls is calls and calls == 2 for block, calls in zip(model, before, strict=True))
