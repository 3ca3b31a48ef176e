"""Captured blocks with real CUDA graphs: how few launches a block takes, and what recordings hold."""

import pytest
import torch
from grid_models import (
    LAYERS,
    WRAP_POLICIES,
    adamw,
    batch,
    build,
    compare,
    llama,
    lora,
    offload_adamw,
    one,
    paged,
    paging,
    resident,
    train,
)
from test_block_mode import mode_of
from test_grid import POLICIES

import trainstream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
MOST = 12


def launches(run):
    """Count what the host hands to the GPU while `run` runs, but for copies from and to the host."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    graphs = sum(name.startswith("cudaGraphLaunch") for name in names)
    away = sum(name.startswith(("Memcpy HtoD", "Memcpy DtoH")) for name in names)
    return sum(name.startswith(LAUNCHES) for name in names) - away, graphs


def layered(kind, layers):
    """Make a model of so many blocks."""
    torch.manual_seed(0)
    if kind == "lora":
        return lora(llama(num_hidden_layers=layers).bfloat16()).train()
    return llama(num_hidden_layers=layers, tie_word_embeddings=True, attention_dropout=0.1).train()


def forward_and_backward(kind, policy, layers):
    """Return (launches, graph launches) of a pass whose blocks all replay, weights in a slot each."""
    model = layered(kind, layers)
    with paging(model, "host", policy, layers, "cuda") as pager:
        mode = mode_of(pager, True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        train(model, optimizer, one, "cuda", 4)
        optimizer.zero_grad()
        ids = batch(0, "cuda")
        found = launches(lambda: one(model, ids))
        assert mode.reasons == {}
        assert len(mode.captures.replays) == layers
        return found


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("kind", ["lora", "llama_tied"])
def test_a_block_takes_few_launches(kind, policy):
    """More blocks, all else the same: what each of them adds."""
    few, few_graphs = forward_and_backward(kind, policy, 2)
    many, many_graphs = forward_and_backward(kind, policy, 6)
    assert (many_graphs - few_graphs) == 2 * 4
    assert (many - few) / 4 <= MOST


@pytest.mark.parametrize("policy", POLICIES)
def test_recordings_hold_as_much_for_many_blocks_as_for_few(policy):
    """They share a pool; what is added with the slots alone counts."""
    sizes = []
    for layers in (4, 8):
        model = layered("lora", layers)
        with paging(model, "host", policy, 2, "cuda") as pager:
            mode = mode_of(pager, True)
            train(model, adamw(list(model.parameters())), one, "cuda", 3)
            assert mode.reasons == {}
            sizes.append(mode.captures.pool_bytes())
            assert mode.captures.recordings == 3
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_with_dropout_and_copies_under_way_has_the_same_bits(policy, attention):
    expected = resident("lora", one, "none", "cuda", adamw, count=20)
    model = build("lora")
    model.config._attn_implementation = attention
    if attention == "sdpa":
        plain = build("lora")
        plain.config._attn_implementation = attention
        expected = train(plain.to("cuda"), adamw(list(plain.parameters())), one, "cuda", 20)
    with paging(model, "host", policy, 2, "cuda", prefetch=1) as pager:
        mode = mode_of(pager, True)
        result = train(model, adamw(list(model.parameters())), one, "cuda", 20)
        assert mode.reasons == {}
        assert set(mode.captures.replays.values()) == {19}
    assert result.losses[:1] == expected.losses[:1]
    if attention == "eager":
        compare(result, expected)


@pytest.mark.parametrize("policy", list(WRAP_POLICIES))
@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_auto_changes_no_bit(kind, policy):
    """Tiny blocks wait for nothing but their launches: they are captured."""
    expected = resident(kind, one, "none", "cuda", offload_adamw, count=20)
    model = build(kind)
    with paged(model, "wrap", policy, "cuda", capture="auto") as (_, optimizer):
        compare(train(model, optimizer, one, "cuda", 20), expected)
        report = trainstream.memory_report(model)
        assert (report["captured"]["blocks"], report["captured"]["fallbacks"]) == (LAYERS, {})
        assert any("is recorded, and those like it" in line for line in report["events"])


def test_auto_goes_back_to_eager_where_the_device_has_no_room(monkeypatch):
    monkeypatch.setattr("trainstream._paging._left", lambda device, room: 0)
    expected = resident("lora", one, "none", "cuda", offload_adamw, count=12)
    model = build("lora")
    with paged(model, "wrap", "recompute", "cuda", capture="auto") as (_, optimizer):
        compare(train(model, optimizer, one, "cuda", 12), expected)
        captured = trainstream.memory_report(model)["captured"]
        assert captured["recordings"] == 0
        assert list(captured["fallbacks"]) == ["the device has no room for recordings"]
