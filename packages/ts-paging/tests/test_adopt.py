"""Stretches of files that are not ours, as tensors: read in place, never written."""

import gc
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import random_bits

from ts_core.errors import ArgumentError, StateError, StorageError
from ts_paging import _C
from ts_paging.files import FileSpan, FileTensors, locate


@pytest.fixture
def files():
    made = FileTensors()
    yield made
    made.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "model.bin"
    path.write_bytes(bytes(random_bits((300_000,), torch.uint8, 7).tolist()))
    return path


def read(tensor):
    found = locate(tensor)
    out = torch.empty_like(tensor)
    found[0].read_async(found[1], out).wait()
    return out


@pytest.mark.parametrize("backend", ["uring", "threads"])
@given(
    offset=st.one_of(st.integers(0, 100), st.integers(0, 60_000), st.sampled_from([4095, 4096, 4097])),
    count=st.sampled_from([0, 1, 3, 511, 2048, 4096, 5000, 100_000]),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    shift=st.integers(0, 70),
)
def test_a_stretch_at_any_offset_is_read_exactly(checkpoint, backend, offset, count, dtype, shift):
    whole = checkpoint.read_bytes()
    offset, count = offset * dtype.itemsize, min(count, 100_000 // dtype.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINSTREAM_IO", backend)
        files = FileTensors()
    got = files.adopt(checkpoint, offset, dtype, (count,))
    nbytes = count * dtype.itemsize
    want = bytes(whole[offset : offset + nbytes])
    assert bytes(got.view(torch.uint8).tolist()) == want
    assert files.adopted_bytes == nbytes
    assert files.used_bytes == 0
    if count:
        memory = torch.empty(nbytes + shift, dtype=torch.uint8)[shift:]  # wherever the caller's memory is
        files.store.read_span(files.span_of(got), memory).wait()
        assert bytes(memory.tolist()) == want
        assert torch.equal(read(got), got)
    files.close()


def test_a_large_stretch_crosses_chunks(tmp_path, files):
    plain = random_bits((10_000_001,), torch.uint8, 3)
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(b"123")
        plain.numpy().tofile(file)
    got = files.adopt(path, 3, torch.uint8, plain.shape)
    assert torch.equal(read(got), plain)


def test_a_write_stays_in_this_process(checkpoint, files):
    before = checkpoint.read_bytes()
    got = files.adopt(checkpoint, 100, torch.uint8, (50_000,))
    other = files.adopt(checkpoint, 100, torch.uint8, (50_000,))
    assert locate(got) is not None
    expected = got.clone()
    got[20_000] ^= 255
    expected[20_000] ^= 255
    assert locate(got) is None  # the file does not hold it any more
    assert torch.equal(got, expected)
    assert locate(other) is not None
    assert checkpoint.read_bytes() == before
    with files.lease([got]) as (copy,):
        assert copy is got
    owned = files.own(got)
    assert locate(owned) is not None
    assert files.span_of(owned) is None
    assert files.own(owned) is owned
    assert torch.equal(read(owned), expected)
    owned.zero_()
    assert files.own(other) is not other
    assert torch.equal(got, expected)
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("how", ["append", "rewrite", "replace", "cut", "remove"])
def test_a_file_that_changed_is_told(tmp_path, files, how):
    path = tmp_path / "model.bin"
    path.write_bytes(b"a" * 20_000)
    got = files.adopt(path, 10, torch.uint8, (9000,))
    key = files.key_of(got)
    if how == "append":
        with path.open("ab") as file:
            file.write(b"x")
    elif how == "rewrite":
        path.write_bytes(b"b" * 20_000)
        os.utime(path, ns=(1, 1))
    elif how == "replace":
        times = path.stat()
        (tmp_path / "new").write_bytes(b"b" * 20_000)
        os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
        (tmp_path / "new").rename(path)
    elif how == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    out = torch.empty(9000, dtype=torch.uint8)
    if how in ("replace", "remove"):  # it is of the file that it was
        files.read_async(key, out).wait()
        assert bytes(out.tolist()) == bytes(got.tolist()) == b"a" * 9000
        return
    with pytest.raises(StorageError, match="was written since") as seen:
        files.read_async(key, out).wait()
    assert str(path) in str(seen.value)
    again = files.adopt(path, 10, torch.uint8, (80,))
    assert torch.equal(read(again), again)


def test_what_does_not_fit_is_refused(checkpoint, files, tmp_path):
    with pytest.raises(ArgumentError, match="multiple of 4"):
        files.adopt(checkpoint, 2, torch.float32, (3,))
    with pytest.raises(ArgumentError, match="offset"):
        files.adopt(checkpoint, -4, torch.float32, (3,))
    with pytest.raises(StorageError, match="the file ends at 300000"):
        files.adopt(checkpoint, 299_996, torch.float32, (2,))
    with pytest.raises(StorageError, match="missing"):
        files.adopt(tmp_path / "missing", 0, torch.float32, (2,))
    with pytest.raises(StorageError):
        files.adopt(tmp_path, 0, torch.uint8, (2,))
    with pytest.raises(ArgumentError):
        FileSpan.of(checkpoint, 0, 0)


def test_links_are_resolved_once(checkpoint, files, tmp_path):
    link = tmp_path / "link.bin"
    link.symlink_to(checkpoint)
    got = files.adopt(link, 0, torch.uint8, (1000,))
    link.unlink()
    link.symlink_to("/etc/hostname")
    assert torch.equal(read(got), got)
    assert files.span_of(got).path == str(checkpoint.resolve())


def test_closing_and_dropping_leave_the_file(checkpoint, files):
    before = checkpoint.read_bytes()
    held = [files.adopt(checkpoint, i, torch.uint8, (10,)) for i in range(50)]
    assert len({id(files.span_of(tensor).file) for tensor in held}) == 1  # one descriptor
    for tensor in held:
        files.drop(tensor)
    got = files.adopt(checkpoint, 0, torch.uint8, (1000,))
    files.drop(got)
    assert files.adopted_bytes == 0
    assert locate(got) is None
    gone = files.adopt(checkpoint, 0, torch.uint8, (1000,))
    del gone
    gc.collect()
    held = files.adopt(checkpoint, 0, torch.uint8, (1000,))  # sweeps
    assert files.adopted_bytes == 1000
    files.close()
    assert locate(held) is None
    assert bytes(held.tolist()) == before[:1000]
    with pytest.raises(StateError):
        files.store.read_span(FileSpan.of(checkpoint, 0, 4), torch.empty(4, dtype=torch.uint8))
    assert checkpoint.read_bytes() == before
    assert not _C.is_mapped(0)
