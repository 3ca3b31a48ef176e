"""An input that several layers take is quantized once, and again once it has changed."""

import gc
import weakref

import pytest
import torch
from test_matmul import BF16, weight_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from ts_core.testing import assert_bit_equal, make_tensor
from ts_quant import _scaled_linear as scaled_linear_module
from ts_quant._shared_input import shared
from ts_quant.matmul import emulated


@pytest.fixture
def quantizations(monkeypatch):
    """Count how often an input is quantized."""
    calls = []
    original = scaled_linear_module._quantized
    monkeypatch.setattr(
        scaled_linear_module, "_quantized", lambda x, form: calls.append(tuple(x.shape)) or original(x, form)
    )
    return calls


def test_projections_of_one_input_quantize_it_once(quantizations):
    weights = [weight_of("fp8_row", (size, 64), size) for size in (64, 32, 16)]
    x = make_tensor((2, 3, 64), dtype=BF16).requires_grad_()
    with emulated():
        outs = [nn.functional.linear(x, w) for w in weights]
        assert len(quantizations) == 1
        with torch.autocast("cpu", dtype=BF16):
            wide = x.detach().float()
            for w in weights:
                nn.functional.linear(wide, w)
        assert len(quantizations) == 2
    assert [out.shape[-1] for out in outs] == [64, 32, 16]
    sum(out.sum() for out in outs).backward()
    assert x.grad is not None


def test_another_format_quantizes_again(quantizations):
    x = make_tensor((4, 512), dtype=BF16)
    with emulated():
        for codec in ("fp8_row", "fp8_block", "fp8_block", "fp8_row"):
            nn.functional.linear(x, weight_of(codec, (128, 512)))
    assert len(quantizations) == 3


@pytest.mark.parametrize(
    "write",
    [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.detach().add_(1), lambda x: x.view(-1).neg_()],
)
def test_an_input_written_in_place_is_quantized_again(write, quantizations):
    weight, x = weight_of("fp8_row", (16, 64)), make_tensor((4, 64), dtype=BF16)
    with emulated():
        nn.functional.linear(x, weight)
        write(x)
        got = nn.functional.linear(x, weight)
        assert_bit_equal(got, nn.functional.linear(x.clone(), weight))
    assert len(quantizations) == 3


@pytest.mark.parametrize("rows", [4, 7])
def test_other_memory_behind_an_input_is_quantized(rows, quantizations):
    weight, x = weight_of("fp8_row", (16, 64)), make_tensor((4, 64), dtype=BF16)
    other = make_tensor((rows, 64), dtype=BF16, seed=1)
    with emulated():
        nn.functional.linear(x, weight)
        x.data = other
        assert_bit_equal(nn.functional.linear(x, weight), nn.functional.linear(other, weight))


def test_recomputation_quantizes_what_it_made(quantizations):
    weight = weight_of("fp8_row", (64, 64))

    def block(x):
        y = x.tanh()
        return nn.functional.linear(y, weight) + nn.functional.linear(y, weight)

    x = make_tensor((4, 64), dtype=BF16).requires_grad_()
    with emulated():
        checkpoint(block, x, use_reentrant=False).sum().backward()
        again = x.detach().clone().requires_grad_()
        block(again).sum().backward()
    assert len(quantizations) == 3
    assert_bit_equal(x.grad, again.grad)


def test_the_shared_input_keeps_nothing_alive():
    class Value:
        pass

    x = torch.ones(3)
    value = shared(x, ("a",), Value)
    assert shared(x, ("a",), Value) is value
    assert shared(x, ("b",), Value) is not value  # and lets go of the other
    value = weakref.ref(shared(x, ("a",), Value))
    there = weakref.ref(x)
    del x
    gc.collect()
    assert there() is None
    assert value() is None


def test_a_new_tensor_in_the_place_of_an_old_one_is_not_taken_for_it():
    for i in range(50):
        x = torch.full((3,), float(i))
        assert shared(x, ("a",), lambda x=x: float(x[0])) == i
        del x


def test_parameters_are_not_shared(quantizations):
    x = nn.Parameter(make_tensor((4, 64), dtype=BF16))
    with emulated():
        for size in (16, 32):
            nn.functional.linear(x, weight_of("fp8_row", (size, 64)))
    assert len(quantizations) == 2


def test_inputs_whose_writes_nobody_counts_are_not_shared():
    with torch.inference_mode():
        x = torch.ones(3)
        assert shared(x, ("a",), object) is not shared(x, ("a",), object)
