"""Unusual parameters and bytes through the host and disk tiers: nothing is altered, whatever they are.

Frozen tensors keep every bit, their strides and dtype; trained ones equal plain torch; elements that are not
there are no-ops.
"""

import copy

import pytest
import torch
from grid_models import HostOptimizer, offload_adamw, paged, same_bits, stored, values
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstream
from ts_core.testing import devices, make_tensor
from ts_core.testing import shapes as any_shape
from ts_paging.files import FileTensors, locate
from ts_paging.layout import is_dense
from ts_paging.sink import PlainMemory

HOWS = ["host", "disk", "wrap"]


def every_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(256, 256)


def odd_fp32():
    patterns = [
        0x7F800001,
        0xFFC12345,
        0x80000000,
        0x00000001,
        0x807FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FFFFFFF,
    ]
    signed = [value - (1 << 32) if value >= 1 << 31 else value for value in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def every_fp16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)


def strange_fp64():
    patterns = [0x7FF0000000000001, 0x7FF8000000012345, 1, 0x000FFFFFFFFFFFFF, -0x8000000000000000]
    return torch.tensor(patterns, dtype=torch.int64).view(torch.float64)


FROZEN = {
    "every_bf16": every_bf16,
    "every_bf16_transposed": lambda: every_bf16().t(),
    "odd_fp32": odd_fp32,
    "every_fp16": every_fp16,
    "strange_fp64": strange_fp64,
    "complex64": lambda: torch.view_as_complex(torch.stack([odd_fp32(), odd_fp32().flip(0)], -1)),
    "scalar": lambda: torch.tensor(2.5),
    "one": lambda: torch.tensor([-0.0]),
    "no_columns": lambda: torch.zeros(0, 8),
    "no_rows": lambda: torch.zeros(8, 0),
    "cube": lambda: torch.randn(3, 5, 7),
    "channels_last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "int64": lambda: torch.tensor([2**62, -(2**63), 5]),
    "uint8": lambda: torch.arange(256, dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False, True]),
    "float8": lambda: torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn),
}
#: Those that torch lets be Parameters of a module whose ``.data`` is replaced.
TRAINED = {
    "scalar": lambda: torch.tensor(0.5),
    "no_columns": lambda: torch.zeros(0, 8),
    "no_rows": lambda: torch.zeros(8, 0),
    "one": lambda: torch.tensor([0.25]),
    "cube": lambda: torch.randn(3, 5, 7),
    "transposed": lambda: torch.randn(6, 4).t(),
    "channels_last": lambda: torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
    "bf16": lambda: torch.randn(5, 3).bfloat16(),
    "fp16": lambda: torch.randn(5, 3).half(),
    "fp64": lambda: torch.randn(5, 3).double(),
    "denormal": lambda: torch.full((4,), 1e-42),
    "negative_zero": lambda: torch.full((4,), -0.0),
}
BUFFERS = {
    "int64": lambda: torch.tensor([2**62, -(2**63)]),
    "bool": lambda: torch.tensor([True, False]),
    "uint8": lambda: torch.arange(7, dtype=torch.uint8),
    "float8": lambda: torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
}


class Odd(nn.Module):
    """A block that holds every kind of tensor, and trains those that can be trained."""

    def __init__(self, frozen):
        super().__init__()
        held = FROZEN if frozen else {}
        self.frozen = nn.ParameterDict(
            {name: nn.Parameter(make(), requires_grad=False) for name, make in held.items()}
        )
        self.trained = nn.ParameterDict({name: nn.Parameter(make()) for name, make in TRAINED.items()})
        for name, make in BUFFERS.items():
            self.register_buffer(f"kept_{name}", make())

    def forward(self, x):
        # Each is used so that a wrong stride, shape or byte changes the result.
        for p in self.trained.values():
            weights = torch.linspace(0.5, 1.5, max(p.numel(), 1), device=x.device)[: p.numel()].view(p.shape)
            x = x + (p.float() * weights).sum() * 0.1
        if not len(self.frozen):
            return x + self.kept_scalar
        x = x * self.frozen["scalar"] + self.frozen["cube"].sum() + self.frozen["int64"][2]
        return x + self.frozen["channels_last"].flatten().sum() + self.frozen["bool"].sum() + self.kept_scalar


