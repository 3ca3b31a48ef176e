"""In which order a block's weights come: copies are waited for before anything is decoded from them."""

from types import SimpleNamespace

import pytest
import torch

from ts_paging import pager as module
from ts_paging.pager import WeightPager


class Pending:
    """A guard whose update is waited for, or fails."""

    def __init__(self, error=None):
        self.pending, self.error = object(), error

    def wait(self):
        if self.error is not None:
            raise self.error
        self.pending = None


@pytest.fixture
def started(monkeypatch):
    """A pager with stand-ins for copies and decoding, that notes what happens in which order."""
    told, guards = [], {}

    def copies(dsts, srcs, priority=0):
        number = len([line for line in told if line.startswith("copy")])
        told.append(f"copy {number}")
        return SimpleNamespace(wait_stream=lambda: told.append(f"wait {number}"))

    monkeypatch.setattr(module, "h2d_many", copies)
    monkeypatch.setattr(module, "guard_of", lambda parameter: guards.get(id(parameter)))
    monkeypatch.setattr(module, "_check", lambda *args: None)
    monkeypatch.setattr(module, "_unpacking", lambda *args: lambda: told.append("decode"))
    pager = object.__new__(WeightPager)
    pager.wait_s = 0.0

    def move(source, target, batch):
        batch[0].append(source)
        batch[1].append(source)
        return source, None

    monkeypatch.setattr(WeightPager, "_move", lambda self, *args: move(*args))
    packed = torch.nn.Parameter(torch.zeros(4), False)
    packed.packed = {"codes": torch.zeros(4)}
    trained = torch.nn.Parameter(torch.zeros(4))
    slot = SimpleNamespace(owner=None, arriving=[])
    block = SimpleNamespace(
        slot=slot,
        fill_views=[torch.zeros(4), torch.zeros(4)],
        parameters=[packed, trained],
        seats=[SimpleNamespace(places=lambda target: None)] * 2,
        filled=lambda: told.append("filled"),
    )
    return pager, block, trained, guards, told


def test_packed_weights_are_decoded_after_all_copies(started):
    pager, block, trained, guards, told = started
    guards[id(trained)] = Pending()
    pager._start(block)
    pager._finish(block.slot)
    assert told == ["copy 0", "copy 1", "filled", "wait 0", "wait 1", "decode"]


def test_what_crosses_is_waited_for_after_a_failure(started):
    pager, block, trained, guards, told = started
    guards[id(trained)] = Pending(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pager._start(block)
    assert block.slot.owner is None
    pager._finish(block.slot)
    assert told == ["copy 0", "wait 0"]
