"""Limits that change while a run is under way: groups leave and return, and nothing else changes."""

import peft
import pytest
import torch
from conftest import tiny_llama
from test_budgets import MIB, budget_above, gradients_of, in_use

import trainstream
from ts_core.errors import DoesNotFitError, OptionError
from ts_core.testing import devices
from ts_core.usage import CONTEXT_BYTES, PeakSampler
from ts_paging.files import locate

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def model_of(kind="full"):
    """About 13 MiB of fp32 weights."""
    model = tiny_llama(
        hidden_size=256, intermediate_size=512, num_hidden_layers=5, head_dim=64, vocab_size=512
    )
    if kind == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def option(device, room):
    name = "ram" if device == "cpu" else "vram"
    return {name: room[f"{name}_budget"]}


def paged_in(session):
    return len(session.plan.paged) - sum(row.settled for row in session.plan.blocks)


def begun(kind, device, wide, options):
    """Train six steps under the least budget of `wide` that leaves some groups where they compute."""
    for room in wide:
        large = budget_above(device, room * MIB)
        torch.manual_seed(0)
        model, optimizer = trainstream.wrap(model_of(kind), None, **options, **large)
        losses = run_from(model, optimizer, device, 0, 6)
        session = model._trainstream_session
        if paged_in(session) < len(session.plan.blocks):
            return model, optimizer, losses, large
        trainstream.unwrap(model)
        del model, optimizer, session
    raise AssertionError(f"with {wide[-1]} MiB every group is still paged")


def less_than_is_taken(model, small):
    """On a GPU, a budget in which the step before does not fit: by half a block, or as small as given."""
    if "vram_budget" not in small:
        return small
    session = model._trainstream_session
    limits, kept = session.relief.places.limits, session.tuner.governor.kept
    block = max(sum(p.nbytes for p in each.parameters()) for each in trainstream.find_blocks(model))
    taken = torch.cuda.max_memory_allocated() - kept - limits.others - block // 2
    cap = limits.others + int(taken / (1 - session.options.vram_headroom))
    return {"vram_budget": min(small["vram_budget"], CONTEXT_BYTES + cap)}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_budget_shrinks_and_grows_and_changes_nothing(kind, device, tmp_path):
    options = {"lr": 1e-3, "device": device, "quantize": "none"}
    torch.manual_seed(0)
    expected, optimizer = trainstream.wrap(model_of(kind), None, **options)
    losses = run_from(expected, optimizer, device, 0, 18)
    weights = {n: p.detach().cpu().clone() for n, p in expected.named_parameters()}
    grads = gradients_of(expected)
    trainstream.unwrap(expected)
    del expected, optimizer

    # A GPU's allocator counts what is free between tensors, too: how much that is shows in the run.
    wide, narrow = ((90, 120), 30) if kind == "full" else (range(40, 121, 8), 18)
    small = budget_above(device, narrow * MIB)
    model, optimizer, got, large = begun(kind, device, wide, {**options, "disk_offload": tmp_path})
    session = model._trainstream_session
    at_first = paged_in(session)
    small = less_than_is_taken(model, small)
    session.set_budget(**option(device, small))
    assert paged_in(session) > at_first
    limit = small.get("ram_budget") or small["vram_budget"] - CONTEXT_BYTES
    with PeakSampler(0.002, lambda: in_use(device)) as sampler:
        got += run_from(model, optimizer, device, 6, 12)
    assert sampler.peak_bytes <= limit
    assert not session.adapting
    assert paged_in(session) > at_first
    if device != "cpu":  # more may be free between tensors than in the beginning
        large["vram_budget"] += 24 * MIB
    session.set_budget(**option(device, large))
    got += run_from(model, optimizer, device, 12, 18)
    assert paged_in(session) <= at_first
    assert got == losses
    for name, grad in gradients_of(model).items():
        assert torch.equal(grad, grads[name]), name
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), weights[name]), name
    said = " ".join(session.events.events)
    assert "may be used from now on: " in said
    assert said.count("budgets: ") == 2
    trainstream.unwrap(model)
    assert not list(tmp_path.iterdir())


def run_from(model, optimizer, device, start, end):
    losses = []
    for step in range(start, end):
        ids = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_growth_lets_groups_return_in_a_run_that_began_without_any_budget(tmp_path):
    model, optimizer = trainstream.wrap(model_of(), None, lr=1e-3, disk_offload=tmp_path)
    session = model._trainstream_session
    assert session.pager is None
    losses = run_from(model, optimizer, "cpu", 0, 2)
    session.set_budget(ram=session.relief.places.limits.others + 30 * MIB)
    assert len(session.plan.paged) == len(session.plan.blocks)
    assert all(locate(p.detach()) is not None for b in session.pager.blocks for p in b.parameters)
    losses += run_from(model, optimizer, "cpu", 2, 4)
    session.set_budget(ram=None)
    losses += run_from(model, optimizer, "cpu", 4, 9)
    assert session.plan.paged == ()
    assert session.plan.policy == ("keep",) * 5
    trainstream.unwrap(model)
    torch.manual_seed(0)
    other, optimizer = trainstream.wrap(model_of(), None, lr=1e-3)
    assert run_from(other, optimizer, "cpu", 0, 9) == losses


def test_what_cannot_be_is_refused_and_nothing_is_changed(tmp_path):
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, disk_offload=tmp_path, **budget_above("cpu", 40 * MIB)
    )
    session = model._trainstream_session
    run_from(model, optimizer, "cpu", 0, 5)
    before = session.plan, session.options, session.adapting
    used = session.tiers.files.used_bytes
    assert used
    for budget, says in (
        ({"ram": session.relief.places.limits.others + MIB}, "ram of at least .* Nothing is changed"),
        ({"disk": used // 2}, "of disk where|are in files already"),
    ):
        with pytest.raises(DoesNotFitError, match=says):
            session.set_budget(**budget)
    for budget in ({"ram": -1}, {"vram": "much"}, {"disk": 1.5}):
        with pytest.raises(OptionError, match=r"option (ram|vram|disk)_budget"):
            session.set_budget(**budget)
    assert (session.plan, session.options, session.adapting) == before
    session.set_budget(disk=4 * used)
    with pytest.raises(TypeError):
        session.set_budget(1)
    run_from(model, optimizer, "cpu", 5, 7)
    trainstream.unwrap(model)
