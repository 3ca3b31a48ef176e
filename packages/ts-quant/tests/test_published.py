"""Formats that others publish: every bit of what the kernels decode, against the references."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import devices, seeded
from ts_quant import Meta, QuantizedTensor, quantize
from ts_quant.codecs.fp_published import FP8_EXPORT_CODEC, MXFP4_CODEC, NVFP4_EXPORT_CODEC
from ts_quant.codecs.gguf import GGUF_CODECS
from ts_quant.codecs.groups import AWQ_CODEC, GPTQ_CODEC
from ts_quant.codecs.stacked import STACKED_CODEC
from ts_quant.references import fp_published, gguf, groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = sorted(GGUF_CODECS)
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(actual, expected):
    """Bit for bit, but for what is in a NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    ints = torch.int32 if actual.dtype == torch.float32 else torch.int16
    zero = torch.zeros_like(actual)
    actual, expected = (torch.where(t.isnan(), zero, t).view(ints) for t in (actual, expected))
    assert torch.equal(actual, expected)


def decodes(packed, codec, shape, meta, expected, device="cpu"):
    """Check all three dtypes, decoded to a new tensor, into a given one, and into an odd address."""
    there = {name: part.to(device) for name, part in packed.items()}
    for dtype in DTYPES:
        tensor = QuantizedTensor.from_packed(there, codec.name, shape, dtype, meta)
        wanted = expected.to(dtype)
        same(tensor.dequantize(), wanted)
        room = torch.empty(wanted.numel() + 1, dtype=dtype, device=device)
        out = room[1:].view(wanted.shape)
        assert tensor.dequantize(out=out) is out
        same(out, wanted)


