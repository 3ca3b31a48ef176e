"""Tensors that are brought to a device in pieces, read ahead by threads: bits, order, memory, errors."""

import os
import signal
import threading
import time
import weakref

import pytest
import safetensors.torch
import torch
from conftest import tiny_model

from ts_core.errors import CheckpointError, StateError, StorageError
from ts_core.testing import assert_bit_equal, gpu
from ts_hf import Checkpoint, load_model, read_ahead, streaming
from ts_hf.read_ahead import Conveyor
from ts_hf.safetensors_reader import SafetensorsReader
from ts_paging import pinned_bytes
from ts_quant import QuantizedTensor

CPU = torch.device("cpu")


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ts-hf-read")]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    assert not readers()


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a page, a ring of a few: tensors of this test's size travel in many."""
    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(read_ahead, "_RING_BYTES", 5 * 4096)


@pytest.fixture
def conveyed(small_pieces, monkeypatch):
    """RAM stands for a device; counts the tensors that travelled."""
    monkeypatch.setattr(streaming, "carries", lambda device: True)
    return counted(monkeypatch)


def counted(monkeypatch):
    taken, take = [], Conveyor.take

    def noting(self, name, dtype):
        taken.append(name)
        return take(self, name, dtype)

    monkeypatch.setattr(Conveyor, "take", noting)
    return taken


def checkpoint_of(folder, tensors):
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def several(folder):
    """Tensors of many sizes and dtypes: empty, a scalar, less than a piece, exactly pieces, odd ends."""
    made = torch.Generator().manual_seed(0)
    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "small": torch.randn(7, generator=made).bfloat16(),
        "whole": torch.randn(4, 1024, generator=made),
        "odd": torch.randn(3, 2001, generator=made).half(),
        "bools": torch.rand(9000, generator=made) < 0.5,
        "longs": torch.randint(-(2**62), 2**62, (5003,), generator=made),
        "complexes": torch.randn(1501, 2, generator=made).view(torch.complex64),
    }
    return checkpoint_of(folder, tensors), tensors


