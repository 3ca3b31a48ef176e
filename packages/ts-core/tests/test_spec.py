"""The block spec: of live models and of models without weights, and what is estimated from shapes."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import CheckpointError
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of, saved_values, spec_of


class Layer(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        return x + self.down_proj(self.up_proj(self.norm(x)).relu())


class Language(nn.Module):
    def __init__(self, hidden=16, inner=64, layers=3, tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    return TensorSpec(
        draw(st.sampled_from(["mlp.up_proj.weight", "attn.o_proj.weight", "norm.weight", "x"])),
        shape,
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.sampled_from(["matmul", "experts", "gather", "other"])),
        draw(st.floats(0.1, 1.0)),
        draw(st.booleans()),
        draw(st.sampled_from(["none", "nf4"])),
        draw(st.none() | st.integers(0, 1000)),
    )


@given(st.lists(st.tuples(st.text(max_size=5), st.lists(tensors(), max_size=4)), max_size=4), st.booleans())
def test_a_spec_survives_json(blocks, tied):
    spec = ModelSpec(
        tuple(block_of(name, own, 16, query=8) for name, own in blocks), tied, "here", ("a note",)
    )
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert spec.numel == sum(t.numel for _, own in blocks for t in own)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "blocks": [{"name": "a"}]}']
)
def test_broken_json_is_refused(text):
    with pytest.raises(CheckpointError, match=r"ModelSpec\.from_json"):
        ModelSpec.from_json(text)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_live_model_and_one_without_weights(device, tied):
    with torch.device(device):
        model = Language(tied=tied)
    spec = spec_of(model, source="a test")
    assert spec.numel == sum(p.numel() for p in model.parameters())
    assert spec.bytes == 4 * spec.numel
    assert spec.tied == tied
    assert [b.kind for b in spec.blocks if b.kind == "block"] == ["block"] * 3
    assert sum(b.numel for b in spec.blocks if b.kind == "head") == (0 if tied else 800)
    assert spec.hidden == 16
    assert spec.stack[0].name == "layers.0"
    assert {t.name: t.use for t in spec.stack[0].tensors} == {
        "up_proj.weight": "matmul",
        "down_proj.weight": "matmul",
        "norm.weight": "other",
        "norm.bias": "other",
    }
    assert next(b for b in spec.blocks if b.kind == "embedding").tensors[0].use == "gather"


def test_blocks_that_take_the_same_are_one_class():
    spec = spec_of(Language(layers=4))
    assert spec.classes() == [(0,), (1, 2, 3, 4), (5,), (6,)]
    frozen = Language(layers=4)
    frozen.layers[1].requires_grad_(False)
    assert (2,) in spec_of(frozen).classes()


def test_a_block_that_attends_less_far_is_of_the_same_class():
    weights = [TensorSpec("q_proj.weight", (8, 8), use="matmul")]
    near, far = (block_of(f"layers.{i}", weights, 8, query=8, window=w) for i, w in enumerate((16, 0)))
    assert ModelSpec((near, far)).classes() == [(0, 1)]


def test_what_is_stored_packed_counts_as_stored():
    packed = TensorSpec("w", (64, 64), "bfloat16", "matmul", codec="nf4", stored_bytes=2304)
    assert (packed.bytes, packed.nbytes, packed.numel) == (2304, 8192, 4096)
    assert BlockSpec("a", tensors=(packed,)).bytes == 2304


def test_a_packed_parameter_of_a_live_model():
    model = Language()
    for layer in model.layers:
        layer.up_proj.weight.requires_grad_(False)
        layer.up_proj.weight.codec = "nf4"
        layer.up_proj.weight.packed_bytes = 100
    found = {t.name: t for t in spec_of(model).stack[0].tensors}
    assert (found["up_proj.weight"].codec, found["up_proj.weight"].bytes) == ("nf4", 100)
    assert not found["up_proj.weight"].trained
    assert found["down_proj.weight"].codec == "none"


class Routed(nn.Module):
    def __init__(self, experts=8, hidden=16, inner=32):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.experts.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))


def test_a_token_takes_its_share_of_stacked_experts():
    model = nn.Module()
    model.layers = nn.ModuleList(Routed() for _ in range(2))
    model.config = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 16}
    found = {t.name: t for t in spec_of(model).stack[0].tensors}
    assert found["experts.gate_up_proj"].use == "experts"
    assert found["experts.gate_up_proj"].active == 0.25
    assert found["gate.weight"].active == 1.0
    assert spec_of(model).active == 2 * (8 * 16 + (8 * 64 * 16 + 8 * 16 * 32) / 4)


def saved_of(module, x):
    """Bytes that autograd really keeps beside parameters, each storage once."""
    kept = {}
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return sum(kept.values())


@pytest.mark.parametrize(("hidden", "inner"), [(64, 256), (128, 128)])
def test_what_autograd_saves_is_about_what_is_estimated(hidden, inner):
    layer = Layer(hidden, inner)
    names = {"up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner), "norm.weight": (hidden,)}
    weights = [TensorSpec(n, s, use="matmul" if len(s) == 2 else "other") for n, s in names.items()]
    real = saved_of(layer, torch.randn(32, hidden, requires_grad=True)) / 32 / 4
    # The estimate is of a norm that works in fp32 beside a 16-bit stream.
    assert real <= saved_values(weights, hidden) <= 2.5 * real


def test_a_norm_alone_and_nothing_at_all():
    assert saved_values([TensorSpec("norm.weight", (8,))], 8) == 24
    assert saved_values([], 8) == 128


def test_json_is_plain():
    data = json.loads(spec_of(Language()).to_json())
    assert data["format"] == 1
    assert data["blocks"][1]["tensors"][0]["shape"] == [64, 16]
