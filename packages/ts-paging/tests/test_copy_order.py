"""Several tensors in one call, and copies that pass others: the result is that of plain copies in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import DTYPES, assert_same_bits, random_bits

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, DeviceError, OptionError, StateError
from ts_core.testing import devices, shapes
from ts_paging import _C, CopyEngine, pinned_empty
from ts_paging.copy import d2h_many, h2d_many

small = shapes(min_dims=0, max_dims=3, min_side=0, max_side=20, max_numel=3000)
LENGTH = 4000


def host(tensor, pinned):
    if not pinned or not tensor.numel():
        return tensor.clone()
    return pinned_empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.fixture(scope="module")
def engine():
    with CopyEngine(chunk_bytes=1000, window_bytes=2000) as made:
        yield made


@pytest.mark.parametrize("device", devices())
@given(st.lists(st.tuples(small, st.sampled_from(DTYPES), st.booleans()), max_size=8), st.integers(-1, 2))
def test_many_tensors_go_with_one_ticket(engine, device, parts, priority):
    values = [random_bits(shape, dtype, i) for i, (shape, dtype, _) in enumerate(parts)]
    pinned = [p for *_, p in parts]
    srcs = [host(v, p) for v, p in zip(values, pinned, strict=True)]
    there = [torch.zeros_like(v, device=device) for v in values]
    back = [host(torch.zeros_like(v), p) for v, p in zip(values, pinned, strict=True)]
    up = engine.h2d_many(there, srcs, priority=priority)
    down = engine.d2h_many(back, there, after=[up])
    down.wait()
    assert up.done()
    assert up.nbytes == down.nbytes == sum(v.nbytes for v in values)
    for actual, expected in zip(there + back, values * 2, strict=True):
        assert_same_bits(actual, expected)


steps = st.lists(
    st.tuples(
        st.integers(0, LENGTH - 1000),
        st.integers(1, 1000),
        st.integers(0, 2),
        st.sampled_from(["leave", "leave", "promote", "wait"]),
        st.integers(0, 10),
    ),
    max_size=30,
)


@pytest.mark.parametrize("device", devices())
@given(steps, st.booleans(), st.sampled_from([100, 1 << 20]))
def test_copies_that_share_memory_keep_their_order(device, steps, pinned, chunk):
    slot, plain = torch.zeros(LENGTH, device=device), torch.zeros(LENGTH)
    tickets = []
    with CopyEngine(chunk_bytes=chunk, window_bytes=chunk) as engine:
        for value, (start, length, priority, what, other) in enumerate(steps):
            # Two parts: both may overlap what earlier copies write.
            src = host(torch.full((length,), float(value + 1)), pinned)
            second = (start * 7) % (LENGTH - length + 1)
            apart = abs(second - start) >= length
            dsts = [slot[start : start + length], slot[second : second + length]][: 1 + apart]
            tickets.append(engine.h2d_many(dsts, [src] * len(dsts), priority=priority))
            plain[start : start + length] = value + 1
            if apart:
                plain[second : second + length] = value + 1
            if what != "leave":
                getattr(tickets[other % len(tickets)], what)()
        engine.synchronize()
        assert engine.inflight_bytes == 0
        assert engine._native.kept == 0
    assert torch.equal(slot.cpu(), plain)


@given(steps)
def test_a_copy_that_reads_what_an_earlier_one_writes_comes_later(steps):
    buffer = torch.arange(float(LENGTH))
    plain = buffer.clone()
    tickets = []
    with CopyEngine(chunk_bytes=200) as engine:
        for start, length, priority, what, other in steps:
            source = (start + length + other * 97) % (LENGTH - length + 1)
            if abs(source - start) < length:
                continue
            dst, src = buffer[start : start + length], buffer[source : source + length]
            tickets.append(engine.h2d(dst, src, priority=priority))
            plain[start : start + length] = plain[source : source + length].clone()
            if what != "leave":
                getattr(tickets[other % len(tickets)], what)()
        engine.synchronize()
    assert torch.equal(buffer, plain)


@pytest.mark.parametrize("device", devices())
def test_what_is_needed_now_is_not_held_up_by_the_bound(device):
    with CopyEngine(max_inflight_bytes=4000) as engine:
        dst = torch.zeros(3, 500, device=device)
        engine.h2d(dst[0], torch.ones(500))
        engine.h2d(dst[1], torch.ones(500))
        engine.h2d(dst[2], torch.ones(500), priority=1).wait()
        engine.synchronize()
        assert bool((dst == 1).all())


@pytest.mark.parametrize("device", devices())
def test_a_failed_batch_is_told_by_its_ticket_alone(device):
    with CopyEngine() as engine:
        srcs, dsts = [torch.ones(10)] * 2, [torch.zeros(10, device=device) for _ in range(2)]
        _C.fail_copy_after(1)
        good, bad, later = (engine.h2d_many(dsts, srcs) for _ in range(3))
        good.wait()
        with pytest.raises(DeviceError, match="failed by a test hook"):
            bad.wait()
        with pytest.raises(DeviceError):
            engine.d2h_many(srcs, dsts, after=[bad])
        bad.promote()
        later.wait()
        assert engine.inflight_bytes == 0


@given(st.sampled_from(["count", "shape", "dtype", "strides", "kind", "place", "overlap"]), st.booleans())
def test_a_wrong_pair_is_named_and_nothing_is_copied(wrong, up):
    good, other = torch.zeros(4, 4), torch.ones(4, 4)
    bad, error, text = {
        "count": (None, ArgumentError, "tensors"),
        "shape": (torch.ones(4, 5), ArgumentError, "shape"),
        "dtype": (torch.ones(4, 4, dtype=torch.int32), ArgumentTypeError, "dtype"),
        "strides": (torch.ones(4, 8)[:, ::2], ArgumentError, "contiguous"),
        "kind": ([0.0] * 16, ArgumentTypeError, "a tensor"),
        "place": (torch.ones(4, 4, device="meta"), ArgumentTypeError, "meta"),
        "overlap": (good.view(-1)[:16].view(4, 4), ArgumentError, "overlap"),
    }[wrong]
    first = torch.zeros(4, 4)
    srcs = [other] if wrong == "count" else [other, bad]
    with CopyEngine() as engine:
        copy = engine.h2d_many if up else engine.d2h_many
        with pytest.raises(error, match=text):
            copy([first, good], srcs)
        engine.synchronize()
    assert not first.any()


def test_after_close_nothing_starts():
    engine = CopyEngine()
    ticket = engine.h2d_many([torch.zeros(3)], [torch.ones(3)])
    engine.close()
    ticket.promote()
    ticket.wait()
    with pytest.raises(StateError, match="closed"):
        engine.h2d_many([torch.zeros(3)], [torch.ones(3)]).wait()
    with pytest.raises(OptionError, match="window_bytes"):
        CopyEngine(window_bytes=0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ours", [True, False])
def test_any_registered_engine_takes_many(device, ours):
    engine = CopyEngine() if ours else registry.TorchCopyEngine()
    before = registry.set_copy_engine(engine)
    try:
        srcs = [torch.full((n,), float(n)) for n in (1, 5, 9)]
        there = [torch.zeros_like(src, device=device) for src in srcs]
        back = [torch.zeros_like(src) for src in srcs]
        up = h2d_many(there, srcs, priority=1)
        up.wait_stream()
        down = d2h_many(back, there, after=[up])
        down.wait()
        for src, came in zip(srcs, back, strict=True):
            assert torch.equal(src, came)
    finally:
        registry.set_copy_engine(before)
