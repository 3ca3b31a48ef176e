"""Where blocks are captured, a call in training that says nothing of a cache makes none."""

import copy
import gc
import inspect
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from grid_models import (
    LAYERS,
    WRAP_POLICIES,
    Stack,
    batch,
    build,
    compare,
    lora,
    offload_adamw,
    one,
    resident,
    train,
)
from test_capture_auto import as_on_a_gpu  # noqa: F401
from transformers import LlamaModel

import trainstream

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]
#: What transformers calls the argument, which has changed.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
SAID = "capture: the model is called with use_cache=False while it trains"


def plain(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss]


def wrapped(model, **options):
    options = {"param_offload": True, "capture": True, **options}
    return trainstream.wrap(model, offload_adamw(list(model.parameters())), **options)


def said(model):
    return sum(line.startswith(SAID) for line in trainstream.memory_report(model)["events"])


def cache_of(output):
    return getattr(output, CACHE)


def hooks(model):
    return [sorted(map(type, module._forward_pre_hooks.values()), key=str) for module in model.modules()]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2", "lora"])
def test_the_plain_loop_is_captured_and_has_the_bits_of_a_run_without_a_cache(kind):
    model = build(kind)
    before, hooked = json.dumps(model.config.to_dict(), default=str), hooks(model)
    model, optimizer = wrapped(model)
    found = train(model, optimizer, plain, count=4)
    compare(found, resident(kind, one, "none", "cpu", offload_adamw, count=4))
    report = trainstream.memory_report(model)["captured"]
    assert (report["blocks"], report["fallbacks"]) == (LAYERS, {})
    assert said(model) == 1
    assert cache_of(model(input_ids=batch(0))) is None
    assert json.dumps(model.config.to_dict(), default=str) == before
    trainstream.unwrap(model)
    assert hooks(model) == hooked
    assert cache_of(model(input_ids=batch(0))) is not None


@pytest.mark.parametrize("policy", WRAP_POLICIES)
def test_auto_does_the_same_where_it_captures(policy, as_on_a_gpu):  # noqa: F811
    as_on_a_gpu(1.0, 1.0)
    model, optimizer = wrapped(build("llama"), capture="auto", **WRAP_POLICIES[policy])
    found = train(model, optimizer, plain, count=12)
    compare(found, resident("llama", one, "none", "cpu", offload_adamw, count=12))
    report = trainstream.memory_report(model)["captured"]
    assert (report["blocks"], report["fallbacks"], said(model)) == (LAYERS, {}, 1)
    trainstream.unwrap(model)


def test_auto_changes_nothing_where_it_looks_after_no_block(as_on_a_gpu):  # noqa: F811
    as_on_a_gpu(1.0, 1.0)
    model, _ = wrapped(build("llama"), capture="auto", param_offload=False, recompute=False)
    assert cache_of(model(input_ids=batch(0))) is not None
    assert said(model) == 0
    trainstream.unwrap(model)


@pytest.mark.parametrize("capture", [False, "auto"])
def test_nothing_changes_where_nothing_is_captured(capture):
    model, optimizer = wrapped(build("gpt2"), capture=capture)
    found = train(model, optimizer, plain)
    compare(found, resident("gpt2", plain, "none", "cpu", offload_adamw))
    assert cache_of(model(input_ids=batch(0))) is not None
    assert said(model) == 0
    trainstream.unwrap(model)


@pytest.mark.parametrize("kind", ["gpt2", "lora"])
def test_what_a_call_says_of_caches_is_kept(kind):
    model, _ = wrapped(build(kind))
    ids = batch(0)
    cache = cache_of(model(input_ids=ids, use_cache=True))
    assert cache.get_seq_length() == ids.shape[1]
    assert cache_of(model(input_ids=ids, use_cache=False)) is None
    assert cache_of(model(input_ids=ids, **{CACHE: cache})) is cache
    assert cache.get_seq_length() == 2 * ids.shape[1]
    assert said(model) == 0
    assert cache_of(model(input_ids=ids, use_cache=None)) is None
    assert said(model) == 1
    trainstream.unwrap(model)


def test_tuples_keep_their_places():
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    asked = {"output_hidden_states": True, "return_dict": False}
    plain = build("llama")(ids, **asked)
    model, _ = trainstream.wrap(build("llama"), None, capture=True, param_offload=True)
    ours = model(ids, **asked)
    assert [type(each) for each in ours] == [type(each) for each in plain]
    trainstream.unwrap(model)


