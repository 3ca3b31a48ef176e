"""Memory in use: what /proc says, the peak over time, heaps given back, and the device's side by NVML."""

import mmap
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import usage
from ts_core.errors import DeviceError, OptionError
from ts_core.testing import devices

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
sizes = st.integers(0, 2**40)


def proc(root, **files):
    folder = root / "proc" / "self"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return root


def status(anon, file, shmem):
    return (
        f"Name:\tpython\nVmRSS:\t{anon + file + shmem:8d} kB\n"
        f"RssAnon:\t{anon:8d} kB\nRssFile:\t{file:8d} kB\nRssShmem:\t{shmem:8d} kB\nThreads:\t1\n"
    )


@given(anon=sizes, file=sizes, shmem=sizes)
def test_status_is_read_exactly(tmp_path_factory, anon, file, shmem):
    root = proc(tmp_path_factory.mktemp("root"), status=status(anon, file, shmem))
    found = usage.host_usage(root)
    assert (found.anon_bytes, found.file_bytes, found.shmem_bytes) == (1024 * anon, 1024 * file, 1024 * shmem)
    assert found.used_bytes == 1024 * (anon + shmem)
    assert found.resident_bytes == 1024 * (anon + file + shmem)
    assert found.source == "status"


@pytest.mark.parametrize("text", ["", "Name:\tpython\nRssAnon:\t1 kB\n", "RssAnon:\nRssFile:\nRssShmem:\n"])
def test_an_older_kernel_is_read_from_statm(tmp_path, text):
    found = usage.host_usage(proc(tmp_path, status=text, statm="900 300 100 5 0 123 0\n"))
    page = os.sysconf("SC_PAGE_SIZE")
    assert found == usage.HostUsage(200 * page, 0, 100 * page, "statm")


@pytest.mark.parametrize("files", [{}, {"status": "x", "statm": "1 2"}, {"statm": "a b c"}])
def test_without_proc_everything_resident_counts(tmp_path, files):
    found = usage.host_usage(proc(tmp_path, **files))
    assert found.source == "psutil"
    assert found.used_bytes == found.resident_bytes > 0


@linux
def test_agrees_with_the_system():
    found, rss = usage.host_usage(), psutil.Process().memory_info().rss
    assert found.source == "status"
    assert abs(found.resident_bytes - rss) < 8 * MIB


