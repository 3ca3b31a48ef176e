"""Memory that shrinks and inputs that grow: room is made before it fails, and losses stay the same."""

import contextlib
import functools
import gc
import io
import subprocess
import sys

import peft
import pytest
import torch
from conftest import tiny_llama
from test_budgets import MIB, budget_above, in_use

import trainstream
from ts_core import memory
from ts_core.errors import DoesNotFitError
from ts_core.testing import devices
from ts_core.usage import CONTEXT_BYTES, PeakSampler, host_usage, release_free_memory
from ts_hf.adapters import merge_adapters

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def model_of():
    """About 13 MiB of fp32 weights."""
    return tiny_llama(
        hidden_size=256, intermediate_size=512, num_hidden_layers=5, head_dim=64, vocab_size=512
    )


def run(model, optimizer, device, lengths, watch=None):
    losses = []
    for step, length in enumerate(lengths):
        made = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 512, (2, length), generator=made).to(device)
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if watch is not None:
            watch(step)
    return losses


@functools.cache
def reference(device, lengths):
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(model_of(), None, lr=1e-3, device=device, quantize="none")
    losses = run(model, optimizer, device, lengths)
    trainstream.unwrap(model)
    return losses


@pytest.mark.parametrize("device", devices())
def test_sequences_that_double_at_step_10_stay_within_a_tight_budget(device, tmp_path):
    lengths = [32] * 9 + [64] * 2
    expected = reference(device, tuple(lengths))
    room = budget_above(device, 46 * MIB)
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, device=device, quantize="none", disk_offload=tmp_path, **room
    )
    session = model._trainstream_session
    paged = []
    with PeakSampler(0.002, lambda: in_use(device)) as sampler:
        got = run(model, optimizer, device, lengths, lambda step: paged.append(len(session.plan.paged)))
    assert got == expected
    assert sampler.peak_bytes <= (room.get("ram_budget") or room["vram_budget"] - CONTEXT_BYTES)
    if device == "cpu":  # beside a GPU it depends on what its libraries take
        assert paged[8] < paged[0]  # some had returned
        assert paged[9] > paged[8]
        assert any("an input 2 times as large as any before needs" in line for line in session.events.events)
    trainstream.unwrap(model)


class Group:
    """A control group with a limit, in a machine that says it has 64 GiB; what is used of it is true."""

    def __init__(self, root, monkeypatch):
        self.root, self.limit = root, 0
        files = {
            "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 29 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        real = memory.host_budget

        def budget(*args, **kwargs):
            used = host_usage().used_bytes
            (root / "sys/fs/cgroup/memory.max").write_text(f"{self.limit}\n")
            (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
            return real(root)

        monkeypatch.setattr(memory, "host_budget", budget)
        monkeypatch.setattr("trainstream._watch._SHARE", 0)

    def leave(self, nbytes):
        release_free_memory(collect=True)
        self.limit = host_usage().used_bytes + nbytes


def test_a_group_s_limit_holds_whatever_the_machine_says(tmp_path, monkeypatch):
    expected = reference("cpu", (32,) * 6)
    group = Group(tmp_path / "root", monkeypatch)
    group.leave(46 * MIB)
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, device="cpu", quantize="none", disk_offload=tmp_path
    )
    session = model._trainstream_session
    assert len(session.plan.paged) == len(session.plan.blocks)
    with PeakSampler(0.002) as sampler:
        assert run(model, optimizer, "cpu", [32] * 6) == expected
    assert sampler.peak_bytes <= group.limit
    files = session.tiers.files
    before = files.used_bytes
    group.leave(10 * MIB)
    with pytest.raises(DoesNotFitError, match=r"\[unwrap\] .* of RAM are needed.*Save the model while it is"):
        trainstream.unwrap(model)
    assert files.used_bytes == before
    run(model, optimizer, "cpu", [32])
    group.leave(4000 * MIB)
    trainstream.unwrap(model)


def test_a_limit_that_sinks_under_way_makes_groups_stream(tmp_path, monkeypatch):
    lengths = [32] * 6
    expected = reference("cpu", tuple(lengths))
    group = Group(tmp_path / "root", monkeypatch)
    group.leave(4000 * MIB)
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, device="cpu", quantize="none", disk_offload=tmp_path
    )
    session = model._trainstream_session
    assert session.pager is None
    seen = []

    def sink(step):
        seen.append(len(session.plan.paged))
        if step == 3:
            group.leave(4 * MIB)

    assert run(model, optimizer, "cpu", lengths, sink) == expected
    assert seen[3] == 0 < seen[4]
    said = " ".join(session.events.events)
    assert "less of RAM is left" in said or "RAM is short" in said
    assert "stream from now on" in said
    session.relief.make_room(1 << 50, "everything")
    group.leave(-64 * MIB)
    with pytest.raises(DoesNotFitError, match=r"RAM are left for this process .*disk_offload="):
        run(model, optimizer, "cpu", [32])
    group.leave(4000 * MIB)
    run(model, optimizer, "cpu", [32])
    trainstream.unwrap(model)


