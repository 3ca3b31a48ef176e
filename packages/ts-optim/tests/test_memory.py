"""State in memory that somebody provides: files mapped into memory, counted, moved and given up."""

import copy
import dataclasses
import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard
from ts_core.memory import host_budget
from ts_core.testing import assert_bit_equal, devices, seeded
from ts_optim import OffloadAdamW, deferred, rates


class Files:
    """Mapped files of a folder, which can run out of room."""

    def __init__(self, folder, room=None):
        self.folder, self.room = folder, room
        self.held = {}
        self.numbers = itertools.count()

    def empty(self, nbytes):
        if (
            self.room is not None
            and sum(path.stat().st_size for path in self.held.values()) + nbytes > self.room
        ):
            raise OSError("no room")
        path = self.folder / str(next(self.numbers))
        path.write_bytes(b"\xff" * nbytes)  # NaN: contents must not matter
        mapped = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        self.held[mapped.data_ptr()] = path
        return mapped

    def drop(self, tensor):
        self.held.pop(tensor.data_ptr()).unlink()

    @property
    def nbytes(self):
        return sum(path.stat().st_size for path in self.folder.iterdir())


class NoDrop:
    def __init__(self):
        self.made = 0

    def empty(self, nbytes):
        self.made += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)


def parameters(seed=0, dtype=torch.float32):
    with seeded(seed):
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 6), (5,), (0, 3))]
        return [*params, nn.Parameter(torch.randn(6, 4).t().to(dtype))]


def train(params, optimizer, steps, start=0):
    for i in range(start, start + steps):
        with seeded(i):
            for p in params:
                p.grad = torch.randn(p.shape).to(p)
        optimizer.step()


def equal(a, b, ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach())
        for name in b.state[q]:
            assert_bit_equal(a.state[p][name], b.state[q][name])


def addresses(optimizer, p):
    return {t.data_ptr() for name, t in optimizer.state[p].items() if name != "step"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(picks=st.lists(st.booleans(), min_size=4, max_size=4), guarded=st.booleans())
def test_state_is_made_where_the_provider_says(dtype, picks, guarded, tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("files"))
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    if guarded:
        for p in ours:
            guard(p, lambda p, g: None)
    wanted = {id(p) for p, pick in zip(ours, picks, strict=True) if pick}
    a, b = OffloadAdamW(ours, lr=0.1), OffloadAdamW(theirs, lr=0.1)
    a.set_memory(lambda p: files if id(p) in wanted else None)
    train(ours, a, 2)
    train(theirs, b, 2)
    equal(a, b, ours, theirs)
    each = {torch.float32: 8, torch.bfloat16: 12, torch.float64: 16}[dtype]
    on_disk = each * sum(p.numel() for p in ours if id(p) in wanted)
    stats = a.stats()
    assert (stats["disk_state_bytes"], files.nbytes) == (on_disk, on_disk)
    assert stats["host_state_bytes"] == each * sum(p.numel() for p in ours) - on_disk
    for p, pick in zip(ours, picks, strict=True):
        if p.numel():
            assert (addresses(a, p) <= files.held.keys()) is pick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    moves=st.lists(st.lists(st.sampled_from("nab"), min_size=4, max_size=4), max_size=4), lazily=st.booleans()
)
def test_state_moves_with_its_bytes_and_old_memory_is_given_up(dtype, moves, lazily, tmp_path_factory):
    homes = {name: Files(tmp_path_factory.mktemp(name)) for name in "ab"}
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    a, b = OffloadAdamW(ours, lr=0.1), OffloadAdamW(theirs, lr=0.1)
    for p in ours:
        guard(p, lambda p, g: None)
    wish = {}
    a.set_memory(lambda p: homes.get(wish.get(id(p))))
    before, deferred._work_off = deferred._work_off, (lambda updates: None) if lazily else deferred._work_off
    try:
        train(ours, a, 1)
        train(theirs, b, 1)
        for i, move in enumerate(moves):
            wish.update((id(p), name) for p, name in zip(ours, move, strict=True))
            a.rehouse(ours)
            each = 8 if dtype is torch.float32 else 12
            for name, files in homes.items():
                want = sum(each * p.numel() for p, place in zip(ours, move, strict=True) if place == name)
                assert files.nbytes == want
                assert sum(path.stat().st_size for path in files.held.values()) == want
            same = {p: addresses(a, p) for p in ours}
            a.rehouse(iter(ours))
            assert same == {p: addresses(a, p) for p in ours}
            equal(a, b, ours, theirs)
            train(ours, a, 1, start=i + 1)
            train(theirs, b, 1, start=i + 1)
        equal(a, b, ours, theirs)
    finally:
        deferred._work_off = before


