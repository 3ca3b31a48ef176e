"""What block mode is made of: calls taken apart, structures, fixed memory, tapes, random numbers."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.testing import devices
from ts_paging.buffers import as_they_were
from ts_paging.calls import OpaqueArgument, flatten
from ts_paging.fixed import Fixed, Pack, copy_all
from ts_paging.recording import CannotRecord, CudaRecorder, recorder_for
from ts_paging.rng import RandomState, as_it_was
from ts_paging.soleuse import watch_use
from ts_paging.structure import Structure

constants = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
values = st.recursive(
    constants | st.builds(lambda n: torch.full((2,), n), st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@given(args=st.lists(values, max_size=3), kwargs=st.dictionaries(st.text(max_size=3), values, max_size=3))
def test_a_call_that_is_taken_apart_can_be_put_together_again(args, kwargs):
    call = flatten(args, kwargs)
    again, named = call.rebuild(call.leaves)
    assert same(list(again), args)
    assert same(named, kwargs)
    assert hash(call.spec) == hash(flatten(args, kwargs).spec)


def test_one_and_true_are_different_calls():
    assert flatten([1], {}).spec != flatten([True], {}).spec
    assert flatten([], {"a": 1}).spec != flatten([], {"b": 1}).spec


@pytest.mark.parametrize(
    "value", [object(), {1: torch.ones(1)}, nn.Linear(1, 1), {torch.ones(1)}, [object()]]
)
def test_what_may_hide_tensors_is_opaque(value):
    with pytest.raises(OpaqueArgument, match="an argument of type"):
        flatten([value], {})


class Layer(nn.Module):
    def __init__(self, number, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.layer_idx, self.scale, self.names = number, scale, {"a": [1, 2]}

    def forward(self, x):
        return self.linear(x) * self.scale


def test_layers_of_a_stack_have_one_structure_and_others_another():
    key = Structure(Layer(0)).key
    assert key == Structure(Layer(1)).key
    assert hash(key) == hash(Structure(Layer(1)).key)
    assert key != Structure(Layer(0, 2.0)).key
    assert key != Structure(Layer(0).eval()).key
    assert key != Structure(Layer(0).bfloat16()).key


CHANGES = {
    "mode": lambda m: m.linear.eval(),
    "setting": lambda m: setattr(m, "scale", 3.0),
    "equal setting": lambda m: setattr(m, "scale", float("1.0")),
    "in a dictionary": lambda m: m.names.update(b=1),
    "in a list": lambda m: m.names["a"].append(3),
    "module": lambda m: setattr(m, "linear", nn.Linear(4, 4)),
    "parameter": lambda m: setattr(m.linear, "bias", None),
    "buffer": lambda m: m.register_buffer("more", torch.ones(1)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_of_a_structure_are_seen(change):
    layer = Layer(0)
    structure = Structure(layer)
    layer(torch.ones(1, 4))
    assert structure.holds()
    assert structure.hooked() is None
    CHANGES[change](layer)
    assert not structure.holds()


def test_hooks_inside_a_block_are_named():
    layer = Layer(0)
    structure = Structure(layer)
    handle = layer.linear.register_forward_hook(lambda *_: None)
    assert structure.hooked() == "linear"
    handle.remove()
    assert structure.hooked() is None
    layer.register_forward_pre_hook(lambda *_: None)
    assert structure.hooked() == ""


FORMS = {
    "dense": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "with gaps": lambda: torch.randn(3, 8)[:, :4],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 4),
    "integer": lambda: torch.arange(12).view(3, 4),
    "mask": lambda: torch.rand(3, 4) > 0.5,
}


@pytest.mark.parametrize("form", list(FORMS))
def test_fixed_memory_keeps_the_form_of_what_comes(form):
    first, second = FORMS[form](), FORMS[form]()
    fixed = Fixed(first)
    address, version = fixed.value.data_ptr(), fixed.value._version
    for tensor in (first, second):
        assert fixed.fits(tensor)
        copy_all([fixed.pair(tensor)])
        assert torch.equal(fixed.value, tensor)
        assert fixed.value.stride() == tensor.stride()
        assert fixed.value.data_ptr() == address
    assert fixed.value._version == version  # what autograd saved of it is not spoilt by filling it


def test_what_was_brought_in_this_pass_is_not_brought_again():
    tensor = torch.ones(3)
    fixed = Fixed(tensor)
    assert fixed.stale(tensor, 1)
    assert not fixed.stale(tensor, 1)
    assert fixed.stale(tensor, 2)
    tensor.add_(1)
    assert fixed.stale(tensor, 2)
    assert fixed.stale(tensor.clone(), 2)


def test_an_odd_address_and_results_with_gaps_are_refused():
    with pytest.raises(CannotRecord, match="odd address"):
        Fixed(torch.zeros(64, dtype=torch.uint8)[1:])
    with pytest.raises(CannotRecord, match="gaps"):
        Pack([torch.zeros(3, 8)[:, :4]], torch.device("cpu"))


@given(st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), max_size=5))
def test_copies_of_several_dtypes_arrive(dtypes):
    sources = [torch.arange(index * 4, dtype=torch.uint8).to(d) for index, d in enumerate(dtypes)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(list(zip(targets, sources, strict=True)))
    assert all(map(torch.equal, targets, sources))


@pytest.mark.parametrize("device", devices())
def test_a_recording_reads_what_is_there_and_writes_where_it_wrote(device):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    x, out = torch.randn(3, 4, device=device), torch.empty(3, 4, device=device)
    recorder = recorder_for(torch.device(device))

    def run():
        y = layer(x)
        out.copy_(y.detach() + torch.arange(4, device=device))
        return y

    recorder.warm_up(run)
    recording, y = recorder.record(run)
    recording.keep([y])
    address = out.data_ptr()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(3, 4))
            layer[0].weight.mul_(1.5)
        recording.replay()
        expected = layer(x).detach()
        assert torch.equal(y.detach(), expected)
        assert torch.equal(out, expected + torch.arange(4, device=device))
        assert out.data_ptr() == address
    assert recorder.pool_bytes() > 0


@pytest.mark.parametrize("device", devices())
def test_random_numbers_of_a_replay_are_those_of_an_eager_run(device):
    x, out = torch.ones(64, device=device), torch.empty(64, device=device)
    recorder = recorder_for(torch.device(device))

    def run():
        out.copy_(torch.nn.functional.dropout(x, 0.5) + torch.nn.functional.dropout(x, 0.25))

    torch.manual_seed(3)
    expected = []
    for _ in range(3):
        run()
        expected.append(out.clone())
    before = RandomState(torch.device(device))
    recorder.warm_up(run)
    recording, _ = recorder.record(run)
    before.put_back()
    torch.manual_seed(3)
    for index in range(3):
        state = RandomState(torch.device(device))
        recording.replay()
        assert torch.equal(out, expected[index])
        with as_it_was(state, torch.device(device)):
            recording.replay()
        assert torch.equal(out, expected[index])


def test_a_tape_spoils_what_is_not_kept_and_refuses_what_the_host_reads():
    recorder = recorder_for(torch.device("cpu"))
    x = torch.ones(4)
    recording, (between, kept) = recorder.record(lambda: ((y := x * 2), y + 1))
    recording.keep([kept])
    recording.replay()
    assert torch.isnan(between).all()
    assert torch.equal(kept, torch.full((4,), 3.0))
    other, _ = recorder.record(lambda: x + 5)
    assert torch.isnan(kept).all()  # another recording uses the same pool
    recording.replay()
    assert torch.equal(kept, torch.full((4,), 3.0))
    other.replay()
    assert torch.isnan(kept).all()
    for run in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0]):
        with pytest.raises(CannotRecord, match="host has to know"):
            recorder.record(run)


def test_random_state_tells_whether_the_cpu_was_asked():
    state = RandomState(torch.device("cpu"))
    assert state.same_on_cpu(RandomState(torch.device("cpu")))
    torch.rand(1)
    assert not state.same_on_cpu(RandomState(torch.device("cpu")))


def test_buffers_of_a_second_run_are_as_they_were():
    place = {"count": torch.zeros(1)}
    held = [(place, "count", place["count"], place["count"].clone(), 0)]
    place["count"].add_(1)
    with as_they_were(held):
        assert float(place["count"]) == 0.0
        place["count"].add_(5)
    assert float(place["count"]) == 1.0


@pytest.mark.parametrize(("shared", "alone"), [(False, True), (True, False)])
def test_other_uses_of_an_input_show_in_its_gradient(shared, alone):
    x = torch.randn(5, requires_grad=True)
    told = []
    h = x * 2
    out = h + torch.tanh(h)
    watch_use([h], [out], told.append)
    (out.sum() + (h.square().sum() if shared else 0.0)).backward()
    assert told == [alone]


def test_a_structure_does_not_stand_in_the_way_of_copies():
    layer = Layer(0)
    structure = Structure(layer)
    assert structure.key == Structure(copy.deepcopy(layer)).key


class FakeGraph:
    """What PyTorch's allocator and generators notice of a graph; recording fails once `broken` is set."""

    broken = capturing = False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.pool = pool
        assert pool not in self.spent
        if pool is not None:
            self.live[pool] = self.live.get(pool, 0) + 1
        type(self).capturing = True

    def capture_end(self):
        if self.broken:
            type(self).broken = False
            raise RuntimeError("capture invalidated")
        type(self).capturing = False
        self.ended = True

    def __del__(self):
        if getattr(self, "ended", False) and self.pool is not None:
            self.release(0, self.pool)

    @classmethod
    def release(cls, index, pool):
        cls.live[pool] -= 1
        if not cls.live[pool]:
            cls.spent.add(pool)


