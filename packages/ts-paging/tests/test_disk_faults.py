"""Full disks, limits, broken devices: a typed error, nothing lost, the process goes on."""

import errno
import os
import shutil
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import random_bits

from ts_core.errors import StorageError
from ts_paging import _C, DiskStore

CODES = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EDQUOT, 0])


@pytest.mark.parametrize("direct", [True, False])
@given(CODES, st.integers(0, 2))
def test_a_failed_read_names_file_offset_and_sizes(direct, code, n):
    tensor = random_bits((9_000_000,), torch.uint8, 1)
    with DiskStore(direct=direct, threads=1) as store:
        store.write("x", tensor)
        _C.fail_io_after(n, code)
        with pytest.raises(StorageError, match=r"offset \d+: expected \d+ bytes, got \d+") as seen:
            store.read("x")
        assert seen.value.errno == (code or errno.EIO)
        assert str(store.folder) in str(seen.value)
        assert os.fspath(seen.value.filename).endswith(".bin")
        assert torch.equal(store.read("x"), tensor)  # the bytes are still there


@given(CODES, st.booleans())
def test_a_failed_write_loses_that_key_only(code, again):
    with DiskStore() as store:
        store.write("other", torch.ones(10))
        if again:
            store.write("x", torch.zeros(5000))
        _C.fail_io_after(0, code)
        ticket = store.write_async("x", torch.ones(5000))
        with pytest.raises(StorageError, match="writing"):
            ticket.wait()
        assert ticket.done()
        with pytest.raises(StorageError, match="writing"):
            store.read("x")
        assert torch.equal(store.read("other"), torch.ones(10))
        store.write("x", torch.full((5000,), 3.0))
        assert float(store.read("x").mean()) == 3.0
        _C.fail_io_after(0, code)
        with pytest.raises(StorageError):
            store.write("x", torch.ones(5000))
        store.delete("x")
        assert "x" not in store


def test_a_signal_during_a_read_is_no_error():
    with DiskStore() as store:
        store.write("x", torch.ones(5000))
        _C.fail_io_after(0, errno.EINTR)
        assert torch.equal(store.read("x"), torch.ones(5000))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, 1000, 4096, 9000])
def test_a_file_cut_short_is_told(direct, left):
    with DiskStore(direct=direct) as store:
        store.write("x", torch.ones(5000))
        (file,) = store.folder.glob("*.bin")
        os.truncate(file, left)
        with pytest.raises(StorageError, match=r"expected \d+ bytes, got \d+ .*the file ends there"):
            store.read("x")


def test_a_lost_file_is_told():
    with DiskStore() as store:
        store.write("x", torch.ones(5000))
        (file,) = store.folder.glob("*.bin")
        file.unlink()
        with pytest.raises(StorageError, match=f"opening {file}"):
            store.read("x")
        with pytest.raises(StorageError, match="no room"):
            store.write("x", torch.ones(50_000))


def test_a_file_replaced_by_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    with DiskStore(tmp_path) as store:
        store.write("x", torch.ones(500))
        (file,) = store.folder.glob("*.bin")
        file.unlink()
        file.symlink_to(victim)
        with pytest.raises(StorageError, match="opening"):
            store.write("x", torch.zeros(500))
        with pytest.raises(StorageError, match="no room"):
            store.write("x", torch.zeros(5000))
        with pytest.raises(StorageError):
            store.read("x")
    assert victim.read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("what", ["missing", "file", "read-only"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path, what):
    directory = tmp_path / what
    if what == "file":
        directory.touch()
    if what == "read-only":
        directory.mkdir(0o500)
        if os.access(directory, os.W_OK):
            pytest.skip("this user may write anywhere")
    with pytest.raises(StorageError, match="directory: expected an existing directory") as seen:
        DiskStore(directory)
    assert str(directory) in str(seen.value)


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from ts_core.errors import StorageError
from ts_paging import DiskStore
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a program around us may not
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
directory = sys.argv[1]
with DiskStore(directory) as store:
    small = torch.arange(1000)
    store.write("small", small)
    for size in (1 << 18, 1 << 20):
        weights = torch.ones(size)
        for key in ("large", "small"):
            try:
                store.write(key, weights)
            except StorageError as error:
                assert directory in str(error) and "bytes wanted" in str(error) and "bytes free" in str(error)
                assert error.errno == 27, error.errno
            else:
                raise SystemExit("no error")
        assert bool((weights == 1).all())
    assert torch.equal(store.read("small"), small)
    assert store.used_bytes == 8192 and len(list(store.folder.glob("*.bin"))) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.write("large", weights)
assert list(Path(directory).iterdir()) == []
print("survived")
"""


def test_a_file_size_limit_is_an_error_not_a_signal(python, tmp_path):
    done = python(LIMITED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


FULL = """
import sys, torch
from pathlib import Path
from ts_core.errors import StorageError
from ts_paging import DiskStore

directory = Path(sys.argv[1])

def refused(call, wanted):
    try:
        call()
    except StorageError as error:
        text = str(error)
        assert str(directory) in text and f"{wanted} bytes wanted" in text and "bytes free" in text, text
        assert error.errno == 28, error.errno
    else:
        raise SystemExit("no error")

with DiskStore(directory) as store:
    # Too small from the start.
    refused(lambda: store.write("weights", torch.zeros(1 << 20)), 4 << 20)
    assert store.used_bytes == 0 and not list(store.folder.glob("*.bin"))
    # Enough for the weights, not for what comes after.
    weights = torch.randn(150_000)
    store.write("weights", weights)
    refused(lambda: store.write("exp_avg", torch.zeros(150_000)), 602_112)
    # A key that cannot grow keeps its value.
    refused(lambda: store.write("weights", torch.zeros(300_000)), 598_016)
    assert torch.equal(store.read("weights"), weights)
    # Another process takes the rest: what was reserved is there.
    filler = directory / "filler"
    try:
        with filler.open("wb") as file:
            while file.write(bytes(4096)):
                file.flush()
    except OSError:
        pass
    store.write("weights", weights + 1)
    assert torch.equal(store.read("weights"), weights + 1)
    refused(lambda: store.write("exp_avg", torch.zeros(1)), 4096)
    filler.unlink()
    store.write("exp_avg", torch.zeros(1))
assert list(directory.iterdir()) == []
print("survived")
"""


def _own_mounts():
    """The command prefix that gives a program mounts of its own, or why there is none."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None, "no unshare command"
    probe = [unshare, "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"no user namespaces with mounts here: {done.stderr.strip()}"
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    return [unshare, "-Urm", "sh", "-c", script, "sh"], ""


@pytest.mark.parametrize("size", ["size=1m"])
def test_a_full_disk_is_an_error_and_loses_nothing(python, tmp_path, size):
    prefix, reason = _own_mounts()
    if prefix is None:
        pytest.skip(reason)
    done = python(FULL, tmp_path, prefix=[*prefix, size, str(tmp_path)])
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr
