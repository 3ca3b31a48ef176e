"""Sums of micro-batches, measured norms, updates during backward: paged weights give the resident's bits."""

import pytest
import torch
from tiny_models import tiny_config
from transformers import LlamaForCausalLM

import trainstream
from ts_core.testing import assert_bit_equal
from ts_optim import OffloadAdamW, norms


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