def fake_cuda(monkeypatch):
    stream = type("Stream", (), {"__init__": lambda *_: None, "wait_stream": lambda *_: None})
    numbers = iter(range(1, 99))
    graph = type("Graph", (FakeGraph,), {"live": {}, "spent": set(), "others": [], "cleared": 0})
    for name, value in {
        "Stream": stream,
        "graph_pool_handle": lambda: (0, next(numbers)),
        "current_stream": lambda device: stream(),
        "stream": contextlib.nullcontext,
        "synchronize": lambda device: None,
        "memory_snapshot": lambda: [
            {"segment_pool_id": pool} for pool in [(0, 0), *graph.live, *graph.others]
        ],
        "CUDAGraph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clear = lambda: setattr(graph, "cleared", graph.cleared + 1)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", graph.release, raising=False)
    return graph


def test_a_pool_whose_graphs_have_gone_is_not_used_again(monkeypatch):
    graph = fake_cuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cpu", 0))
    first, _ = recorder.record(lambda: None)
    second, _ = recorder.record(lambda: None)
    assert list(graph.live.values()) == [2]
    del first, second
    third, _ = recorder.record(lambda: None)
    assert third is not None
    assert list(graph.live.values()) == [0, 1]


@pytest.mark.parametrize("others", [[], [(7, 0)]])
def test_workspaces_of_recordings_that_have_gone_go_unless_others_have_graphs(monkeypatch, others):
    graph = fake_cuda(monkeypatch)
    graph.others[:] = others
    recorder = CudaRecorder(torch.device("cpu", 0))
    first, _ = recorder.record(lambda: None)
    second, _ = recorder.record(lambda: None)
    del first
    third, _ = recorder.record(lambda: None)
    assert graph.cleared == 0
    del second, third
    recorder.record(lambda: None)
    assert graph.cleared == (0 if others else 1)


