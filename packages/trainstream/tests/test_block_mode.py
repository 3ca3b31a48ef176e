"""Block mode and captured blocks have the bits of the resident run; what cannot be so runs in graph mode.

On the CPU a recording is a list of operations that runs again on the same memory, with all in between spoilt:
it finds stale addresses, missing copies and wrong slots as a CUDA graph would have them.
"""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from grid_models import (
    LAYERS,
    NIGHTLY,
    WRAP_POLICIES,
    Stack,
    accumulated,
    adamw,
    batch,
    build,
    cached,
    compare,
    forward_order,
    hidden,
    hooked,
    offload_adamw,
    one,
    paging,
    resident,
    retained,
    reverse_order,
    summed,
    train,
)
from test_grid import POLICIES, _deterministic  # noqa: F401

import trainstream
from ts_core.errors import StateError
from ts_core.testing import devices
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

KINDS = ["llama_tied", "lora", "gpt2", "gemma2", "stack"]
ORDERS = [one, forward_order, reverse_order, summed, retained, accumulated]
STEPS = 3


def mode_of(pager, captured):
    captures = Captures(pager.device) if captured else None
    events = []
    pager.block_mode = BlockMode(captures, events.append)
    pager.block_mode.events = events
    return pager.block_mode


def check(kind, sequence, policy, slots, captured, device, steps=STEPS, shapes=((2, 9),)):
    expected = resident(kind, sequence, "none", device, adamw, count=steps, shapes=shapes)
    model = build(kind)
    with paging(model, "host", policy, slots, device) as pager:
        mode = mode_of(pager, captured)
        compare(train(model, adamw(list(model.parameters())), sequence, device, steps, shapes), expected)
        assert mode.reasons == {}
        assert all(block.interior.probed for block in pager.blocks)
        if captured:
            assert sorted(mode.captures.replays) == sorted(block.name for block in pager.blocks)
            return {**mode.report(), "by_block": mode.captures.replays}
    return {}


def some(rows):
    """A few rows of a product, every value in them, unless all of it is wanted."""
    rows = list(rows)
    return rows if NIGHTLY else [rows[index * 31 % len(rows)] for index in range(9)]


GRID = list(itertools.product(KINDS, ORDERS, POLICIES, [1, 2, 3]))


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("kind", "sequence", "policy", "slots"), some(GRID), ids=name_of)
def test_block_mode_is_the_resident_training(kind, sequence, policy, slots, device):
    check(kind, sequence, policy, slots, False, device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("kind", "sequence", "policy", "slots"), some(reversed(GRID)), ids=name_of)
def test_captured_training_is_the_resident_training(kind, sequence, policy, slots, device):
    check(kind, sequence, policy, slots, True, device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_twenty_steps_with_and_without_dropout_have_the_same_bits(kind, policy, device):
    report = check(kind, one, policy, 2, True, device, steps=20)
    # Watched once, then replayed in every step.
    assert set(report["by_block"].values()) == {19}
    # Two slots, and the first block gets no gradient for its input where the embedding is frozen.
    assert report["recordings"] == (3 if kind == "lora" else 2)
    assert report["blocks"] == LAYERS
    assert report["bytes"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_of_several_shapes_are_recorded_each(policy):
    report = check("llama_tied", one, policy, 2, True, "cpu", 8, ((2, 9), (1, 5), (3, 4)))
    assert report["shapes"] == 3


def test_shapes_beyond_the_limit_run_eagerly_and_say_so():
    model = build("llama")
    with paging(model, "host", "recompute", 2) as pager:
        mode = mode_of(pager, True)
        mode.captures.max_shapes = 1
        optimizer = adamw(list(model.parameters()))
        shapes = ((2, 9), (1, 5))
        expected = resident("llama", one, "none", "cpu", adamw, count=6, shapes=shapes)
        compare(train(model, optimizer, one, "cpu", 6, shapes), expected)
        assert set(mode.reasons.values()) == {"inputs have more than 1 forms"}
        assert sum("more than 1 forms" in line for line in mode.events) == 1


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "sequence", "why"),
    [
        ("llama", cached, "an argument of type DynamicCache"),
        ("llama", hidden, "hooks are registered"),
        ("stack", hidden, "what comes into it is used elsewhere, too"),
        ("stack", hooked, "hooks are registered"),
        ("mixtral", one, "hooks are registered"),
    ],
)
def test_what_leaves_a_block_keeps_it_in_graph_mode(kind, sequence, why, policy, captured):
    expected = resident(kind, sequence, "none", "cpu", adamw)
    model = build(kind)
    with paging(model, "host", policy, 2) as pager:
        mode = mode_of(pager, captured)
        compare(train(model, adamw(list(model.parameters())), sequence), expected)
        assert any(why in reason for reason in mode.reasons.values()), mode.reasons
        assert any(why in line for line in mode.events)


