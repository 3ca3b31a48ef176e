"""Saved tensors that move out and back, against the same computation that keeps them: bit for bit."""

import contextlib
import gc
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ts_core import registry
from ts_core.errors import DeviceError, OptionError, StateError
from ts_core.testing import devices, gpu
from ts_paging import _C, CopyEngine, DiskStore
from ts_paging.activations import FileActivations, HostActivations, park_hook
from ts_paging.arena import HostArena
from ts_paging.pager import WeightPager

ROWS, WIDTH = 6, 8


def chunks(x, w):
    """Three saved views of one storage."""
    a, b, c = (x @ torch.cat([w, w, w], 1)).chunk(3, 1)
    return a * b + F.silu(c)


def broadcast(x, w):
    return x.exp().mean(0, keepdim=True).expand_as(x) * x


def strided(x, w):
    y = x @ w
    return torch.cat([y[:, ::2] * y[:, 1::2], y.t()[: WIDTH // 2].t().sin()], 1)


def masked(x, w):
    return torch.where(x > 0, x * x, x.tanh()).masked_fill(x < -1, 0.5)


def indexed(x, w):
    order = torch.arange(ROWS - 1, -1, -1, device=x.device)
    return x[order] * x.gather(0, order[:, None].expand_as(x))


def nothing(x, w):
    return x * (1 + x[:0].square().sum())


def narrow(x, w):
    return (x.bfloat16() @ w.bfloat16()).float().sigmoid()


def written(x, w):
    """In place, where autograd needs the value after it or none."""
    y = x @ w
    return y.add_(1).mul_(0.5).sigmoid_() * x


def own_leaf(x, w):
    scale = torch.full((WIDTH,), 0.5, device=x.device, requires_grad=True)
    return x.sin() * scale


def nested(x, w):
    return x + checkpoint(lambda y: (y @ w).tanh() * y, x.cos(), use_reentrant=False)


def attention(x, w):
    q, k, v = (x @ torch.cat([w, w.t(), w], 1)).view(1, ROWS, 3, 2, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, WIDTH)


def normed(x, w):
    return F.dropout(F.layer_norm(x, (WIDTH,), w[0], w[1]).softmax(1), 0.3)


OPS = [
    chunks, broadcast, strided, masked, indexed, nothing, narrow, written, own_leaf, nested, attention,
    normed,
]  # fmt: skip


class Program:
    """A stack of blocks, each a few operations, with or without a store."""

    def __init__(self, blocks, device, store=None, least=0):
        generator = torch.Generator().manual_seed(3)
        self.weights = [
            torch.randn(WIDTH, WIDTH, generator=generator).div(3).to(device).requires_grad_() for _ in blocks
        ]
        self.blocks, self.device, self.store, self.least = blocks, device, store, least

    def hooks(self, x):
        if self.store is None:
            return contextlib.nullcontext()
        park = park_hook(self.store, frozenset({x.untyped_storage()._cdata}), self.least)

        def pack(tensor):
            parked = park(tensor)
            return tensor.detach() if parked is tensor else parked

        return torch.autograd.graph.saved_tensors_hooks(
            pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed.tensor()
        )

    def forward(self, seed):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.device)
        x.requires_grad_()
        first = x
        for ops, weight in zip(self.blocks, self.weights, strict=True):
            with self.hooks(x):
                for op in ops:
                    x = op(x, weight)
        return first, x

    def backward(self, graph, retain=False):
        first, last = graph
        return torch.autograd.grad(
            last.square().sum(), [first, *self.weights], retain_graph=retain, allow_unused=True
        )


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.view(torch.int32), b.view(torch.int32))  # NaNs too


@contextlib.contextmanager
def engine_of(kind, chunk_bytes=100):
    """Ours copies in tiny chunks, so that small tensors take several."""
    ours = kind == "ours"
    engine = CopyEngine(chunk_bytes=chunk_bytes, window_bytes=2 * chunk_bytes) if ours else None
    engine = engine or registry.TorchCopyEngine()
    before = registry.set_copy_engine(engine)
    try:
        yield engine
    finally:
        registry.set_copy_engine(before)
        if kind == "ours":
            engine.close()


def through(engine):
    """Let every copy come to its end, so that what left is really gone."""
    if isinstance(engine, CopyEngine):
        engine.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arena_of():
    _C.simulate_pinning(not torch.cuda.is_available())
    return HostArena(pinned=True, slab_bytes=1 << 16)


programs = st.lists(st.lists(st.sampled_from(OPS), min_size=1, max_size=3), min_size=1, max_size=4)
orders = st.lists(st.sampled_from(["forward", "dropped", "no_grad", "back", "back", "again"]), max_size=8)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["ours", "torch"])
@given(
    programs, orders, st.sampled_from([0, 300, 1 << 20]), st.sampled_from([0, 200]), st.booleans(), st.data()
)
def test_gradients_are_those_of_kept_activations(device, kind, blocks, orders, ahead, least, wait, data):
    arena = arena_of()
    with engine_of(kind) as engine:
        store = HostActivations(arena.empty, max_ahead_bytes=ahead)
        plain, moved = Program(blocks, device), Program(blocks, device, store, least)
        graphs = []
        for seed, what in enumerate(["forward", *orders, "back"]):
            if what == "forward":
                graphs.append((plain.forward(seed), moved.forward(seed)))
                assert_same([graphs[-1][1][1]], [graphs[-1][0][1]])
            elif what == "dropped":
                moved.forward(seed)
            elif what == "no_grad":
                with torch.no_grad():
                    moved.forward(seed)
            elif graphs:
                if wait:
                    through(engine)
                which = data.draw(st.integers(0, len(graphs) - 1))
                expected, actual = graphs[which] if what == "again" else graphs.pop(which)
                retain = what == "again"
                assert_same(moved.backward(actual, retain), plain.backward(expected, retain))
                assert store._here_bytes <= ahead + store.parked_bytes
        graphs.clear()
        actual = expected = None
        through(engine)
        if arena.live_bytes:
            gc.collect()
            through(engine)
        assert arena.live_bytes == arena.pageable_bytes == 0
        assert store.parked == 0 or store.parked_bytes > 0
    arena.close()


