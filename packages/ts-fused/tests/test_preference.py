import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import devices, make_tensor
from ts_fused.logprobs import sequence_logprobs
from ts_fused.preference import dpo_loss, kto_loss, orpo_loss, simpo_loss

FINITE = st.floats(-40, 0, allow_nan=False)
PAIRS = st.lists(st.tuples(FINITE, FINITE, FINITE, FINITE), min_size=1, max_size=6)


def oracle(hidden, weight, bias, labels, cap=None, scale=1.0):
    """Float64 log-probabilities of the tokens after the shift, `(B, S - 1)`; 0 where nothing counts."""
    z = hidden.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    z = z * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    targets = labels[:, 1:]
    found = torch.log_softmax(z[:, :-1], -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == -100, 0.0, found)


def make(device="cpu", dtype=torch.float32, rows=3, length=7, width=8, vocab=19, seed=0):
    hidden = make_tensor((rows, length, width), dtype=dtype, device=device, seed=seed)
    weight = make_tensor((vocab, width), dtype=dtype, device=device, seed=seed + 1)
    bias = make_tensor((vocab,), dtype=dtype, device=device, seed=seed + 2)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    labels[-1] = -100
    return hidden, weight, bias, labels.to(device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("trained", ["hidden", "head", "both"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("average", [False, True])
def test_values_and_gradients_are_those_of_float64(device, trained, chunk, average):
    hidden, weight, bias, labels = make(device)
    hidden.requires_grad_(trained != "head")
    for tensor in (weight, bias):
        tensor.requires_grad_(trained != "hidden")
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (hidden, weight, bias)]
    ours = sequence_logprobs(
        hidden, weight, labels, bias, chunk_size=chunk, average=average, softcap=5.0, logit_scale=0.7
    )
    tokens = oracle(*wide, labels, cap=5.0, scale=0.7)
    expected = tokens.sum(-1)
    if average:
        expected = expected / (labels[:, 1:] != -100).sum(-1).clamp(min=1)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-6, atol=1e-6)
    assert ours[-1].item() == 0.0
    assert math.copysign(1.0, ours[-1].item()) == 1.0
    factors = torch.tensor([0.3, -2.0, 1.5], device=device)
    (ours * factors).sum().backward()
    (expected * factors).sum().backward()
    for got, want in zip((hidden, weight, bias), wide, strict=True):
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None:
            torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_rounding_of_logits(device, dtype):
    hidden, weight, bias, labels = make(device, dtype, seed=5)
    hidden.requires_grad_()
    ours = sequence_logprobs(hidden, weight, labels, bias, chunk_size=4)
    wide = hidden.detach().double().requires_grad_()
    expected = oracle(wide, weight, bias, labels).sum(-1)
    room = torch.finfo(dtype).eps * 40
    torch.testing.assert_close(ours.double(), expected, rtol=room, atol=room)
    ours.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=8 * room, atol=4 * room)


