"""`trainstream doctor`: the table, the JSON, and machines on which something is missing. Nothing is timed."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from trainstream import HardwareProfile
from trainstream.cli import app
from trainstream.cli.doctor import Machine, examine
from ts_core.errors import DeviceError
from ts_core.hardware import ASSUMED, ASSUMED_RATES

# The command is a function of the same name.
doctor = importlib.import_module("trainstream.cli.doctor")

STATUSES = {"ok", "slow", "missing", "failed", "unknown"}
NAMES = {
    *("torch", "gpu", "ts_quant", "ts_optim", "ts_paging", "ts_fused", "page-lock", "link", "memory"),
    *("container", "threads", "disk", "io_uring", "huge pages", "C++ compiler", "CUDA compiler", "cache"),
}
Card = namedtuple("Card", "name total_memory major minor")


def profile_of(device="cpu", measured=tuple(ASSUMED), **figures):
    plain = HardwareProfile(
        device=device,
        device_name="a card",
        quick=True,
        unified_memory=False,
        cores=2,
        ram_bytes=1 << 34,
        vram_bytes=0 if device == "cpu" else 1 << 33,
        page_lock_limit_bytes=None,
        **ASSUMED,
        rates=ASSUMED_RATES["cpu"],
        measured=measured,
    )
    return dataclasses.replace(plain, **figures)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Nothing is measured; returns the arguments of each call."""
    calls = []

    def profile(device, *, force):
        calls.append((device, force))
        return profile_of()

    monkeypatch.setattr(doctor, "profile_hardware", profile)
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    return calls


def by_name(machine):
    return {check.name: check for check in examine(machine)}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def command(*words, **environment):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        [sys.executable, "-m", "trainstream.cli", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={name: value for name, value in env.items() if value is not None},
    )


def check_schema(event):
    assert set(event) == {"event", "ok", "checks", "profile"}
    assert event["event"] == "doctor"
    for check in event["checks"]:
        assert set(check) == {"name", "status", "value", "fix", "data"}
        assert check["status"] in STATUSES
        assert check["value"]
        assert isinstance(check["fix"], str)
        assert isinstance(check["data"], dict)
    assert event["ok"] == all(check["status"] != "failed" for check in event["checks"])


def test_json_is_one_object_with_every_check(measured):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    event = json.loads(result.stdout)
    check_schema(event)
    assert {check["name"] for check in event["checks"]} == NAMES
    assert HardwareProfile.from_json(json.dumps(event["profile"])) == profile_of()
    assert measured == [(None, False)]