def parts_of(model):
    """The plain tensors behind a model's parameters and buffers, by name."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        packed = tensor.packed if isinstance(tensor, QuantizedTensor) else {"": tensor.detach()}
        found |= {f"{name}:{part}": value for part, value in packed.items()}
    return found


def assert_same_parts(ours, theirs):
    mine, other = parts_of(ours), parts_of(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype, name
        assert mine[name].device == tensor.device, name
        assert_bit_equal(mine[name].cpu(), tensor.cpu())


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other)


# -- the conveyor -------------------------------------------------------------------------------------------


def test_every_tensor_arrives_bit_for_bit_in_order(tmp_path, small_pieces, monkeypatch):
    slots, make = [], read_ahead._Slot

    def noted(nbytes, device):
        slot = make(nbytes, device)
        slots.append(weakref.ref(slot))
        return slot

    monkeypatch.setattr(read_ahead, "_Slot", noted)
    folder, tensors = several(tmp_path / "a")
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, checkpoint.keys(), CPU) as conveyor:
        assert 0 < len(readers()) <= 4
        for name in checkpoint:
            assert name in conveyor
            taken = conveyor.take(name, tensors[name].dtype)
            assert same(taken, tensors[name]), name
            assert name not in conveyor
        with pytest.raises(StateError, match="next tensor is None"):
            conveyor.take("odd", torch.float16)
    assert len(slots) == 5
    assert not any(slot() for slot in slots)


def test_a_cast_is_that_of_the_whole_tensor(tmp_path, small_pieces):
    folder, tensors = several(tmp_path / "a")
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, ["whole", "odd"], CPU) as conveyor:
        for name in ("whole", "odd"):
            assert_bit_equal(conveyor.take(name, torch.bfloat16), tensors[name].bfloat16())


def test_another_tensors_turn_is_refused(tmp_path, small_pieces):
    folder, _ = several(tmp_path / "a")
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, ["odd", "whole"], CPU) as conveyor:
        with pytest.raises(StateError, match="the next tensor is 'odd', not 'whole'"):
            conveyor.take("whole", torch.float32)
        assert conveyor.take("odd", torch.float16).shape == (3, 2001)
    with pytest.raises(StateError, match="next tensor is None"):
        conveyor.take("whole", torch.float32)
    conveyor.close()


@pytest.mark.parametrize("names", [[], ["empty"], ["scalar"], ["small", "empty"]])
def test_next_to_nothing_travels_too(tmp_path, names):
    folder, tensors = several(tmp_path / "a")
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, names, CPU) as conveyor:
        for name in names:
            assert same(conveyor.take(name, tensors[name].dtype), tensors[name])


def test_a_name_that_is_not_there(tmp_path):
    folder, _ = several(tmp_path / "a")
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="no tensor 'x'"):
        Conveyor(checkpoint, ["odd", "x"], CPU)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([100], 2 * 4096),
        ([50_000], 50_000),
        ([5 << 20] * 3, 5 << 20),
        ([300 << 20, 10], 128 << 20),
    ],
)
def test_the_ring_is_no_larger_than_one_tensor(tmp_path, monkeypatch, sizes, most):
    folder = tmp_path / "a"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        entries = {
            f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [end - size, end]}
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        }
        header = str(entries).replace("'", '"').encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    made, slot = [], read_ahead._Slot
    monkeypatch.setattr(
        read_ahead, "_Slot", lambda nbytes, device: made.append(nbytes) or slot(nbytes, device)
    )
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, checkpoint.keys(), CPU) as conveyor:
        for name in checkpoint:
            conveyor.take(name, torch.uint8)
        assert sum(made) <= conveyor.ring_bytes <= most


def test_it_works_without_a_thread(tmp_path, small_pieces, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    folder, tensors = several(tmp_path / "a")
    monkeypatch.setattr(threading.Thread, "start", refused)
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, checkpoint.keys(), CPU) as conveyor:
        for name in checkpoint:
            assert same(conveyor.take(name, tensors[name].dtype), tensors[name])


def test_memory_is_read_into_only_when_the_copy_out_of_it_is_through(tmp_path, small_pieces, monkeypatch):
    """A device that copies late: what leaves a slot is taken from it a while after the copy was issued."""
    lock, under_way, clashes, most = threading.Lock(), {}, [], []

    class Late(read_ahead._Slot):
        def leaves(self):
            with lock:
                under_way[self.memory.data_ptr()] = time.monotonic() + 0.002
                most.append(len(under_way))

        def settle(self):
            with lock:
                due = under_way.get(self.memory.data_ptr(), 0.0)
            time.sleep(max(due - time.monotonic(), 0.0))
            with lock:
                under_way.pop(self.memory.data_ptr(), None)

    part = SafetensorsReader.read_part

    def reading(self, name, offset, out):
        with lock:
            clashes.extend([name] if out.data_ptr() in under_way else [])
        part(self, name, offset, out)

    monkeypatch.setattr(read_ahead, "_Slot", Late)
    monkeypatch.setattr(SafetensorsReader, "read_part", reading)
    folder = checkpoint_of(tmp_path / "a", {f"t{i}": torch.arange(9000) + i for i in range(6)})
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, checkpoint.keys(), CPU) as conveyor:
        for index in range(6):
            assert torch.equal(conveyor.take(f"t{index}", torch.int64), torch.arange(9000) + index)
    assert not clashes
    assert max(most) >= 1


# -- errors -------------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_meanwhile(tmp_path, small_pieces):
    folder = checkpoint_of(tmp_path / "a", {"weight": torch.zeros(200_000)})
    with Checkpoint(folder) as checkpoint, Conveyor(checkpoint, ["weight"], CPU) as conveyor:
        os.truncate(folder / "model.safetensors", 400_000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*shrank"):
            conveyor.take("weight", torch.float32)


def test_a_disk_that_fails(llama_folder, conveyed, monkeypatch):
    preadv, lock, count = os.preadv, threading.Lock(), iter(range(10**6))

    def failing(descriptor, buffers, offset):
        with lock:
            if next(count) >= 6:
                raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match=r"reading .*Input/output error") as caught:
        load_model(llama_folder)
    assert caught.value.errno == 5
    assert not readers()


def test_short_reads_are_continued(llama_folder, conveyed, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
    ours = load_model(llama_folder, None, "fp32")
    monkeypatch.undo()
    assert_same_parts(ours, load_model(llama_folder, None, "fp32"))


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="no signals")
def test_ctrl_c_ends_the_threads(llama_folder, conveyed, monkeypatch):
    part, lock, count = SafetensorsReader.read_part, threading.Lock(), iter(range(10**6))

    def slow(self, name, offset, out):
        with lock:
            if next(count) == 6:
                signal.raise_signal(signal.SIGINT)
        time.sleep(0.005)
        part(self, name, offset, out)

    monkeypatch.setattr(SafetensorsReader, "read_part", slow)
    with pytest.raises(KeyboardInterrupt):
        load_model(llama_folder)
    assert not readers()


def test_an_error_does_not_wait_for_a_dead_disk(tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.05)
    folder = checkpoint_of(tmp_path / "a", {"weight": torch.zeros(200_000)})
    begun, awake = threading.Event(), threading.Event()

    def hanging(*_):
        begun.set()
        awake.wait()

    def interrupted(checkpoint):
        with Conveyor(checkpoint, ["weight"], CPU):
            assert begun.wait(60)
            raise ValueError("on purpose")

    monkeypatch.setattr(SafetensorsReader, "read_part", hanging)
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match="on purpose"):
        interrupted(checkpoint)
    left = readers()
    assert left
    awake.set()
    for thread in left:
        thread.join(60)
    assert not readers()


def test_a_model_that_does_not_fit_the_files_ends_the_threads(tmp_path, conveyed):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has shape"):
        load_model(tmp_path, vocab_size=96)
    assert not readers()


# -- load_model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_model_is_the_same_whichever_way_its_weights_come(kind, quantize, tmp_path, conveyed, monkeypatch):
    tiny_model(kind).save_pretrained(tmp_path, max_shard_size="20KB")
    hints = []
    monkeypatch.setattr(Checkpoint, "expect", lambda self, name: hints.append(name))
    ours = load_model(tmp_path, quantize)
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(conveyed) == sorted(checkpoint)
    assert not hints
    monkeypatch.undo()
    assert_same_parts(ours, load_model(tmp_path, quantize))


def test_what_moves_up_is_brought_again(llama_folder, conveyed, monkeypatch):
    ours = load_model(llama_folder, "nf4", keep_precise=0.3)
    assert ours.trainstream_receipt["kept_precise"] > 0
    with Checkpoint(llama_folder) as checkpoint:
        assert len(conveyed) == len(checkpoint) + ours.trainstream_receipt["kept_precise"]
    monkeypatch.undo()
    assert_same_parts(ours, load_model(llama_folder, "nf4", keep_precise=0.3))


def test_without_room_for_conversions_they_are_made_in_ram(tmp_path, conveyed, monkeypatch):
    tiny_model("mixtral").save_pretrained(tmp_path)
    monkeypatch.setattr(streaming._Stream, "room_to_convert", lambda self, targets: False)
    ours = load_model(tmp_path, "nf4")
    assert conveyed
    assert not any("experts" in name for name in conveyed)
    monkeypatch.undo()
    assert_same_parts(ours, load_model(tmp_path, "nf4"))


def test_what_lives_in_files_does_not_travel(llama_folder, tmp_path, conveyed):
    load_model(llama_folder, dtype="bf16", disk_offload=tmp_path)
    assert not conveyed


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize(("quantize", "dtype"), [(None, "fp32"), (None, "bf16"), ("nf4", "bf16")])
def test_a_gpu_gets_the_same_bits(kind, quantize, dtype, tmp_path, small_pieces, monkeypatch):
    tiny_model(kind, hidden_size=64).save_pretrained(tmp_path, max_shard_size="50KB")
    taken, locked = counted(monkeypatch), pinned_bytes()
    # The GPU is busy at first: every slot of the ring waits for a copy out of it.
    torch.cuda._sleep(200_000_000)
    ours = load_model(tmp_path, quantize, dtype, device="cuda")
    assert taken
    assert pinned_bytes() == locked
    monkeypatch.setattr(streaming, "carries", lambda device: False)
    assert_same_parts(ours, load_model(tmp_path, quantize, dtype, device="cuda"))
    if quantize is None:
        plain = parts_of(load_model(tmp_path, quantize, dtype))
        for name, _ in ours.named_parameters():
            assert_bit_equal(parts_of(ours)[f"{name}:"].cpu(), plain[f"{name}:"])


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_lags_behind_gets_whole_tensors_on_any_stream(tmp_path):
    tensors = {f"t{i}": torch.arange(3 << 20, dtype=torch.int32) + i for i in range(12)}
    folder = checkpoint_of(tmp_path / "a", tensors)
    locked, stream = pinned_bytes(), torch.cuda.Stream()
    with torch.cuda.stream(stream), Checkpoint(folder) as checkpoint:
        with Conveyor(checkpoint, checkpoint.keys(), torch.device("cuda")) as conveyor:
            made = {}
            for name in checkpoint:
                torch.cuda._sleep(20_000_000)
                made[name] = conveyor.take(name, torch.int32) + 0
        for name, tensor in tensors.items():
            assert torch.equal(made[name].cpu(), tensor), name
    assert pinned_bytes() == locked


def test_only_loads_to_a_gpu_travel(llama_folder, small_pieces, monkeypatch):
    taken = counted(monkeypatch)
    load_model(llama_folder, device="cpu")
    assert not taken
    assert streaming.carries(torch.device("cuda:1"))
