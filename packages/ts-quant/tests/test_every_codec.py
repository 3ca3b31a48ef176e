"""What every codec of the registry owes: a packed weight keeps its bytes wherever it goes.

The list is the registry's: a new codec is tested by being registered. What it packs, or for formats that are
only decoded plausible bytes, comes from the sizes that the codec itself states.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ts_quant.codecs
from ts_core import registry
from ts_core.errors import ArgumentError, ArgumentTypeError, CheckpointError, TrainStreamError
from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_quant import Meta, QuantizedTensor, from_safetensors_dict, quantize, to_safetensors_dict

SHAPE = (64, 256)  # whole blocks of every published format


def packings():
    """List (codec, description) of each way that each codec packs."""
    found = []
    for name in registry.codecs():
        codec = registry.codec(name)
        if not isinstance(codec, ts_quant.codecs.PackedCodec):
            continue
        metas = []
        for make in (
            lambda codec: codec.meta(64),
            lambda codec: codec.meta(64, double_quant=True),
            lambda codec: codec.describe(64),
            lambda codec: codec.describe("bnb_fp4", Meta(64), 16),
            lambda codec: codec.describe("nf4", Meta.make(64, double_quant=True), 16),
        ):
            try:
                meta = make(codec)
                codec.check_meta(meta, "test")
                codec.parts(SHAPE, meta)
            except (TrainStreamError, TypeError, AttributeError):
                continue
            if meta not in metas:
                metas.append(meta)
        assert metas, name
        found += [(name, meta) for meta in metas]
    return found


PACKINGS = packings()
every_packing = pytest.mark.parametrize(
    "packing", PACKINGS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(PACKINGS)]
)


def plausible(part, generator):
    """Bytes that decode to finite values whatever they mean: no exponent is all ones."""
    dtype, shape = part
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * 0.02).to(dtype)
    high = 0x63636363 if dtype == torch.int32 else 100
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def packed(packing, shape=SHAPE, dtype=torch.float32, seed=0):
    name, meta = packing
    codec = registry.codec(name)
    if codec.encodes:
        parts = codec.encode(make_tensor(shape, dtype=dtype, seed=seed), meta)
    else:
        generator = torch.Generator().manual_seed(seed)
        parts = {key: plausible(part, generator) for key, part in codec.parts(shape, meta).items()}
    return QuantizedTensor.from_packed(parts, name, shape, dtype, meta)


def bytes_of(tensor):
    return {name: part.detach().cpu().clone() for name, part in tensor.packed.items()}


def same(a, b):
    assert (a.codec, a.meta, a.shape, a.dtype) == (b.codec, b.meta, b.shape, b.dtype)
    same_bytes(a.packed, b.packed)


def same_bytes(a, b):
    assert list(a) == list(b)
    for name in a:
        assert_bit_equal(a[name], b[name])


def linear_with(weight):
    module = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def test_the_codecs_of_this_package_are_here():
    names = {name for name, _ in PACKINGS}
    assert {"int8", "nf4", "bnb_fp4", "bnb_int8"} <= names
    assert sum(meta.get("double_quant", False) for _, meta in PACKINGS) >= 3


# ---- sizes and decoding --------------------------------------------------------------------------------


@every_packing
def test_sizes_are_as_stated(packing):
    name, meta = packing
    qt, codec = packed(packing), registry.codec(name)
    assert qt.packed_bytes == codec.packed_bytes(SHAPE, meta)
    assert {key: (part.dtype, tuple(part.shape)) for key, part in qt.packed.items()} == {
        key: (dtype, tuple(shape)) for key, (dtype, shape) in codec.parts(SHAPE, meta).items()
    }


@every_packing
@pytest.mark.parametrize("device", devices())
def test_decoding_is_the_same_everywhere(packing, device):
    """Bit for bit on each device, into a new tensor and a given one; a shorter dtype is rounded once."""
    qt = packed(packing)
    whole = qt.dequantize(torch.float32)
    assert bool(whole.isfinite().all())
    there = qt.to(device)
    same_bytes(bytes_of(there), qt.packed)
    assert_bit_equal(there.dequantize(torch.float32), whole)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        want = whole.to(dtype)
        assert_bit_equal(there.dequantize(dtype), want)
        out = torch.full(SHAPE, float("nan"), dtype=dtype, device=device)
        assert there.dequantize(out=out) is out
        assert_bit_equal(out, want)
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        there.dequantize(out=torch.empty(SHAPE[1], SHAPE[0], device=device))
    with pytest.raises(ArgumentError):
        there.dequantize(out=torch.empty(SHAPE[1], SHAPE[0], device=device).t())


@every_packing
@pytest.mark.parametrize("device", devices())
def test_several_tiles_decode_as_on_the_cpu(packing, device):
    """More than one tile of every kernel each way, the last incomplete; aligned, and at an odd address."""
    qt = packed(packing, (208, 1280))
    there = qt.to(device)
    for dtype in (torch.float32, torch.bfloat16):
        want = qt.dequantize(dtype)
        assert_bit_equal(there.dequantize(dtype), want)
        odd = torch.full((want.numel() + 2,), float("nan"), dtype=dtype, device=device)
        there.dequantize(out=odd[1:-1].view(want.shape))
        assert_bit_equal(odd[1:-1].view(want.shape), want)
        assert odd[[0, -1]].isnan().all()


@every_packing
def test_no_rows(packing):
    try:
        registry.codec(packing[0]).parts((0, 256), packing[1])
    except ArgumentError:
        return  # a format without empty matrices
    qt = packed(packing, (0, 256))
    assert qt.dequantize().shape == (0, 256)
    same(pickle.loads(pickle.dumps(qt)), qt)


@every_packing
def test_rows_and_shapes_give_what_the_decoded_tensor_gives(packing):
    qt = packed(packing)
    whole = qt.dequantize()
    for op in (
        lambda w: w[3],
        lambda w: w[8:24],
        lambda w: w[60:],
        lambda w: w[:, 1],
        lambda w: w.t(),
        lambda w: w.view(2, 32, 256),
        lambda w: w.reshape(32, 512),
        lambda w: w.view(2, 32, 256)[1],
        lambda w: w.unbind()[63],
        lambda w: w + 1,
    ):
        got = op(qt)
        assert_bit_equal(got.dequantize() if isinstance(got, QuantizedTensor) else got, op(whole))


@every_packing
def test_linear_and_its_gradient(packing):
    module = linear_with(packed(packing))
    plain = nn.Linear(256, 64)
    plain.load_state_dict({"weight": module.weight.dequantize(), "bias": module.bias.detach()})
    x, y = (make_tensor((3, 256), seed=9).requires_grad_() for _ in range(2))
    got, want = module(x), plain(y)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(module.bias.grad, plain.bias.grad)
    assert module.weight.grad is None


# ---- copies --------------------------------------------------------------------------------------------


@every_packing
def test_copies_keep_the_bytes(packing):
    qt = packed(packing)
    for make in (
        torch.clone,
        torch.detach,
        copy.copy,
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: t.data,
        lambda t: t.cpu(),
        lambda t: t.contiguous(),
        lambda t: t.half().float(),
        lambda t: nn.Parameter(t, requires_grad=False),
        lambda t: copy.deepcopy(nn.Parameter(t, requires_grad=False)),
    ):
        same(make(qt), qt)
    deep = copy.deepcopy(qt)
    for name, part in deep.packed.items():
        assert part.data_ptr() != qt.packed[name].data_ptr()


@every_packing
def test_files(packing, tmp_path):
    """torch.save, loaded by the safe unpickler, and safetensors, as plain tensors and metadata."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    qt = packed(packing, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save({"weight": nn.Parameter(qt, requires_grad=False)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert isinstance(loaded, nn.Parameter)
    same(loaded, qt)
    tensors, metadata = to_safetensors_dict("up.weight", qt)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    save_file(tensors, tmp_path / "w.safetensors", metadata)
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as opened:
        read = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        again = from_safetensors_dict("up.weight", read, opened.metadata())
    same(again, qt)
    for name in tensors:
        with pytest.raises(CheckpointError):
            from_safetensors_dict("up.weight", {k: v for k, v in tensors.items() if k != name}, metadata)
        short = tensors[name].flatten()[:-1]
        with pytest.raises(CheckpointError):
            from_safetensors_dict("up.weight", {**tensors, name: short}, metadata)


