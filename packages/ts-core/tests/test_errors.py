import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core import errors

BUILTIN = {
    errors.OptionError: ValueError,
    errors.ArgumentError: ValueError,
    errors.ArgumentTypeError: TypeError,
    errors.DoesNotFitError: MemoryError,
    errors.StorageError: OSError,
    errors.CheckpointError: ValueError,
    errors.DeviceError: RuntimeError,
    errors.StateError: RuntimeError,
    errors.MissingDependencyError: ImportError,
}


@pytest.mark.parametrize(("ours", "builtin"), BUILTIN.items(), ids=lambda c: c.__name__)
def test_each_error_is_also_the_builtin_a_caller_would_catch(ours, builtin):
    assert issubclass(ours, errors.TrainStreamError)
    with pytest.raises(builtin, match="why"):
        raise ours("why")


@pytest.mark.parametrize("ours", BUILTIN, ids=lambda c: c.__name__)
def test_errors_survive_pickling_between_processes(ours):
    copy = pickle.loads(pickle.dumps(ours("text")))
    assert type(copy) is ours
    assert str(copy) == "text"


def test_every_error_class_is_listed_here():
    classes = {
        v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.TrainStreamError)
    }
    assert classes == {*BUILTIN, errors.TrainStreamError}


@given(st.text(), st.text(), st.text(), st.one_of(st.text(), st.integers(), st.none()))
def test_message_holds_every_part(function, argument, expected, given_value):
    text = errors.message(function, argument, expected, given_value)
    shown = given_value if isinstance(given_value, str) else repr(given_value)
    assert text == f"[{function}] {argument}: expected {expected}, given {shown}"
    assert errors.message(function, argument, expected, given_value, "Do this") == f"{text}. Do this"


@given(st.text(min_size=1), st.text(min_size=1))
def test_missing_names_package_and_command(package, install):
    error = errors.missing("plot", package, install)
    assert error.name == package
    assert repr(package) in str(error)
    assert str(error).endswith(install)