def test_the_table_has_a_line_for_every_check(measured):
    result = CliRunner().invoke(app, ["doctor", "--force"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for name in NAMES:
        assert any(line.startswith(f"{name} ") for line in lines)
    assert lines[-1].startswith("ready to train")
    assert measured == [(None, True)]
    assert all(len(line) < 220 for line in lines)


def test_a_package_that_does_not_load_makes_training_impossible(measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "ts_optim._C", None)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    event = json.loads(result.stdout)
    check_schema(event)
    (failed,) = [check for check in event["checks"] if check["status"] == "failed"]
    assert failed["name"] == "ts_optim"
    assert failed["fix"] == "pip install --no-deps --force-reinstall ./packages/ts-optim"
    people = CliRunner().invoke(app, ["doctor"])
    assert people.exit_code == 1
    assert people.stdout.splitlines()[-1] == "training is impossible here: ts_optim"
    assert f"-> {failed['fix']}" in people.stdout


def test_no_memory_makes_training_impossible(measured, tmp_path):
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 4096000 kB\nMemAvailable: 1000 kB\n"})
    assert by_name(Machine(root))["memory"].status == "failed"
    assert by_name(Machine(root))["memory"].data["total_bytes"] == 4096000 * 1024


def test_a_profile_that_cannot_be_measured_is_said(monkeypatch, measured):
    def failing(device, *, force):
        raise DeviceError("the driver says no")

    monkeypatch.setattr(doctor, "profile_hardware", failing)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    event = json.loads(result.stdout)
    check_schema(event)
    assert event["profile"] is None
    assert event["checks"][-1]["value"] == "could not be measured: the driver says no"


def test_a_broken_gpu_leaves_the_processor(monkeypatch, measured):
    def only_cpu(device, *, force):
        if device is None:
            raise RuntimeError("CUDA error")
        return profile_of()

    monkeypatch.setattr(doctor, "profile_hardware", only_cpu)
    assert doctor._measure(False) == (profile_of(), "CUDA error")


def test_a_check_that_cannot_be_made_is_unknown(monkeypatch, measured):
    def broken(*args):
        raise OSError("gone")

    monkeypatch.setattr(doctor, "disk_budget", broken)
    found = by_name(Machine())
    assert (found["disk"].status, found["disk"].value) == ("unknown", "OSError: gone")


def test_every_other_fault_is_one_line(monkeypatch, measured):
    def broken(machine):
        raise RuntimeError("no idea")

    monkeypatch.setattr(doctor, "examine", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no idea" in result.stderr


CARD = {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n"}
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1  Release Build\nGCC version: 13.3.0\n"
)


@pytest.mark.parametrize(
    ("files", "cuda", "said"),
    [
        ({}, "13.0", "none; training"),
        (
            {"sys/bus/pci/devices/0/vendor": "0x8086", "sys/bus/pci/devices/0/class": "0x030000"},
            None,
            "none;",
        ),
        ({**CARD, "sys/bus/pci/devices/0/class": "0x0c0330"}, None, "none;"),  # its USB port
        (CARD, None, "CPU build"),
        (CARD, "13.0", "no driver"),
        ({"dev/nvidiactl": ""}, "13.0", "no driver"),
        ({**CARD, "proc/driver/nvidia/version": DRIVER}, "13.0", "driver 580.1, but torch cannot"),
    ],
)
def test_a_card_that_torch_does_not_see_is_told_from_none(tmp_path, monkeypatch, files, cuda, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = {check.name: check for check in doctor._gpu(Machine(write(tmp_path, files)))}["gpu"]
    assert said in found.value
    assert (found.status == "missing") == bool(found.fix) == (not said.startswith("none"))


def test_a_gpu_is_shown_with_its_driver_and_the_link(tmp_path, monkeypatch, measured):
    real = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card("Big", 8 << 30, 9, index))
    monkeypatch.setattr(torch, "ones", lambda *size, **more: real(*size))
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: namedtuple("M", "with_cuda")(False))
    root = write(tmp_path, {"proc/driver/nvidia/version": DRIVER})
    found = by_name(Machine(root, profile_of("cuda:0", h2d_bytes_per_s=50e9, d2h_bytes_per_s=9e9)))
    assert found["gpu"].value == "Big 8.00 GiB sm_9.0, Big 8.00 GiB sm_9.1; driver 580.1"
    assert found["link"].status == "slow"
    assert found["link"].value.startswith("to the GPU 50.0 GB/s, back 9.0 GB/s")
    assert "pcie.link" in found["link"].fix
    assert found["page-lock"].value.startswith("2.0 GB/s")
    assert found["ts_quant"].status == "slow"
    assert "TS_WITH_CUDA=ON" in found["ts_quant"].fix
    refused = by_name(Machine(root, profile_of("cuda:0", measured=())))
    assert refused["page-lock"].fix.startswith("ulimit -l unlimited")
    assert refused["link"].status == "unknown"
    integrated = by_name(Machine(root, profile_of("cuda:0", d2h_bytes_per_s=9e9, unified_memory=True)))
    assert integrated["link"].status == "ok"


def test_limits_of_a_container_are_shown(tmp_path, measured, monkeypatch):
    files = {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": str(4 << 30),
        "sys/fs/cgroup/memory.current": str(1 << 30),
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = by_name(Machine(write(tmp_path, files)))
    assert found["container"].data == {"memory_limit_bytes": 4 << 30, "cores": 1, "ranks": 1}
    assert found["container"].value == "memory limit 4.00 GiB; 1 of 8 cores (CPU quota)"
    assert found["memory"].data["available_bytes"] == 3 << 30
    assert found["threads"].fix == "export OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("setting", "status"),
    [("always madvise [never]", "slow"), ("always [madvise] never", "ok"), ("", "unknown")],
)
def test_huge_pages(tmp_path, setting, status):
    root = write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": setting})
    (found,) = doctor._huge_pages(Machine(root))
    assert found.status == status
    assert bool(found.fix) == (status == "slow")


@pytest.mark.parametrize(
    ("kind", "rate", "status", "fix"),
    [("ext4", 3e9, "ok", ""), ("tmpfs", 3e9, "slow", "on/a/disk"), ("ext4", 1e8, "slow", "NVMe")],
)
def test_a_disk_in_memory_or_a_slow_one_is_named(tmp_path, kind, rate, status, fix):
    root = write(
        tmp_path, {"proc/mounts": f"a / xfs rw 0 0\nb {doctor.tempfile.gettempdir()} {kind} rw 0 0\n"}
    )
    (found,) = doctor._disk(Machine(root, profile_of(disk_read_bytes_per_s=rate)))
    assert (found.status, found.data["filesystem"]) == (status, kind)
    assert fix in found.fix


@pytest.mark.parametrize(
    ("direct", "uring", "setting", "fix"),
    [
        (True, True, "0", ""),
        (False, False, "0", "TMPDIR"),
        (True, False, "2", "sysctl kernel.io_uring_disabled=0"),
        (True, False, "0", "seccomp"),
        (True, False, None, "seccomp"),
    ],
)
def test_io_uring(tmp_path, monkeypatch, direct, uring, setting, fix):
    class Store:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    Store.direct, Store.uring = direct, uring
    monkeypatch.setattr("ts_paging.DiskStore", Store)
    root = write(tmp_path, {} if setting is None else {"proc/sys/kernel/io_uring_disabled": setting})
    (found,) = doctor._io_uring(Machine(root))
    assert fix in found.fix
    assert (found.status == "ok") == uring


def test_compilers_are_looked_for_where_the_build_looks(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    cxx, nvcc = doctor._compilers(Machine(write(tmp_path / "with", CARD)))
    assert (cxx.status, nvcc.status) == ("missing", "missing")
    assert "CUDA_HOME" in nvcc.fix
    compiler = write(tmp_path, {"cuda/bin/nvcc": ""}) / "cuda" / "bin" / "nvcc"
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert list(doctor._compilers(Machine(tmp_path)))[1].value == str(compiler)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for given in (file, file / "below"):
        monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(given))
        (found,) = doctor._cache(Machine())
        assert (found.status, "TRAINSTREAM_CACHE_DIR" in found.fix) == ("slow", True)
    monkeypatch.setattr(doctor, "cache_dir", lambda: None)
    (found,) = doctor._cache(Machine())
    assert found.status == "slow"


def test_the_command_measures_keeps_and_leaves_nothing_else(tmp_path):
    (tmp_path / "tmp").mkdir()
    done = command("--json", TRAINSTREAM_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    event = json.loads(done.stdout)
    check_schema(event)
    assert {check["name"] for check in event["checks"]} == NAMES
    profile = HardwareProfile.from_json(json.dumps(event["profile"]))
    assert {"rates/decode_weights_per_s/nf4", "rates/adamw_params_per_s/int8"} < set(profile.measured)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_command_in_a_broken_environment(tmp_path):
    (tmp_path / "file").write_text("")
    done = command(
        PATH=str(tmp_path / "nothing"),
        TRAINSTREAM_CACHE_DIR=str(tmp_path / "file"),
        TMPDIR=str(tmp_path / "nowhere"),
        CUDA_HOME=None,
        CXX=None,
        LOCAL_WORLD_SIZE="nonsense",
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "-> export TRAINSTREAM_CACHE_DIR=" in done.stdout
    assert "C++ compiler" in done.stdout
    assert Path(tmp_path / "file").read_text() == ""


BREAKS = """
import os, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("BROKEN"):
            raise ImportError(f"{name}: undefined symbol: _ZN3fooEv")
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize(
    ("broken", "failed", "fix"),
    [
        ("ts_optim._C", "ts_optim", "pip install --no-deps --force-reinstall ./packages/ts-optim"),
        ("torch", "torch", "pip install --force-reinstall torch"),
    ],
)
def test_it_starts_where_a_native_module_is_broken_and_says_what_mends_it(tmp_path, broken, failed, fix):
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    result = command("--json", BROKEN=broken, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    event = json.loads(result.stdout)
    check_schema(event)
    (check,) = [check for check in event["checks"] if check["status"] == "failed"]
    assert check["name"] == failed
    assert "undefined symbol" in check["value"]
    assert check["fix"].startswith(fix)


def test_a_broken_native_module_is_an_error_at_the_first_use_of_a_name(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    code = (
        "import trainstream\n"
        "try:\n    trainstream.wrap\n"
        "except ImportError as error:\n    print(error)\n"
        "try:\n    from trainstream import memory_report\n"
        "except ImportError as error:\n    print(hasattr(trainstream, '__path__'))\n"
    )
    env = {**os.environ, "BROKEN": "ts_fused._C", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    first, second = done.stdout.splitlines()
    assert "undefined symbol" in first
    assert second == "True"
