import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.dtypes import dtype_name, is_low_precision, parse_dtype
from ts_core.errors import OptionError

# Written out, so that a wrong entry in the table under test cannot agree with itself.
SPELLINGS = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "double": torch.float64,
    "float64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
ALL = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


@given(
    st.sampled_from(sorted(SPELLINGS)),
    st.sampled_from(["", "torch."]),
    st.booleans(),
    st.sampled_from(["", " ", "\n"]),
)
def test_parse_dtype_reads_every_usual_spelling(name, prefix, upper, blank):
    text = prefix + name
    assert parse_dtype(blank + (text.upper() if upper else text) + blank) is SPELLINGS[name]


@given(st.sampled_from(ALL))
def test_a_dtype_is_returned_as_it_is(dtype):
    assert parse_dtype(dtype) is dtype
    assert f"torch.{dtype_name(dtype)}" == str(dtype)


@given(st.sampled_from(sorted(set(SPELLINGS.values()), key=str)))
def test_names_and_dtypes_are_inverse(dtype):
    assert parse_dtype(dtype_name(dtype)) is dtype


@given(st.text())
def test_unknown_names_are_refused_with_the_known_ones(text):
    key = text.strip().lower().removeprefix("torch.")
    if key in SPELLINGS or hasattr(torch, key):
        return
    with pytest.raises(OptionError, match=r"option moment_dtype: expected one of .*bfloat16"):
        parse_dtype(text, name="moment_dtype")


@pytest.mark.parametrize("value", [None, 1, float, torch.zeros(1)])
def test_other_kinds_are_refused(value):
    with pytest.raises(OptionError, match="option dtype"):
        parse_dtype(value)


def test_an_option_can_take_only_some():
    accepted = (torch.float32, torch.bfloat16)
    assert parse_dtype("bf16", accepted=accepted) is torch.bfloat16
    with pytest.raises(OptionError, match=r"expected one of float32, bfloat16, given 'fp16'"):
        parse_dtype("fp16", accepted=accepted)
    with pytest.raises(OptionError, match=r"given torch\.float16"):
        parse_dtype(torch.float16, accepted=accepted)


@given(st.sampled_from(ALL))
def test_low_precision_means_short_and_floating(dtype):
    short = {
        torch.float16,
        torch.bfloat16,
        *(d for d in ALL if str(d).startswith(("torch.float8", "torch.float4"))),
    }
    assert is_low_precision(dtype) == (dtype in short)
