"""The wrapper: what a QuantizedTensor keeps through copies, moves, files and modules, and what it refuses."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, StateError
from ts_core.testing import assert_bit_equal, devices, float_tensors, make_tensor, shapes
from ts_quant import QuantizedTensor, dequantize, quantize, reference

CODECS = ("nf4", "int8")
DECODE = {"nf4": reference.dequantize_nf4, "int8": reference.dequantize_int8}
ENCODE = {"nf4": reference.quantize_nf4, "int8": reference.quantize_int8}


def packed_weight(codec="nf4", shape=(96, 128), dtype=torch.float32, seed=0, device="cpu"):
    return quantize(make_tensor(shape, dtype=dtype, seed=seed, device=device), codec)


def same_bytes(a, b):
    for name, tensor in a.packed.items():
        assert_bit_equal(tensor, b.packed[name])
    assert (a.codec, a.shape, a.dtype, a.block_size) == (b.codec, b.shape, b.dtype, b.block_size)


def packed_linear(codec="nf4", dtype=torch.float32):
    module = nn.Linear(128, 96, dtype=dtype)
    module.weight = nn.Parameter(packed_weight(codec, dtype=dtype), requires_grad=False)
    return module


# ---- quantize and dequantize ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("device", devices())
@given(data=st.data())
def test_quantize_then_dequantize(codec, device, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    x = data.draw(float_tensors(dtype, shapes(min_side=0, max_numel=3000), device))
    block_size = 2 * data.draw(st.integers(1, 80))
    qt = quantize(x, codec, block_size=block_size)
    codes, absmax = ENCODE[codec](x.cpu(), block_size)
    assert (qt.shape, qt.dtype, qt.device, qt.codec) == (x.shape, dtype, x.device, codec)
    assert_bit_equal(qt.packed["codes"], codes)
    assert_bit_equal(qt.packed["absmax"], absmax)
    assert qt.packed_bytes == registry.codec(codec).packed_bytes(x.numel(), block_size)
    want = DECODE[codec](codes, absmax, x.shape, dtype, block_size)
    assert_bit_equal(dequantize(qt), want)
    out = torch.empty(x.shape, dtype=torch.float32, device=device)
    assert dequantize(qt, out=out) is out
    assert_bit_equal(out, DECODE[codec](codes, absmax, x.shape, torch.float32, block_size))
    double = DECODE[codec](codes, absmax, x.shape, torch.float32, block_size).double()
    assert_bit_equal(dequantize(qt, torch.float64), double)
    assert_bit_equal(dequantize(qt, out=torch.empty_like(out, dtype=torch.float64)), double)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", CODECS)
def test_not_finite_is_refused_by_name(codec, value):
    x = torch.ones(4, 64)
    x[2, 5] = value
    with pytest.raises(ArgumentError, match=r"layers\.3\.weight: expected finite .* flat index 128"):
        quantize(x, codec, name="layers.3.weight")


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (OptionError, "codec", lambda: quantize(torch.ones(4), "nf5")),
        (OptionError, "fp9", lambda: quantize(torch.ones(4), "fp9")),
        (OptionError, "double_quant", lambda: quantize(torch.ones(4), double_quant=1)),
        (OptionError, "block_size", lambda: quantize(torch.ones(4), block_size=7)),
        (OptionError, "block_size", lambda: quantize(torch.ones(4), block_size=64.0)),
        (ArgumentTypeError, "floating", lambda: quantize([1.0])),
        (ArgumentTypeError, "float16", lambda: quantize(torch.ones(4, dtype=torch.int64))),
        (ArgumentTypeError, "dequantize", lambda: quantize(packed_weight())),
        (ArgumentTypeError, "QuantizedTensor", lambda: dequantize(torch.ones(4))),
        (ArgumentTypeError, "out", lambda: packed_weight().dequantize(torch.half, out=torch.ones(96, 128))),
        (ArgumentError, "shape", lambda: packed_weight().dequantize(out=torch.ones(128, 96))),
        (ArgumentTypeError, "floating dtype", lambda: packed_weight().dequantize(torch.int8)),
    ],
)
def test_bad_arguments(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_a_tensor_that_requires_grad_is_read_only():
    x = torch.ones(64, requires_grad=True)
    assert not quantize(x).requires_grad
    assert x.requires_grad


def test_meta_tensors_have_packed_shapes():
    qt = quantize(torch.empty(5, 70, device="meta"))
    assert qt.packed["codes"].shape == (175,)
    assert qt.packed["absmax"].device.type == "meta"


# ---- operations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "op",
    [
        lambda w: w + 1,
        lambda w: w.t(),
        lambda w: w.sum(dim=0),
        lambda w: torch.cat([w, w]),
        lambda w: w[3],
        lambda w: w[-2:],
        lambda w: w[:, 5],
        lambda w: w[::2],
        lambda w: w[5:2],
        lambda w: w.view(-1, 64),
        lambda w: w.reshape(48, 256),
        lambda w: w.unbind()[3],
        lambda w: w.unbind(1)[3],
        lambda w: w.expand(2, 96, 128),
        lambda w: w.expand(96, -1),
        lambda w: w.abs().max(),
        lambda w: torch.zeros_like(w),
        lambda w: w.to(torch.int32),
        lambda w: w.double(),
        lambda w: w.float().contiguous(),
        lambda w: torch.zeros(96, 128).copy_(w),
    ],
)
def test_operations_give_what_the_decoded_tensor_gives(codec, op):
    qt = packed_weight(codec)
    got, want = op(qt), op(qt.dequantize())
    if isinstance(got, QuantizedTensor):
        got = got.dequantize()
    assert_bit_equal(got, want)


@given(data=st.data())
def test_rows_stay_packed_when_they_end_between_blocks(data):
    shape = data.draw(shapes(min_dims=2, max_dims=3, max_side=12, max_numel=800))
    block_size = 2 * data.draw(st.integers(1, 8))
    qt = quantize(make_tensor(shape), data.draw(st.sampled_from(CODECS)), block_size=block_size)
    index = data.draw(st.integers(-shape[0], shape[0] - 1))
    row = qt[index]
    aligned = qt.numel() // shape[0] % block_size == 0
    assert isinstance(row, QuantizedTensor) == aligned
    assert_bit_equal(row.dequantize() if aligned else row, qt.dequantize()[index])


def test_empty_like_is_plain():
    made = torch.empty_like(packed_weight(), dtype=torch.bfloat16)
    assert type(made) is torch.Tensor
    assert (made.shape, made.dtype) == ((96, 128), torch.bfloat16)


def test_equal():
    qt = packed_weight()
    assert torch.equal(qt, qt.clone())
    assert torch.equal(qt, qt.dequantize())
    assert not torch.equal(qt, packed_weight(seed=1))
    assert not torch.equal(qt, packed_weight("int8"))


@pytest.mark.parametrize(
    "write",
    [
        lambda qt: qt.add_(1),
        lambda qt: qt.zero_(),
        lambda qt: nn.init.normal_(qt),
        lambda qt: qt.__setitem__(0, 1.0),
        lambda qt: torch.add(torch.ones(96, 128), 1, out=qt),
        lambda qt: qt.requires_grad_(),
        lambda qt: setattr(qt, "requires_grad", True),
        lambda qt: setattr(qt, "data", torch.ones(96, 128)),
        lambda qt: nn.Parameter(qt),
    ],
)
def test_writes_are_refused(write):
    qt = packed_weight()
    before = qt.clone()
    with pytest.raises(StateError), torch.no_grad():
        write(qt)
    same_bytes(qt, before)


def test_copy_moves_bytes_between_like_tensors():
    qt, other = packed_weight(), packed_weight(seed=1)
    qt.copy_(other)
    same_bytes(qt, other)
    assert qt.packed["codes"].data_ptr() != other.packed["codes"].data_ptr()
    with pytest.raises(ArgumentTypeError, match=r"nn\.Parameter\(ts_quant\.quantize"):
        qt.copy_(torch.ones(96, 128))
    with pytest.raises(ArgumentError, match="one like"):
        qt.copy_(packed_weight("int8"))


def test_repr_is_short():
    text = repr(packed_weight(shape=(1024, 64)))
    assert text.startswith("QuantizedTensor(nf4, shape=(1024, 64), dtype=float32")
    assert len(text) < 160


# ---- copies, moves, files ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "make",
    [
        torch.clone,
        torch.detach,
        copy.copy,
        copy.deepcopy,
        lambda qt: pickle.loads(pickle.dumps(qt)),
        lambda qt: qt.data,
        lambda qt: qt.cpu(),
        lambda qt: qt.contiguous(),
        lambda qt: qt.half().float(),
    ],
)
def test_copies_keep_the_bytes(codec, make):
    qt = packed_weight(codec)
    same_bytes(make(qt), qt)


def test_deepcopy_keeps_sharing_and_attributes():
    qt = nn.Parameter(packed_weight(), requires_grad=False)
    qt.note = "kept"
    first, second = copy.deepcopy([qt, qt])
    assert first is second
    assert first.note == "kept"
    assert isinstance(first, nn.Parameter)


def test_presented_dtype_is_all_that_a_dtype_change_changes():
    qt = packed_weight()
    half = qt.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.packed["codes"].data_ptr() == qt.packed["codes"].data_ptr()
    assert_bit_equal(half.dequantize(), qt.dequantize(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_moves_between_devices():
    qt = packed_weight()
    there = qt.to("cuda", non_blocking=True)
    assert there.device.type == "cuda"
    there.record_stream(torch.cuda.current_stream())
    same_bytes(there.cpu(), qt)
    assert_bit_equal(there.dequantize(), qt.dequantize())
    pinned = qt.pin_memory()
    assert pinned.is_pinned()
    assert not qt.is_pinned()
    same_bytes(pinned, qt)
    module = packed_linear().cuda()
    assert module.weight.device.type == "cuda"
    same_bytes(module.cpu().weight, packed_linear().weight)


def test_is_pinned_without_a_gpu():
    assert not packed_weight().is_pinned()


@pytest.mark.parametrize("codec", CODECS)
def test_torch_save_and_safe_load(codec):
    module = packed_linear(codec)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same_bytes(loaded["weight"], module.weight)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert isinstance(again.weight, nn.Parameter)
    same_bytes(again.weight, module.weight)


@pytest.mark.parametrize(
    ("position", "damage"),
    [
        (0, lambda packed: {**packed, "codes": packed["codes"][:-1]}),
        (0, lambda packed: {**packed, "codes": packed["codes"].view(torch.int8)}),
        (0, lambda packed: {**packed, "codes": [1]}),
        (0, lambda packed: {"codes": packed["codes"]}),
        (0, lambda packed: {**packed, "absmax": packed["absmax"].repeat_interleave(2)[::2]}),
        (1, lambda codec: "nf5"),
        (1, lambda codec: "int8"),
        (2, lambda shape: (96, -1)),
        (2, lambda shape: (2**40, 2**40)),
        (2, lambda shape: (96.0, 128)),
        (3, lambda dtype: torch.int8),
        (3, lambda dtype: "float32"),
        (4, lambda block_size: 3),
        (4, lambda block_size: 0),
    ],
)
def test_a_damaged_pickle_is_refused(position, damage):
    rebuild, arguments = packed_weight().__reduce_ex__(2)
    arguments = list(arguments)
    arguments[position] = damage(arguments[position])
    with pytest.raises((ArgumentError, ArgumentTypeError, OptionError)):
        rebuild(*arguments)


def _first(batch):
    return batch[0]


def test_goes_through_a_data_loader_worker():
    # spawn: a forked worker would inherit the threads of the pool.
    items = [packed_weight(seed=seed) for seed in range(2)]
    loader = DataLoader(items, num_workers=1, collate_fn=_first, multiprocessing_context="spawn")
    for got, want in zip(loader, items, strict=True):
        same_bytes(got, want)


# ---- modules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_state_dict_round_trip(codec):
    source, target = packed_linear(codec), packed_linear(codec)
    target.weight = nn.Parameter(packed_weight(codec, seed=5), requires_grad=False)
    state = source.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    target.load_state_dict(state)
    same_bytes(target.weight, source.weight)
    assert target.weight.packed["codes"].data_ptr() != source.weight.packed["codes"].data_ptr()
    plain = nn.Linear(128, 96)
    plain.load_state_dict(state)
    assert_bit_equal(plain.weight.detach(), source.weight.dequantize())
    plain.requires_grad_(False).load_state_dict(state, assign=True)
    same_bytes(plain.weight, source.weight)


def test_partial_load_leaves_the_packed_bytes_alone():
    module = packed_linear()
    before = module.weight.clone()
    module.load_state_dict({"bias": torch.zeros(96)}, strict=False)
    same_bytes(module.weight, before)
    assert not bool(module.bias.any())


def test_a_float_checkpoint_says_how_to_load_it():
    module = packed_linear()
    before = module.weight.clone()
    with pytest.raises(RuntimeError, match="assign=True"):
        module.load_state_dict({"weight": torch.ones(96, 128), "bias": torch.zeros(96)})
    same_bytes(module.weight, before)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (nn.Module.half, torch.float16),
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.double, torch.float64),
        (lambda m: m.to("cpu", torch.float16), torch.float16),
        (nn.Module.cpu, torch.float32),
    ],
)
def test_module_conversions(change, dtype):
    module = packed_linear()
    before = module.weight.clone()
    change(module)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, QuantizedTensor)
    assert not weight.requires_grad
    assert weight.dtype == dtype
    same_bytes(weight.to(torch.float32), before)
    assert module(torch.ones(2, 128, dtype=dtype)).dtype == dtype


def test_from_packed_takes_what_quantize_made():
    qt = packed_weight()
    same_bytes(QuantizedTensor.from_packed(qt.packed, "nf4", (96, 128), torch.float32, 64), qt)
    with pytest.raises(OptionError, match="codec"):
        QuantizedTensor.from_packed(qt.packed, "nf5", (96, 128), torch.float32, 64)


def test_a_codec_registered_elsewhere_works():
    class Plain:
        name = "test-plain"

        def encode(self, tensor, block_size):
            return {"values": tensor.clone()}

        def decode(self, packed, shape, dtype, block_size, out=None):
            value = packed["values"].reshape(shape).to(dtype)
            return value if out is None else out.copy_(value)

        def packed_bytes(self, numel, block_size):
            return 4 * numel

    registry.register_codec(Plain())
    try:
        x = torch.arange(6.0).reshape(2, 3)
        qt = quantize(x, "test-plain")
        assert torch.equal(qt, x)
        assert torch.equal(qt[1], x[1])
        assert torch.equal(pickle.loads(pickle.dumps(qt)), x)
    finally:
        registry._codecs.pop("test-plain")


@pytest.mark.parametrize("read", [lambda t: t.storage(), lambda t: t.data_ptr()])
def test_what_has_no_storage_says_how_to_save_it(read):
    with pytest.raises(StateError, match="dequantize_model"):
        read(quantize(torch.ones(4, 64)))


def test_sparse_tensors_and_absurd_blocks_are_refused():
    with pytest.raises(ArgumentTypeError, match="strided"):
        quantize(torch.eye(4).to_sparse())
    with pytest.raises(OptionError, match="block_size"):
        quantize(torch.ones(4), block_size=2**63)
