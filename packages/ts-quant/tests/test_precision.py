"""`keep_precise`: what is measured, what is chosen, and that the budget holds."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import OptionError
from ts_core.testing import assert_bit_equal, seeded
from ts_quant import quantize, quantize_model
from ts_quant.precision import (
    Candidate,
    choose,
    keep_precise_share,
    measure,
    precise_names,
    relative_error,
)


class Layer(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in sizes)


def model_of(sizes, layers=2, seed=0, spread=True):
    """Make a model whose weights lose unequally: some have rare large values."""
    with seeded(seed):
        model = nn.ModuleList(Layer(sizes) for _ in range(layers)).requires_grad_(False)
        for p in model.parameters() if spread else ():
            p.view(-1)[:: int(torch.randint(3, 50, ()))] *= float(torch.rand(()) * 20)
    return model


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


@given(sizes=sizes, share=st.floats(0.0, 0.5), seed=st.integers(0, 2**31), half=st.integers(1, 40))
def test_never_above_the_budget(sizes, share, seed, half):
    plain = quantize_model(model_of(sizes, seed=seed), block_size=2 * half)
    model = model_of(sizes, seed=seed)
    report = quantize_model(model, block_size=2 * half, keep_precise=share)
    assert report["bytes_after"] <= plain["bytes_after"] * (1 + share)
    assert report["kept_precise"] == sum(p.codec == "int8" for p in model.parameters())
    assert {**report, "bytes_after": 0, "kept_precise": 0} == {**plain, "bytes_after": 0}


@given(sizes=sizes, share=st.floats(0.01, 0.5), seed=st.integers(0, 2**31))
def test_chosen_by_measured_gain_per_byte(sizes, share, seed):
    model, before = model_of(sizes, seed=seed), model_of(sizes, seed=seed)
    quantize_model(model, keep_precise=share)
    gains, left = {}, 0
    for name, p in before.named_parameters():
        errors, bytes_ = [], []
        for codec in ("nf4", "int8"):
            made = quantize(p, codec)
            errors.append(float((p.double() - made.dequantize().double()).norm() / p.double().norm()))
            bytes_.append(made.packed_bytes)
        gains[name] = ((errors[0] - errors[1]) / max(bytes_[1] - bytes_[0], 1), bytes_[1] - bytes_[0])
        left += bytes_[0]
    left, expected = int(left * share), set()
    for name, (gain, extra) in sorted(gains.items(), key=lambda item: -item[1][0]):
        if gain > 1e-12 and extra <= left:
            left -= extra
            expected.add(name)
    assert {name for name, p in model.named_parameters() if p.codec == "int8"} == expected
    for name, p in model.named_parameters():
        assert_bit_equal(p.dequantize(), quantize(before.get_parameter(name), p.codec).dequantize())


def test_the_worst_of_equal_size_comes_first():
    model = model_of([(32, 32)], layers=8, spread=False)
    model[5].parts[0].weight[:, ::16] *= 30
    assert quantize_model(model, keep_precise=0.12)["kept_precise"] == 1
    assert model[5].parts[0].weight.codec == "int8"


@pytest.mark.parametrize("value", [0, False, None, 0.0])
def test_off(value):
    assert quantize_model(model_of([(32, 32)]), keep_precise=value)["kept_precise"] == 0


@pytest.mark.parametrize("value", ["auto", True])
def test_auto(value):
    assert keep_precise_share(value) == 0.05
    assert quantize_model(model_of([(8, 8), (64, 64)], 3), keep_precise=value)["kept_precise"] == 3


@pytest.mark.parametrize("value", [0.51, -0.1, 1, "some", float("nan"), [0.1]])
def test_refused(value):
    with pytest.raises(OptionError, match="keep_precise"):
        keep_precise_share(value)


def test_int8_has_nothing_above_it(caplog):
    with caplog.at_level(logging.INFO, "trainstream"):
        assert quantize_model(model_of([(32, 32)]), "int8", keep_precise=0.5)["kept_precise"] == 0
    assert "keep_precise=0.5 ignored" in caplog.text
    assert precise_names([("w", torch.randn(4, 64))], "int8", 64, 0.5) == frozenset()


@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(-1, 1)), max_size=12),
    share=st.floats(0, 1),
)
def test_any_choice_is_within_the_budget(rows, share):
    candidates = [Candidate(i, *row) for i, row in enumerate(rows)]
    chosen = choose(candidates, share)
    assert sum(rows[i][1] for i in chosen) <= share * sum(row[0] for row in rows)
    assert all(rows[i][2] > 0 for i in chosen)
    assert len(set(chosen)) == len(chosen)


@given(shape=st.sampled_from([(), (7,), (5, 9), (2, 3, 8), (0, 4)]), seed=st.integers(0, 2**31))
def test_relative_error_is_that_of_float64(shape, seed):
    with seeded(seed):
        x = torch.randn(shape, dtype=torch.bfloat16)
    made = quantize(x)
    whole = x.double().norm()
    want = float((x.double() - made.dequantize(torch.float32).double()).norm() / whole) if whole else 0.0
    assert relative_error(x, made) == pytest.approx(want, rel=1e-12)


def test_zeros_gain_nothing():
    assert measure("w", torch.zeros(4, 64), "nf4", 64).gain == 0.0


def test_with_the_error_fit():
    model = model_of([(48, 48)], 3)
    assert quantize_model(model, keep_precise=0.4, error_rank=4)["kept_precise"] == 1
    assert all(p.error_a.shape == (4, 48) for p in model.parameters())