class Model(nn.Module):
    def __init__(self, frozen=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Odd(frozen) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layout(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_odd_tensors_train_and_come_back(how, frozen, policy, device):
    model = Model(frozen)
    oracle = copy.deepcopy(model).to(device)
    before = {name: (layout(p), p.detach().clone()) for name, p in model.named_parameters()}
    buffers = {name: (layout(b), b.clone()) for name, b in model.named_buffers()}
    runs = []
    with paged(model, how, policy, device, blocks=list(model.layers)) as (pager, optimizer):
        reference = HostOptimizer(oracle, offload_adamw)
        for net, opt in ((model, optimizer), (oracle, reference)):
            x = torch.linspace(-1, 1, 6, device=device)
            losses = []
            for _ in range(3):
                opt.zero_grad()
                loss = net(x).pow(2).mean() * 1e-6
                loss.backward()
                losses.append(loss.item())
                gradients = {n: p.grad.cpu().clone() for n, p in net.named_parameters() if p.requires_grad}
                opt.step()
            runs.append((losses, gradients, values(net)))
        # wrap() pages what is trained only in blocks that are trained as a whole.
        assert all(block.fills >= (1 if how == "wrap" and frozen else 3) for block in pager.blocks)
        for name, p in model.named_parameters():
            assert layout(p) == before[name][0], name
        # Slots hold the same bytes: what a block computes with.
        for block in pager.blocks:
            pager.use(block, fresh=True)
            for view, p in zip(block.views, block.parameters, strict=True):
                assert layout(view) == layout(p)
                assert p.requires_grad or same_bits(view.cpu(), p.detach().cpu())
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    assert runs[0][0] == runs[1][0]
    for ours, theirs in zip(runs[0][1:], runs[1][1:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if device == "cuda" and how == "wrap" and value.dtype is torch.float64:
                # A float64 parameter that stays is updated by PyTorch on its device.
                torch.testing.assert_close(ours[name], value, rtol=1e-14, atol=0, equal_nan=True)
            else:
                assert same_bits(ours[name], value), name
    for name, p in model.named_parameters():
        assert layout(p) == before[name][0], name
        assert type(p) is nn.Parameter, name
        assert same_bits(p.detach().cpu(), state[name]), name
        if not p.requires_grad:
            assert same_bits(p.detach().cpu(), before[name][1]), name
    for name, buffer in model.named_buffers():
        assert layout(buffer) == buffers[name][0], name
        assert same_bits(buffer.cpu(), buffers[name][1]), name


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_stock_optimizers_train_odd_tensors_in_files(make):
    model = Model()
    oracle = copy.deepcopy(model)
    options = {"lr": 1e-2, **({"momentum": 0.9} if make is torch.optim.SGD else {})}

    def optimizer_of(parameters):
        return make([p for p in parameters if p.requires_grad], **options)

    with paged(model, "disk", blocks=list(model.layers), make=optimizer_of) as (_, optimizer):
        for net, opt in ((model, optimizer), (oracle, optimizer_of(oracle.parameters()))):
            for _ in range(3):
                opt.zero_grad()
                (net(torch.ones(2)).pow(2).mean() * 1e-6).backward()
                torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 1.0)
                opt.step()
        ours, theirs = values(model), values(oracle)
    assert all(same_bits(ours[name], value) for name, value in theirs.items())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_wrapped_model_without_elements():
    model = nn.Sequential(*[nn.Linear(0, 0) for _ in range(3)])
    model, optimizer = trainstream.wrap(model, param_offload=True, blocks=list(model), lr=0.1)
    model(torch.zeros(2, 0)).sum().backward()
    optimizer.step()
    assert trainstream.memory_report(model)["params"]["total"] == 0
    trainstream.unwrap(model)


@pytest.mark.parametrize("name", FROZEN)
def test_files_keep_every_bit(name):
    files = FileTensors()
    tensor = FROZEN[name]()
    mapped = files.place(tensor)
    assert layout(mapped) == layout(tensor)
    assert same_bits(mapped, tensor)
    if tensor.numel():
        owner, key = locate(mapped)
        assert owner is files
        back = torch.empty_like(tensor, memory_format=torch.preserve_format)
        files.read_async(key, back).wait()
        assert same_bits(back, tensor)
    like = files.like(tensor)
    assert layout(like) == layout(tensor)
    files.close()


@pytest.mark.parametrize("name", FROZEN)
def test_host_memory_keeps_every_bit(name):
    tensor = FROZEN[name]()
    assert layout(PlainMemory().like(tensor)) == layout(tensor)
    host = stored(tensor, None, pinned=False)
    assert layout(host) == layout(tensor)
    assert same_bits(host, tensor)


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())

    def forward(self, x):
        return x + self.weight.float().nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).sum()


@given(
    shape=any_shape(min_dims=0, min_side=0, max_numel=600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    flavour=st.sampled_from(["normal", "denormal", "negative_zero", "large", "mixed_scale"]),
    order=st.randoms(use_true_random=False),
    how=st.sampled_from(["host", "disk"]),
)
def test_any_dense_parameter_comes_back_from_its_slot(shape, dtype, flavour, order, how):
    tensor = make_tensor(shape, dtype=dtype, flavour=flavour, seed=order.randrange(2**31))
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = tensor.permute(axes)
    assert is_dense(tensor)
    model = nn.Sequential(Holder(tensor), Holder(tensor.clone()))
    expected = copy.deepcopy(model)
    with paged(model, how, blocks=list(model), slots=1) as (pager, _):
        for net in (model, expected):
            net(torch.ones(2)).sum().backward()
        assert torch.equal(model[0].weight.grad, expected[0].weight.grad)
        for block in pager.blocks:
            pager.use(block, fresh=True)
            assert layout(block.views[0]) == layout(tensor)
            assert same_bits(block.views[0], tensor)


class Mixes(nn.Linear):
    """A layer of a graph network: the neighbours are a sparse buffer."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("near", torch.eye(4).to_sparse())

    def forward(self, x):
        return x + super().forward(torch.sparse.mm(self.near, x))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_offload": True, "recompute": True},
        {"param_offload": True, "activation_offload": True, "min_offload_bytes": 0},
    ],
)
def test_sparse_buffers_train_as_in_plain_torch(options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Mixes() for _ in range(3)])
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = trainstream.wrap(model, optimizer, **options)
    session = model._trainstream_session
    for step in range(3):
        other.zero_grad()
        plain(x).square().mean().backward()
        other.step()
        session.train_step([x], lambda y, _: y.square().mean())
        if step == 0:
            session.snapshot()
            session.train_step([x], lambda y, _: y.square().sum())
            session.rollback()
    trainstream.unwrap(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
