import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.blocks import BlockMap, block_map, find_blocks, parameter_bytes
from ts_core.errors import ArgumentTypeError, OptionError


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)


class Layer(nn.Module):
    """A layer that holds a stack of experts inside."""

    def __init__(self, width=8, experts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))


class OtherLayer(Layer):
    pass


class Model(nn.Module):
    def __init__(self, layers, width=8, vocab=32, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(layers)
        self.final = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def kinds(model, **options):
    return {group.name: group.kind for group in block_map(model, **options).groups}


def assert_complete(model, blocks=None):
    """Every parameter is in exactly one group, and all bytes are counted once."""
    groups = block_map(model, blocks).groups
    names = [name for group in groups for name in group.parameters]
    owned = [id(model.get_parameter(name)) for name in names]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    assert len(set(owned)) == len(owned)
    assert sum(group.bytes for group in groups) == sum(
        p.numel() * p.element_size() for p in model.parameters()
    )
    assert len({group.name for group in groups}) == len(groups)
    return groups


@given(st.integers(2, 6), st.integers(0, 5), st.booleans())
def test_layers_win_over_the_experts_inside_them(layers, experts, tied):
    model = Model([Layer(experts=experts) for _ in range(layers)], tied=tied)
    assert find_blocks(model) == list(model.layers)
    groups = assert_complete(model)
    assert [g.kind for g in groups] == ["embedding", *["block"] * layers, "norm", "head"]
    assert [g.modules for g in groups[1:-2]] == [(f"layers.{i}",) for i in range(layers)]
    if tied:
        assert groups[-1].parameters == ()
        assert groups[-1].bytes == 0
        assert groups[-1].tied_to == (("lm_head.weight", "embed.weight"),)


def test_hybrid_stacks_count_in_whole():
    alternating = Model([Layer(), OtherLayer(), Layer(), OtherLayer()])
    assert find_blocks(alternating) == list(alternating.layers)
    odd_first = Model([OtherLayer(), Layer(), Layer(), Layer()])
    assert find_blocks(odd_first) == list(odd_first.layers)


def test_a_list_of_different_things_is_no_stack():
    model = nn.Module()
    model.parts = nn.ModuleList([nn.Linear(9, 9), nn.LayerNorm(9), nn.Embedding(9, 9)])
    assert find_blocks(model) == []
    assert_complete(model)


def test_the_larger_of_two_stacks_is_taken():
    model = nn.Module()
    model.vision = Model([Layer(4) for _ in range(6)], width=4)
    model.text = Model([Layer(16) for _ in range(3)], width=16)
    assert find_blocks(model) == list(model.text.layers)
    groups = assert_complete(model)
    assert {"vision": "other", "text.embed": "embedding", "text.lm_head": "head"}.items() <= kinds(
        model
    ).items()
    assert [g.name for g in groups if g.kind == "block"] == [f"text.layers.{i}" for i in range(3)]


def test_plain_sequential():
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert find_blocks(mlp) == [mlp[0], mlp[2], mlp[4]]
    assert_complete(mlp)


def test_sequential_with_embedding_and_head_around_the_stack():
    model = nn.Sequential(
        nn.Embedding(500, 8), *(Layer() for _ in range(4)), nn.LayerNorm(8), nn.Linear(8, 500)
    )
    assert find_blocks(model) == list(model)[1:5]
    assert list(kinds(model).values()) == ["embedding", *["block"] * 4, "norm", "head"]


def test_sequential_of_unlike_sequentials_is_no_stack_but_alike_ones_are():
    body = nn.Sequential(*(Layer() for _ in range(3)))
    model = nn.Sequential(nn.Linear(8, 8), body, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2)))
    assert find_blocks(model) == list(body)
    alike = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert find_blocks(alike) == list(alike)


def test_none_found():
    for model in (
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3)),
        nn.ReLU(),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
    ):
        assert find_blocks(model) == []
        assert_complete(model)
    model = nn.Module()
    model.embed, model.fc, model.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
    assert kinds(model) == {"embed": "embedding", "fc": "other", "head": "head"}


def test_one_layer_used_many_times_is_no_stack():
    layer = Layer()
    model = Model([layer] * 4)
    assert find_blocks(model) == []
    assert_complete(model)


def test_a_layer_that_another_one_holds_is_part_of_that_one():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    holder = nn.Module()
    holder.shared = layers[0]
    model = nn.ModuleList([*layers, holder])
    assert find_blocks(model) == [layers[1], layers[2], holder]
    assert_complete(model)


def test_a_parametrized_layer_is_still_of_its_class():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer)
    model = nn.Sequential(*layers)
    assert find_blocks(model) == layers
    assert_complete(model)


def test_meta_lazy_and_frozen_parameters():
    with torch.device("meta"):
        model = Model([Layer() for _ in range(3)])
    assert len(find_blocks(model)) == 3
    assert_complete(model)
    lazy = nn.LazyLinear(4)
    assert parameter_bytes(lazy.weight) == 0
    model = Model([Layer() for _ in range(2)]).requires_grad_(False)
    model.extra = lazy
    assert [g.bytes for g in block_map(model).groups if g.name == "extra"] == [0]


