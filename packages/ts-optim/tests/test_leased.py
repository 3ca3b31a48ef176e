"""Updates on leased copies: the bits of updates in place, whatever interrupts them."""

import contextlib
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StorageError
from ts_core.guard import guard
from ts_core.testing import assert_bit_equal, seeded
from ts_optim import OffloadAdamW, deferred, leased


class Interrupted(BaseException):
    """As Ctrl-C, but seen by nobody else."""


class Lending:
    """Memory that lends copies; calls can be made to fail, and the originals are checked to be left alone."""

    lease_bytes = 1 << 20

    def __init__(self, room=3):
        self.room, self.lent, self.most = room, 0, 0
        self.countdown, self.error = -1, None
        self.calls = []

    def empty(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def point(self, what):
        self.calls.append(what)
        self.countdown -= 1
        if self.countdown == -1:
            raise self.error

    def lease(self, tensors, written=None, *, wait=True):
        self.point("lease")
        if self.lent >= self.room:
            assert not wait, "a holder waits for room"
            return None
        return Loan(self, tensors, list(written))


class Loan:
    def __init__(self, memory, tensors, written):
        self.memory, self.originals, self.written = memory, tensors, written
        self.copies = [t.clone() for t in tensors]
        self.open, self.writing = True, False
        memory.lent += 1
        memory.most = max(memory.most, memory.lent)

    def tensors(self):
        self.memory.point("read")
        return list(self.copies)

    def write_back(self):
        self.memory.point("write")
        self.writing = self.open

    def close(self):
        if not self.open:
            return
        trouble = None
        try:
            self.memory.point("close")
        except StorageError as error:
            trouble = error  # what the disk refuses is kept all the same
        assert self.writing
        for original, copy, written in zip(self.originals, self.copies, self.written, strict=True):
            if written:
                original.copy_(copy)
            else:
                assert_bit_equal(copy, original)
        self.open = False
        self.memory.lent -= 1
        if trouble is not None:
            raise trouble
        self.memory.point("closed")

    def __del__(self):
        if self.open:
            self.memory.lent -= 1


def guarded(p, rank):
    guard(p, lambda p, g: None).rank = rank
    return p


def build(sizes, dtype, memory, **options):
    with seeded(3):
        params = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    if memory is not None:
        for rank, p in enumerate(params):
            guarded(p, rank // 3)
    optimizer = OffloadAdamW(params, lr=0.1, accumulation_steps=None, **options)
    if memory is not None:
        optimizer.set_memory(lambda p: memory)
    return params, optimizer


def fill(params, seed):
    with seeded(seed):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)


def same(ours, a, theirs, b):
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())
        for name in b.state[q]:
            assert_bit_equal(a.state[p][name], b.state[q][name])


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(leased, "_PIECE", 64)
    monkeypatch.setattr(leased, "_GRAIN", 64)


OPTIONS = st.sampled_from(
    [
        {},
        {"max_grad_norm": 0.5},
        {"ema": 0.9},
        {"moment_dtype": "bf16"},
        {"moment_dtype": "int8"},
        {"measure_updates": True},
    ]
)


