"""Which blocks keep their activations, pass by pass; the bits are the resident model's all the same."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import DoesNotFitError
from ts_core.testing import assert_bit_equal
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.governor import ActivationGovernor
from ts_paging.pager import WeightPager

WIDTH, DEPTH = 8, 4
LOTS = 1 << 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training) * self.scale


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Used:
    """Bytes in use, as the test says."""

    def __init__(self, value=0):
        self.value = value
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.value


def build(depth=DEPTH):
    torch.manual_seed(0)
    return Model(depth).train()


def govern(model, limit=LOTS, room=None, managed="recompute", paged=True, used=None, slots=2):
    blocks = list(model.blocks)
    managed = [managed] * len(blocks) if isinstance(managed, str) else managed
    pager = WeightPager(torch.device("cpu"), slots=slots, min_offload_bytes=0, pages=lambda p: paged)
    pager.attach([(f"blocks.{i}", b, managed[i] or "keep") for i, b in enumerate(blocks)])
    used = used or Used(100)
    pager.governor = ActivationGovernor(pager.blocks, managed, used, limit, room)
    return pager, pager.governor, used


def batch(rows=4, seed=0):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def saved_bytes(rows):
    """What one plain block saves beyond its input and what it holds anyway."""
    block, x = build(1).blocks[0], batch(rows).requires_grad_()
    held = {t.untyped_storage()._cdata for t in [x, *block.parameters(), *block.buffers()]}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = block(x)
    del output
    return sum(sizes.values())


def step(model, x, seed=0):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def measured(transient=0, rows=4, **options):
    """A governor after its first pass."""
    model = build()
    pager, governor, used = govern(model, **options)
    step(model, batch(rows))
    governor.learn(transient)
    return model, pager, governor, used


@pytest.mark.parametrize("fallback", ["recompute", "offload"])
def test_the_first_pass_falls_back_but_for_the_block_that_is_measured(fallback):
    model = build()
    _, governor, used = govern(model, managed=fallback)
    assert not governor.measured
    model(batch())
    assert governor.policies == ["keep", *[fallback] * (DEPTH - 1)]
    assert governor.measured
    assert used.asked == 1
    assert governor.kept == 0


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_what_a_block_saves_is_what_autograd_saves(rows, paged):
    model = build()
    _, governor, _ = govern(model, paged=paged)
    step(model, batch(rows))
    governor.learn(0)
    model(batch(rows))
    assert governor.kept == DEPTH * saved_bytes(rows)


@pytest.mark.parametrize("keep", range(DEPTH + 1))
def test_the_last_blocks_keep_as_far_as_there_is_room(keep):
    each, transient, base = saved_bytes(4), 300, 100
    for spare, expected in ((0, keep), (each - 1, keep), (-1, keep - 1)):
        room = base + transient + keep * each + spare
        model, _, governor, _ = measured(transient, room=room)
        model(batch())
        expected = min(max(expected, 0), DEPTH)
        assert governor.policies == ["recompute"] * (DEPTH - expected) + ["keep"] * expected
        assert governor.kept == expected * each


def test_before_anything_is_learned_about_a_step_all_fall_back():
    model = build()
    _, governor, _ = govern(model)
    for _ in range(2):
        step(model, batch())
    assert governor.measured
    assert governor.policies == ["recompute"] * DEPTH
    governor.learn(10)
    step(model, batch())
    assert governor.policies == ["keep"] * DEPTH


@pytest.mark.parametrize("factor", [2, 3, 8])
def test_larger_inputs_take_more_of_everything(factor):
    each, transient, keep = saved_bytes(4), 400, 2
    room = 100 + factor * transient + keep * saved_bytes(4 * factor)
    model, _, governor, _ = measured(transient, room=room)
    model(batch(4 * factor))
    assert saved_bytes(4 * factor) == factor * each
    assert governor.policies.count("keep") == keep
    # A smaller one has no smaller transient: what was seen is what counts.
    model(batch(1))
    assert governor.kept == saved_bytes(1) * DEPTH


def test_the_largest_transient_counts():
    model, _, governor, _ = measured(5000, room=100 + 5000 + saved_bytes(4))
    governor.learn(10)
    model(batch())
    assert governor.policies.count("keep") == 1


def test_expected_bytes_are_added_to_what_was_learned():
    model, _, governor, _ = measured(300, room=100 + 300 + 2 * saved_bytes(4))
    governor.expect(saved_bytes(4))
    model(batch())
    assert governor.policies.count("keep") == 1


def test_room_is_at_most_the_limit():
    assert govern(build(), limit=50, room=90)[1].room == 50
    assert govern(build(), limit=50)[1].room == 50
    assert govern(build(), limit=50, room=20)[1].room == 20


def test_over_the_limit_nothing_computes_and_the_model_is_usable():
    plain, model = build(), build()
    pager, governor, used = govern(model, limit=1000)
    expected = step(plain, batch())
    step(model, batch())
    governor.learn(0)
    runs = [block.runs for block in pager.blocks]
    policies = governor.policies
    used.value = 1001
    with pytest.raises(DoesNotFitError, match=r"1001 B are in use where 1000 B may be") as caught:
        model(batch())
    assert isinstance(caught.value, MemoryError)
    assert runs == [block.runs for block in pager.blocks]
    assert policies == governor.policies
    with torch.no_grad():
        model(batch())
    used.value = 1000
    loss, grads = step(model, batch())
    assert loss == expected[0]
    for got, wanted in zip(grads, expected[1], strict=True):
        assert_bit_equal(got, wanted)


def test_passes_without_gradients_decide_nothing():
    model, _, governor, used = measured(0, room=100 + saved_bytes(4))
    step(model, batch())
    before = (governor.policies, governor.kept, governor.base, governor.largest, used.asked)
    used.value = LOTS + 1
    with torch.no_grad():
        model(batch(64))
    with torch.inference_mode():
        model(batch(64))
    assert before == (governor.policies, governor.kept, governor.base, governor.largest, used.asked)


def test_the_base_is_the_least_since_the_last_learning():
    model, _, governor, used = measured(0)
    for value, base in ((500, 500), (300, 300), (900, 300)):
        used.value = value
        model(batch())
        assert governor.base == base
    governor.learn(0)
    assert governor.base == 0


def test_fixed_policies_are_left_alone():
    managed = [None, "recompute", None, "offload"]
    model = build()
    pager, governor, _ = govern(model, managed=managed)
    model(batch())
    assert [b.policy for b in pager.blocks] == ["keep", "keep", "keep", "offload"]
    assert governor.policies == ["keep", "keep", "keep", "offload"]
    governor.learn(0)
    model(batch())
    assert governor.kept == 2 * saved_bytes(4)
    pager.blocks[0].policy = "recompute"
    model(batch())
    assert pager.blocks[0].policy == "recompute"


@pytest.mark.parametrize("which", range(DEPTH))
def test_any_single_managed_block_is_measured(which):
    managed = [None] * DEPTH
    managed[which] = "recompute"
    model = build()
    _, governor, _ = govern(model, managed=managed)
    for _ in range(2):
        step(model, batch())
    governor.learn(0)
    step(model, batch())
    assert governor.kept == saved_bytes(4)


def test_a_block_that_fails_is_measured_again():
    model = build()
    _, governor, _ = govern(model)
    down = model.blocks[0].down
    handle = down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()
    for _ in range(2):
        step(model, batch())
    governor.learn(0)
    model(batch())
    assert governor.kept == DEPTH * saved_bytes(4)


def test_blocks_of_integers_are_measured_too():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, WIDTH)

        def forward(self, ids):
            return ids.roll(1), (self.table(ids) ** 2).sum()

    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(Ids() for _ in range(2))
    _, governor, _ = govern(model, room=100 + 2 * 4 * 6 * WIDTH - 1)

    def forward():
        ids, total = torch.arange(6) % 5, 0
        for block in model.blocks:
            ids, value = block(ids)
            total = total + value
        return total

    for _ in range(2):
        forward().backward()
    governor.learn(0)
    forward()
    assert governor.policies == ["recompute", "keep"]


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_up_to_a_size_nothing_is_kept_where_computation_is_idle(rows):
    model, _, governor, _ = measured(0)
    governor.idle_to = 4 * 4 * WIDTH  # bytes of 4 rows
    model(batch(rows))
    assert governor.policies == ["keep" if rows > 4 else "recompute"] * DEPTH


def test_bytes_set_aside_for_recordings_are_not_kept():
    each = saved_bytes(4)
    model, _, governor, _ = measured(0, room=100 + 3 * each)
    governor.aside = each
    model(batch())
    assert governor.policies.count("keep") == 2


@pytest.mark.parametrize("keep", range(DEPTH + 1))
@pytest.mark.parametrize("captured", [False, True])
def test_blocks_with_recordings_of_their_own_keep_first(captured, keep):
    """Those that share recordings have one policy as long as there is no room for more."""
    model, pager, governor, _ = measured(0, room=100 + keep * saved_bytes(4))
    pager.settle(["blocks.0", "blocks.1"])
    if captured:
        pager.block_mode = BlockMode(Captures(pager.device))
    step(model, batch())
    kept = [index for index, policy in enumerate(governor.policies) if policy == "keep"]
    assert kept == sorted(([2, 3, 0, 1] if captured else [0, 1, 2, 3])[DEPTH - keep :])


def test_passes_are_counted():
    model, _, governor, _ = measured(0)
    for rows in (1, 2):
        step(model, batch(rows))
    assert (governor.passes, governor.passed) == (3, (4 + 1 + 2) * 4 * WIDTH)


def test_several_passes_in_flight():
    plain, model = build(), build()
    _, governor, used = govern(model)
    each = saved_bytes(4)
    step(model, batch())
    governor.learn(0)
    governor.room = 100 + 2 * each
    totals = []
    for one in (plain, model):
        torch.manual_seed(0)
        one.zero_grad()
        losses = []
        for seed, value in enumerate((100, 100 + each, 100 + 2 * each)):
            used.value = value
            losses.append(one(batch(seed=seed)).pow(2).sum())
            if one is model:
                assert governor.policies.count("keep") == 2 - seed
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[2].backward()
        losses[1].backward()
        totals.append([p.grad for p in one.parameters()])
    for got, expected in zip(totals[1], totals[0], strict=True):
        assert_bit_equal(got, expected)


def test_blocks_out_of_order():
    plain, model = build(), build()
    _, governor, used = govern(model, room=100 + 2 * saved_bytes(4))
    orders = [[3], [2, 1], [0, 1, 2, 3], [1, 3], [3, 2, 1, 0], [0, 0, 3, 3]]
    for seed, order in enumerate(orders):
        results = []
        for one in (plain, model):
            torch.manual_seed(seed)
            one.zero_grad()
            x = batch(seed=seed)
            for index in order:
                x = one.blocks[index](x)
            x.pow(2).sum().backward()
            results.append([x.detach(), *[p.grad.clone() for p in one.parameters() if p.grad is not None]])
        for got, expected in zip(*results, strict=True):
            assert_bit_equal(got, expected)
        if 0 not in order:
            assert used.asked == 0 or seed > 2
        governor.learn(0)


def test_returned_blocks_are_governed_on():
    model, pager, governor, _ = measured(0, room=100 + 3 * saved_bytes(4))
    plain = copy.deepcopy(model)
    pager.unpage(["blocks.1", "blocks.3"], lambda parameter: None)
    loss, grads = step(model, batch())
    assert governor.policies == ["recompute", "keep", "keep", "keep"]
    assert [b.policy for b in pager.blocks] == governor.policies
    expected_loss, expected = step(plain, batch())
    assert loss == expected_loss
    for got, wanted in zip(grads, expected, strict=True):
        assert_bit_equal(got, wanted)


@given(
    st.lists(
        st.tuples(st.integers(0, 12_000), st.integers(1, 5), st.integers(0, 6000)), min_size=1, max_size=5
    ),
    st.sampled_from(["recompute", "offload"]),
    st.integers(1, 3),
)
def test_whatever_is_decided_the_bits_are_the_same(passes, fallback, slots):
    plain, model = build(), build()
    _, governor, used = govern(model, limit=12_000, room=10_000, managed=fallback, slots=slots)
    counts = itertools.count()
    for value, rows, transient in passes:
        used.value = value
        seed = next(counts)
        expected_loss, expected = step(plain, batch(rows, seed), seed)
        loss, grads = step(model, batch(rows, seed), seed)
        assert loss == expected_loss
        for got, wanted in zip(grads, expected, strict=True):
            assert_bit_equal(got, wanted)
        assert value + governor.kept <= max(governor.room, value)
        governor.learn(transient)


def test_after_an_overrun_passes_of_that_size_keep_nothing_and_smaller_ones_still_do():
    plain = build()
    model, _, governor, _ = measured(rows=8)
    assert governor.keepers == 1  # the one that was measured
    step(model, batch(8))
    assert governor.policies == ["keep"] * DEPTH
    assert governor.keepers == DEPTH
    governor.overrun()
    assert governor.keepers == governor.kept == 0
    for rows, policy in ((8, "recompute"), (4, "keep"), (9, "recompute"), (7, "keep")):
        loss, grads = step(model, batch(rows))
        assert governor.policies == [policy] * DEPTH, rows
        expected, others = step(plain, batch(rows))
        assert loss == expected
        for got, want in zip(grads, others, strict=True):
            assert_bit_equal(got, want)
    governor.overrun()  # at 7 rows
    step(model, batch(7))
    assert governor.policies == ["recompute"] * DEPTH


@given(st.integers(0, 1 << 30), st.floats(1, 8))
def test_what_a_larger_pass_needs_grows_with_its_input(transient, growth):
    model = build(2)
    _, governor, _ = govern(model)
    assert governor.need(growth) is None
    step(model, batch(4))
    governor.learn(transient)
    assert governor.need(growth) == int(transient * growth)
    assert governor.need(1.0) == transient
