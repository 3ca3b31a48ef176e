"""Weights that the device has no room for stay in RAM at `unwrap()`, which is said, and compute there."""

import json
import logging

import pytest
import torch
from torch import nn

import trainstream
from trainstream import _staging


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


@pytest.mark.parametrize("short", [0, 3])
def test_what_has_no_room_is_named_and_has_the_same_values(short, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRAINSTREAM_EVENTS", str(tmp_path / "events.jsonl"))
    model, optimizer = trainstream.wrap(build(), lr=1e-2, param_offload=True, disk_offload=tmp_path)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    expected = [p.detach().clone() for p in model.parameters()]
    copied, left = _staging._copied, [short]

    def fails_at_first(value, device):
        if left[0]:
            left[0] -= 1
            if left[0] % 2 == 0:
                raise torch.OutOfMemoryError("no room")
        return copied(value, device)

    monkeypatch.setattr(_staging, "_copied", fails_at_first)
    with caplog.at_level(logging.INFO, logger="trainstream"):
        model = trainstream.unwrap(model)
    told = [record.message for record in caplog.records if "has no room" in record.message]
    # Of three tries the first and the third fail; what failed is tried on the host in between.
    assert told == (["cpu has no room for 2 of 8 weights (1.06 KiB): they are in RAM"] if short else [])
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), expected, strict=True))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    model(torch.ones(2, 16)).sum().backward()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "end"
