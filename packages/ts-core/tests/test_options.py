import enum
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import options
from ts_core.errors import OptionError

values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.sampled_from(["a", "b", "auto", ""])
)


def same(a, b):
    return type(a) is type(b) and a == b


@given(values, st.lists(values, max_size=5))
def test_choice_accepts_exactly_the_listed_values(value, accepted):
    if any(same(value, a) for a in accepted):
        assert same(options.choice("mode", value, accepted), value)
    else:
        with pytest.raises(OptionError) as caught:
            options.choice("mode", value, accepted)
        text = str(caught.value)
        assert "mode" in text
        assert text.endswith(f"given {value!r}")
        assert all(repr(a) in text for a in accepted)


@given(values, st.lists(values, max_size=5))
def test_not_yet_refuses_what_is_not_built_and_says_so(value, available):
    if any(same(value, a) for a in available):
        assert same(options.not_yet("codec", value, available), value)
    else:
        with pytest.raises(OptionError, match="is not available in this release") as caught:
            options.not_yet("codec", value, available)
        assert f"codec={value!r}" in str(caught.value)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, np.zeros(3), torch.zeros(3), math.nan, object()])
def test_odd_values_are_refused_without_a_crash(value):
    for check in (options.choice, options.not_yet):
        with pytest.raises(OptionError):
            check("mode", value, ("auto", True, 0.5, None))
    for check in (options.integer, options.number, options.fraction, options.boolean):
        with pytest.raises(OptionError):
            check("mode", value)


def test_choice_returns_the_accepted_object_for_dtypes_and_enums():
    class Color(enum.Enum):
        RED = 1

    assert options.choice("dtype", torch.float32, ("float32", torch.float32)) is torch.float32
    assert options.choice("color", Color.RED, (Color.RED,)) is Color.RED


def test_true_is_not_one_and_false_is_not_zero():
    with pytest.raises(OptionError):
        options.choice("offload", 1, ("auto", True))
    with pytest.raises(OptionError):
        options.choice("offload", False, ("auto", 0.0))
    for check in (options.integer, options.number, options.fraction):
        with pytest.raises(OptionError):
            check("share", True)
    for value in (0, 1, "True", None):
        with pytest.raises(OptionError):
            options.boolean("verbose", value)


@given(
    st.integers(-100, 100),
    st.none() | st.integers(-20, 20),
    st.none() | st.integers(-20, 20),
    st.none() | st.integers(1, 7),
)
def test_integer_checks_limits_and_divisibility(value, minimum, maximum, multiple):
    inside = (
        (minimum is None or value >= minimum)
        and (maximum is None or value <= maximum)
        and (multiple is None or value % multiple == 0)
    )
    call = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple}
    if inside:
        result = options.integer("n", np.int64(value), **call)
        assert type(result) is int
        assert result == value
    else:
        with pytest.raises(OptionError, match=rf"option n: expected an integer.*given {value}$"):
            options.integer("n", value, **call)


@pytest.mark.parametrize("value", [1.0, "1", None, 1 + 0j, np.float32(1), torch.tensor(1)])
def test_integer_refuses_other_kinds(value):
    with pytest.raises(OptionError, match="option n: expected an integer >= 1"):
        options.integer("n", value, minimum=1)


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.none() | st.floats(-10, 10),
    st.none() | st.floats(-10, 10),
)
def test_number_checks_limits(value, low, high):
    closed = math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
    opened = math.isfinite(value) and (low is None or value > low) and (high is None or value < high)
    for accepted, call in (
        (closed, {"minimum": low, "maximum": high}),
        (opened, {"above": low, "below": high}),
    ):
        if accepted:
            assert options.number("eps", value, **call) == value
        else:
            with pytest.raises(OptionError, match="option eps: expected a finite number"):
                options.number("eps", value, **call)


@pytest.mark.parametrize("value", ["0.5", None, 10**400, 1j, torch.tensor(0.5)])
def test_number_refuses_other_kinds(value):
    with pytest.raises(OptionError):
        options.number("eps", value)


@given(st.floats(-2, 2), st.floats(-1, 0), st.floats(0, 1))
def test_fraction_is_closed_on_both_sides(value, lo, hi):
    assert options.fraction("share", lo, lo, hi) == lo
    assert options.fraction("share", hi, lo, hi) == hi
    if lo <= value <= hi:
        assert options.fraction("share", value, lo, hi) == value
    else:
        with pytest.raises(OptionError, match="option share"):
            options.fraction("share", value, lo, hi)


@given(st.booleans())
def test_boolean_returns_bools(value):
    assert options.boolean("verbose", value) is value
