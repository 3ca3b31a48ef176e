"""Disks that are full before, while and after a model is wrapped: errors that can be caught, nothing lost."""

import shutil
import subprocess
import sys

import pytest

COMMON = """
import os, sys, torch
from pathlib import Path
import trainstream
from ts_core.errors import DoesNotFitError, StorageError

directory = Path(sys.argv[1])

def toy():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])

def wrapped(model):
    return trainstream.wrap(model, lr=1e-2, blocks=list(model), param_offload=True, disk_offload=directory)

def values(model):
    return [p.detach().clone() for p in model.parameters()]

def same(model, others):
    return all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), others, strict=True))

def step(model, optimizer, seed):
    torch.manual_seed(seed)
    model(torch.randn(3, 512)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def twin_after(steps):
    model = toy()
    optimizer = trainstream.OffloadAdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        step(model, optimizer, seed)
    return values(model)

def fill():
    '''Another process takes what is left.'''
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass

def empty():
    (directory / "filler").unlink()

def ours():
    return [path for path in directory.iterdir() if path.name.startswith("trainstream-")]

"""

TOO_SMALL = """
model = toy()
before = values(model)
try:
    wrapped(model)
except (StorageError, DoesNotFitError) as error:
    assert str(directory) in str(error) or isinstance(error, DoesNotFitError), error
else:
    raise SystemExit("no error")
assert same(model, before) and not ours()
model(torch.randn(3, 512)).sum().backward()
"""

LATER = """
model, optimizer = wrapped(toy())
before = values(model)
fill()
try:
    step(model, optimizer, 0)
except StorageError as error:
    assert str(directory) in str(error) and "bytes wanted" in str(error), error
    assert error.errno == 28, error.errno
else:
    raise SystemExit("no error")
optimizer.zero_grad()
assert same(model, before)
empty()
for seed in range(2):
    step(model, optimizer, seed)
assert same(model, twin_after(2))
fill()  # what was reserved is there: nothing fails any more
for seed in range(2, 5):
    step(model, optimizer, seed)
try:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "saved.pt")
except (OSError, RuntimeError):
    pass
else:
    raise SystemExit("saved on a full disk")
(directory / "saved.pt").unlink(missing_ok=True)
step(model, optimizer, 5)
assert same(model, twin_after(6))
empty()
trainstream.unwrap(model)
assert same(model, twin_after(6))
del model, optimizer
import gc
gc.collect()
assert not ours(), ours()
"""

LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a program around us may not
model = toy()
before = values(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
try:
    wrapped(model)
except StorageError as error:
    assert str(directory) in str(error) and "bytes wanted" in str(error), error
else:
    raise SystemExit("no error")
assert same(model, before) and not ours()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
model, optimizer = wrapped(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
try:
    step(model, optimizer, 0)
except StorageError as error:
    assert "bytes wanted" in str(error), error
else:
    raise SystemExit("no error")
optimizer.zero_grad()
assert same(model, before)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
step(model, optimizer, 0)
assert same(model, twin_after(1))
"""


def own_mounts():
    """The command prefix that gives a program mounts of its own, or None."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    probe = [unshare, "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return None
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    return [unshare, "-Urm", "sh", "-c", script, "sh"]


def run(code, directory, prefix=()):
    command = [*prefix, sys.executable, "-c", COMMON + code + "\nprint('survived')", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


@pytest.mark.parametrize(("code", "size"), [(TOO_SMALL, "1m"), (TOO_SMALL, "2100k"), (LATER, "24m")])
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path, code, size):
    prefix = own_mounts()
    if prefix is None:
        pytest.skip("no mounts of one's own here")
    run(code, tmp_path, [*prefix, f"size={size}", str(tmp_path)])


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(tmp_path):
    run(LIMITED, tmp_path)
    assert list(tmp_path.iterdir()) == []
