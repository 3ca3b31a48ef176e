import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import assert_bit_equal, assert_near, devices, make_tensor
from ts_fused import causal_lm_loss, chunked_cross_entropy, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNKS = (1, 4, 9, 1000)


def options(**ranges):
    """Options that the reference takes too."""
    return st.fixed_dictionaries(
        {
            "softcap": st.sampled_from([None, 1.0, 30.0]),
            "logit_scale": st.sampled_from([1.0, 0.0625, -2.0]),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "reduction": st.just("mean"),
            "ignore_index": st.sampled_from([-100, 0, -1, 3]),
            **ranges,
        }
    )


def make_case(rows, hidden, vocab, dtype, device, seed, *, bias=False, share_ignored=0.3, ignore_index=-100):
    h = make_tensor((rows, hidden), dtype=dtype, device=device, seed=seed)
    weight = (make_tensor((vocab, hidden), dtype=dtype, device=device, seed=seed + 1) * 0.3).detach()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < share_ignored] = ignore_index
    if rows:
        targets[-1] = vocab - 1
    b = make_tensor((vocab,), dtype=dtype, device=device, seed=seed + 2) if bias else None
    return h, weight, targets.to(device), b


def run(function, tensors, *args, **kwargs):
    """Loss and the gradients of all tensors that are there."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    loss = function(leaves[0], leaves[1], *args, leaves[2], **kwargs)
    used = [t for t in leaves if t is not None]
    return loss.detach(), torch.autograd.grad(loss, used)


def check(h, weight, targets, bias, got_loss, got_grads, *, count=None, **kwargs):
    """Compare with float64 within what the rounding of logits and of their gradient explains."""
    wide = [None if t is None else t.double() for t in (h, weight, bias)]
    loss, grads = run(reference.chunked_cross_entropy, wide, targets, **kwargs)
    valid = targets.reshape(-1) != kwargs.get("ignore_index", -100)
    terms = wide[0].abs() @ wide[1].abs().t() + (0.0 if bias is None else wide[2].abs())
    scale, cap = abs(kwargs.get("logit_scale", 1.0)), kwargs.get("softcap")
    # How far a logit may be off, relative to the roundoff: |terms|, and the cap's own rounding.
    reach = terms.amax(-1, keepdim=True) * scale * valid[:, None] + (cap or 0.0) + 1.0
    divisor = count if count is not None else max(1, int(valid.sum()))
    if kwargs.get("reduction") == "sum":
        divisor = 1
    low = h.dtype != torch.float32
    accumulate = h.dtype if low else torch.float32
    length = 4 if low else h.shape[-1] + 32
    share = {"length": length, "accumulate": accumulate}
    assert_near(got_loss, loss, scale=float(reach.sum() / divisor), dtype=torch.float32, **share)
    # |gradient of the logits| is at most p + onehot + smoothing / vocab.
    z = F.linear(wide[0], wide[1], wide[2]) * kwargs.get("logit_scale", 1.0)
    z = z if cap is None else cap * torch.tanh(z / cap)
    size = torch.softmax(z, -1) + kwargs.get("label_smoothing", 0.0) / z.shape[1]
    size[valid, targets.reshape(-1)[valid]] += 1.0
    size = size * valid[:, None] * scale * reach * 2.0 / divisor
    sizes = [size @ wide[1].abs(), size.t() @ wide[0].abs(), size.sum(0)]
    for grad, want, bound in zip(got_grads, grads, sizes, strict=False):
        assert_near(grad, want, scale=bound, **share)
    assert bool((got_grads[0][~valid] == 0).all())


@functools.cache
def cases():
    return st.fixed_dictionaries(
        {
            "rows": st.integers(1, 40),
            "hidden": st.sampled_from([1, 7, 32, 48]),
            "vocab": st.sampled_from([2, 15, 16, 17, 97, 128, 1025]),
            "seed": st.integers(0, 10_000),
            "bias": st.booleans(),
            "share_ignored": st.sampled_from([0.0, 0.3, 0.95]),
        }
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@given(case=cases(), chosen=options(), chunk_size=st.sampled_from([1, 4, 9, 1000]))
def test_loss_and_gradients_are_near_float64(device, dtype, case, chosen, chunk_size):
    if chosen["ignore_index"] >= case["vocab"]:
        chosen = {**chosen, "ignore_index": 0}
    h, weight, targets, bias = make_case(
        dtype=dtype, device=device, ignore_index=chosen["ignore_index"], **case
    )
    loss, grads = run(chunked_cross_entropy, (h, weight, bias), targets, chunk_size=chunk_size, **chosen)
    check(h, weight, targets, bias, loss, grads, **chosen)


@pytest.mark.parametrize("device", devices())
@given(case=cases(), batch=st.integers(1, 3), chunk_size=st.sampled_from(CHUNKS))
def test_causal_loss_predicts_the_next_label(device, case, batch, chunk_size):
    rows = case["rows"]
    h, weight, targets, bias = make_case(**{**case, "rows": batch * rows}, dtype=torch.float32, device=device)
    h, labels = h.view(batch, rows, -1), targets.view(batch, rows)

    def shifted(hidden, weight, labels, bias):
        return reference.chunked_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], bias)

    got_loss, got = run(causal_lm_loss, (h, weight, bias), labels, chunk_size=chunk_size)
    wide = [None if t is None else t.double() for t in (h, weight, bias)]
    want_loss, want = run(shifted, wide, labels)
    torch.testing.assert_close(got_loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert bool((got[0][:, -1] == 0).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [97, 128, 32000, 65537, 152064])
def test_vocabularies(device, dtype, vocab):
    h, weight, targets, _ = make_case(4, 8, vocab, dtype, device, 0)
    softcap = 30.0 if vocab in (97, 65537) else None
    loss, grads = run(chunked_cross_entropy, (h, weight, None), targets, chunk_size=3, softcap=softcap)
    check(h, weight, targets, None, loss, grads, softcap=softcap)


def soft_cap_input(vocab=97, scale=1.0):
    torch.manual_seed(0)
    return torch.randn(5, 32), torch.randn(vocab, 32) * scale, torch.tensor([0, vocab - 1, 5, -100, 33])


@pytest.mark.parametrize("device", devices())
def test_soft_cap_of_lanes_beyond_the_vocabulary(device):
    h, weight, targets = (t.to(device) for t in soft_cap_input())
    loss = chunked_cross_entropy(h, weight, targets, softcap=1.0)
    # Lanes made -inf before the cap would become real logits of -1: 4.5373178.
    assert loss.item() == pytest.approx(4.4566650, abs=2e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("vocab", [97, 128, 32000, 65537])
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_soft_cap_of_large_logits(device, vocab, softcap):
    h, weight, targets = (t.to(device) for t in soft_cap_input(vocab, 50.0))
    bias = torch.zeros(vocab, device=device)
    # One row of logits near -200.
    h[2] = 0.0
    h[2, 0], weight[:, 0] = 1.0, -200.0
    loss, grads = run(chunked_cross_entropy, (h, weight, bias), targets, softcap=softcap, chunk_size=2)
    check(h, weight, targets, bias, loss, grads, softcap=softcap)


@pytest.mark.parametrize("device", devices())
def test_logit_scale_and_cap_are_applied_in_this_order(device):
    h, weight, targets = (t.to(device) for t in soft_cap_input())
    loss = chunked_cross_entropy(h, weight, targets, softcap=2.0, logit_scale=0.5)
    logits = 2.0 * torch.tanh((h @ weight.t()).double() * 0.5 / 2.0)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("chunk_size", CHUNKS)
class TestNoTrainableLabel:
    def model(self, device):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(97, 32), nn.Linear(32, 97, bias=False)
        return nn.ModuleDict({"embedding": embedding, "head": head}).to(device)

    def loss(self, model, ids, labels, **kwargs):
        return causal_lm_loss(model["embedding"](ids), model["head"].weight, labels, **kwargs)

    def ids(self, device, *shape):
        return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1)).to(device)

    @pytest.mark.parametrize("count", [None, 0, 5, torch.tensor(0), torch.tensor(5)])
    @pytest.mark.parametrize("shape", [(2, 9), (0, 9), (2, 1)])
    def test_nothing_counts(self, device, chunk_size, count, shape):
        model = self.model(device)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = self.ids(device, *shape)
        loss = self.loss(model, ids, torch.full_like(ids, -100), chunk_size=chunk_size, num_items=count)
        assert loss.item() == 0.0
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            assert p.grad is not None
            assert bool((p.grad == 0).all())
            assert bool(optimizer.state[p]["exp_avg_sq"].isfinite().all())

    def test_only_the_first_position_counts_for_nothing(self, device, chunk_size):
        model = self.model(device)
        ids = self.ids(device, 2, 9)
        labels = torch.full_like(ids, -100)
        labels[:, 0] = ids[:, 0]
        loss = self.loss(model, ids, labels, chunk_size=chunk_size)
        loss.backward()
        assert loss.item() == 0.0
        assert all(bool((p.grad == 0).all()) for p in model.parameters())

    @pytest.mark.parametrize("with_count", [True, False])
    def test_masked_microbatch_in_an_accumulation_window(self, device, chunk_size, with_count):
        batches = [self.ids(device, 1, 9) + k for k in range(4)]
        labels = [b.remainder(97) for b in batches]
        labels[2] = torch.full_like(labels[2], -100)
        count = sum(int((x[:, 1:] != -100).sum()) for x in labels)
        model, dense = self.model(device), self.model(device).double()
        total = 0.0
        for b, y in zip(batches, labels, strict=True):
            b = b.remainder(97)
            got = self.loss(model, b, y, chunk_size=chunk_size, num_items=count if with_count else None)
            got.backward()
            logits = dense["head"](dense["embedding"](b))[:, :-1].reshape(-1, 97)
            want = F.cross_entropy(logits, y[:, 1:].reshape(-1), reduction="sum")
            own = max(1, int((y[:, 1:] != -100).sum()))
            (want / (count if with_count else own)).backward()
            total += got.item()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=1e-7)
        assert total > 0

    def test_one_valid_label_at_the_end(self, device, chunk_size):
        ids = self.ids(device, 1, 64)
        labels = torch.full_like(ids, -100)
        labels[0, -1] = ids[0, -1]
        model, dense = self.model(device), self.model(device).double()
        self.loss(model, ids, labels, chunk_size=chunk_size).backward()
        logits = dense["head"](dense["embedding"](ids))[0, :-1]
        F.cross_entropy(logits, labels[0, 1:]).backward()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            assert bool((p.grad != 0).any())
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("ignore_index", [0, -1])
    def test_other_ignore_index(self, device, chunk_size, ignore_index):
        h, weight, targets, _ = make_case(17, 32, 97, torch.float32, device, 3, ignore_index=ignore_index)
        loss, grads = run(
            chunked_cross_entropy,
            (h, weight, None),
            targets,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
        )
        check(h, weight, targets, None, loss, grads, ignore_index=ignore_index)

    @pytest.mark.parametrize("label", [97, -5, 2**40, -(2**62)])
    def test_label_outside_the_vocabulary_raises(self, device, chunk_size, label):
        h, weight, targets, _ = make_case(9, 32, 97, torch.float32, device, 4)
        targets[4] = label
        with pytest.raises(ArgumentError, match=f"instance {label}"):
            chunked_cross_entropy(h, weight, targets, chunk_size=chunk_size)
        with pytest.raises(ArgumentError, match="labels: expected"):
            causal_lm_loss(h[None], weight, targets[None], chunk_size=chunk_size)
        loose = h.clone().requires_grad_()
        loss = chunked_cross_entropy(loose, weight, targets, chunk_size=chunk_size, validate=False)
        loss.backward()
        assert loss.isnan()
        assert bool((loose.grad[4] == 0).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["int", "tensor", "device_tensor"])
def test_count_of_the_whole_window(device, kind):
    # 1, 7 and 3 labels: the mean of the three means is another number.
    h = make_tensor((3, 9, 32), device=device)
    weight = make_tensor((97, 32), device=device, seed=1)
    ids = torch.randint(0, 97, (3, 9), generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.full_like(ids, -100)
    for row, valid in enumerate((1, 7, 3)):
        labels[row, 9 - valid :] = ids[row, 9 - valid :]
    count = {"int": 11, "tensor": torch.tensor(11), "device_tensor": torch.tensor(11, device=device)}[kind]
    losses = [causal_lm_loss(h[i : i + 1], weight, labels[i : i + 1], num_items=count) for i in range(3)]
    whole = causal_lm_loss(h, weight, labels)
    dense = F.cross_entropy((h[:, :-1] @ weight.t()).double().reshape(-1, 97), labels[:, 1:].reshape(-1))
    assert sum(x.item() for x in losses) == pytest.approx(dense.item(), rel=1e-6)
    assert whole.item() == pytest.approx(dense.item(), rel=1e-6)


def test_divisor_leaves_out_the_first_label_of_a_row():
    h, weight = torch.randn(4, 9, 16), torch.randn(97, 16)
    labels = torch.randint(0, 97, (4, 9))
    mean, total = causal_lm_loss(h, weight, labels), causal_lm_loss(h, weight, labels, reduction="sum")
    assert mean.item() == pytest.approx(total.item() / 32, rel=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_repeated_and_summed_losses(device, dtype):
    h, weight, targets, bias = make_case(13, 32, 97, dtype, device, 5, bias=True)
    leaves = [t.detach().requires_grad_() for t in (h, weight, bias)]
    h, weight, bias = leaves
    loss = chunked_cross_entropy(h, weight, targets, bias, chunk_size=4)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    twice = torch.autograd.grad(loss, leaves, retain_graph=True)
    scaled = torch.autograd.grad(loss * 8.0, leaves)
    for a, b, c in zip(once, twice, scaled, strict=True):
        assert_bit_equal(a, b)
        normal = a.abs() > 1e-3  # a power of two is exact but for subnormals
        assert bool((c.float() == 8.0 * a.float())[normal].all())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)
    other = chunked_cross_entropy(h, weight, targets.flip(0), bias)
    both = torch.autograd.grad(
        chunked_cross_entropy(h, weight, targets, bias, chunk_size=4) + 0.5 * other, leaves, retain_graph=True
    )
    half = torch.autograd.grad(0.5 * other, leaves)
    for a, b, c in zip(both, once, half, strict=True):
        torch.testing.assert_close(a.float(), b.float() + c.float(), rtol=2e-2, atol=2e-3)


def test_second_derivative_raises():
    h, weight, targets, _ = make_case(3, 8, 17, torch.float32, "cpu", 6)
    h.requires_grad_()
    (grad,) = torch.autograd.grad(chunked_cross_entropy(h, weight, targets).pow(2), h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("device", devices())
def test_only_the_gradients_that_are_needed(device, monkeypatch):
    from ts_fused import cross_entropy

    seen = []
    real = cross_entropy._Accumulator.run

    def spy(self, targets):
        real(self, targets)
        seen.append([x is not None for x in (self.grad_hidden, self.grad_weight, self.grad_bias)])

    monkeypatch.setattr(cross_entropy._Accumulator, "run", spy)
    h, weight, targets, bias = make_case(9, 32, 97, torch.float32, device, 7, bias=True)
    h.requires_grad_()
    chunked_cross_entropy(h, weight, targets, bias).backward()
    assert seen.pop() == [True, False, False]
    weight.requires_grad_()
    with torch.no_grad():
        loss = chunked_cross_entropy(h, weight, targets, bias)
    assert seen.pop() == [False, False, False]
    assert not loss.requires_grad
    chunked_cross_entropy(h.detach(), weight, targets, bias).backward()
    assert seen.pop() == [False, True, False]
    chunked_cross_entropy(h.detach(), weight.detach(), targets, bias)
    assert seen.pop() == [False, False, False]


@pytest.mark.parametrize("device", devices())
def test_tied_head_gets_both_gradients(device):
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    table = make_tensor((97, 32), device=device).requires_grad_()
    wide = table.detach().double().requires_grad_()
    causal_lm_loss(F.embedding(ids, table), table, ids).backward()
    logits = F.embedding(ids, wide)[:, :-1] @ wide.t()
    F.cross_entropy(logits.reshape(-1, 97), ids[:, 1:].reshape(-1)).backward()
    torch.testing.assert_close(table.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", devices())
def test_autocast_and_strided_inputs(device):
    h, weight, targets, bias = make_case(18, 32, 97, torch.float32, device, 8, bias=True)
    tensors = [t.detach().requires_grad_() for t in (h, weight, bias)]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = chunked_cross_entropy(tensors[0], tensors[1], targets, tensors[2])
    grads = torch.autograd.grad(loss, tensors)
    assert loss.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.float32] * 3
    plain, want = run(chunked_cross_entropy, (h, weight, bias), targets)
    torch.testing.assert_close(loss.detach(), plain, rtol=1e-2, atol=1e-2)
    for a, b in zip(grads, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)
    strided = h.t().contiguous().t()
    again, same = run(
        chunked_cross_entropy, (strided, weight.t().contiguous().t(), bias), targets.int().repeat(2)[::1][:18]
    )
    torch.testing.assert_close(again, plain)
    for a, b in zip(same, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("device", devices())
def test_non_finite_logits_are_not_hidden(device, value):
    h, weight, targets, _ = make_case(4, 32, 97, torch.float32, device, 9, share_ignored=0.0)
    h[1] = value
    assert not chunked_cross_entropy(h, weight, targets).isfinite()


@pytest.mark.parametrize("device", devices())
def test_minus_infinity_removes_a_token(device):
    h, weight, targets, _ = make_case(4, 32, 3000, torch.float32, device, 10, share_ignored=0.0)
    bias = torch.zeros(3000, device=device)
    bias[:1500] = float("-inf")  # more than a block of the kernel
    targets.clamp_(min=1500)
    loss, grads = run(chunked_cross_entropy, (h, weight, bias), targets)
    want = F.cross_entropy((h @ weight[1500:].t()).double(), targets - 1500)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    assert bool((grads[1][:1500] == 0).all())


# PyTorch's own tracer looks at .grad of a non-leaf tensor and instantiates the autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_loss_works_across_a_graph_break():
    h, weight, targets, _ = make_case(9, 32, 97, torch.float32, "cpu", 11)

    def step(h):
        return chunked_cross_entropy(h * 2.0, weight, targets)

    want, grads = run(lambda h, w, b: step(h) + 0.0 * w.sum(), (h, weight, None))
    got, same = run(
        lambda h, w, b: torch.compile(step, backend="aot_eager")(h) + 0.0 * w.sum(), (h, weight, None)
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(same[0], grads[0])


def test_bad_input_is_named():
    h, weight, targets = torch.randn(4, 8), torch.randn(17, 8), torch.zeros(4, dtype=torch.long)
    for args, error, text in [
        (([1.0], weight, targets), ArgumentTypeError, "hidden: expected a torch.Tensor"),
        ((h.double(), weight, targets), ArgumentTypeError, "hidden: expected float32"),
        ((h, weight.bfloat16(), targets), ArgumentTypeError, "the dtype of hidden"),
        ((h, weight, targets.float()), ArgumentTypeError, "targets: expected int64"),
        ((h, weight[:, :7], targets), ArgumentError, r"shape \(V, 8\)"),
        ((h, weight, targets[:3]), ArgumentError, r"targets: expected shape \(4,\)"),
        ((h, weight, targets, weight), ArgumentError, r"bias: expected shape \(17,\)"),
        ((h, weight.to("meta"), targets), ArgumentError, "meta"),
        ((torch.tensor(1.0), weight, targets), ArgumentError, "0-dimensional"),
    ]:
        with pytest.raises(error, match=text):
            chunked_cross_entropy(*args)
    for kwargs, error, text in [
        ({"reduction": "none"}, OptionError, "not available in this release"),
        ({"reduction": "max"}, OptionError, "'mean', 'sum'"),
        ({"chunk_size": 0}, OptionError, "chunk_size"),
        ({"ignore_index": 1.5}, OptionError, "ignore_index"),
        ({"softcap": 0.0}, OptionError, "softcap"),
        ({"softcap": -3.0}, OptionError, "softcap"),
        ({"label_smoothing": 1.1}, OptionError, "label_smoothing"),
        ({"logit_scale": float("nan")}, OptionError, "logit_scale"),
        ({"validate": 1}, OptionError, "validate"),
        ({"num_items": -1}, OptionError, "num_items"),
        ({"num_items": 1.5}, OptionError, "num_items"),
        ({"num_items": 0}, ArgumentError, "num_items"),
        ({"num_items": torch.ones(2)}, ArgumentError, "num_items"),
        ({"num_items": 3, "reduction": "sum"}, ArgumentError, "num_items"),
    ]:
        with pytest.raises(error, match=text):
            chunked_cross_entropy(h, weight, targets, **kwargs)
    with pytest.raises(ArgumentTypeError, match="labels: expected a"):
        causal_lm_loss(h[None], weight, None)
    for labels in (targets, torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long)):
        with pytest.raises(ArgumentError, match="labels: expected"):
            causal_lm_loss(h[None], weight, labels)
