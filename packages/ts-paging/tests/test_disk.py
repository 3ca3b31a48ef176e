import os
import stat
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import DTYPES, ModelStore, assert_same_bits, random_bits

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, StateError, StorageError
from ts_core.testing import float_tensors, shapes
from ts_paging import _C, DiskStore, WaitPolicy
from ts_paging.layout import flat_bytes

small = shapes(min_dims=0, max_dims=3, min_side=0, max_side=70, max_numel=6000)
PAGE = 4096


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "plain"])
def store(request, tmp_path_factory):
    with DiskStore(tmp_path_factory.mktemp("store"), direct=request.param) as made:
        if request.param and not made.direct:
            pytest.skip("this file system takes no direct I/O")
        yield made


@given(small, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_bits_shape_and_dtype_come_back(store, shape, dtype, seed):
    tensor = random_bits(shape, dtype, seed)
    store.write("x", tensor)
    again = store.read("x")
    assert_same_bits(again, tensor)
    assert again.stride() == tensor.stride()
    out = torch.zeros(shape, dtype=dtype)
    assert store.read("x", out) is out
    assert_same_bits(out, tensor)


@given(float_tensors(torch.bfloat16), st.booleans())
def test_any_layout_is_stored_and_read_into_any_layout(store, tensor, transposed):
    store.write("x", tensor)
    assert_same_bits(store.read("x"), tensor)
    out = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if transposed and out.ndim >= 2:
        out = out.transpose(0, 1).contiguous().transpose(0, 1)
    store.read("x", out)
    assert_same_bits(out, tensor)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "delete", "write_async", "read_async"]),
            st.sampled_from(["a", "b/../..", "ü"]),
            st.sampled_from([0, 1, 100, 1024, 1025, 5000]),
            st.integers(0, 2**31),
        ),
        max_size=25,
    )
)
def test_sequences_equal_a_dict(store, steps):
    for key in store:
        store.delete(key)
    model, running, reserved = ModelStore(), [], {}
    for what, key, size, seed in steps:
        tensor = random_bits((size,), torch.float32, seed)
        if what.startswith("write"):
            model.write(key, tensor)
            reserved[key] = -(-4 * size // PAGE) * PAGE
            if what == "write":
                store.write(key, tensor)
            else:
                running.append(store.write_async(key, tensor))
        elif key not in model.tensors:
            with pytest.raises(KeyError):
                store.delete(key) if what == "delete" else store.read(key)
        elif what == "delete":
            store.delete(key)
            del model.tensors[key], reserved[key]
        elif what == "read":
            model.check(key, store.read(key))
        else:
            ticket = store.read_async(key)
            running.append(ticket)
            model.check(key, ticket.wait())
        assert store.used_bytes == sum(reserved.values())
        assert sorted(store.keys()) == sorted(model.tensors)
        assert all((k in store) == (k in model.tensors) for k in ("a", "b/../..", "ü"))
    for ticket in running:
        ticket.wait()
        assert ticket.done()
    for key in model.tensors:
        model.check(key, store.read(key))
    assert len(store) == len(model.tensors)
    sizes = [entry.stat().st_size for entry in store.folder.iterdir() if entry.name.endswith(".bin")]
    assert sum(sizes) == store.used_bytes


def test_a_tensor_of_many_pieces_is_shared_by_the_threads(store):
    # 4 MiB a piece, not a multiple of the block, from memory that is not aligned.
    tensor = random_bits((9 * 1024 * 1024 + 77,), torch.uint8, 1)[5:]
    store.write("large", tensor)
    assert torch.equal(store.read("large"), tensor)
    store.delete("large")


def test_reads_see_the_write_before_and_not_the_one_after(store):
    first, second = random_bits((200_000,), torch.int32, 1), random_bits((200_000,), torch.int32, 2)
    store.write_async("x", first)
    read = store.read_async("x")
    store.write_async("x", second)
    assert torch.equal(read.wait(), first)
    assert torch.equal(store.read("x"), second)


def test_frozen_weights_with_every_pattern(store):
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    payloads = torch.tensor([0x7F800001, -0x3EDCBB, -(2**31), 1, 0x007FFFFF], dtype=torch.int32)
    conv = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for key, tensor in {"bf16": patterns, "fp32": payloads.view(torch.float32), "conv": conv}.items():
        store.write(key, torch.nn.Parameter(tensor, requires_grad=False))
        again = store.read(key)
        assert_same_bits(again, tensor)
        assert again.stride() == tensor.stride()


def test_files_are_private(tmp_path):
    with DiskStore(tmp_path) as store:
        store.write("x", torch.ones(3))
        assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
        modes = [stat.S_IMODE(entry.stat().st_mode) for entry in store.folder.iterdir()]
        assert modes == [0o600] * 2
        assert store.folder.name.startswith(f"trainstream-{os.getpid()}-")
        assert store.folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_it_is_dropped(tmp_path):
    DiskStore(tmp_path).write("x", torch.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_room_is_reserved_before_bytes_are_written(tmp_path):
    with DiskStore(tmp_path) as store:
        store.write("x", torch.zeros(100_000))
        (file,) = store.folder.glob("*.bin")
        assert file.stat().st_blocks * 512 >= 400_000
        assert file.stat().st_size == store.used_bytes == 401_408


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20_000)), max_size=20))
def test_the_budget_is_a_hard_limit(steps):
    budget = 8 * PAGE
    with DiskStore(budget=budget) as store:
        model, reserved = {}, {}
        for key, size in steps:
            tensor = random_bits((size,), torch.uint8, size)
            after = {**reserved, key: -(-size // PAGE) * PAGE}
            if sum(after.values()) <= budget:
                store.write(key, tensor)
                model[key], reserved = tensor, after
            else:
                with pytest.raises(StorageError, match=r"bytes wanted.*bytes free.*budget") as seen:
                    store.write(key, tensor)
                assert str(store.folder.parent) in str(seen.value)
            assert store.used_bytes == sum(reserved.values())
        for key, tensor in model.items():
            assert torch.equal(store.read(key), tensor)  # a refused write keeps the old value


def test_an_offset_beyond_four_gib(tmp_path):
    # The file is sparse: two tensors, the second at 5 GiB.
    file = tmp_path / "sparse"
    file.touch(0o600)
    first, second = random_bits((3, 4096), torch.uint8, 1), random_bits((4096,), torch.uint8, 2)
    pool = _C.Disk(2, 4096, *WaitPolicy().native())
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for direct in (False, True):
            for write in (True, False):
                for offset, tensor in ((0, first), (5 << 30, second)):
                    data = flat_bytes(tensor if write else torch.zeros_like(tensor))
                    ticket = pool.submit(write, folder, "sparse", str(file), data, offset, direct)
                    try:
                        ticket.wait()
                    except StorageError:
                        assert direct  # not taken by this file system
                        continue
                    assert torch.equal(data, flat_bytes(tensor))
    finally:
        os.close(folder)
        pool.close()
    assert file.stat().st_size == (5 << 30) + 4096
    assert file.stat().st_blocks * 512 < 1 << 20


def test_threads_may_share_a_store(tmp_path):
    def work(store, key):
        for i in range(20):
            store.write(key, torch.full((5000,), float(i)))
            results.append(float(store.read(key).mean()) == i)

    results = []
    with DiskStore(tmp_path, threads=2) as store:
        threads = [threading.Thread(target=work, args=(store, str(i))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 80


def test_a_long_queue_does_not_use_up_the_descriptors(tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with DiskStore(tmp_path, threads=2) as store:
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, before[1]))
        try:
            tickets = [store.write_async(str(i), torch.full((2000,), float(i))) for i in range(100)]
            for ticket in tickets:
                ticket.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert [float(store.read(str(i)).mean()) for i in range(100)] == list(range(100))


def test_close_ends_it(tmp_path):
    store = DiskStore(tmp_path)
    tickets = [store.write_async(str(i), torch.zeros(200_000)) for i in range(20)]
    store.close()
    store.close()
    for ticket in tickets:
        assert ticket.done()
        try:
            ticket.wait()
        except StateError as error:
            assert "closed before" in str(error)  # noqa: PT017 - either outcome is right
    for call in (lambda: store.read("0"), lambda: store.write("0", torch.ones(1)), lambda: store.delete("0")):
        with pytest.raises(StateError, match="closed"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_named(store):
    store.write("x", torch.zeros(2, 3))
    with pytest.raises(ArgumentTypeError, match="dtype"):
        store.read("x", torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="shape"):
        store.read("x", torch.zeros(3, 2))
    with pytest.raises(ArgumentTypeError, match="CPU"):
        store.read("x", torch.zeros(2, 3, device="meta"))
    with pytest.raises(ArgumentTypeError, match="out"):
        store.read("x", [0.0])
    with pytest.raises(ArgumentTypeError, match="key"):
        store.write(3, torch.zeros(1))
    with pytest.raises(ArgumentTypeError, match="tensor"):
        store.write("y", [0.0])
    with pytest.raises(ArgumentTypeError, match="meta"):
        store.write("y", torch.zeros(1, device="meta"))
    assert "y" not in store


@pytest.mark.parametrize("options", [{"direct": 1}, {"threads": 0}, {"budget": "much"}, {"budget": -1}])
def test_bad_options_are_refused(tmp_path, options):
    with pytest.raises(OptionError):
        DiskStore(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