def test_packed_bytes_count_as_stored():
    class Packed(torch.Tensor):
        packed_bytes = 7

    packed = torch.zeros(100).as_subclass(Packed)
    assert parameter_bytes(packed) == 7
    assert parameter_bytes(torch.zeros(3, dtype=torch.bfloat16)) == 6


def test_parameters_of_the_model_itself_and_of_modules_around_the_stack():
    model = Model([Layer() for _ in range(2)])
    model.token = nn.Parameter(torch.zeros(3))
    model.layers.register_parameter("scale", nn.Parameter(torch.zeros(2)))
    model.empty = None
    model.register_parameter("nothing", None)
    groups = {g.name: g for g in assert_complete(model)}
    assert groups["(root)"].parameters == ("token",)
    assert groups["layers"].parameters == ("layers.scale",)
    assert groups["layers"].kind == "other"


def test_kinds_by_name_by_class_and_by_position():
    class TokenEmbeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

    model = nn.Module()
    model.embeddings = TokenEmbeddings()
    model.projection = nn.Linear(8, 8)
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.last = RMSNorm()
    model.pre = nn.Linear(8, 8)
    model.decode = nn.Linear(8, 9)
    assert kinds(model) == {
        "embeddings": "embedding",
        "projection": "other",
        "layers.0": "block",
        "layers.1": "block",
        "last": "norm",
        "pre": "other",
        "decode": "head",
    }
    # The model's own word beats position.
    model.get_output_embeddings = lambda: model.pre
    assert kinds(model)["pre"] == "head"
    assert kinds(model)["decode"] == "other"

    def fails():
        raise NotImplementedError

    model.get_output_embeddings = fails
    assert kinds(model)["decode"] == "head"


def test_tied_parameters_belong_to_the_first_use():
    model = nn.Module()
    model.lm_head = nn.Linear(8, 32, bias=False)  # registered first, used last
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.embed = nn.Embedding(32, 8)
    model.embed.weight = model.lm_head.weight
    model.layers[1].attention.weight = model.layers[0].attention.weight
    assert_complete(model)
    mapped = block_map(model)
    owner = mapped.group_of("lm_head.weight")
    assert owner.name == "embed"
    assert owner == mapped.group_of("embed.weight")
    assert ("lm_head.weight", "embed.weight") in mapped.of_kind("head")[0].tied_to
    assert mapped.group_of("layers.1.attention.weight").name == "layers.0"
    assert mapped.blocks[1].tied_to == (("layers.1.attention.weight", "layers.0.attention.weight"),)
    with pytest.raises(OptionError, match="a parameter of the model"):
        mapped.group_of("nothing.weight")


def test_two_parameters_over_one_memory_are_counted_once():
    model = Model([Layer() for _ in range(2)])
    model.lm_head.weight = nn.Parameter(model.embed.weight.data)
    mapped = block_map(model)
    names = [n for g in mapped.groups for n in g.parameters]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    head = mapped.of_kind("head")[0]
    assert head.parameters == ("lm_head.weight",)
    assert head.bytes == 0
    assert head.tied_to == (("lm_head.weight", "embed.weight"),)


def test_modules_under_two_names_and_cycles():
    model = Model([Layer() for _ in range(3)])
    model.alias = model.layers
    model.second = model.layers[1]
    model.layers[2].attention = model.layers[0].attention
    model.layers[0].friend = nn.Module()
    assert find_blocks(model) == list(model.layers)
    groups = {g.name: g for g in assert_complete(model)}
    assert ("second.attention.weight", "layers.1.attention.weight") in groups["layers.1"].tied_to
    assert ("layers.2.attention.bias", "layers.0.attention.bias") in groups["layers.2"].tied_to
    loop = Model([Layer() for _ in range(2)])
    loop.layers[0].parent = nn.Module()
    loop.layers[0].parent.child = loop.layers[0]
    assert_complete(loop)


def test_given_blocks_are_used_in_the_given_order():
    model = Model([Layer() for _ in range(4)])
    chosen = [model.layers[2], model.layers[0]]
    assert find_blocks(model, chosen) == chosen
    assert find_blocks(model, iter(chosen)) == chosen
    assert find_blocks(model, model.layers) == list(model.layers)
    assert find_blocks(model, []) == []
    assert [g.name for g in block_map(model, chosen).blocks] == ["layers.2", "layers.0"]
    assert_complete(model, chosen)
    assert [g.kind for g in block_map(model, [model]).groups] == ["block"]
    assert_complete(model, [model])


def test_bad_blocks_are_refused():
    model = Model([Layer(experts=2) for _ in range(3)])
    layer = model.layers[0]
    for blocks, expected in (
        ([Layer()], "a module of this model"),
        (["layers.0"], "a module of this model"),
        ("layers", "a list of modules or None"),
        (3, "a list of modules or None"),
        (layer, "a list of modules or None"),
        ({"a": layer}, "a list of modules or None"),
        ([layer, layer], "modules that do not overlap"),
        ([layer, layer.attention], "modules that do not overlap"),
        ([layer.attention, layer], "modules that do not overlap"),
        ([model.layers[1], model], "modules that do not overlap"),
    ):
        with pytest.raises(OptionError, match=expected):
            find_blocks(model, blocks)
    for function in (find_blocks, block_map):
        with pytest.raises(ArgumentTypeError, match=r"model: expected an nn\.Module"):
            function("model")


