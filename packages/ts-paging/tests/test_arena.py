import gc
import random
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ts_core.errors import ArgumentError, DoesNotFitError, OptionError, StateError
from ts_core.registry import HostAllocator, host_allocator, set_host_allocator
from ts_core.testing import devices, gpu
from ts_paging import _C, CopyEngine, pinned_bytes
from ts_paging.arena import HostArena, slab_bytes_from_env

PAGE, ALIGN = 4096, 256
SLAB = 16 * PAGE
PLENTY = 1 << 40
on_gpu = [gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def rounded(nbytes, multiple=ALIGN):
    return -(-nbytes // multiple) * multiple


def make(**options):
    return HostArena(**{"pinned": True, "slab_bytes": SLAB, "available": lambda: PLENTY, **options})


@pytest.fixture(autouse=True)
def simulated():
    _C.simulate_pinning(not torch.cuda.is_available())


sizes = st.one_of(st.integers(0, 2000), st.integers(0, SLAB), st.integers(SLAB, 3 * SLAB))


class Arena(RuleBasedStateMachine):
    """Random calls beside a list of what is alive."""

    ceiling = None
    step = SLAB

    def __init__(self):
        super().__init__()
        _C.simulate_pinning(not torch.cuda.is_available())
        self.arena = make(ceiling=self.ceiling, step_bytes=self.step)
        self.live = []  # (tensor, value that fills it, in a slab)
        self.value = 0
        self.peak = 0

    def teardown(self):
        start = pinned_bytes() - self.arena.pinned_bytes
        self.arena.close()
        self.check()
        self.live.clear()
        assert self.arena._pool.pinned_bytes == self.arena._pool.pageable_bytes == 0
        assert pinned_bytes() == start
        _C.simulate_pinning(False)

    @rule(nbytes=sizes)
    def allocate(self, nbytes):
        before = self.arena.stats().pieces
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if self.ceiling is not None else "error")
            tensor = self.arena.empty(nbytes)
        assert tensor.shape == (nbytes,)
        assert tensor.untyped_storage().nbytes() == nbytes
        assert tensor.data_ptr() % ALIGN == 0
        self.value = (self.value + 1) % 251
        tensor.fill_(self.value)
        inside = self.arena.stats().pieces - before
        assert inside == (nbytes > 0) or self.ceiling is not None
        self.live.append((tensor, self.value, bool(inside)))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 1000), elsewhere=st.booleans(), view=st.booleans())
    def free(self, index, elsewhere, view):
        box = [self.live.pop(index % len(self.live))]
        if view:  # the memory stays while a part of it is seen
            tensor, value, _ = box[0]
            part = tensor[tensor.numel() // 2 :]
            box = [part]
            del tensor
            assert bool((part == value).all())
            del part
        if elsewhere:
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
        box.clear()

    @rule(nbytes=st.integers(0, 6 * SLAB))
    def reserve(self, nbytes):
        promised = self.arena.reserve(nbytes)
        self.arena.synchronize()
        stats = self.arena.stats()
        assert stats.reserved_bytes == promised
        assert stats.coming_bytes == 0
        if self.ceiling is None:
            assert promised >= nbytes

    @rule(keep=st.integers(0, 3 * SLAB))
    def trim(self, keep):
        before = self.arena.stats()
        gone = self.arena.trim(keep)
        after = self.arena.stats()
        assert after.reserved_bytes == before.reserved_bytes - gone
        assert after.live_bytes == before.live_bytes
        assert after.reserved_bytes <= keep or all(slab.live_bytes for slab in after.slabs)

    @rule(nbytes=st.integers(0, 6 * SLAB), keep=st.integers(0, 3 * SLAB))
    def trim_what_is_coming(self, nbytes, keep):
        self.arena.reserve(nbytes)
        self.arena.trim(keep)
        self.arena.synchronize()
        stats = self.arena.stats()
        assert stats.coming_bytes == 0
        assert stats.reserved_bytes <= keep or all(slab.live_bytes for slab in stats.slabs)

    @rule(calls=st.integers(0, 3))
    def trim_unused(self, calls):
        before = self.arena.stats()
        gone = self.arena.trim_unused(calls)
        for _ in range(calls):
            gone += self.arena.trim_unused(calls)
        after = self.arena.stats()
        assert after.reserved_bytes == before.reserved_bytes - gone
        assert after.live_bytes == before.live_bytes
        assert all(slab.live_bytes for slab in after.slabs)

    @rule()
    def free_all(self):
        self.live.clear()
        for slab in self.arena.stats().slabs:
            assert (slab.free_extents, slab.largest_free_bytes) == (1, slab.nbytes)

    @invariant()
    def check(self):
        stats = self.arena.stats()
        inside = [tensor.numel() for tensor, _, inside in self.live if inside]
        assert stats.pieces == len(inside)
        assert stats.live_bytes == sum(map(rounded, inside))
        assert stats.reserved_bytes == sum(slab.nbytes for slab in stats.slabs) == self.arena.pinned_bytes
        assert all(slab.pinned for slab in stats.slabs)
        assert sum(slab.free_extents for slab in stats.slabs) <= len(inside) + len(stats.slabs)
        if self.ceiling is not None:
            assert stats.reserved_bytes <= self.ceiling
        self.peak = max(self.peak, stats.live_bytes)
        ends = 0
        for first, end in sorted(
            (t.data_ptr(), t.data_ptr() + t.numel()) for t, *_ in self.live if t.numel()
        ):
            assert first >= ends
            ends = end
        for tensor, value, _ in self.live:
            assert bool((tensor == value).all())


class CappedArena(Arena):
    ceiling = 3 * SLAB + PAGE


class SteppedArena(Arena):
    step = 4 * PAGE


class CappedSteppedArena(CappedArena):
    step = 4 * PAGE


class TestSteppedArena(SteppedArena.TestCase):
    settings = settings(stateful_step_count=30)


class TestCappedSteppedArena(CappedSteppedArena.TestCase):
    settings = settings(stateful_step_count=30)


class TestArena(Arena.TestCase):
    settings = settings(stateful_step_count=30)


class TestCappedArena(CappedArena.TestCase):
    settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_does_not_fragment(seed):
    """Steps as training makes them: blocks of tensors in, the same out backwards, lengths that change."""
    chance = random.Random(seed)
    arena = make()
    shares = [1, 1, 3.5, 0.25, 2, 0.01]
    peak = 0
    reserved = []
    for step in range(150):
        length = chance.randint(SLAB // 8, SLAB)
        held, small = [], []
        for _ in range(6):
            held.append([arena.empty(int(length * share)) for share in shares])
            small.append(arena.empty(chance.randint(1, 500)))
            peak = max(peak, arena.live_bytes)
        chance.shuffle(small)
        while held:
            held.pop()
            small.pop()
        assert arena.live_bytes == 0
        if step % 10 == 9:
            reserved.append(arena.reserved_bytes)
    # Nothing is lost for good: what is reserved follows the largest step, not the number of steps.
    assert max(reserved) <= 2 * peak + 2 * SLAB
    assert reserved[-1] == max(reserved[:8]) or reserved[-1] <= 1.5 * peak + SLAB
    for slab in arena.stats().slabs:
        assert (slab.free_extents, slab.largest_free_bytes) == (1, slab.nbytes)
    assert arena.trim() == reserved[-1]
    assert pinned_bytes() == arena.pinned_bytes == 0


@pytest.mark.parametrize("step", [SLAB, 4 * PAGE])
def test_growing_requests_leave_no_trail(step):
    arena = make(step_bytes=step)
    for pages in range(17, 80):
        arena.empty(pages * PAGE)
    assert arena.reserved_bytes == 79 * PAGE
    assert len(arena.stats().slabs) == 1


def a_pass(arena, blocks, sizes):
    """Activations of a training step: all are there at its turn, and none at its end."""
    held = [arena.empty(size) for _ in range(blocks) for size in sizes]
    peak = arena.live_bytes
    while held:
        held.pop()
    return peak


@given(
    weights=st.lists(st.integers(1, 12 * PAGE), max_size=20),
    sizes=st.lists(st.integers(1, 6 * PAGE), min_size=1, max_size=6),
    tried=st.integers(1, 24),
    used=st.integers(0, 6),
    returning=st.sets(st.integers(0, 19)),
)
@settings(max_examples=60, deadline=None)
def test_what_was_only_tried_does_not_stay(weights, sizes, tried, used, returning):
    """Many blocks offload for a step, then few: what is reserved follows what is used."""
    _C.simulate_pinning(not torch.cuda.is_available())
    step = 8 * PAGE
    arena = make(step_bytes=step, slab_bytes=8 * SLAB)
    arena.reserve(sum(map(rounded, weights)))
    kept = [arena.empty(size) for size in weights]
    for _ in range(2):
        a_pass(arena, tried, sizes)
    kept = [tensor for index, tensor in enumerate(kept) if index not in returning]
    arena.trim()
    arena.synchronize()
    stats = arena.stats()
    assert stats.coming_bytes == 0
    assert all(slab.live_bytes for slab in stats.slabs)
    before = stats.reserved_bytes
    for _ in range(3):
        peak = a_pass(arena, used, sizes)
    # A slab of their own has less than a page to spare; of the others only the last may be half empty, and
    # no other one has as much free as the largest request that goes there.
    shared = [size for size in sizes if size <= step // 2]
    waste = (max(shared, default=0) + ALIGN) * (2 * (peak - sum(map(rounded, map(len, kept)))) // step + 1)
    pages = PAGE * used * len(sizes)
    assert arena.reserved_bytes <= before + peak - sum(map(len, kept)) + step + waste + pages
    arena.close()


def test_a_step_leaves_little_beyond_what_it_uses():
    """As an offloading run does: most bytes in large tensors, and a slab is as large as all of them."""
    arena = make(slab_bytes=64 * SLAB, step_bytes=SLAB)
    for _ in range(2):
        peak = a_pass(arena, 7, [5 * SLAB // 4, SLAB // 8, 3 * SLAB // 4])
    assert peak <= arena.reserved_bytes <= peak + SLAB


def test_what_holds_nothing_for_long_goes():
    arena = make()
    lasting = arena.empty(PAGE)
    a_pass(arena, 6, [SLAB])
    reserved = []
    for _ in range(6):
        a_pass(arena, 2, [SLAB])
        arena.trim_unused(3)
        reserved.append(arena.reserved_bytes // SLAB)
    assert reserved == [7, 7, 7, 3, 3, 3]
    del lasting
    for _ in range(4):
        arena.trim_unused(3)
    assert arena.reserved_bytes == 0


def test_what_is_reserved_ahead_can_be_taken_back():
    arena = make()
    arena.reserve(4096 * SLAB)
    piece = arena.empty(2 * SLAB)  # it is a part of what was reserved
    stats = arena.stats()  # once: slabs come meanwhile
    assert stats.reserved_bytes + stats.coming_bytes == 4096 * SLAB
    arena.trim()
    arena.synchronize()
    assert arena.reserved_bytes == 2 * SLAB
    assert arena.reserve(3 * SLAB) == 3 * SLAB  # and what is asked for again comes
    arena.synchronize()
    assert arena.reserved_bytes == 3 * SLAB
    del piece


def test_a_request_larger_than_a_slab_takes_the_place_of_what_is_reserved_ahead():
    arena = make(ceiling=4096 * SLAB)
    arena.reserve(4096 * SLAB)
    piece = arena.empty(5 * SLAB)
    assert arena.pageable_bytes == 0
    stats = arena.stats()
    assert stats.reserved_bytes + stats.coming_bytes <= 4096 * SLAB
    assert piece.numel() == 5 * SLAB
    arena.trim()


def test_the_last_slab_of_a_reservation_is_no_larger_than_it_has_to_be():
    arena = make(slab_bytes=8 * SLAB, step_bytes=SLAB)
    assert arena.reserve(17 * SLAB + 1) == 18 * SLAB
    arena.synchronize()
    assert [slab.nbytes for slab in arena.stats().slabs] == [8 * SLAB, 8 * SLAB, 2 * SLAB]


def test_sizes_are_exact():
    arena = make(slab_bytes=3 * PAGE + 1)
    small = arena.empty(100)
    assert arena.pinned_bytes == 4 * PAGE  # whole pages, no power of two
    large = arena.empty(7 * PAGE + 5)
    assert [slab.nbytes for slab in arena.stats().slabs] == [4 * PAGE, 8 * PAGE]
    del small, large
    arena.close()
    assert arena.pinned_bytes == 0


def test_a_request_waits_for_its_own_slab_only():
    """What a long reservation still has to lock is not waited for."""
    arena = make()
    arena.reserve(4096 * SLAB)
    piece = arena.empty(2 * SLAB)
    assert piece.numel() == 2 * SLAB
    arena.close()  # and closing does not wait for it either
    assert arena.pinned_bytes == rounded(2 * SLAB, PAGE)
    del piece
    assert arena.pinned_bytes == 0


def test_reserving_does_not_wait():
    gate = threading.Event()
    asked = []

    def available():
        asked.append(gate.is_set())
        return PLENTY

    arena = make(available=available)
    assert arena.reserve(3 * SLAB) == 3 * SLAB
    arena.synchronize()
    assert arena.reserved_bytes == 3 * SLAB
    assert arena.reserve(2 * SLAB) == 3 * SLAB
    arena.close()


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_refused_page_lock_falls_back_with_one_warning(n):
    arena = make()
    _C.fail_pinned_after(n)
    pieces = [arena.empty(SLAB) for _ in range(n)]
    assert arena.pinned
    told = rf"refused by a test hook.*{64 * n or '0 B'}.*64.00 KiB are not"
    with pytest.warns(RuntimeWarning, match=told) as seen:
        pieces.append(arena.empty(SLAB))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces.append(arena.empty(100))
    assert not arena.pinned
    assert len(arena.log.events) == 1
    assert arena.pinned_bytes == n * SLAB
    assert arena.pageable_bytes == SLAB + PAGE
    for piece in pieces:
        piece.fill_(7)
        assert bool((piece == 7).all())
    if n:
        pieces.pop(0)
        again = arena.empty(SLAB)  # what is locked serves on
        assert arena.pageable_bytes == SLAB + PAGE
        del again
    arena.trim()
    pieces.append(arena.empty(SLAB))  # after a trim it is tried again
    assert arena.pinned
    del piece
    pieces.clear()
    arena.close()
    assert arena.pinned_bytes == arena.pageable_bytes == 0


def test_a_request_that_cannot_be_met_spoils_nothing():
    arena = make()
    _C.fail_pinned_after(0)
    with pytest.warns(RuntimeWarning, match="refused by a test hook"):
        assert arena.empty(5 * SLAB).numel() == 5 * SLAB
    assert arena.pinned
    held = arena.empty(SLAB), arena.empty(2 * SLAB)
    assert arena.pageable_bytes == 0
    assert arena.pinned_bytes == 3 * SLAB
    del held


def test_a_refused_reservation_is_told_when_it_matters():
    arena = make()
    _C.fail_pinned_after(1)
    arena.reserve(3 * SLAB)
    arena.synchronize()
    assert arena.reserved_bytes == SLAB
    assert arena.log.events == []
    first = arena.empty(SLAB)
    with pytest.warns(RuntimeWarning, match="refused by a test hook"):
        arena.empty(1)
    del first


def test_the_ceiling_and_the_ram_bound_what_is_locked():
    arena = make(ceiling=2 * SLAB)
    held = [arena.empty(SLAB), arena.empty(SLAB // 2)]
    with pytest.warns(RuntimeWarning, match=r"the ceiling is 128\.00 KiB"):
        held.append(arena.empty(SLAB))
    held.append(arena.empty(SLAB // 2))  # there is room for this
    assert arena.pinned_bytes == 2 * SLAB
    assert arena.pinned
    assert arena.reserve(PLENTY) == 2 * SLAB
    held.clear()
    assert arena.empty(2 * SLAB).numel() == 2 * SLAB  # free slabs make way
    assert arena.pageable_bytes == 0
    arena = make(available=lambda: SLAB + PAGE)
    held = [arena.empty(SLAB)]
    arena._available = lambda: PAGE
    held.append(arena.empty(PAGE))  # a smaller slab than usual
    arena._available = lambda: -5
    with pytest.warns(RuntimeWarning, match="more than the RAM allows"):
        held.append(arena.empty(1))
    assert arena.pinned_bytes == SLAB + PAGE


def test_where_cuda_cannot_be_used_memory_is_ordinary(monkeypatch):
    from ts_paging import arena as module

    monkeypatch.setattr(module, "locking_device", lambda: -1)  # as in a forked child
    arena = make()
    assert arena.reserve(SLAB) == 0
    with pytest.warns(RuntimeWarning, match="CUDA cannot be used"):
        assert arena.empty(SLAB).numel() == SLAB
    assert arena.pinned_bytes == 0


def test_threads_share_an_arena():
    arena = make(ceiling=20 * SLAB)
    wrong = []

    def work(value):
        chance = random.Random(value)
        held = []
        for _ in range(300):
            if held and chance.random() < 0.5:
                piece = held.pop(chance.randrange(len(held)))
                if not bool((piece == value).all()):
                    wrong.append(value)
                del piece
            else:
                held.append(arena.empty(chance.randint(1, SLAB // 2)).fill_(value))

    arena._told = True  # the warning is another test's subject
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == []
    assert arena.live_bytes == arena.pageable_bytes == 0


def test_tensors_outlive_the_arena():
    start = pinned_bytes()
    arena = make()
    view = arena.empty(SLAB)[PAGE:].view(torch.float32)
    other = arena.empty(SLAB)
    del other
    arena.close()
    assert pinned_bytes() == start + SLAB
    with pytest.raises(StateError, match="closed"):
        arena.empty(1)
    arena.close()
    del arena
    gc.collect()
    view.fill_(1.5)
    assert float(view.sum()) == 1.5 * view.numel()
    del view
    assert pinned_bytes() == start


@pytest.mark.parametrize("device", devices())
def test_a_copy_keeps_its_piece(device):
    arena = make()
    with CopyEngine() as engine:
        for value in range(20):
            there = torch.full((SLAB // 4,), float(value), device=device)
            ticket = engine.d2h(arena.empty(SLAB).view(torch.float32), there)
            back = torch.empty_like(there)
            src = arena.empty(SLAB).view(torch.float32).fill_(value)
            ticket = engine.h2d(back, src)
            del src
            ticket.wait()
            assert bool((back == value).all())
        engine.synchronize()
        assert arena.live_bytes == 0


def test_without_a_gpu_memory_is_ordinary_and_nothing_is_said():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arena = HostArena(slab_bytes=SLAB, ceiling=2 * SLAB)
    held = [arena.empty(SLAB) for _ in range(3)]
    assert arena.pinned is False
    assert arena.pinned_bytes == 0
    assert arena.pageable_bytes == 3 * SLAB
    assert arena.log.events == []
    assert not held[0].is_pinned()
    assert arena.empty(0).numel() == 0


def test_no_memory_at_all_is_a_memory_error():
    with pytest.raises(DoesNotFitError, match="refused to map"):
        HostArena(pinned=False, slab_bytes=SLAB).empty(1 << 60)


def test_bad_sizes_are_refused():
    arena = make()
    for call in (arena.empty, arena.reserve, arena.trim, arena.trim_unused):
        with pytest.raises(ArgumentError, match="expected an integer >= 0, given -1"):
            call(-1)
        with pytest.raises(OptionError):
            call(1.5)
    for options in ({"ceiling": "much"}, {"slab_bytes": "big"}, {"slab_bytes": 0}, {"step_bytes": 0}):
        with pytest.raises(OptionError):
            HostArena(**options)


@given(st.integers(1, 9999), st.sampled_from(["K", "k", "M", "G", "KiB", "MB", ""]))
def test_the_slab_size_comes_from_the_environment(number, suffix):
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kib": 1 << 10, "mb": 10**6, "": 1}[suffix.lower()]
    environ = {"TRAINSTREAM_HOST_ARENA_SLAB": f"{number}{suffix}"}
    if number * factor < 64 << 10:
        with pytest.raises(OptionError, match="TRAINSTREAM_HOST_ARENA_SLAB"):
            slab_bytes_from_env(environ)
    else:
        assert slab_bytes_from_env(environ) == number * factor


def test_what_the_environment_may_not_say(monkeypatch):
    assert slab_bytes_from_env({}) == slab_bytes_from_env({"TRAINSTREAM_HOST_ARENA_SLAB": " "}) == 1 << 30
    for text in ("much", "-1G", "1X", "0"):
        monkeypatch.setenv("TRAINSTREAM_HOST_ARENA_SLAB", text)
        with pytest.raises(OptionError, match="TRAINSTREAM_HOST_ARENA_SLAB"):
            HostArena()
    monkeypatch.setenv("TRAINSTREAM_HOST_ARENA_SLAB", "256K")
    assert HostArena().slab_bytes == 256 << 10


def test_it_is_the_allocator_of_the_registry():
    before = set_host_allocator(make())
    try:
        assert isinstance(host_allocator(), HostAllocator)
        assert host_allocator().empty(3).shape == (3,)
    finally:
        set_host_allocator(before)


FORK = """
import gc, os, sys, torch
from ts_core.errors import StateError
from ts_paging import _C, pinned_bytes
from ts_paging.arena import HostArena

_C.simulate_pinning(not torch.cuda.is_available())
arena = HostArena(pinned=True, slab_bytes=1 << 20)
pieces = [arena.empty(5000).fill_(i) for i in range(3)]
arena.reserve(3 << 20)

pid = os.fork()
if pid == 0:
    calls = lambda: arena.empty(1), lambda: arena.reserve(1), arena.synchronize, arena.stats, arena.trim
    for call in calls:
        try:
            call()
        except StateError as error:
            assert "forked process" in str(error), error
        else:
            os._exit(3)
    pieces.pop()
    arena.close()
    own = HostArena(pinned=False, slab_bytes=1 << 20)
    own.empty(100).fill_(1)
    del arena, pieces, own
    gc.collect()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert [int(piece[4999]) for piece in pieces] == [0, 1, 2]
arena.synchronize()
assert arena.reserved_bytes == 3 << 20
assert arena.empty(5000).fill_(9).sum() == 45000
print("ok")
"""


def test_a_forked_child_leaves_the_arena_alone(python):
    done = python(FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


EXIT = """
import torch
from ts_paging import _C
from ts_paging.arena import HostArena
_C.simulate_pinning(not torch.cuda.is_available())
arena = HostArena(pinned=True, slab_bytes=1 << 20, available=lambda: 1 << 40)
arena.reserve(1 << 30)
kept = arena.empty(100)
"""


def test_the_interpreter_ends_while_slabs_are_made(python):
    done = python(EXIT)
    assert done.returncode == 0, done.stderr


class TestGpu:
    pytestmark = on_gpu

    @given(st.integers(1, 1 << 22))
    def test_torch_sees_page_locked_memory(self, nbytes):
        arena = HostArena(slab_bytes=1 << 20)
        piece = arena.empty(nbytes)
        assert piece.is_pinned()
        assert piece[nbytes // 2 :].is_pinned()
        del piece
        arena.close()
        assert arena.pinned_bytes == 0

    def test_launches_after_a_refusal_are_not_blamed_for_it(self):
        arena = HostArena(slab_bytes=1 << 20)
        _C.fail_pinned_after(0)
        with pytest.warns(RuntimeWarning, match="page-locking"):
            piece = arena.empty(PAGE)
        assert not piece.is_pinned()
        assert torch.equal((torch.ones(8, device="cuda") * 2).cpu(), torch.full((8,), 2.0))

    def test_compute_goes_on_while_slabs_are_locked(self):
        arena = HostArena(slab_bytes=64 << 20)
        arena.reserve(256 << 20)
        x = torch.ones(512, 512, device="cuda")
        for _ in range(50):
            x = (x @ x).clamp(max=1)
        assert float(x.sum()) == 512 * 512
        arena.synchronize()
        assert arena.pinned_bytes == 256 << 20
        arena.close()
        assert arena.pinned_bytes == 0


def test_without_a_gpu_no_more_is_reserved_than_the_ram_allows():
    with HostArena(pinned=False, slab_bytes=1 << 16, available=lambda: 1 << 20) as arena:
        assert arena.reserve(1 << 50) <= 1 << 21
        arena.synchronize()
        assert arena.reserved_bytes <= 1 << 21
