import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.paged import with_weights


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(), max_size=3))
def test_a_plain_module_is_left_alone(rows, columns, extra):
    module = nn.Linear(columns, rows)
    seen = []

    def function(*args, **kwargs):
        seen.append((args, kwargs, module.weight))
        return kwargs["key"]

    assert with_weights(module, function, *extra, key="value") == "value"
    assert seen == [(tuple(extra), {"key": "value"}, module.weight)]
    assert "forward" not in module.__dict__


def test_gradients_of_a_plain_module_are_its_own():
    module = nn.Linear(3, 2)
    x = torch.ones(4, 3)
    with_weights(module, lambda x: (x @ module.weight.t()).sum(), x).backward()
    assert torch.equal(module.weight.grad, torch.full((2, 3), 4.0))


def test_a_stand_in_runs_the_function():
    module = nn.Linear(3, 2)

    calls = []

    class StandIn:
        def __call__(self, x):
            raise AssertionError("the forward itself is not asked for")

        def with_weights(self, function, args, kwargs):
            calls.append((args, kwargs))
            return function(*args, **kwargs)

    module.forward = StandIn()
    assert with_weights(module, lambda a, b: a - b, 7, b=2) == 5
    assert calls == [((7,), {"b": 2})]


def test_a_forward_replaced_by_others_is_none_of_ours():
    module = nn.Linear(3, 2)
    module.forward = lambda x: x
    assert with_weights(module, lambda: 3) == 3


def test_names_of_the_function_are_free():
    """The parameters are positional only: the function may take keywords of the same name."""
    assert with_weights(nn.Identity(), lambda module, function: (module, function), module=1, function=2) == (
        1,
        2,
    )


def test_errors_pass_through():
    with pytest.raises(ZeroDivisionError):
        with_weights(nn.Identity(), lambda: 1 / 0)
