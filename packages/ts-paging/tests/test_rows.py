"""A frozen embedding below the device: the same bits as the resident one."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import StateError
from ts_core.guard import guard_of
from ts_core.paged import with_weights
from ts_core.testing import assert_bit_equal, devices
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager
from ts_paging.rows import GatheredRows, gathers

ROWS, WIDTH = 23, 8


class Scaled(nn.Embedding):
    """As Gemma's: the result is scaled in the dtype of the weight."""

    def forward(self, input_ids):
        return super().forward(input_ids) * torch.tensor(WIDTH**0.5).to(self.weight.device, self.weight.dtype)


class Positions(nn.Embedding):
    """As OPT's and BART's: only the shape of what comes in counts, and there is an offset."""

    def forward(self, mask, past=0):
        return super().forward((torch.cumsum(mask, 1) * mask).long() - 1 + 2 + past)


class Clamped(nn.Embedding):
    """Looks itself up, by function and with ids of its own making."""

    def forward(self, input):
        return F.embedding(
            input.clamp(0, self.weight.shape[0] - 1), self.weight, padding_idx=self.padding_idx
        )


def embedding(kind=nn.Embedding, dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = kind(ROWS, WIDTH, dtype=dtype, **options)
    with torch.no_grad():
        module.weight.normal_()
        module.weight[3, 2] = -0.0
        module.weight[4, 1] = float("nan")
    return module.requires_grad_(False)


def page(module, device="cpu", files=None):
    plain = copy.deepcopy(module).to(device)
    if files is not None:
        module.weight.data = files.place(module.weight.data)
    pager = WeightPager(torch.device(device))
    pager.attach([], [("embed", module)])
    return plain, pager, pager.edges[0]


@pytest.fixture(params=["host", "files"])
def files(request, tmp_path):
    if request.param == "host":
        yield None
        return
    made = FileTensors(tmp_path)
    yield made
    made.close()


IDS = {
    "row": torch.tensor([5, 1, 5, 0, 22]),
    "batch": torch.tensor([[3, 3, 3], [4, 3, 0]]),
    "cube": torch.arange(12).view(2, 3, 2),
    "one": torch.tensor(7),
    "empty": torch.empty(0, dtype=torch.long),
    "empty batch": torch.empty(2, 0, dtype=torch.long),
    "int32": torch.tensor([[2, 9]], dtype=torch.int32),
    "strided": torch.arange(20).view(4, 5).t()[::2],
    "expanded": torch.tensor([[4], [2]]).expand(2, 3),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Clamped])
def test_ids_of_any_shape(kind, dtype, files, device):
    plain, pager, edge = page(embedding(kind, dtype), device, files)
    assert isinstance(edge, GatheredRows)
    assert pager.slots == []
    for name, ids in IDS.items():
        ids = ids.to(device)
        got, expected = edge.module(ids), plain(ids)
        assert got.device == expected.device, name
        assert_bit_equal(got.view(torch.uint8).cpu(), expected.view(torch.uint8).cpu())
        assert not got.requires_grad


@given(st.lists(st.integers(0, ROWS - 1), max_size=12))
def test_any_ids_bring_each_row_once(ids):
    plain, _, edge = page(embedding())
    ids = torch.tensor(ids, dtype=torch.long)
    assert_bit_equal(edge.module(ids), plain(ids))
    assert edge.gathered_bytes == len(set(ids.tolist())) * WIDTH * 4


@pytest.mark.parametrize("device", devices())
def test_bytes_are_counted(device, files):
    _, _, edge = page(embedding(dtype=torch.bfloat16), device, files)
    edge.module(torch.tensor([1, 1, 2], device=device))
    edge.module(torch.tensor([2], device=device))
    assert edge.gathered_bytes == 3 * WIDTH * 2
    assert (edge.runs, edge.fills) == (2, 2)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("padding", [0, 5, -1])
def test_padding_is_a_row_like_others(padding, device):
    plain, _, edge = page(embedding(padding_idx=padding), device)
    ids = torch.tensor([[5, 0, ROWS - 1]], device=device)
    assert_bit_equal(edge.module(ids), plain(ids))
    assert edge.module.padding_idx == plain.padding_idx


@pytest.mark.parametrize("device", devices())
def test_ids_that_the_module_makes_itself(device, files):
    plain, _, edge = page(embedding(Positions), device, files)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], device=device)
    for past in (0, 3):
        assert torch.equal(edge.module(mask, past=past).nan_to_num(), plain(mask, past=past).nan_to_num())


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_keywords(kind):
    plain, _, edge = page(embedding(kind))
    ids = {"input" if kind is nn.Embedding else "input_ids": torch.tensor([1, 2])}
    assert_bit_equal(edge.module(**ids), plain(**ids))
    assert edge.gathered_bytes == 2 * WIDTH * 4


@pytest.mark.parametrize("bad", [ROWS, -1, 10**9])
def test_ids_out_of_range_are_an_index_error(bad, files):
    plain, _, edge = page(embedding(), files=files)
    for module in (plain, edge.module):
        with pytest.raises(IndexError):
            module(torch.tensor([0, bad]))
    assert_bit_equal(edge.module(torch.tensor([0])), plain(torch.tensor([0])))
    assert edge.module._parameters["weight"] is edge.parameters[0]