@pytest.mark.usefixtures("small_pieces")
@given(
    sizes=st.lists(st.sampled_from([0, 1, 40, 64, 65, 300]), min_size=1, max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    options=OPTIONS,
)
def test_an_update_in_pieces_has_the_bits_of_one_in_place(sizes, dtype, options):
    memory = Lending(99)
    ours, a = build(sizes, dtype, memory, **options)
    theirs, b = build(sizes, dtype, None, **options)
    for step in range(3):
        fill(ours, step)
        fill(theirs, step)
        a.step()
        b.step()
        a.synchronize()
    same(ours, a, theirs, b)
    if options.get("measure_updates"):
        assert a.tensor_stats() == b.tensor_stats()
    if any(sizes):
        assert memory.calls
    assert memory.lent == 0
    assert memory.most <= 3 * 2  # three pieces an update; this thread and the other one


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(point=st.integers(0, 60), kind=st.sampled_from([Interrupted, StorageError]), room=st.integers(1, 3))
def test_it_goes_on_where_it_was_stopped(dtype, point, kind, room):
    memory = Lending(room)
    ours, a = build([200, 70, 3], dtype, memory)
    theirs, b = build([200, 70, 3], dtype, None)
    fill(ours, 0)
    fill(theirs, 0)
    update = leased.update_of(*stopped_works(a, ours))
    assert type(update) is leased.LeasedUpdate
    memory.countdown, memory.error = point, kind()
    stops = 0
    while True:
        try:
            with torch.no_grad():
                update.run()
            break
        except (Interrupted, StorageError):
            stops += 1
    assert stops <= 1
    with torch.no_grad():
        update.run()  # once more changes nothing
    b.step()
    same(ours, a, theirs, b)
    assert memory.lent == 0
    assert memory.most <= room


def stopped_works(optimizer, params):
    """Works and terms of a step, without running it."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = [(i, 0, p, p.grad) for i, p in enumerate(params)]
        works = optimizer._collect([(*each, None) for each in found])
        hyper = [(0.1, 0.9, 0.999, 1e-8, 1e-2)]
        return works, optimizer._terms(hyper, 1.0)


@pytest.mark.usefixtures("small_pieces")
def test_trouble_with_the_disk_is_told_once_and_the_step_completes():
    memory = Lending(room=99)  # two threads may update
    ours, a = build([200, 70, 3, 90], torch.float32, memory)
    theirs, b = build([200, 70, 3, 90], torch.float32, None)
    for params in (ours, theirs):
        fill(params, 0)
    memory.countdown, memory.error = 6, StorageError(5, "the disk is ill")
    a.step()
    with pytest.raises(StorageError, match="ill"):
        a.synchronize()
    a.synchronize()
    b.step()
    same(ours, a, theirs, b)
    for params, optimizer in ((ours, a), (theirs, b)):
        fill(params, 1)
        optimizer.step()
    memory.countdown = 0
    with contextlib.suppress(StorageError):  # whoever uses a parameter is told too, if the thread has met it
        _ = ours[0] * 1
    memory.countdown = -1
    try:
        a.synchronize()
    except StorageError:
        a.synchronize()
    same(ours, a, theirs, b)


@pytest.mark.usefixtures("small_pieces")
def test_a_signal_handler_may_wait_for_the_update_it_interrupts():
    memory = Lending(room=9)
    ours, a = build([200, 70, 3], torch.float32, memory)
    theirs, b = build([200, 70, 3], torch.float32, None)
    for params in (ours, theirs):
        fill(params, 0)
    update = leased.update_of(*stopped_works(a, ours))
    inside = []

    def handler(*_):
        if not inside:
            inside.append(True)
            with torch.no_grad():
                update.run()

    before = signal.signal(signal.SIGUSR1, handler)
    point = memory.point

    def noisy(what):
        point(what)
        if len(memory.calls) == 9:
            signal.raise_signal(signal.SIGUSR1)

    memory.point = noisy
    try:
        with torch.no_grad():
            update.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert inside
    b.step()
    same(ours, a, theirs, b)


def test_memory_that_lends_nothing_is_used_in_place():
    class Plain:
        def empty(self, nbytes):
            return torch.zeros(nbytes, dtype=torch.uint8)

    ours, a = build([5], torch.float32, Plain())
    fill(ours, 0)
    works, terms = stopped_works(a, ours)
    assert type(leased.update_of(works, terms)) is not leased.LeasedUpdate
    assert isinstance(leased.update_of(works, terms), deferred.PlainUpdate)


@pytest.mark.usefixtures("small_pieces")
def test_a_fork_does_not_hide_trouble():
    memory = Lending(room=99)
    ours, a = build([70], torch.float32, memory)
    fill(ours, 0)
    works, terms = stopped_works(a, ours)
    memory.countdown, memory.error = 2, StorageError(5, "the disk is ill")
    update = deferred.Update(works, terms, a._name)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        update.post()
    deferred._finish_all()
    with pytest.raises(StorageError, match="ill"):
        _ = ours[0] * 1
    assert update.finished or memory.countdown < 0
    _ = ours[0] * 1
    assert update.finished