def _first(batch):
    return batch[0]


def test_data_loader_workers():
    """All of them through one worker; spawned, since a forked one would inherit the threads of the pool."""
    items = [packed(packing) for packing in PACKINGS]
    loader = DataLoader(items, num_workers=1, collate_fn=_first, multiprocessing_context="spawn")
    for got, want in zip(loader, items, strict=True):
        same(got, want)


@every_packing
def test_compiled(packing):
    """One graph without a break, the same bits, and no new graph for other bytes of the same form."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(x, weight):
        return torch.nn.functional.linear(x, weight)

    x = make_tensor((3, 256))
    for seed in range(2):
        qt = packed(packing, seed=seed)
        assert_bit_equal(run(x, qt), torch.nn.functional.linear(x, qt))
    assert counter.frame_count == 1


# ---- state dicts ---------------------------------------------------------------------------------------


@every_packing
def test_state_dict_round_trip(packing):
    source, target = linear_with(packed(packing)), linear_with(packed(packing, seed=5))
    state = source.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    target.load_state_dict(state)
    same(target.weight, source.weight)
    for name, part in target.weight.packed.items():
        assert part.data_ptr() != source.weight.packed[name].data_ptr()
    assigned = linear_with(packed(packing, seed=6)).requires_grad_(False)
    assigned.load_state_dict(state, assign=True)
    same(assigned.weight, source.weight)


class Adapted(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.base = linear_with(weight)
        self.a, self.b = nn.Parameter(torch.ones(2, 256)), nn.Parameter(torch.zeros(64, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


@every_packing
def test_loading_an_adapter_reads_only_what_is_named(packing):
    """The packed tensors are the same objects in the same memory, and nothing was written to them."""
    module = Adapted(packed(packing))
    before, parts = bytes_of(module.base.weight), module.base.weight.packed
    versions = {name: part._version for name, part in parts.items()}
    adapter = {name: torch.full_like(t, 0.5) for name, t in module.state_dict().items() if "base" not in name}
    for assign in (False, True):
        missing, unexpected = module.load_state_dict(adapter, strict=False, assign=assign)
        assert not unexpected
        assert "base.weight" in missing
    after = module.base.weight.packed
    for name, part in parts.items():
        assert after[name].data_ptr() == part.data_ptr()
        assert part._version == versions[name]
    same_bytes(bytes_of(module.base.weight), before)
    assert bool((module.a == 0.5).all())


@every_packing
def test_nothing_is_encoded_from_decoded_or_unwritten_values(packing):
    """A float checkpoint is refused, an unwritten module takes packed bytes as they are."""
    module = Adapted(packed(packing))
    before, state = bytes_of(module.base.weight), module.state_dict()
    decoded = {**state, "base.weight": module.base.weight.dequantize()}
    with pytest.raises(RuntimeError, match="packed bytes are copied, never encoded again"):
        module.load_state_dict(decoded)
    same_bytes(bytes_of(module.base.weight), before)
    with torch.device("meta"):
        empty = Adapted(nn.Linear(256, 64).weight.detach())
    empty.load_state_dict(state, assign=True)
    same(empty.base.weight, module.base.weight)
    rebuilt = Adapted(packed(packing, seed=7))
    rebuilt.load_state_dict(copy.deepcopy(state))
    same(rebuilt.base.weight, module.base.weight)


@every_packing
def test_training_beside_it_leaves_the_bytes_alone(packing):
    """Steps, a checkpoint of model and optimizer through a file, and more steps in a new module."""
    module = Adapted(packed(packing))
    before, x = bytes_of(module.base.weight), make_tensor((3, 256))
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)

    def step(module, optimizer):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(module, optimizer)
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Adapted(packed(packing, seed=3))
    resumed.load_state_dict(saved["model"])
    again = torch.optim.AdamW([p for p in resumed.parameters() if p.requires_grad], lr=0.01)
    again.load_state_dict(saved["optimizer"])
    for pair in ((module, optimizer), (resumed, again)):
        step(*pair)
    for one in (module, resumed):
        same_bytes(bytes_of(one.base.weight), before)
    for one, other in zip(trained, (p for p in resumed.parameters() if p.requires_grad), strict=True):
        assert_bit_equal(one.detach(), other.detach())


# ---- what encodes --------------------------------------------------------------------------------------

ENCODING = [packing for packing in PACKINGS if registry.codec(packing[0]).encodes]
every_encoding = pytest.mark.parametrize(
    "packing", ENCODING, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ENCODING)]
)


def encode(packing, tensor):
    name, meta = packing
    double = bool(meta.get("double_quant", False))
    return quantize(tensor, name, double_quant=double, name="layers.3.weight")


@every_encoding
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_name(packing, device, value):
    x = make_tensor((64, 256), device=device)
    x[37, 11] = value
    with pytest.raises(ArgumentError, match=r"layers\.3\.weight: expected finite"):
        encode(packing, x)


@every_encoding
@pytest.mark.parametrize("device", devices())
def test_zeros_denormals_and_neighbours(packing, device):
    """Zeros stay zeros, no denormal grows, and neither touches the blocks around it."""
    x = make_tensor((64, 256), device=device)
    plain = encode(packing, x).dequantize()
    x[8:16] = 0.0
    x[16:24] = 1e-42
    got = encode(packing, x).dequantize()
    assert not bool(got[8:16].any())
    assert bool(got.isfinite().all())
    assert bool((got[16:24].abs() <= 1.2e-42).all()) or bool((got[16:24].abs() <= 1e-6).all())
    relative = float((got - x).norm() / x.norm())
    assert relative <= 1.05 * float((plain - make_tensor((64, 256), device=device)).norm() / x.norm()) + 1e-3


@every_encoding
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 0), (5, 33), (2, 3, 65), (129,)])
def test_odd_shapes(packing, device, shape):
    """One-dimensional, empty and odd tensors are packed and decoded, or refused by an error that says why."""
    x = make_tensor(shape, device=device)
    if packing[0] not in ("nf4", "int8"):
        try:
            registry.codec(packing[0]).parts(shape, packing[1])
        except ArgumentError:
            with pytest.raises(ArgumentError):
                encode(packing, x)
            return
    qt = encode(packing, x)
    assert qt.packed_bytes == registry.codec(packing[0]).packed_bytes(shape, qt.meta)
    got = qt.dequantize()
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    if x.numel():
        assert float((got - x).norm()) <= 0.3 * float(x.norm())
    assert_bit_equal(encode(packing, x.cpu()).dequantize(), got)


@every_encoding
@pytest.mark.parametrize("device", devices())
def test_any_layout_and_dtype_of_the_source(packing, device):
    x = make_tensor((64, 512), dtype=torch.bfloat16, device=device)
    want = encode(packing, x[:, ::2].contiguous())
    same_bytes(bytes_of(encode(packing, x[:, ::2])), bytes_of(want))
    same_bytes(bytes_of(encode(packing, x[:, ::2].t().contiguous().t())), bytes_of(want))
    same_bytes(bytes_of(encode(packing, x[:, ::2].float())), bytes_of(want))


@every_encoding
def test_sizes_beyond_32_bits(packing):
    """Without the memory: shapes of the packed tensors of more elements than 32 bits count."""
    shape = (2**20 + 64, 2048 + 256)
    qt = encode(packing, torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    assert qt.packed_bytes == registry.codec(packing[0]).packed_bytes(shape, qt.meta)
    assert 0.5 < qt.packed_bytes / (shape[0] * shape[1]) < 1.1
    assert qt.dequantize().shape == shape
