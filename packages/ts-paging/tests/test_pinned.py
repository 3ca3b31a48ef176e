import gc
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import assert_same_bits, random_bits

from ts_core.errors import ArgumentError, DoesNotFitError, OptionError
from ts_core.registry import HostAllocator, host_allocator, set_host_allocator
from ts_core.testing import devices, gpu
from ts_paging import _C, PinnedAllocator, pinned_bytes, pinned_empty

PAGE = 4096
on_gpu = [gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


@pytest.fixture
def simulated():
    _C.simulate_pinning(True)


@given(st.integers(0, 100_000), st.integers(0, 2**31))
def test_memory_is_exact_aligned_and_holds_bytes(nbytes, seed):
    tensor = pinned_empty(nbytes)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert tensor.device.type == "cpu"
    assert tensor.untyped_storage().nbytes() == nbytes
    if nbytes:
        assert tensor.data_ptr() % PAGE == 0
    values = random_bits((nbytes,), torch.uint8, seed)
    tensor.copy_(values)
    assert_same_bits(tensor, values)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * PAGE)), max_size=30))
def test_counters_follow_a_model_of_live_buffers(steps):
    _C.simulate_pinning(True)
    start = pinned_bytes()
    allocator = PinnedAllocator(pinned=True)
    live = []
    for drop, nbytes in steps:
        if drop and live:
            live.pop(nbytes % len(live))
        else:
            live.append(allocator.empty(nbytes))
        expected = sum(pages(tensor.numel()) for tensor in live)
        assert allocator.pinned_bytes == expected
        assert pinned_bytes() == start + expected
        assert allocator.pageable_bytes == 0
    live.clear()
    assert pinned_bytes() == start


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_refused_page_lock_falls_back_with_one_warning(simulated, n):
    allocator = PinnedAllocator(pinned=True)
    _C.fail_pinned_after(n)
    buffers = [allocator.empty(PAGE) for _ in range(n)]
    assert allocator.pinned
    told = rf"refused by a test hook.*{4 * n or '0 B'}.*4.00 KiB are not"
    with pytest.warns(RuntimeWarning, match=told) as seen:
        buffers.append(allocator.empty(PAGE))
    assert len(seen) == 1
    _C.fail_pinned_after(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffers.append(allocator.empty(PAGE))  # refused again, said already
        buffers.append(allocator.empty(PAGE))
    assert len(allocator.log.events) == 1
    assert allocator.pinned is False
    assert allocator.pinned_bytes == (n + 1) * PAGE
    assert allocator.pageable_bytes == 2 * PAGE
    for buffer in buffers:
        buffer.fill_(7)
        assert bool((buffer == 7).all())
    del buffer
    buffers.clear()
    assert allocator.pinned_bytes == allocator.pageable_bytes == 0


@given(st.lists(st.integers(1, 4 * PAGE), max_size=12), st.integers(0, 12 * PAGE))
def test_the_budget_is_never_exceeded(sizes, budget):
    _C.simulate_pinning(True)
    allocator = PinnedAllocator(pinned=True, budget=budget)
    live, expected = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for nbytes in sizes:
            live.append(allocator.empty(nbytes))
            if expected + pages(nbytes) <= budget:
                expected += pages(nbytes)
            assert allocator.pinned_bytes == expected
    total = sum(pages(nbytes) for nbytes in sizes)
    assert allocator.pinned_bytes + allocator.pageable_bytes == total
    assert len(allocator.log.events) == (total > expected)


def test_threads_share_one_budget(simulated):
    allocator = PinnedAllocator(pinned=True, budget=10 * PAGE)
    allocator._told = True  # the warning is another test's subject
    kept = []

    def work():
        kept.extend(allocator.empty(PAGE) for _ in range(8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allocator.pinned_bytes == 10 * PAGE
    assert allocator.pageable_bytes == 22 * PAGE


def test_views_keep_the_memory(simulated):
    start = pinned_bytes()
    view = PinnedAllocator(pinned=True).empty(2 * PAGE)[PAGE:].view(torch.float32)
    gc.collect()
    view.fill_(1.5)
    assert pinned_bytes() == start + 2 * PAGE
    del view
    assert pinned_bytes() == start


def test_memory_freed_by_another_thread(simulated):
    start = pinned_bytes()
    box = [PinnedAllocator(pinned=True).empty(PAGE)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pinned_bytes() == start


def test_more_than_the_ram_there_is(simulated, monkeypatch):
    # The page lock is not even tried: it would not fail, the kernel would kill a process to make room.
    from ts_core.memory import HostBudget
    from ts_paging import pinned

    monkeypatch.setattr(pinned, "host_budget", lambda: HostBudget(1 << 30, 1 << 20, None, "test", 1))
    allocator = PinnedAllocator(pinned=True)
    with pytest.warns(RuntimeWarning, match=r"only 1.00 MiB of RAM"):
        tensor = allocator.empty(64 << 20)
    assert tensor.numel() == 64 << 20
    assert allocator.pinned_bytes == 0


def test_no_memory_at_all_is_a_memory_error():
    with pytest.raises(DoesNotFitError, match=r"refused to map"):
        PinnedAllocator(pinned=False).empty(1 << 60)


def test_bad_sizes_are_refused():
    allocator = PinnedAllocator(pinned=False)
    with pytest.raises(ArgumentError, match=r"nbytes: expected an integer >= 0, given -1"):
        allocator.empty(-1)
    with pytest.raises(OptionError):
        allocator.empty(1.5)
    with pytest.raises(OptionError, match="budget"):
        PinnedAllocator(budget="much")


def test_it_is_the_allocator_of_the_registry():
    before = set_host_allocator(PinnedAllocator())
    try:
        assert isinstance(host_allocator(), HostAllocator)
        assert host_allocator().empty(3).shape == (3,)
    finally:
        set_host_allocator(before)


def test_without_a_gpu_nothing_is_locked_and_nothing_said():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    allocator = PinnedAllocator()
    assert allocator.pinned is False
    tensor = allocator.empty(10)
    assert not tensor.is_pinned()
    assert allocator.log.events == []
    assert allocator.pinned_bytes == 0


class TestGpu:
    pytestmark = on_gpu

    @given(st.integers(1, 1 << 22))
    def test_torch_sees_page_locked_memory(self, nbytes):
        start = pinned_bytes()
        tensor = pinned_empty(nbytes)
        assert tensor.is_pinned()
        assert tensor[nbytes // 2 :].is_pinned()
        assert pinned_bytes() == start + pages(nbytes)
        del tensor
        assert pinned_bytes() == start

    def test_launches_after_a_refusal_are_not_blamed_for_it(self):
        allocator = PinnedAllocator()
        _C.fail_pinned_after(0)
        with pytest.warns(RuntimeWarning, match="page-locking"):
            tensor = allocator.empty(PAGE)
        assert not tensor.is_pinned()
        assert torch.equal((torch.ones(8, device="cuda") * 2).cpu(), torch.full((8,), 2.0))


@pytest.mark.parametrize("device", devices())
def test_pinned_memory_is_a_tensor_like_any_other(device):
    host = pinned_empty(4000).view(torch.float32)
    values = torch.randn(1000)
    host.copy_(values)
    assert torch.equal(host.to(device).cpu(), values)