def raw_bytes(*shape, generator):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def gguf_blocks(kind, count, seed, plain=True):
    """Random blocks; `plain` ones have scales such as weights have, others any bits at all."""
    _, values, size = gguf.DECODERS[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = raw_bytes(count, size, generator=generator)
    if plain and count:
        at = 208 if kind == "Q6_K" else 0
        halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
        scales = torch.rand(count, halves, generator=generator).half() * 0.01
        blocks[:, at : at + 2 * halves] = scales.view(torch.uint8)
    return blocks, values


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", KINDS)
@fixture_is_constant
@given(count=st.integers(0, 40), columns=st.integers(1, 3), seed=st.integers(0, 99), plain=st.booleans())
def test_gguf(device, isa, kind, count, columns, seed, plain):
    blocks, values = gguf_blocks(kind, count * columns, seed, plain)
    shape = (count, columns * values)
    expected = gguf.DECODERS[kind][0](blocks).reshape(shape)
    codec = GGUF_CODECS[kind]
    decodes({"blocks": blocks.flatten()}, codec, shape, codec.meta(), expected, device)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_is_what_the_gguf_package_decodes(kind):
    package = pytest.importorskip("gguf")
    blocks, _ = gguf_blocks(kind, 300, 1)
    theirs = package.quants.dequantize(blocks.numpy(), package.GGMLQuantizationType[kind])
    same(gguf.DECODERS[kind][0](blocks).flatten(), torch.from_numpy(theirs).flatten())


@pytest.mark.parametrize("device", devices())
def test_rows_of_gguf_blocks_are_cut_and_reshaped_packed(device):
    codec = GGUF_CODECS["Q4_0"]
    blocks, _ = gguf_blocks("Q4_0", 6 * 2, 0)
    tensor = QuantizedTensor.from_packed(
        {"blocks": blocks.flatten().to(device)}, codec.name, (6, 64), torch.float32, codec.meta()
    )
    for cut, plain in ((tensor[2:5], tensor.dequantize()[2:5]), (tensor[1], tensor.dequantize()[1])):
        assert isinstance(cut, QuantizedTensor)
        same(cut.dequantize(), plain)
    stacked = tensor.view(2, 3, 64)
    assert isinstance(stacked[1], QuantizedTensor)
    same(stacked[1].dequantize(), tensor.dequantize().view(2, 3, 64)[1])


def grouped(rows, columns, group_size, bits, seed, order=False, scales=torch.float16):
    """Codes (columns, rows), zeros and scales (groups, rows), and an act-order index or None."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-columns // group_size)
    codes = torch.randint(0, 1 << bits, (columns, rows), generator=generator)
    zeros = torch.randint(0, 1 << bits, (count, rows), generator=generator)
    scale = (torch.rand(count, rows, generator=generator) * 0.02).to(scales)
    shuffled = torch.randperm(columns, generator=generator)
    g_idx = (torch.arange(columns) // group_size)[shuffled].int() if order else None
    return codes, zeros, scale, g_idx


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bits", [2, 4, 8])
@fixture_is_constant
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 20),
    group_size=st.sampled_from([16, 32, 48, 64, 128]),
    order=st.booleans(),
    offset=st.sampled_from([0, 1]),
    scales=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_gptq(device, isa, bits, rows, columns, group_size, order, offset, scales, seed):
    per = 32 // bits
    rows, columns = rows * per, columns * per
    codes, zeros, scale, g_idx = grouped(rows, columns, group_size, bits, seed, order, scales)
    qweight, qzeros = groups.pack_gptq(codes, zeros, bits, offset)
    expected = groups.gptq(qweight, qzeros, scale, group_size, bits=bits, zero_offset=offset, g_idx=g_idx)
    index = torch.arange(columns) // group_size if g_idx is None else g_idx.long()
    plain = ((codes - zeros[index]).float() * scale.float()[index]).t()
    same(expected, plain.contiguous())
    packed = {"qweight": qweight, "qzeros": qzeros, "scales": scale}
    packed |= {} if g_idx is None else {"g_idx": g_idx}
    meta = GPTQ_CODEC.describe(group_size, bits, zero_offset=offset, act_order=order, scales=scales)
    decodes(packed, GPTQ_CODEC, (rows, columns), meta, expected, device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("group_size", "order"), [(64, False), (12, False), (64, True)])
@pytest.mark.parametrize("columns", [1056, 1060])
def test_gptq_of_several_tiles(device, bits, group_size, order, columns):
    """A group for eight columns, for fewer, or for each; columns in eights or not; absent groups."""
    rows, columns = 80, columns // (32 // bits) * (32 // bits)
    codes, zeros, scale, g_idx = grouped(rows, columns, group_size, bits, 0, order)
    if order:
        g_idx[7], g_idx[600] = len(scale), -1
    qweight, qzeros = groups.pack_gptq(codes, zeros, bits, 1)
    packed = {"qweight": qweight, "qzeros": qzeros, "scales": scale} | ({"g_idx": g_idx} if order else {})
    meta = GPTQ_CODEC.describe(group_size, bits, zero_offset=1, act_order=order)
    clipped = (
        g_idx if g_idx is None else torch.where(g_idx < 0, len(scale) - 1, g_idx.clamp(max=len(scale) - 1))
    )
    expected = groups.gptq(qweight, qzeros, scale, group_size, bits=bits, zero_offset=1, g_idx=clipped)
    decodes(packed, GPTQ_CODEC, (rows, columns), meta, expected, device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("group_size", [64, 100])
@pytest.mark.parametrize(("rows", "columns"), [(144, 528), (136, 523)])
def test_awq_of_several_tiles(device, group_size, rows, columns):
    codes, zeros, scale, _ = grouped(rows, columns, group_size, 4, 0)
    qweight, qzeros = groups.pack_awq(codes, zeros)
    packed = {"qweight": qweight, "qzeros": qzeros, "scales": scale}
    expected = groups.awq(qweight, qzeros, scale, group_size)
    decodes(packed, AWQ_CODEC, (rows, columns), AWQ_CODEC.describe(group_size), expected, device)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows", [72, 131])
def test_transposed_mxfp4_of_several_tiles(device, rows):
    codes, scales, _ = fp4_parts((2, rows), 320, 32, 0, False)
    expected = fp_published.mxfp4(codes, scales).transpose(1, 2).contiguous()
    packed = {"codes": codes.flatten(0, 1), "scales": scales.flatten(0, 1)}
    meta = MXFP4_CODEC.describe(transposed=True)
    decodes(packed, MXFP4_CODEC, tuple(expected.shape), meta, expected, device)


@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    group_size=st.sampled_from([32, 64, 100, 128]),
    scales=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_awq(device, isa, rows, columns, group_size, scales, seed):
    rows = 8 * rows
    codes, zeros, scale, _ = grouped(rows, columns, group_size, 4, seed, scales=scales)
    qweight, qzeros = groups.pack_awq(codes, zeros)
    expected = groups.awq(qweight, qzeros, scale, group_size)
    index = torch.arange(columns) // group_size
    same(expected, ((codes - zeros[index]).float() * scale.float()[index]).t().contiguous())
    packed = {"qweight": qweight, "qzeros": qzeros, "scales": scale}
    decodes(
        packed, AWQ_CODEC, (rows, columns), AWQ_CODEC.describe(group_size, scales=scales), expected, device
    )


def test_the_order_of_awq_is_the_published_one():
    # One input, eight outputs with the codes 0 to 7, zero 0, scale 1: nibbles 0 2 4 6 1 3 5 7.
    word = sum(output << 4 * place for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    qweight = torch.tensor([[word]]).int()
    packed = {"qweight": qweight, "qzeros": torch.zeros(1, 1).int(), "scales": torch.ones(1, 8)}
    meta = AWQ_CODEC.describe(32, scales=torch.float32)
    tensor = QuantizedTensor.from_packed(packed, "awq", (8, 1), torch.float32, meta)
    assert tensor.dequantize().flatten().tolist() == list(range(8))


def test_groups_out_of_range_read_the_last_one(isa):
    """A damaged index gives wrong values, never a read outside the tables."""
    codes, zeros, scale, g_idx = grouped(8, 16, 8, 4, 0, order=True)
    qweight, qzeros = groups.pack_gptq(codes, zeros)
    packed = {"qweight": qweight, "qzeros": qzeros, "scales": scale, "g_idx": g_idx.clone()}
    packed["g_idx"][3], packed["g_idx"][5] = 1 << 30, -7
    meta = GPTQ_CODEC.describe(8, act_order=True)
    tensor = QuantizedTensor.from_packed(packed, "gptq", (8, 16), torch.float32, meta)
    g_idx[3] = g_idx[5] = 1
    same(tensor.dequantize(), groups.gptq(qweight, qzeros, scale, 8, g_idx=g_idx))


def fp4_parts(lead, columns, block, seed, finite):
    generator = torch.Generator().manual_seed(seed)
    codes = raw_bytes(*lead, columns // 2, generator=generator)
    scales = raw_bytes(*lead, columns // block, generator=generator)
    if finite:
        scales = scales % 96 + 16
    return codes, scales, torch.rand(1, generator=generator) + 0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("transposed", [False, True])
@fixture_is_constant
@given(
    stacks=st.integers(1, 3),
    rows=st.integers(1, 70),
    groups_=st.integers(1, 9),
    seed=st.integers(0, 99),
    finite=st.booleans(),
)
def test_mxfp4(device, isa, transposed, stacks, rows, groups_, seed, finite):
    columns = 32 * groups_
    codes, scales, _ = fp4_parts((stacks, rows), columns, 32, seed, finite)
    expected = fp_published.mxfp4(codes, scales)
    expected = expected.transpose(1, 2).contiguous() if transposed else expected
    packed = {"codes": codes.flatten(0, 1), "scales": scales.flatten(0, 1)}
    meta = MXFP4_CODEC.describe(transposed=transposed)
    decodes(packed, MXFP4_CODEC, tuple(expected.shape), meta, expected, device)
    tensor = QuantizedTensor.from_packed(packed, "mxfp4", expected.shape, torch.float32, meta)
    assert isinstance(tensor[-1], QuantizedTensor)
    same(tensor[-1].dequantize(), expected[-1])


@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(
    rows=st.integers(1, 70),
    groups_=st.integers(1, 9),
    divided=st.booleans(),
    seed=st.integers(0, 99),
    finite=st.booleans(),
)
def test_nvfp4_exports(device, isa, rows, groups_, divided, seed, finite):
    codes, scales, tensor_scale = fp4_parts((rows,), 16 * groups_, 16, seed, finite)
    expected = fp_published.nvfp4(codes, scales, tensor_scale, divided=divided)
    packed = {"codes": codes, "scales": scales, "tensor_scale": tensor_scale}
    meta = NVFP4_EXPORT_CODEC.describe(divided=divided)
    decodes(packed, NVFP4_EXPORT_CODEC, tuple(expected.shape), meta, expected, device)


def test_e4m3_and_e2m1_are_pytorchs():
    every = torch.arange(256).to(torch.uint8)
    same(fp_published.e4m3(every), every.view(torch.float8_e4m3fn).float())
    powers = torch.ldexp(torch.ones(255), torch.arange(255) - 127)
    same(fp_published.e8m0(every)[:255], powers)
    assert fp_published.e8m0(every)[255].isnan()


@pytest.mark.parametrize("device", devices())
@fixture_is_constant
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    tile=st.sampled_from([(0, 0), (1, 0), (128, 128), (16, 24), (3, 7)]),
    scales=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_fp8_exports(device, isa, rows, columns, tile, scales, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = raw_bytes(rows, columns, generator=generator)
    tile_rows, tile_columns = tile[0] or rows, tile[1] or columns
    count = -(-rows // tile_rows), -(-columns // tile_columns)
    scale = (torch.rand(count, generator=generator) * 0.01).to(scales)
    expected = fp_published.fp8(codes, scale, tile_rows, tile_columns)
    meta = FP8_EXPORT_CODEC.describe(*tile, scales=scales)
    decodes({"codes": codes, "scales": scale}, FP8_EXPORT_CODEC, (rows, columns), meta, expected, device)


@pytest.mark.parametrize("device", devices())
@given(count=st.integers(0, 5), rows=st.integers(1, 40), columns=st.integers(1, 60), seed=st.integers(0, 99))
def test_stacked_pieces(device, count, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = raw_bytes(2 * count, rows, columns, generator=generator)
    scales = torch.rand(2 * count, 1, 1, generator=generator)
    values = [fp_published.fp8(c, s, rows, columns) for c, s in zip(codes, scales, strict=True)]
    shape = (count, 2 * rows, columns)
    expected = torch.stack(values).view(shape) if count else torch.empty(shape)
    meta = STACKED_CODEC.describe("fp8_export", FP8_EXPORT_CODEC.describe(), rows)
    decodes({"codes": codes, "scales": scales}, STACKED_CODEC, shape, meta, expected, device)
    if count:
        packed = {"codes": codes.to(device), "scales": scales.to(device)}
        tensor = QuantizedTensor.from_packed(packed, "stacked", shape, torch.float32, meta)
        assert isinstance(tensor[-1], QuantizedTensor)
        same(tensor[-1].dequantize(), expected[-1])
        assert isinstance(tensor[1:], QuantizedTensor)
        same(tensor[1:].dequantize(), expected[1:])


def descriptions():
    return {
        **{codec.name: (codec.meta(), (4, 256)) for codec in GGUF_CODECS.values()},
        "gptq": (GPTQ_CODEC.describe(128, zero_offset=1, act_order=True), (16, 256)),
        "awq": (AWQ_CODEC.describe(64), (16, 256)),
        "mxfp4": (MXFP4_CODEC.describe(transposed=True), (2, 64, 48)),
        "nvfp4_export": (NVFP4_EXPORT_CODEC.describe(divided=True), (8, 64)),
        "fp8_export": (FP8_EXPORT_CODEC.describe(128, 128), (200, 130)),
        "stacked": (STACKED_CODEC.describe("fp8_export", FP8_EXPORT_CODEC.describe(16, 24), 16), (2, 32, 48)),
    }


def example(name, seed=0):
    """A tensor of zero bytes but for the codes."""
    meta, shape = descriptions()[name]
    made = {}
    with seeded(seed):
        for index, (part, (dtype, size)) in enumerate(registry.codec(name).parts(shape, meta).items()):
            if dtype.is_floating_point:
                made[part] = torch.rand(size).to(dtype)
            elif index == 0:
                made[part] = torch.randint(0, 100, size, dtype=dtype)
            else:
                made[part] = torch.ones(size, dtype=dtype)
    return QuantizedTensor.from_packed(made, name, shape, torch.bfloat16, meta)


@pytest.mark.parametrize("name", sorted(descriptions()))
def test_a_linear_layer_and_its_input_gradient(name):
    tensor = example(name)
    if tensor.dim() != 2:
        tensor = tensor[0]
    x = torch.randn(3, tensor.shape[1], dtype=torch.bfloat16, requires_grad=True)
    y = torch.nn.functional.linear(x, tensor)
    y.float().square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.linear(plain, tensor.dequantize())
    expected.float().square().sum().backward()
    same(y, expected)
    same(x.grad, plain.grad)


@pytest.mark.parametrize("name", sorted(descriptions()))
def test_published_formats_are_not_made(name):
    codec = registry.codec(name)
    assert not codec.encodes
    assert repr(name) in repr(codec)
    with pytest.raises(OptionError, match="published"):
        quantize(torch.ones(256, 256), name)
    with pytest.raises(OptionError, match="double_quant"):
        codec.meta(64, double_quant=True)


BAD = {
    "gguf_q4_0": [Meta(64), Meta.make(32, type=3)],
    "gptq": [
        Meta(128),
        Meta.make(128, bits=3, scales="float16"),
        Meta.make(128, bits=4, scales="int8"),
        Meta.make(128, bits=4.0, scales="float16"),
        Meta.make(1 << 63, bits=4, scales="float16"),
        *(Meta.make(128, bits=4, scales="float16", act_order=order) for order in ("no", 7, 1 << 70)),
    ],
    "awq": [AWQ_CODEC.describe(128, 8), Meta.make(-1, bits=4, scales="float16")],
    "mxfp4": [Meta(16), Meta.make(32, divided=True), Meta.make(32, other=1)],
    "nvfp4_export": [Meta(32)],
    "fp8_export": [
        Meta(0),
        Meta.make(0, rows=-1, scales="float32"),
        Meta.make(0, rows="a", scales="float32"),
        Meta.make(0, columns=(1 << 63) - 1, scales="float32"),
    ],
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_descriptions_that_no_tensor_has_are_refused(name):
    tensor = example(name)
    for meta in BAD[name]:
        with pytest.raises(ArgumentError, match="meta"):
            QuantizedTensor.from_packed(tensor.packed, name, tensor.shape, torch.bfloat16, meta)


@pytest.mark.parametrize("name", sorted(descriptions()))
def test_shapes_and_parts_that_do_not_fit_are_refused(name):
    tensor = example(name)
    first = next(iter(tensor.packed))
    short = tensor.packed | {first: tensor.packed[first].flatten()[:-1]}
    wrong = tensor.packed | {first: tensor.packed[first].double()}
    for packed, error in ((short, ArgumentError), (wrong, ArgumentTypeError)):
        with pytest.raises(error, match=first):
            QuantizedTensor.from_packed(packed, name, tensor.shape, torch.bfloat16, tensor.meta)
    with pytest.raises(ArgumentError):
        QuantizedTensor.from_packed(tensor.packed, name, (7,), torch.bfloat16, tensor.meta)
    codec = registry.codec(name)
    shape = tuple(tensor.shape)
    for packed, error in ((short, ArgumentError), (wrong, ArgumentTypeError)):
        with pytest.raises(error):
            codec.decode(packed, shape, torch.float32, tensor.meta)
        with pytest.raises(error):
            codec.decode(packed, shape, torch.float32, tensor.meta, torch.empty(shape))
    with pytest.raises(ArgumentTypeError):
        codec.decode(tensor.packed, shape, torch.float32, tensor.meta, torch.empty(shape).half())
    bent = torch.empty((*shape, 2))[..., 0]
    with pytest.raises(ArgumentError, match="contiguous"):
        codec.decode(tensor.packed, shape, torch.float32, tensor.meta, bent)
