"""Byte budgets: never exceeded, refused with numbers, and without any effect on the result."""

from pathlib import Path

import peft
import pytest
import torch
from conftest import tiny_llama, toy, twin
from torch import nn

import trainstream
from trainstream._budget import host_used
from ts_core.errors import DoesNotFitError
from ts_core.plan import Plan
from ts_core.testing import devices
from ts_core.usage import CONTEXT_BYTES, PeakSampler, release_free_memory
from ts_paging.files import FileTensors, locate

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

MIB = 1 << 20
STEPS = 6


def model_of(kind="full", layers=10):
    """About 2.25 MiB of fp32 weights for each layer, and 1 MiB beside."""
    model = tiny_llama(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, head_dim=64, vocab_size=512
    )
    if kind == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def in_use(device):
    return host_used() if device == "cpu" else torch.cuda.memory_allocated()


def budget_above(device, nbytes):
    """Options that leave `nbytes` beyond what this process holds already."""
    release_free_memory(collect=True)
    if device == "cpu":
        return {"ram_budget": host_used() + nbytes}
    return {"vram_budget": CONTEXT_BYTES + torch.cuda.memory_allocated() + nbytes}


def run(model, optimizer, device, steps=STEPS):
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients_of(model):
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_budget_holds_and_changes_nothing(kind, device, tmp_path):
    # A GPU's allocator takes pieces of 20 MiB, and a session counts on them: there the model is larger.
    layers, more, steps = (10, 0, STEPS) if device == "cpu" else (30, 40, 9)
    torch.manual_seed(0)
    # Recordings would take the room that groups are to return to.
    options = {"lr": 1e-3, "device": device, "quantize": "none", "capture": False}
    expected, optimizer = trainstream.wrap(model_of(kind, layers), None, **options)
    losses = run(expected, optimizer, device, steps)
    weights = {n: p.detach().cpu().clone() for n, p in expected.named_parameters()}
    grads = gradients_of(expected)
    trainstream.unwrap(expected)
    del expected, optimizer

    # The weights alone take 25 MiB (on a GPU 69), training all of them four times that.
    room = budget_above(device, (more + (44 if kind == "full" else 28)) * MIB)
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(
        model_of(kind, layers), None, **options, **room, disk_offload=tmp_path
    )
    session = model._trainstream_session
    assert session.adapting
    assert len(session.plan.paged) > layers
    assert session.plan.policy == ("recompute",) * layers
    limit = room.get("ram_budget") or room["vram_budget"] - CONTEXT_BYTES
    with PeakSampler(0.002, lambda: in_use(device)) as sampler:
        assert run(model, optimizer, device, steps) == losses
    assert sampler.peak_bytes <= limit
    for name, grad in gradients_of(model).items():
        assert torch.equal(grad, grads[name]), name
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), weights[name]), name
    paged = [p for block in session.pager.blocks for p in block.parameters if p.requires_grad]
    assert bool(paged) == (kind == "full")
    for p in paged:  # weight, gradient and moments are where the plan says
        state = optimizer.state[p]
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        for tensor in (p.detach(), p.grad, *moments):
            assert (locate(tensor) is not None) == (device == "cpu")
            assert tensor.device.type == "cpu"
        assert device == "cpu" or (p.detach().is_pinned() and p.grad.is_pinned())
    assert not session.adapting
    report = trainstream.memory_report(model)
    assert report["tiers"]["disk" if device == "cpu" else "host"] > 0
    assert 0 < report["params"]["paged_blocks"] < len(session.plan.blocks)  # some came back
    assert Plan.from_json(session.plan.to_json()) == session.plan
    assert "settled after" in " ".join(report["events"])
    assert session.plan.table().count("\n") >= 3
    trainstream.unwrap(model)
    assert not list(tmp_path.iterdir())
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {p.device.type for p in model.parameters()} == {device}
    if device == "cpu":
        assert all(locate(p.detach()) is None for p in model.parameters())
    follow = run(model, optimizer, device, 1)
    assert follow[0] < losses[0]


def test_with_room_for_all_nothing_is_paged_but_the_limit_stays():
    model, optimizer = trainstream.wrap(toy(), ram_budget=host_used() + 2000 * MIB)
    session = model._trainstream_session
    assert session.plan.paged == ()
    assert session.plan.policy == ("recompute",) * 4  # until it is measured
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 16)).sum().backward()
        optimizer.step()
    assert session.plan.policy == ("keep",) * 4
    assert not session.adapting


