"""Tests of the test helpers themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ts_core.testing as helpers
from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import device_params
from ts_core.testing.tolerances import UNIT_ROUNDOFF

FLOATS = sorted(UNIT_ROUNDOFF, key=str)
WIDE = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_everything_named_can_be_imported():
    for name in helpers.__all__:
        assert getattr(helpers, name) is not None
    assert dir(helpers) == sorted(helpers.__all__)
    assert callable(helpers.tolerance)
    assert callable(helpers.devices)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = helpers.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = device_params.nothing


def test_devices_mark_cuda():
    cpu, cuda = helpers.devices()
    assert (cpu.values, cuda.values) == (("cpu",), ("cuda",))
    assert not cpu.marks
    assert {mark.name for mark in cuda.marks} == {"gpu", "skipif"}
    assert helpers.gpu.name == "gpu"


@pytest.mark.parametrize("device", helpers.devices())
def test_a_test_runs_on_each_device(device):
    assert torch.ones(1, device=device).device.type == device


def test_the_plugin_loaded_profile_and_marker(pytestconfig):
    assert any(line.startswith("gpu:") for line in pytestconfig.getini("markers"))
    ci = settings.get_profile("ci")
    assert (ci.max_examples, ci.deadline, ci.derandomize) == (25, None, True)
    assert settings.get_profile("nightly").max_examples == 1000


@given(st.integers(0, 2**32))
def test_seeded_repeats_and_leaves_no_trace(seed):
    before = torch.get_rng_state()
    with helpers.seeded(seed) as generator:
        first, own = torch.rand(3), torch.rand(3, generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    with helpers.seeded(seed) as generator:
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3, generator=generator), own)


@given(st.data(), st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.integers(0, 30))
def test_shapes_stay_within_their_limits(data, min_dims, more_dims, min_side, more_side):
    limits = {
        "min_dims": min_dims,
        "max_dims": min_dims + more_dims,
        "min_side": min_side,
        "max_side": min_side + more_side,
        "max_numel": data.draw(st.integers(max(min_side, 1) ** min_dims, 500)),
    }
    shape = data.draw(helpers.shapes(**limits))
    assert limits["min_dims"] <= len(shape) <= limits["max_dims"]
    assert all(min_side <= size <= limits["max_side"] for size in shape)
    assert math.prod(shape) <= limits["max_numel"]


@pytest.mark.parametrize(
    "limits",
    [
        {"min_dims": -1},
        {"min_dims": 2, "max_dims": 1},
        {"min_side": 5, "max_side": 4},
        {"min_dims": 3, "min_side": 10, "max_numel": 999},
    ],
)
def test_impossible_shapes_are_refused(limits):
    with pytest.raises(ArgumentError, match=r"\[shapes\]"):
        helpers.shapes(**limits)


@pytest.mark.parametrize("dtype", WIDE)
@given(data=st.data())
def test_float_tensors_are_finite_and_as_asked(dtype, data):
    shape = data.draw(helpers.shapes(min_dims=0, min_side=0, max_numel=300))
    tensor = data.draw(helpers.float_tensors(dtype, shape))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
    assert tensor.isfinite().all()
    flat = data.draw(helpers.float_tensors(dtype, helpers.shapes(), layouts=("contiguous",)))
    assert flat.is_contiguous()
    assert data.draw(helpers.float_tensors(dtype, (3, 5))).shape == (3, 5)


@pytest.mark.parametrize("dtype", WIDE)
def test_flavours_are_what_they_say(dtype):
    info = torch.finfo(dtype)

    def make(flavour):
        return helpers.make_tensor((400,), dtype=dtype, flavour=flavour, seed=3).double()

    assert not make("zeros").any()
    assert not torch.signbit(make("zeros")).any()
    assert not make("negative_zero").any()
    assert torch.signbit(make("negative_zero")).any()
    assert make("constant").unique().numel() == 1
    assert 0 < make("sparse").count_nonzero() < 120
    assert torch.equal(make("integers"), make("integers").round())
    assert make("denormal").abs().max() <= info.smallest_normal
    assert make("denormal").count_nonzero() > 300
    assert make("large").abs().min() >= info.max / 8
    assert make("outlier").abs().max() == pytest.approx(1e3, rel=0.01)
    spread = make("mixed_scale").abs()
    assert spread.max() / spread[spread > 0].min() > 100
    assert 0.8 < make("normal").std() < 1.2


def test_layouts_are_what_they_say():
    def make(layout, shape=(4, 6)):
        return helpers.make_tensor(shape, layout=layout)

    values = make("contiguous")
    for layout in ("offset", "strided", "transposed"):
        assert torch.equal(make(layout), values)
    assert make("offset").storage_offset() == 1
    assert make("offset").is_contiguous()
    assert make("strided").stride() == (12, 2)
    assert make("transposed").stride() == (1, 4)
    assert make("expanded").stride() == (0, 1)
    assert torch.equal(make("expanded"), values[:1].expand(4, 6))
    for layout in helpers.LAYOUTS:
        assert make(layout, ()).shape == ()
        assert make(layout, (0,)).shape == (0,)
    for bad in ({"flavour": "sour"}, {"layout": "upside_down"}):
        with pytest.raises(ArgumentError, match="expected one of"):
            helpers.make_tensor((2,), **bad)


@given(st.sampled_from(FLOATS), st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
def test_tolerance_grows_with_length_and_with_roundoff(dtype, a, b, worst_case):
    low, high = sorted((a, b))
    few = helpers.tolerance(dtype, low, worst_case=worst_case)
    many = helpers.tolerance(dtype, high, worst_case=worst_case)
    assert few["rtol"] <= many["rtol"]
    assert few["atol"] <= many["atol"]
    assert few["rtol"] >= 2 * UNIT_ROUNDOFF[dtype]
    assert helpers.tolerance(dtype, low)["rtol"] <= helpers.tolerance(dtype, low, worst_case=True)["rtol"]
    assert helpers.tolerance(dtype, low, scale=0.0)["atol"] <= few["atol"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_unit_roundoffs_are_half_of_torchs_eps(dtype):
    assert torch.finfo(dtype).eps / 2 == UNIT_ROUNDOFF[dtype]


@given(st.sampled_from(WIDE), st.integers(1, 3000), st.integers(0, 10**6))
def test_a_plain_sum_is_within_the_tolerance_and_a_wrong_one_is_not(dtype, length, seed):
    with helpers.seeded(seed):
        terms = torch.randn(length).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    result = terms.to(wide).cumsum(0)[-1].to(dtype)
    exact = terms.double().sum()
    scale = terms.double().abs().sum()
    helpers.assert_near(result, exact, length=length, scale=scale)
    limits = helpers.tolerance(dtype, length, scale=float(scale))
    torch.testing.assert_close(result.double(), exact, **limits)
    wrong = (exact + 0.1 * scale).to(dtype)
    with pytest.raises(AssertionError, match="1 of 1 elements are too far"):
        helpers.assert_near(wrong, exact, length=length, scale=scale)


def test_assert_near_names_the_worst_element():
    exact = torch.zeros(2, 3, dtype=torch.float64) + 1
    result = exact.float()
    result[1, 2] = 1.5
    result[0, 0] = 1.1
    with pytest.raises(AssertionError, match=r"2 of 6 elements.*worst at \(1, 2\): got 1\.5, expected 1\.0"):
        helpers.assert_near(result, exact)
    with pytest.raises(AssertionError, match=r"shapes differ: \(2, 3\) against \(3, 2\)"):
        helpers.assert_near(result, exact.reshape(3, 2))


def test_assert_near_with_infinities_and_nans():
    inf, nan = math.inf, math.nan

    def near(a, b):
        helpers.assert_near(torch.tensor([a]), torch.tensor([b], dtype=torch.float64))

    near(inf, inf)
    near(nan, nan)
    near(0.0, 2.0**-150)
    for a, b in ((1.0, inf), (inf, 1.0), (inf, -inf), (nan, 1.0), (1.0, nan), (0.0, 1e-30)):
        with pytest.raises(AssertionError, match="too far"):
            near(a, b)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"dtype": torch.int8}, ArgumentTypeError),
        ({"dtype": torch.float32, "accumulate": torch.int32}, ArgumentTypeError),
        ({"dtype": torch.float32, "length": 0}, ArgumentError),
        ({"dtype": torch.float32, "scale": -1.0}, ArgumentError),
        ({"dtype": torch.float32, "scale": math.nan}, ArgumentError),
    ],
)
def test_bad_tolerances_are_refused(call, error):
    with pytest.raises(error, match=r"\[tolerance\]"):
        helpers.tolerance(**call)


@given(helpers.float_tensors())
def test_bit_equality_of_a_tensor_with_itself_and_not_with_its_neighbour(tensor):
    helpers.assert_bit_equal(tensor, tensor.clone())
    other = torch.nextafter(tensor.clone(), torch.tensor(math.inf))
    with pytest.raises(AssertionError, match=f"{tensor.numel()} of {tensor.numel()} elements differ"):
        helpers.assert_bit_equal(other, tensor)


def test_bit_equality_tells_zeros_apart_and_nans_together():
    nan = torch.tensor([math.nan, 1.0])
    helpers.assert_bit_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match="first at flat index 1"):
        helpers.assert_bit_equal(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0]))
    with pytest.raises(AssertionError, match="expected float32"):
        helpers.assert_bit_equal(torch.zeros(2, dtype=torch.float64), torch.zeros(2))
    with pytest.raises(AssertionError, match=r"\(2, 1\)"):
        helpers.assert_bit_equal(torch.zeros(2, 1), torch.zeros(2))
    bools = torch.tensor([True, False])
    helpers.assert_bit_equal(bools, bools.clone())
