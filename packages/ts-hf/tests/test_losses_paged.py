"""The loss of a model whose output head is paged: bit for bit that of the resident one."""

import copy

import pytest
import torch
from conftest import tiny_model
from torch import nn

from ts_core.testing import devices
from ts_hf.losses import backbone, causal_lm_loss_for
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager

KINDS = ["llama", "llama tied", "gemma2", "llama float64", "llama bias"]


def make(kind):
    name, _, change = kind.partition(" ")
    model = tiny_model(name, tie_word_embeddings=change == "tied" or name == "gemma2").train()
    model.set_attn_implementation("eager")  # its backward on a GPU gives the same bits every time
    if change == "float64":
        model = model.double()  # not a dtype of the fused loss: the head is called
    if change == "bias":
        model.lm_head.bias = nn.Parameter(torch.randn(97) * 0.1)
    return model


def page(model, device, files=None):
    """Page everything: blocks, embedding, norm and head; buffers go to the device."""
    inner = model.model
    inner.rotary_emb.to(device)
    if files is not None:
        for parameter in model.parameters():
            parameter.data = files.place(parameter.data)
    pager = WeightPager(torch.device(device), gradients=files, min_offload_bytes=0)
    edges = [("embed", inner.embed_tokens), ("norm", inner.norm), ("head", model.lm_head)]
    blocks = [(f"layers.{i}", block, "recompute") for i, block in enumerate(inner.layers)]
    pager.attach(blocks, edges, tail=["norm", "head"])
    return pager


def steps(model, ids, device, chunk_size, count=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for step in range(count):
        given = ids.roll(step, 1).to(device)
        hidden = backbone(model)(input_ids=given, use_cache=False).last_hidden_state
        loss = causal_lm_loss_for(model, hidden, given, chunk_size=chunk_size)
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("chunk_size", [3, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_paged_head_gives_the_bits_of_the_resident_one(kind, chunk_size, ids, device):
    model = make(kind)
    resident = copy.deepcopy(model).to(device)
    # On a GPU torch's AdamW rounds otherwise than on the host: one step is what can be compared.
    count = 2 if device == "cpu" else 1
    expected = steps(resident, ids, device, chunk_size, count)
    pager = page(model, device)
    losses, gradients = steps(model, ids, device, chunk_size, count)
    assert losses == expected[0]
    assert gradients.keys() == expected[1].keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[1][name]), name
    head = pager.edges[-1]
    assert head.name == "head"
    assert head.runs > 0  # the loss went through the pager
    pager.detach()
    values = resident.state_dict()
    for name, value in model.state_dict().items():
        if torch.device(device).type != "cuda":  # stock AdamW rounds otherwise on a GPU
            assert torch.equal(value, values[name].cpu()), name


def test_a_head_in_a_file_is_read_from_there(ids, tmp_path):
    model = make("llama")
    expected = steps(copy.deepcopy(model), ids, "cpu", 4)
    files = FileTensors(tmp_path)
    pager = page(model, "cpu", files)
    losses, gradients = steps(model, ids, "cpu", 4)
    assert losses == expected[0]
    assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients)
    assert pager.disk_bytes > 0
    assert pager.host_bytes == 0
    pager.detach()
    files.close()


def test_without_gradients_and_a_frozen_head(ids):
    model = make("llama")
    resident = copy.deepcopy(model)
    pager = page(model, "cpu")
    values = []
    for each in (model, resident):
        each.lm_head.weight.requires_grad_(False)
        with torch.no_grad():
            hidden = backbone(each)(input_ids=ids, use_cache=False).last_hidden_state
            values.append(causal_lm_loss_for(each, hidden, ids).item())
        hidden = backbone(each)(input_ids=ids, use_cache=False).last_hidden_state
        causal_lm_loss_for(each, hidden, ids).backward()
    assert values[0] == values[1]
    for (name, p), q in zip(model.named_parameters(), resident.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (name == "lm_head.weight")
        assert p.grad is None or torch.equal(p.grad, q.grad)
    pager.detach()
