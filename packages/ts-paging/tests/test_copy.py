import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import DTYPES, assert_same_bits, copy_plain, random_bits

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, DeviceError, OptionError
from ts_core.testing import devices, shapes
from ts_paging import _C, CopyEngine, CopyTicket, WaitPolicy, pinned_empty

small = shapes(min_dims=0, max_dims=3, min_side=0, max_side=40, max_numel=3000)


def host(tensor, pinned):
    """A contiguous host copy of a tensor, in page-locked memory or not."""
    if not pinned or not tensor.numel():
        return tensor.clone()
    memory = pinned_empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return memory.copy_(tensor)


@pytest.fixture(scope="module")
def engine():
    with CopyEngine(chunk_bytes=1000, wait=WaitPolicy("poll", 10, 10)) as made:
        yield made


@pytest.mark.parametrize("device", devices())
@given(small, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
def test_bits_go_to_the_device_and_back(engine, device, shape, dtype, pinned, seed):
    values = random_bits(shape, dtype, seed)
    src, back = host(values, pinned), host(torch.zeros_like(values), pinned)
    there = torch.zeros(shape, dtype=dtype, device=device)
    engine.h2d(there, src).wait_stream()
    ticket = engine.d2h(back, there)
    ticket.wait()
    assert ticket.done()
    assert ticket.nbytes == values.nbytes
    assert_same_bits(back, values)
    assert_same_bits(there, values)


@pytest.mark.parametrize("device", devices())
@given(
    st.lists(
        st.tuples(st.sampled_from(["h2d", "d2h", "add", "free"]), st.integers(0, 2), st.integers(0, 2)),
        max_size=25,
    ),
    st.booleans(),
    st.sampled_from([5000, 1 << 30]),
)
def test_sequences_equal_plain_copies(device, steps, pinned, inflight):
    n = 1500
    hosts = [host(torch.full((n,), float(i)), pinned) for i in range(3)]
    slots = [torch.full((n,), 10.0 + i, device=device) for i in range(3)]
    plain_hosts, plain_slots = [h.clone() for h in hosts], [s.clone() for s in slots]
    tickets = []
    with CopyEngine(chunk_bytes=2048, max_inflight_bytes=inflight) as engine:
        for what, i, j in steps:
            if what == "add":
                slots[i].add_(1.0)
                plain_slots[i].add_(1.0)
            elif what == "free":
                # The memory of the old slot goes back to the allocator while a copy may still use it.
                fresh = plain_slots[i].clone()
                slots[i] = fresh.clone()
            elif what == "h2d":
                for ticket in tickets:
                    ticket.wait()  # hosts are read by value: earlier copies into them must be through
                engine.h2d(slots[i], hosts[j]).wait_stream()
                copy_plain(plain_slots[i], plain_hosts[j])
            else:
                tickets.append(engine.d2h(hosts[j], slots[i]))
                tickets[-1].wait_stream()
                copy_plain(plain_hosts[j], plain_slots[i])
        engine.synchronize()
        assert engine.inflight_bytes == 0
        assert engine._native.kept == 0
    for actual, expected in zip(hosts + slots, plain_hosts + plain_slots, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", devices())
def test_a_copy_starts_after_the_work_of_the_current_stream(engine, device):
    slot = torch.zeros(1 << 16, device=device)
    out = host(torch.zeros(1 << 16), True)
    for i in range(50):
        slot.fill_(float(i))
        ticket = engine.d2h(out, slot)
        ticket.wait_stream()
        slot.fill_(-1.0)
        ticket.wait()
        assert float(out.min()) == float(out.max()) == float(i)


@pytest.mark.parametrize("device", devices())
def test_tensors_live_until_the_copy_is_through(device):
    with CopyEngine() as engine:
        src = torch.arange(1 << 18, dtype=torch.float32)
        dst = torch.zeros(1 << 18, device=device)
        alive = weakref.ref(src)
        ticket = engine.h2d(dst, src)
        del src
        gc.collect()
        ticket.wait()
        gc.collect()
        assert alive() is None
        assert torch.equal(dst.cpu(), torch.arange(1 << 18, dtype=torch.float32))


@pytest.mark.parametrize("device", devices())
def test_a_failed_copy_is_told_by_its_ticket_alone(device):
    with CopyEngine() as engine:
        src, dst = torch.ones(10), torch.zeros(10, device=device)
        _C.fail_copy_after(1)
        good, bad, later = (engine.h2d(dst, src) for _ in range(3))
        good.wait()
        for _ in range(2):
            with pytest.raises(DeviceError, match="failed by a test hook"):
                bad.wait()
        with pytest.raises(DeviceError):
            bad.wait_stream()
        assert bad.done()
        later.wait()
        assert engine.inflight_bytes == 0


@pytest.mark.parametrize("device", devices())
def test_bytes_in_flight_are_bounded(device):
    with CopyEngine(max_inflight_bytes=4000) as engine:
        dst = torch.zeros(500, device=device)
        for i in range(50):
            engine.h2d(dst, torch.full((500,), float(i)))
            assert engine.inflight_bytes <= 4000
        large = torch.zeros(5000, device=device)
        engine.h2d(large, torch.ones(5000)).wait()  # alone it may exceed the bound
        assert bool((large == 1).all())


def test_threads_may_share_an_engine():
    results = []

    def work(engine, value):
        for _ in range(50):
            src, dst = torch.full((1000,), value), torch.zeros(1000)
            engine.h2d(dst, src).wait()
            results.append(torch.equal(dst, src))

    with CopyEngine(max_inflight_bytes=10_000) as engine:
        threads = [threading.Thread(target=work, args=(engine, float(i))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 200


def test_copies_issued_before_close_are_carried_out():
    engine = CopyEngine()
    dsts = [torch.zeros(100_000) for _ in range(20)]
    tickets = [engine.h2d(dst, torch.ones(100_000)) for dst in dsts]
    engine.close()
    engine.close()
    assert all(ticket.done() for ticket in tickets)
    assert all(bool((dst == 1).all()) for dst in dsts)
    from ts_core.errors import StateError

    source = torch.ones(100_000)
    for issue in (engine.h2d, engine.d2h):
        with pytest.raises(StateError, match="closed"):
            issue(dsts[0], source)
    for issue in (engine.h2d_many, engine.d2h_many):
        with pytest.raises(StateError, match="closed"):
            issue([dsts[0]], [source])


def test_a_ticket_outlives_its_engine():
    dst = torch.zeros(1000)
    ticket = CopyEngine().h2d(dst, torch.ones(1000))
    gc.collect()
    ticket.wait()
    assert bool((dst == 1).all())


def test_parameters_and_views_are_copied_in_place(engine):
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    engine.h2d(weight[1], torch.ones(6)).wait()
    assert weight.detach().sum() == 6
    version = weight._version
    engine.h2d(weight, torch.full((4, 6), 2.0)).wait()
    assert bool((weight == 2).all())
    assert weight._version == version


@given(st.sampled_from(["shape", "dtype", "strides", "kind", "place", "overlap"]), st.booleans())
def test_what_cannot_be_copied_is_named(wrong, up):
    good, other = torch.zeros(4, 4), torch.zeros(4, 4)
    bad, error, text = {
        "shape": (torch.zeros(4, 5), ArgumentError, "shape"),
        "dtype": (torch.zeros(4, 4, dtype=torch.int32), ArgumentTypeError, "dtype"),
        "strides": (torch.zeros(4, 8)[:, ::2], ArgumentError, "contiguous"),
        "kind": ([0.0] * 16, ArgumentTypeError, "a tensor"),
        "place": (torch.zeros(4, 4, device="meta"), ArgumentTypeError, "meta"),
        "overlap": (other.view(-1)[:16].view(4, 4), ArgumentError, "overlap"),
    }[wrong]
    if wrong == "overlap":
        good = other
    with CopyEngine() as engine:
        copy = engine.h2d if up else engine.d2h
        with pytest.raises(error, match=text):
            copy(good, bad)
        with pytest.raises(error, match=text):
            copy(bad, good)


def test_bad_options_are_refused():
    for options in ({"max_inflight_bytes": 0}, {"chunk_bytes": -1}, {"chunk_bytes": "big"}):
        with pytest.raises(OptionError):
            CopyEngine(**options)


def test_it_is_the_engine_of_the_registry():
    engine = CopyEngine()
    before = registry.set_copy_engine(engine)
    try:
        src, dst = torch.ones(3), torch.zeros(3)
        ticket = registry.copy_engine().h2d(dst, src)
        assert isinstance(ticket, registry.CopyTicket)
        assert isinstance(ticket, CopyTicket)
        ticket.wait()
        assert torch.equal(dst, src)
    finally:
        registry.set_copy_engine(before)
        engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestGpu:
    def test_another_stream_can_wait(self):
        with CopyEngine() as engine:
            src = host(torch.arange(1 << 20, dtype=torch.float32), True)
            dst = torch.zeros(1 << 20, device="cuda")
            stream = torch.cuda.Stream()
            engine.h2d(dst, src).wait_stream(stream)
            with torch.cuda.stream(stream):
                doubled = dst * 2
            stream.synchronize()
            assert torch.equal(doubled.cpu(), src * 2)

    def test_both_directions_at_once(self):
        with CopyEngine() as engine:
            up = host(torch.randn(1 << 22), True)
            down = host(torch.zeros(1 << 22), True)
            there, away = torch.zeros(1 << 22, device="cuda"), torch.randn(1 << 22, device="cuda")
            tickets = [engine.h2d(there, up), engine.d2h(down, away)]
            for ticket in tickets:
                ticket.wait()
            assert torch.equal(there.cpu(), up)
            assert torch.equal(away.cpu(), down)

    def test_host_tensors_on_both_sides_are_copied_by_a_thread(self):
        with CopyEngine() as engine:
            src, dst = host(torch.randn(1000), True), torch.zeros(1000)
            engine.h2d(dst, src).wait_stream()
            assert torch.equal(dst, src)
