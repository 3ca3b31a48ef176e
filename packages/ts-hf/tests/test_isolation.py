"""Packed rows in models that need help: masks that know the documents, frequencies of each one's length."""

import itertools

import pytest
import torch
import transformers
from conftest import tiny_config, tiny_model

from ts_core.errors import OptionError
from ts_core.testing import devices
from ts_hf.isolation import isolate_documents
from ts_hf.packing import check_isolation, pack_sequences
from ts_quant import quantize_model


def gpt_oss(seed=0):
    torch.manual_seed(seed)
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def long_rope(kind="longrope", **changes):
    rope = {
        "rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        **({"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 2.0, 9.0]} if kind == "longrope" else {}),
        **changes,
    }  # fmt: skip
    return tiny_model("phi3", rope_parameters=rope, max_position_embeddings=64, pad_token_id=0)


def texts(*lengths, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def call(model, batch):
    given = {k: batch[k].to(model.device) for k in ("input_ids", "position_ids")}
    return model(**given, use_cache=False).logits


def borders(batch):
    """(row, begin, end) of every document, padding among them."""
    found = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        found += [(row, a, b) for a, b in itertools.pairwise(starts)]
    return found


@torch.no_grad()
@pytest.mark.parametrize("make", [gpt_oss, long_rope], ids=["gpt_oss", "long_rope"])
@pytest.mark.parametrize("device", devices())
def test_documents_are_what_they_are_alone(make, device):
    model = make().to(device)
    batch = pack_sequences(texts(7, 11, 5, 3, 12, 1), 15)
    isolate_documents(model)
    isolate_documents(model)  # once is enough, twice does no harm
    together = call(model, batch)
    for row, begin, end in borders(batch):
        alone = model(input_ids=batch["input_ids"][row : row + 1, begin:end].to(device), use_cache=False)
        torch.testing.assert_close(together[row, begin:end], alone.logits[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", [gpt_oss, long_rope], ids=["gpt_oss", "long_rope"])
def test_another_document_leaves_the_logits_bit_equal(make):
    model = make()
    isolate_documents(model)
    batch = pack_sequences(texts(7, 5, 9), 21)
    before = call(model, batch)
    for row, begin, end in borders(batch):
        ids = batch["input_ids"].clone()
        ids[row, begin:end] = (ids[row, begin:end] + 13) % 97
        after = call(model, {**batch, "input_ids": ids})
        outside = torch.ones(21, dtype=torch.bool)
        outside[begin:end] = False
        if make is gpt_oss:  # the changed document sends another number of rows to an expert
            torch.testing.assert_close(after[0, outside], before[0, outside], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(after[0, outside], before[0, outside])
        assert not torch.equal(after[0, ~outside], before[0, ~outside])


@torch.no_grad()
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", [None, "nf4"])
@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_experts_token_by_token_leave_the_logits_bit_equal(kind, codec, device):
    """Then no product has a number of rows that depends on another document."""
    model = gpt_oss() if kind == "gpt_oss" else tiny_model(kind, num_hidden_layers=4)
    model = model.requires_grad_(False).to(device)
    if codec:
        assert quantize_model(model, codec)["tensors"]
    model.set_experts_implementation("batched_mm")
    isolate_documents(model)
    for seed in range(4):
        batch = pack_sequences(texts(7, 5, 9, seed=seed), 21)
        before = call(model, batch)
        for row, begin, end in borders(batch):
            ids = batch["input_ids"].clone()
            ids[row, begin:end] = (ids[row, begin:end] + 13) % 97
            after = call(model, {**batch, "input_ids": ids})
            outside = torch.ones(21, dtype=torch.bool)
            outside[begin:end] = False
            assert torch.equal(after[0, outside], before[0, outside])
            assert not torch.equal(after[0, ~outside], before[0, ~outside])


def test_without_it_gpt_oss_is_refused():
    with pytest.raises(OptionError, match="reaches the next one"):
        check_isolation(gpt_oss())


@torch.no_grad()
def test_what_is_not_packed_is_left_as_it_is():
    ids = torch.stack(texts(11, 11))
    for make in (gpt_oss, long_rope):
        plain, ours = make(), make()
        isolate_documents(ours)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        for words in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(11)[None].expand(2, -1)}):
            assert torch.equal(plain(input_ids=ids, **words).logits, ours(input_ids=ids, **words).logits)
        words = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(plain.generate(ids, **words), ours.generate(ids, **words))


def test_gradients_are_those_of_the_documents_one_by_one():
    model = gpt_oss()
    isolate_documents(model)
    batch = pack_sequences(texts(7, 11, 5), 12)
    weights = torch.randn(97, generator=torch.Generator().manual_seed(1))
    mask = batch["labels"] != -100
    ((call(model, batch) * weights).sum(-1) * mask).sum().backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row, begin, end in borders(batch):
        logits = model(input_ids=batch["input_ids"][row : row + 1, begin:end], use_cache=False).logits[0]
        ((logits * weights).sum(-1) * mask[row, begin:end]).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=2e-3, atol=2e-4, msg=name)


@torch.no_grad()
def test_frequencies_that_depend_on_the_batch_are_refused_where_they_would_matter():
    model = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        max_position_embeddings=8,
    )  # fmt: skip
    isolate_documents(model)
    short = pack_sequences(texts(7, 5, 4, 8), 16)
    for row, begin, end in borders(short):
        alone = model(input_ids=short["input_ids"][row : row + 1, begin:end], use_cache=False).logits[0]
        torch.testing.assert_close(call(model, short)[row, begin:end], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="dynamic"):
        call(model, pack_sequences(texts(7, 9), 16))


def test_models_that_nothing_helps_stay_refused():
    assert tiny_config("llama")
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    )
    with pytest.raises(OptionError, match=r"bloom|position_ids"):
        isolate_documents(bloom)
