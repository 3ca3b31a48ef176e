"""Gradients that come after `backward()` has returned, some of them as bfloat16: the same bits as at once.

On a machine without a GPU the copies of gradients are those between CPU tensors, by the engine's threads.
"""

import itertools

import pytest
import torch
from grid_models import SEQUENCES, adamw, batch, build, offload_adamw, paged, same_bits, values

from ts_core import registry
from ts_core.arriving import ArrivingGradient
from ts_core.testing import devices
from ts_optim import OffloadAdamW, narrow_grads
from ts_paging import CopyEngine
from ts_paging import sink as sink_module


@pytest.fixture
def leaving(monkeypatch):
    """Gradients of CPU blocks leave as those of GPU blocks do."""
    before, engine = registry.copy_engine(), CopyEngine()
    registry.set_copy_engine(engine)
    monkeypatch.setattr(sink_module, "_is_away", lambda grad: True)
    yield
    registry.set_copy_engine(before)
    engine.close()


def clipped(parameters):
    trained = [p for p in parameters if p.requires_grad]
    return OffloadAdamW(trained, lr=1e-2, accumulation_steps=None, max_grad_norm=0.1, measure_updates=True)


def int8(parameters):
    trained = [p for p in parameters if p.requires_grad]
    return OffloadAdamW(trained, lr=1e-2, accumulation_steps=None, moment_dtype="int8", max_grad_norm=0.1)


def trained(
    kind, sequence, make, device, *, late, autocast, policy="keep", dtype=torch.float32, between=None
):
    """Losses, weights at the end, and which classes of gradient `step()` found."""
    model, kinds = build(kind).to(dtype), set()
    with paged(model, "wrap", policy, device, make) as (pager, optimizer):
        assert pager.sink.narrow_by is narrow_grads
        pager.sink.late = pager.sink.narrow = late
        losses, norms = [], []
        for step in range(4):
            torch.manual_seed(step)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                losses += [loss.item() for loss in sequence(model, batch(step, device))]
            with torch._C.DisableTorchFunctionSubclass():
                kinds |= {type(p.grad) for p in model.parameters()}
            if between is not None:
                between(model, optimizer)
            optimizer.step()
            norms.append(optimizer.last_grad_norm)
            optimizer.zero_grad(set_to_none=step != 2)
        state = optimizer.state_dict()["state"]
        moved = pager.sink.d2h_bytes
        return losses, values(model), norms, state, kinds, moved


def assert_same(got, expected):
    assert got[0] == expected[0]
    assert got[2] == expected[2]
    for name, value in expected[1].items():
        assert same_bits(got[1][name], value), name
    for key, entry in expected[3].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(got[3][key][name]), torch.as_tensor(value)), (key, name)


CASES = [
    (kind, sequence, make, autocast)
    for (kind, make, autocast), sequence in zip(
        itertools.cycle(
            [
                ("llama", offload_adamw, True),
                ("gpt2", clipped, True),
                ("llama", int8, True),
                ("gemma2", clipped, False),
            ]
        ),
        list(SEQUENCES),
        strict=False,
    )
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("kind", "sequence", "make", "autocast"), CASES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_the_bits_are_those_of_gradients_that_are_waited_for(kind, sequence, make, autocast, device, leaving):
    expected = trained(kind, sequence, make, device, late=False, autocast=autocast)
    got = trained(kind, sequence, make, device, late=True, autocast=autocast)
    assert_same(got, expected)
    assert ArrivingGradient not in expected[4]
    if sequence.__name__ in ("one", "cached", "hidden", "hooked"):
        assert ArrivingGradient in got[4]
        assert (got[5] < 0.8 * expected[5]) == autocast


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_whatever_happens_to_activations(policy, dtype, device, leaving):
    sequence = next(iter(SEQUENCES))
    runs = [
        trained("llama", sequence, clipped, device, late=late, autocast=False, policy=policy, dtype=dtype)
        for late in (False, True)
    ]
    assert_same(runs[1], runs[0])


def edited(model, optimizer):
    for parameter in itertools.islice(model.parameters(), 0, None, 2):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def edited_through_data(model, optimizer):
    for parameter in itertools.islice(model.parameters(), 1, None, 2):
        if parameter.grad is not None:
            parameter.grad.data[0] = 0.25


def exchanged(model, optimizer):
    for parameter in itertools.islice(model.parameters(), 0, None, 3):
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 1


def clipped_by_torch(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def scaled(model, optimizer):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(grads, 0.125)


def evaluated(model, optimizer):
    with torch.no_grad():
        model(input_ids=batch(9, next(model.parameters()).device if model.device.type == "cpu" else "cuda"))


def dropped(model, optimizer):
    parameters = list(model.parameters())
    first = int(optimizer.stats()["steps"]) % 3
    for parameter in parameters[first::3]:
        parameter.grad = None


BETWEEN = [edited, edited_through_data, exchanged, clipped_by_torch, scaled, evaluated, dropped]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [offload_adamw, clipped], ids=lambda f: f.__name__)
def test_whatever_is_done_between_backward_and_step(between, make, device, leaving):
    sequence = next(iter(SEQUENCES))
    runs = [
        trained("llama", sequence, make, device, late=late, autocast=True, between=between)
        for late in (False, True)
    ]
    assert_same(runs[1], runs[0])


def test_another_optimizer_finds_ordinary_gradients(leaving):
    model = build("llama")
    with paged(model, "host", "keep", "cpu", adamw) as (pager, optimizer):
        assert not pager.sink.late
        one = next(iter(SEQUENCES))
        one(model, batch(0))
        with torch._C.DisableTorchFunctionSubclass():
            assert {type(p.grad) for p in model.parameters()} == {torch.Tensor}
        optimizer.step()
