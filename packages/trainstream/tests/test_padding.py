"""Padded rows through sliding windows, in blocks that are paged, recompute or offload: no pad is seen."""

import copy
import warnings

import pytest
import torch
import transformers

from trainstream.integrations.huggingface import wrap_hf
from ts_core.testing import assert_bit_equal, devices
from ts_optim import OffloadAdamW

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "llama": ("LlamaConfig", "sdpa", {}),
    "mistral": ("MistralConfig", "sdpa", {"sliding_window": 4}),
    "mistral eager": ("MistralConfig", "eager", {"sliding_window": 4}),
    "gemma2": ("Gemma2Config", "eager", {"sliding_window": 4, **MIXED}),
    "gemma3": ("Gemma3TextConfig", "sdpa", {"sliding_window": 4, **MIXED}),
}
WAYS = {
    "recompute": {"param_offload": True, "recompute": True},
    "offload": {"param_offload": True, "activation_offload": True, "min_offload_bytes": 0},
    "kernels": {"recompute": [1], "kernels": True},
}
LENGTH, PADS = 12, 3
#: Which tokens of the three rows are real: one is padded on the left, one on the right.
REAL = (slice(PADS, LENGTH), slice(0, LENGTH - PADS), slice(0, LENGTH))


def build(kind):
    name, attention, changes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SMALL, **changes})
    config._attn_implementation = attention
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def rows(step, device):
    """Labels of pads do not count, nor that of a first real token, which a pad would predict."""
    ids = torch.randint(1, 97, (len(REAL), LENGTH), generator=torch.Generator().manual_seed(step))
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, real in enumerate(REAL):
        mask[row, real] = 1
        labels[row, real.start + 1 : real.stop] = ids[row, real.start + 1 : real.stop]
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    return {name: value.to(device) for name, value in batch.items()}


def alone(model, batch):
    """The same loss, each row by itself without its pads."""
    pieces = [batch["input_ids"][row : row + 1, real] for row, real in enumerate(REAL)]
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) for ids in pieces]
    return (sum(losses) / sum(ids.shape[1] - 1 for ids in pieces)).item()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_train_as_in_the_plain_model_and_as_without_pads(kind, way, device, tmp_path):
    plain = build(kind).to(device)
    single = alone(copy.deepcopy(plain), rows(0, device))
    model, optimizer = wrap_hf(
        copy.deepcopy(plain), disk_offload=tmp_path, profile=False, attention=None, lr=1e-3, **WAYS[way]
    )
    twin = OffloadAdamW(plain.parameters(), lr=1e-3)
    exact = device == "cpu" and way != "kernels"  # fused kernels round otherwise
    for step in range(2):
        batch = rows(step, device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours, theirs = model(**batch, use_cache=False), plain(**batch, use_cache=False)
        assert bool(ours.logits[batch["attention_mask"].bool()].isfinite().all())
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
        if step == 0:
            assert ours.loss.item() == pytest.approx(single, rel=1e-5)
        ours.loss.backward()
        theirs.loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = p.grad.as_subclass(torch.Tensor).to(device)
            assert bool(gradient.isfinite().all()), name
            if exact:
                assert_bit_equal(gradient, q.grad)
            torch.testing.assert_close(gradient, q.grad, rtol=1e-4, atol=1e-6, msg=name)
        for each in (optimizer, twin):
            each.step()
            each.zero_grad()