@pytest.mark.parametrize("device", devices())
def test_what_cannot_fit_is_refused_with_numbers_and_with_what_would_fit(device):
    model = model_of()
    before = {n: p.clone() for n, p in model.named_parameters()}
    option = "ram_budget" if device == "cpu" else "vram_budget"
    size = host_used() - 30 * MIB if device == "cpu" else CONTEXT_BYTES + torch.cuda.memory_allocated() + MIB
    with pytest.raises(DoesNotFitError) as caught:
        trainstream.wrap(model, device=device, **{option: size})
    text = str(caught.value)
    assert f"{option} of at least" in text
    assert "MiB" in text
    assert "quantize" not in text  # nothing is frozen: a codec would not help
    assert "LoRA" in text
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert "_trainstream_session" not in model.__dict__


def test_the_least_budget_that_a_refusal_names_is_accepted():
    from ts_core.memory import parse_bytes

    model = model_of()
    with pytest.raises(DoesNotFitError) as caught:
        trainstream.wrap(model, ram_budget=host_used() - 25 * MIB)
    named = str(caught.value).split("ram_budget of at least ")[1].split(",")[0]
    # Other memory of the process moves by a little meanwhile.
    model, _ = trainstream.wrap(model, ram_budget=parse_bytes(named) + 2 * MIB)
    assert len(model._trainstream_session.plan.paged) == len(model._trainstream_session.plan.blocks)
    trainstream.unwrap(model)


def test_a_disk_budget_is_kept(tmp_path):
    model = model_of()
    room = {**budget_above("cpu", 20 * MIB), "disk_offload": tmp_path}
    with pytest.raises(DoesNotFitError, match="of disk where"):
        trainstream.wrap(model, disk_budget="50MiB", **room)
    assert not list(tmp_path.iterdir())
    model, optimizer = trainstream.wrap(model, lr=1e-3, disk_budget="250MiB", **room)
    run(model, optimizer, "cpu", 3)
    used = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert 50 * MIB < used <= 250 * MIB
    trainstream.unwrap(model)


def test_budgets_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_RAM", str(budget_above("cpu", 20 * MIB)["ram_budget"]))
    model, _ = trainstream.wrap(model_of(), lr=1e-3)
    assert len(model._trainstream_session.plan.paged) >= 11
    trainstream.unwrap(model)


def test_weights_that_are_in_files_already_are_taken_as_they_are(tmp_path):
    files = FileTensors(tmp_path)
    model, plain = model_of("lora"), model_of("lora")
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.data = p.data.clone()
        p.data = files.place(p.data)
    used = files.used_bytes
    options = {"lr": 1e-3, "quantize": "none", "disk_offload": tmp_path}
    model, optimizer = trainstream.wrap(model, None, **options, **budget_above("cpu", 16 * MIB))
    pager = model._trainstream_session.pager
    assert files.used_bytes <= used
    assert all(locate(p.detach())[0] is files for block in pager.blocks for p in block.parameters)
    plain, other = trainstream.wrap(plain, None, lr=1e-3, quantize="none")
    assert run(model, optimizer, "cpu") == run(plain, other, "cpu")
    trainstream.unwrap(model)
    assert files.used_bytes == 0
    files.close()


def test_a_model_in_files_that_fits_is_brought_into_memory(tmp_path):
    files = FileTensors(tmp_path)
    model = toy()
    expected = twin(model)
    for p in model.parameters():
        p.data = files.place(p.data)
    model, _ = trainstream.wrap(model)
    assert all(locate(p.detach()) is None for p in model.parameters())
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_batch_that_is_too_large_is_an_error_before_the_kernel_kills_the_process():
    model, optimizer = trainstream.wrap(model_of("lora"), None, lr=1e-3, **budget_above("cpu", 40 * MIB))
    big = torch.zeros(64 * MIB // 4)  # something else that this process holds
    big.fill_(1.0)
    with pytest.raises(DoesNotFitError, match="micro-batch"):
        run(model, optimizer, "cpu", 1)
    del big
    assert len(run(model, optimizer, "cpu", 1)) == 1
    trainstream.unwrap(model)


def test_the_pages_of_files_do_not_count(tmp_path):
    path = tmp_path / "file"
    before = host_used()
    tensor = torch.from_file(str(path), shared=True, size=64 * MIB, dtype=torch.uint8).fill_(1)
    if path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("temporary files are memory here")
    assert host_used() - before < 8 * MIB
    assert int(tensor[-1]) == 1


def test_zero_grad_of_the_model_is_the_models_own_again_in_copies_and_after_unwrap():
    import copy
    import pickle

    model, _ = trainstream.wrap(toy(), param_offload=True)
    model(torch.randn(3, 16)).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(3, 16)).sum().backward()
        other.zero_grad()
        assert all(p.grad is None for p in other.parameters())
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    trainstream.unwrap(model)
    assert "zero_grad" not in model.__dict__
