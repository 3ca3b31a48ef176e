"""Generation of a wrapped model with its keys and values in blocks."""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from grid_models import WRAP_POLICIES
from test_trainer import build
from transformers import LlamaModel

import trainstream as ts
from ts_core.testing import devices
from ts_hf import BlockCache

#: What transformers calls the argument, which has changed.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("beams", [1, 2])
def test_a_paged_model_generates_what_the_plain_one_does(device, beams):
    model = build(0, max_position_embeddings=512).to(device).eval()
    ids = torch.randint(3, 90, (2, 100), generator=torch.Generator().manual_seed(1)).to(device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "min_new_tokens": 20,
        "max_new_tokens": 20,
        "num_beams": beams,
        "do_sample": False,
        "pad_token_id": 0,
    }
    right = copy.deepcopy(model).generate(ids, **options)
    wrapped, _ = ts.wrap(model, lr=1e-3, param_offload=True, device=device)
    cache = BlockCache(model.config, block_tokens=64)
    assert torch.equal(wrapped.generate(ids, **{CACHE: cache}, **options), right)
    assert cache.stored_bytes() > 0
    ts.unwrap(model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", list(WRAP_POLICIES))
def test_a_pass_without_a_backward_pass_leaves_nothing(policy):
    """Keys and values lead to what a block keeps for its second run; that must not lead to them."""
    model, _ = ts.wrap(build(0), None, lr=1e-3, quantize="none", param_offload=True, **WRAP_POLICIES[policy])
    model.train()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=ids, use_cache=True)
    cache = getattr(output, CACHE, None) or output.past_key_values
    assert cache.layers[0].keys.requires_grad
    gone = [weakref.ref(each) for layer in cache.layers for each in (layer.keys, layer.values)]
    del output, cache
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    ts.unwrap(model)
