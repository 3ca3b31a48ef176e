"""Data parallel training: two real processes against one that is given the averages itself."""

from __future__ import annotations

import datetime
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ts_core.errors import OptionError
from ts_optim import OffloadAdamW

RANKS = 2
SHAPES = [(7, 5), (33,), (0,), (64, 3), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64]


def weights(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def gradients(step: int, rank: int) -> list[Tensor | None]:
    """One is missing on rank 1 in each second step, and one on all ranks in the first."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made: list[Tensor | None] = []
    for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        absent = (index == 1 and rank == 1 and step % 2) or (index == 3 and step == 0)
        made.append(None if absent else grad)
    return made


def train(params: list[Tensor], optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        for param, grad in zip(params, gradients(step, rank), strict=True):
            param.grad = grad
        optimizer.step()


def outcome(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int) -> dict[str, str]:
    found = {}
    other = [torch.nn.Parameter(torch.ones(2 + rank))]
    found["other shapes"] = outcome(lambda: OffloadAdamW(other, distributed=True))
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = OffloadAdamW([param], distributed=True)
    param.grad = torch.ones(3).to_sparse() if rank else torch.ones(3)
    found["sparse on one rank"] = outcome(optimizer.step)
    found["weights"] = str(param.tolist())
    param.grad = torch.ones(3)
    optimizer.found_inf = torch.zeros(())
    found["scaler"] = outcome(optimizer.step)
    return found


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", world_size=RANKS, rank=rank, timeout=datetime.timedelta(seconds=60)
    )
    result: dict[str, object] = {}
    params = weights(rank)  # rank 1 starts elsewhere
    optimizer = OffloadAdamW(params[:3], lr=0.1, distributed=True, max_grad_norm=0.5)
    optimizer.add_param_group({"params": params[3:], "lr": 0.05})
    result["start"] = [p.detach().clone() for p in params]
    train(params, optimizer, rank, steps=4)
    result["end"], result["norm"] = [p.detach() for p in params], optimizer.last_grad_norm
    result["grads"] = [p.grad for p in params]
    base = torch.nn.Parameter(torch.zeros(4))
    expanded = OffloadAdamW([base], lr=0.1, distributed=True)
    base.grad = torch.full((1,), 1.0 + rank).expand(4)
    expanded.step()
    result["expanded"] = base.grad
    low = torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    uneven = OffloadAdamW([low], distributed=True, accumulation_steps=None, accumulate_fp32=True)
    for part in range(2 - rank):  # rank 0 sums two, in fp32; rank 1 has one, in bfloat16
        (low * torch.linspace(0.1, 0.7 + part, 50).bfloat16()).sum().backward()
    uneven.step()
    result["uneven"] = low.grad
    result["refusals"] = refusals(rank)
    dist.barrier()
    if rank == 0:
        last = [torch.nn.Parameter(torch.ones(2))]
        alone = OffloadAdamW(last, distributed=True)
    else:
        alone = OffloadAdamW([torch.nn.Parameter(torch.ones(2))], distributed=True)
        dist.destroy_process_group()
    if rank == 0:
        last[0].grad = torch.ones(2)
        result["left alone"] = outcome(alone.step)
        result["left weights"] = last[0].detach()
    torch.save(result, f"{folder}/{rank}.pt")
    # Without destructors: those of a group whose other rank has gone may end the process by std::terminate.
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def average(step: int, index: int, dtype: torch.dtype) -> Tensor | None:
    found = [gradients(step, rank)[index] for rank in range(RANKS)]
    if all(each is None for each in found):
        return None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    total = sum(torch.zeros(SHAPES[index], dtype=wide) if g is None else g.to(wide) for g in found)
    return (total / RANKS).to(dtype)


def test_every_rank_starts_from_the_weights_of_rank_0(ranks):
    for rank in ranks:
        for mine, expected in zip(rank["start"], weights(0), strict=True):
            assert torch.equal(mine, expected)


def test_it_is_one_process_on_the_averages(ranks):
    params = weights(0)
    optimizer = OffloadAdamW(params[:3], lr=0.1, max_grad_norm=0.5)
    optimizer.add_param_group({"params": params[3:], "lr": 0.05})
    for step in range(4):
        for index, (param, dtype) in enumerate(zip(params, DTYPES, strict=True)):
            param.grad = average(step, index, dtype)
        optimizer.step()
    for rank in ranks:
        assert rank["norm"] == optimizer.last_grad_norm
        for mine, grad, expected in zip(rank["end"], rank["grads"], params, strict=True):
            assert torch.equal(mine, expected)
            assert torch.equal(grad, expected.grad)


def test_it_is_torch_s_adamw_in_float64(ranks):
    params = [torch.nn.Parameter(p.detach().double()) for p in weights(0)]
    optimizer = torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:], "lr": 0.05}], lr=0.1)
    for step in range(4):
        for index, (param, dtype) in enumerate(zip(params, DTYPES, strict=True)):
            grad = average(step, index, dtype)
            param.grad = None if grad is None else grad.double()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    for mine, expected, dtype in zip(ranks[0]["end"], params, DTYPES, strict=True):
        half = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 3e-7)
        torch.testing.assert_close(mine.double(), expected.detach(), rtol=half, atol=half)


def test_an_expanded_gradient_is_averaged_too(ranks):
    for rank in ranks:
        assert rank["expanded"].tolist() == [1.5] * 4


def test_a_gradient_is_rounded_on_all_ranks_or_on_none(ranks):
    parts = [torch.linspace(0.1, end, 50).bfloat16().float() for end in (0.7, 1.7, 0.7)]
    expected = sum(parts) / 2
    assert all(rank["uneven"].dtype is torch.float32 for rank in ranks)
    assert all(torch.equal(rank["uneven"], expected) for rank in ranks)


def test_what_one_rank_cannot_do_no_rank_does(ranks):
    for number, rank in enumerate(ranks):
        found = rank["refusals"]
        assert found["other shapes"].startswith("ArgumentError: [OffloadAdamW] params: with distributed=True")
        assert "ranks [1] differ" in found["other shapes"]
        expected = "ArgumentTypeError" if number else "StateError: [OffloadAdamW.step] another rank has"
        assert found["sparse on one rank"].startswith(expected)
        assert found["weights"] == "[1.0, 1.0, 1.0]"
        assert found["scaler"].startswith("StateError: [OffloadAdamW.step] a GradScaler")


def test_a_rank_that_is_gone_is_an_error_and_loses_nothing(ranks):
    assert ranks[0]["left alone"].startswith("StateError: [OffloadAdamW] an exchange with the other ranks")
    assert ranks[0]["left weights"].tolist() == [1.0, 1.0]


def test_it_needs_a_process_group():
    with pytest.raises(OptionError, match="init_process_group"):
        OffloadAdamW([torch.nn.Parameter(torch.ones(2))], distributed=True)


def test_a_group_of_one_is_training_by_itself(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", world_size=1, rank=0)
    try:
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = OffloadAdamW([param], lr=0.1, weight_decay=0.0, distributed=True)
        param.grad = torch.tensor([1.0, math.nan])
        optimizer.step()
        assert param[0].item() == pytest.approx(0.9)
    finally:
        dist.destroy_process_group()
