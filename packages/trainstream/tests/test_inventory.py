"""What a model holds, group by group: which Parameters can leave the device, and what each group takes."""

import copy

import peft
import pytest
import torch
from conftest import tiny_llama, toy
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstream
from trainstream import _decide, _wrap
from trainstream._budget import Limits, host_used
from trainstream._inventory import Inventory, reserve_for
from ts_core.blocks import block_map, find_blocks
from ts_core.planner import Budgets, place
from ts_optim import OffloadAdamW

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
# Of the tiny Llama: q and o 32 x 32, k and v 16 x 32, gate, up and down 48 x 32, two norms of 32.
MATRICES = 2 * 1024 + 2 * 512 + 3 * 1536
NORMS = 2 * 32
BLOCK = MATRICES + NORMS
TABLE = 97 * 32
SLOT_FP32 = 4 * MATRICES + 2 * 256  # each tensor begins at a multiple of 256 bytes
SLOT_BF16 = 2 * MATRICES + 2 * 256


def take(model, blocks=None):
    stack = find_blocks(model, blocks)
    return Inventory(model, block_map(model, blocks), stack)


def adamw(model):
    return OffloadAdamW([p for p in model.parameters() if p.requires_grad])


def specs(model, optimizer=None, device=CPU, codec="none", packed=frozenset(), blocks=None):
    return {s.name: s for s in take(model, blocks).specs(device, optimizer, codec, 64, packed)}


def names(model, parameters):
    of = {id(p): name for name, p in model.named_parameters()}
    return {of[id(p)] for p in parameters}


def leaving(model, blocks=None):
    return names(model, [p for unit in take(model, blocks).units for p in unit.pageable])


def staying(model, blocks=None):
    return names(model, [p for unit in take(model, blocks).units for p in unit.fixed])


def lora(model, **options):
    config = peft.LoraConfig(r=4, **{"target_modules": ["q_proj", "down_proj"], **options})
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def test_every_parameter_of_a_llama_can_leave(llama):
    everything = {name for name, _ in llama.named_parameters()}
    assert leaving(llama) == everything
    assert staying(llama) == set()
    units = take(llama).units
    assert [u.group.kind for u in units] == ["embedding", "block", "block", "norm", "head"]
    assert [[name for name, _ in u.modules] for u in units] == [[u.group.name] for u in units]


def test_bytes_of_training_a_llama(llama):
    found = specs(llama, adamw(llama))
    block = found["model.layers.0"]
    assert block == found["model.layers.1"].__class__(**{**vars(found["model.layers.1"]), "name": block.name})
    # Weight and gradient in fp32, two fp32 moments.
    assert (block.kind, block.fixed, block.host) == ("block", 0, 0)
    assert block.device == block.paged == 16 * BLOCK
    assert block.slot == SLOT_FP32
    assert block.scratch == 4 * BLOCK
    embedding, head = found["model.embed_tokens"], found["lm_head"]
    assert embedding.device == head.device == 16 * TABLE
    assert head.slot == -(-4 * TABLE // 256) * 256
    assert embedding.slot == head.slot
    assert found["model.norm"].device == 16 * 32
    assert found["model.norm"].slot == 256


def test_bytes_of_training_in_bf16(llama):
    block = specs(llama.bfloat16(), adamw(llama))["model.layers.0"]
    # Weight and gradient of 2 bytes, a master and two moments of 4.
    assert block.device == block.paged == 16 * BLOCK
    assert block.slot == SLOT_BF16
    assert block.scratch == 2 * BLOCK


def test_bytes_of_a_frozen_model(llama):
    llama.requires_grad_(False)
    found = specs(llama)
    assert found["model.layers.0"].device == found["model.layers.0"].paged == 4 * BLOCK
    assert found["model.layers.0"].scratch == 0
    assert found["model.embed_tokens"].slot == 0  # its rows are gathered
    assert found["lm_head"].slot > 0


def test_bytes_without_an_optimizer_and_with_part_of_it(llama):
    assert specs(llama)["model.layers.0"].device == 8 * BLOCK
    attention = [p for n, p in llama.named_parameters() if "layers.0.self_attn" in n]
    found = specs(llama, OffloadAdamW(attention))
    assert found["model.layers.0"].device == 8 * BLOCK + 8 * (2 * 1024 + 2 * 512)
    assert found["model.layers.1"].device == 8 * BLOCK


def test_state_of_another_optimizer_stays(llama):
    block = specs(llama, torch.optim.SGD(llama.parameters()))["model.layers.0"]
    assert block.device == block.paged == 8 * BLOCK
    assert block.fixed == 8 * BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_stay(llama, dtype):
    model = lora(llama.to(dtype))
    size = dtype.itemsize
    adapters = 4 * (32 + 32) + 4 * (48 + 32)
    assert staying(model) == {n for n, p in model.named_parameters() if p.requires_grad}
    block = specs(model, adamw(model))["base_model.model.model.layers.0"]
    assert block.fixed == 16 * adapters
    assert block.device == block.paged == size * BLOCK
    assert block.slot == (SLOT_FP32 if size == 4 else SLOT_BF16)
    assert (block.scratch, block.host) == (0, 0)


def test_packed_blocks_count_as_they_will_be_stored(llama):
    model = lora(llama)
    packed = frozenset(id(p) for n, p in model.named_parameters() if "base_layer" in n or "_proj.weight" in n)
    block = specs(model, adamw(model), codec="nf4", packed=packed)["base_model.model.model.layers.0"]
    assert block.device == MATRICES // 2 + 4 * (MATRICES // 64) + 4 * NORMS
    assert block.paged == block.device
    assert block.slot == SLOT_FP32  # decoded
    assert specs(model, codec="int8", packed=packed)["base_model.model.model.layers.0"].device == (
        MATRICES + 4 * (MATRICES // 64) + 4 * NORMS
    )


def test_large_trained_weights_beside_a_gpu_have_their_state_on_the_host():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)])
    block = specs(model, OffloadAdamW(toy().parameters()), CUDA)["0"]
    assert (block.host, block.device) == (0, 8 * 1024 * 1025)  # that optimizer does not hold them

    class Holds(OffloadAdamW):
        def __init__(self):
            self.param_groups = [{"params": list(model.parameters())}]

    block = specs(model, Holds(), CUDA)["0"]
    weight, bias = 1024 * 1024, 1024
    # Weight and gradient of both; the bias is small and keeps its moments there. The weight has moments, a
    # buffer for the gradient and a copy on the host.
    assert block.device == 8 * (weight + bias) + 8 * bias
    assert block.host == (8 + 4 + 4) * weight
    assert block.paged == (8 + 8) * (weight + bias)
    found = take(model)
    assert found.trained(Holds()) == frozenset(range(3))
    assert found.trained(None) == frozenset()
    beside = found.specs(CUDA, Holds(), "none", 64, frozenset(), frozenset({1}))
    assert (beside[0].device, beside[0].host) == (block.device, block.host)
    assert (beside[1].device, beside[1].host, beside[1].paged) == (16 * (weight + bias), 0, block.paged)