def test_rehousing_what_has_no_state_or_is_somebody_else_s_does_nothing(tmp_path):
    files = Files(tmp_path)
    ours = parameters()
    optimizer = OffloadAdamW(ours)
    optimizer.set_memory(lambda p: files)
    optimizer.rehouse([*ours, nn.Parameter(torch.ones(3))])
    assert files.nbytes == 0
    assert not optimizer.state


def test_when_memory_runs_out_what_moved_stays_and_nothing_is_lost(tmp_path):
    ours, theirs = parameters(), parameters()
    a, b = OffloadAdamW(ours, lr=0.1), OffloadAdamW(theirs, lr=0.1)
    train(ours, a, 1)
    train(theirs, b, 1)
    files = Files(tmp_path, room=24 * 4)
    a.set_memory(lambda p: files)
    with pytest.raises(OSError, match="no room"):
        a.rehouse(ours)
    assert (files.nbytes, a.stats()["disk_state_bytes"]) == (96, 96)
    train(ours, a, 1, start=1)
    train(theirs, b, 1, start=1)
    equal(a, b, ours, theirs)


@pytest.mark.parametrize("room", [100, 200])  # for the first of two moments, for those of the first parameter
@pytest.mark.parametrize("when", ["step", "load"])
def test_state_that_does_not_fit_leaves_nothing_behind(when, room, tmp_path):
    ours, theirs = parameters(), parameters()
    a, b = OffloadAdamW(ours, lr=0.1), OffloadAdamW(theirs, lr=0.1)
    train(theirs, b, 1)
    files = Files(tmp_path, room=room)
    a.set_memory(lambda p: files)
    with pytest.raises(OSError, match="no room"):
        train(ours, a, 1) if when == "step" else a.load_state_dict(b.state_dict())
    assert files.nbytes == 0
    assert not a.state
    a.set_memory(None)
    train(ours, a, 1)
    equal(a, b, ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_goes_where_the_provider_says(dtype, tmp_path):
    files = Files(tmp_path)
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    a, b = OffloadAdamW(ours, lr=0.1), OffloadAdamW(theirs, lr=0.1)
    a.set_memory(lambda p: files)
    train(ours, a, 1)
    train(theirs, b, 1)
    first = files.nbytes
    for _ in range(2):
        a.load_state_dict(copy.deepcopy(b.state_dict()))
        assert (files.nbytes, a.stats()["host_state_bytes"]) == (first, 0)
    train(ours, a, 1, start=1)
    train(theirs, b, 1, start=1)
    equal(a, b, ours, theirs)
    a.set_memory(lambda p: None)
    a.load_state_dict(a.state_dict())
    assert (files.nbytes, a.stats()["disk_state_bytes"]) == (0, 0)
    equal(a, b, ours, theirs)


def test_state_that_is_replaced_gives_its_memory_up(tmp_path):
    files = Files(tmp_path)
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = OffloadAdamW([p])
    optimizer.set_memory(lambda p: files)
    train([p], optimizer, 1)
    assert files.nbytes == 3 * 16
    p.data = p.data.float()
    train([p], optimizer, 1)
    assert "master" not in optimizer.state[p]
    assert files.nbytes == 2 * 16
    del optimizer.state[p]["exp_avg"]  # the user's own doing
    optimizer.state[p]["exp_avg"] = torch.zeros(4)
    train([p], optimizer, 1)
    assert optimizer.stats()["disk_state_bytes"] == 16


def test_copies_live_in_default_memory(tmp_path):
    files = Files(tmp_path)
    ours = parameters()
    optimizer = OffloadAdamW(ours)
    optimizer.set_memory(lambda p: files)
    train(ours, optimizer, 1)
    params, twin = copy.deepcopy((ours, optimizer))
    stats = twin.stats()
    assert (stats["disk_state_bytes"], stats["host_state_bytes"]) == (0, files.nbytes)
    train(params, twin, 1, start=1)
    train(ours, optimizer, 1, start=1)
    equal(twin, optimizer, params, ours)


def test_memory_without_drop_and_bad_providers():
    memory = NoDrop()
    ours = parameters()
    optimizer = OffloadAdamW(ours)
    optimizer.set_memory(lambda p: memory)
    train(ours, optimizer, 1)
    assert memory.made == optimizer.stats()["disk_state_bytes"] == 8 * sum(p.numel() for p in ours)
    optimizer.set_memory(None)
    optimizer.rehouse(ours)
    assert optimizer.stats()["disk_state_bytes"] == 0
    with pytest.raises(TypeError, match="provider"):
        optimizer.set_memory(memory)
    optimizer.set_memory(lambda p: "a folder")
    with pytest.raises(TypeError, match="'a folder'"):
        optimizer.rehouse(ours)
    optimizer.set_memory(lambda p: memory)
    del optimizer
    gc.collect()


@pytest.mark.parametrize("device", devices())
def test_host_state_of_a_device_parameter_can_live_there_too(device, tmp_path):
    files = Files(tmp_path)
    results = []
    for provide in (True, False):
        with seeded(0):
            p = nn.Parameter(torch.randn(8, 9).to(device))
        optimizer = OffloadAdamW([p], lr=0.1, place=lambda p: "host")
        optimizer.set_memory((lambda p: files) if provide else None)
        for i in range(3):
            with seeded(i):
                p.grad = torch.randn(8, 9).to(device)
            optimizer.step()
            if i == 1:
                optimizer.rehouse([p])
        results.append((optimizer, [p]))
    (a, ours), (b, theirs) = results
    equal(a, b, ours, theirs)
    assert a.stats()["disk_state_bytes"] == files.nbytes >= 8 * 72
    a.set_memory(None)
    a.rehouse(ours)
    train(ours, a, 1)
    train(theirs, b, 1)
    assert files.nbytes == 0
    equal(a, b, ours, theirs)


@pytest.mark.parametrize("available", [1 << 20, (1 << 30) - 256, 1 << 30, 1 << 40])
def test_rates_are_measured_with_little_of_what_is_free(available, monkeypatch):
    free = dataclasses.replace(host_budget(), available_bytes=available)
    monkeypatch.setattr(rates, "host_budget", lambda: free)
    numels = []

    class Counting(OffloadAdamW):
        def __init__(self, params, **options):
            numels.append(params[0].numel())
            super().__init__(params, **options)

    monkeypatch.setattr(rates, "OffloadAdamW", Counting)
    monkeypatch.setattr(rates, "seconds_per_call", lambda call, device, quick: 1.0)
    if available < 1 << 30:
        with pytest.raises(RuntimeError, match="too little RAM is free"):
            rates.adamw_rates(torch.device("cpu"), True)
        assert not numels
        return
    assert set(rates.adamw_rates(torch.device("cpu"), True)) == {"float32", "bfloat16", "int8"}
    assert max(numels) == min(available // 256, 16 << 20)
