"""From files to a device through a ring: every byte in its place, whatever fails on the way."""

import errno
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import random_bits

from ts_core import registry
from ts_core.errors import DoesNotFitError, StorageError
from ts_core.testing import devices
from ts_paging import _C, CopyEngine
from ts_paging.files import FileTensors
from ts_paging.ring import ReadRing


@pytest.fixture(autouse=True)
def _engine():
    before = registry.copy_engine()
    engine = CopyEngine()
    registry.set_copy_engine(engine)
    yield
    registry.set_copy_engine(before)
    engine.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "model.bin"
    with path.open("wb") as file:
        random_bits((200_000,), torch.uint8, 7).numpy().tofile(file)
    return path


def as_on(device, tensor):
    return torch.empty_like(tensor, device=device)


@pytest.mark.parametrize("device", devices())
@given(
    items=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 10_000),
            st.sampled_from([0, 1, 4095, 4096, 5000, 8192, 30_000, 100_000]),
        ),
        min_size=1,
        max_size=6,
    ),
    chunk=st.sampled_from([4096, 8192, 65_536]),
    count=st.integers(1, 4),
)
def test_what_arrives_is_what_the_file_holds(checkpoint, device, items, chunk, count):
    files = FileTensors()
    files._ring = ReadRing(chunk, count)
    arriving = []
    for number, (adopted, offset, size) in enumerate(items):
        if adopted:
            source = files.adopt(checkpoint, offset, torch.uint8, (size,))
        else:
            source = files.place(random_bits((size,), torch.uint8, number))
        if size:
            target = as_on(device, source)
            arriving.append((files.bring(files.key_of(source), target), source, target))
    for arrival, source, target in arriving:
        arrival.wait_stream()
        assert torch.equal(target.cpu(), source)
    assert files._ring.nbytes <= chunk * count
    files.close()


@pytest.mark.parametrize("device", devices())
def test_a_failed_read_is_told_by_its_arrival_only(device, checkpoint):
    files = FileTensors()
    files._ring = ReadRing(8192, 3)
    sources = [files.place(random_bits((60_000,), torch.uint8, i)) for i in range(3)]
    targets = [as_on(device, source) for source in sources]
    _C.hold_io(True)
    arrivals = [
        files.bring(files.key_of(source), target) for source, target in zip(sources, targets, strict=True)
    ]
    _C.fail_io_after(9, errno.EIO)
    _C.hold_io(False)
    failed = []
    for arrival, source, target in zip(arrivals, sources, targets, strict=True):
        try:
            arrival.wait_stream()
        except StorageError as error:
            failed.append(error)
            with pytest.raises(StorageError):
                arrival.wait_stream()
        else:
            assert torch.equal(target.cpu(), source)
    assert len(failed) == 1
    again = files.bring(files.key_of(sources[1]), targets[1])
    again.wait_stream()
    assert torch.equal(targets[1].cpu(), sources[1])
    files.close()


class _Memory:
    """Has no memory after so many pieces."""

    pinned = False

    def __init__(self, pieces):
        self.left = pieces

    def empty(self, nbytes):
        if not self.left:
            raise DoesNotFitError("nothing left")
        self.left -= 1
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_without_memory_for_the_ring_nobody_waits_for_ever(device, pieces, monkeypatch):
    memory = _Memory(pieces)
    monkeypatch.setattr(registry, "host_allocator", lambda: memory)
    files = FileTensors()
    files._ring = ReadRing(8192, 3)
    sources = [files.place(random_bits((60_000,), torch.uint8, i)) for i in range(2)]
    targets = [as_on(device, source) for source in sources]
    arrivals = [
        files.bring(files.key_of(source), target) for source, target in zip(sources, targets, strict=True)
    ]
    for arrival, source, target in zip(arrivals, sources, targets, strict=True):
        assert arrival.issued.wait(60)
        if pieces:
            arrival.wait_stream()
            assert torch.equal(target.cpu(), source)
        else:
            with pytest.raises(DoesNotFitError):
                arrival.wait_stream()
    memory.left = 3
    files.bring(files.key_of(sources[0]), targets[0]).wait_stream()
    assert torch.equal(targets[0].cpu(), sources[0])
    files.close()


@pytest.mark.parametrize("device", devices())
def test_many_threads_share_a_ring(device):
    files = FileTensors()
    files._ring = ReadRing(8192, 2)
    sources = [files.place(random_bits((50_000 + i,), torch.uint8, i)) for i in range(6)]
    good = []

    def work(source):
        target = as_on(device, source)
        for _ in range(5):
            target.zero_()
            files.bring(files.key_of(source), target).wait_stream()
            good.append(torch.equal(target.cpu(), source))

    threads = [threading.Thread(target=work, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert good == [True] * 30
    files.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_slot_in_use_is_written_after_that_use():
    files = FileTensors()
    source = files.place(random_bits((20 << 20,), torch.uint8, 1))
    target = torch.zeros(20 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(10**8)
    seen = target.clone()
    arrival = files.bring(files.key_of(source), target)
    torch.cuda._sleep(10**7)  # later work, which the copies need not wait for
    arrival.wait_stream()
    assert not seen.any()
    assert torch.equal(target.cpu(), source)
    files.close()
