"""Forks, signals and kills: files and threads belong to the process that made them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ts_paging import DiskStore
from ts_paging.folder import PrivateFolder, remove_leftovers

FORK = """
import os, sys, torch
from ts_core.errors import StateError
from ts_paging import CopyEngine, DiskStore, pinned_empty, pinned_bytes, _C

_C.simulate_pinning(not torch.cuda.is_available())
engine, store = CopyEngine(), DiskStore(sys.argv[1])
src, dst = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)
buffer = pinned_empty(10_000)
store.write("x", src)
running = store.write_async("y", src)
ticket = engine.h2d(dst, src)

def refused(call):
    try:
        call()
    except StateError as error:
        assert "forked child" in str(error), error
    else:
        os._exit(3)

pid = os.fork()
if pid == 0:
    refused(lambda: engine.h2d(dst, src))
    refused(ticket.wait)
    refused(ticket.done)
    refused(engine.synchronize)
    refused(lambda: store.read("x"))
    refused(lambda: store.write("z", src))
    refused(running.wait)
    engine.close()
    store.close()
    buffer.fill_(1)
    del buffer
    # Its own things work.
    with CopyEngine() as mine, DiskStore(sys.argv[1]) as own:
        own.write("x", torch.ones(3))
        mine.h2d(dst, src).wait()
        assert torch.equal(own.read("x"), torch.ones(3))
    del engine, ticket, store, running
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
ticket.wait()
running.wait()
assert torch.equal(dst, src) and torch.equal(store.read("x"), src) and torch.equal(store.read("y"), src)
engine.h2d(dst, src + 1).wait()
assert torch.equal(dst, src + 1)

if __name__ == "__main__":
    from torch.utils.data import DataLoader
    items = [torch.full((3,), float(i)) for i in range(4)]
    for epoch in range(3):
        loader = DataLoader(items, num_workers=2, multiprocessing_context="fork")
        assert [float(batch.sum()) for batch in loader] == [0.0, 3.0, 6.0, 9.0]
        store.write("x", src + epoch)
        assert torch.equal(store.read("x"), src + epoch)
print(store.folder)
"""


def test_a_forked_child_leaves_its_parents_things_alone(python, tmp_path):
    done = python(FORK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


BUSY = """
import signal
# A parent in the background of a shell hands down an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys, torch
from ts_paging import CopyEngine, DiskStore
store, engine = DiskStore(sys.argv[1]), CopyEngine()
src, dst = torch.arange(1 << 18), torch.zeros(1 << 18, dtype=torch.int64)
while True:
    store.write("x", src)
    store.read_async("x", dst)
    engine.h2d(dst.clone(), src)
    print(store.folder, flush=True)
"""


def start(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rounds", [1, 20])
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path, rounds):
    with start(BUSY, tmp_path) as process:
        for _ in range(rounds):
            assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_cleaned_up_after(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    with start(BUSY, tmp_path) as process:
        folder = Path(process.stdout.readline().strip())
        assert remove_leftovers(tmp_path) == []  # it lives
        assert (folder / "lock").exists()
        process.kill()
        process.communicate(timeout=30)
    assert folder.is_dir()
    assert list(folder.glob("*.bin"))
    (folder / "link").symlink_to(precious / "file")
    # A link with such a name, and folders that are not ours by name.
    decoys = [tmp_path / f"trainstream-{process.pid}-{'0' * 16}", tmp_path / "trainstream-1", tmp_path / "x"]
    decoys[0].symlink_to(precious)
    decoys[1].mkdir()
    decoys[2].mkdir()
    with DiskStore(tmp_path) as store:
        assert not folder.exists()
        assert store.folder.exists()
        assert remove_leftovers(tmp_path) == []
    assert all(decoy.exists() for decoy in decoys)
    assert (precious / "file").read_text() == "keep"


def dead_pid():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("pid", "old", "goes"), [("dead", True, True), ("dead", False, False), ("alive", True, False)]
)
def test_a_folder_without_a_lock_goes_when_its_process_is_gone_for_a_while(tmp_path, pid, old, goes):
    folder = tmp_path / f"trainstream-{dead_pid() if pid == 'dead' else os.getpid()}-{'a' * 16}"
    folder.mkdir()
    (folder / "lock.new").touch()
    if old:
        os.utime(folder, (1, 1))
    assert remove_leftovers(tmp_path) == ([folder.name] if goes else [])
    assert folder.exists() is not goes


def test_without_file_locks_the_process_decides(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    mine = PrivateFolder(tmp_path)
    gone = tmp_path / f"trainstream-{dead_pid()}-{'b' * 16}"
    gone.mkdir()
    (gone / "lock").touch()
    assert remove_leftovers(tmp_path) == [gone.name]
    assert mine.path.exists()
    mine.remove()
    assert not mine.path.exists()


def test_a_folder_that_cannot_be_locked_is_not_left(tmp_path, monkeypatch):
    from ts_core.errors import StorageError
    from ts_paging import folder

    def refuse(_):
        raise OSError(5, "broken")

    monkeypatch.setattr(folder, "_make_lock", refuse)
    with pytest.raises(StorageError, match="locking"):
        PrivateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


IMPORT = """
import os, sys, threading, torch
before = len(os.listdir("/proc/self/task"))
import ts_paging
assert len(os.listdir("/proc/self/task")) == before
assert threading.active_count() == 1
assert not torch.cuda.is_initialized()
assert not {"transformers", "hypothesis", "pytest"} & set(sys.modules)
assert ts_paging.pinned_bytes() == 0
"""


def test_import_starts_nothing(python):
    done = python(IMPORT)
    assert done.returncode == 0, done.stderr


def test_the_native_module_shares_the_pool():
    from ts_core import runtime
    from ts_paging import _C

    assert _C.pool_address()
    assert runtime.thread_pool_capsule is not None
    assert torch.get_num_threads() >= 1
