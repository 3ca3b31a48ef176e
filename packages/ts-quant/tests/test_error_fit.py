"""The low-rank fit of the quantization error, and adapters that start from it."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import ArgumentError, CheckpointError
from ts_core.testing import assert_bit_equal, seeded
from ts_quant import (
    dequantize,
    from_safetensors_dict,
    init_lora_from_error,
    quantize,
    quantize_model,
    to_safetensors_dict,
)
from ts_quant.error_fit import fits, low_rank, quantize_with_error


def gaussian(*shape, seed=0, dtype=torch.float32):
    with seeded(seed):
        return torch.randn(shape).to(dtype)


def lost(weight, made):
    """Frobenius norm of W - Q - BA, in float64."""
    rest = weight.double() - dequantize(made).double()
    if made.error_factors is not None:
        rest = rest - made.error_b.double() @ made.error_a.double()
    return float(rest.norm())


def best_possible(weight, made, rank):
    """What the best approximation of the error leaves, from the tail of its singular values."""
    values = torch.linalg.svdvals(weight.double() - dequantize(made).double())
    return float(values[rank:].norm())


matrices = {
    "rows": st.integers(1, 70),
    "columns": st.integers(1, 70),
    "rank": st.integers(1, 12),
    "codec": st.sampled_from(["nf4", "int8"]),
    "seed": st.integers(0, 2**31),
}


@given(**matrices)
def test_low_rank_is_the_truncated_svd(rows, columns, rank, codec, seed):
    matrix = gaussian(rows, columns, seed=seed)
    rank = min(rank, rows, columns)
    b, a = low_rank(matrix, rank)
    assert b.shape == (rows, rank)
    assert a.shape == (rank, columns)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    want = float(s[rank:].norm())
    got = float((matrix.double() - b.double() @ a.double()).norm())
    assert got == pytest.approx(want, rel=1e-5, abs=1e-5 * float(s[0]))
    if rank == min(rows, columns) or s[rank - 1] > 1.05 * s[rank]:
        torch.testing.assert_close(
            b.double() @ a.double(), (u * s)[:, :rank] @ v[:rank], rtol=1e-4, atol=1e-4
        )


def test_low_rank_of_zeros():
    b, a = low_rank(torch.zeros(6, 9), 3)
    assert not (b @ a).any()
    assert bool(torch.isfinite(a).all())


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    iters=st.integers(1, 4),
    block_size=st.sampled_from([2, 16, 64]),
    **matrices,
)
def test_closer_than_the_packed_weight_alone(rows, columns, rank, codec, seed, dtype, iters, block_size):
    weight = gaussian(rows, columns, seed=seed, dtype=dtype)
    plain = quantize(weight, codec, block_size=block_size)
    made = quantize_with_error(weight, codec, rank, iters, block_size=block_size)
    if rank * (rows + columns) >= rows * columns:
        assert made.error_factors is None
        assert torch.equal(made, plain)
        return
    assert made.error_a.shape == (rank, columns)
    assert made.error_b.shape == (rows, rank)
    assert made.error_a.dtype == made.error_b.dtype == made.dtype == dtype
    assert lost(weight, made) <= lost(weight, plain) * (1 + 1e-6)
    if dtype is torch.float32:
        assert lost(weight, made) == pytest.approx(best_possible(weight, made, rank), rel=1e-3)
        assert lost(weight, made) < lost(weight, plain)


@given(**matrices)
def test_more_iterations_never_make_it_worse(rows, columns, rank, codec, seed):
    weight = gaussian(rows, columns, seed=seed)
    errors = [lost(weight, quantize_with_error(weight, codec, rank, iters)) for iters in (1, 2, 3, 5)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(errors))


def test_iterations_help():
    weight = gaussian(96, 64)
    once, often = (lost(weight, quantize_with_error(weight, "nf4", 8, n)) for n in (1, 5))
    assert often < 0.97 * once


@given(**matrices)
def test_rank_zero_and_one_iteration_leave_the_packed_bytes(rows, columns, rank, codec, seed):
    weight = gaussian(rows, columns, seed=seed)
    plain = quantize(weight, codec)
    for made in (quantize_with_error(weight, codec, 0, 3), quantize_with_error(weight, codec, rank, 1)):
        for name, part in plain.packed.items():
            assert_bit_equal(made.packed[name], part)
    assert quantize_with_error(weight, codec, 0, 3).error_factors is None


@pytest.mark.parametrize("shape", [(64,), (), (3, 32, 32), (2, 2), (1, 64), (0, 8)])
def test_other_shapes_are_left_alone(shape):
    assert not fits(torch.ones(shape), 4)
    assert quantize_with_error(torch.ones(shape), "nf4", 4).error_factors is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_are_refused(value):
    weight = gaussian(32, 32)
    weight[3, 4] = value
    with pytest.raises(ArgumentError, match=r"weight.*finite"):
        quantize_with_error(weight, "nf4", 2, name="weight")


def test_largest_values_of_a_dtype_stay_finite():
    weight = gaussian(32, 48).sign().to(torch.float16) * torch.finfo(torch.float16).max
    made = quantize_with_error(weight, "nf4", 4, 4)
    assert bool(dequantize(made).isfinite().all())
    assert bool(made.error_b.isfinite().all())


@pytest.fixture
def made():
    return quantize_with_error(gaussian(48, 32), "nf4", 4)


def same(a, b):
    assert_bit_equal(a.error_a, b.error_a)
    assert_bit_equal(a.error_b, b.error_b)
    assert type(a.error_a) is type(a.error_b) is torch.Tensor
    return torch.equal(a, b)


def test_factors_are_no_part_of_the_value(made):
    plain = quantize(gaussian(48, 32))
    assert_bit_equal(dequantize(made), dequantize(plain))
    assert made.packed_bytes == plain.packed_bytes
    assert set(made.packed) == set(plain.packed)
    x = gaussian(5, 32, seed=1)
    assert_bit_equal(nn.functional.linear(x, made), nn.functional.linear(x, plain))


def test_factors_stay_with_the_tensor(made, tmp_path):
    layer = nn.Linear(32, 48, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(made, requires_grad=False)
    torch.save(layer.state_dict(), tmp_path / "a.pt")
    saved = torch.load(tmp_path / "a.pt", weights_only=True)["weight"]
    for other in (
        made.detach(),
        made.clone(),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        layer.weight,
        copy.deepcopy(layer).weight,
        layer.state_dict()["weight"],
        saved,
        from_safetensors_dict("w", *to_safetensors_dict("w", made)),
    ):
        assert same(other, made)
    assert copy.deepcopy(made).error_a.data_ptr() != made.error_a.data_ptr()
    moved = layer.to("meta").weight
    assert moved.error_a.is_meta
    assert moved.error_b.is_meta
    assert made[:10].error_factors is None
    assert made.view(32, 48).error_factors is None


def test_loading_bytes_takes_their_factors_along(made):
    layer = nn.Linear(32, 48, bias=False).requires_grad_(False)
    other = quantize_with_error(gaussian(48, 32, seed=9), "nf4", 6)
    layer.weight = nn.Parameter(other, requires_grad=False)
    layer.load_state_dict({"weight": made})
    assert same(layer.weight, made)
    assert layer.weight.error_a.data_ptr() != made.error_a.data_ptr()
    layer.load_state_dict({"weight": quantize(gaussian(48, 32))})
    assert layer.weight.error_factors is None


def test_compiles(made):
    layer = nn.Linear(32, 48, bias=False).requires_grad_(False)
    layer.weight = nn.Parameter(made, requires_grad=False)
    x = gaussian(3, 32)
    assert_bit_equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(4, 31), torch.ones(48, 4)),
        (torch.ones(4, 32), torch.ones(48, 5)),
        (torch.ones(4, 32), torch.ones(47, 4)),
        (torch.ones(4, 32).int(), torch.ones(48, 4)),
        (torch.ones(32), torch.ones(48)),
        ([1.0], None),
    ],
)
def test_factors_that_do_not_fit(made, a, b):
    with pytest.raises(ArgumentError, match="rank"):
        made.with_error(a, b)


def test_damaged_files(made):
    tensors, metadata = to_safetensors_dict("w", made)
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        from_safetensors_dict("w", {k: t for k, t in tensors.items() if k != "w.error_a"}, metadata)
    with pytest.raises(CheckpointError, match="rank"):
        from_safetensors_dict("w", tensors | {"w.error_a": torch.ones(3, 3)}, metadata)


def test_quantize_model_keeps_them():
    with seeded(0):
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3))).requires_grad_(False)
    plain, weight = copy.deepcopy(model), model[0].weight.clone()
    report, less = quantize_model(model, error_rank=4, error_iters=3), quantize_model(plain)
    assert report["tensors"] == less["tensors"] == 3
    assert report["kept_precise"] == 0
    assert report["bytes_after"] - less["bytes_after"] == 3 * 4 * 4 * (48 + 48)
    assert model[0].weight.error_a.shape == (4, 48)
    assert lost(weight, model[0].weight) < lost(weight, plain[0].weight)


def test_meta_weights_have_none():
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3))).requires_grad_(False).to("meta")
    assert quantize_model(model, error_rank=4, keep_precise=0.5)["tensors"] == 3
    assert model[0].weight.error_factors is None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 48)}) for _ in range(2))

    def forward(self, x):
        return sum(layer["up"](x) for layer in self.layers)


def adapted(rank=4, error_rank=4, seed=0, **options):
    """Return a model with LoRA over packed weights, and the weights before."""
    peft = pytest.importorskip("peft")
    with seeded(seed):
        model = Net().requires_grad_(False)
    before = [layer["up"].weight.clone() for layer in model.layers]
    quantize_model(model, error_rank=error_rank)
    config = peft.LoraConfig(r=rank, lora_alpha=10, target_modules=["up"], **options)
    return peft.get_peft_model(model, config), before


@given(rank=st.integers(1, 9), error_rank=st.integers(1, 9), rslora=st.booleans(), seed=st.integers(0, 2**31))
def test_a_layer_begins_at_the_corrected_weight(rank, error_rank, rslora, seed):
    model, _ = adapted(rank, error_rank, seed, use_rslora=rslora)
    assert init_lora_from_error(model) == 2
    x = gaussian(7, 32, seed=seed, dtype=torch.float64)
    want = 0
    for layer in model.base_model.model.layers:
        base = layer["up"].base_layer
        weight, r = base.weight, min(rank, error_rank)
        corrected = dequantize(weight).double()
        corrected += weight.error_b[:, :r].double() @ weight.error_a[:r].double()
        want = want + x @ corrected.T + base.bias.double()
        assert not layer["up"].lora_B["default"].weight[:, r:].any()
        if rank > r:
            assert layer["up"].lora_A["default"].weight[r:].any()
    torch.testing.assert_close(model(x.float()).double(), want, rtol=1e-4, atol=1e-5)


def test_the_adapted_layer_is_closer_to_the_original():
    model, before = adapted(8, 8)
    layers = [layer["up"] for layer in model.base_model.model.layers]
    x = gaussian(256, 32)
    exact = [x @ w.T + layer.base_layer.bias for w, layer in zip(before, layers, strict=True)]
    off = [float((layer(x) - y).detach().norm()) for layer, y in zip(layers, exact, strict=True)]
    init_lora_from_error(model)
    on = [float((layer(x) - y).detach().norm()) for layer, y in zip(layers, exact, strict=True)]
    assert all(b < 0.9 * a for a, b in zip(off, on, strict=True))


def test_every_adapter_is_set_with_its_own_scaling():
    peft = pytest.importorskip("peft")
    model, _ = adapted(4)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=1, target_modules=["up"]))
    assert init_lora_from_error(model) == 4
    layer = model.base_model.model.layers[1]["up"]
    fit = layer.base_layer.weight
    for name, r in (("default", 4), ("second", 2)):
        delta = layer.lora_B[name].weight @ layer.lora_A[name].weight * layer.scaling[name]
        torch.testing.assert_close(delta, fit.error_b[:, :r] @ fit.error_a[:r])


def test_trained_adapters_are_left_alone_where_asked():
    model, _ = adapted(init_lora_weights=False)
    layer = model.base_model.model.layers[0]["up"]
    nn.init.zeros_(layer.lora_B["default"].weight)
    trained = model.base_model.model.layers[1]["up"].lora_B["default"].weight
    before = trained.detach().clone()
    assert init_lora_from_error(model, only_fresh=True) == 1
    assert_bit_equal(trained.detach(), before)


@pytest.mark.parametrize("options", [{"error_rank": 0}, {"use_dora": True}])
def test_layers_left_alone(options):
    model, _ = adapted(**options)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    assert init_lora_from_error(model) == 0
    for name, p in model.named_parameters():
        if name in before:
            assert_bit_equal(p.detach(), before[name])


def test_without_adapters():
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3))).requires_grad_(False)
    quantize_model(model, error_rank=4)
    assert init_lora_from_error(model) == 0


def test_transposed_weights_of_conv1d():
    peft = pytest.importorskip("peft")
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    with seeded(0):
        model = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"up": conv(48, 32)}) for _ in range(2))}
        )
    model.requires_grad_(False)
    quantize_model(model, error_rank=4)
    config = peft.LoraConfig(r=4, target_modules=["up"], fan_in_fan_out=True)
    layer = peft.inject_adapter_in_model(config, model)["layers"][0]["up"]
    assert init_lora_from_error(model) == 2
    weight, x = layer.base_layer.weight, gaussian(5, 32)
    want = x @ (dequantize(weight) + weight.error_b @ weight.error_a) + layer.base_layer.bias
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