@given(programs, st.sampled_from([0, 300, 1 << 20]))
def test_files_bring_the_same_bits(blocks, ahead):
    with DiskStore() as files:
        store = FileActivations(files, max_ahead_bytes=ahead)
        plain, moved = Program(blocks, "cpu"), Program(blocks, "cpu", store)
        graphs = [(plain.forward(seed), moved.forward(seed)) for seed in range(2)]
        for which in (1, 0):
            for retain in (True, False):
                expected, actual = graphs[which]
                assert_same(moved.backward(actual, retain), plain.backward(expected, retain))
        graphs.clear()
        expected = actual = None
        if len(files):
            gc.collect()
        assert not store.short()
        assert len(files) == 0


@pytest.mark.parametrize("where", ["delete", "unlink"])
def test_an_interrupt_while_files_are_removed_is_seen_and_leaves_none(where, monkeypatch):
    """Python drops what is raised where an object goes, so files are removed at the next call."""
    with DiskStore() as files:
        store = FileActivations(files)
        kept = store.park(torch.arange(16, dtype=torch.uint8))
        store.park(torch.zeros(16, dtype=torch.uint8))  # nobody needs it
        gc.collect()
        assert len(files) == 2

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(files if where == "delete" else files._folder, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.begin()
        store.begin()
        assert len(files) == 1
        assert files.used_bytes > 0
        assert torch.equal(kept.bring(), torch.arange(16, dtype=torch.uint8))
        del kept
        gc.collect()
        assert not store.short()
        assert (len(files), files.used_bytes) == (0, 0)


def test_a_parked_storage_never_takes_the_file_of_one_whose_parking_was_interrupted(monkeypatch):
    with DiskStore() as files:
        store = FileActivations(files)
        with monkeypatch.context() as patch:
            patch.setattr(store, "begin", lambda: None)  # so that `park` fails behind the write
            with pytest.raises(AttributeError):
                store.park(torch.zeros(16, dtype=torch.uint8))
        parked = store.park(torch.arange(16, dtype=torch.uint8))
        gc.collect()
        store.begin()
        assert torch.equal(parked.bring(), torch.arange(16, dtype=torch.uint8))
        assert len(files) == 1


def saved_by(decide, tensors):
    return [decide(tensor) for tensor in tensors]


def test_a_storage_is_parked_once_for_all_its_views():
    store = HostActivations()
    decide = park_hook(store, frozenset(), 0)
    base = torch.arange(24.0).reshape(4, 6)
    views = [base[:, i::3] for i in range(3)]  # as q, k and v are views of one product
    saved = saved_by(decide, [*views, base.expand(2, 4, 6), base.view(torch.int32)])
    assert (store.parked, store.parked_bytes) == (1, 96)
    expected = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    whole = base.clone()
    del base, views
    gc.collect()
    for view, value, stride in zip(saved, expected, strides, strict=False):
        assert torch.equal(view.tensor(), value)
        assert view.tensor().stride() == stride
    assert torch.equal(saved[3].tensor(), whole.expand(2, 4, 6))
    assert saved[3].tensor().stride() == (0, 6, 1)
    assert torch.equal(saved[4].tensor(), whole.view(torch.int32))


def test_what_was_changed_in_place_cannot_be_used():
    store = HostActivations()
    decide = park_hook(store, frozenset(), 0)
    base = torch.arange(24.0).reshape(4, 6)
    early = decide(base[:, 1:])
    assert torch.equal(early.tensor(), base[:, 1:])
    base[0].mul_(2)
    with pytest.raises(StateError, match="modified in place"):
        early.tensor()
    late = decide(base)
    assert store.parked == 2
    assert torch.equal(late.tensor(), base)
    with pytest.raises(StateError, match="modified in place"):
        early.tensor()


@pytest.mark.parametrize("device", devices())
def test_a_change_in_place_is_an_error_as_it_is_without_offloading(device):
    def lost(x, w):
        y = x @ w
        z = y * y
        y.add_(1)
        return z

    for store in (None, HostActivations()):
        program = Program([[lost]], device, store)
        graph = program.forward(0)
        with pytest.raises(RuntimeError, match=r"modified.*in-?\s?place|in-?\s?place"):
            program.backward(graph)


def test_inputs_parameters_and_small_storages_stay():
    store = HostActivations()
    given, small, large = torch.zeros(64), torch.zeros(4), torch.zeros(64)
    decide = park_hook(store, frozenset({given.untyped_storage()._cdata}), 100)
    weight = nn.Parameter(torch.zeros(64))
    empty = torch.zeros(0, 5)
    assert decide(given) is given
    assert decide(small) is small
    assert decide(small.expand(1000, 4)) is not None
    assert decide(weight) is weight
    assert decide(empty) is empty
    assert park_hook(store, frozenset(), 0)(empty) is empty
    assert store.parked == 0
    assert decide(large) is not large
    assert store.parked == 1


@given(st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float16, torch.float64, torch.complex64]))
def test_every_kind_of_number_comes_back(dtype):
    store = HostActivations()
    tensor = (torch.arange(40) % 3).to(dtype)
    saved = park_hook(store, frozenset(), 0)(tensor[3:])
    expected = tensor[3:].clone()
    del tensor
    back = saved.tensor()
    assert back.dtype == dtype
    assert torch.equal(back, expected)
    assert back.storage_offset() == 3


