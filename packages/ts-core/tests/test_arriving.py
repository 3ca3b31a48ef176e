"""A gradient that is still arriving is the ordinary one to whoever uses it."""

import copy
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.arriving import ArrivingGradient, settled_gradient
from ts_core.guard import guard, guard_of, release


class Slow:
    """A copy that is through when it is let go."""

    def __init__(self, error=None):
        self.event, self.error, self.waited = threading.Event(), error, 0

    def done(self):
        return self.event.is_set()

    def wait(self):
        self.waited += 1
        if self.error is not None:
            raise self.error
        assert self.event.wait(20)


def arriving(value, payload_dtype=None, landing=None):
    """One whose payload shows its bytes only once it is let go."""
    payload = torch.empty_strided(value.size(), value.stride(), dtype=payload_dtype or value.dtype)
    payload.fill_(-1)
    landing = landing or Slow()
    real = landing.wait

    def wait():
        real()
        payload.copy_(value)

    landing.wait = wait
    made = ArrivingGradient(
        payload, landing, value.dtype, lambda: torch.empty_strided(value.size(), value.stride())
    )
    landing.event.set()
    return made


USES = {
    "add": lambda g: g + 1,
    "from the right": lambda g: torch.ones(()) - g,
    "norm": lambda g: torch.linalg.vector_norm(g),
    "foreach norm": lambda g: torch._foreach_norm([g, g])[1],
    "stack": lambda g: torch.stack([g, g]),
    "view": lambda g: g.reshape(-1)[1:],
    "detach": lambda g: g.detach(),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "list": lambda g: torch.tensor(g.tolist()),
    "item": lambda g: torch.tensor(g.sum().item()),
    "data": lambda g: g.data.clone(),
    "copy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "dlpack": lambda g: torch.from_dlpack(g).clone(),
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to(torch.float64).float(),
    "into": lambda g: torch.zeros(3, 5).copy_(g),
    "print": lambda g: torch.tensor(float(len(repr(g)))),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("narrow", [False, True])
def test_every_use_is_that_of_the_ordinary_tensor(use, narrow):
    value = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    result = USES[use](arriving(value, torch.bfloat16 if narrow else None))
    assert type(result) is torch.Tensor
    assert torch.equal(result, USES[use](value))


@given(
    steps=st.lists(st.sampled_from(["mul", "add", "zero", "foreach", "clamp", "item", "read"]), max_size=6),
    narrow=st.booleans(),
    turned=st.booleans(),
)
def test_what_is_done_in_place_stays(steps, narrow, turned):
    value = torch.arange(15.0).view(3, 5)
    value = value.t() if turned else value
    grad, plain = (
        arriving(value, torch.bfloat16 if narrow else None),
        value.clone(memory_format=torch.preserve_format),
    )
    for step in steps:
        for each in (grad, plain):
            if step == "mul":
                assert each.mul_(0.5) is each
            elif step == "add":
                each += 3
            elif step == "zero":
                each.zero_()
            elif step == "foreach":
                torch._foreach_mul_([each], 1.5)
            elif step == "clamp":
                torch.nn.utils.clip_grads_with_norm_([nn.Parameter(torch.zeros(1))], 1.0, torch.ones(()))
                each.clamp_(max=4)
            elif step == "item":
                each[0, 1] = 7
            else:
                each.sum().item()
    assert torch.equal(grad + 0, plain + 0)
    assert grad.stride() == plain.stride()


def test_nobody_waits_before_it_is_used():
    landing = Slow()
    payload = torch.zeros(2, 3)
    grad = ArrivingGradient(payload, landing, torch.float32, lambda: torch.empty(2, 3))
    assert (grad.shape, grad.dtype, grad.device.type, grad.numel()) == ((2, 3), torch.float32, "cpu", 6)
    assert not grad.arrived
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = grad
    assert parameter.grad is grad
    assert landing.waited == 0
    landing.event.set()
    assert grad.arrived
    assert torch.equal(settled_gradient(parameter), payload)
    assert parameter.grad is payload


def test_reading_through_the_guard_gives_the_ordinary_tensor():
    parameter = nn.Parameter(torch.zeros(3, 5))
    guard(parameter, lambda *_: None)
    value = torch.randn(3, 5)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = arriving(value)
    first = parameter.grad
    assert type(first) is torch.Tensor
    assert torch.equal(first, value)
    assert parameter.grad is first
    parameter.grad = None
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = arriving(value)
    entry = guard_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        entry.note_square_sum(parameter.grad, 3.0)
        assert entry.square_sum_of(parameter.grad) == 3.0
    torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
    assert torch.allclose(parameter.grad.norm(), torch.tensor(1e-3), rtol=1e-4)
    with torch._C.DisableTorchFunctionSubclass():
        assert entry.square_sum_of(parameter.grad) is None


def test_a_released_parameter_has_an_ordinary_gradient():
    parameter = nn.Parameter(torch.zeros(2))
    guard(parameter, lambda *_: None)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = arriving(torch.ones(2))
    release(parameter)
    assert type(parameter.grad) is torch.Tensor
    assert torch.equal(parameter.grad, torch.ones(2))


def test_what_went_wrong_with_the_copy_is_raised_by_each_use():
    landing = Slow(RuntimeError("lost"))
    grad = ArrivingGradient(torch.zeros(2), landing, torch.float32, lambda: torch.empty(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            grad + 1
    parameter = nn.Parameter(torch.zeros(2))
    guard(parameter, lambda *_: None)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = grad
    with pytest.raises(RuntimeError, match="lost"):
        release(parameter)
    assert type(parameter) is nn.Parameter
