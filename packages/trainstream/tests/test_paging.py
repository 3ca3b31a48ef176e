"""wrap() with paged weights, offloaded activations and recomputation: the same bits as the resident run."""

import copy
import math

import peft
import pytest
import torch
from conftest import tiny_llama, toy, twin
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import trainstream
import ts_quant
from trainstream._options import WrapOptions
from trainstream._paging import asked
from ts_core.errors import OptionError, StateError
from ts_core.testing import devices

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BUILD = {
    "llama": lambda: tiny_llama(num_hidden_layers=3),
    "llama_tied": lambda: tiny_llama(num_hidden_layers=3, tie_word_embeddings=True, attention_dropout=0.1),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    ),
    "lora": lambda: lora(tiny_llama(num_hidden_layers=3).bfloat16()),
}
POLICIES = {
    "keep": {"recompute": False, "activation_offload": False},  # unsaid, a plan may find recomputing faster
    "offload": {"activation_offload": 1.0, "min_offload_bytes": 0},
    "recompute": {"recompute": True},
}


def lora(model):
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.2, target_modules=["q_proj", "down_proj"])
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def build(kind):
    torch.manual_seed(0)
    model = BUILD[kind]().train()
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(0, 0.1)
    return model


def batch(step, device="cpu"):
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(step))
    return ids.to(device)


