"""`quantize_model`: what is packed, what is left alone, and what a failure leaves behind."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import ArgumentError, ArgumentTypeError, DoesNotFitError, OptionError
from ts_core.testing import assert_bit_equal, seeded
from ts_quant import QuantizedTensor, codecs, dequantize, dequantize_model, quantize, quantize_model
from ts_quant.model import quantizable_weights


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.experts = nn.Parameter(torch.randn(3, width, width))
        self.positions = nn.Embedding(8, width)
        self.lora_A = nn.Linear(width, 4, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()) + torch.matmul(x, self.experts[1])


class Model(nn.Module):
    def __init__(self, layers=3, width=32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model():
    with seeded(0):
        return Model().requires_grad_(False)


def packed_names(model):
    return {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


WEIGHTS = {f"layers.{i}.{name}" for i in range(3) for name in ("up.weight", "down.weight", "experts")}


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_packs_the_frozen_block_weights(model, codec):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = quantize_model(model, codec, block_size=32)
    assert packed_names(model) == WEIGHTS
    packed = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
    assert report == {
        "tensors": 9,
        "kept_precise": 0,
        "bytes_before": sum(4 * before[name].numel() for name in WEIGHTS),
        "bytes_after": sum(p.packed_bytes for p in packed),
    }
    for name, parameter in model.named_parameters():
        want = quantize(before[name], codec, block_size=32).dequantize() if name in WEIGHTS else before[name]
        assert isinstance(parameter, nn.Parameter)
        assert_bit_equal((parameter.dequantize() if name in WEIGHTS else parameter).detach(), want)


def test_runs_as_the_decoded_model(model):
    quantize_model(model)
    tokens = torch.arange(12).reshape(2, 6)
    got = model(tokens)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, QuantizedTensor):
                module._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    assert_bit_equal(got, model(tokens))


def test_trained_weights_are_left_alone(model):
    model.layers[1].requires_grad_(True)
    quantize_model(model)
    assert packed_names(model) == {name for name in WEIGHTS if not name.startswith("layers.1.")}


def test_a_model_without_frozen_weights_is_not_passed_over_in_silence(model, caplog):
    model.requires_grad_(True)
    assert quantize_model(model, "int8")["tensors"] == 0
    assert "requires_grad_(False)" in caplog.text


def test_other_dtypes_are_left_alone(model):
    model.layers[0].double()
    quantize_model(model)
    assert not {name for name in packed_names(model) if name.startswith("layers.0.")}


def test_weights_tied_outside_the_blocks_are_left_alone(model):
    model.tail = nn.Linear(32, 64)
    model.tail.weight = model.layers[0].up.weight
    # The same memory under another Parameter is tied too.
    model.spare = nn.Parameter(model.layers[1].down.weight.detach().view(-1), requires_grad=False)
    quantize_model(model)
    assert packed_names(model) == WEIGHTS - {"layers.0.up.weight", "layers.1.down.weight"}
    assert model.tail.weight is model.layers[0].up.weight


def test_shared_weights_are_packed_once_and_stay_shared(model):
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[2].down = model.layers[0].down
    report = quantize_model(model)
    assert report["tensors"] == 7
    assert model.layers[2].up.weight is model.layers[0].up.weight
    assert isinstance(model.layers[2].up.weight, QuantizedTensor)


def test_calling_again_packs_nothing_more(model):
    quantize_model(model)
    before = {name: id(p) for name, p in model.named_parameters()}
    assert quantize_model(model, "int8")["tensors"] == 0
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_named_blocks(model):
    quantize_model(model, blocks=[model.layers[1]])
    assert packed_names(model) == {name for name in WEIGHTS if name.startswith("layers.1.")}


def test_a_model_without_blocks_is_left_alone():
    assert quantize_model(nn.Linear(4, 4).requires_grad_(False))["tensors"] == 0


def test_meta_weights(model):
    quantize_model(model.to("meta"))
    assert packed_names(model) == WEIGHTS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_weight_leaves_the_model_as_it_was(model, value):
    model.layers[2].down.weight[3, 3] = value
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ArgumentError, match=r"layers\.2\.down\.weight: expected finite"):
        quantize_model(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_running_out_of_memory_says_how_far_it_came(model, monkeypatch):
    encode = codecs.BlockCodec.encode
    calls = []

    def third_fails(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return encode(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(codecs.BlockCodec, "encode", third_fails)
        with pytest.raises(DoesNotFitError, match="2 of 9 weights are packed"):
            quantize_model(model)
    assert len(packed_names(model)) == 2
    model(torch.arange(6).reshape(1, 6))
    assert quantize_model(model)["tensors"] == 7


def test_frees_each_weight_before_the_next(model, monkeypatch):
    encode = codecs.BlockCodec.encode
    seen, alive = [], []

    def watch(self, tensor, *args, **kwargs):
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(tensor.untyped_storage()))
        return encode(self, tensor, *args, **kwargs)

    monkeypatch.setattr(codecs.BlockCodec, "encode", watch)
    originals = [weakref.ref(p) for name, p in model.named_parameters() if name in WEIGHTS]
    quantize_model(model)
    assert [ref() for ref in originals] == [None] * 9
    assert max(alive) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "fp9"},
        {"quantize": "int4"},
        {"quantize": None},
        {"block_size": 0},
        {"block_size": 33},
        {"block_size": True},
        {"pin_budget": -1},
        {"pin_budget": "much"},
        {"keep_precise": 1},
        {"keep_precise": -1},
        {"keep_precise": 0.51},
        {"keep_precise": "some"},
        {"keep_precise": float("nan")},
        {"error_rank": -1},
        {"error_rank": None},
        {"error_iters": 0},
        {"double_quant": "yes"},
    ],
)
def test_rejected_options(model, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        quantize_model(model, **options)
    assert not packed_names(model)


@pytest.mark.parametrize("pin_budget", [None, 0, 1 << 20, "1GiB"])
def test_accepted_pin_budgets(model, pin_budget):
    assert quantize_model(model, pin_budget=pin_budget)["tensors"] == 9


def test_no_module():
    with pytest.raises(ArgumentTypeError, match=r"nn\.Module"):
        quantize_model([nn.Linear(2, 2)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_page_locks_up_to_the_budget(model):
    quantize_model(model, block_size=32, pin_budget=3000)
    pinned = [p for p in model.parameters() if isinstance(p, QuantizedTensor) and p.is_pinned()]
    assert 0 < sum(p.packed_bytes for p in pinned) <= 3000


@given(
    layers=st.integers(2, 3),
    width=st.sampled_from([2, 6, 16]),
    codec=st.sampled_from(["nf4", "int8"]),
    block_size=st.sampled_from([2, 6, 64]),
)
def test_any_size(layers, width, codec, block_size):
    model = Model(layers, width).requires_grad_(False)
    report = quantize_model(model, codec, block_size=block_size)
    assert report["tensors"] == 3 * layers
    assert bool(model(torch.arange(4).reshape(1, 4)).isfinite().all())


@given(
    codec=st.sampled_from(["int8", "nf4"]),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dequantize_model_leaves_what_the_model_computed_with(codec, rows, columns, shared, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, columns), nn.Linear(columns, rows))
    model.requires_grad_(False)
    if shared:
        model[2].weight = model[0].weight
    expected = {name: dequantize(quantize(p, codec)) for name, p in model.named_parameters() if p.dim() > 1}
    packed = quantize_model(model, codec, blocks=list(model))["tensors"]
    assert packed == len(expected) == (2 if shared else 3)
    assert dequantize_model(model) == packed
    assert dequantize_model(model) == 0
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        if p.dim() > 1:
            assert torch.equal(p, expected[name])
    assert (model[2].weight is model[0].weight) == shared


def test_quantizable_weights_are_those_that_quantize_model_packs():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(False)
    found = quantizable_weights(model, list(model))
    assert [weight.name for weight in found] == ["0.weight"]
    assert found[0].parameter is model[0].weight