def test_a_recording_that_fails_leaves_pool_and_generators_as_they_were(monkeypatch):
    """Its pool serves what is recorded there, but is not asked for again: who holds it, nobody knows."""
    graph = fake_cuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cpu", 0))
    kept, _ = recorder.record(lambda: None)
    (pool,) = graph.live

    def fail():
        graph.broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CannotRecord, match="not permitted"):
        recorder.record(fail)
    assert not graph.capturing
    assert pool not in graph.spent
    again, _ = recorder.record(lambda: None)
    assert len(graph.live) == 2
    assert graph.live[pool] >= 1
    assert (kept.pool, again.pool) == (pool, next(each for each in graph.live if each != pool))


def test_work_that_raises_while_it_is_recorded_ends_the_recording(monkeypatch):
    graph = fake_cuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cpu", 0))

    def fail():
        raise KeyError("of the block")

    for _ in range(5):
        with pytest.raises(KeyError):
            recorder.record(fail)
        assert not graph.capturing
    kept, _ = recorder.record(lambda: None)
    assert kept is not None


def test_no_more_is_recorded_once_recordings_have_failed_twice(monkeypatch):
    graph = fake_cuda(monkeypatch)
    recorder = CudaRecorder(torch.device("cpu", 0))

    def fail():
        graph.broken = True
        raise RuntimeError("")

    for expected in ("it failed", "it failed", "no more are tried"):
        with pytest.raises(CannotRecord, match=expected):
            recorder.record(fail)
        graph.broken = False
