"""The hardware profile: what is measured, what is assumed, and the file it is kept in. Nothing is timed."""

import contextlib
import dataclasses
import itertools
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import _probes, hardware
from ts_core._probes import Bench
from ts_core.errors import ArgumentError, DeviceError, OptionError
from ts_core.hardware import ASSUMED, ASSUMED_RATES, HardwareProfile, profile_hardware, register_rates
from ts_core.testing import devices

CPU = torch.device("cpu")
rates = st.floats(min_value=1e-12, max_value=1e30)
names = st.text(max_size=12)


@st.composite
def profiles(draw):
    size = st.integers(0, 2**62)
    return HardwareProfile(
        device=draw(names),
        device_name=draw(names),
        quick=draw(st.booleans()),
        unified_memory=draw(st.booleans()),
        cores=draw(st.integers(1, 999)),
        ram_bytes=draw(size),
        vram_bytes=draw(size),
        page_lock_limit_bytes=draw(st.none() | size),
        **{name: draw(rates) for name in ASSUMED},
        rates=draw(st.dictionaries(names, st.dictionaries(names, rates, max_size=3), max_size=3)),
        measured=tuple(draw(st.lists(names, max_size=3))),
        assumed=tuple(draw(st.lists(names, max_size=3))),
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cache of its own, no rates registered, and one fake probe; returns the list of its calls."""
    calls = []

    def probe(bench):
        calls.append(bench)
        return {"host_copy_bytes_per_s": float(len(calls))}

    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(hardware, "_rates", {})
    monkeypatch.setattr(hardware, "_unsaved", {})
    monkeypatch.setattr(hardware, "probes_for", lambda device: {"fake": probe})
    return calls


def files(tmp_path):
    return sorted((tmp_path / "a" / "cache").iterdir())


class Clock:
    """Moves by a fixed step at each look."""

    def __init__(self, step):
        self.ticks = itertools.count()
        self.step = step

    def __call__(self):
        return next(self.ticks) * self.step


@given(profiles())
def test_json_brings_the_same_profile_back(profile):
    assert HardwareProfile.from_json(profile.to_json()) == profile


@given(profiles(), st.data())
def test_json_with_anything_wrong_is_refused(profile, data):
    found = json.loads(profile.to_json())
    name = data.draw(st.sampled_from(sorted(found)))
    wrong = data.draw(st.sampled_from([[3], {"a": {"b": "c"}}, -1, float("nan"), float("inf"), "missing"]))
    if wrong == "missing":
        del found[name]
    else:
        found[name] = wrong
    with pytest.raises(ArgumentError, match="from_json"):
        HardwareProfile.from_json(json.dumps(found))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", "{}", "[" * 100_000, None, '{"version": true}'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ArgumentError):
        HardwareProfile.from_json(text)


@given(profiles())
def test_a_profile_of_another_version_is_refused(profile):
    other = dataclasses.replace(profile, version=profile.version + 1)
    with pytest.raises(ArgumentError, match="version"):
        HardwareProfile.from_json(other.to_json())


def test_what_is_not_measured_is_assumed_and_says_so(place):
    profile = profile_hardware("cpu")
    assert profile.measured == ("host_copy_bytes_per_s",)
    assert profile.host_copy_bytes_per_s == 1.0
    assert profile.h2d_bytes_per_s == ASSUMED["h2d_bytes_per_s"]
    assert profile.rates == ASSUMED_RATES["cpu"]
    singles = {name for name in profile.assumed if "/" not in name}
    assert singles == set(ASSUMED) - {"host_copy_bytes_per_s"}
    tables = {f"rates/{table}/{key}" for table, of in profile.rates.items() for key in of}
    assert set(profile.assumed) - singles == tables
    assert profile.device == "cpu"
    assert profile.unified_memory
    assert profile.vram_bytes == 0
    assert profile.cores >= 1
    assert profile.ram_bytes > 0


def test_a_profile_is_measured_once_for_each_kind(place, tmp_path):
    first = profile_hardware("cpu")
    assert profile_hardware("cpu") == first
    assert profile_hardware(CPU, quick=False).host_copy_bytes_per_s == 2.0
    assert profile_hardware("cpu", quick=False).host_copy_bytes_per_s == 2.0
    assert [bench.quick for bench in place] == [True, False]
    assert len(files(tmp_path)) == 2
    assert profile_hardware("cpu", force=True).host_copy_bytes_per_s == 3.0
    assert profile_hardware("cpu").host_copy_bytes_per_s == 3.0


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (hardware, "__version__", "99"),
        (hardware, "_driver", lambda: "another"),
        (hardware, "_processor", lambda: "another"),
        (hardware, "usable_cores", lambda: 77),
        (hardware.platform, "node", lambda: "another"),
        (torch, "__version__", "99"),
        (torch, "get_num_threads", lambda: 77),
        (hardware.tempfile, "gettempdir", lambda: "/"),
    ],
)
def test_another_machine_or_version_is_measured_anew(place, monkeypatch, where, name, value):
    profile_hardware("cpu")
    monkeypatch.setattr(where, name, value)
    if name == "_driver":  # of no account to a processor
        assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0
    else:
        assert profile_hardware("cpu").host_copy_bytes_per_s == 2.0


def test_the_file_is_private_and_nothing_else_is_left(place, tmp_path):
    profile_hardware("cpu")
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def damaged(path):
    whole = path.read_text()
    data = json.loads(whole)
    yield "empty", lambda: path.write_text("")
    yield "cut", lambda: path.write_text(whole[: len(whole) // 2])
    yield "no text", lambda: path.write_bytes(b"\xff\xfe\x00")
    yield "another key", lambda: path.write_text(json.dumps({**data, "key": {}}))
    yield "no profile", lambda: path.write_text(json.dumps({"key": data["key"]}))
    old = {**data["profile"], "version": 0}
    yield "old", lambda: path.write_text(json.dumps({**data, "profile": old}))
    yield "too deep", lambda: path.write_text("[" * 100_000)
    yield "too large", lambda: path.write_text(whole + " " * (2 << 20))
    yield "a list", lambda: path.write_text("[1]")


def test_a_broken_or_old_file_is_measured_anew(place, tmp_path):
    profile_hardware("cpu")
    (path,) = files(tmp_path)
    for count, (_, damage) in enumerate(damaged(path), start=2):
        damage()
        assert profile_hardware("cpu").host_copy_bytes_per_s == count
        assert profile_hardware("cpu").host_copy_bytes_per_s == count
    assert files(tmp_path) == [path]


def test_a_folder_in_the_place_of_the_file_is_no_error(place, tmp_path):
    profile_hardware("cpu")
    (path,) = files(tmp_path)
    path.unlink()
    path.mkdir()
    assert profile_hardware("cpu").host_copy_bytes_per_s == 2.0
    assert profile_hardware("cpu").host_copy_bytes_per_s == 2.0  # kept by the process
    assert files(tmp_path) == [path]


@pytest.mark.parametrize("kind", ["file", "read-only", "no home", "nul"])
def test_a_cache_that_cannot_be_written_is_no_error(place, tmp_path, monkeypatch, kind):
    folder = tmp_path / "there"
    if kind == "file":
        folder.write_text("")
    elif kind == "read-only":

        def refuse(*args, **more):
            raise PermissionError("read-only")

        monkeypatch.setattr(hardware.tempfile, "mkstemp", refuse)
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(folder))
    if kind == "no home":

        def homeless(*args):
            raise RuntimeError("no home")

        monkeypatch.delenv("TRAINSTREAM_CACHE_DIR")
        monkeypatch.setattr(Path, "home", homeless)
        assert hardware.cache_dir() is None
    elif kind == "nul":
        monkeypatch.setattr(hardware, "cache_dir", lambda: Path("a\0b"))
    assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0
    assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0
    assert profile_hardware("cpu", force=True).host_copy_bytes_per_s == 2.0
    assert profile_hardware("cpu").host_copy_bytes_per_s == 2.0


def test_a_full_disk_leaves_no_half_file(place, tmp_path, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0
    assert files(tmp_path) == []


def test_a_machine_without_a_temporary_directory_has_a_profile(place, monkeypatch):
    def none():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(hardware.tempfile, "gettempdir", none)
    assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0
    assert place[0].folder == Path()


def test_threads_share_one_measurement(place):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: profile_hardware("cpu"), range(8)))
    assert len(place) == 1
    assert all(profile == found[0] for profile in found)


def test_a_process_waits_for_another_that_measures_and_takes_what_it_found(place, tmp_path, monkeypatch):
    first = profile_hardware("cpu")
    (path,) = files(tmp_path)
    text = path.read_text()
    path.unlink()
    looks = []

    def flock(descriptor, operation):
        looks.append(descriptor)
        if len(looks) < 3:
            raise BlockingIOError
        path.write_text(text)

    monkeypatch.setattr(hardware.fcntl, "flock", flock)
    monkeypatch.setattr(hardware.time, "sleep", lambda seconds: None)
    assert profile_hardware("cpu") == first
    assert len(place) == 1
    assert len(looks) == 3


@pytest.mark.parametrize("error", [BlockingIOError, PermissionError])
def test_a_cache_that_stays_locked_or_cannot_be_locked_is_no_error(place, monkeypatch, error):
    def refuse(descriptor, operation):
        raise error

    monkeypatch.setattr(hardware.fcntl, "flock", refuse)
    monkeypatch.setattr(hardware.time, "sleep", lambda seconds: None)
    assert profile_hardware("cpu") == profile_hardware("cpu")
    assert len(place) == 1


def test_a_system_without_file_locks(place, monkeypatch):
    monkeypatch.setattr(hardware, "fcntl", None)
    assert profile_hardware("cpu") == profile_hardware("cpu")


def test_an_error_while_measuring_releases_the_lock(place, tmp_path, monkeypatch):
    def stopped(bench):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hardware, "_profile", stopped)
        with pytest.raises(KeyboardInterrupt):
            profile_hardware("cpu")
    monkeypatch.setattr(hardware.time, "sleep", lambda seconds: pytest.fail("it is still locked"))
    assert profile_hardware("cpu").host_copy_bytes_per_s == 1.0


def test_readers_never_see_half_a_file(place, tmp_path):
    first = profile_hardware("cpu")
    (path,) = files(tmp_path)
    key = json.loads(path.read_text())["key"]
    stop = threading.Event()

    def write():
        while not stop.is_set():
            assert hardware._write(path, key, first)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        found = [hardware._read(path, key) for _ in range(100)]
        stop.set()
        [writer.result() for writer in writers]
    assert found == [first] * 100
    assert files(tmp_path) == [path]


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given_dir, expected in {
        "": tmp_path / ".cache" / "trainstream",
        "~/x": tmp_path / "x",
        "rel": Path.cwd() / "rel",
    }.items():
        monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", given_dir)
        assert hardware.cache_dir() == expected


def test_registered_rates_are_measured_and_a_failing_one_is_assumed(place):
    seen = []
    register_rates("decode_weights_per_s", lambda device, quick: seen.append((device, quick)) or {"nf4": 5})
    register_rates("more", lambda device, quick: {"a/b": 2.0, "zero": 0.0, "nan": float("nan"), "odd": None})
    register_rates("adamw_params_per_s", "nowhere.at_all:function")
    profile = profile_hardware("cpu")
    assert seen == [(CPU, True)]
    assert profile.rates["decode_weights_per_s"] == {
        **ASSUMED_RATES["cpu"]["decode_weights_per_s"],
        "nf4": 5.0,
    }
    assert profile.rates["more"] == {"a/b": 2.0}
    assert profile.rates["adamw_params_per_s"] == ASSUMED_RATES["cpu"]["adamw_params_per_s"]
    assert {"rates/decode_weights_per_s/nf4", "rates/more/a/b"} < set(profile.measured)
    assert "rates/decode_weights_per_s/nf4" not in profile.assumed


def test_a_profile_without_the_rates_of_a_package_is_measured_anew_with_them(place):
    profile_hardware("cpu")
    register_rates("decode_weights_per_s", "math:nothing")
    assert profile_hardware("cpu").host_copy_bytes_per_s == 2.0


@pytest.mark.parametrize(
    ("table", "function"), [("", len), ("a/b", len), (3, len), ("a", 3), ("a", "math"), ("a", "a:b:c")]
)
def test_rates_are_registered_with_a_name_and_a_function(place, table, function):
    with pytest.raises(ArgumentError, match="register_rates"):
        register_rates(table, function)


def test_a_probe_that_fails_leaves_its_figures_assumed(place, monkeypatch):
    def failing(bench):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(hardware, "probes_for", lambda device: {"fake": failing})
    assert profile_hardware("cpu").measured == ()


@pytest.mark.parametrize("bad", [{"device": "tpu"}, {"device": "cuda:99"}, {"device": 3.5}])
def test_no_such_device(place, bad):
    with pytest.raises(DeviceError, match="profile_hardware"):
        profile_hardware(**bad)


@pytest.mark.parametrize("bad", [{"quick": 1}, {"force": "yes"}])
def test_options_are_booleans(place, bad):
    with pytest.raises(OptionError):
        profile_hardware("cpu", **bad)


@given(st.floats(1e-6, 10.0), st.booleans())
def test_a_call_is_timed_by_the_clock(step, quick):
    calls = []
    bench = Bench(CPU, quick, Path(), Clock(step))
    assert bench.seconds(lambda: calls.append(1)) == pytest.approx(step)
    assert 3 <= len(calls) <= 21


def test_a_clock_that_stands_still_ends(tmp_path):
    assert Bench(CPU, True, tmp_path, lambda: 0.0).seconds(lambda: None) > 0
    assert hardware.seconds_per_call(lambda: None, CPU) > 0


def test_the_probes_of_the_processor_count_bytes_and_operations(monkeypatch, tmp_path):
    monkeypatch.setattr(_probes, "_sample_bytes", lambda bench, share=16: 1 << 20)
    bench = Bench(CPU, True, tmp_path, Clock(0.5))
    # Every call takes half a second of this clock.
    assert _probes.host_memory(bench) == {
        "host_copy_bytes_per_s": 2 * (1 << 20) / 0.5,
        "host_triad_bytes_per_s": 3 * (1 << 20) / 0.5,
    }
    assert _probes.device_copy(bench) == {"device_copy_bytes_per_s": 2 * (1 << 20) / 0.5}
    assert _probes.launch(bench) == {"launch_s": 0.5 / 200}
    products = _probes.matmul(bench)
    assert products["rates/matmul_flops_per_s/float32/256"] == 2 * 256**3 / 0.5
    assert set(products) == {
        f"rates/matmul_flops_per_s/{dtype}/{n}" for dtype in ("bfloat16", "float32") for n in (256, 1024)
    }


def test_the_disk_is_written_read_and_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(_probes, "_DIRECT_CHUNK", 1 << 20)
    found = _probes.disk(Bench(CPU, True, tmp_path, Clock(0.3)))
    # Looks of the clock: the start, one after each chunk until half a second is over, and one at the end.
    assert found["disk_read_bytes_per_s"] == pytest.approx((2 << 20) / (3 * 0.3))
    assert found["disk_write_bytes_per_s"] == pytest.approx((2 << 20) / (3 * 0.3))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_direct_io_is_measured_too(monkeypatch, tmp_path):
    opened = os.open

    def refuse(path, flags, *more, **named):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "no direct I/O here")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(_probes.os, "open", refuse)
    assert len(_probes.disk(Bench(CPU, True, tmp_path, Clock(1.0)))) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(_probes, "disk_budget", lambda path: 1 << 20)
    with pytest.raises(OSError, match="too little"):
        _probes.disk(Bench(CPU, True, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_sample_is_a_small_part_of_what_is_free(monkeypatch):
    class Host:
        available_bytes = 160 << 20

    monkeypatch.setattr(_probes, "host_budget", Host)
    assert _probes._sample_bytes(Bench(CPU, True, Path())) == 10 << 20


def test_what_needs_a_gpu_is_not_asked_of_a_processor():
    assert not {"link", "page lock"} & set(_probes.probes_for(CPU))
    for probe in (_probes.link, _probes.page_lock):
        with pytest.raises(RuntimeError):
            probe(Bench(CPU, True, Path()))


class Runtime:
    """Stands for CUDA's run-time library and for `torch.cuda`."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def cudart(self):
        return self

    def Stream(self, device):
        return object()

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("lock", address, nbytes))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unlock", address))
        return 0


