"""A run under a real memory limit of the kernel, on a machine whose own figures promise far more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup/memory")  # version 1; under version 2 a process cannot leave a busy group
MIB = 1 << 20
RUN = """
import pathlib, sys
import torch, transformers, trainstream
from ts_core.memory import host_budget
from ts_core.usage import host_usage, release_free_memory

group, folder = pathlib.Path(sys.argv[1]), sys.argv[2]

def train(limited):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=4, vocab_size=512
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model, optimizer = trainstream.wrap(
        model, None, lr=1e-3, device="cpu", quantize="none", disk_offload=folder
    )
    session, losses = model._trainstream_session, []
    if limited:
        print("paged", len(session.plan.paged), "of", len(session.plan.blocks))
    for step in range(12):
        if limited and step == 3:  # while the run is under way, the limit sinks
            lower = int((group / "memory.limit_in_bytes").read_text()) - (16 << 20)
            (group / "memory.limit_in_bytes").write_text(str(lower))
        length = 32 if step < 10 else 64
        ids = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for line in session.events.events if limited else ():
        print("event", line)
    return losses

expected = train(False)
release_free_memory(collect=True)
(group / "cgroup.procs").write_text(str(__import__("os").getpid()))
used = int((group / "memory.usage_in_bytes").read_text())
whole = host_usage().used_bytes
# What is used already is not charged to the group that a process has moved to.
(group / "memory.limit_in_bytes").write_text(str(used + (150 << 20)))
budget = host_budget(ranks=1)
print("budget", budget.available_bytes >> 20, budget.source)
assert budget.available_bytes <= 150 << 20 < budget.total_bytes
got = train(True)
assert got == expected, (got, expected)
print("equal", len(got))
"""


@pytest.fixture
def group():
    path = GROUPS / f"trainstream-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(512 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield path
    path.rmdir()


def test_a_run_goes_on_under_the_kernel_s_limit(group, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(group), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "equal 12" in done.stdout
    assert str(group) in done.stdout  # the budget is the group's
    paged, blocks = next(line for line in done.stdout.splitlines() if line.startswith("paged")).split()[1::2]
    assert int(paged) > 0
    assert int(blocks) >= int(paged)
    assert "event " in done.stdout