@pytest.mark.parametrize("value", [None, True])
def test_arguments_by_position_are_seen(value):
    model, _ = wrapped(build("llama"))
    names = list(inspect.signature(model.forward).parameters)
    given = [None] * (names.index("use_cache") - 1)
    output = model(batch(0), *given, value)
    assert (cache_of(output) is None) == (value is None)
    trainstream.unwrap(model)


def test_a_configuration_that_wants_no_cache_is_enough():
    model = build("llama")
    model.config.use_cache = False
    model, optimizer = wrapped(model)
    train(model, optimizer, plain)
    assert trainstream.memory_report(model)["captured"]["blocks"] == LAYERS
    assert said(model) == 0
    trainstream.unwrap(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_evaluation_and_generation_stay_as_they_are(kind):
    model = build(kind)
    oracle = copy.deepcopy(model)
    ids = batch(1, shape=(2, 5))
    options = {
        "attention_mask": torch.ones_like(ids),
        "min_new_tokens": 12,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    model, _ = wrapped(model)
    plain(model, batch(0))  # watched
    for training in (True, False):
        oracle.train(training)
        model.train(training)
        torch.manual_seed(0)
        right = oracle.generate(input_ids=ids, **options)
        torch.manual_seed(0)
        assert torch.equal(model.generate(input_ids=ids, **options), right)
    assert cache_of(model(input_ids=ids)).get_seq_length() == ids.shape[1]
    model.train()
    with torch.no_grad():
        assert cache_of(model(input_ids=ids)).get_seq_length() == ids.shape[1]
    trainstream.unwrap(model)


def test_copies_and_pickles_are_plain_models():
    model, _ = wrapped(build("llama"))
    ids = batch(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert cache_of(other(input_ids=ids)) is not None
        assert cache_of(model(input_ids=ids)) is None
    trainstream.unwrap(model)
    assert cache_of(model(input_ids=ids)) is not None
    gc.collect()


def test_the_configuration_that_is_saved_is_that_of_the_plain_model(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "plain")
    model, optimizer = wrapped(model)
    train(model, optimizer, plain)
    model.save_pretrained(tmp_path / "wrapped")
    trainstream.unwrap(model)
    model.save_pretrained(tmp_path / "unwrapped")
    texts = {(tmp_path / name / "config.json").read_text() for name in ("plain", "wrapped", "unwrapped")}
    assert len(texts) == 1
    assert '"use_cache": true' in texts.pop()


def test_adapters_that_are_put_around_a_wrapped_model_change_nothing():
    base, _ = wrapped(build("llama"))
    model = lora(base)
    assert cache_of(model(input_ids=batch(0))) is None
    assert cache_of(model(input_ids=batch(0), use_cache=True)) is not None
    trainstream.unwrap(base)


class Decides(torch.nn.Module):
    """Tells what is inside what its configuration says, as models of older releases do."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.inner = Told()

    def forward(self, input_ids, labels=None, use_cache=None):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return self.inner(input_ids, labels, use_cache)


class Told(Stack):
    told = ()

    def forward(self, input_ids, labels=None, use_cache=None):
        self.told = (*self.told, use_cache)
        return super().forward(input_ids, labels)


def test_a_model_whose_outer_part_decides_is_told_there():
    model, _ = wrapped(Decides())
    ids = batch(0)
    for call in (model, model.inner):
        call(ids)
        call(ids, use_cache=True)
    assert model.inner.told == (False, True, False, True)
    trainstream.unwrap(model)
    model(ids)
    assert model.inner.told[-1] is True


def test_a_model_without_such_an_argument_is_called_as_ever():
    class Bare(Stack):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels)

    model, optimizer = wrapped(Bare())
    train(model, optimizer, plain)
    assert (trainstream.memory_report(model)["captured"]["blocks"], said(model)) == (LAYERS, 0)
    trainstream.unwrap(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("before", [True, False])
def test_the_plain_loop_through_torch_compile(before):
    torch.compiler.reset()
    model = build("llama")
    compiled = torch.compile(model, backend="eager") if before else None
    _, optimizer = wrapped(model)
    if compiled is None:
        compiled = torch.compile(model, backend="eager")
    found = train(model, optimizer, lambda _, ids: plain(compiled, ids))
    compare(found, resident("llama", one, "none", "cpu", offload_adamw))
    assert trainstream.memory_report(model)["captured"]["blocks"] == LAYERS
    trainstream.unwrap(model)
    torch.compiler.reset()
