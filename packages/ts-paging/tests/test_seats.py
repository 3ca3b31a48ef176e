"""Slots that hold a weight packed, as its device multiplies it, and what is made of it there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ts_core import registry
from ts_core.errors import StateError
from ts_core.testing import assert_bit_equal, devices
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager

WIDTH, LAYERS = 16, 3


class Rows:
    """A codec: int8 codes and a scale per row."""

    name = "test_seats_rows"

    def encode(self, tensor, meta):
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return {"codes": (tensor / scale).round().to(torch.int8), "scale": scale}

    def decode(self, packed, shape, dtype, meta, out=None):
        made = (packed["codes"].float() * packed["scale"]).to(dtype)
        return made if out is None else out.copy_(made)

    def packed_bytes(self, shape, meta):
        return 0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale, turned):
        ctx.save_for_backward(codes, scale, turned)
        return (x @ codes.float().t()) * scale.view(-1)

    @staticmethod
    def backward(ctx, grad):
        codes, scale, turned = ctx.saved_tensors
        rows = codes if turned is None else turned.t()
        return (grad * scale.view(-1)) @ rows.float(), None, None, None


class Packed(torch.Tensor):
    """A weight that multiplies packed if its class says so, with the transposed codes where they are."""

    slotted, codec, meta = True, Rows.name, 0

    @staticmethod
    def __new__(cls, packed):
        codes = packed["codes"]
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.packed = dict(packed)
        return made

    def slot_parts(self, device):
        if not self.slotted:
            return None
        parts = {name: (part.dtype, tuple(part.shape)) for name, part in self.packed.items()}
        return {**parts, "turned": (torch.int8, tuple(self.packed["codes"].t().shape))}

    def complete_slot(self, parts):
        parts["turned"].copy_(parts["codes"].t())

    def with_packed(self, packed):
        return type(self)(packed)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            packed = args[1].packed
            return _Product.apply(args[0], packed["codes"], packed["scale"], packed.get("turned"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].with_packed(args[0].packed)
        unpack = lambda t: Rows().decode(t.packed, None, t.dtype, 0) if isinstance(t, cls) else t  # noqa: E731
        return func(*torch.utils._pytree.tree_map(unpack, args), **(kwargs or {}))


class Decoded(Packed):
    slotted = False


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.fixture(autouse=True)
def _codec():
    registry.register_codec(Rows())


def build(kind, turned=False):
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(LAYERS))
    for block in model:
        for layer in (block.up, block.down):
            parts = Rows().encode(layer.weight.detach(), 0)
            if turned:
                parts["turned"] = parts["codes"].t().contiguous()
            layer.weight = nn.Parameter(kind(parts), requires_grad=False)
    return model


def train(model, device):
    x = torch.linspace(-1, 1, 3 * WIDTH, device=device).view(3, WIDTH).requires_grad_()
    y = x
    for block in model:
        y = block(y)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def paged(model, device, policy, slots, files=None):
    for parameter in model.parameters():
        if files is not None and parameter.requires_grad:
            parameter.data = files.place(parameter.data)
        elif files is not None:
            parts = {name: files.place(part) for name, part in parameter.packed.items()}
            parameter.packed = parts
    pager = WeightPager(torch.device(device), slots=slots, gradients=files, min_offload_bytes=0)
    pager.attach([(str(i), block, policy) for i, block in enumerate(model)], [])
    return pager


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", [Packed, Decoded])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("in_files", [False, True])
def test_a_slot_holds_what_is_multiplied(device, kind, policy, in_files, tmp_path):
    model = build(kind)
    want = train(build(Packed, turned=True), "cpu") if device == "cpu" else None
    files = FileTensors(tmp_path) if in_files else None
    pager = paged(model, device, policy, 1 + in_files, files)
    got = train(model, device)
    if want is not None and kind is Packed:
        for value, expected in zip(got, want, strict=True):
            assert_bit_equal(value, expected)
    again = train(model, device)
    for value, expected in zip(again[:2], got[:2], strict=True):
        assert_bit_equal(value, expected)
    for block in pager.blocks:
        assert [seat.packed for seat in block.seats].count(True) == (2 if kind is Packed else 0)
        if kind is Packed:
            up = next(view for view in block.views if view.shape == (24, WIDTH))
            assert set(up.packed) == {"codes", "scale", "turned"}
            start = block.slot.address
            for part in up.packed.values():
                assert start <= part.data_ptr() < start + block.slot.buffer.numel()
    pager.detach()


def test_a_weight_in_the_place_of_another_is_packed_alike():
    model = build(Packed)
    pager = paged(model, "cpu", "keep", 1)
    other = Rows().encode(torch.ones(24, WIDTH), 0)
    model[1].up.weight = nn.Parameter(Packed(other), requires_grad=False)
    train(model, "cpu")
    model[1].up.weight = nn.Parameter(torch.ones(24, WIDTH), requires_grad=False)
    with pytest.raises(StateError, match="cannot be paged in its place"):
        train(model, "cpu")
    pager.detach()