def test_wrong_ids_are_refused_as_without_paging():
    _, _, edge = page(embedding())
    with pytest.raises((RuntimeError, TypeError)):
        edge.module(torch.tensor([0.5]))
    with pytest.raises(TypeError):
        edge.module([1, 2])


@pytest.mark.parametrize("device", devices())
def test_gradients_flow_through_what_follows(device, files):
    plain, _, edge = page(embedding(Scaled), device, files)
    x = torch.tensor([[1, 2, 1]], device=device)
    torch.manual_seed(0)
    adapter = nn.Linear(WIDTH, WIDTH).to(device)
    grads = []
    for module in (plain, edge.module):
        adapter.zero_grad()
        (adapter(module(x)) * module(x)).sum().backward()
        grads.append(adapter.weight.grad.clone())
        assert module.weight.grad is None
    assert_bit_equal(*grads)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_trained_again_later(kind, device, files):
    plain, _, edge = page(embedding(kind, padding_idx=2), device, files)
    optimizers = []
    for module in (plain, edge.module):
        module.weight.data.nan_to_num_()
        module.requires_grad_(True)
        optimizers.append(torch.optim.SGD(module.parameters(), lr=0.5))
    seen = []
    edge.module.weight.register_hook(lambda grad: seen.append(grad.clone()))
    for step in range(3):
        ids = torch.tensor([[1, 2, 1], [step, 7, 2]], device=device)
        for module, optimizer in zip((plain, edge.module), optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).pow(2).sum().backward()
            optimizer.step()
        assert torch.equal(edge.module.weight.grad.cpu(), plain.weight.grad.cpu())
        assert torch.equal(edge.module.weight.cpu(), plain.weight.cpu())
        assert torch.equal(seen[step].cpu(), plain.weight.grad.cpu())
    with torch.no_grad():
        assert torch.equal(edge.module(ids), plain(ids))


def test_an_update_under_way_is_waited_for():
    _, _, edge = page(embedding())
    for trained in (False, True):
        edge.module.requires_grad_(trained)
        waited = []
        guard_of(edge.parameters[0]).pending = lambda waited=waited: waited.append(True)
        edge.module(torch.tensor([1]))
        assert waited == [True]


@pytest.mark.parametrize("device", devices())
def test_the_whole_weight_for_other_uses(device, files):
    plain, _, edge = page(embedding(), device, files)
    x = torch.ones(2, WIDTH, device=device, requires_grad=True)
    module = edge.module

    def scores():
        assert module.weight.device.type == device
        assert module.weight.shape == (ROWS, WIDTH)
        return F.linear(x, module.weight), x @ module.weight.t(), torch.cat([module.weight, module.weight])

    for got, expected in zip(
        with_weights(module, scores),
        (F.linear(x, plain.weight), x @ plain.weight.t(), torch.cat([plain.weight, plain.weight])),
        strict=True,
    ):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert type(got) is torch.Tensor


def test_writes_from_outside_are_seen():
    plain, _, edge = page(embedding())
    for module in (plain, edge.module):
        with torch.no_grad():
            module.weight[1] = 7.0
    assert_bit_equal(edge.module(torch.tensor([1, 2])), plain(torch.tensor([1, 2])))


def test_a_copy_is_an_ordinary_embedding():
    plain, pager, edge = page(embedding(Scaled))
    twin = copy.deepcopy(edge.module)
    assert type(twin.weight) is nn.Parameter
    assert_bit_equal(twin(torch.tensor([1, 5])), plain(torch.tensor([1, 5])))
    pager.detach()
    assert "forward" not in edge.module.__dict__
    assert_bit_equal(edge.module(torch.tensor([1, 5])), plain(torch.tensor([1, 5])))


def test_what_gathers():
    assert gathers(embedding())
    assert gathers(embedding(Scaled))
    assert not gathers(nn.Embedding(3, 2))
    assert not gathers(embedding(max_norm=1.0))
    assert not gathers(nn.Linear(3, 2).requires_grad_(False))
    assert not gathers(nn.EmbeddingBag(3, 2).requires_grad_(False))


def test_another_parameter_in_its_place():
    """load_state_dict(assign=True)."""
    plain, _, edge = page(embedding())
    value = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    for module in (plain, edge.module):
        module.load_state_dict({"weight": value.clone()}, assign=True)
        module.requires_grad_(False)
    assert_bit_equal(edge.module(torch.tensor([1, 2])), plain(torch.tensor([1, 2])))
    assert edge.gathered_bytes == 2 * WIDTH * 4


class Slow(nn.Embedding):
    """Looks ids up once it is told to."""

    inside, go_on = threading.Event(), threading.Event()

    def forward(self, ids):
        self.inside.set()
        assert self.go_on.wait(60)
        return super().forward(ids)


def test_a_second_thread_is_refused_while_the_weight_is_exchanged(monkeypatch):
    monkeypatch.setattr("ts_paging.turns._LINGERS", 0.01)
    module = embedding(Slow)
    weight, ids, found = module.weight, torch.arange(5), []
    expected = F.embedding(ids, weight.detach().clone())
    page(module)
    first = threading.Thread(target=lambda: found.append(module(ids)))
    first.start()
    assert Slow.inside.wait(60)
    with pytest.raises(StateError, match="another thread"):
        module(ids)
    Slow.go_on.set()
    first.join()
    assert_bit_equal(found[0], expected)
    assert module.weight is weight
    assert_bit_equal(module(ids), expected)
