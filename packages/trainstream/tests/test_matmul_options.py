"""`outliers`, `fp8_backward` and `nvfp4_backward` through `wrap()`, and slots that hold packed weights."""

import copy

import pytest
import torch
from torch import nn

import trainstream
from trainstream._session import session_of
from ts_core.errors import DeviceError
from ts_core.testing import assert_bit_equal
from ts_quant import Matmul, QuantizedTensor
from ts_quant.matmul import emulated

WIDTH = 512
CODECS = ("fp8_row", "fp8_block", "mxfp8", "nvfp4")


class Block(nn.Module):
    """A gated MLP whose projections share their input, and an adapter that trains."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(3)
        )
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        y = nn.functional.layer_norm(x, (WIDTH,))
        return x + self.down(self.gate(y).sigmoid() * self.up(y)) + 0.01 * self.adapter(y)


def stack(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def packed(model):
    return [p for p in model.parameters() if isinstance(p, QuantizedTensor)]


def events(model):
    return session_of(model).events.events


def train(model, optimizer, steps=2):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # gradients add up
            loss = model(x).float().square().mean()
            loss.backward()
        losses += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return losses


PLACES = [
    {"param_offload": True, "recompute": False, "activation_offload": False},
    {"param_offload": True, "recompute": True},
    {"param_offload": True, "activation_offload": True, "recompute": False, "min_offload_bytes": 0},
    {"param_offload": [1], "recompute": False, "activation_offload": False},
]


@pytest.mark.parametrize(
    ("codec", "places"), [*(("fp8_row", places) for places in PLACES), *((c, PLACES[1]) for c in CODECS[1:])]
)
def test_a_paged_model_multiplies_as_the_resident_one(codec, places, tmp_path):
    options = {"quantize": codec, "device": "cpu", "fp8_backward": True, "nvfp4_backward": True}
    options["outliers"] = 0.01
    model = stack()
    same = copy.deepcopy(model)
    with emulated():
        resident = trainstream.wrap(same, param_offload=False, recompute=False, **options)
        want = train(*resident)
        paged, optimizer = trainstream.wrap(model, **places, **options, disk_offload=str(tmp_path))
        assert all(p.slot_parts(torch.device("cpu")) for p in packed(paged))
        assert session_of(paged).plan.paged
        for got, expected in zip(train(paged, optimizer), want, strict=True):
            assert_bit_equal(got, expected)
        for p, q in zip(paged.parameters(), same.parameters(), strict=True):
            assert_bit_equal(p.detach(), q.detach())
        seats = [seat for block in session_of(paged).pager.blocks for seat in block.seats]
        assert sum(seat.packed for seat in seats) == 3 * len([b for b in session_of(paged).plan.paged])
        if codec == "fp8_row":  # W, W^T and scales, where the decoded weight takes two bytes a value
            assert {seat.like.numel() for seat in seats if seat.packed} == {2 * WIDTH * WIDTH + 4 * WIDTH}
        trainstream.unwrap(paged)
    assert all(p.matmul_options == Matmul() for p in packed(paged))


def test_autocast_over_weights_of_another_dtype_computes_the_same_wherever_they_lie(tmp_path):
    x, results = torch.randn(3, WIDTH), []
    for options in (
        {"param_offload": False},
        {"param_offload": True, "disk_offload": str(tmp_path)},
    ):
        with emulated():
            model, _ = trainstream.wrap(stack().float(), quantize="fp8_row", device="cpu", **options)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                results.append(model(x).detach())
            trainstream.unwrap(model)
    assert_bit_equal(*results)


def test_without_packed_gradients_a_slot_holds_half_of_it(tmp_path):
    with emulated():
        model, _ = trainstream.wrap(
            stack(), quantize="fp8_row", device="cpu", param_offload=True, disk_offload=str(tmp_path)
        )
        pager = session_of(model).pager
        bytes_ = {seat.like.numel() for block in pager.blocks for seat in block.seats if seat.packed}
        assert bytes_ == {WIDTH * WIDTH + 4 * WIDTH}
        trainstream.unwrap(model)


def test_events_say_what_multiplies():
    with emulated():
        options = {"outliers": True, "nvfp4_backward": True, "fp8_backward": True}
        model, _ = trainstream.wrap(stack(), quantize="nvfp4", **options)
    lines = events(model)
    assert any(line.startswith("matmul: 6 of 6 packed weights multiply on tensor cores") for line in lines)
    assert "outliers=0.01: 6 weights keep this share of channels in bf16" in lines
    assert "nvfp4_backward=True: 6 weights have a packed input gradient" in lines
    assert "fp8_backward=True ignored: no weight is packed as mxfp8 or fp8_row or fp8_block" in lines
    numerics = session_of(model).plan.numerics
    assert (numerics.outliers, numerics.fp8_backward, numerics.nvfp4_backward) == (0.01, True, True)
    assert {p.matmul_options for p in packed(model)} == {Matmul(True, 0.01, True)}


def test_events_say_what_is_decoded():
    model, _ = trainstream.wrap(stack(), quantize="nvfp4", outliers=0.05, nvfp4_backward=True, device="cpu")
    lines = events(model)
    assert not any(line.startswith("matmul:") for line in lines)
    assert "outliers=0.05 ignored: nvfp4 is decoded on cpu" in lines
    assert "nvfp4_backward=True ignored: nvfp4 is decoded on cpu" in lines
    model, _ = trainstream.wrap(stack(), quantize="int8", outliers=0.05, fp8_backward=True)
    assert "outliers=0.05 ignored: no weight is packed as nvfp4" in events(model)


def test_a_wrong_gradient_stops_wrap_and_changes_nothing(monkeypatch):
    model = stack()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("ts_quant.verify.gradient_error", lambda weight: 1.0)
    with pytest.raises(DeviceError, match=r"0\.gate\.weight.*nf4"):
        trainstream.wrap(model, quantize="nf4")
    assert not packed(model)
    assert session_of(model) is None
    for name, value in model.state_dict().items():
        assert_bit_equal(value, before[name])