def test_blocks_may_share_a_module():
    model = Model([Layer() for _ in range(2)])
    model.layers[1].attention = model.layers[0].attention
    assert find_blocks(model, list(model.layers)) == list(model.layers)
    assert_complete(model, list(model.layers))


LEAVES = st.sampled_from(["linear", "norm", "embedding", "relu", "layer", "parameter", "shared", "tied"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(
        st.sampled_from(["module", "list", "sequential", "dict"]),
        st.lists(inner, max_size=4),
        st.integers(1, 3),
    ),
    max_leaves=20,
)


def build(spec, made):
    """Build a module tree; `made` holds the linear layers so far, for sharing and tying."""
    if isinstance(spec, tuple):
        kind, inner, times = spec
        children = [build(part, made) for _ in range(times) for part in inner]
        if kind == "list":
            return nn.ModuleList(children)
        if kind == "sequential":
            return nn.Sequential(*children)
        if kind == "dict":
            return nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
        module = nn.Module()
        for index, child in enumerate(children):
            module.add_module(f"m{index}", child)
        return module
    if spec == "shared" and made:
        return made[0]
    if spec == "parameter":
        module = nn.Module()
        module.register_parameter("p", nn.Parameter(torch.zeros(3)))
        return module
    if spec in ("norm", "embedding", "relu", "layer"):
        return {
            "norm": nn.LayerNorm,
            "embedding": lambda n: nn.Embedding(5, n),
            "relu": lambda n: nn.ReLU(),
        }.get(spec, Layer)(4)
    linear = nn.Linear(4, 4)
    if spec == "tied" and made:
        linear.weight = made[-1].weight
    made.append(linear)
    return linear


@given(TREES, st.data())
def test_every_parameter_of_any_tree_is_in_exactly_one_group(spec, data):
    model = build(("module", [spec, "linear"], 1), [])
    groups = assert_complete(model)
    found = find_blocks(model)
    paths = {id(m): name for name, m in model.named_modules()}
    assert [g.name for g in groups if g.kind == "block"] == [paths[id(block)] for block in found]
    assert all(next(block.parameters(), None) is not None for block in found)
    assert find_blocks(model, found) == found
    inside = [{id(m) for m in block.modules()} for block in found]
    assert not any(
        id(b) in modules for i, b in enumerate(found) for j, modules in enumerate(inside) if i != j
    )
    # All names of all parameters lead to their owner.
    mapped = BlockMap(groups)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = mapped.group_of(name)
        assert any(model.get_parameter(n) is parameter for n in owner.parameters)
    chosen = data.draw(st.lists(st.sampled_from(list(model.children())), unique_by=id, max_size=2))
    if not any(a is not b and any(a is m for m in b.modules()) for a in chosen for b in chosen):
        assert_complete(model, chosen)


class Packed(nn.Parameter):
    """What a codec makes of a parameter: the shape of its values, few bytes."""

    packed_bytes = 16


class BitsAndBytes(nn.Parameter):
    """Presents packed bytes, and keeps the shape of the values beside."""

    quant_state: object


class BufferLinear(nn.Module):
    """A linear layer whose packed weight is no parameter."""

    def __init__(self, width):
        super().__init__()
        self.in_features = self.out_features = width
        self.register_buffer("qweight", torch.zeros(width * width // 8, dtype=torch.int32))
        self.bias = nn.Parameter(torch.zeros(width))


def packed_layer(form, width):
    layer = Layer(width)
    weight = layer.attention.weight.detach()
    if form == "codec":
        layer.attention.weight = Packed(weight, requires_grad=False)
    elif form == "bytes":
        layer.attention.weight = BitsAndBytes(
            weight.new_zeros((width * width // 2, 1), dtype=torch.uint8), False
        )
        layer.attention.weight.quant_state = type("State", (), {"shape": weight.shape})
    elif form == "buffer":
        layer.attention = BufferLinear(width)
    return layer


@pytest.mark.parametrize("form", ["none", "codec", "bytes", "buffer"])
@pytest.mark.parametrize("vision_first", [True, False])
def test_a_packed_text_stack_wins_over_a_smaller_plain_vision_stack(form, vision_first):
    text = Model([packed_layer(form, 32) for _ in range(2)], width=32)
    vision = Model([OtherLayer(24) for _ in range(2)], width=24)
    parts = [("vision", vision), ("text", text)]
    model = nn.ModuleDict(dict(parts if vision_first else reversed(parts)))
    assert find_blocks(model) == list(text.layers)


def test_a_packed_head_is_a_head():
    model = Model([Layer() for _ in range(2)])
    plain = kinds(model)
    model.lm_head.weight = Packed(model.lm_head.weight.detach(), requires_grad=False)
    assert kinds(model) == plain
    assert plain["lm_head"] == "head"