def test_an_exception_in_forward_leaves_nothing():
    arena = arena_of()

    def fail(x, w):
        raise KeyError("here")

    with engine_of("ours") as engine:
        store = HostActivations(arena.empty)
        program = Program([[chunks], [attention, fail]], "cpu", store)
        with pytest.raises(KeyError):
            program.forward(0)
        assert store.parked > 0
        gc.collect()
        through(engine)
        assert arena.live_bytes == 0
        program = Program([[chunks]], "cpu", store)
        expected = Program([[chunks]], "cpu")
        assert_same(program.backward(program.forward(1)), expected.backward(expected.forward(1)))


class Watched(HostActivations):
    """Remembers what was fetched because it was asked for, and what ahead of that."""

    def __init__(self, **options):
        super().__init__(**options)
        self.urgent, self.early, self.kept, self.largest = 0, 0, 0, 0
        self.twice = []

    def _fetch(self, aways, urgent):
        super()._fetch(aways, urgent)
        if urgent:
            self.urgent += len(aways)
        else:
            self.early += len(aways)
        self.twice += [away for away in aways if away.came is not None]

    def _start(self, aways, urgent):
        super()._start(aways, urgent)
        self.kept += sum(away.arriving is None for away in aways)
        here = {id(away): away for ref in self._here if (away := ref()) is not None}
        held = sum(away.nbytes for away in here.values() if away.back is not None and away.taken == 0)
        self.largest = max(self.largest, held)


def test_activations_return_ahead_of_their_use():
    with engine_of("ours") as engine:
        store = Watched()
        program = Program([[chunks, attention]] * 5, "cpu", store)
        graph = program.forward(0)
        through(engine)
        program.backward(graph)
        # Only the very first of them was not foreseen. What a block gave the next one was never gone.
        assert store.urgent == 1
        assert store.early == store.parked - 1 - store.kept
        assert store.kept < 10
        assert store.twice == []