def plain(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def cached(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=True).loss
    loss.backward()
    return loss


def hidden(model, ids):
    output = model(input_ids=ids, labels=ids, output_hidden_states=True)
    loss = output.loss + sum(h.float().pow(2).mean() for h in output.hidden_states)
    loss.backward()
    return loss


def crossed(model, ids):
    first, second = (model(input_ids=x, labels=x).loss for x in (ids, ids.flip(1)))
    first.backward()
    second.backward()
    return first + second


def steps(model, optimizer, sequence, device="cpu", count=3):
    losses, gradients = [], []
    for step in range(count):
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses.append(sequence(model, batch(step, device)).item())
        gradients.append({n: p.grad.clone().cpu() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, gradients


def decoded(model, codec):
    """The model whose block weights are what the codec makes of them."""
    for name, p in model.named_parameters():
        inside = ("layers" in name or ".h." in name) and p.dim() > 1
        if inside and not p.requires_grad:
            p.data = ts_quant.dequantize(ts_quant.quantize(p.data, codec))
    return model


_oracles = {}


def oracle(kind, sequence, codec, device):
    key = (kind, sequence, codec, device)
    if key not in _oracles:
        model = build(kind)
        if codec != "none":
            model = decoded(model, codec)
        model, optimizer = trainstream.wrap(model, None, lr=1e-2, device=device)
        _oracles[key] = (*steps(model, optimizer, sequence, device), model)
    return _oracles[key]


def check(kind, sequence, policy, codec="none", device="cpu", **options):
    losses, gradients, resident = oracle(kind, sequence, codec, device)
    own = {"kernels": False, "fused_lora": False}  # the oracle's arithmetic; over packed weights "auto" fuses
    model, optimizer = trainstream.wrap(
        build(kind), None, lr=1e-2, device=device, quantize=codec, **{**own, **POLICIES[policy], **options}
    )
    ours, grads = steps(model, optimizer, sequence, device)
    assert ours == losses
    for step, expected in enumerate(gradients):
        assert grads[step].keys() == expected.keys()
        for name, grad in expected.items():
            assert torch.equal(grads[step][name], grad), (step, name)
    for (name, p), q in zip(model.named_parameters(), resident.parameters(), strict=True):
        value = p.dequantize() if isinstance(p, ts_quant.QuantizedTensor) else p
        assert torch.equal(value.to(q.device), q), name
    return model


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sequence", [plain, crossed, hidden, cached])
@pytest.mark.parametrize("kind", BUILD)
def test_paged_equals_resident(kind, sequence, policy, device):
    model = check(kind, sequence, policy, device=device, param_offload=True)
    report = trainstream.memory_report(model)
    tier = "host" if device == "cuda" else "disk"
    rows = [row for row in report["blocks"] if row["kind"] == "block"]
    assert report["params"]["paged_blocks"] == 3
    assert {row["tier"] for row in rows} == {tier}
    assert {row["policy"] for row in rows} == {policy}
    forwards = 3 * (2 if sequence is crossed else 1)
    assert {row["runs"] for row in rows} == {forwards * (2 if policy == "recompute" else 1)}
    # Two slots for three blocks: one may stay where it is, the others come again for every pass.
    assert sorted(row["fills"] for row in rows)[1] >= 3
    assert report["tiers"][tier] > 0
    moved = report["moved"]["h2d_bytes" if device == "cuda" else "disk_read_bytes"]
    assert moved >= 3 * sum(row["bytes"] for row in rows) * (kind != "lora")
    session = model._trainstream_session
    assert session.plan.policy == (policy,) * 3
    assert session.plan.slots == 2
    assert report["tiers"]["device"] >= sum(slot.buffer.numel() for slot in session.pager.slots) > 0
    trainstream.unwrap(model)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_packed_weights_are_paged_packed(codec, policy, device):
    model = check("lora", plain, policy, codec, device=device, param_offload=True)
    report = trainstream.memory_report(model)
    stored = sum(row["bytes"] for row in report["blocks"] if row["tier"] != "device")
    assert report["params"]["quantize"] == codec
    assert stored < sum(2 * row["parameters"] for row in report["blocks"] if row["tier"] != "device")
    trainstream.unwrap(model)


@given(
    paged=st.sets(st.integers(0, 2)),
    recompute=st.sets(st.integers(0, 2)),
    offload=st.sampled_from([False, True, 0.4]),
)
def test_any_placement_gives_the_same_bits(paged, recompute, offload):
    model = check(
        "llama",
        plain,
        "keep",
        param_offload=sorted(paged),
        recompute=sorted(recompute),
        activation_offload=offload,
        min_offload_bytes=0,
    )
    assert trainstream.memory_report(model)["params"]["paged_blocks"] == len(paged)
    trainstream.unwrap(model)


@given(count=st.integers(1, 40), share=st.floats(0, 1))
def test_a_share_takes_that_many_blocks(count, share):
    want = asked(WrapOptions(param_offload=share, recompute=share), count)
    assert want.paged.count(True) == math.ceil(share * count)
    assert want.policy.count("recompute") == want.paged.count(True)
    assert want.hooked == (True in want.paged)


@pytest.mark.parametrize("option", ["param_offload", "recompute"])
def test_blocks_that_are_not_there_are_refused(option):
    model = toy()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(OptionError, match=f"{option}.*4 blocks.*7"):
        trainstream.wrap(model, **{option: [7]})
    with pytest.raises(OptionError, match="no stack"):
        trainstream.wrap(nn.Linear(3, 3), **{option: True})
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_unwrap_brings_everything_back(tmp_path):
    model = build("llama")
    expected = twin(model)
    parameters = list(model.parameters())
    model, optimizer = trainstream.wrap(
        model, None, lr=1e-2, param_offload=True, recompute=[0], disk_offload=tmp_path
    )
    reference = trainstream.wrap(expected, None, lr=1e-2)[1]
    steps(model, optimizer, plain)
    steps(expected, reference, plain)
    assert list(tmp_path.iterdir())
    trainstream.unwrap(model)
    assert not list(tmp_path.iterdir())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    # The optimizer stays usable, and so does the model.
    losses = steps(model, optimizer, plain)[0]
    assert losses == steps(expected, reference, plain)[0]


def test_a_failed_wrap_leaves_model_and_disk_alone(tmp_path, monkeypatch):
    from ts_paging.pager import WeightPager

    def fail(self, *args):
        raise MemoryError("no slots")

    monkeypatch.setattr(WeightPager, "attach", fail)
    model = build("llama")
    parameters = [(p, p.data_ptr()) for p in model.parameters()]
    with pytest.raises(MemoryError):
        trainstream.wrap(model, param_offload=True, disk_offload=tmp_path)
    assert [(p, p.data_ptr()) for p in model.parameters()] == parameters
    assert not list(tmp_path.iterdir())
    assert "_trainstream_session" not in model.__dict__


def test_while_wrapped_everything_reads_the_true_values(tmp_path):
    model = build("llama")
    expected = twin(model)
    model, optimizer = trainstream.wrap(model, None, lr=1e-2, param_offload=True)
    reference = trainstream.wrap(expected, None, lr=1e-2)[1]
    ema = {n: p.detach().clone() for n, p in model.named_parameters()}
    oracle_ema = copy.deepcopy(ema)
    for net, opt, average in ((model, optimizer, ema), (expected, reference, oracle_ema)):
        for step in range(3):
            opt.zero_grad()
            plain(net, batch(step))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            with torch.no_grad():
                for name, p in net.named_parameters():
                    average[name].lerp_(p, 0.1)
                next(iter(net.model.layers[1].parameters())).mul_(0.99)
    for name, p in expected.named_parameters():
        assert torch.equal(ema[name], oracle_ema[name]), name
        assert torch.equal(model.state_dict()[name], p), name
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for (name, p), q in zip(again.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = batch(9)
    assert torch.equal(model.eval().generate(ids, **settings), expected.eval().generate(ids, **settings))
    other = copy.deepcopy(model)
    assert {type(p) for p in other.parameters()} == {nn.Parameter}
    assert torch.equal(other(input_ids=ids).logits, expected(input_ids=ids).logits)
    with torch.no_grad():
        model.load_state_dict({n: p * 0.5 for n, p in expected.state_dict().items()})
        expected.load_state_dict({n: p * 0.5 for n, p in expected.state_dict().items()})
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_other_optimizers_train_paged_weights():
    model = build("llama")
    expected = twin(model)
    stock = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = trainstream.wrap(model, stock, param_offload=True)
    assert optimizer is stock
    losses = steps(model, optimizer, plain)[0]
    assert losses == steps(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), plain)[0]


class WritesInPlace(nn.Module):
    """What stands between its blocks is written into their outputs."""

    def __init__(self, last):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), last) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x *= 2
        return x.square().sum()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"activation_offload": True}])
def test_outputs_of_blocks_may_be_written_in_place_as_in_plain_torch(options):
    torch.manual_seed(0)
    plain, x = WritesInPlace(nn.GELU()), torch.randn(2, 8)
    model, _ = trainstream.wrap(
        copy.deepcopy(plain), None, param_offload=True, min_offload_bytes=0, **options
    )
    plain(x).backward()
    model(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    trainstream.unwrap(model)


def test_an_output_that_backward_needs_may_not():
    model, _ = trainstream.wrap(WritesInPlace(nn.Tanh()), None, param_offload=True)
    loss = model(torch.randn(2, 8))
    with pytest.raises(StateError, match="needed for backward was modified in place"):
        loss.backward()
