import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import OptionError
from ts_paging import CopyEngine, WaitPolicy

modes = st.sampled_from(["poll", "spin", "block"])


@given(modes, st.integers(0, 10**6), st.integers(1, 10**6))
def test_environment_says_the_policy(mode, spin, sleep):
    policy = WaitPolicy.from_env(
        {
            "TRAINSTREAM_EVENT_WAIT": mode,
            "TRAINSTREAM_EVENT_SPIN_US": str(spin),
            "TRAINSTREAM_EVENT_SLEEP_US": f" {sleep} ",
        }
    )
    assert policy == WaitPolicy(mode, spin, sleep)


def test_what_is_not_set_has_its_default(monkeypatch):
    for name in ("WAIT", "SPIN_US", "SLEEP_US"):
        monkeypatch.delenv(f"TRAINSTREAM_EVENT_{name}", raising=False)
    assert WaitPolicy.from_env() == WaitPolicy("poll", 50, 100)
    monkeypatch.setenv("TRAINSTREAM_EVENT_WAIT", "")
    assert WaitPolicy.from_env().mode == "poll"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRAINSTREAM_EVENT_WAIT", "sleep"),
        ("TRAINSTREAM_EVENT_SPIN_US", "-1"),
        ("TRAINSTREAM_EVENT_SPIN_US", "many"),
        ("TRAINSTREAM_EVENT_SLEEP_US", "0"),
        ("TRAINSTREAM_EVENT_SLEEP_US", "²"),
    ],
)
def test_a_bad_variable_is_named(name, value):
    with pytest.raises(OptionError, match=name):
        WaitPolicy.from_env({name: value})


@pytest.mark.parametrize("values", [("nap", 1, 1), ("poll", -1, 1), ("poll", 1, 0), ("poll", True, 1)])
def test_bad_values_are_refused(values):
    with pytest.raises(OptionError):
        WaitPolicy(*values)


@given(modes, st.sampled_from([0, 50]), st.integers(0, 100_000))
def test_every_policy_waits_for_the_copy(mode, spin, size):
    with CopyEngine(wait=WaitPolicy(mode, spin, 1)) as engine:
        src = torch.arange(size)
        dst = torch.zeros_like(src)
        ticket = engine.h2d(dst, src)
        ticket.wait()
        assert ticket.done()
        assert torch.equal(dst, src)