@given(st.integers(1, 3000))
def test_what_comes_ahead_is_bounded(ahead):
    with engine_of("ours") as engine:
        store = Watched(max_ahead_bytes=ahead)
        program = Program([[chunks, attention, normed]] * 3, "cpu", store)
        graph = program.forward(0)
        through(engine)
        largest = ROWS * WIDTH * 3 * 4
        program.backward(graph)
        # One is asked for, and one alone may be larger than the bound.
        assert store.largest <= max(ahead, largest) + largest
        assert store.twice == []


def test_nothing_comes_ahead_with_a_bound_of_zero():
    with engine_of("ours") as engine:
        store = Watched(max_ahead_bytes=0)
        program = Program([[chunks, attention]] * 3, "cpu", store)
        graph = program.forward(0)
        through(engine)
        program.backward(graph)
        assert store.early == 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)).square())


@pytest.mark.parametrize("policies", [["offload"] * 4, ["offload", "recompute", "offload", "keep"]])
def test_a_block_calls_for_what_it_needs_before_it_starts(policies):
    with engine_of("ours") as engine:
        store = Watched()
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in policies])
        pager = WeightPager(torch.device("cpu"), activations=store, min_offload_bytes=0)
        pager.attach([(str(i), layer, policies[i]) for i, layer in enumerate(model)])
        loss = model(torch.randn(ROWS, WIDTH)).square().sum()
        through(engine)
        loss.backward()
        assert store.urgent == 0
        assert store.early == store.parked > 0
        assert store.twice == []
        pager.detach()


def test_interleaved_graphs_hold_no_more_than_two_runs():
    with engine_of("ours") as engine:
        store = Watched()
        program = Program([[chunks, attention]] * 4, "cpu", store)
        graphs = [program.forward(seed) for seed in range(3)]
        through(engine)
        one = store.parked_bytes // 12
        for graph in reversed(graphs):
            program.backward(graph)
        assert store.largest <= 2 * one


def test_a_failed_copy_is_told_and_tried_again():
    with engine_of("ours") as engine:
        store = HostActivations()
        decide = park_hook(store, frozenset(), 0)
        tensor = torch.arange(50.0)
        saved, expected = decide(tensor), tensor.clone()
        del tensor
        through(engine)
        _C.fail_copy_after(0)
        with pytest.raises(DeviceError, match="failed by a test hook"):
            saved.tensor()
        assert torch.equal(saved.tensor(), expected)


def test_memory_is_short_below_the_floor():
    left = [5000]
    store = HostActivations(floor_bytes=4000, available=lambda: left[0])
    assert not store.short()
    left[0] = 3999
    assert store.short()
    real = HostActivations()
    assert real.floor_bytes >= 4 << 30
    assert isinstance(real.short(), bool)
    for options in ({"floor_bytes": "much"}, {"max_ahead_bytes": -1}):
        with pytest.raises(OptionError):
            HostActivations(**options)


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestGpu:
    @pytest.mark.parametrize("ahead", [0, 1 << 30])
    def test_a_late_device_changes_nothing(self, ahead):
        """Copies are issued while the device is far behind; memory is freed and used again meanwhile."""
        chance = random.Random(0)
        torch.manual_seed(0)
        layers = [nn.Linear(1024, 1024, device="cuda") for _ in range(6)]
        x = torch.randn(2, 512, 1024, device="cuda")
        arena = HostArena(slab_bytes=64 << 20)

        def run(store):
            y = x.clone().requires_grad_()
            first = y
            junk = []
            for layer in layers:
                program = Program([], "cuda", store)
                with program.hooks(y):
                    y = F.silu(layer(y)) * y
                junk.append(torch.randn(chance.randint(1, 1 << 20), device="cuda"))
                if chance.random() < 0.5:
                    junk.pop(chance.randrange(len(junk)))
            torch.cuda._sleep(10**8)
            return torch.autograd.grad(
                y.square().sum(), [first, *[p for m in layers for p in m.parameters()]]
            )

        with engine_of("ours", 1 << 20):
            expected = run(None)
            store = HostActivations(arena.empty, max_ahead_bytes=ahead)
            for _ in range(20):
                assert_same(run(store), expected)
            assert store.parked > 0
        torch.cuda.synchronize()

    def test_device_memory_is_free_while_it_is_away(self):
        arena = HostArena(slab_bytes=64 << 20)
        with engine_of("ours", 1 << 20) as engine:
            store = HostActivations(arena.empty)
            tensor = torch.ones(8 << 20, device="cuda")
            saved = park_hook(store, frozenset(), 0)(tensor)
            before = torch.cuda.memory_allocated()
            del tensor
            engine.synchronize()
            assert torch.cuda.memory_allocated() <= before - (32 << 20)
            assert bool((saved.tensor() == 1).all())
