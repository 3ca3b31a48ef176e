"""Tensors in files, slots and guards, against plain tensors."""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import ArgumentError, StateError, StorageError
from ts_core.guard import GuardedParameter, guard, guard_of, release
from ts_paging.files import FileTensors
from ts_paging.slots import Slot, SlotLayout, own_view

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3)


def random_bytes(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.flatten()


@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), turned=st.booleans())
def test_a_placed_tensor_is_the_tensor(shape, dtype, seed, turned):
    tensor = random_bytes(shape, dtype, seed)
    tensor = tensor.transpose(0, -1) if turned and tensor.dim() else tensor
    files = FileTensors()
    placed = files.place(tensor)
    assert (placed.dtype, placed.shape, placed.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(as_bytes(placed), as_bytes(tensor))
    key = files.key_of(placed)
    assert (key is not None) == (tensor.numel() > 0)
    assert files.key_of(tensor) is None
    if key is not None:
        # A write through the mapping reaches the next direct read.
        flat = placed.as_strided((placed.numel(),), (1,))
        flat.copy_(flat.flip(0))
        out = torch.empty_like(flat)
        files.read_async(key, out).wait()
        assert torch.equal(as_bytes(out), as_bytes(flat))
        zeros = files.like(tensor)
        assert not as_bytes(zeros).any()
        assert files.used_bytes >= 2 * tensor.numel() * tensor.element_size()
    files.close()


def test_what_has_no_room_or_gaps_is_refused():
    files = FileTensors(budget=8192)
    with pytest.raises(ArgumentError, match="dense"):
        files.place(torch.zeros(4, 4)[:, :2])
    held = files.empty(4096)
    with pytest.raises(StorageError, match="bytes wanted"):
        files.empty(1 << 20)
    with pytest.raises(ArgumentError, match="not stored yet"):
        files.store.reserve("0", files.store._entries["0"].layout)
    del held
    files.empty(8192)  # what nobody holds makes room
    folder = files.directory
    files.close()
    with pytest.raises(StateError):
        files.empty(1)
    assert not Path(folder).exists()


@given(sizes=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5), seed=st.integers(0, 2**31))
def test_slots_hold_their_tensors_apart(sizes, seed):
    tensors = [random_bytes(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(sizes)]
    layout = SlotLayout(tensors)
    slot = Slot(layout.nbytes, torch.device("cpu"))
    views = [own_view(slot.buffer, offset, t) for offset, t in zip(layout.offsets, tensors, strict=True)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(as_bytes(view), as_bytes(tensor))
        assert view.untyped_storage().data_ptr() == slot.address
    assert slot.buffer._version == 0


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), trained=st.booleans())
def test_a_guarded_parameter_behaves_as_the_parameter(values, trained):
    parameter = nn.Parameter(torch.tensor(values), requires_grad=trained)
    landed = []
    waited = []
    entry = guard(parameter, lambda p, g: landed.append(g))
    assert guard(parameter, landed.append) is entry
    assert guard_of(parameter) is entry
    assert type(parameter) is GuardedParameter
    entry.pending = lambda: waited.append(True)
    assert torch.equal(parameter * 2, torch.tensor(values) * 2)
    assert waited == [True]
    if trained:
        (parameter * 3).sum().backward()
        assert torch.equal(landed[0], torch.full((len(values),), 3.0))
        assert parameter.grad is None  # the sink's to set
    release(parameter)
    assert type(parameter) is nn.Parameter
    assert guard_of(parameter) is None
    if trained:
        (parameter * 3).sum().backward()
        assert torch.equal(parameter.grad, torch.full((len(values),), 3.0))


def test_a_guard_goes_with_its_parameter():
    parameter = nn.Parameter(torch.zeros(3))
    key = id(parameter)
    guard(parameter, lambda p, g: None)
    del parameter
    gc.collect()
    from ts_core import guard as module

    assert key not in module._table
