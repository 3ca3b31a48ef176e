import os
import resource
from fractions import Fraction

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import memory
from ts_core.errors import DeviceError, OptionError, StorageError

GIB = 2**30
UNITS = {"": 1, "B": 1}
for power, letter in enumerate("kMGTP", start=1):
    UNITS |= {letter: 1024**power, f"{letter}iB": 1024**power, f"{letter}B": 1000**power}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20GiB", 20 * GIB),
        ("1.5G", GIB * 3 // 2),
        ("512MB", 512_000_000),
        ("100k", 102_400),
        ("100kB", 100_000),
        ("0", 0),
        ("4096", 4096),
        (" 2 TiB\n", 2 * 2**40),
        (".5g", GIB // 2),
        ("1.", 1),
        ("7b", 7),
        ("0.3k", 307),
        (123, 123),
    ],
)
def test_parse_bytes_on_worked_examples(text, value):
    assert memory.parse_bytes(text) == value


@given(
    st.integers(0, 9000),
    st.text("0123456789", max_size=3),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " "]),
    st.sampled_from([str.lower, str.upper, str]),
)
def test_parse_bytes_is_exact(whole, decimals, unit, blank, case):
    number = f"{whole}.{decimals}" if decimals else str(whole)
    expected = Fraction(number) * UNITS[unit]
    if expected < 2**63:
        assert memory.parse_bytes(number + blank + case(unit)) == expected.numerator // expected.denominator


@given(st.integers(0, 2**63 - 1))
def test_integers_pass_through(n):
    assert memory.parse_bytes(n) == n
    assert memory.parse_bytes(str(n)) == n


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            " ",
            "GiB",
            "-1",
            "-1GiB",
            "1 2",
            "1,5G",
            "1e9",
            "0x10",
            "1.2.3",
            "12q",
            "1GiBs",
            "\u0661GiB",
            "1\x00",
        ),
        *(-1, True, 1.0, 1.5, None, b"1", [1], 2**63, "9" * 30, "9" * 6000, "8388608TiB", torch.tensor(3)),
    ],
)
def test_bad_sizes_are_refused(value):
    with pytest.raises(OptionError, match="option vram_budget: expected a number of bytes"):
        memory.parse_bytes(value, name="vram_budget")


@given(st.integers(-(2**62), 2**62))
def test_format_bytes_is_close_and_readable(n):
    text = memory.format_bytes(n)
    number, unit = text.lstrip("-").split()
    assert text.startswith("-") == (n < 0)
    assert abs(memory.parse_bytes(text.lstrip("-")) - abs(n)) <= abs(n) * 0.005 + 1
    assert float(number) < 1024 or unit == "PiB"


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (GIB - 1, "1.00 GiB"), (-3 * GIB // 2, "-1.50 GiB")],
)
def test_format_bytes_on_worked_examples(n, text):
    assert memory.format_bytes(n) == text


