"""Leases of tensors in files: the bytes of plain tensors, whatever the disk does."""

import errno
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import random_bits

from ts_core.errors import ArgumentError, StateError, StorageError
from ts_paging import _C
from ts_paging.files import FileTensors, locate

PAGE = 4096


@pytest.fixture
def files():
    made = FileTensors()
    yield made
    made.close()


def direct(tensor):
    """What is in the file, read past the mapping."""
    found = locate(tensor)
    out = torch.empty_like(tensor)
    found[0].read_async(found[1], out).wait()
    return out


@pytest.mark.parametrize("backend", ["uring", "threads"])
@given(
    sizes=st.lists(st.sampled_from([1, 5, 1023, 1024, 1025, 3000, 70_000]), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_lease_reads_and_writes_the_tensor(backend, sizes, seed, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSTREAM_IO", backend)
        files = FileTensors()
    plain = [random_bits((size,), torch.int32, seed + i) for i, size in enumerate(sizes)]
    placed = [files.place(tensor) for tensor in plain]
    ordinary = random_bits((7,), torch.int32, seed)
    written = [data.draw(st.booleans()) for _ in placed]
    with files.lease([*placed, ordinary], [*written, True]) as copies:
        assert copies[-1] is ordinary
        for copy, tensor in zip(copies, plain, strict=False):
            assert torch.equal(copy, tensor)
            copy.add_(1)
    for mapped, tensor, flag in zip(placed, plain, written, strict=True):
        want = tensor + 1 if flag else tensor
        assert torch.equal(mapped, want)
        assert torch.equal(direct(mapped), want)
    assert files._leased.used == 0
    files.close()


@given(pages=st.integers(2, 9), tail=st.integers(0, PAGE - 1), data=st.data())
def test_parts_of_a_tensor_can_be_leased(pages, tail, data):
    files = FileTensors()
    plain = random_bits((pages * PAGE + tail,), torch.uint8, 1)
    mapped = files.place(plain)
    begin = data.draw(st.integers(0, pages - 1)) * PAGE
    end = data.draw(st.sampled_from([begin + PAGE, plain.numel()]))
    mapped[begin] ^= 255  # unwritten in the cache when the direct read comes
    plain[begin] ^= 255
    with files.lease([mapped[begin:end]]) as (copy,):
        assert copy.data_ptr() != mapped[begin:end].data_ptr()
        assert torch.equal(copy, plain[begin:end])
        copy.bitwise_not_()
    plain[begin:end].bitwise_not_()
    assert torch.equal(mapped, plain)
    assert torch.equal(direct(mapped), plain)
    files.close()


def test_parts_off_the_pages_are_used_as_they_are(files):
    mapped = files.place(torch.zeros(10_000))
    with files.lease([mapped[1:5000], mapped[:10]]) as copies:
        assert [copy.data_ptr() for copy in copies] == [mapped[1:].data_ptr(), mapped.data_ptr()]
        copies[0].fill_(1)
    assert float(mapped.sum()) == 4999
    with pytest.raises(ArgumentError, match="4096"):
        files.store.write_part(files.key_of(mapped), 4, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="part of"):
        files.store.read_part(files.key_of(mapped), 40_000, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(KeyError):
        files.store.read_part("nothing", 0, torch.zeros(4, dtype=torch.uint8))


def test_an_exception_in_a_lease_leaves_the_file(files):
    mapped = files.place(torch.ones(5000))

    def interrupted():
        with files.lease([mapped]) as (copy,):
            copy.fill_(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(mapped, torch.ones(5000))
    lease = files.lease([mapped])
    lease.tensors()[0].fill_(7)
    del lease
    assert torch.equal(direct(mapped), torch.ones(5000))
    assert files._leased.used == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_a_write_that_fails_once_is_tried_again(files, code):
    mapped = files.place(torch.ones(5000))
    lease = files.lease([mapped])
    lease.tensors()[0].fill_(7)
    _C.fail_io_after(0, code)
    lease.write_back()
    lease.close()
    assert torch.equal(direct(mapped), torch.full((5000,), 7.0))


@pytest.mark.parametrize("size", [5000, 1024])
def test_what_the_disk_refuses_stays_in_memory(files, size, monkeypatch):
    mapped, other = files.place(torch.ones(2 * size)), files.place(torch.ones(size))
    alias = mapped.view(2, size)
    part = mapped[: size // 1024 * 1024]
    lease = files.lease([part, other])
    for copy in lease.tensors():
        copy.fill_(7)

    write = files.store.write_part
    lease.write_back()
    for piece in lease._pieces:
        piece.writing.wait()
    # The first piece's write is known to have failed, and so does the second try.
    key = files.key_of(mapped)
    lease._pieces[0].writing = Refused()
    monkeypatch.setattr(files.store, "write_part", lambda k, o, d: Refused() if k == key else write(k, o, d))
    with pytest.raises(StorageError, match="nothing is lost"):
        lease.close()
    lease.close()  # told once
    assert files._leased.used == 0
    assert locate(mapped) is None
    assert locate(other) is not None
    expected = torch.ones(2 * size)
    expected[: part.numel()] = 7
    assert torch.equal(mapped, expected)
    assert torch.equal(alias.flatten(), expected)
    with files.lease([part]) as (copy,):  # an ordinary tensor from now on
        assert copy is part
        copy.fill_(8)
    assert float(alias[0, 0]) == 8
    used = files.used_bytes
    files.drop(mapped)
    assert files.used_bytes < used
    assert float(alias[0, 0]) == 8


class Refused:
    def wait(self):
        raise StorageError(errno.EIO, "no", "file")

    def done(self):
        return True


def test_a_read_that_fails_is_told_and_leaves_everything(files):
    mapped = files.place(torch.ones(5000))
    _C.fail_io_after(0, errno.EIO)
    with pytest.raises(StorageError, match="reading"), files.lease([mapped]):
        raise AssertionError("not reached")
    assert files._leased.used == 0
    assert torch.equal(mapped, torch.ones(5000))
    _C.fail_io_after(0, errno.EIO)
    lease = files.lease([mapped])
    with pytest.raises(StorageError, match="reading"):
        lease.tensors()
    assert torch.equal(lease.tensors()[0], mapped)  # asked again, it is read again
    lease.tensors()[0].fill_(3)
    lease.write_back()
    lease.close()
    assert torch.equal(direct(mapped), torch.full((5000,), 3.0))


def test_leases_wait_for_each_other_and_never_take_more_than_their_share(files):
    files._leased.limit = 40_960
    placed = [files.place(torch.zeros(5120)) for _ in range(6)]  # 20 KiB each
    first, second = files.lease(placed[:1]), files.lease(placed[1:2])
    assert files.lease(placed[2:3], wait=False) is None
    order = []

    def later():
        with files.lease(placed[2:4]) as copies:
            order.append("later")
            for copy in copies:
                copy.fill_(3)

    thread = threading.Thread(target=later)
    thread.start()
    for lease in (first, second):
        lease.tensors()[0].fill_(1)
        lease.write_back()
    order.append("first")
    first.close()
    second.close()
    thread.join(60)
    assert order == ["first", "later"]
    assert [float(t.mean()) for t in placed] == [1, 1, 3, 3, 0, 0]
    with files.lease(placed) as copies:  # alone it may take more
        assert len(copies) == 6
    assert files._leased.used == 0


def test_a_gradient_written_past_the_mapping_is_seen_by_it(files):
    target = files.like(torch.empty(3, 1000))
    target.fill_(5)
    value = torch.randn(1000, 3).t()
    tickets = [files.write_async(target, value)]
    other = files.like(torch.empty(3_000_000))
    tickets += [files.write_async(other, torch.full((3_000_000,), float(i))) for i in range(4)]
    for ticket in tickets:
        ticket.wait()
    assert torch.equal(target, value)
    assert torch.equal(direct(target), value)
    assert float(other[-1]) == 3
    plain = torch.zeros(4)
    files.write_async(plain, torch.ones(4)).wait()
    assert float(plain.sum()) == 4
    _C.fail_io_after(0, errno.ENOSPC)
    with pytest.raises(StorageError, match="writing"):
        files.write_async(target, value).wait()
    with pytest.raises(StorageError, match="writing"):
        files.lease([target])
    files.write_async(target, value).wait()
    assert torch.equal(direct(target), value)


def test_a_disk_that_hangs_holds_nobody_for_ever(files):
    placed = [files.place(torch.full((5000,), float(i))) for i in range(8)]
    _C.hold_io(True)
    sums = []

    def work(tensor):
        with files.lease([tensor]) as (copy,):
            copy += 1
        sums.append(float(direct(tensor).sum()))

    threads = [threading.Thread(target=work, args=(tensor,)) for tensor in placed]
    for thread in threads:
        thread.start()
    _C.hold_io(False)
    for thread in threads:
        thread.join(60)
    assert sorted(sums) == [5000.0 * (i + 1) for i in range(8)]


def test_an_address_that_is_given_again_is_no_file(files):
    places = set()
    for _ in range(20):
        mapped = files.place(torch.ones(1 << 20))
        places.add(mapped.data_ptr())
        del mapped
        ordinary = torch.zeros(1 << 20)
        assert locate(ordinary) is None
        del ordinary
    assert len(files.store) <= 1


def test_a_closed_store_is_told(files):
    mapped = files.place(torch.ones(5000))
    files.close()
    with pytest.raises(StateError):
        files.store.read_part("0", 0, torch.zeros(4, dtype=torch.uint8))
    with files.lease([mapped]) as (copy,):
        assert copy is mapped


def test_what_the_copies_take_is_known_and_their_bound_can_change(files):
    files.lease_bytes = 3 << 20
    assert files.lease_bytes == 3 << 20
    assert files.leased_bytes == 0
    tensor = files.place(torch.zeros(1 << 17))
    with files.lease([tensor]) as copies:
        assert copies[0].nbytes == 1 << 19
        assert files.leased_bytes == 1 << 20  # a third of the bound each, so that they can be used again
    assert files.leased_bytes == 0
