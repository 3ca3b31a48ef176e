"""The equality grid: paged training has the bits of the resident run, whatever the placement.

Every run asserts from counters that what it asked for was done: the policy from the number of runs of each
block and the bytes parked, the tier from the bytes that came from it, the slots from the fills.
"""

import itertools

import pytest
import torch
from grid_models import (
    BUILD,
    LAYERS,
    NIGHTLY,
    SEQUENCES,
    adamw,
    batch,
    build,
    cached,
    compare,
    offload_adamw,
    one,
    paging,
    resident,
    train,
)
from hypothesis import given
from hypothesis import strategies as st

import ts_quant
from ts_core.errors import StateError
from ts_core.testing import devices

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

POLICIES = ["keep", "offload", "recompute"]
AXES = {
    "kind": list(BUILD),
    "sequence": list(SEQUENCES),
    "policy": POLICIES,
    "slots": [1, 2, 3],
    "tier": ["host", "disk"],
    "codec": ["none", "nf4"],
}
STEPS = 3


def possible(row):
    """The plain stack has no key-value cache."""
    return not (row[0] == "stack" and row[1] is cached)


def product():
    return [row for row in itertools.product(*AXES.values()) if possible(row)]


def pairs(row):
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)}


def covering():
    """A selection in which every two values of different axes meet: each row takes the most open pairs."""
    rows = product()
    open_pairs = set().union(*map(pairs, rows))
    chosen = []
    while open_pairs:
        # Looking at every 7th row from a moving start keeps this quick, and mixes the axes.
        sample = rows[len(chosen) % 7 :: 7]
        best = max(sample, key=lambda row: len(pairs(row) & open_pairs))
        if not pairs(best) & open_pairs:
            best = max(rows, key=lambda row: len(pairs(row) & open_pairs))
        open_pairs -= pairs(best)
        chosen.append(best)
    return chosen


ROWS = product() if NIGHTLY else covering()


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    """CUDA kernels that add in any order (the embedding's backward) would blur the comparison."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(before)


def stored_bytes(block):
    """Bytes of a block's weights as they are stored."""
    packed = [getattr(p, "packed", None) or {"": p} for p in block.parameters]
    return sum(part.nbytes for parts in packed for part in parts.values())


def assert_active(pager, sequence, policy, slots, tier, codec, steps=STEPS):
    """The placement that was asked for is what happened."""
    forwards, backwards = (steps * count for count in SEQUENCES[sequence])
    runs = forwards + (backwards if policy == "recompute" else 0)
    assert [block.runs for block in pager.blocks] == [runs] * LAYERS
    assert len(pager.slots) == slots + 1  # one more for embedding, norm and head
    # A frozen embedding needs no slot: its rows are gathered where they are.
    gathered = [edge for edge in pager.edges if hasattr(edge, "gathered_bytes")]
    assert all(edge.gathered_bytes > 0 for edge in gathered)
    everything = [block for block in [*pager.blocks, *pager.edges] if block not in gathered]
    moved = sum(block.fills * stored_bytes(block) for block in everything)
    assert (pager.host_bytes, pager.disk_bytes) == ((moved, 0) if tier == "host" else (0, moved))
    # Each block has trained weights, so each step has new ones to bring.
    assert min(block.fills for block in everything) >= steps
    if slots == 1:  # between two uses of an inner block comes another one
        assert min(block.fills for block in pager.blocks[1:-1]) >= forwards + backwards
    store = pager.activations
    if policy == "offload":
        assert store.parked >= forwards * LAYERS
        assert store.parked_bytes > 0
        # On a GPU backward may come before the copy has begun: what is asked for is still there then.
        assert store.brought_bytes > 0 or pager.device.type == "cuda"
    else:
        assert (store.parked, store.parked_bytes, store.brought_bytes) == (0, 0, 0)
    packed = [p for block in everything for p in block.parameters if isinstance(p, ts_quant.QuantizedTensor)]
    assert bool(packed) == (codec != "none")


def check(kind, sequence, policy, slots, tier, codec, device="cpu", make=adamw, **options):
    """Train paged, compare with the resident run, and look at the counters."""
    expected = resident(kind, sequence, codec, device, make)
    model = build(kind, codec)
    if codec != "none":
        ts_quant.quantize_model(model, codec)
    with paging(model, tier, policy, slots, device, **options) as pager:
        optimizer = make(list(model.parameters()))
        compare(train(model, optimizer, sequence, device), expected)
        assert_active(pager, sequence, policy, slots, tier, codec)


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(tuple(AXES), ROWS, ids=lambda value: name_of(value))
def test_paged_training_is_the_resident_training(kind, sequence, policy, slots, tier, codec, device):
    check(kind, sequence, policy, slots, tier, codec, device)