def test_host_budget_of_this_machine(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    budget = memory.host_budget()
    assert 0 < budget.available_bytes <= budget.total_bytes
    assert budget.total_bytes == psutil.virtual_memory().total
    with pytest.raises(AttributeError):
        budget.total_bytes = 0


@given(st.integers(1, 64))
def test_ranks_of_one_machine_share_it(ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_machine", lambda root: (1000, 900, "test"))
        patch.setattr(memory, "cgroup_limit", lambda root: None)
        assert memory.host_budget(ranks=ranks) == memory.HostBudget(1000, 900 // ranks, None, "test", ranks)
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert memory.host_budget().available_bytes == 900 // ranks


@pytest.mark.parametrize(
    ("world", "slurm", "ranks"),
    [
        (None, None, 1),
        ("4", None, 4),
        (None, "8", 8),
        ("2", "8", 2),
        ("", "3", 3),
        ("zero", "4(x2)", 4),
        ("0", "0", 1),
        ("-2", "x", 1),
        ("9" * 40, None, 1),
    ],
)
def test_local_ranks_reads_the_launcher(monkeypatch, world, slurm, ranks):
    for name, value in (("LOCAL_WORLD_SIZE", world), ("SLURM_NTASKS_PER_NODE", slurm)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert memory.local_ranks() == ranks


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2", True])
def test_bad_ranks_are_refused(ranks):
    with pytest.raises(OptionError, match="option ranks"):
        memory.host_budget(ranks=ranks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal: 100 kB\nMemAvailable: 60 kB\n", (102400, 61440, "MemAvailable")),
        ("MemTotal: 100 kB\nMemFree: 10 kB\nInactive(file): 5 kB\n", (102400, 15360, "MemFree")),
        ("MemTotal: 100 kB\n", (102400, 102400, "MemTotal")),
        ("MemTotal: 100 kB\nMemAvailable: 900 kB\n", (102400, 102400, "MemAvailable")),
    ],
)
def test_meminfo_of_old_and_new_kernels(tmp_path, text, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    assert memory._machine(tmp_path) == expected


def test_without_meminfo_psutil_answers_then_sysconf_then_nobody(tmp_path, monkeypatch):
    def fails(*args):
        raise PermissionError("/proc")

    assert memory._machine(tmp_path)[2] == "psutil"
    monkeypatch.setattr(psutil, "virtual_memory", fails)
    total, available, source = memory._machine(tmp_path)
    assert source == "sysconf"
    assert 0 < available <= total
    monkeypatch.setattr(os, "sysconf", fails)
    assert memory._machine(tmp_path) == (0, 0, "unknown")
    assert memory.host_budget(tmp_path, ranks=1).available_bytes == 0


def test_a_limit_is_all_there_is_when_the_machine_cannot_be_read(monkeypatch):
    monkeypatch.setattr(memory, "_machine", lambda root: (0, 0, "unknown"))
    monkeypatch.setattr(memory, "cgroup_limit", lambda root: memory.CgroupLimit(500, 300, "group"))
    assert memory.host_budget(ranks=1) == memory.HostBudget(500, 300, 500, "group", 1)


@given(st.integers(0, 2**62), st.none() | st.integers(1, 2**62), st.integers(1, 64))
def test_the_whole_is_the_container_s_and_not_the_machine_s(total, limit, ranks):
    budget = memory.HostBudget(total, 0, limit, "test", ranks)
    assert budget.whole_bytes == (total if limit is None else min(total, limit))


@given(st.integers(0, 2**62))
def test_page_lock_limit_is_the_soft_one(soft):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
        assert memory.page_lock_limit_bytes() == soft


def test_page_lock_limit_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memory.page_lock_limit_bytes() is None

    def fails(which):
        raise ValueError("not supported")

    monkeypatch.setattr(resource, "getrlimit", fails)
    assert memory.page_lock_limit_bytes() is None
    monkeypatch.setattr(memory.sys, "platform", "win32")
    assert memory.page_lock_limit_bytes() is None


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_device_budget_of_the_cpu_is_the_host_budget(monkeypatch, device):
    monkeypatch.setattr(memory, "host_budget", lambda: memory.HostBudget(10, 7, None, "test"))
    assert memory.device_budget(device) == memory.DeviceBudget("cpu", 10, 7)


@pytest.mark.parametrize("device", ["meta", "mps", "nonsense", "cuda:x", None, 1.5])
def test_device_budget_of_other_devices_is_refused(device):
    with pytest.raises(DeviceError, match=r"\[device_budget\] device: expected"):
        memory.device_budget(device)


def test_device_budget_without_cuda_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r'needs a GPU.*Use device="cpu"'):
        memory.device_budget("cuda")


@given(st.integers(0, 3), st.integers(0, 10**12), st.integers(0, 10**12), st.booleans())
def test_device_budget_reports_what_cuda_says(index, free, used, bare):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 3)
        patch.setattr(torch.cuda, "current_device", lambda: 2)
        patch.setattr(torch.cuda, "mem_get_info", lambda index: (free, free + used))
        patch.setattr(torch.cuda, "memory_reserved", lambda index: 50)
        patch.setattr(torch.cuda, "memory_allocated", lambda index: 20)
        if bare:
            assert memory.device_budget("cuda") == memory.DeviceBudget("cuda:2", free + used, free, 30)
        elif index < 3:
            budget = memory.device_budget(f"cuda:{index}")
            assert budget == memory.DeviceBudget(f"cuda:{index}", free + used, free, 30)
        else:
            with pytest.raises(DeviceError, match="expected one of 3 GPUs"):
                memory.device_budget(f"cuda:{index}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_budget_of_a_gpu():
    budget = memory.device_budget("cuda:0")
    assert budget.device == "cuda:0"
    assert 0 < budget.available_bytes <= budget.total_bytes


@given(st.lists(st.text("ab.", min_size=1, max_size=3), max_size=4))
def test_disk_budget_of_a_path_that_is_not_there_yet(tmp_path_factory, parts):
    root = tmp_path_factory.getbasetemp()
    parts = [part for part in parts if set(part) != {"."}]
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    # Other processes write meanwhile.
    assert abs(memory.disk_budget(root.joinpath(*parts)) - free) < 16 * GIB


def test_disk_budget_that_cannot_be_read(monkeypatch, tmp_path):
    with pytest.raises(StorageError, match=r"\[disk_budget\] path"):
        memory.disk_budget("~nobody-of-this-name/x")

    def fails(path):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(memory.shutil, "disk_usage", fails)
    with pytest.raises(OSError, match="denied"):
        memory.disk_budget(tmp_path)


def test_disk_budget_takes_a_home_directory():
    assert memory.disk_budget("~") > 0