class Tied(nn.Module):
    """A table used at both ends, a bare root parameter, and weights shared between blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layers = toy(8, 4)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids):
        return self.lm_head(self.norm(self.layers(self.embed(ids)) * self.scale))


def test_a_tied_table_has_both_its_users_hooked():
    model = Tied()
    units = {u.group.name: u for u in take(model).units}
    assert [name for name, _ in units["embed"].modules] == ["embed", "lm_head"]
    assert units["lm_head"].pageable == units["lm_head"].modules == []
    found = specs(model, adamw(model))
    assert found["embed"].device == 16 * 11 * 8
    assert found["embed"].slot == 512
    assert (found["lm_head"].device, found["lm_head"].pageable) == (0, False)
    model.requires_grad_(False)
    assert specs(model)["embed"].slot == 512  # the head needs the whole of it


def test_a_bare_root_parameter_stays():
    assert staying(Tied()) == {"scale"}
    assert not specs(Tied())["(root)"].pageable


def test_a_weight_of_two_blocks_leaves_only_with_both():
    model = Tied()
    inventory = take(model)
    of = {unit.group.name: i for i, unit in enumerate(inventory.units)}
    shared = id(model.layers[0][0].weight)
    first, third = of["layers.0"], of["layers.2"]
    assert shared not in inventory.paged(frozenset({first}))
    assert shared not in inventory.paged(frozenset({third}))
    assert shared in inventory.paged(frozenset({first, third}))
    found = specs(model)
    assert found["layers.2"].device == found["layers.0"].device - 8 * 64
    assert found["layers.2"].slot == found["layers.0"].slot  # it computes with both of them


def test_a_weight_of_a_block_and_of_the_head_stays():
    model = Tied()
    model.layers[1][2].weight = nn.Parameter(torch.randn(11, 8))
    model.layers[1][2] = nn.Linear(8, 8)
    model.probe = nn.Linear(8, 8)
    model.probe.weight = model.layers[1][0].weight
    assert "layers.1.0.weight" in staying(model, list(model.layers))
    assert "layers.1.0.bias" in leaving(model, list(model.layers))


def test_modules_to_save_are_pageable_with_their_originals(llama):
    model = lora(llama, modules_to_save=["lm_head"])
    unit = next(u for u in take(model).units if u.group.kind == "head")
    assert names(model, unit.pageable) == {
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    }
    assert {type(module) for _, module in unit.modules} == {nn.Linear}


def test_adapters_of_the_embedding_stay(llama):
    """They are bare Parameters in a dictionary, which has no forward."""
    model = lora(llama, target_modules=["embed_tokens", "q_proj"])
    assert not any("lora" in name for name in leaving(model))
    unit = next(u for u in take(model).units if u.group.kind == "embedding")
    assert [name for name, _ in unit.modules] == ["base_model.model.model.embed_tokens.base_layer"]


def test_a_block_that_trains_but_for_its_norms_can_leave(llama):
    for name, p in llama.named_parameters():
        p.requires_grad_("norm" not in name)
    assert staying(llama) == set()
    block = specs(llama, adamw(llama))["model.layers.0"]
    assert block.device == 16 * MATRICES + 4 * NORMS


def test_what_uses_its_weights_in_other_ways_stays():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 8, max_norm=1.0)
            self.sparse = nn.EmbeddingBag(5, 8, sparse=True, mode="sum")
            self.stack = nn.ModuleList(
                nn.ModuleDict({"a": nn.LSTM(8, 8), "b": nn.Linear(8, 8)}) for _ in range(3)
            )

    assert leaving(Recurrent()) == {f"stack.{i}.b.{key}" for i in range(3) for key in ("weight", "bias")}


def test_looking_changes_nothing(llama):
    before = {name: (id(p), p._version) for name, p in llama.named_parameters()}
    specs(llama, adamw(llama))
    assert before == {name: (id(p), p._version) for name, p in llama.named_parameters()}


@given(st.integers(2, 6), st.integers(1, 24), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_everything_is_counted_once(depth, width, dtype, trained):
    model = toy(width, depth).to(dtype).requires_grad_(trained)
    optimizer = adamw(model) if trained else None
    inventory = take(model)
    found = inventory.specs(CPU, optimizer, "none", 64, frozenset())
    count = sum(p.numel() for p in model.parameters())
    assert sum(s.device + s.fixed for s in found) == count * (16 if trained else dtype.itemsize)
    every = frozenset(range(len(found)))
    assert inventory.paged(every).keys() == {id(p) for p in model.parameters()}
    assert inventory.paged(frozenset()) == {}
    layout = place(found, Budgets(1 << 40, None, 1 << 40), forced=[True] * len(found))
    assert layout.disk_bytes == sum(s.paged for s in found)


def test_the_reserve_is_2048_tokens_through_the_stack(llama):
    hidden = 2048 * 32 * 4 * (2 + 40)
    assert reserve_for(take(llama)) == hidden + 2 * 1024 * 97 * 4
    assert reserve_for(take(nn.Linear(3, 3))) == 0


@pytest.fixture
def tight(monkeypatch):
    """Room for the least only: everything that can leave does."""
    room = 1 << 20
    bounds = Limits(Budgets(room, None, 1 << 40), None, host_used, 1 << 50)
    monkeypatch.setattr(_wrap, "limits", lambda *_: bounds)
    monkeypatch.setattr(_decide, "TOKENS", 1 << 24)  # and inputs may be long


def trained(model, ids, optimizer=None):
    """Losses and weights after three steps."""
    if optimizer is None:
        optimizer = OffloadAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        output = model(ids)
        output = getattr(output, "logits", output)
        loss = output.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


KINDS = {
    "llama": lambda: tiny_llama(),
    "tied": Tied,
    "lora": lambda: lora(tiny_llama()),
    "lora, modules_to_save": lambda: lora(tiny_llama(), modules_to_save=["lm_head", "embed_tokens"]),
    "lora of the embedding": lambda: lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"]),
    "frozen norms": lambda: freeze(tiny_llama(), "norm"),
    "frozen table": lambda: freeze(tiny_llama(), "embed_tokens"),
}


def freeze(model, what):
    for name, p in model.named_parameters():
        p.requires_grad_(what not in name)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("tight")
def test_what_leaves_trains_as_if_it_were_here(kind):
    torch.manual_seed(0)
    plain = KINDS[kind]()
    if "lora" in kind:
        for name, p in plain.named_parameters():
            if "lora" in name:
                p.data.normal_(0, 0.1)
    model = copy.deepcopy(plain)
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    can_leave = take(plain)
    count = len(can_leave.paged(frozenset(range(len(can_leave.units)))))
    model, optimizer = trainstream.wrap(model, None, lr=1e-2, quantize="none")
    session = model._trainstream_session
    assert len({id(p) for b in (*session.pager.blocks, *session.pager.edges) for p in b.parameters}) == count
    got, weights = trained(model, ids, optimizer)
    expected, wanted = trained(plain, ids)
    assert got == expected
    for p, q in zip(weights, wanted, strict=True):
        assert torch.equal(p, q)
    trainstream.unwrap(model)
