import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import assert_bit_equal, devices, float_tensors, seeded


class Halving:
    """A codec that keeps bf16."""

    def __init__(self, name="half"):
        self.name = name

    def encode(self, tensor, block_size):
        return {"codes": tensor.to(torch.bfloat16)}

    def decode(self, packed, shape, dtype, block_size, out=None):
        values = packed["codes"].reshape(shape).to(dtype)
        return values if out is None else out.copy_(values)

    def packed_bytes(self, numel, block_size):
        return 2 * numel


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Each test has registries of its own."""
    monkeypatch.setattr(registry, "_codecs", {})
    monkeypatch.setattr(registry, "_allocator", registry.TorchHostAllocator())
    monkeypatch.setattr(registry, "_engine", registry.TorchCopyEngine())


def test_a_codec_is_found_under_its_name_and_can_be_replaced():
    assert registry.codecs() == ()
    first, second = Halving(), Halving()
    registry.register_codec(first)
    assert registry.codec("half") is first
    registry.register_codec(second)
    assert registry.codec("half") is second
    assert isinstance(first, registry.Codec)
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(second.decode(second.encode(tensor, 2), (2, 3), torch.float32, 2), tensor)


@given(st.lists(st.text(min_size=1), unique=True, max_size=6), st.text())
def test_codecs_are_listed_sorted_and_unknown_ones_refused(names, other):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_codecs", {})
        for name in names:
            registry.register_codec(Halving(name))
        assert registry.codecs() == tuple(sorted(names))
        if other not in names:
            with pytest.raises(OptionError, match="option codec") as caught:
                registry.codec(other)
            assert all(repr(name) in str(caught.value) for name in names)


@pytest.mark.parametrize("name", [None, 3, ["nf4"], "nf4"])
def test_an_unknown_codec_says_where_some_come_from(name):
    with pytest.raises(OptionError, match="import ts_quant"):
        registry.codec(name)


@pytest.mark.parametrize("codec", [None, object(), Halving, "nf4"])
def test_what_is_no_codec_is_refused(codec):
    with pytest.raises(ArgumentTypeError, match="name, encode, decode and packed_bytes"):
        registry.register_codec(codec)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_codec_needs_a_name(name):
    with pytest.raises(ArgumentError, match=r"codec\.name"):
        registry.register_codec(Halving(name))


@given(st.integers(0, 5000))
def test_the_plain_allocator_makes_bytes(nbytes):
    tensor = registry.host_allocator().empty(nbytes)
    assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (torch.uint8, (nbytes,), "cpu")
    assert registry.host_allocator().pinned == torch.cuda.is_available()
    assert tensor.is_pinned() == (torch.cuda.is_available() and nbytes > 0)


def test_the_plain_allocator_can_be_told_not_to_pin():
    allocator = registry.TorchHostAllocator(pinned=False)
    assert isinstance(allocator, registry.HostAllocator)
    assert allocator.pinned is False
    assert not allocator.empty(8).is_pinned()
    with pytest.raises(ArgumentError, match="nbytes: expected an integer >= 0, given -1"):
        allocator.empty(-1)


def test_allocator_and_engine_are_replaced_and_put_back():
    class Allocator:
        pinned = False

        def empty(self, nbytes):
            return torch.zeros(nbytes, dtype=torch.uint8)

    class Engine:
        def h2d(self, dst, src):
            return registry._Done()

        d2h = h2d

    allocator, engine = Allocator(), Engine()
    first = registry.set_host_allocator(allocator)
    assert isinstance(first, registry.TorchHostAllocator)
    assert registry.host_allocator() is allocator
    assert registry.set_host_allocator(None) is allocator
    assert isinstance(registry.host_allocator(), registry.TorchHostAllocator)
    before = registry.set_copy_engine(engine)
    assert isinstance(before, registry.TorchCopyEngine)
    assert registry.copy_engine() is engine
    assert registry.set_copy_engine(None) is engine
    assert isinstance(registry.copy_engine(), registry.TorchCopyEngine)


@pytest.mark.parametrize("value", [object(), registry.TorchHostAllocator, "pinned", 3])
def test_what_is_no_allocator_or_engine_is_refused(value):
    with pytest.raises(ArgumentTypeError, match=r"pinned and empty\(nbytes\)"):
        registry.set_host_allocator(value)
    with pytest.raises(ArgumentTypeError, match=r"h2d\(dst, src\) and d2h\(dst, src\)"):
        registry.set_copy_engine(value)


@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_copies_there_and_back_keep_every_bit(device, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    source = data.draw(float_tensors(dtype))
    engine = registry.copy_engine()
    there = torch.empty(source.shape, dtype=dtype, device=device)
    ticket = engine.h2d(there, source)
    assert isinstance(ticket, registry.CopyTicket)
    ticket.wait_stream()
    doubled = there + 0.0
    back = torch.empty(source.shape, dtype=dtype)
    engine.d2h(back, there).wait()
    assert_bit_equal(back, source)
    assert_bit_equal(doubled, source + 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_are_ordered_after_the_work_of_the_current_stream_and_before_the_waiting_one():
    engine = registry.TorchCopyEngine()
    host = registry.TorchHostAllocator().empty(4 << 20).view(torch.float32)
    with seeded(0):
        for step in range(20):
            torch.cuda._sleep(10_000_000)
            source = torch.full((1 << 20,), float(step), device="cuda")
            ticket = engine.d2h(host, source)
            del source
            torch.full((1 << 20,), -1.0, device="cuda")
            ticket.wait()
            assert torch.equal(host, torch.full((1 << 20,), float(step)))
            target = torch.empty(1 << 20, device="cuda")
            other = torch.cuda.Stream()
            ticket = engine.h2d(target, host)
            ticket.wait_stream(other)
            with torch.cuda.stream(other):
                assert (target + 1).sum().item() == (step + 1) * 2.0**20


def test_copies_do_not_record_a_graph():
    weight = torch.zeros(3, requires_grad=True)
    registry.copy_engine().h2d(weight, torch.ones(3)).wait()
    assert torch.equal(weight, torch.ones(3))
    out = torch.empty(3)
    registry.copy_engine().d2h(out, weight).wait()
    assert not out.requires_grad


def test_bad_copies_are_refused():
    engine = registry.copy_engine()
    host, meta = torch.zeros(3), torch.zeros(3, device="meta")
    with pytest.raises(ArgumentTypeError, match=r"h2d\] src: expected a CPU tensor, given one on meta"):
        engine.h2d(host, meta)
    with pytest.raises(ArgumentTypeError, match=r"d2h\] dst: expected a CPU tensor, given one on meta"):
        engine.d2h(meta, host)
    for copy in (engine.h2d, engine.d2h):
        with pytest.raises(ArgumentError, match=r"dst: expected shape \(3,\), given \(1,\)"):
            copy(torch.zeros(1), host)


def test_the_cuda_path_keeps_its_order(monkeypatch):
    """The order of stream operations, with CUDA's parts replaced by a record of the calls."""
    calls = []

    class Stream:
        def __init__(self, device=None):
            calls.append("stream made")

        def wait_stream(self, other):
            calls.append("side waits for current")

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *error):
            calls.append("leave")

    class Event:
        def record(self, stream):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

        def wait(self, stream):
            calls.append(f"wait {stream}")

    class Tensor:
        def __init__(self, kind):
            self.device = torch.device(kind)
            self.shape = torch.Size([1])

        def copy_(self, source, non_blocking=False):
            assert non_blocking
            calls.append("copy")

        def record_stream(self, stream):
            calls.append(f"keep {self.device}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "current")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    engine = registry.TorchCopyEngine()
    issue = ["side waits for current", "enter", "copy", "keep cuda:0", "record", "leave"]
    ticket = engine.h2d(Tensor("cuda:0"), Tensor("cpu"))
    assert calls == ["stream made", *issue]
    calls.clear()
    assert isinstance(engine.d2h(Tensor("cpu"), Tensor("cuda:0")), registry.CopyTicket)
    engine.d2h(Tensor("cpu"), Tensor("cuda:0"))
    assert calls == ["stream made", *issue, *issue]  # one stream per direction
    calls.clear()
    ticket.wait_stream()
    ticket.wait_stream("mine")
    ticket.wait()
    assert calls == ["wait current", "wait mine", "synchronize"]


def test_a_plain_tensor_is_no_packed_weight_and_a_packed_one_is():
    class Packed(torch.Tensor):
        packed: dict

        def dequantize(self, dtype=None, *, out=None):
            return self

        def __tensor_flatten__(self):
            return ["codes"], None

    made = torch.zeros(2).as_subclass(Packed)
    assert not isinstance(made, registry.PackedWeight)
    made.packed = {"codes": torch.zeros(2)}
    assert isinstance(made, registry.PackedWeight)
    for other in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), None):
        assert not isinstance(other, registry.PackedWeight)
