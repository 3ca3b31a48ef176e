import copy

import peft
import pytest
import torch
from conftest import tiny_model

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_fused.preference import dpo_loss, kto_loss, orpo_loss, simpo_loss
from ts_hf.packing import document_ids, pack_sequences
from ts_hf.preference import reference_logprobs, sequence_logprobs_for

# PEFT uses a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

PAIRS = [(5, 2), (1, 1), (0, 3), (4, 4)]  # lengths of chosen and rejected answers; the last pair is one text
PROMPT = 4


def texts(which, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, lengths in enumerate(PAIRS):
        prompt = torch.randint(3, 97, (PROMPT,), generator=generator)
        answers = [torch.randint(3, 97, (length,), generator=generator) for length in lengths]
        answer = answers[0] if index == len(PAIRS) - 1 else answers[which]
        found.append(torch.cat([prompt, answer]))
    return found


def batch(which, left=False):
    """Padded rows; only answers have labels."""
    rows = texts(which)
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        start = longest - len(row) if left else 0
        ids[index, start : start + len(row)] = row
        mask[index, start : start + len(row)] = 1
        labels[index, start + PROMPT : start + len(row)] = row[PROMPT:]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def oracle(model, which):
    """Row by row, with whole logits: sums of log-softmax at the answer's tokens."""
    values = []
    for row in texts(which):
        logits = model(input_ids=row[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, row[1:, None])[:, 0]
        values.append(logprobs[PROMPT - 1 :].sum())
    return torch.stack(values)


def lora(model, **changes):
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


MODELS = {
    "full": lambda: tiny_model(),
    "lora": lambda: lora(tiny_model()),
    "dropout": lambda: lora(tiny_model(), lora_dropout=0.3),
    "saved head": lambda: lora(tiny_model(), modules_to_save=["lm_head"]),
    "cap": lambda: tiny_model("gemma2", attn_implementation="eager"),
    "scale": lambda: tiny_model("granite"),
}


@pytest.mark.parametrize(("chunk", "left"), [(1, False), (3, True), (100, False)])
@pytest.mark.parametrize("kind", ["full", "lora", "saved head", "cap", "scale"])
def test_values_and_gradients_are_those_of_whole_logits_row_by_row(kind, chunk, left):
    model = MODELS[kind]().eval()
    twin = copy.deepcopy(model)
    ours = sequence_logprobs_for(model, batch(0, left), chunk_size=chunk)
    expected = oracle(twin, 0)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
    assert ours[2].item() == 0.0  # an empty answer
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5])
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, got), want in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["lora", "dropout", "saved head", "full"])
@pytest.mark.parametrize("beta", [0.1, 5.0])
def test_training_starts_at_ln_2_and_the_reference_stays(kind, beta):
    model = MODELS[kind]().train()
    batches = [batch(0), batch(1)]
    reference = reference_logprobs(model, batches)
    assert all(module.training for module in model.modules())
    kept = [values.clone() for values in reference]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        # Fresh adapters add 0, with or without dropout.
        policy = [sequence_logprobs_for(model, b) for b in batches]
        loss, chosen, rejected = dpo_loss(*policy, *reference, beta=beta)
        if step == 0:
            assert loss.item() == pytest.approx(0.693147, abs=1e-6)
            assert chosen.tolist() == rejected.tolist() == [0.0] * 4
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(reference, kept, strict=True))
    if kind != "full":  # adapters off is the base, whatever was trained
        assert all(torch.equal(a, b) for a, b in zip(reference_logprobs(model, batches), kept, strict=True))


def test_the_reference_is_that_of_a_frozen_copy_of_the_base():
    base = tiny_model()
    frozen = copy.deepcopy(base).eval()
    model = lora(base, init_lora_weights=False, modules_to_save=["lm_head"])
    ours = reference_logprobs(model, [batch(0)])[0]
    torch.testing.assert_close(ours, oracle(frozen, 0).detach(), rtol=1e-5, atol=2e-5)
    assert not torch.allclose(ours, sequence_logprobs_for(model, batch(0)).detach(), atol=1e-3)