@pytest.fixture
def fake_gpu(monkeypatch):
    """Host memory in the place of a GPU's; returns the stand-in for its library."""
    runtime = Runtime()
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(_probes, "_CUDA", runtime)
    return runtime


GPU = torch.device("cuda", 0)


def test_the_link_counts_both_ways(fake_gpu):
    found = _probes.link(Bench(GPU, True, Path(), Clock(0.5)))
    assert found == {
        "h2d_bytes_per_s": (64 << 20) / 0.5,
        "d2h_bytes_per_s": (64 << 20) / 0.5,
        "both_bytes_per_s": (128 << 20) / 0.5,
    }


def test_memory_that_is_not_page_locked_says_nothing_of_the_link(fake_gpu, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    with pytest.raises(RuntimeError, match="page-locked"):
        _probes.link(Bench(GPU, True, Path(), Clock(0.5)))


def test_what_is_page_locked_is_released(fake_gpu, monkeypatch):
    monkeypatch.setattr(_probes, "_sample_bytes", lambda bench, share=16: 1 << 20)
    found = _probes.page_lock(Bench(GPU, True, Path(), Clock(0.5)))
    assert found == {"page_lock_bytes_per_s": (1 << 20) / 0.5}
    locked = [call[1] for call in fake_gpu.calls if call[0] == "lock"]
    released = [call[1] for call in fake_gpu.calls if call[0] == "unlock"]
    assert locked == released
    assert len(locked) == 2


def test_page_locking_that_is_refused_is_an_error_that_names_the_code(fake_gpu):
    fake_gpu.code = 2
    with pytest.raises(RuntimeError, match="code 2"):
        _probes.page_lock(Bench(GPU, True, Path(), Clock(0.5)))
    assert [call[0] for call in fake_gpu.calls] == ["lock"]


@pytest.mark.parametrize("device", devices())
def test_every_figure_of_a_device_is_measured(device, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_rates", {})
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_probes, "_sample_bytes", lambda bench, share=16: 4 << 20)
    profile = profile_hardware(device)
    missing = {name for name in profile.assumed if not name.startswith("rates/")}
    if torch.device(device).type == "cpu":
        of_a_gpu = {"h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s", "page_lock_bytes_per_s"}
        assert missing == of_a_gpu
    else:
        assert missing == set()
        assert profile.vram_bytes > 0
        assert torch.zeros(3, device=device).sum().item() == 0  # no error is left pending
    assert profile_hardware(device) == profile


def test_a_kept_profile_is_read_and_none_is_measured(place):
    assert hardware.kept_profile("cpu") is None
    made = profile_hardware("cpu")
    assert hardware.kept_profile("cpu") == made
    assert hardware.kept_profile("cpu", quick=False) is None
    assert len(place) == 1