class Between(Stack):
    """A stack that does something with what its first block returns, from a certain pass on."""

    what, begins, passes = None, 3, 0

    def forward(self, input_ids, labels=None, use_cache=None):
        self.passes += 1
        x = self.layers[0](self.embed(input_ids))
        more = self.what(x) if self.passes >= self.begins else 0.0
        for layer in self.layers[1:]:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + more
        return SimpleNamespace(loss=loss, logits=logits)


def copies_its_gradient(x):
    x.register_hook(lambda grad: grad.clone())
    return 0.0


def sends_zeros(x):
    return x.sum() * 0.0


def sends_more(x):
    return x.square().mean()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("what", [copies_its_gradient, sends_zeros, sends_more])
def test_what_changes_no_value_between_two_blocks_sends_none_to_graph_mode(what, policy, captured):
    found = []
    for paged in (False, True):
        torch.manual_seed(0)
        model = Between().train()
        model.what = what
        if not paged:
            found.append(train(model, adamw(list(model.parameters())), one, count=5))
            continue
        with paging(model, "host", policy, 2) as pager:
            mode = mode_of(pager, captured)
            found.append(train(model, adamw(list(model.parameters())), one, count=5))
            if what is sends_more:
                assert list(mode.reasons.values()) == [
                    "what it returns is used by others than the next block"
                ]
                assert any("what others sent has a norm of" in line for line in mode.events)
            else:
                assert mode.reasons == {}
            assert not captured or (mode.captures.replays["layers.0"] == 4) == (what is not sends_more)
    if what is not sends_more:  # that has another sum once
        compare(found[1], found[0])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_gradients_are_refused(policy, captured):
    model = build("llama")
    with paging(model, "host", policy, 2, edges=False) as pager:
        mode_of(pager, captured)
        train(model, adamw(list(model.parameters())), one)
        ids = batch(0)
        with pytest.raises(StateError, match=r"create_graph=True.*layers\.3"):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward(create_graph=True)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_backward_without_the_graph_and_a_written_weight_are_refused(policy, captured):
    model = build("llama")
    with paging(model, "host", policy, 2) as pager:
        mode_of(pager, captured)
        train(model, adamw(list(model.parameters())), one)
        ids = batch(0)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.0)
        with pytest.raises(StateError, match="modified in place"):
            loss.backward()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_of_some_inputs_alone_leave_the_weights_alone(captured):
    model = build("llama")
    with paging(model, "host", "recompute", 2) as pager:
        mode_of(pager, captured)
        train(model, adamw(list(model.parameters())), one)
        model.zero_grad()
        x = torch.randn(2, 9, 32, requires_grad=True)
        for _ in range(3):
            (grad,) = torch.autograd.grad(model(inputs_embeds=x, use_cache=False).logits.square().mean(), x)
        assert grad.abs().sum() > 0
        assert all(p.grad is None for p in model.parameters())


