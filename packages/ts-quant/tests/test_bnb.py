"""Checkpoints of bitsandbytes: their bytes are kept, and decode to what bitsandbytes makes of them."""

import json
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, CheckpointError, OptionError
from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_quant import QuantizedTensor, bitsandbytes_names, from_bitsandbytes, quantize, reference
from ts_quant.codecs import Meta
from ts_quant.codecs.bnb import FP4, FP4_DQ, INT8_ROWS
from ts_quant.references import bnb as published

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = {"nf4": reference.NF4_LEVELS, "fp4": published.FP4_LEVELS}
CODEC = {"nf4": "nf4", "fp4": "bnb_fp4"}
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def bnb():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        return pytest.importorskip("bitsandbytes.functional")


def pack(state):
    """The JSON tensor of a quantization state."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def checkpoint(kind, x, *, nested=False, block_size=64, name="w"):
    """What bitsandbytes' layers save for a weight, made without it; encoded as nf4, whatever the kind."""
    qt = quantize(x, "nf4", block_size=block_size, double_quant=nested)
    state = {
        "quant_type": kind,
        "blocksize": block_size,
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
    }
    tensors = {
        name: qt.packed["codes"].unsqueeze(1),
        f"{name}.absmax": qt.packed["absmax"],
        f"{name}.quant_map": torch.tensor(LEVELS[kind]),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(qt.packed["nested_map"][256])
        tensors[f"{name}.nested_absmax"] = qt.packed["nested_absmax"]
        tensors[f"{name}.nested_quant_map"] = qt.packed["nested_map"][:256].clone()
    return {**tensors, f"{name}.quant_state.bitsandbytes__{kind}": pack(state)}


def by_reference(kind, qt):
    packed = {name: tensor.cpu() for name, tensor in qt.packed.items()}
    absmax = packed["absmax"]
    if "nested_map" in packed:
        table = packed["nested_map"]
        absmax = published.map_scales(absmax, packed["nested_absmax"], table[:256], table[256])
    return published.decode_four_bit(LEVELS[kind], packed["codes"], absmax, qt.shape, qt.block_size)


# ---- 4 bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(data=st.data())
def test_decoding_equals_the_reference(kind, nested, device, isa, data):
    shape = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    block_size = 2 * data.draw(st.integers(1, 70))
    x = make_tensor(
        tuple(shape), dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 99))
    )
    qt = from_bitsandbytes("w", checkpoint(kind, x, nested=nested, block_size=block_size)).to(device)
    assert (qt.codec, qt.shape, qt.dtype) == (CODEC[kind], x.shape, x.dtype)
    want = by_reference(kind, qt)
    for dtype in DTYPES:
        assert_bit_equal(qt.dequantize(dtype), want.to(dtype))
        out = torch.full(x.shape, float("nan"), dtype=dtype, device=device)
        assert_bit_equal(qt.dequantize(out=out), want.to(dtype))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_fp4_codes(device, isa, dtype):
    codes = torch.arange(256).to(torch.uint8)
    absmax = torch.tensor([1.0, 0.0, 3e38, 1e-42])
    got = FP4.new(codes.to(device), absmax.to(device), (512,), dtype, 128)
    assert_bit_equal(
        got, published.decode_four_bit(published.FP4_LEVELS, codes, absmax, (512,), 128).to(dtype)
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@given(data=st.data())
def test_decoding_equals_bitsandbytes(bnb, kind, nested, data):
    block_size = data.draw(st.sampled_from([32, 64, 128, 256, 512, 1024]))
    numel = 2 * data.draw(st.integers(1, 6000))
    x = make_tensor((numel,), dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 99)))
    packed, state = bnb.quantize_4bit(x, blocksize=block_size, quant_type=kind, compress_statistics=nested)
    tensors = {f"w.{key}": value for key, value in state.as_dict(packed=True).items()} | {"w": packed}
    qt = from_bitsandbytes("w", tensors)
    assert (qt.codec, qt.dtype, qt.block_size) == (CODEC[kind], x.dtype, block_size)
    assert qt.packed["codes"].data_ptr() == packed.data_ptr()
    assert_bit_equal(qt.packed["absmax"], state.absmax)
    # A tensor of one dimension: its CPU decode is wrong for rows that are no multiple of the block.
    assert torch.equal(qt.dequantize(), bnb.dequantize_4bit(packed, state).reshape(-1))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_saved_module_of_bitsandbytes(bnb, tmp_path, kind, nested):
    """Through its own layer, its own state_dict and a safetensors file."""
    nn = pytest.importorskip("bitsandbytes.nn")
    safetensors = pytest.importorskip("safetensors.torch")
    layer = nn.Linear4bit(256, 96, bias=False, quant_type=kind, compress_statistics=nested)
    weight = make_tensor((96, 256), dtype=torch.bfloat16, seed=5)
    layer.weight = nn.Params4bit(
        weight.clone(), requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=64
    ).to("cpu")
    saved = {f"block.up.{key}": value.contiguous() for key, value in layer.state_dict().items()}
    if "block.up.weight.absmax" not in saved:
        pytest.skip("this bitsandbytes does not quantize on the CPU")
    safetensors.save_file(saved, tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    qt = from_bitsandbytes("block.up.weight", loaded)
    assert (qt.shape, qt.dtype) == ((96, 256), torch.bfloat16)
    state = layer.weight.quant_state
    state.shape = torch.Size([96 * 256])
    assert torch.equal(qt.dequantize().flatten(), bnb.dequantize_4bit(layer.weight.data, state).flatten())


def test_names_of_the_pieces():
    tensors = checkpoint("nf4", make_tensor((4, 64)), nested=True, name="up.weight")
    assert set(bitsandbytes_names("up.weight", tensors).values()) == set(tensors)
    assert bitsandbytes_names("down.weight", tensors) is None
    assert bitsandbytes_names("up.weight", ["up.weight", "up.bias"]) is None
    rows = ["a.weight", "a.SCB", "a.weight_format", "b.weight"]
    assert bitsandbytes_names("a.weight", rows) == {
        "weight": "a.weight",
        "scales": "a.SCB",
        "format": "a.weight_format",
    }


def test_other_storage_dtypes_hold_the_same_bytes():
    """Sharded training saves the codes as bfloat16."""
    x = make_tensor((8, 64))
    tensors = checkpoint("nf4", x)
    want = from_bitsandbytes("w", tensors).dequantize()
    tensors["w"] = tensors["w"].flatten().view(torch.bfloat16).unsqueeze(1)
    assert_bit_equal(from_bitsandbytes("w", tensors).dequantize(), want)


def test_scales_saved_in_16_bits_are_widened():
    tensors = checkpoint("nf4", make_tensor((8, 64)))
    tensors["w.absmax"] = tensors["w.absmax"].bfloat16()
    tensors["w.quant_map"] = tensors["w.quant_map"].bfloat16()
    assert_bit_equal(from_bitsandbytes("w", tensors).packed["absmax"], tensors["w.absmax"].float())


def test_a_map_of_its_own_decodes_with_it():
    """Older versions changed an end of the map when they quantized on the CPU."""
    tensors = checkpoint("nf4", make_tensor((64, 64), flavour="mixed_scale"), nested=True)
    tensors["w.nested_quant_map"][0] = -1.0
    qt = from_bitsandbytes("w", tensors)
    assert qt.packed["nested_map"][0] == -1.0
    assert_bit_equal(qt.dequantize(), by_reference("nf4", qt))


def edited(state=None, drop=(), **tensors):
    made = checkpoint("nf4", make_tensor((4, 64)), nested=True)
    key = "w.quant_state.bitsandbytes__nf4"
    if state is not None:
        made[key] = pack(json.loads(bytes(made[key].tolist())) | state)
    made |= {f"w.{name}" if name != "w" else name: tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in made.items() if name not in drop}


@pytest.mark.parametrize(
    ("match", "tensors"),
    [
        ("no weight of bitsandbytes", edited(drop=["w"])),
        ("no weight of bitsandbytes", edited(drop=["w.quant_state.bitsandbytes__nf4"])),
        ("absmax is missing", edited(drop=["w.absmax"])),
        ("expected both or neither", edited(drop=["w.nested_absmax"])),
        ("256 values", edited(drop=["w.nested_quant_map"])),
        ("256 values", edited(nested_quant_map=torch.zeros(255))),
        ("other values", edited(quant_map=torch.zeros(16))),
        ("other values", edited(quant_map=torch.zeros(4))),
        ("its name says", edited({"quant_type": "fp4"})),
        ("blocksize", edited({"blocksize": "64"})),
        ("block_size", edited({"blocksize": 63})),
        ("block_size", edited({"blocksize": 0})),
        ("packed", edited({"blocksize": 128})),
        ("shape", edited({"shape": None})),
        ("shape", edited({"shape": [4, -64]})),
        ("shape", edited({"shape": [4.0, 64]})),
        ("packed", edited({"shape": [4, 66]})),
        ("packed", edited({"shape": [2**40, 2**40]})),
        ("dtype", edited({"dtype": "float7"})),
        ("dtype", edited({"dtype": "int8"})),
        ("float32 per 256", edited({"nested_blocksize": 128})),
        ("float32 per 256", edited({"nested_dtype": "float16"})),
        ("nested_offset", edited({"nested_offset": float("nan")})),
        ("nested_offset", edited({"nested_offset": "1"})),
        ("damaged", edited(**{"quant_state.bitsandbytes__nf4": torch.tensor([123, 1], dtype=torch.uint8)})),
        ("named values", edited(**{"quant_state.bitsandbytes__nf4": pack([1])})),
        ("small uint8", edited(**{"quant_state.bitsandbytes__nf4": torch.zeros(8)})),
        ("small uint8", edited(**{"quant_state.bitsandbytes__nf4": torch.zeros(1 << 20).to(torch.uint8)})),
        ("damaged", edited(**{"quant_state.bitsandbytes__nf4": torch.full((60000,), 91, dtype=torch.uint8)})),
        ("expected floats", edited(nested_absmax=torch.zeros(1, dtype=torch.int64))),
        ("absmax", edited(absmax=torch.zeros(4))),
        ("packed", edited(w=torch.zeros(4, dtype=torch.uint8))),
    ],
)
def test_damaged_checkpoints_are_refused(match, tensors):
    with pytest.raises(CheckpointError, match=match) as caught:
        from_bitsandbytes("w", tensors)
    assert "w" in str(caught.value)


# ---- 8 bits --------------------------------------------------------------------------------------------


def rows(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return codes, torch.rand(shape[0], generator=generator) * 10.0 ** torch.randint(-6, 6, (shape[0],))


@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(data=st.data())
def test_rows_equal_the_reference(device, isa, data):
    shape = data.draw(st.tuples(st.integers(1, 30), st.integers(1, 300)))
    codes, scales = rows(shape, data.draw(st.integers(0, 99)))
    tensors = {"up.weight": codes.to(device), "up.SCB": scales.to(device)}
    want = published.decode_int8_rows(codes, scales)
    for dtype in DTYPES:
        qt = from_bitsandbytes("up.weight", tensors, dtype)
        assert (qt.codec, qt.dtype, qt.shape) == ("bnb_int8", dtype, shape)
        assert_bit_equal(qt.dequantize(), want.to(dtype))
        out = torch.empty(shape, device=device)
        assert_bit_equal(qt.dequantize(out=out), want)


@pytest.mark.parametrize("shape", [(96, 256), (7, 33), (1, 5)])
def test_rows_equal_bitsandbytes(bnb, shape):
    x = make_tensor(shape, dtype=torch.float16, seed=2)
    codes, scales, _ = bnb.int8_vectorwise_quant(x)
    qt = from_bitsandbytes("w.weight", {"w.weight": codes, "w.SCB": scales}, torch.float32)
    assert qt.packed["codes"].data_ptr() == codes.data_ptr()
    assert qt.packed["row_absmax"].data_ptr() == scales.data_ptr()
    assert torch.equal(qt.dequantize(), bnb.int8_vectorwise_dequant(codes, scales))


def test_rows_keep_their_bytes_through_cuts_and_shapes():
    codes, scales = rows((12, 40))
    packed = {"codes": codes.flatten(), "row_absmax": scales}
    qt = QuantizedTensor.from_packed(packed, "bnb_int8", (3, 4, 40), torch.float32, Meta(0))
    whole = qt.dequantize()
    for cut, want in ((qt[1], whole[1]), (qt[1:], whole[1:]), (qt.view(12, 40), whole.view(12, 40))):
        assert isinstance(cut, QuantizedTensor)
        assert_bit_equal(cut.dequantize(), want)
    assert_bit_equal(qt.view(40, 12), whole.view(40, 12))
    assert_bit_equal(qt[1][2], whole[1][2])
    assert_bit_equal(qt[1][2][3:], whole[1][2][3:])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_rows_of_nothing(shape):
    tensors = {"w.weight": torch.zeros(shape, dtype=torch.int8), "w.SCB": torch.zeros(shape[0])}
    assert from_bitsandbytes("w.weight", tensors).dequantize().shape == shape


@pytest.mark.parametrize(
    ("match", "edit"),
    [
        ("int8 matrix", {"w.weight": torch.ones(3, 8)}),
        ("int8 matrix", {"w.weight": torch.ones(24, dtype=torch.int8)}),
        ("row_absmax", {"w.SCB": torch.ones(4)}),
        ("expected floats", {"w.SCB": torch.ones(3, dtype=torch.int32)}),
        ("weight_format", {"w.weight_format": torch.tensor(2, dtype=torch.uint8)}),
        ("weight_format", {"w.weight_format": torch.zeros(2, dtype=torch.uint8)}),
        ("weight_format", {"w.weight_format": torch.tensor(float("nan"))}),
    ],
)
def test_damaged_rows_are_refused(match, edit):
    good = {"w.weight": torch.ones(3, 8, dtype=torch.int8), "w.SCB": torch.ones(3)}
    good["w.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    assert from_bitsandbytes("w.weight", good).dtype == torch.float16
    with pytest.raises(CheckpointError, match=match):
        from_bitsandbytes("w.weight", good | edit)


# ---- both ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["bnb_fp4", "bnb_int8"])
def test_published_formats_are_not_made(codec):
    with pytest.raises(OptionError, match="'nf4'"):
        quantize(torch.ones(4, 64), codec)


@pytest.mark.parametrize(
    "call",
    [
        lambda: FP4.new(torch.zeros(2, dtype=torch.uint8), torch.ones(1), (5,), torch.float32, 64),
        lambda: FP4.new(torch.zeros(2, dtype=torch.uint8), torch.ones(1), (4,), torch.float32, 3),
        lambda: FP4_DQ.new(
            torch.zeros(2, dtype=torch.uint8),
            torch.zeros(1, dtype=torch.uint8),
            torch.ones(1),
            torch.ones(256),
            (4,),
            torch.float32,
            64,
        ),
        lambda: INT8_ROWS.new(torch.zeros(6, dtype=torch.int8), torch.ones(2), (2, 3), torch.float32, 0),
        lambda: INT8_ROWS.new(torch.zeros(6, dtype=torch.int8), torch.ones(3), (2, 3), torch.float32, 3),
        lambda: INT8_ROWS.new(torch.zeros(6, dtype=torch.int8), torch.ones(2).half(), (2, 3), torch.half, 3),
        lambda: INT8_ROWS.out(torch.zeros(6, dtype=torch.int8), torch.ones(2), torch.ones(7), 3),
    ],
)
def test_bad_calls(call):
    with pytest.raises((ValueError, TypeError), match="expected"):
        call()


def test_meta_that_no_tensor_has():
    packed = {"codes": torch.zeros(6, dtype=torch.int8), "row_absmax": torch.ones(2)}
    with pytest.raises(ArgumentError, match="block size 0"):
        QuantizedTensor.from_packed(packed, "bnb_int8", (2, 3), torch.float32, Meta(3))
    with pytest.raises(ArgumentError, match="dimension"):
        QuantizedTensor.from_packed(packed, "bnb_int8", (), torch.float32, Meta(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_decoding_equals_bitsandbytes_on_a_gpu(bnb, kind, nested):
    x = make_tensor((1024, 1280), dtype=torch.bfloat16, seed=1, device="cuda")
    packed, state = bnb.quantize_4bit(x, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {f"w.{key}": value for key, value in state.as_dict(packed=True).items()} | {"w": packed}
    qt = from_bitsandbytes("w", tensors)
    assert qt.device.type == "cuda"
    assert torch.equal(qt.dequantize(), bnb.dequantize_4bit(packed, state))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_beyond_two_to_the_31_elements():
    shape = (2**20 + 3, 2048)
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    codes = torch.zeros(shape, dtype=torch.int8, device="cuda")
    tail, scales = rows((5, 2048))
    codes[-5:] = tail.cuda()
    all_scales = torch.ones(shape[0], device="cuda")
    all_scales[-5:] = scales.cuda()
    packed = {"codes": codes.flatten(), "row_absmax": all_scales}
    qt = QuantizedTensor.from_packed(packed, "bnb_int8", shape, torch.bfloat16, Meta(0))
    out = qt.dequantize()
    assert_bit_equal(out[-5:], published.decode_int8_rows(tail, scales).bfloat16())
    assert not bool(out[:1000].any())