@linux
def test_anonymous_and_shared_memory_count_and_mapped_files_do_not(tmp_path):
    size = 64 * MIB
    before = usage.host_usage()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
        private.write(b"x" * size)
        after = usage.host_usage()
    assert after.anon_bytes - before.anon_bytes > 60 * MIB
    with mmap.mmap(-1, size) as shared:
        shared.write(b"x" * size)
        after = usage.host_usage()
    assert after.shmem_bytes - before.shmem_bytes > 60 * MIB
    with (tmp_path / "data").open("w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as mapped:
            mapped.write(b"x" * size)
            after = usage.host_usage()
    on_disk = after.file_bytes - before.file_bytes
    in_ram = after.shmem_bytes - before.shmem_bytes  # where the temporary folder is a tmpfs
    assert on_disk + in_ram > 60 * MIB
    assert after.anon_bytes - before.anon_bytes < 32 * MIB


@given(values=st.lists(sizes, min_size=1, max_size=20), baseline=sizes)
def test_the_peak_is_the_largest_sample(values, baseline):
    reads = iter(values)
    sampler = usage.PeakSampler(read=lambda: next(reads), baseline_bytes=baseline)
    assert (sampler.peak_bytes, sampler.count) == (0, 0)
    assert [sampler.sample() for _ in values] == values
    assert sampler.peak_bytes == max(values)
    assert sampler.used_bytes == max(max(values) - baseline, 0)
    assert sampler.count == len(values)


def test_reset_begins_with_a_fresh_sample():
    reads = iter([5, 9, 3])
    sampler = usage.PeakSampler(read=lambda: next(reads))
    sampler.sample(), sampler.sample()
    assert sampler.reset() == 9
    assert (sampler.peak_bytes, sampler.count) == (3, 1)


def test_the_thread_samples_until_stopped():
    enough = threading.Event()
    values = iter(range(10**9))

    def read():
        value = next(values)
        if value >= 5:
            enough.set()
        return value

    with usage.PeakSampler(1e-4, read) as sampler:
        assert sampler.start() is sampler  # a second start changes nothing
        assert enough.wait(30)
    peak, count = sampler.peak_bytes, sampler.count
    assert peak >= 5
    assert count == peak + 1
    assert sampler.stop() == peak  # nothing runs any more
    assert sampler.count == count


def test_the_default_figure_is_the_ram_in_use():
    with usage.PeakSampler() as sampler:
        pass
    assert sampler.count == 2  # at the start and at the end, however short it was
    assert abs(sampler.peak_bytes - usage.host_usage().used_bytes) < 64 * MIB


@pytest.mark.parametrize("interval", [0, -1, float("nan"), "10ms", None])
def test_an_interval_is_a_number_above_zero(interval):
    with pytest.raises(OptionError, match="interval_s"):
        usage.PeakSampler(interval)


def test_an_error_in_the_thread_is_told():
    failed = threading.Event()

    def read():
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise ValueError("no figure")
        return 1

    sampler = usage.PeakSampler(1e-4, read).start()
    assert failed.wait(30)
    with pytest.raises(ValueError, match="no figure"):
        sampler.stop()
    failed.clear()
    with pytest.raises(KeyError), usage.PeakSampler(1e-4, read):  # noqa: PT012 -- the body's error goes first
        assert failed.wait(30)
        raise KeyError


def test_a_running_sampler_does_not_keep_the_process_alive():
    code = "from ts_core.usage import PeakSampler; PeakSampler().start()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@linux
@pytest.mark.skipif(usage._malloc_trim() is None, reason="not glibc")
def test_free_heap_memory_is_given_back():
    kept = [bytearray(64 * 1024) for _ in range(2000)]  # below the size that gets maps of its own
    barrier = bytearray(64 * 1024)  # keeps the top of the heap in use
    before = usage.host_usage().used_bytes
    kept.clear()
    released = usage.release_free_memory(collect=True)
    assert len(barrier) == 64 * 1024
    assert before - usage.host_usage().used_bytes > 100 * MIB
    assert released >= 0


def test_without_glibc_nothing_is_released(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    usage._malloc_trim.cache_clear()
    try:
        assert usage.release_free_memory() >= 0
        assert usage._malloc_trim() is None
    finally:
        usage._malloc_trim.cache_clear()


class Nvml:
    """Stands in for pynvml: the processes that it lists on the device with our UUID."""

    def __init__(self, *running):
        self.running = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in running]

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-abc"
        return 7

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        assert handle == 7
        return self.running


@pytest.fixture
def cuda(monkeypatch):
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 2,
        "current_device": 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1000 + index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"))
    return monkeypatch


@pytest.mark.parametrize(
    ("running", "expected", "source"),
    [
        ([(1, 5), (os.getpid(), 77)], 77, "nvml"),
        ([(1, 5)], 5, "nvml-alone"),
        ([(1, 5), (2, 6)], 1001 + usage.CONTEXT_BYTES, "estimate"),
        ([(os.getpid(), None)], 1001 + usage.CONTEXT_BYTES, "estimate"),
        ([], 1001 + usage.CONTEXT_BYTES, "estimate"),
        (None, 1001 + usage.CONTEXT_BYTES, "estimate"),
    ],
)
def test_device_usage_takes_the_best_source(cuda, running, expected, source):
    cuda.setitem(sys.modules, "pynvml", None if running is None else Nvml(*running))
    assert usage.device_usage("cuda") == usage.DeviceUsage("cuda:1", expected, source)


def test_asking_does_not_set_up_cuda(cuda):
    cuda.setattr(torch.cuda, "is_initialized", lambda: False)
    cuda.setattr(torch.cuda, "current_device", lambda: pytest.fail("this sets up CUDA"))
    assert usage.device_usage("cuda") == usage.DeviceUsage("cuda:0", 0, "estimate")


@pytest.mark.parametrize("device", ["meta", "nonsense", None])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(DeviceError, match="device_usage"):
        usage.device_usage(device)


@pytest.mark.parametrize("device", devices())
def test_device_usage_grows_with_what_is_allocated(device):
    torch.zeros(1, device=device)
    before = usage.device_usage(device)
    held = torch.ones(128 * MIB, dtype=torch.uint8, device=device)
    after = usage.device_usage(device)
    assert after.used_bytes - before.used_bytes > 120 * MIB
    assert held.numel() == 128 * MIB
    assert after.device.startswith(str(torch.device(device).type))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_registered_memory_is_anonymous():
    before = usage.host_usage()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        held = torch.frombuffer(memory, dtype=torch.uint8)
        torch.cuda.init()
        assert int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), 64 * MIB, 0)) == 0
        after = usage.host_usage()
        assert int(torch.cuda.cudart().cudaHostUnregister(held.data_ptr())) == 0
        del held
    assert after.anon_bytes - before.anon_bytes > 60 * MIB


def test_a_tight_heap_gives_back_what_was_freed_between_tensors_that_stay():
    """In processes of their own: the setting holds for the process."""
    import subprocess
    import sys

    code = """
import torch
from ts_core.usage import host_usage, keep_heap_tight
small = torch.zeros(8)
if {tight}:
    assert keep_heap_tight()
before = host_usage().used_bytes
kept = []
for _ in range(40):
    large = torch.ones(1 << 18)  # 1 MiB, and one that stays behind it
    kept.append(torch.ones(1 << 13))
    del large
    torch.ones(1 << 19).sum()
print(host_usage().used_bytes - before)
"""
    used = {}
    for tight in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", code.format(tight=tight)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        used[tight] = int(done.stdout)
    assert used[True] < 8 << 20
    assert used[True] <= used[False] + (1 << 20)