def test_what_has_made_room_once_does_not_do_so_after_each_step(tmp_path, monkeypatch):
    group = Group(tmp_path / "root", monkeypatch)
    group.leave(32000 * MIB)
    assert torch.ones(64 * MIB).numel()  # the peak of the process lies far above what a step takes
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, device="cpu", quantize="none", disk_offload=tmp_path
    )
    session = model._trainstream_session
    seen = []

    def sink(step):
        seen.append(len(session.plan.paged))
        if step == 2:
            peak = int(session.history[-1]["host_peak_bytes"])
            group.leave(peak - host_usage().resident_bytes - MIB)

    run(model, optimizer, "cpu", [32] * 8, sink)
    assert seen[2] == 0 < seen[3] < len(session.plan.blocks)
    assert seen[4:] == [seen[3]] * 4
    group.leave(4000 * MIB)
    trainstream.unwrap(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_vram_that_another_process_takes_makes_groups_stream(monkeypatch):
    lengths = [32] * 6
    expected = reference("cuda", tuple(lengths))
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(model_of(), None, lr=1e-3, device="cuda", quantize="none")
    session = model._trainstream_session
    monkeypatch.setattr("trainstream._watch._SHARE", 0)
    total = torch.cuda.get_device_properties(0).total_memory
    seen = []

    def taken(step):
        if step == 2:  # what PyTorch gives back is taken at once
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # a peak, whatever a step takes here
            torch.cuda.empty_cache()
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "mem_get_info", lambda *a: (0, total))
                session.watch.after_step()
            # What a step took before says nothing of one now: nothing more leaves because of it.
            assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
        seen.append(sum(row.tier != "device" and not row.settled for row in session.plan.blocks))

    assert run(model, optimizer, "cuda", lengths, taken) == expected
    assert seen[1] == 0 < seen[2]
    assert any("less of the device is left" in line for line in session.events.events)
    assert any("stream from now on" in line for line in session.events.events)
    trainstream.unwrap(model)


class Others:
    """A GPU's memory as PyTorch tells of it, with a process beside this one that takes and gives back."""

    RESERVED, PEAK, TOTAL = 48 * MIB, 80 * MIB, 1 << 50

    def __init__(self, monkeypatch):
        self.taken, self.peak = 0, self.PEAK
        for name in ("mem_get_info", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr("trainstream._watch._SHARE", 0)

    def mem_get_info(self, device=None):
        return self.TOTAL - self.RESERVED - self.taken, self.TOTAL

    def memory_reserved(self, device=None):
        return self.RESERVED

    def max_memory_reserved(self, device=None):
        return self.peak

    def reset_peak_memory_stats(self, device=None):
        self.peak = self.RESERVED


def test_memory_that_others_take_at_step_10_and_give_back_changes_no_loss(tmp_path, monkeypatch):
    """A run under a plan, whose look at the device is at figures made up here."""
    lengths = [32] * 16
    expected = reference("cpu", tuple(lengths))
    torch.manual_seed(0)
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, device="cpu", quantize="none", disk_offload=tmp_path, plan_tokens=64
    )
    session = model._trainstream_session
    others = Others(monkeypatch)
    monkeypatch.setattr(session.watch, "_cuda", True)
    streams, said = [], []

    def after(step):
        streams.append(len(session.plan.paged))
        said.append(len(session.events.events))
        if step == 9:
            others.taken = others.TOTAL - others.RESERVED
        if step == 13:
            others.taken = 0

    assert run(model, optimizer, "cpu", lengths, after) == expected
    assert streams[9] == 0 < streams[10] == streams[-1]
    assert said[9] == said[0]
    told = session.events.events[said[9] :]
    (less,) = [i for i, line in enumerate(told) if "less of the device is left" in line]
    (moved,) = [i for i, line in enumerate(told) if "stream from now on" in line]
    (again,) = [i for i, line in enumerate(told) if "the device has room again" in line]
    assert less < moved < again
    assert said[11] == said[13] == said[9] + again  # while it is gone, nothing is said twice
    trainstream.unwrap(model)