def test_adapters_of_transformers_own_are_switched_off_too(monkeypatch):
    # It asks for a newer PEFT than it needs here.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = tiny_model()
    expected = oracle(copy.deepcopy(model), 0).detach()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    before = sequence_logprobs_for(model, batch(0)).detach()
    torch.testing.assert_close(reference_logprobs(model, [batch(0)])[0], expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(sequence_logprobs_for(model, batch(0)).detach(), before)


def test_chosen_and_rejected_in_one_row_have_their_own_values():
    model = tiny_model()
    rows = texts(0) + texts(1)
    labels = [torch.cat([torch.full((PROMPT,), -100), row[PROMPT:]]) for row in rows]
    packed = pack_sequences(rows, 80, labels=labels)
    segments = document_ids(packed["position_ids"])
    count = len(rows)
    found = sequence_logprobs_for(model, packed, segments=segments, num_segments=count)
    order = sorted(range(count), key=lambda index: -len(rows[index]))
    expected = torch.cat([oracle(model, 0), oracle(model, 1)])
    torch.testing.assert_close(found, expected[order], rtol=1e-5, atol=2e-5)
    model.requires_grad_(False)  # the fused way
    torch.testing.assert_close(
        sequence_logprobs_for(model, packed, segments=segments, num_segments=count), found
    )


@pytest.mark.parametrize("trained", [True, False])
def test_segments_that_do_not_fit_are_named(trained):
    model = tiny_model().requires_grad_(trained)
    packed = pack_sequences([torch.arange(5), torch.arange(6)], 16)
    segments = document_ids(packed["position_ids"])
    with pytest.raises(ArgumentError, match="num_segments: expected how many"):
        sequence_logprobs_for(model, packed, segments=segments)
    with pytest.raises(ArgumentError, match="None without segments"):
        sequence_logprobs_for(model, packed, num_segments=2)
    with pytest.raises(ArgumentError, match="segments: expected shape"):
        sequence_logprobs_for(model, packed, segments=segments[:, :5], num_segments=2)
    with pytest.raises(ArgumentTypeError, match="segments"):
        sequence_logprobs_for(model, packed, segments=segments.float(), num_segments=2)


def test_averages_feed_the_losses_without_a_reference():
    model = lora(tiny_model(), init_lora_weights=False)
    chosen, rejected = (sequence_logprobs_for(model, batch(which), average=True) for which in (0, 1))
    lengths = torch.tensor([max(1, pair[0]) for pair in PAIRS])
    torch.testing.assert_close(chosen * lengths, sequence_logprobs_for(model, batch(0)), rtol=1e-5, atol=1e-5)
    total = orpo_loss(chosen, rejected, -chosen).loss + simpo_loss(chosen, rejected).loss
    total = total + kto_loss(chosen, rejected.detach(), torch.tensor([True, False, True, True])).loss
    total.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_what_cannot_be_a_reference_is_refused():
    with pytest.raises(OptionError, match="bias"):
        reference_logprobs(lora(tiny_model(), bias="lora_only"), [batch(0)])
    with pytest.raises(ArgumentError, match="labels"):
        sequence_logprobs_for(tiny_model(), {"input_ids": torch.ones(1, 2, dtype=torch.long)})


def test_the_values_are_those_of_trl():
    utils = pytest.importorskip("trl.trainer.utils")
    model = tiny_model().eval()
    given = batch(0)
    labels = given["labels"]
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits[:, :-1]
    tokens = utils.selective_log_softmax(logits, labels[:, 1:].clamp(min=0))
    expected = (tokens * (labels[:, 1:] != -100)).sum(-1)
    ours = sequence_logprobs_for(model, {k: v for k, v in given.items() if k != "position_ids"})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_orpo_and_simpo_are_those_of_trl():
    from types import SimpleNamespace

    orpo = pytest.importorskip("trl.experimental.orpo")
    cpo = pytest.importorskip("trl.experimental.cpo")
    chosen, rejected = torch.tensor([-0.3, -2.0, -1.1]), torch.tensor([-0.9, -0.4, -3.0])
    stand_in = SimpleNamespace(
        beta=0.7, accelerator=SimpleNamespace(device="cpu"), alpha=0.0, loss_type="simpo", simpo_gamma=0.4,
        label_smoothing=0.1,
    )  # fmt: skip
    odds = orpo.ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)[0]
    ours = orpo_loss(chosen, rejected, torch.zeros(3), beta=0.7, reduction="none").loss
    torch.testing.assert_close(ours, -odds)
    theirs = cpo.CPOTrainer.cpo_loss(stand_in, chosen, rejected)[0]
    ours = simpo_loss(chosen, rejected, beta=0.7, gamma=0.4, label_smoothing=0.1, reduction="none").loss
    torch.testing.assert_close(ours, theirs)