@given(st.integers(0, 50), st.integers(1, 9), st.sampled_from([1, 2, 5, 64]))
def test_sequences_in_one_row_have_the_values_of_rows_of_their_own(seed, length, chunk):
    hidden, weight, bias, labels = make(rows=2, length=length, seed=seed)
    labels[-1] = labels[0]
    labels[:, 0] = -100
    apart = sequence_logprobs(hidden, weight, labels, bias, chunk_size=chunk)
    segments = torch.arange(2)[:, None].expand(2, length).reshape(1, -1)
    together = sequence_logprobs(
        hidden.reshape(1, -1, 8), weight, labels.reshape(1, -1), bias, segments=segments, num_segments=2
    )
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def test_nothing_is_computed_for_gradients_under_no_grad_and_twice_backward_works():
    hidden, weight, _, labels = make()
    weight.requires_grad_()
    with torch.no_grad():
        assert not sequence_logprobs(hidden, weight, labels).requires_grad
    value = sequence_logprobs(hidden, weight, labels).sum()
    (first,) = torch.autograd.grad(value, weight, retain_graph=True)
    (second,) = torch.autograd.grad(value, weight)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, ArgumentError, "labels"),
        ({"labels": torch.full((3, 7), 19)}, ArgumentError, r"\[sequence_logprobs\] labels: .*19"),
        ({"labels": torch.zeros(3, 7)}, ArgumentTypeError, "targets"),
        ({"weight": torch.zeros(19, 9)}, ArgumentError, "weight"),
        ({"chunk_size": 0}, OptionError, "chunk_size"),
        ({"average": 2}, OptionError, "average"),
        ({"segments": torch.zeros(3, 7, dtype=torch.long)}, ArgumentError, "num_segments"),
        ({"num_segments": 3}, ArgumentError, "num_segments"),
        ({"segments": torch.zeros(3, 7), "num_segments": 1}, ArgumentTypeError, "segments"),
        ({"segments": torch.zeros(7, dtype=torch.long), "num_segments": 1}, ArgumentError, "segments"),
        ({"hidden": [1.0]}, ArgumentTypeError, "hidden"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, error, match):
    hidden, weight, _, labels = make()
    given = {"hidden": hidden, "weight": weight, "labels": labels, **changes}
    with pytest.raises(error, match=match):
        sequence_logprobs(**given)


# -- losses


def tensors(pairs, dtype=torch.float32):
    return [torch.tensor(column, dtype=dtype) for column in zip(*pairs, strict=True)]


@given(PAIRS, st.sampled_from([0.1, 5.0]), st.sampled_from([0.0, 0.1, 0.5]))
def test_dpo_is_the_published_formula(pairs, beta, smoothing):
    got = dpo_loss(*(tensors(pairs)), beta=beta, label_smoothing=smoothing)
    pc, pr, rc, rr = tensors(pairs, torch.float64)
    delta = beta * ((pc - rc) - (pr - rr))
    expected = -(1 - smoothing) * torch.log(torch.sigmoid(delta)) - smoothing * torch.log(
        torch.sigmoid(-delta)
    )
    torch.testing.assert_close(got.loss.double(), expected.mean(), rtol=1e-4, atol=2e-5 * beta)
    torch.testing.assert_close(got.chosen_rewards.double(), beta * (pc - rc), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.rejected_rewards.double(), beta * (pr - rr), rtol=1e-5, atol=1e-5)


def test_a_policy_that_is_its_reference_has_loss_ln_2_and_no_rewards():
    chosen, rejected = torch.tensor([-3.7, 0.0, -900.0]), torch.tensor([-1.3, 0.0, -2.0])
    got = dpo_loss(chosen, rejected, chosen.clone(), rejected.clone())
    assert got.loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert got.chosen_rewards.tolist() == got.rejected_rewards.tolist() == [0.0] * 3


@pytest.mark.parametrize("ratio", [500.0, -500.0])
@pytest.mark.parametrize("beta", [0.1, 5.0])
def test_large_margins_are_exact(ratio, beta):
    policy = torch.tensor([ratio], requires_grad=True)
    zero = torch.zeros(1)
    loss = dpo_loss(policy, zero, zero, zero, beta=beta).loss
    loss.backward()
    expected = beta * 500.0 if ratio < 0 else math.log1p(math.exp(-beta * 500.0))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(policy.grad).all()


def test_a_step_cut_into_micro_batches_has_the_same_gradient():
    values = tensors([(-1.0, -2.0, -1.5, -1.0), (-3.0, -1.0, -2.0, -2.0), (-0.5, -4.0, -1.0, -3.0)])
    whole = values[0].clone().requires_grad_()
    dpo_loss(whole, *values[1:]).loss.backward()
    cut = values[0].clone().requires_grad_()
    for part in (slice(0, 1), slice(1, 3)):
        dpo_loss(cut[part], *(v[part] for v in values[1:]), num_items=3).loss.backward()
    torch.testing.assert_close(cut.grad, whole.grad)


