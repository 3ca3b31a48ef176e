"""`keep_precise`, `error_rank`, `double_quant` of `wrap()`: what is packed, and where adapters start."""

import copy

import pytest
import torch
from torch import nn

import trainstream
from ts_core.errors import OptionError
from ts_core.testing import assert_bit_equal, seeded
from ts_quant import Meta, QuantizedTensor, dequantize, quantize, quantize_model
from ts_quant.error_fit import quantize_with_error

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def frozen():
    with seeded(0):
        model = Model().requires_grad_(False)
    model.layers[1].up.weight[:, ::8] *= 30
    return model


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=10, target_modules=["up", "down"], **options)
    return peft.get_peft_model(model, config)


def events(model):
    return trainstream.memory_report(model)["events"]


def packed(model):
    return [p for p in model.parameters() if isinstance(p, QuantizedTensor)]


PLACES = [
    {},
    {"param_offload": True},
    {"param_offload": True, "ram_budget": "4GiB", "recompute": True},
]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("iters", [1, 3])
def test_adapters_start_from_the_error(places, iters, tmp_path):
    model = adapted(frozen())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer = trainstream.wrap(
        model,
        quantize="nf4",
        error_rank=4,
        error_iters=iters,
        device="cpu",
        disk_offload=str(tmp_path),
        **places,
    )
    assert "error fit: 6 adapters start from it" in events(model)
    with seeded(1):
        x = torch.randn(2, WIDTH)
    exact = Model().requires_grad_(False)
    for i, layer in enumerate(model.base_model.model.layers):
        for name in ("up", "down"):
            made = getattr(layer, name)
            own = before[f"base_model.model.layers.{i}.{name}.base_layer.weight"]
            want = quantize_with_error(own, "nf4", 4, iters)
            base = made.base_layer.weight
            assert_bit_equal(base.error_a, want.error_a)
            assert_bit_equal(base.error_b, want.error_b)
            assert_bit_equal(dequantize(base), dequantize(want))
            corrected = dequantize(base) + want.error_b @ want.error_a
            assert float((corrected - own).norm()) < float((dequantize(quantize(own)) - own).norm())
            getattr(exact.layers[i], name).weight.copy_(corrected)
            getattr(exact.layers[i], name).bias.copy_(made.base_layer.bias)
    exact.head = model.base_model.model.head
    torch.testing.assert_close(model(x), exact(x), rtol=1e-4, atol=1e-4)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trainstream.unwrap(model)
    assert len(packed(model)) == 6
    assert all(p.error_a.shape[0] == 4 for p in packed(model))
    assert bool(model(x).isfinite().all())


def test_a_model_quantized_earlier():
    model = frozen()
    quantize_model(model, "int8", error_rank=4)
    model, _ = trainstream.wrap(adapted(model))
    assert "error fit: 6 adapters start from it" in events(model)
    layer = model.base_model.model.layers[0].up
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    weight = layer.base_layer.weight
    torch.testing.assert_close(delta, weight.error_b @ weight.error_a)


def test_trained_adapters_keep_their_values():
    model = adapted(frozen(), init_lora_weights=False)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    model, _ = trainstream.wrap(model, quantize="nf4", error_rank=4)
    assert not any("adapters start" in line for line in events(model))
    for name, p in model.named_parameters():
        if name in before:
            assert_bit_equal(p.detach(), before[name])


@pytest.mark.parametrize("places", PLACES[:2])
def test_the_worst_weights_move_up(places):
    model = frozen()
    same = copy.deepcopy(model)
    report = quantize_model(same, keep_precise=0.2)
    model.head.requires_grad_(True)
    model, _ = trainstream.wrap(model, quantize="nf4", keep_precise=0.2, **places)
    assert report["kept_precise"] == 1
    assert "keep_precise=0.2: 1 of 6 weights are int8, by measured error" in events(model)
    for p, q in zip(packed(model), packed(same), strict=True):
        assert p.codec == q.codec
        assert_bit_equal(p.dequantize(), q.dequantize())
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    assert_bit_equal(trainstream.unwrap(model)(x), same(x))


def test_what_decides_bits_is_in_the_plan():
    model, _ = trainstream.wrap(frozen(), quantize="nf4", keep_precise=0.2, error_rank=4, error_iters=2)
    numerics = model._trainstream_session.plan.numerics
    assert (numerics.quantize, numerics.keep_precise) == ("nf4", 0.2)
    assert (numerics.error_rank, numerics.error_iters) == (4, 2)


@pytest.mark.parametrize("codec", ["int8", "none"])
def test_ignored_where_there_is_nothing_above(codec):
    model, _ = trainstream.wrap(frozen(), quantize=codec, keep_precise=True)
    assert "keep_precise=0.05 ignored: nothing is packed as nf4 or nvfp4" in events(model)


def test_a_rank_without_packing_is_ignored():
    model, _ = trainstream.wrap(frozen(), quantize="none", error_rank=4)
    assert "error_rank=4 ignored: no weight is packed here" in events(model)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_scales_are_quantized_too(places, codec, tmp_path):
    model = frozen()
    same = copy.deepcopy(model)
    report = quantize_model(same, codec, double_quant=True)
    plain = quantize_model(copy.deepcopy(model), codec)["bytes_after"]
    model.head.requires_grad_(True)
    where = {**places, "disk_offload": str(tmp_path)}
    model, _ = trainstream.wrap(model, quantize=codec, double_quant=True, device="cpu", **where)
    assert "double_quant=True: scales are quantized too" in events(model)
    assert model._trainstream_session.plan.numerics.double_quant
    for p, q in zip(packed(model), packed(same), strict=True):
        assert p.meta == q.meta == Meta.make(64, double_quant=True)
        for name, part in q.packed.items():
            assert_bit_equal(p.packed[name], part)
    assert sum(p.packed_bytes for p in packed(model)) == report["bytes_after"] != plain
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    assert_bit_equal(trainstream.unwrap(model)(x), same(x))


def test_quantized_scales_and_a_weight_moved_up():
    model = frozen()
    same = copy.deepcopy(model)
    report = quantize_model(same, keep_precise=0.2, double_quant=True)
    model, _ = trainstream.wrap(model, quantize="nf4", keep_precise=0.2, double_quant=True)
    assert [(p.codec, p.meta) for p in packed(model)] == [(p.codec, p.meta) for p in packed(same)]
    # In matrices as small as these the map of nf4 costs more than int8 codes do.
    assert report["kept_precise"] == sum(p.codec == "int8" for p in packed(model)) > 1


def test_no_scales_without_a_codec():
    model, _ = trainstream.wrap(frozen(), quantize="none", double_quant=True)
    assert "double_quant=True ignored: no weight is packed here" in events(model)


@pytest.mark.parametrize("codec", ["nvfp4", "mxfp8"])
def test_formats_without_such_scales_refuse(codec):
    model = frozen()
    with pytest.raises(OptionError, match="double_quant"):
        trainstream.wrap(model, quantize=codec, double_quant=True)
    assert not packed(model)