_OTHER = """
import sys
import torch

held = [torch.empty(1, device="cuda")]
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("take"):
        left = int(line.split()[1])
        step = 1 << 40
        while step >= 12 << 20:  # smaller ones come in pieces of 20 MiB, and would take more than is meant
            more = min(torch.cuda.mem_get_info()[0] - left, step) >> 21 << 21
            if more < 12 << 20:
                break
            try:
                held.append(torch.empty(more, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                step = more // 2
    else:
        del held[1:]
        torch.cuda.empty_cache()
    print(torch.cuda.mem_get_info()[0], flush=True)
"""


@contextlib.contextmanager
def another_process():
    """Another process on this GPU; yields what asks it to take all but some bytes, or to give them back."""
    child = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(words):
        child.stdin.write(f"{words}\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        assert answer, f"the other process ended with {child.wait()}"
        return int(answer)

    try:
        assert child.stdout.readline() == "ready\n"
        yield ask
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_vram_that_another_process_takes_at_step_10_changes_no_loss(monkeypatch):
    """Most of it, and for real: steps go on with what is left, stream, and have room again later."""
    left = 56 * MIB  # less than the watch leaves to others in this process, so that it acts

    def batches(step):
        made = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 512, (16, 64), generator=made).to("cuda")
        return [{"input_ids": ids, "labels": ids}]

    def train(ask, steps=16, **options):
        torch.manual_seed(0)
        model, _ = trainstream.wrap(
            model_of(), None, lr=1e-3, device="cuda", quantize="none", plan_tokens=1024, **options
        )
        session = model._trainstream_session
        losses, streams, free = [], [], []
        for step in range(steps):
            if ask is not None and step == 10:
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
                free.append(ask(f"take {left}"))
            if ask is not None and step == 14:
                free.append(ask("give"))
            losses.append(session.train_step(batches(step)).item())
            streams.append(sum(row.tier != "device" and not row.settled for row in session.plan.blocks))
        told = list(session.events.events)
        trainstream.unwrap(model)
        del model, session
        gc.collect()
        torch.cuda.empty_cache()
        return losses, streams, free, told

    monkeypatch.setattr("trainstream._watch._SHARE", 0)
    train(None, 2, param_offload=True, recompute=True)  # its kernels are loaded: that takes memory, too
    expected, _, _, _ = train(None)
    with another_process() as ask:
        losses, streams, free, told = train(ask)
    assert free[0] < 80 * MIB < 1024 * MIB < free[1]
    assert losses == expected
    assert streams[9] == 0 < streams[11]
    text = "\n".join(told)
    for words in ("less of the device is left", "stream from now on", "the device has room again"):
        assert words in text


def test_nothing_moves_between_two_passes_that_one_backward_comes_to(tmp_path):
    model, optimizer = trainstream.wrap(
        model_of(), None, lr=1e-3, quantize="none", disk_offload=tmp_path, **budget_above("cpu", 90 * MIB)
    )
    session = model._trainstream_session
    run(model, optimizer, "cpu", [16] * 6)
    ids = torch.randint(0, 512, (2, 16))
    optimizer.zero_grad()
    first = model(input_ids=ids, labels=ids).loss
    session.relief.due = "somebody said so"
    second = model(input_ids=ids, labels=ids).loss
    assert session.relief.due
    (first + second).backward()
    optimizer.step()
    held = first  # a graph that backward has been through keeps nothing in its place
    run(model, optimizer, "cpu", [16])
    assert not session.relief.due
    assert any(line.startswith("somebody said so: ") for line in session.events.events)
    assert held.grad_fn is not None
    session.relief.due = "again"
    model(input_ids=ids, labels=ids)  # dropped without a backward pass
    model(input_ids=ids, labels=ids)
    assert not session.relief.due
    trainstream.unwrap(model)


def test_an_output_can_be_saved_without_a_word():
    model, _ = trainstream.wrap(model_of(), None, quantize="none", param_offload=True)
    output = model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits
    torch.save(output, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), output)
    trainstream.unwrap(model)


def test_merging_refuses_what_ram_cannot_hold(monkeypatch):
    model = model_of()
    trainstream.quantize_model(model.requires_grad_(False), "int8")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    before = dict(model.named_parameters())

    def with_ram(left, **options):
        budget = memory.HostBudget(1 << 50, left + (128 << 20), None, "a test")
        monkeypatch.setattr(memory, "host_budget", lambda *a, **k: budget)
        return merge_adapters(model, **options)

    need = 5 * 256 * 256 * 4
    with pytest.raises(DoesNotFitError, match=r"\[merge_adapters\] .*Use repack=True"):
        with_ram(need - 1)
    assert all(p is before[name] for name, p in model.named_parameters())
    with_ram(need // 5, repack=True)
