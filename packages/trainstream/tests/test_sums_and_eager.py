"""Sums of micro-batches, measured norms, updates during backward: paged weights give the resident's bits."""

import pytest
import torch
from tiny_models import tiny_config
from transformers import LlamaForCausalLM

import trainstream
from trainstream._staging import bring_back
from ts_core.guard import guard_of
from ts_core.testing import assert_bit_equal
from ts_optim import OffloadAdamW, norms
from ts_optim.gradients import ConsumedGradient


def run(paged, passes, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=True)).to(torch.bfloat16)
    optimizer = OffloadAdamW(
        model.parameters(), lr=1e-2, accumulation_steps=passes, accumulate_fp32=True, **options
    )
    if paged:
        trainstream.wrap(model, optimizer, param_offload=True, device="cpu")
    losses = []
    for step in range(3):
        for k in range(passes):
            ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(10 * step + k))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    if paged:
        trainstream.unwrap(model)
    return losses, weights, optimizer.last_grad_norm


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.5}, {"measure_grad_norm": True}], ids=["plain", "clip", "norm"]
)
@pytest.mark.parametrize("eager", [False, True])
def test_paged_weights_train_as_resident_ones(passes, options, eager):
    losses, weights, norm = run(False, passes, **options)
    paged_losses, paged, paged_norm = run(True, passes, eager=eager, **options)
    assert paged_losses == losses
    assert paged_norm == norm
    for name, t in weights.items():
        assert_bit_equal(paged[name], t)


def test_a_paged_gradient_is_not_read_again_for_its_norm(monkeypatch):
    counts = []
    measure = norms.grad_sumsq

    def counting(grads, threads=0):
        counts.append(len(grads))
        return measure(grads, threads)

    monkeypatch.setattr(norms, "grad_sumsq", counting)
    run(True, 1, max_grad_norm=0.5)
    assert set(counts) == {2}  # the embedding and the last norm, which stay where they are


@pytest.mark.parametrize("set_to_none", [None, True, False])
@pytest.mark.parametrize("paged", [False, True])
def test_used_gradients_are_in_nobodys_way(paged, set_to_none):
    def train(eager):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(tie_word_embeddings=True)).to(torch.bfloat16)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, eager=eager)
        for step in range(5):
            if eager and step in (1, 3):
                trainstream.wrap(model, optimizer, param_offload=paged, device="cpu")
            ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            if eager and set_to_none is not None:
                optimizer.zero_grad(set_to_none)
            if eager and step == 1 and paged:
                session = model._trainstream_session
                assert not any(guard_of(p).escaped for b in session.pager.blocks for p in b.parameters)
                before = trainstream.memory_report(model)["tiers"]
                assert not any(guard_of(p).escaped for b in session.pager.blocks for p in b.parameters)
                return_one(session)
                assert trainstream.memory_report(model)["tiers"]["disk"] < before["disk"]
            if eager and step in (2, 3):
                trainstream.unwrap(model)
                used = [type(p.grad) is ConsumedGradient for p in model.parameters()]
                assert any(used) is (set_to_none is not True)
        optimizer.synchronize()
        return {name: t.clone() for name, t in model.state_dict().items()}

    expected = train(False)
    for name, t in train(True).items():
        assert_bit_equal(t, expected[name])


def return_one(session):
    """What the tuner does for a group that has room."""
    free = []
    session.pager.unpage([session.pager.blocks[0].name], free.append)
    session.tiers.to_host(free)
    bring_back(session.model, session.optimizer, {id(p): p for p in free}, torch.device("cpu"))
    session.optimizer.rehouse(free)
