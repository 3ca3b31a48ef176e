"""A block that fails while it is checkpointed leaves nothing behind, even while its exception is held."""

import gc
import inspect
import traceback

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from test_weight_pager import batch, build, host, page
from torch import nn

from ts_paging.checkpointed import checkpointed
from ts_paging.pager import WeightPager


def until_2_12(function, *args, use_reentrant, **kwargs):
    """What `torch.utils.checkpoint.checkpoint` did up to PyTorch 2.12: a failed run leaves its generator."""
    make = torch_checkpoint._checkpoint_without_reentrant_generator
    options = list(inspect.signature(make).parameters.values())[1:]
    defaults = [each.default for each in options if each.default is not each.empty]
    running = make(function, *defaults, *args, **kwargs)
    next(running)
    result = function(*args, **kwargs)
    with pytest.raises(StopIteration):
        next(running)
    return result


@pytest.fixture(params=["as installed", "as up to 2.12"], autouse=True)
def version(request, monkeypatch):
    if request.param != "as installed":
        monkeypatch.setattr("ts_paging.checkpointed.checkpoint", until_2_12)


class Failure(Exception):
    """Raised on purpose, as an out-of-memory error would be."""


def failing(run, kind=Failure):
    """Run what fails; returns the exception, whose traceback holds the frames."""
    with pytest.raises(kind) as caught:
        run()
    return caught.value


def fail_at(module, time, kind=Failure):
    """Let a module raise when it is called for the `time`-th time."""
    calls = []

    def hook(module, args):
        calls.append(1)
        if len(calls) == time:
            raise kind("on purpose")

    return module.register_forward_pre_hook(hook)


def unrelated():
    """A user's own checkpoint, and gradients of an ordinary graph."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    y = torch_checkpoint.checkpoint(lambda t: (t.sin() * t).exp(), x, use_reentrant=False)
    return torch.autograd.grad(y.sum() + (x * x).sum(), x)[0]


def gradients(model, x):
    model.zero_grad()
    loss = model.loss(x)
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.requires_grad]]


def test_the_stand_in_for_older_versions_leaves_its_hooks_set():
    def fail(x):
        raise Failure

    x = torch.ones(3, requires_grad=True)
    error = failing(lambda: until_2_12(fail, x, use_reentrant=False))
    kept = x.sin()
    with pytest.raises(Failure):  # the run that failed is taken for the one that saved it
        kept.sum().backward()
    del error
    gc.collect()  # the frame of `failing` holds it, too
    x.sin().sum().backward()


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("time", [1, 2])
def test_passes_after_a_failed_one_are_those_of_a_model_that_never_failed(kind, time):
    twin, model = host(build()).eval(), host(build()).eval()
    page(twin, "cpu", policy="recompute")
    page(model, "cpu", policy="recompute")
    x = batch("cpu")
    expected, alone = gradients(twin, x), unrelated()
    held = []
    for index in (0, 3):
        handle = fail_at(model.layers[index].gate, time, kind)  # in forward, or in the second run
        held.append(failing(lambda: gradients(model, x), kind))
        handle.remove()
        assert torch.equal(unrelated(), alone)
        assert all(map(torch.equal, gradients(model, x), expected))
    for error in held:
        told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        assert "in hook" in told  # where it was raised
        assert error.__context__ is None


def test_blocks_within_blocks_leave_nothing_behind_either():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.inner(x.sin())).sin()

    def made():
        torch.manual_seed(0)
        outer = Outer()
        pager = WeightPager(torch.device("cpu"), pages=lambda p: False)
        pager.attach([("outer", outer, "recompute"), ("outer.inner", outer.inner, "recompute")])
        return outer

    def found(outer):
        outer.zero_grad()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        outer(x).sum().backward()
        return [x.grad, *[p.grad.clone() for p in outer.parameters()]]

    outer = made()
    expected, alone, held = found(made()), unrelated(), []
    for module in (outer.inner[0], outer.last, outer.inner[1]):
        for time in (1, 2):
            handle = fail_at(module, time)
            held.append(failing(lambda: found(outer)))
            handle.remove()
            assert torch.equal(unrelated(), alone)
            assert all(map(torch.equal, found(outer), expected))


def test_hooks_around_a_run_that_fails_are_still_there():
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    def fail(x):
        x.sin()
        raise Failure

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        error = failing(lambda: checkpointed(lambda t: checkpointed(fail, t.cos()), x))
        seen.clear()
        y = x.sin()
        assert len(seen) == 1
    y = y.cos()
    assert len(seen) == 1
    assert error.__traceback__ is not None
    y.sum().backward()


def test_arguments_by_name_and_runs_without_a_graph():
    def both(x, *, y):
        return x * y, None

    x = torch.ones(3, requires_grad=True)
    checkpointed(both, x, y=2.0)[0].sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    with torch.no_grad():
        assert checkpointed(both, x, y=3.0)[0].tolist() == [3.0] * 3
        with pytest.raises(TypeError):
            checkpointed(both, x)