def test_an_adapter_that_is_switched_off_is_not_replayed():
    model = build("lora")
    ids = batch(0)
    plain = build("lora")
    with plain.disable_adapter(), torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
    with paging(model, "host", "recompute", 2) as pager:
        mode_of(pager, True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        train(model, optimizer, one)
        with model.disable_adapter():
            x = model.get_input_embeddings()(ids).detach().requires_grad_()
            found = [model(inputs_embeds=x, use_cache=False).logits for _ in range(3)]
        assert all(torch.equal(each, expected) for each in found)


def test_a_tensor_that_slips_out_of_a_block_is_found_when_backward_comes_through_it():
    kept = []

    class Leaky(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            kept.append(y)
            return torch.tanh(y)

    model = torch.nn.Sequential(*[Leaky() for _ in range(3)])
    with paging(model, edges=False, blocks=list(model)) as pager:
        mode_of(pager, False)
        for _ in range(2):
            kept.clear()
            model(torch.randn(2, 8)).sum().backward()
        kept.clear()
        loss = model(torch.randn(2, 8)).sum()
        with pytest.raises(StateError, match="left it other than as its output"):
            (loss + kept[1].sum()).backward()


def test_modules_that_move_are_recorded_anew():
    """Settled, their weights have a slot of their own; unpaged, they stay where they are."""
    expected = resident("llama", one, "none", "cpu", adamw, count=12)
    model = build("llama")
    with paging(model, "host", "recompute", 2, edges=False) as pager:
        mode = mode_of(pager, True)
        optimizer = adamw(list(model.parameters()))
        names = [block.name for block in pager.blocks]
        losses, gradients = [], []
        for start in (0, 4, 8):
            if start == 4:
                pager.settle(names[:2])
            if start == 8:
                pager.unpage(names[2:], lambda parameter: None)
            mode.captures.replays.clear()
            part = train(model, optimizer, one, count=4, first=start)
            losses += part.losses
            gradients += part.gradients
            assert sorted(mode.captures.replays) == names
            assert mode.reasons == {}
        part.losses, part.gradients = losses, gradients
        compare(part, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_whose_weights_stay_have_recordings_of_their_own(policy):
    for kind, sequence in (("lora", one), ("llama_tied", forward_order)):
        expected = resident(kind, sequence, "none", "cpu", adamw)
        model = build(kind)
        with paging(model, "host", policy, 2, pages=lambda parameter: False, edges=False) as pager:
            mode = mode_of(pager, True)
            compare(train(model, adamw(list(model.parameters())), sequence), expected)
            assert len(mode.captures.replays) == LAYERS
            assert mode.captures.recordings == LAYERS
            assert mode.reasons == {}


@pytest.mark.parametrize("policy", list(WRAP_POLICIES))
@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_wrap_captures_and_reports(kind, policy):
    expected = resident(kind, one, "none", "cpu", offload_adamw, count=5)
    model = build(kind)
    options = {**WRAP_POLICIES[policy], "param_offload": True, "capture": True}
    model, optimizer = trainstream.wrap(model, offload_adamw(list(model.parameters())), **options)
    compare(train(model, optimizer, one, count=5), expected)
    captured = trainstream.memory_report(model)["captured"]
    assert captured["blocks"] == LAYERS
    assert captured["replays"] >= 2 * LAYERS  # the first steps are watched and measured
    assert captured["fallbacks"] == {}
    assert captured["bytes"] > 0
    train(model, optimizer, one, count=1)
    events = trainstream.memory_report(model)["events"]
    assert any(f"capture: {LAYERS} of {LAYERS} blocks replay" in line for line in events)
    json.dumps(captured)
    trainstream.unwrap(model)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_fused_modules_are_captured_with_their_blocks(policy):
    found = []
    for capture in (False, True):
        model = build("lora")
        options = {**WRAP_POLICIES[policy], "kernels": True, "fused_lora": True, "quantize": "nf4"}
        model, optimizer = trainstream.wrap(
            model, None, lr=1e-2, capture=capture, param_offload=True, **options
        )
        found.append(train(model, optimizer, one, count=4))
        captured = trainstream.memory_report(model)["captured"]
        assert captured.get("blocks", 0) == LAYERS * capture
        # One for each slot, and the first block, whose input needs no gradient.
        assert captured.get("recordings", 0) == 3 * capture
        trainstream.unwrap(model)
    compare(found[1], found[0])


def test_wrap_without_capture_runs_eagerly_and_says_so():
    model, _ = trainstream.wrap(build("llama"), param_offload=True)
    assert trainstream.memory_report(model)["captured"] == {}
    assert any(
        line.startswith("capture=auto: blocks run eagerly") for line in model._trainstream_session.decisions
    )
    trainstream.unwrap(model)


# The compiler looks at .grad of what comes in where a graph was broken, here behind every block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("before", [True, False])
def test_torch_compile_around_a_captured_model_has_the_same_bits(before):
    torch.compiler.reset()
    expected = resident("llama", one, "none", "cpu", offload_adamw)
    model = build("llama")
    compiled = torch.compile(model, backend="eager") if before else None
    optimizer = offload_adamw(list(model.parameters()))
    _, optimizer = trainstream.wrap(model, optimizer, param_offload=True, recompute=True, capture=True)
    if compiled is None:
        compiled = torch.compile(model, backend="eager")

    def through(_, ids):
        loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss]

    compare(train(model, optimizer, through), expected)
    assert trainstream.memory_report(model)["captured"]["blocks"] == LAYERS
    trainstream.unwrap(model)
    torch.compiler.reset()