def test_the_selection_covers_every_pair():
    rows = covering()
    assert len(rows) < 100
    assert set().union(*map(pairs, rows)) == set().union(*map(pairs, product()))


@given(
    kind=st.sampled_from(AXES["kind"]),
    sequence=st.sampled_from(AXES["sequence"]),
    policies=st.lists(st.sampled_from(POLICIES), min_size=LAYERS, max_size=LAYERS),
    slots=st.integers(1, LAYERS),
    tier=st.sampled_from(AXES["tier"]),
    codec=st.sampled_from(["none", "nf4", "int8"]),
    make=st.sampled_from([adamw, offload_adamw]),
    prefetch=st.integers(0, 3),
    edges=st.booleans(),
)
def test_any_placement_is_the_resident_training(
    kind, sequence, policies, slots, tier, codec, make, prefetch, edges
):
    expected = resident(kind, sequence, codec, "cpu", make)
    model = build(kind, codec)
    if codec != "none":
        ts_quant.quantize_model(model, codec)
    with paging(model, tier, policies, slots, prefetch=prefetch, edges=edges) as pager:
        compare(train(model, make(list(model.parameters())), sequence), expected)
        forwards, backwards = (STEPS * count for count in SEQUENCES[sequence])
        runs = [forwards + (backwards if policy == "recompute" else 0) for policy in policies]
        assert [block.runs for block in pager.blocks] == runs
        assert (pager.activations.brought_bytes > 0) == ("offload" in policies)
        assert (pager.disk_bytes > 0) == (tier == "disk")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "codec"), [("llama", "none"), ("gemma2", "nf4"), ("lora", "nf4")])
def test_one_flipped_byte_of_a_slot_makes_the_comparison_fail(kind, codec, policy, moment, device):
    expected = resident(kind, one, codec, device)
    model = build(kind, codec)
    if codec != "none":
        ts_quant.quantize_model(model, codec)
    with paging(model, "host", policy, 2, device) as pager:
        victim = pager.blocks[2]
        flipped = []
        use = pager.use

        def use_and_flip(block, **how):
            use(block, **how)
            in_backward = torch._C._current_graph_task_id() != -1
            if block is victim and in_backward == (moment == "backward") and not flipped:
                weight = next(view for view in victim.views if view.dim() > 1)
                flat = weight.as_strided((weight.numel(),), (1,)).view(torch.uint8)
                flat[weight.dtype.itemsize - 1] ^= 0x40  # the high byte of its first element
                flipped.append(block)

        pager.use = use_and_flip
        result = train(model, adamw(list(model.parameters())), one, device)
        assert flipped
        with pytest.raises(AssertionError):
            compare(result, expected)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["llama_tied", "lora", "mixtral"])
def test_gradients_of_gradients_are_refused_by_name(kind, policy, device):
    model = build(kind)
    with paging(model, "host", policy, 2, device):
        ids = batch(0, device)
        loss = model(input_ids=ids, labels=ids).loss
        with pytest.raises(StateError, match=r"create_graph=True.*(norm|layers\.3|lm_head)"):
            loss.backward(create_graph=True)
        # A refused pass leaves nothing behind: the next one is what it would have been.
        model.zero_grad()
        torch.manual_seed(0)
        one(model, batch(0, device))
        expected = resident(kind, one, "none", device).gradients[0]
        for name, p in model.named_parameters():
            assert (p.grad is not None) == (name in expected), name
            assert p.grad is None or torch.equal(p.grad.cpu(), expected[name]), name


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", POLICIES)
def test_every_other_order_and_repeat_of_backward(policy, device):
    """Backwards of the second forward twice, of the first once, with what autograd keeps dropped between."""

    def tangled(model, ids):
        first, second = (model(input_ids=x, labels=x, use_cache=False).loss for x in (ids, ids.flip(1)))
        second.backward(retain_graph=True)
        first.backward()
        del first
        third = model(input_ids=ids.roll(2, 1), labels=ids, use_cache=False).loss
        second.backward()
        third.backward()
        return [second, third]

    for kind in ("llama_tied", "lora"):
        expected = resident(kind, tangled, "none", device)
        model = build(kind)
        with paging(model, "disk", policy, 2, device) as pager:
            compare(train(model, adamw(list(model.parameters())), tangled, device), expected)
            assert pager.blocks[0].runs == STEPS * (7 if policy == "recompute" else 3)
