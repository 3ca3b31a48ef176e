"""Keys and values in blocks against transformers' own DynamicCache."""

import copy
import inspect
import sys

import pytest
import torch
from conftest import tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ts_core.errors import MissingDependencyError, OptionError, StateError
from ts_core.testing import devices
from ts_hf import BlockCache

LONG = {"max_position_embeddings": 512}
#: What transformers calls the argument, which has changed.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def tokens(rows, length, seed=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=devices())
def device(request):
    return request.param


@torch.no_grad()
def logits_in_pieces(model, ids, cache, pieces):
    found, start = [], 0
    for size in pieces:
        found.append(model(ids[:, start : start + size], **{CACHE: cache}).logits)
        start += size
    return torch.cat(found, 1)


@pytest.mark.parametrize(("place", "depth"), [("host", 0), ("host", 1), ("host", 5), ("device", 1)])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_logits_are_those_of_the_dynamic_cache(kind, place, depth, device):
    model = tiny_model(kind, **LONG).to(device)
    ids = tokens(2, 300).to(device)
    pieces = [200, 1, 1, 70, 28]  # blocks are closed by a long piece, by a token, within a piece
    right = logits_in_pieces(model, ids, DynamicCache(config=model.config), pieces)
    cache = BlockCache(model.config, place=place, block_tokens=64, prefetch_depth=depth)
    assert torch.equal(logits_in_pieces(model, ids, cache, pieces), right)
    assert cache.get_seq_length() == 300
    assert cache.stored_bytes() > 0


def test_layers_with_a_window_stay_as_they_are():
    model = tiny_model("gemma2", **LONG)
    cache = BlockCache(model.config, block_tokens=64)
    assert [isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers] == [True, False]
    logits_in_pieces(model, tokens(1, 200), cache, [200])
    assert cache.layers[0].keys.shape[-2] == 3
    assert cache.layers[1].keys.shape[-2] == 200 % 64


@pytest.mark.parametrize(("codec", "worst"), [("int8", 0.02), ("nf4", 0.2)])
def test_codes_are_close_and_smaller(codec, worst, device):
    pytest.importorskip("ts_quant")
    model = tiny_model(num_hidden_layers=3, **LONG).to(device)
    ids = tokens(2, 300).to(device)
    pieces = [256, 1, 1, 40, 2]
    plain = BlockCache(model.config, block_tokens=64)
    right = logits_in_pieces(model, ids, plain, pieces)
    coded = BlockCache(model.config, quantize=codec, block_tokens=64)
    found = logits_in_pieces(model, ids, coded, pieces)
    assert torch.equal(found[:, :256], right[:, :256])  # what was computed before there was a block
    scale = right.std()
    assert 0 < (found - right).abs().max() < worst * scale
    # float32 values: 4 bytes each; a scale of 4 bytes for each 64 codes
    assert plain.stored_bytes() / coded.stored_bytes() == pytest.approx(
        {"int8": 4 / (1 + 1 / 16), "nf4": 4 / (0.5 + 1 / 16)}[codec]
    )


def test_a_channel_of_large_keys_does_not_spoil_the_others():
    pytest.importorskip("ts_quant")
    keys = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 5] *= 100
    cache = BlockCache(tiny_config(), quantize="int8", block_tokens=64)
    cache.update(keys, keys, 0)
    found = next(iter(cache))[0]
    others = [i for i in range(64) if i != 5]
    assert (found - keys)[..., others].abs().max() < 4.5 / 127


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 2},
    ],
)
def test_generate(way, quantize, device):
    model = tiny_model(**LONG).to(device)
    ids = tokens(2, 90).to(device)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "min_new_tokens": 50, "max_new_tokens": 50, "pad_token_id": 0, **way}
    torch.manual_seed(0)
    right = model.generate(ids, **options)
    torch.manual_seed(0)
    cache = BlockCache(model.config, block_tokens=64, quantize=quantize)
    found = model.generate(ids, **{CACHE: cache}, **options)
    assert found.shape == right.shape
    if quantize == "none":
        assert torch.equal(found, right)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 150)),
        st.tuples(st.just("crop"), st.integers(0, 100)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("reorder"), st.randoms(use_true_random=False)),
        st.tuples(st.just("select"), st.randoms(use_true_random=False)),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    min_size=1,
    max_size=10,
)


@given(CHANGES)
def test_any_history_leaves_what_the_dynamic_cache_has(changes):
    config = tiny_config()
    right, ours = DynamicCache(config=config), BlockCache(config, block_tokens=64)
    generator = torch.Generator().manual_seed(0)
    rows = 2
    for change, value in [("add", 3), *changes, ("add", 1)]:
        if change == "add":
            k, v = (torch.randn(rows, 2, value, 8, generator=generator) for _ in range(2))
            for layer in range(2):
                for a, b in zip(right.update(k, v, layer), ours.update(k, v, layer), strict=True):
                    assert torch.equal(a, b)
        elif change == "crop":
            by = -min(value, right.get_seq_length())
            right.crop(by), ours.crop(by)
        elif change == "repeat" and rows < 8:
            right.batch_repeat_interleave(value), ours.batch_repeat_interleave(value)
            rows *= value if right.get_seq_length() else 1
        elif change == "reorder":
            order = torch.tensor([value.randrange(rows) for _ in range(rows)])
            right.reorder_cache(order), ours.reorder_cache(order)
        elif change == "select" and right.get_seq_length():
            chosen = torch.tensor(sorted(value.sample(range(rows), value.randint(1, rows))))
            right.batch_select_indices(chosen), ours.batch_select_indices(chosen)
            rows = len(chosen)
        elif change == "copy":
            left = ours
            ours = copy.deepcopy(ours)
            left.reset()
        elif change == "reset":
            right = DynamicCache(config=config)  # in earlier releases its reset leaves zeros
            ours.reset()
        assert ours.get_seq_length() == right.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == right.get_mask_sizes(3, 0)


def test_only_exact_blocks_can_be_rolled_back():
    config = tiny_config()
    assert BlockCache(config).is_croppable
    if "ts_quant" in sys.modules:
        assert not BlockCache(config, quantize="nf4").is_croppable
    with pytest.raises(ValueError, match="negative"):
        BlockCache(config).crop(3)


def test_training_through_it_is_refused():
    model = tiny_model()
    with pytest.raises(StateError, match="evaluation and generation"):
        model(tokens(1, 5), **{CACHE: BlockCache(model.config)})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"place": "disk"}, "place"),
        ({"quantize": "fp8"}, "quantize"),
        ({"block_tokens": 100}, "block_tokens"),
        ({"prefetch_depth": -1}, "prefetch_depth"),
        ({"config": "llama"}, "config"),
    ],
)
def test_what_is_not_accepted_is_named(options, says):
    config = options.pop("config", tiny_config())
    with pytest.raises(OptionError, match=says):
        BlockCache(config, **options)


def test_without_ts_quant_only_codes_are_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ts_quant", None)
    config = tiny_config()
    BlockCache(config)
    with pytest.raises(MissingDependencyError, match="ts-quant"):
        BlockCache(config, quantize="int8")