def test_hinge_ipo_and_reductions():
    values = tensors([(-1.0, -2.0, -1.5, -1.0), (-3.0, -1.0, -2.0, -2.0)])
    delta = (values[0] - values[2]) - (values[1] - values[3])
    got = dpo_loss(*values, loss_type="hinge", reduction="none").loss
    torch.testing.assert_close(got, torch.relu(1 - 0.1 * delta))
    got = dpo_loss(*values, loss_type="ipo", reduction="sum").loss
    torch.testing.assert_close(got, (delta - 5.0).square().sum())
    with pytest.raises(ArgumentError, match="label_smoothing"):
        dpo_loss(*values, loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(ArgumentError, match="num_items"):
        dpo_loss(*values, reduction="sum", num_items=2)
    with pytest.raises(OptionError, match="loss_type"):
        dpo_loss(*values, loss_type="best")
    with pytest.raises(OptionError, match="beta"):
        dpo_loss(*values, beta=0.0)
    with pytest.raises(ArgumentError, match="policy_rejected"):
        dpo_loss(values[0], values[1][:1], *values[2:])
    with pytest.raises(ArgumentTypeError, match="reference_chosen"):
        dpo_loss(values[0], values[1], values[2].long(), values[3])


@given(st.lists(st.tuples(st.floats(-30, -1e-3), st.floats(-30, -1e-3)), min_size=1, max_size=5))
def test_orpo_is_the_published_formula(pairs):
    chosen, rejected = tensors(pairs, torch.float64)
    odds = [value - torch.log(-torch.expm1(value)) for value in (chosen, rejected)]
    expected = 2.5 - 0.3 * torch.log(torch.sigmoid(odds[0] - odds[1])).mean()
    leaf = chosen.float().requires_grad_()
    got = orpo_loss(leaf, rejected.float(), torch.tensor(2.5), beta=0.3)
    torch.testing.assert_close(got.loss.double(), expected, rtol=1e-5, atol=1e-5)
    got.loss.backward()
    assert torch.isfinite(leaf.grad).all()


def test_orpo_of_an_empty_answer_is_finite():
    leaf = torch.zeros(2, requires_grad=True)
    got = orpo_loss(leaf, torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 2.0]))
    got.loss.backward()
    assert torch.isfinite(got.loss)
    assert torch.isfinite(leaf.grad).all()
    with pytest.raises(ArgumentError, match="chosen_nll"):
        orpo_loss(leaf, leaf, torch.zeros(3))


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=5), st.sampled_from([0.0, 0.2]))
def test_simpo_is_the_published_formula(pairs, smoothing):
    chosen, rejected = tensors(pairs, torch.float64)
    margin = 2.0 * (chosen - rejected) - 0.5
    expected = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    got = simpo_loss(chosen.float(), rejected.float(), gamma=0.5, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(got.loss.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.lists(st.tuples(FINITE, FINITE, st.booleans()), min_size=1, max_size=6), st.floats(-2, 2))
def test_kto_is_the_published_formula(rows, kl):
    policy, reference = tensors([row[:2] for row in rows], torch.float64)
    good = torch.tensor([row[2] for row in rows])
    ratio, point = policy - reference, max(0.0, kl)
    expected = torch.where(
        good,
        1.5 * (1 - torch.sigmoid(0.1 * (ratio - point))),
        0.5 * (1 - torch.sigmoid(0.1 * (point - ratio))),
    )
    got = kto_loss(
        policy.float(), reference.float(), good, kl=kl, desirable_weight=1.5, undesirable_weight=0.5
    )
    torch.testing.assert_close(got.loss.double(), expected.mean(), rtol=1e-4, atol=1e-5)
    assert len(got.chosen_rewards) == int(good.sum())
    with pytest.raises(ArgumentTypeError, match="desirable"):
        kto_loss(policy.float(), reference.float(), good.long())
    with pytest.raises(ArgumentError, match="kl"):
        kto_loss(policy.float(), reference.float(), good, kl=torch.zeros(2))
