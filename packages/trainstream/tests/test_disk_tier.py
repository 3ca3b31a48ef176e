"""Training from files: the checkpoint's own, updates past the mapping, trouble on the disk."""

import contextlib
import errno
import signal
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from tiny_models import save_tiny_model

import trainstream
from trainstream.integrations.huggingface import load_model
from ts_core.errors import StorageError
from ts_core.testing import assert_bit_equal
from ts_paging import _C
from ts_paging.files import locate

IDS = torch.arange(24).view(1, 24) * 7 % 250


@pytest.fixture(autouse=True)
def _no_faults_left():
    yield
    _C.fail_io_after(-1, 0)


@pytest.fixture
def checkpoint(tmp_path):
    return save_tiny_model(tmp_path / "model", num_hidden_layers=3, hidden_size=64, intermediate_size=96)


def build(folder, directory, lora):
    model = load_model(folder, quantize=None, dtype="fp32", disk_offload=directory)
    if lora:
        model.requires_grad_(False)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers by a name that goes
            model = peft.get_peft_model(model, config)
    return model.train()


def wrapped(folder, directory, lora=False):
    model = build(folder, directory, lora)
    return trainstream.wrap(model, lr=1e-2, max_grad_norm=1.0, param_offload=True, disk_offload=directory)


def step(model, optimizer):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("lora", [False, True])
def test_the_checkpoint_is_trained_from_where_it_is(checkpoint, tmp_path, lora):
    shards = {path: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
    model, optimizer = wrapped(checkpoint, tmp_path, lora)
    twin = build(checkpoint, None, lora)
    plain = trainstream.OffloadAdamW(
        [p for p in twin.parameters() if p.requires_grad], lr=1e-2, max_grad_norm=1.0
    )
    for _ in range(3):
        assert_bit_equal(step(model, optimizer), step(twin, plain))
    theirs = dict(twin.named_parameters())
    adopted = 0
    for name, parameter in model.named_parameters():
        value = parameter.detach().as_subclass(torch.Tensor)
        assert_bit_equal(value, theirs[name].detach())
        place = locate(value)
        span = place[0].span_of(value) if place is not None else None
        assert span is None or not parameter.requires_grad
        adopted += span is not None
    assert (adopted > 0) == lora
    assert shards == {path: path.read_bytes() for path in shards}
    trainstream.unwrap(model)
    assert shards == {path: path.read_bytes() for path in shards}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
@pytest.mark.parametrize("after", [0, 5, 11, 30, 47, 60, 85, 110, 140])
def test_trouble_on_the_disk_in_a_step_loses_nothing(checkpoint, tmp_path, after, code):
    model, optimizer = wrapped(checkpoint, tmp_path)
    twin = build(checkpoint, None, False)
    plain = trainstream.OffloadAdamW(twin.parameters(), lr=1e-2, max_grad_norm=1.0)
    for _ in range(3):  # what wrap() checks of the first steps waits for their updates
        step(model, optimizer)
        step(twin, plain)
    _C.fail_io_after(after, code)
    for _ in range(3):
        expected = step(twin, plain)
        for _ in range(3):
            try:
                loss = step(model, optimizer)
                break
            except StorageError:  # of this step, or of the update of the one before
                optimizer.zero_grad()
        assert_bit_equal(loss, expected)
    _C.fail_io_after(-1, 0)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        try:
            value = ours.detach()
        except StorageError:  # told once
            value = ours.detach()
        assert_bit_equal(value.as_subclass(torch.Tensor), theirs.detach())


INTERRUPTED = """
import signal
# A parent in the background of a shell hands down an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
import os, sys, threading, torch, trainstream
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
model, optimizer = trainstream.wrap(
    model, lr=1e-2, blocks=list(model), param_offload=True, disk_offload=sys.argv[1]
)
workers = 0
print("training", flush=True)
while True:
    model(torch.randn(3, 512)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if workers < 3:  # a forked worker ends, and takes nothing along
        workers += 1
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("worker", flush=True)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.07, 0.21, 0.4])
def test_ctrl_c_at_any_moment_ends_training_and_leaves_no_file(tmp_path, wait_s):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(4):
        assert process.stdout.readline() in ("training\n", "worker\n"), process.stderr.read()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)  # some moment of a step
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []
